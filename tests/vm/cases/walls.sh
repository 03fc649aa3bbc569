#!/bin/bash
# Limits of a tenant bind on its processes, change live, and go with it; nothing above the delegated cgroup is written, nothing is left behind.
# layer: uml
# seconds: 600
# memory: 2048
# needs: programs tiny
. /run/payload/lib.sh
. /run/payload/tools/walls.sh
install -t /usr/bin "$payload"/programs/*
useradd --system --no-create-home pagedd
configure tiny " kv_memory: 4096 tokens" "cgroups: required" "gateway: { max_body: 64MiB }"

say "a service with Delegate=yes, as a user without privileges"
# Another delegated unit, so that systemd has enabled above what a delegation needs before anything is looked at.
systemd-run --quiet --unit=other -p Delegate=yes sleep infinity
start_pagedd -p User=pagedd
before=$(above)
within 60 models_ready
status=$(pagedctl --json status)
# This kernel has no cpuset; all that a tenant could starve others by is there.
equal "walls" "this host gives no controller cpuset" "$(field 'v["walls"]["reason"]' <<< "$status")"
equal "processes in the delegated cgroup itself" "" "$(cat "$service/cgroup.procs")"
main=$(systemctl show -P MainPID pagedd)
equal "the daemon's cgroup" "$main" "$(cat "$service/daemon/cgroup.procs")"
equal "weights" "10000 10000 100" "$(echo $(cat "$service"/{daemon,workers,tenants}/cpu.weight))"
worker=$(field 'v["models"][0]["worker_pid"]' <<< "$status")
equal "the worker's cgroup" "$worker" "$(cat "$service"/workers/tiny-0/*/cgroup.procs)"
[ -n "$(cat "$service/templates/cgroup.procs")" ] || die "no template process in its cgroup"

say "a tenant with limits, and one without"
add_tenant a --kv-floor 20% --cpu-max 50% --cpu-weight 50 --memory-max 64MiB --pids-max 24
add_tenant b
within 20 ready a
within 20 ready b
equal "cpu.max" "50000 100000" "$(cat "$tenants/a/cpu.max")"
equal "cpu.weight" 50 "$(cat "$tenants/a/cpu.weight")"
equal "memory.max" $((64 << 20)) "$(cat "$tenants/a/memory.max")"
[ ! -e "$tenants/a/memory.swap.max" ] || equal "memory.swap.max" 0 "$(cat "$tenants/a/memory.swap.max")"
equal "pids.max" 24 "$(cat "$tenants/a/pids.max")"
equal "limits of b" "max 100000 max max" "$(echo $(cat "$tenants/b/cpu.max" "$tenants/b/memory.max" "$tenants/b/pids.max"))"
equal "the gateway's cgroup" "$(gateway a)" "$(cat "$tenants/a/cgroup.procs")"
complete "$port_a" "$key_a" tiny 8 > /dev/null
complete "$port_b" "$key_b" tiny 8 > /dev/null
pagedctl tenant show a

say "cpu.max binds, live"
share 25 60 a 4
pagedctl tenant set a --cpu-max 20% > /tmp/set
grep -q '^cpu.max .*20%' /tmp/set || die "tenant set does not show it"
share 8 28 a 4
pagedctl tenant set a --cpu-max max > /dev/null
share 65 110 a 4
[ "$(show a '["usage"]["throttled_us"]')" -gt 500000 ] || die "tenant show knows of no throttling"

say "memory.max binds, live, and the gateway is back"
kills=$(show a '["usage"]["oom_kills"]')
inside a python3 -c 'b = bytearray(30 << 20)' || die "30 MiB do not fit into 64 MiB"
if inside a python3 -c 'b = bytearray(100 << 20)' 2>/dev/null; then die "100 MiB fit into 64 MiB"; fi
[ "$(show a '["usage"]["oom_kills"]')" -gt "$kills" ] || die "tenant show knows of no kill"
pagedctl tenant set a --memory-max 200MiB > /dev/null
inside a python3 -c 'b = bytearray(100 << 20)' || die "100 MiB do not fit into 200 MiB"
within 10 ready a
complete "$port_a" "$key_a" tiny 8 > /dev/null
# The gateway itself: more than it may have is in one request.
pagedctl tenant set a --memory-max 24MiB > /dev/null
was=$(gateway a)
head -c 30000000 /dev/zero | tr '\0' ' ' > /tmp/body
for _ in 1 2 3 4; do
  curl -s -o /dev/null --max-time 20 "http://127.0.0.1:$port_a/v1/completions" -H "authorization: Bearer $key_a" \
    -H 'content-type: application/json' --data-binary @/tmp/body || true &
done
wait
within 10 ready a
say "the gateway was $was and is $(gateway a); killed $(show a '["usage"]["oom_kills"]') times in all"
[ "$(gateway a)" != "$was" ] || die "four bodies of 30 MB fit into 24 MiB"
equal "the daemon" "$main" "$(systemctl show -P MainPID pagedd)"
complete "$port_b" "$key_b" tiny 8 > /dev/null
pagedctl tenant set a --memory-max max > /dev/null
equal "memory.max" max "$(cat "$tenants/a/memory.max")"

say "pids.max binds, live"
threads='import threading, time, sys
try:
    for n in range(40): threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()
except RuntimeError: sys.exit(3)'
code=0; inside a python3 -c "$threads" || code=$?
equal "exit code of 40 threads under pids.max 24" 3 "$code"
[ "$(show a '["usage"]["pids_refused"]')" -gt 0 ] || die "tenant show knows of no refusal"
pagedctl tenant set a --pids-max 100 > /dev/null
inside a python3 -c "$threads" || die "40 threads do not fit into 100"

say "I/O: rates of a device are written and taken away"
pagedctl tenant set a --io-max "$(cat /sys/block/ubda/dev) wbps=1MiB" > /dev/null
[[ $(cat "$tenants/a/io.max") == *wbps=1048576* ]] || die "io.max is '$(cat "$tenants/a/io.max")'"
pagedctl tenant set a --io-max max > /dev/null
equal "io.max" "" "$(cat "$tenants/a/io.max")"
refused "sda.*it names no device" tenant set a --io-max "sda wbps=1MiB"
refused "/dev/null is no block device" tenant set a --io-max "/dev/null wbps=1MiB"

say "what cannot be kept is refused, or said to be none"
start_inside a python3 -c "import threading, time
held = bytearray(30 << 20)
for n in range(9): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
open('/tmp/holds', 'w').close()
time.sleep(600)"
within 20 test -e /tmp/holds
refused "memory.max 16777216 is below present use, [0-9]+" tenant set a --memory-max 16MiB
refused "pids.max 5 is below present use, [0-9]+" tenant set a --pids-max 5
kill -KILL "$started"
equal "memory.max after a refusal" max "$(cat "$tenants/a/memory.max")"
pagedctl tenant set a --cpuset 0 > /tmp/set
grep -q 'NOT ENFORCED .*cpuset' /tmp/set || { cat /tmp/set; die "that cpuset is not enforced is not said"; }
add_tenant c --cpuset 0
equal "lines in the log of c's cpuset" 1 "$(journalctl -u pagedd --no-pager | grep -c 'a limit is not enforced.*tenant="c"')"
pagedctl tenant remove c --force > /dev/null
pagedctl tenant set a --cpuset default --cpu-max 30% --memory-max 100MiB > /dev/null

say "metrics"
pagedctl metrics > /tmp/metrics
for line in '^pagedd_walls 0' '^pagedd_tenant_walls\{tenant="a",.*\} 1' '^pagedd_tenant_oom_kills_total\{tenant="a",.*\} [1-9]' \
  '^pagedd_tenant_throttled_microseconds_total\{tenant="a",' '^pagedd_tenant_memory_bytes\{tenant="b",.*\} [1-9]' \
  '^pagedd_worker_device_bytes\{.*kind="weights"\} [1-9]' '^pagedd_worker_memory_bytes\{.*\} [1-9]'; do
  grep -Eq "$line" /tmp/metrics || { grep -E 'walls|tenant_|worker_' /tmp/metrics; die "no metric $line"; }
done

say "a killed worker's cgroup goes, and the next one has its own"
leaf=$(ls "$service/workers/tiny-0" | grep -- -)
kill -KILL "$worker"
within 20 models_ready
complete "$port_b" "$key_b" tiny 8 > /dev/null
[ ! -e "$service/workers/tiny-0/$leaf" ] || die "$leaf is still there"
equal "leaves of workers" 1 "$(ls -d "$service"/workers/tiny-0/*-* | wc -l)"

say "a killed daemon's successor puts the same limits into force"
kill -KILL "$main"
within 60 another_daemon "$main"
within 60 models_ready
within 20 ready a
equal "cpu.max" "30000 100000" "$(cat "$tenants/a/cpu.max")"
equal "memory.max" $((100 << 20)) "$(cat "$tenants/a/memory.max")"
equal "processes in the delegated cgroup itself" "" "$(cat "$service/cgroup.procs")"
complete "$port_a" "$key_a" tiny 8 > /dev/null

say "nothing above was written"
equal "what is above" "$before" "$(above)"

say "a removed tenant leaves nothing"
pagedctl tenant remove a --force
[ ! -e "$tenants/a" ] || die "its cgroup is there"
equal "tenants" b "$(pagedctl --json tenant list | field '" ".join(t["name"] for t in v["tenants"])')"
complete "$port_b" "$key_b" tiny 8 > /dev/null

say "the end"
systemctl stop pagedd
[ ! -e "$service" ] || die "its cgroup is there"

say "without a delegation: said, and a start where the configuration requires one is refused"
code=0; pagedd --state-dir /tmp/state 2> /tmp/log || code=$?
equal "exit code of a start by hand" 78 "$code"
grep -q 'cgroups: required, but cgroup .* is not pagedd.s to divide: systemd manages it; start pagedd as a service with Delegate=yes' /tmp/log ||
  { cat /tmp/log; die "it does not say why"; }
sed -i 's/^cgroups: .*/cgroups: auto/' /etc/pagedd/pagedd.yaml
undelegated="-p Type=notify -p NotifyAccess=main -p StateDirectory=pagedd -p RuntimeDirectory=pagedd"
systemd-run --quiet --unit=pagedd $undelegated pagedd --config /etc/pagedd/pagedd.yaml
within 60 models_ready
pagedctl status | grep -E '^walls +reduced: cgroup .* systemd manages it' || die "status does not say it"
pagedctl tenant set b --cpu-max 50% | grep -E 'NOT ENFORCED +walls are reduced: .*systemd manages it' || die "tenant set does not say it"
pagedctl metrics | grep -q '^pagedd_walls 0' || die "the gauge is not 0"
equal "loud lines in the log" 1 "$(journalctl -u pagedd --no-pager | grep -c 'walls: REDUCED.*systemd manages it')"
equal "its cgroup has no child" "" "$(ls -d "$service"/*/ 2>/dev/null || true)"
systemctl stop pagedd

say "without systemd: a gateway of a killed daemon that hangs is ended, also where its tenant has the next one"
systemd-run --quiet --unit=pagedd -p Type=exec -p Delegate=yes -p StateDirectory=pagedd -p RuntimeDirectory=pagedd \
  pagedd --config /etc/pagedd/pagedd.yaml
within 60 models_ready
within 20 ready b
equal "who starts it again" keeper "$(pagedctl --json status | field 'v["supervisor"]')"
old=$(gateway b)
equal "the gateway's cgroup" "$old" "$(cat "$tenants/b/cgroup.procs")"
kill -STOP "$old"
killed=$(pagedctl --json status | field 'v["pid"]')
kill -KILL "$killed"
next_daemon() { [ "$(pagedctl --json status | field 'v["pid"]')" != "$killed" ]; }
within 60 next_daemon
within 60 models_ready
within 20 ready b
[ "$(gateway b)" != "$old" ] || die "b has its old gateway"
grep -qx "$old" "$tenants/b/cgroup.procs" || die "the old gateway did not hang"
alone() { [ "$(gateway b)" = "$(cat "$tenants/b/cgroup.procs")" ]; }
within 20 alone
complete "$port_b" "$key_b" tiny 8 > /dev/null
systemctl stop pagedd

say "a tenant that can have no cgroup is not served where cgroups are required"
sed -i 's/^cgroups: .*/cgroups: required/' /etc/pagedd/pagedd.yaml
start_pagedd -p "ExecStartPre=/bin/sh -c 'mkdir $tenants && echo 0 > $tenants/cgroup.max.descendants'"
within 60 models_ready
pagedctl tenant show b > /tmp/show
grep -q 'it has no cgroup, and the configuration says .cgroups: required.' /tmp/show || { cat /tmp/show; die "it does not say why"; }
refused "is not served: it has no cgroup" tenant set b --cpu-max max
if curl -s -o /dev/null --max-time 5 "http://127.0.0.1:$port_b/v1/models"; then die "its port answers"; fi
refused "Resource temporarily unavailable" tenant add d
systemctl stop pagedd
