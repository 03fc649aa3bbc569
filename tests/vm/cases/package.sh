#!/bin/bash
# The package behaves: fresh, configured, upgraded under load, removed, back again, purged.
# layer: ns
# seconds: 240
# needs: deb tiny
. /run/payload/lib.sh
deb=$payload/deb/pagedd.deb
active() { systemctl is-active pagedd.service; }
state() { systemctl is-enabled pagedd.service 2>/dev/null || true; }

say "fresh, without a model: nothing is started, nothing fails, and it says what to do"
dpkg -i "$deb" > /tmp/install 2>&1 || { cat /tmp/install; die "dpkg -i"; }
grep -q 'systemctl enable --now pagedd' /tmp/install || { cat /tmp/install; die "it does not say what to do"; }
equal "state without a model" "disabled inactive" "$(state) $(active || true)"
equal "failed units" "" "$(systemctl --failed --no-legend)"
equal "owner of the state directory" "pagedd:pagedd 750" "$(stat -c '%U:%G %a' /var/lib/pagedd)"
equal "owner of the configuration" "root:root 644" "$(stat -c '%U:%G %a' /etc/pagedd/pagedd.yaml)"
user=$(id -u pagedd)
for file in man8/pagedd.8 man1/pagedctl-tenant-add.1 man5/pagedd.yaml.5; do
  [ -s "/usr/share/man/$file.gz" ] || die "no manual page $file"
done
bash -c '. /usr/share/bash-completion/completions/pagedctl && complete -p pagedctl' | grep -q pagedctl || die "no completion"
systemd-analyze verify --man=no /usr/lib/systemd/system/pagedd.service /usr/lib/systemd/system/pagedd.socket > /tmp/verify 2>&1 || { cat /tmp/verify; die "units"; }

say "a start without a model says why not"
if systemctl start pagedd 2> /tmp/start; then die "it starts without a model"; fi
journalctl -u pagedd --no-pager | grep -q 'models' || { journalctl -u pagedd --no-pager; die "the log does not name models"; }
systemctl reset-failed

say "configured"
configure tiny "  kv_memory: 4096 tokens" "  threads: 1"
pagedctl config check
systemctl enable --now pagedd
within 20 models_ready
add_tenant acme --model tiny
text=$(complete "$port_acme" "$key_acme" tiny 8)
[ -n "$text" ] || die "an empty completion"

say "upgraded while requests come"
python3 "$payload/tools/ask.py" --port "$port_acme" --key "$key_acme" --model tiny --seconds 150 --rate 10 > /tmp/asked &
asking=$!
before=$(systemctl show -P MainPID pagedd)
within 10 test -s /tmp/asked
dpkg -i "$deb" > /tmp/upgrade 2>&1 || { cat /tmp/upgrade; die "the upgrade"; }
[ "$(systemctl show -P MainPID pagedd)" != "$before" ] || die "the daemon was not restarted"
equal "state after the upgrade" "enabled active" "$(state) $(active)"
kill -TERM "$asking"
wait "$asking" || { tail -n 5 /tmp/asked; die "requests were lost"; }
tail -n 1 /tmp/asked
equal "the text" "$text" "$(complete "$port_acme" "$key_acme" tiny 8)"

say "an upgrade keeps what the operator changed, and starts nothing that was stopped or disabled"
sum=$(sha256sum < /etc/pagedd/pagedd.yaml)
systemctl disable --now pagedd.service pagedd.socket
dpkg -i "$deb" > /tmp/upgrade 2>&1 || { cat /tmp/upgrade; die "the upgrade"; }
equal "state" "disabled inactive" "$(state) $(active || true)"
equal "the configuration" "$sum" "$(sha256sum < /etc/pagedd/pagedd.yaml)"
systemctl enable --now pagedd
within 20 models_ready

say "removed: programs go, configuration and state stay"
main=$(systemctl show -P MainPID pagedd)
dpkg -r pagedd > /tmp/remove 2>&1 || { cat /tmp/remove; die "dpkg -r"; }
[ ! -e "/proc/$main" ] || die "the daemon runs on"
if pgrep -l pagedd; then die "a process of it runs on"; fi
[ ! -e /usr/bin/pagedd ] && [ ! -e /run/pagedd ] || die "something is left"
[ -e /etc/pagedd/pagedd.yaml ] && [ -e /var/lib/pagedd/control.db ] || die "configuration or state is gone"

say "back again: it is started, with its tenants"
dpkg -i "$deb" > /tmp/install 2>&1 || { cat /tmp/install; die "dpkg -i"; }
equal "state" "enabled active" "$(state) $(active)"
within 20 models_ready
equal "the text" "$text" "$(complete "$port_acme" "$key_acme" tiny 8)"

say "purged: nothing is left but the user"
dpkg --purge pagedd > /tmp/purge 2>&1 || { cat /tmp/purge; die "dpkg --purge"; }
left=$(find / -xdev \( -path /proc -o -path /sys -o -path /run/payload -o -path /tmp \) -prune -o -name '*paged*' -print; ls -d /var/lib/systemd/deb-systemd-helper-*/*paged* 2>/dev/null || true)
equal "left behind" "" "$left"
if pgrep -l pagedd; then die "a process of it runs on"; fi
equal "the user" "$user" "$(id -u pagedd)"
equal "failed units" "" "$(systemctl --failed --no-legend)"
