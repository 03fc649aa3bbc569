#!/bin/bash
# systemd keeps 1,000 descriptors over restarts and kills and passes them on; pagedd's ports are among what it keeps, and leave it with their tenant.
# layer: ns
# seconds: 200
# needs: programs tiny
. /run/payload/lib.sh
install_programs

say "1,000 sockets of a service under the properties of pagedd's unit"
properties=()
for key in FileDescriptorStoreMax LimitNOFILE Restart RestartSec KillMode; do
  properties+=(-p "$(grep "^$key=" /usr/lib/systemd/system/pagedd.service)")
done
systemd-run --quiet --unit=keeps -p Type=notify "${properties[@]}" python3 "$payload/tools/keeps.py" 1000 /run/passed
lines() { [ "$(wc -l < /run/passed)" = "$1" ]; }
within 20 lines 1
equal "stored" 1000 "$(systemctl show -P NFileDescriptorStore keeps)"
systemctl restart keeps
within 20 lines 2
systemctl kill --kill-whom=main --signal=KILL keeps
within 20 lines 3
systemctl restart keeps
within 20 lines 4
equal "what each was passed" "passed 1000 names 1000 bytes 8889" "$(tail -n 3 /run/passed | sort -u)"
equal "stored" 1000 "$(systemctl show -P NFileDescriptorStore keeps)"
systemctl stop keeps

say "ports and arenas of pagedd"
configure tiny " kv_memory: 4096 tokens" " threads: 1"
systemctl start pagedd
within 20 models_ready
stored() { systemctl show -P NFileDescriptorStore pagedd.service; }
before=$(stored)
[ "$before" -ge 4 ] || die "only $before descriptors are stored: arenas, the ledger and the worker are not all there"
tenants=20
for i in $(seq "$tenants"); do pagedctl --json tenant add "t$i" --model tiny --no-auth | field 'v["tenant"]["port"]'; done > /run/ports
equal "stored with $tenants tenants" "$((before + tenants))" "$(stored)"
systemctl restart pagedd
within 20 models_ready
pid=$(systemctl show -P MainPID pagedd)
kill -KILL "$pid"
while read -r port; do
  equal "port $port after a kill" 200 "$(curl -s -o /dev/null -w '%{http_code}' --max-time 30 "http://127.0.0.1:$port/livez")"
done < /run/ports
within 20 models_ready
equal "stored after a restart and a kill" "$((before + tenants))" "$(stored)"
equal "weights reused" True "$(pagedctl --json status | field 'v["models"][0]["weights_reused"]')"
for i in $(seq "$tenants"); do pagedctl tenant remove "t$i" > /dev/null; done
equal "stored once all tenants are gone" "$before" "$(stored)"

say "what is stored is not leaked by a stop"
systemctl stop pagedd.socket pagedd.service
equal "stored" 0 "$(stored)"
