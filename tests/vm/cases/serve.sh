#!/bin/bash
# Installed, configured, started: two tenants chat with the real model, over reload, restart and stop; purged, and nothing was an error.
# layer: uml
# seconds: 600
# memory: 2048
# needs: deb model
. /run/payload/lib.sh

say "dpkg -i"
dpkg -i "$payload/deb/pagedd.deb" > /tmp/install 2>&1 || { cat /tmp/install; die "dpkg -i"; }
configure smollm2 "  kv_memory: 4096 tokens"
pagedctl config check

say "systemctl start pagedd"
systemctl start pagedd
equal "its user" pagedd "$(ps -o user= -p "$(systemctl show -P MainPID pagedd)")"
within 90 models_ready
systemctl status --no-pager --lines=0 pagedd

say "systemd-analyze security pagedd"
systemd-analyze security --no-pager pagedd | tail -n 1
at_most "exposure" 2.5 "$(systemd-analyze security --no-pager pagedd | sed -n 's/.*Overall exposure level for pagedd.service: \([0-9.]*\).*/\1/p')"

say "pagedctl tenant add, twice, and a chat on each port"
add_tenant acme --model smollm2 --kv-floor 20%
add_tenant globex --model smollm2 --kv-floor 20%
pagedctl tenant list
acme=$(chat "$port_acme" "$key_acme" smollm2 'Which city is the capital of France?')
globex=$(chat "$port_globex" "$key_globex" smollm2 'What is two plus two?')
printf 'acme: %s\nglobex: %s\n' "$acme" "$globex"
[[ $acme == *Paris* ]] || die "that is no answer"
[ -n "$globex" ] || die "globex got no answer"
again() {
  equal "acme's answer" "$acme" "$(chat "$port_acme" "$key_acme" smollm2 'Which city is the capital of France?')"
  equal "globex's answer" "$globex" "$(chat "$port_globex" "$key_globex" smollm2 'What is two plus two?')"
}
pid() { systemctl show -P MainPID pagedd; }

say "systemctl reload"
before=$(pid)
systemctl reload pagedd
equal "the daemon after a reload" "$before" "$(pid)"
again

say "systemctl restart"
systemctl restart pagedd
[ "$(pid)" != "$before" ] || die "the same daemon after a restart"
within 90 models_ready
again
pagedctl status

say "systemctl stop"
systemctl stop pagedd
equal "state" inactive "$(systemctl is-active pagedd.service || true)"
if pgrep -l pagedd; then die "a process of it runs on"; fi
equal "its cgroup" "" "$(ls -d /sys/fs/cgroup/system.slice/pagedd.service 2>/dev/null || true)"

say "dpkg --purge"
dpkg --purge pagedd > /tmp/purge 2>&1 || { cat /tmp/purge; die "dpkg --purge"; }
[ ! -e /var/lib/pagedd ] && [ ! -e /etc/pagedd ] && [ ! -e /run/pagedd ] || die "something is left"
equal "failed units" "" "$(systemctl --failed --no-legend)"
journal_clean
