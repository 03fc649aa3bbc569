#!/bin/bash
# A stuck engine thread is restarted within twice WatchdogSec, and its requests go on; a slow step and a long load are not.
# layer: ns
# seconds: 150
# needs: programs tiny
. /run/payload/lib.sh
install_programs
watchdog=4
configure tiny " kv_memory: 4096 tokens" " threads: 1"
mkdir -p /etc/systemd/system/pagedd.service.d
drop_in() { printf '[Service]\nWatchdogSec=%s\nTimeoutStartSec=3\n%s\n' "$watchdog" "$1" > /etc/systemd/system/pagedd.service.d/test.conf; systemctl daemon-reload; }
shown() { systemctl show -P "$1" pagedd.service; }
now() { date +%s%N; }

say "a load that takes longer than TimeoutStartSec and WatchdogSec together is left alone"
drop_in ""
systemctl start pagedd
within 20 models_ready
add_tenant acme --model tiny
text=$(complete "$port_acme" "$key_acme" tiny 200)
systemctl stop pagedd.service
drop_in 'Environment=FAILPOINTS=worker-load=sleep(12000)'
systemctl start pagedd
pid=$(shown MainPID)
within 40 models_ready
equal "the daemon after a long load" "$pid" "$(shown MainPID)"
equal "restarts" 0 "$(shown NRestarts)"

say "a step that takes longer than WatchdogSec twice is left alone"
worker=$(pagedctl --json status | field 'v["models"][0]["worker_pid"]')
kill -STOP "$worker"
complete "$port_acme" "$key_acme" tiny 200 > /tmp/slow &
asking=$!
stopped=$SECONDS
over() { [ $((SECONDS - stopped)) -gt $((2 * watchdog + 2)) ]; }
within 30 over
kill -CONT "$worker"
wait "$asking"
equal "the text of the slow step" "$text" "$(cat /tmp/slow)"
equal "restarts" 0 "$(shown NRestarts)"

say "an engine that hangs is not"
systemctl stop pagedd.service
# The first daemon hangs after so many turns; its marks keep those that follow from it.
printf 'engine-turn=100*off->sleep(600000)\n' > /var/lib/pagedd/points
chown pagedd:pagedd /var/lib/pagedd/points
drop_in 'Environment=FAILPOINTS_BY_START=/var/lib/pagedd/points'
systemctl start pagedd
pid=$(shown MainPID)
within 20 models_ready
start=$(now)
python3 "$payload/tools/ask.py" --port "$port_acme" --key "$key_acme" --model tiny --rate 1 --seconds 1 --tokens 200 > /tmp/asked &
asking=$!
replaced() { [ "$(shown NRestarts)" = 1 ] && [ "$(shown MainPID)" != 0 ]; }
within 30 replaced
ended=$(journalctl -u pagedd --no-pager -o short-unix | grep -F "Watchdog timeout" | head -n 1 | cut -d' ' -f1)
[ -n "$ended" ] || die "it was not the watchdog"
at_most "seconds from the request that hangs its engine to the end of the daemon" "$((2 * watchdog))" "$(python3 -c "print($ended - $start / 1e9)")"
journalctl -u pagedd --no-pager | grep -F "it hangs"
wait "$asking" || { cat /tmp/asked; die "the request was lost"; }
tail -n 1 /tmp/asked
systemctl stop pagedd.socket pagedd.service
