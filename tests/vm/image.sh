#!/usr/bin/env bash
# The machine that cases of tests/vm run in: a small Debian 12 with systemd, as a folder and as a disk, and two kernels. Made once, into
# .cache/vm; made anew when this file changes. Prints its path. Needs root, and packages of Debian's, which it installs where they are missing.
set -euo pipefail
. "$(dirname "$0")/../../scripts/lib.sh"

[ "$(id -u)" = 0 ] || die "making the image and its namespaces needs root: sudo make test-vm"
command -v apt-get >/dev/null 2>&1 || die "the image is made of Debian's packages by apt-get, which this host lacks"
[ "$(uname -m)" = x86_64 ] || die "the image is for x86_64 only, and this is $(uname -m)"

digest=$(sha256sum "${BASH_SOURCE[0]}" | cut -c1-16)
image=$cache/vm/$digest
mkdir -p "$cache/vm"
# Two at once make one image.
exec 9>"$cache/vm/lock"
flock 9
if [ -e "$image/made" ]; then touch "$image/made"; printf '%s\n' "$image"; exit 0; fi

export DEBIAN_FRONTEND=noninteractive
missing=()
for package in qemu-system-x86 mmdebstrap e2fsprogs util-linux; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  say "apt-get install ${missing[*]}" >&2
  apt-get update -qq >&2
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
fi

say "Image of tests/vm (about a minute, once)" >&2
work=$(mktemp -d "$cache/vm/.make.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT

# Kernels are files out of packages: nothing is installed, and there is no initramfs. The cloud kernel has the disk's driver built in.
(
  mkdir "$work/kernels" && cd "$work/kernels"
  chmod 777 .
  cloud=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)
  [ -n "$cloud" ] || { apt-get update -qq >&2; cloud=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -1); }
  [ -n "$cloud" ] || die "apt knows no linux-image-cloud-amd64: is this Debian 12 or newer?"
  apt-get download -qq "$cloud" >&2
  dpkg-deb --fsys-tarfile linux-image-*.deb | tar -xO --wildcards './boot/vmlinuz-*' > "$work/vmlinuz"
)
rm -r "$work/kernels"

# User-mode Linux is Debian 14's: up to Linux 6.12 its place for a process's registers is of fixed size, and those of a processor with AMX are
# larger. With it come the C library and the loader that it wants. Debian's testing is without a package at times, and unstable has it.
extract_uml() { # SUITE
  rm -rf --one-file-system "$work/extracted"
  # Where this host's apt takes lists of packages that are past their date, so does this.
  mmdebstrap --quiet --variant=extract --include=user-mode-linux \
    --aptopt="APT::Install-Recommends \"false\"; $(apt-config dump --no-empty Acquire::Check-Valid-Until)" \
    --dpkgopt='path-exclude=/usr/share/*' --dpkgopt='path-exclude=/usr/lib/uml/*' "$1" "$work/extracted" >&2
}
extract_uml forky || extract_uml sid || die "Debian's mirror has no user-mode-linux in forky or sid that could be had"
mkdir "$work/uml"
cp "$work"/extracted/usr/bin/linux.uml "$work"/extracted/usr/lib/x86_64-linux-gnu/{libc.so.6,ld-linux-x86-64.so.2} "$work/uml"
rm -r "$work/extracted"

# Its vDSO lacks getcpu, without which rustix 1.1 panics on x86-64: the vDSO's segment is marked as not executable, so that rustix makes system
# calls instead, as the vDSO does.
python3 - "$work/uml/linux.uml" <<'PY'
import re, struct, sys
PT_LOAD, PF_R, PF_X = 1, 4, 1
with open(sys.argv[1], "r+b") as file:
    kernel = file.read()
    headers = []
    for found in re.finditer(rb"\x7fELF\x02\x01\x01.{9}\x03\x00\x3e\x00", kernel, re.DOTALL):
        first, size, count = struct.unpack_from("<32xQ14xHH", kernel, found.start())
        headers += [found.start() + first + size * n for n in range(count)]
    segments = [at for at in headers if struct.unpack_from("<II", kernel, at) == (PT_LOAD, PF_R | PF_X)]
    if len(segments) != 1:
        sys.exit("image.sh: linux.uml does not have the one shared object, its vDSO, with one executable segment")
    file.seek(segments[0] + 4)
    file.write(struct.pack("<I", PF_R))
PY

# python3 is for tools/ of the payload, the rest for cases.
mmdebstrap --quiet --variant=minbase --include=systemd,systemd-sysv,dbus,iproute2,curl,python3,procps \
  --aptopt='APT::Install-Recommends "false"' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  bookworm "$work/root" >&2
root_fs=$work/root
units=$root_fs/etc/systemd/system
# What a case installs is installed whole.
rm -f "$root_fs"/etc/dpkg/dpkg.cfg.d/99mmdebstrap
rm -rf "$root_fs"/var/cache/apt/* "$root_fs"/var/lib/apt/lists/*
echo vm > "$root_fs/etc/hostname"
printf '127.0.0.1 localhost vm\n' > "$root_fs/etc/hosts"
echo 5f1c3a9e2b7d4c6088e1d2f3a4b5c6d7 > "$root_fs/etc/machine-id"
: > "$root_fs/etc/fstab"
rm -rf "$units"/*.wants
ln -s /lib/systemd/system/multi-user.target "$units/default.target"

# Nothing here is of use to a case, and each costs emulated seconds, or fails where there is no such hardware.
mask() { local unit; for unit in "$@"; do ln -sfn /dev/null "$units/$unit"; done; }
mask getty.target getty@tty1.service console-getty.service serial-getty@ttyS0.service systemd-logind.service systemd-user-sessions.service
mask systemd-udevd.service systemd-udev-trigger.service systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-tmpfiles-setup-dev.service
mask systemd-modules-load.service kmod-static-nodes.service modprobe@{configfs,dm_mod,drm,efi_pstore,fuse,loop}.service
mask dev-{hugepages,mqueue}.mount sys-kernel-{config,debug,tracing}.mount sys-fs-fuse-connections.mount proc-sys-fs-binfmt_misc.{auto,}mount
mask systemd-{sysusers,pstore,random-seed,remount-fs,machine-id-commit,firstboot,hwdb-update,update-done,journal-catalog-update,sysctl,binfmt}.service
mask systemd-{update-utmp,update-utmp-runlevel,journal-flush,timesyncd,network-generator,pcrphase,pcrphase-initrd,pcrphase-sysinit}.service
mask systemd-journald-audit.socket systemd-initctl.socket systemd-ask-password-{wall,console}.path systemd-tmpfiles-clean.timer ldconfig.service
mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer
mkdir -p "$root_fs/etc/systemd/journald.conf.d" "$units/multi-user.target.wants"
printf '[Journal]\nStorage=volatile\nForwardToSyslog=no\nRateLimitBurst=0\nRuntimeMaxUse=64M\n' > "$root_fs/etc/systemd/journald.conf.d/vm.conf"

# Not of type oneshot: the system counts as starting while one of those runs.
cat > "$units/vm-case.service" <<'UNIT'
[Unit]
Description=Run a case, then power off
[Service]
Type=exec
ExecStart=/usr/local/sbin/vm-case
StandardOutput=null
StandardError=null
TimeoutStopSec=1
UNIT
ln -s ../vm-case.service "$units/multi-user.target.wants/"

# Where the payload comes from, and where output goes: in namespaces both are mounted already, user-mode Linux mounts a folder of the host
# and has a serial line, an emulated machine a tar file as its second disk and two serial lines.
cat > "$root_fs/usr/local/sbin/vm-case" <<'SCRIPT'
#!/bin/bash
payload=/run/payload
mkdir -p "$payload"
folder=$(sed -n 's/.*pagedd\.payload=\([^ ]*\).*/\1/p' /proc/cmdline)
line() { stty -F "$1" raw -echo; exec > "$1" 2>&1; }
if [ -e /run/case.out ]; then
  exec > /run/case.out 2>&1
elif [ -n "$folder" ]; then
  line /dev/ttyS0
  mount -t hostfs -o "ro,$folder" none "$payload"
else
  line /dev/ttyS1
  tar -C "$payload" -xf /dev/nvme0n2
fi
export HOME=~root LANG=C.UTF-8
cd /tmp
bash "$payload/agent.sh" < /dev/null
sync
systemctl poweroff --force --force > /dev/null 2>&1
SCRIPT
chmod 755 "$root_fs/usr/local/sbin/vm-case"

mke2fs -q -t ext4 -O ^has_journal -m 0 -d "$root_fs" "$work/disk.ext4" 1200M
: > "$work/made"
chmod 755 "$work"
rm -rf --one-file-system "$image"
mv "$work" "$image"
# Images of other versions of this file that nobody used for a week.
for made in "$cache"/vm/*/made; do
  [ -z "$(find "$made" -mtime +7)" ] || rm -rf --one-file-system "$(dirname "$made")"
done
printf '%s\n' "$image"
