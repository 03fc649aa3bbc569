#!/bin/bash
# The uml layer has what its cases rely on: one CPU with AVX2, and the controllers cpu, io, memory and pids.
# layer: uml
# seconds: 120
. /run/payload/lib.sh
equal "state" running "$(systemctl is-system-running)"
equal "CPUs" 1 "$(nproc)"
grep -qw avx2 /proc/cpuinfo || die "no AVX2"
for name in cpu io memory pids; do
  grep -qw "$name" /sys/fs/cgroup/cgroup.controllers || die "no controller $name"
done
if touch /run/payload/written 2>/dev/null; then die "the payload can be written"; fi
journal_clean
