#!/bin/bash
# The tcg layer has what its cases rely on: two CPUs, and the controllers cpuset, cpu, io, memory and pids.
# layer: tcg
# seconds: 180
. /run/payload/lib.sh
equal "state" running "$(systemctl is-system-running)"
equal "CPUs" 2 "$(nproc)"
for name in cpuset cpu io memory pids; do
  grep -qw "$name" /sys/fs/cgroup/cgroup.controllers || die "no controller $name"
done
journal_clean
