# Runs inside: one case, with its end in the last line. On failure the journal's end goes with it.
payload=/run/payload
. "$payload/case.env"

for _ in $(seq 300); do
  case $(systemctl is-system-running) in running | degraded) break ;; esac
  sleep 0.1
done
# What the machine itself had to complain of, such as modules that no image has, is not the case's.
date +%s.%6N > /run/case.since
echo "@@begin $(cut -d' ' -f1 /proc/uptime)"
timeout --kill-after=2 "$SECONDS_INSIDE" bash "$payload/case.sh"
code=$?
if [ "$code" != 0 ]; then
  [ "$code" = 124 ] && echo "the case did not end within $SECONDS_INSIDE s"
  echo "-- failed units"
  systemctl --failed --no-legend --no-pager
  echo "-- the journal's end"
  journalctl --boot --no-pager --output=short-monotonic --lines=80 --priority=info _TRANSPORT=stdout + _TRANSPORT=journal + _TRANSPORT=syslog
fi
printf '\n@@end %s\n' "$code"
