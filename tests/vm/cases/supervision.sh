#!/bin/bash
# systemd hears how the daemon is, reloads it, and passes it its admin socket; a bad file changes nothing, and says why.
# layer: ns
# seconds: 90
# needs: programs tiny
. /run/payload/lib.sh
install_programs
configure tiny " kv_memory: 4096 tokens" " threads: 1"
shown() { systemctl show -P "$1" pagedd.service; }
says() { shown StatusText | grep -qF "$1"; }

say "with a bad configuration a command says so soon, and starts nothing for ever"
good=$(cat /etc/pagedd/pagedd.yaml)
echo "retentoin: 1m" > /etc/pagedd/pagedd.yaml
systemctl start pagedd.socket
if pagedctl status; then die "it answers without a configuration"; fi
failed() { [ "$(systemctl is-active pagedd.service)" = failed ]; }
within 10 failed
starts=$(journalctl -u pagedd --no-pager | grep -c "Starting pagedd")
[ "$starts" -le 3 ] || die "$starts starts for one command"
journalctl -u pagedd --no-pager --priority=err | grep -F "pagedd.yaml:1:1: " | head -n 1
systemctl stop pagedd.socket
systemctl reset-failed
printf '%s\n' "$good" > /etc/pagedd/pagedd.yaml

say "the first command starts the daemon"
systemctl start pagedd.socket
equal "service before a command" inactive "$(systemctl is-active pagedd.service || true)"
pagedctl status > /tmp/status
equal "service after a command" active "$(systemctl is-active pagedd.service)"
equal "supervisor" systemd "$(pagedctl --json status | field 'v["supervisor"]')"
equal "the socket" "pagedd:pagedd 660" "$(stat -c '%U:%G %a' /run/pagedd/admin.sock)"
[ ! -e /var/lib/pagedd/admin.sock ] || die "the daemon made a socket of its own"
within 20 models_ready
within 10 says "1 model ready, no tenants"

say "its line says what it does"
add_tenant acme --model tiny
within 10 says "serving 1 tenant on 1 model"
pid=$(shown MainPID)

say "a reload takes effect, and a bad file does not"
configure tiny " kv_memory: 4096 tokens" " threads: 1" "retention: 3m" "listen: 127.0.0.2"
systemctl reload pagedd
equal "retention" 3m "$(pagedctl --json status | field 'v["tenants"][0]["retention"]')"
within 10 says "at the next restart: listen"
echo "retentoin: 1m" > /etc/pagedd/pagedd.yaml
if systemctl reload pagedd; then die "a bad file was taken"; fi
within 10 says "configuration refused: /etc/pagedd/pagedd.yaml:1:1:"
equal "state" active "$(systemctl is-active pagedd.service)"
equal "retention" 3m "$(pagedctl --json status | field 'v["tenants"][0]["retention"]')"
pagedctl status | grep -F "the one before in force"
journalctl --sync
journalctl -u pagedd --no-pager --priority=err | grep -F "the configuration has an error"
configure tiny " kv_memory: 4096 tokens" " threads: 1"
kill -HUP "$pid"
within 10 says "serving 1 tenant on 1 model"
reloaded() { [ "$(pagedctl --json status | field 'v["tenants"][0]["retention"]')" = 10m ]; }
within 10 reloaded
equal "the daemon" "$pid" "$(shown MainPID)"

say "an exposed port, and the socket, over the end of the daemon"
text=$(complete "$port_acme" "$key_acme" tiny 8)
kill -KILL "$pid"
# No refusal: the port is systemd's meanwhile, and whoever asks waits.
code=$(curl -s -o /dev/null -w '%{http_code}' --max-time 30 "http://127.0.0.1:$port_acme/livez")
equal "a request in the moment of death" 200 "$code"
within 20 models_ready
equal "the text" "$text" "$(complete "$port_acme" "$key_acme" tiny 8)"
equal "weights" True "$(pagedctl --json status | field 'v["models"][0]["weights_reused"]')"
equal "restarts" 1 "$(shown NRestarts)"

say "stopped for good, with the socket"
systemctl stop pagedd.socket pagedd.service
equal "state" inactive "$(systemctl is-active pagedd.service || true)"
equal "result" success "$(shown Result)"
if pgrep -l pagedd; then die "a process of it runs on"; fi
[ ! -e /run/pagedd/admin.sock ] || die "the socket's file is left"
