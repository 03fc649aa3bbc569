#!/bin/bash
# A tenant that floods its port under limits of CPU and memory costs its neighbour at most half of its time to the first token, and nothing else.
# layer: uml
# seconds: 1200
# memory: 6144
# needs: deb model
. /run/payload/lib.sh
requests=100   # in each of two rounds with and two without the flood
dpkg -i "$payload/deb/pagedd.deb" > /tmp/install 2>&1 || { cat /tmp/install; die "dpkg -i"; }
configure smollm2 "  kv_memory: 16384 tokens" "gateway: { max_body: 64MiB }"
systemctl start pagedd
within 90 models_ready
add_tenant a --model smollm2 --kv-floor 20% --kv-ceiling 50% --cpu-max 50% --memory-max 256MiB
add_tenant b --model smollm2 --kv-floor 20%
main=$(systemctl show -P MainPID pagedd)

# What clients take of the one CPU is not what a host would feel of them: they get a small part of it.
flood() {
  systemd-run --quiet --unit=flood --property=CPUWeight=20 --property=StandardOutput=file:/tmp/flooded \
    python3 "$payload/tools/flood.py" --port "$port_a" --key "$key_a" --model smollm2 --seconds 600
}
measure() { # NAME SEED
  # While b waits the flood has the CPU, up to its limit, and b's next request comes in the midst of it.
  python3 "$payload/tools/first_token.py" --port "$port_b" --key "$key_b" --model smollm2 --requests "$requests" --pause 0.4 --seed "$2" \
    --json "/tmp/$1"
}
# Caches of files and of the model's first steps are warm.
python3 "$payload/tools/first_token.py" --port "$port_b" --key "$key_b" --model smollm2 --requests 10 --seed 9
for round in 1 2; do
  say "round $round, alone"
  measure "alone$round" "$round"
  say "round $round, beside the flood"
  flood
  measure "beside$round" "1$round"
  equal "the flood still comes" active "$(systemctl is-active flood)"
  systemctl stop flood
  cat /tmp/flooded
  sed -n 's/^\(usage_usec\|nr_throttled\)/a: &/p' /sys/fs/cgroup/system.slice/pagedd.service/tenants/a/cpu.stat
done
# A flood that asks nothing of the walls would show nothing.
held=$(sed -n 's/^nr_throttled //p' /sys/fs/cgroup/system.slice/pagedd.service/tenants/a/cpu.stat)
killed=$(pagedctl --json tenant show a | field 'v["tenant"]["gateway"].get("restarts", 0)')
say "a's gateway was held up $held times, and started anew $killed times"
[ "$((held + killed))" -ge 20 ] || die "the flood never met a wall"

say "how soon the gateway is back after a kill, five times: once those of the flood are a minute ago"
sleep 61
running() { [ "$(pagedctl --json tenant show a | field 'v["tenant"]["gateway"]["pid"]')" != None ]; }
for _ in 1 2 3 4 5; do
  within 20 running
  gateway=$(pagedctl --json tenant show a | field 'v["tenant"]["gateway"]["pid"]')
  kill -KILL "$gateway"
  python3 - "$port_a" <<'PY'
import http.client, sys, time
start = time.monotonic()
while True:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=1)
        connection.request("GET", "/readyz")
        if connection.getresponse().status == 200:
            break
    except (OSError, http.client.HTTPException):
        pass
    if time.monotonic() - start > 10:
        sys.exit("the gateway did not come back")
    time.sleep(0.01)
took = time.monotonic() - start
print(f"back after {took:.2f} s (bar 1.0)")
sys.exit(took > 1.0)
PY
done

equal "the daemon" "$main" "$(systemctl show -P MainPID pagedd)"
pagedctl tenant show a
python3 - <<'PY'
import json, sys
sys.path.insert(0, "/run/payload/tools")
from first_token import percentile
of = lambda name: [time for round in "12" for time in json.load(open(f"/tmp/{name}{round}"))["times"]]
alone, beside = of("alone"), of("beside")
ratio = percentile(beside, 99) / percentile(alone, 99)
print(f"p50 alone {percentile(alone, 50):.1f} ms, beside {percentile(beside, 50):.1f} ms; p99 alone {percentile(alone, 99):.1f} ms, "
      f"beside {percentile(beside, 99):.1f} ms: {ratio:.2f} times (bar 1.5), {len(alone)} and {len(beside)} requests")
sys.exit(ratio > 1.5 or min(len(alone), len(beside)) < 200)
PY
