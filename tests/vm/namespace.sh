#!/usr/bin/env bash
# systemd as process 1 of namespaces of its own, over a throw-away layer on the image's folder. Run by run.py inside `unshare`, with
# IMAGE, WORK (an empty folder), PAYLOAD and OUT in the environment. Everything that is mounted here goes with the mount namespace.
set -euo pipefail
number=0

mount -t tmpfs tmpfs "$WORK"
mkdir "$WORK"/{upper,work,root}
new=$WORK/root
mount -t overlay overlay -o "lowerdir=$IMAGE/root,upperdir=$WORK/upper,workdir=$WORK/work" "$new"
mount -t proc proc "$new/proc"
# The host's own settings are not the case's to change.
mount --bind "$new/proc/sys" "$new/proc/sys"
mount -o remount,bind,ro "$new/proc/sys"
mount -t sysfs -o ro sysfs "$new/sys"
mount -t cgroup2 cgroup2 "$new/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$new/dev"
mkdir "$new"/dev/{pts,shm}
mount -t tmpfs -o mode=1777 tmpfs "$new/dev/shm"
for device in null zero full random urandom tty; do
  : > "$new/dev/$device"
  mount --bind "/dev/$device" "$new/dev/$device"
done
mount -t devpts -o newinstance,ptmxmode=666 devpts "$new/dev/pts"
ln -s pts/ptmx "$new/dev/ptmx"
ln -s /proc/self/fd "$new/dev/fd"
for stream in stdin stdout stderr; do ln -s "fd/$((number++))" "$new/dev/$stream"; done
mount -t tmpfs -o mode=755 tmpfs "$new/run"
mkdir "$new/run/payload"
mount --bind "$PAYLOAD" "$new/run/payload"
mount -o remount,bind,ro "$new/run/payload"
: > "$new/run/case.out"
mount --bind "$OUT" "$new/run/case.out"
ip link set lo up 2>/dev/null || true

cd "$new"
mkdir .host
pivot_root . .host
# What would reach the host's clock, kernel and log is given up before systemd starts.
exec env -i container=pagedd-vm PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot . sh -c 'umount -l /.host && exec setpriv \
  --bounding-set=-sys_time,-sys_module,-sys_rawio,-syslog,-audit_control,-mac_admin /lib/systemd/systemd --show-status=no'
