#!/bin/bash
# The ns layer has what its cases rely on: systemd 252 as process 1, cgroup v2, and it can be ended.
# layer: ns
# seconds: 60
. /run/payload/lib.sh
equal "process 1" systemd "$(cat /proc/1/comm)"
equal "state" running "$(systemctl is-system-running)"
equal "version" 252 "$(systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p')"
equal "cgroup file system" cgroup2fs "$(stat -f -c %T /sys/fs/cgroup)"
ip -brief address show lo | grep -q 127.0.0.1 || die "127.0.0.1 is not up"
journal_clean
systemd-cat --priority=err echo planted
errors_logged | grep -q planted || die "an error in the journal is not found"
