#!/bin/bash
# A model that takes 200 s to load, with a sign of progress in between, is left alone by the unit's bounds: 90 s for a start, 30 s for the watchdog.
# layer: ns
# seconds: 290
# needs: programs tiny
. /run/payload/lib.sh
install_programs
configure tiny " kv_memory: 4096 tokens" " threads: 1"
mkdir -p /etc/systemd/system/pagedd.service.d
printf '[Service]\nEnvironment=FAILPOINTS=worker-load=sleep(100000);worker-mapped=sleep(100000)\n' > /etc/systemd/system/pagedd.service.d/test.conf
systemctl daemon-reload
shown() { systemctl show -P "$1" pagedd.service; }
equal "TimeoutStartSec" 1min\ 30s "$(shown TimeoutStartUSec)"
systemctl start pagedd
equal "WatchdogSec" 30s "$(shown WatchdogUSec)"
pid=$(shown MainPID)
start=$SECONDS
within 240 models_ready
say "ready after $((SECONDS - start)) s"
[ $((SECONDS - start)) -ge 195 ] || die "it did not take long"
equal "the daemon" "$pid" "$(shown MainPID)"
equal "restarts" 0 "$(shown NRestarts)"
add_tenant acme --model tiny
complete "$port_acme" "$key_acme" tiny 20 > /dev/null
systemctl stop pagedd.socket pagedd.service
