#!/usr/bin/env python3
"""Runs cases on a real systemd: each in a machine of its own, made for it and thrown away.

  run.py [NAME ...] [--list] [--verbose] [--keep]

A case is a file cases/NAME.sh, which runs inside as root; NAME may have `*`. The first lines tell what it needs:

  # One sentence: what the case proves.
  # layer: ns | uml | tcg    systemd in namespaces (a second, no cgroup controllers); user-mode Linux (native speed, one CPU, no cpuset);
  #                          an emulated machine (two CPUs, cpuset, slow)
  # seconds: 60              bound on all of it, with boot and power-off
  # memory: 1024             MiB of the machine
  # needs: deb programs model tiny

What it needs is built first and lies under /run/payload, read-only: deb/pagedd.deb, programs/ (with fail points), model/smollm2.gguf,
model/tiny.gguf; and always lib.sh, tools/, systemd/, etc/. One line per case; the exit code is the number of those that failed.
"""
import argparse
import dataclasses
import fnmatch
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
PROGRAMS = ["pagedd", "pagedd-worker", "pagedd-gateway", "pagedctl"]
LAYERS = ["ns", "uml", "tcg"]
NEEDS = ["deb", "programs", "model", "tiny"]
# Seconds that are left of a case's bound for what a failed one has to say.
LAST_WORDS = 5
# Exit code that cannot be counted up to.
MOST_FAILURES = 100


@dataclasses.dataclass
class Case:
    name: str
    path: pathlib.Path
    claim: str
    layer: str
    seconds: int
    memory: int
    needs: list


@dataclasses.dataclass
class Result:
    code: int | None
    output: str
    console: str
    seconds: float


class Mistake(Exception):
    """What whoever started this, or wrote a case, can mend."""


def read_case(path):
    """The case in a file; its header is checked."""
    heads, claim = {"memory": "1024", "needs": ""}, ""
    for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), 1):
        if number == 1 and line.startswith("#!"):
            continue
        if not line.startswith("#"):
            break
        found = re.fullmatch(r"# (layer|seconds|memory|needs): *(.*)", line)
        if found:
            heads[found[1]] = found[2].strip()
        elif not claim:
            claim = line.lstrip("# ")
    wrong = lambda what: Mistake(f"{path.relative_to(ROOT)}: {what}")
    if not claim:
        raise wrong("its first comment says what it proves, and is missing")
    if heads.get("layer") not in LAYERS:
        raise wrong(f"`# layer:` is one of {', '.join(LAYERS)}")
    for number in ["seconds", "memory"]:
        if not re.fullmatch(r"[1-9][0-9]{0,4}", heads.get(number, "")):
            raise wrong(f"`# {number}:` is a whole number above 0")
    needs = heads["needs"].split()
    for need in needs:
        if need not in NEEDS:
            raise wrong(f"`# needs:` knows {', '.join(NEEDS)}, not `{need}`")
    if int(heads["seconds"]) <= 2 * LAST_WORDS:
        raise wrong(f"`# seconds:` is more than {2 * LAST_WORDS}")
    return Case(path.stem, path, claim, heads["layer"], int(heads["seconds"]), int(heads["memory"]), needs)


def choose(cases, names):
    for name in names:
        if not any(fnmatch.fnmatch(case.name, name) for case in cases):
            raise Mistake(f"no case is named {name}; there are: {', '.join(case.name for case in cases)}")
    return [case for case in cases if not names or any(fnmatch.fnmatch(case.name, name) for name in names)]


def output_of(*command):
    try:
        return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip().splitlines()[-1]
    except subprocess.CalledProcessError as error:
        raise Mistake(f"{command[0]} failed (exit code {error.returncode}); its words are above") from None


def build(needs, folder):
    """Makes what the payload is of, and tells where each part lies: its path inside, and the file. What another run might write anew goes into `folder`."""
    parts = {}
    if "deb" in needs:
        package = folder / "pagedd.deb"
        shutil.copy(os.environ.get("PAGEDD_DEB") or output_of("scripts/deb.sh"), package)
        parts["deb"] = [("deb/pagedd.deb", package)]
    if {"programs", "tiny"} & needs:
        # As `make build-dev` has them: nothing is compiled twice.
        points = "pagedd/failpoints,pagedd-worker/failpoints,pagedd-gateway/failpoints"
        command = ["cargo", "build", "--locked", "--quiet", "--workspace", "--bins", "--example", "tiny_model", "--features", points]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise Mistake("the programs do not build")
        parts["programs"] = [(f"programs/{name}", TARGET / "debug" / name) for name in PROGRAMS]
        parts["tiny"] = [("model/tiny.gguf", pathlib.Path(output_of(str(TARGET / "debug/examples/tiny_model"), str(folder / "tiny.gguf"))))]
    if "model" in needs:
        parts["model"] = [("model/smollm2.gguf", pathlib.Path(output_of("scripts/fetch_model.sh")))]
    return parts


def place(source, target):
    """A file or a folder into the payload: linked where that costs nothing, and never to be written from inside."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
        return
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copy(source, target)


def fill(payload, case, parts):
    for need in case.needs:
        for inside, source in parts[need]:
            place(source, payload / inside)
    for inside in ["lib.sh", "agent.sh"]:
        place(HERE / "guest" / inside, payload / inside)
    place(case.path, payload / "case.sh")
    for inside, source in [("tools", HERE / "tools"), ("systemd", ROOT / "systemd"), ("etc", ROOT / "etc")]:
        if source.is_dir():
            place(source, payload / inside)
    (payload / "case.env").write_text(f"SECONDS_INSIDE={case.seconds - 2 * LAST_WORDS}\n")


def end_group(process):
    """All that a started process has started and left in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def watch(command, case, env=None, **streams):
    """Runs a machine to its end, or to the case's; it does not outlive this program, however that ends."""
    command = ["setpriv", "--pdeathsig", "KILL", *command]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=env, **streams)
    try:
        process.wait(case.seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        end_group(process)


def cgroup_mount():
    """Where the host has cgroup v2, be it beside v1."""
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ")
        if after.split()[0] == "cgroup2":
            return pathlib.Path(before.split()[4])
    raise Mistake("this host has no cgroup v2, which systemd in namespaces needs")


def remove_cgroup(folder):
    for _ in range(100):
        for path, _, _ in os.walk(folder, topdown=False):
            try:
                os.rmdir(path)
            except OSError:
                pass
        if not folder.exists():
            return
        time.sleep(0.05)
    print(f"run.py: {folder} still has processes and stays", file=sys.stderr)


def sweep(cases):
    """Removes what runs that were killed have left."""
    places = [(pathlib.Path(tempfile.gettempdir()), shutil.rmtree)]
    if any(case.layer == "ns" for case in cases):
        places.append((cgroup_mount(), remove_cgroup))
    for folder, remove in places:
        for path in folder.glob("pagedd-vm-*"):
            pid = re.match(r"pagedd-vm-(\d+)", path.name)
            if pid and not pathlib.Path("/proc", pid[1]).exists():
                remove(path)


def run_ns(image, case, work, payload, out, console):
    cgroup = cgroup_mount() / f"pagedd-vm-{os.getpid()}"
    cgroup.mkdir()
    (work / "tree").mkdir()
    env = {"PATH": os.environ["PATH"], "IMAGE": str(image), "WORK": str(work / "tree"), "PAYLOAD": str(payload), "OUT": str(out)}
    inside = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup", "--propagation", "private", "--fork", "--kill-child=KILL",
              HERE / "namespace.sh"]
    # The shell joins the cgroup before unshare makes that the root of what is seen inside.
    join = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', cgroup, *inside]
    try:
        watch(join, case, env=env, stdout=console, stderr=subprocess.STDOUT)
    finally:
        remove_cgroup(cgroup)


def run_uml(image, case, work, payload, out, console):
    with open(out, "wb") as line:
        own = work / "uml"
        own.mkdir()
        command = [image / "uml/linux.uml", "umid=vm", f"uml_dir={own}/", f"mem={case.memory}M", f"ubd0={work}/cow,{image}/disk.ext4", "root=98:0",
                   "rw", "panic=-1", "quiet", "con=null", "con0=null,fd:1", "ssl=null", f"ssl0=null,fd:{line.fileno()}",
                   "systemd.show_status=0", f"pagedd.payload={payload}"]
        # Memory of the machine is a file there.
        env = {"PATH": os.environ["PATH"], "HOME": str(work), "TMPDIR": "/dev/shm"}
        # Its helpers would outlive it; in a namespace of their own they cannot. The shell is there since process 1 has no default signals.
        # It runs with a loader and a C library of its own, since it may want newer ones than the host's; the place of a loader is a fixed one.
        start = 'mount --bind "$0/ld-linux-x86-64.so.2" /lib64/ld-linux-x86-64.so.2 && LD_LIBRARY_PATH=$0 "$@"; exit $?'
        alone = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "sh", "-c", start, image / "uml"]
        watch([*alone, *command], case, env=env, stdout=console, stderr=subprocess.STDOUT, pass_fds=[line.fileno()])


def run_tcg(image, case, work, payload, out, console):
    tar = work / "payload.tar"
    subprocess.run(["tar", "-C", payload, "-cf", tar, "."], check=True)
    with open(tar, "ab") as file:
        file.truncate((tar.stat().st_size + 0xFFFFF) & ~0xFFFFF)
    command = ["qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max", "-smp", "2", "-m",
               str(case.memory), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-kernel", image / "vmlinuz",
               "-append", "root=/dev/nvme0n1 rw console=ttyS0 panic=-1 quiet mitigations=off systemd.show_status=0",
               "-device", "nvme,id=n0,serial=vm",
               "-drive", f"file={image}/disk.ext4,format=raw,if=none,id=disk,snapshot=on", "-device", "nvme-ns,drive=disk,bus=n0,nsid=1",
               "-drive", f"file={tar},format=raw,if=none,id=payload,readonly=on", "-device", "nvme-ns,drive=payload,bus=n0,nsid=2",
               "-serial", f"file:{work}/serial", "-serial", f"file:{out}"]
    watch(command, case, stdout=console, stderr=subprocess.STDOUT)


RUN = {"ns": run_ns, "uml": run_uml, "tcg": run_tcg}


def run(image, case, parts, work):
    payload, out, console = work / "payload", work / "out", work / "console"
    payload.mkdir()
    out.touch()
    fill(payload, case, parts)
    start = time.monotonic()
    with open(console, "wb") as file:
        RUN[case.layer](image, case, work, payload, out, file)
    seconds = time.monotonic() - start
    output = out.read_text(encoding="utf8", errors="replace").replace("\r\n", "\n")
    end = re.search(r"\n@@end (\d+)\n", output)
    words = "".join(path.read_text(encoding="utf8", errors="replace") for path in [console, work / "serial"] if path.exists())
    return Result(int(end[1]) if end else None, re.sub(r"(?m)^@@.*\n", "", output), words, seconds)


def tail(text, lines):
    return "".join(f"    {line}\n" for line in text.rstrip().splitlines()[-lines:])


def report(case, result, verbose):
    """Prints what came of it; whether it held."""
    ok = result.code == 0
    print(f"{'ok    ' if ok else 'FAILED'} {case.layer:<4} {result.seconds:6.1f} s  {case.name}: {case.claim}", flush=True)
    if not ok:
        if result.code is None:
            late = result.seconds >= case.seconds
            print(f"    {f'did not end within {case.seconds} s' if late else 'the machine ended without a word of the case'}; its console:")
            print(tail(result.console, 20), end="")
        print(tail(result.output, 140), end="", flush=True)
    elif verbose:
        print(tail(result.output, 1000), end="", flush=True)
    return ok


def run_in_folder(image, case, parts, options):
    """Runs a case and reports; whether it held."""
    work = pathlib.Path(tempfile.mkdtemp(prefix=f"pagedd-vm-{os.getpid()}-{case.name}."))
    try:
        return report(case, run(image, case, parts, work), options.verbose)
    finally:
        if options.keep:
            print(f"    kept: {work}")
        else:
            shutil.rmtree(work)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME")
    options.add_argument("--list", action="store_true", help="say what there is")
    options.add_argument("--verbose", action="store_true", help="print what cases say that pass, too")
    options.add_argument("--keep", action="store_true", help="keep the folder of each case, with console and output")
    options = options.parse_args()
    # Ended from outside, it still cleans up.
    for number in [signal.SIGTERM, signal.SIGHUP]:
        signal.signal(number, lambda *_: sys.exit(MOST_FAILURES + 1))
    try:
        cases = choose([read_case(path) for path in sorted((HERE / "cases").glob("*.sh"))], options.names)
        cases.sort(key=lambda case: LAYERS.index(case.layer))
        if options.list:
            for case in cases:
                print(f"{case.name:<14} {case.layer:<4} {case.seconds:>4} s  {case.claim}")
            return 0
        image = pathlib.Path(output_of("tests/vm/image.sh"))
        sweep(cases)
        failed = 0
        with tempfile.TemporaryDirectory(prefix=f"pagedd-vm-{os.getpid()}-") as folder:
            parts = build({need for case in cases for need in case.needs}, pathlib.Path(folder))
            for case in cases:
                failed += not run_in_folder(image, case, parts, options)
    except Mistake as mistake:
        print(f"run.py: {mistake}", file=sys.stderr)
        return MOST_FAILURES + 1
    except KeyboardInterrupt:
        return MOST_FAILURES + 1
    print(f"{len(cases) - failed} passed, {failed} failed")
    return min(failed, MOST_FAILURES)


if __name__ == "__main__":
    sys.exit(main())
