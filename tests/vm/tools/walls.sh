# Words of cases about cgroups: sourced after lib.sh.
service=/sys/fs/cgroup/system.slice/pagedd.service
tenants=$service/tenants

# start_pagedd [PROPERTY...]: as a service, by the payload's programs.
start_pagedd() {
  systemd-run --quiet --unit=pagedd "${unit_properties[@]}" "$@" pagedd --config /etc/pagedd/pagedd.yaml
}

# above: every file of the cgroups above the service's that can be written, with what is in it.
above() {
  local file
  for file in /sys/fs/cgroup/* /sys/fs/cgroup/system.slice/*; do
    case ${file##*/} in
      # Whoever runs this is in there; the others cannot be read, or tell of time.
      cgroup.procs | cgroup.threads | *.pressure | memory.reclaim | cgroup.kill | memory.peak) continue ;;
    esac
    [ -f "$file" ] && [ "$(stat -c %A "$file" | cut -c3)" = w ] || continue
    printf '%s: %s\n' "$file" "$(tr '\n' ' ' < "$file")"
  done
}

# show TENANT PATH: a part of what `tenant show` says of its wall.
show() { pagedctl --json tenant show "$1" | field "v[\"wall\"]$2"; }

gateway() { pagedctl --json tenant show "$1" | field 'v["tenant"]["gateway"]["pid"]'; }

ready() { [ "$(pagedctl --json tenant show "$1" | field 'v["tenant"]["state"]["is"]')" = ready ]; }

another_daemon() {
  local now
  now=$(systemctl show -P MainPID pagedd)
  [ "$now" != "$1" ] && [ "$now" != 0 ] && pagedctl status
}

# inside TENANT COMMAND...: runs it in the tenant's cgroup.
inside() {
  local tenant=$1; shift
  sh -c 'echo $$ > "$0/cgroup.procs" && exec "$@"' "$tenants/$tenant" "$@"
}

# start_inside TENANT COMMAND...: the same beside what follows; sets `started`, its process.
start_inside() {
  local tenant=$1; shift
  sh -c 'echo $$ > "$0/cgroup.procs" && exec "$@"' "$tenants/$tenant" "$@" &
  started=$!
}

# share LEAST MOST TENANT SECONDS: percent of a CPU that a process gets that wants all of one.
share() {
  local from percent
  now() { echo "$(sed -n 's/^usage_usec //p' "$tenants/$1/cpu.stat")" "$(cut -d' ' -f1 /proc/uptime)"; }
  start_inside "$3" sh -c 'while :; do :; done'
  sleep 0.5
  from=$(now "$3")
  sleep "$4"
  # A sleep may take longer than it was to.
  percent=$(python3 -c 'import sys; u, t, v, s = map(float, sys.argv[1:]); print(int((v - u) / (s - t) / 1e4))' $from $(now "$3"))
  kill -KILL "$started"
  wait "$started" 2>/dev/null || true
  printf 'a spinner got %s %% of a CPU (%s to %s)\n' "$percent" "$1" "$2"
  [ "$percent" -ge "$1" ] && [ "$percent" -le "$2" ] || die "$percent % is not from $1 to $2 %"
}

# refused PATTERN ARGUMENT...: pagedctl refuses it and says so.
refused() {
  local pattern=$1; shift
  if pagedctl "$@" > /tmp/refused 2>&1; then die "not refused: pagedctl $*"; fi
  grep -Eq "$pattern" /tmp/refused || { cat /tmp/refused; die "pagedctl $* does not say '$pattern'"; }
}
