#!/usr/bin/env python3
"""Whether a Debian package has everything that an installation needs, and nothing that is in its way.

  deb_check.py PACKAGE.deb

Complete are: the programs, what units start, what the manual and completions are of. All of it is root's, and no file may be written by others.
"""
import re
import subprocess
import sys

FILES = """
usr/bin/pagedd usr/bin/pagedctl usr/lib/pagedd/pagedd-worker usr/lib/pagedd/pagedd-gateway
etc/pagedd/pagedd.yaml
usr/lib/systemd/system/pagedd.service usr/lib/systemd/system/pagedd.socket usr/lib/sysusers.d/pagedd.conf usr/lib/tmpfiles.d/pagedd.conf
usr/share/man/man8/pagedd.8.gz usr/share/man/man8/pagedd-bench.8.gz usr/share/man/man5/pagedd.yaml.5.gz
usr/share/man/man1/pagedctl.1.gz usr/share/man/man1/pagedctl-tenant-add.1.gz usr/share/man/man1/pagedctl-status.1.gz
usr/share/bash-completion/completions/pagedctl usr/share/zsh/vendor-completions/_pagedctl usr/share/fish/vendor_completions.d/pagedctl.fish
usr/share/doc/pagedd/copyright usr/share/doc/pagedd/changelog.Debian.gz usr/share/doc/pagedd/changelog.gz usr/share/doc/pagedd/third-party.txt.gz
""".split()
PROGRAMS = re.compile(r"^usr/(bin|lib/pagedd)/")
CONFFILES = ["/etc/pagedd/pagedd.yaml"]
SCRIPTS = ["postinst", "prerm", "postrm"]


def said(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def faults(package):
    """What is wrong, one line each."""
    modes = {}
    for line in said("dpkg-deb", "--contents", package).splitlines():
        mode, owner, _, _, _, name = line.split(maxsplit=5)
        name = name.split(" -> ")[0].removeprefix("./")
        if name.endswith("/") or not name:
            continue
        modes[name] = mode
        if owner not in ["root/root", "0/0"]:
            yield f"{name} is {owner}'s, not root's"
    for name in FILES:
        if name not in modes:
            yield f"{name} is missing"
    for name, mode in modes.items():
        wanted = "-rwxr-xr-x" if PROGRAMS.match(name) else "-rw-r--r--"
        if mode != wanted:
            yield f"{name} has mode {mode}, not {wanted}"
    # What a unit starts is in the package, or of the system.
    unit = said("sh", "-c", 'dpkg-deb --fsys-tarfile "$0" | tar -xO ./usr/lib/systemd/system/pagedd.service', package)
    for program in re.findall(r"(?m)^Exec\w+=[-@:+!|]*(/\S*/paged\S*)", unit):
        if program.removeprefix("/") not in modes:
            yield f"pagedd.service starts {program}, which is not in the package"
    listed = said("sh", "-c", 'dpkg-deb --ctrl-tarfile "$0" | tar -t', package).split()
    for script in SCRIPTS:
        if f"./{script}" not in listed:
            yield f"the script {script} is missing"
    conffiles = said("sh", "-c", 'dpkg-deb --ctrl-tarfile "$0" | tar -xO ./conffiles', package).split()
    if conffiles != CONFFILES:
        yield f"configuration files are {conffiles}, not {CONFFILES}"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    found = list(faults(sys.argv[1]))
    for fault in found:
        print(f"{sys.argv[1]}: {fault}", file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
