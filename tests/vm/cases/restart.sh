#!/bin/bash
# `systemctl restart` under 100 connections a second refuses none, loses no request, and loads no weights.
# layer: ns
# seconds: 150
# needs: programs tiny
. /run/payload/lib.sh
install_programs
configure tiny " kv_memory: 8192 tokens" " threads: 1" "log: {level: warn}"
systemctl start pagedd
within 20 models_ready
add_tenant acme --model tiny
complete "$port_acme" "$key_acme" tiny 1 > /dev/null
refused() { awk '$1 == "TcpExt:" && !n { for (i = 2; i <= NF; i++) name[i] = $i; n = 1; next } $1 == "TcpExt:" { for (i = 2; i <= NF; i++) if (name[i] == "ListenOverflows" || name[i] == "ListenDrops") sum += $i } END { print sum + 0 }' /proc/net/netstat; }
dropped=$(refused)

python3 "$payload/tools/ask.py" --port "$port_acme" --key "$key_acme" --model tiny --rate 100 --seconds 30 --tokens 1 > /tmp/asked &
asking=$!
within 15 test -s /tmp/asked
for round in 1 2 3; do
  before=$(systemctl show -P MainPID pagedd)
  start=$(date +%s%N)
  systemctl restart pagedd
  say "restart $round: $((($(date +%s%N) - start) / 1000000)) ms"
  [ "$(systemctl show -P MainPID pagedd)" != "$before" ] || die "the same daemon"
  within 20 models_ready
  equal "weights reused" True "$(pagedctl --json status | field 'v["models"][0]["weights_reused"]')"
done
wait "$asking" || { tail -n 20 /tmp/asked; die "requests were lost or refused"; }
tail -n 1 /tmp/asked
equal "connections that found no place in the queue" "$dropped" "$(refused)"
equal "result" success "$(systemctl show -P Result pagedd)"
