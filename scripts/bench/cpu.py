#!/usr/bin/env python3
"""This server and llama.cpp's (and vLLM's, where it is given) on one CPU, in one run: A B A B, the same model file, the same client, one at a time.

  cpu.py [--rounds 5] [--threads 2] [--only CASE,...] [--no-peer] [--points DIRECTORY] [--json FILE]

Only ratios of one run mean something: machines differ. Other processes' CPU is printed for each figure; where they took more than a tenth
of a CPU in a round, that pair counts for nothing, and where no more than half of the pairs are left there is no ratio and the exit code is 1.
"""
import argparse
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import load
import peer
from peer import CACHE, die

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MODEL = CACHE / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
# CPUs that other processes may take during a figure; above, it compares machines' neighbours and not servers.
QUIET = 0.1
PERIOD_US = 100_000


class Case:
    """A load, what it is measured by, and who is compared: `a` over `b`, each a function that starts a server."""

    def __init__(self, name, says, metric, a, b, prompts, streams, tokens, bar, temperature=0, busy=False, own=False):
        self.name, self.says, self.metric, self.a, self.b = name, says, metric, a, b
        self.prompts, self.streams, self.tokens, self.bar = prompts, streams, tokens, bar
        self.temperature, self.busy = temperature, busy
        # Both sides are this server.
        self.own = own


# What a case is measured by: (heading, unit, function of a level's figures); more is better in all.
METRICS = {
    "output": ("output tokens per second", "tok/s", lambda f: f["tokens_per_second"]),
    "prompt": ("prompt tokens per second", "tok/s", lambda f: f["prompt_tokens"] * f["good"] / f["seconds"]),
    "speed": ("requests per second", "req/s", lambda f: f["good"] / f["seconds"]),
    "economy": ("output tokens per CPU-second of the server", "tok", lambda f: f["tokens"] / f["server_cpu_seconds"]),
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


class Server:
    """A server process with its log; ended by `stop`."""

    def __init__(self, command, work, base=None, cgroup=None, environment=None):
        self.log, self.base = pathlib.Path(work) / "log", base
        enter = (lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid()))) if cgroup else None
        self.process = subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, preexec_fn=enter,
                                        env={**os.environ, **(environment or {})},
                                        stdout=open(self.log, "wb"), stderr=subprocess.STDOUT)

    def wait(self, ready, limit=180):
        end = time.monotonic() + limit
        while not ready():
            if self.process.poll() is not None or time.monotonic() > end:
                tail = self.log.read_text(errors="replace")[-3000:]
                self.stop()
                die(f"{self.process.args[0]} is not ready:\n{tail}")
            time.sleep(0.1)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def built():
    """Where `make build` puts the programs."""
    return pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"


def model_path(path):
    """A model's path for a configuration file in another folder; what names no file stays as it is."""
    return str(pathlib.Path(path).absolute()) if pathlib.Path(path).exists() else path


def pagedd(binaries, work, model, lines, limit=180, cgroup=None, environment=None):
    """Starts pagedd with one model, whose section of the configuration has `lines`, and one tenant; and what asks `pagedctl`."""
    if not (binaries / "pagedd").exists():
        die(f"{binaries / 'pagedd'} is missing; build it: make build")
    config, state = work / "pagedd.yaml", work / "state"
    config.write_text(f"models:\n  {model}:\n" + "".join(f"    {line}\n" for line in lines), encoding="utf8")
    server = Server([binaries / "pagedd", "--config", config, "--state-dir", state], work, cgroup=cgroup, environment=environment)

    def ctl(*arguments):
        command = [binaries / "pagedctl", "--socket", state / "admin.sock", "--json", *arguments]
        done = subprocess.run([str(c) for c in command], capture_output=True, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def ready():
        states = [m["state"]["is"] for m in (ctl("status") or {"models": []})["models"]]
        if "failed" in states:
            server.process.terminate()
        return states == ["ready"]

    server.wait(ready, limit)
    port = free_port()
    if ctl("tenant", "add", "bench", "--port", str(port), "--no-auth") is None:
        server.stop()
        die("pagedctl tenant add failed")
    server.base = f"http://127.0.0.1:{port}"
    server.wait(lambda: answers(f"{server.base}/readyz"))
    return server, ctl


def ours(settings="", threads=True, cgroup=None, points=None):
    """Starts pagedd with the model; `settings` are further lines of its configuration, `points` are fail points (of --points)."""
    def start(work, options):
        binaries = built() if points is None else options.points
        lines = [f"path: {MODEL}", "kv_memory: 65536 tokens", "max_num_seqs: 64"]
        lines += [f"threads: {options.threads}"] * threads + settings.splitlines()
        server, ctl = pagedd(binaries, work, "smollm2", lines, cgroup=cgroup and cgroup(),
                             environment={"FAILPOINTS": points} if points else None)
        if points is not None:
            # A build without fail points would be compared with itself.
            load.level(server.base, "smollm2", server.process.pid, 1, load.plain(1, 16, 1), 1)
            if ctl("status")["durable"]["is"] != ("no" if points else "yes"):
                server.stop()
                die(f"{binaries} has no fail points; build it: make bench-journal")
        return server
    return start


def llama(slots, f16=False):
    """Starts the peer with so many slots, on the model's own file or on its F16 form."""
    def start(work, options):
        port, model = free_port(), peer.f16(options.peer, MODEL) if f16 else MODEL
        server = Server([options.peer / "llama-server", "-m", model, "--threads", options.threads, "--host", "127.0.0.1",
                         "--port", port, "-np", slots, "-c", 65536, *options.peer_arguments], work, f"http://127.0.0.1:{port}")
        server.wait(lambda: answers(f"{server.base}/health"))
        return server
    return start


def vllm(work, options):
    """Starts vLLM's CPU server on a Hugging Face directory of the same model."""
    port = free_port()
    program, model = options.vllm
    server = Server([program, "serve", model, "--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", port,
                     "--dtype", "float32", "--max-model-len", 2048, "--max-num-seqs", 64, "--enforce-eager"], work,
                    f"http://127.0.0.1:{port}", environment={"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": str(options.threads)})
    server.wait(lambda: answers(f"{server.base}/health"), limit=400)
    return server


def quota(cpus):
    """A function that makes a cgroup with a CPU quota of `cpus`, for one server at a time."""
    def make():
        v1 = pathlib.Path("/sys/fs/cgroup/cpu")
        folder = (v1 if v1.is_dir() else pathlib.Path("/sys/fs/cgroup")) / f"pagedd-bench-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        limit = int(cpus * PERIOD_US)
        if v1.is_dir():
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(limit))
        else:
            (folder / "cpu.max").write_text(f"{limit} {PERIOD_US}")
        CGROUPS.add(folder)
        return folder
    return make


CGROUPS = set()


def chats(seed):
    return [("", question) for question in load.QUESTIONS[seed % 2::2]]


def edits(_seed):
    return [("", prompt) for prompt in load.edits(9)]


def plain(count, words_each, shared_words=0):
    return lambda seed: load.plain(count, words_each, seed, shared_words)


def cases():
    """What is run; the peer's slots as it does best with. Bars are what SPECIFICATION.md promises."""
    on, off = ours(), ours("prompt_lookup: false")
    return [
        Case("one", "1 stream, 94 in, 128 out", "output", on, llama(32), plain(4, 64), 1, 128, 1.6),
        Case("prompt", "a prompt of 512 tokens; the peer on its F16 file", "prompt", on, llama(4, f16=True), plain(4, 480), 1, 1, 1.2),
        Case("prompt-q4", "a prompt of 512 tokens; the peer on the same file", "prompt", on, llama(4), plain(4, 480), 1, 1, 2.8),
        Case("four", "4 streams, 94 in, 128 out", "output", on, llama(32), plain(8, 64), 4, 128, 2.0),
        Case("sixteen", "16 streams, 94 in, 128 out", "output", on, llama(32), plain(32, 64), 16, 128, 3.2),
        Case("many", "32 streams, 94 in, 128 out", "output", on, llama(32), plain(32, 64), 32, 128, 3.2),
        Case("shared", "32 at once, 1,000-token prefix, 32 out", "speed", on, llama(8), plain(32, 16, 960), 32, 32, 10.0),
        Case("many-vllm", "32 streams, 94 in, 128 out; b is vLLM", "output", on, vllm, plain(32, 64), 32, 128, 2.2),
        Case("shared-vllm", "32 at once, 1,000-token prefix, 32 out; b is vLLM", "speed", on, vllm, plain(32, 16, 960), 32, 32, 4.0),
        Case("edit", "prompt lookup on and off: edits, 1 stream, 96 out", "output", on, off, edits, 1, 96, 1.5, own=True),
        Case("chat", "prompt lookup on and off: chat, 1 stream, 128 out", "output", on, off, chats, 1, 128, 0.97, own=True),
        Case("chat-warm", "prompt lookup on and off: chat at temperature 0.8, 4 streams", "output", on, off, chats, 4, 128, 0.97, 0.8, own=True),
        Case("sixteen-lookup", "prompt lookup on and off: 16 streams, 94 in, 128 out", "output", on, off, plain(32, 64), 16, 128, 0.97, own=True),
        Case("half", "half a CPU against all: 16 streams", "economy", ours(threads=False, cgroup=quota(0.5)), ours(threads=False),
             plain(16, 64), 16, 64, 0.95, own=True),
        Case("busy", "beside a busy process against alone: 16 streams", "economy", ours(threads=False), ours(threads=False),
             plain(16, 64), 16, 64, 0.8, busy=True, own=True),
        # No `itl_target`: by it, what a server measured of its own steps at its start decides how prompts are spread, and no two
        # servers run the same plans.
        Case("journal", "the journal against none (each write of it fails): 64 streams, 94 in, 128 out", "output",
             ours("itl_target: none", points=""), ours("itl_target: none", points="journal-append=return;journal-snapshot=return"),
             plain(64, 64), 64, 128, 0.97, own=True),
    ]


def figure(start, case, options, seed, busy=False):
    """One server's turn at a case, on a fresh server, so that no cache is warm but by the case itself."""
    with tempfile.TemporaryDirectory(prefix="pagedd-bench-") as work:
        server = start(pathlib.Path(work), options)
        neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
        try:
            prompts = case.prompts(seed)
            # Untimed: threads and caches come up, and a shared prefix is computed once, on both sides.
            system = prompts[0][0]
            warm = load.level(server.base, "smollm2", server.process.pid, 1, [(system, load.words(8, 999))], 8)
            before = load.processor(neighbour.pid)[1] if neighbour else 0.0
            result = load.level(server.base, "smollm2", server.process.pid, case.streams, prompts, case.tokens, case.temperature)
            taken = load.processor(neighbour.pid)[1] - before if neighbour else 0.0
        finally:
            if neighbour:
                neighbour.kill()
                neighbour.wait()
            server.stop()
    if result["good"] != result["requests"] or warm["good"] != 1:
        die(f"{case.name}: {result['good']} of {result['requests']} requests succeeded: {result['errors'] or warm['errors']}")
    result["others_cpus"] = max(0.0, result["others_cpus"] - taken / result["seconds"])
    return result


def row(side, turn, value, f):
    ms = lambda seconds: f"{seconds * 1000:8.1f}"
    print(f"  {side:10} {turn:4d} {value:9.1f} {f['seconds']:8.2f} {ms(f['first_p50'])} {ms(f['first_p99'])} {ms(f['token_p50'])} "
          f"{ms(f['token_p99'])} {f['cached_tokens']:7d} {f['server_cpu_seconds']:8.1f} {f['server_mib']:7.0f} "
          f"{f['server_private_mib']:7.0f} {f['others_cpus']:7.2f}", flush=True)


def compare(case, options):
    """All rounds of a case, A B A B; its report."""
    heading, unit, value = METRICS[case.metric]
    with_peer = not options.no_peer or case.own
    print(f"{case.name}: {case.says}\n  side       turn {unit:>9}  seconds   TTFT50   TTFT99   TPOT50   TPOT99  cached  srv cpu s"
          "     MiB private  others", flush=True)
    sides, pairs = {"a": [], "b": []}, []
    for turn in range(1, options.rounds + 1):
        for key, start in (("a", case.a), ("b", case.b)):
            if key == "b" and not with_peer:
                continue
            result = figure(start, case, options, turn, busy=case.busy and key == "a")
            sides[key].append(result)
            row(key, turn, value(result), result)
        if with_peer and max(sides[key][-1]["others_cpus"] for key in "ab") <= QUIET:
            pairs.append((sides["a"][-1], sides["b"][-1]))
    report = {"case": case.name, "says": case.says, "metric": heading, "bar": case.bar, "turns": sides, "quiet_pairs": len(pairs)}
    if with_peer:
        if len(pairs) * 2 <= options.rounds:
            print(f"  no ratio: other processes took more than {QUIET} CPUs in {options.rounds - len(pairs)} of {options.rounds} pairs")
            report["ratio"] = None
        else:
            report["ratio"] = statistics.median(value(a) / value(b) for a, b in pairs)
            report["ttft_ratio"] = statistics.median(a["first_p50"] / b["first_p50"] for a, b in pairs)
            middle = [statistics.median(value(pair[side]) for pair in pairs) for side in (0, 1)]
            verdict = "met" if report["ratio"] >= case.bar else "MISSED"
            print(f"  {heading}: {middle[0]:.1f} against {middle[1]:.1f}; ratio {report['ratio']:.2f} (median of {len(pairs)} pairs), "
                  f"bar {case.bar}: {verdict}; TTFT p50 ratio {report['ttft_ratio']:.2f}", flush=True)
    return report


def idle(options):
    """CPU of a server that has served and has nothing to do, and its memory beyond weights and KV blocks."""
    seconds = 10
    with tempfile.TemporaryDirectory(prefix="pagedd-bench-") as work:
        server = ours()(pathlib.Path(work), options)
        try:
            load.level(server.base, "smollm2", server.process.pid, 32, load.plain(32, 480, 1), 32)
            time.sleep(1)
            before = load.processor(server.process.pid)
            time.sleep(seconds)
            after = load.processor(server.process.pid)
            worker = next(pid for pid in load.family(server.process.pid)
                          if os.readlink(f"/proc/{pid}/exe").endswith("/pagedd-worker"))
            private = load.private_mib(worker)
        finally:
            server.stop()
    report = {"case": "idle", "cpu_percent": 100 * (after[1] - before[1]) / seconds, "private_mib": after[4], "worker_private_mib": private}
    print(f"idle: for {seconds} s after 32 prompts of 512 tokens {report['cpu_percent']:.2f} % of a CPU; in memory beyond weights and KV "
          f"blocks {private * 1.048576:.1f} MB in the worker (bar 60), {after[4] * 1.048576:.1f} MB in all processes", flush=True)
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = cases()
    names = [case.name for case in every] + ["idle"]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", help=f"cases, by comma: {', '.join(names)}")
    parser.add_argument("--no-peer", action="store_true", help="this server alone")
    parser.add_argument("--peer-arguments", default="", help="further arguments of llama-server")
    parser.add_argument("--vllm", nargs=2, metavar=("PROGRAM", "MODEL"), help="vLLM's CPU build and a Hugging Face directory of the model")
    parser.add_argument("--points", type=pathlib.Path, metavar="DIRECTORY", help="programs of a release build with fail points, for the case journal")
    parser.add_argument("--json", type=pathlib.Path, default=CACHE / "bench/cpu.json")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else names
    if unknown := [name for name in only if name not in names]:
        die(f"no case {', '.join(unknown)}; there are {', '.join(names)}")
    if not MODEL.exists():
        die(f"{MODEL} is missing; fetch it: make model")
    if not options.vllm:
        only = [name for name in only if not name.endswith("-vllm")]
        print("vLLM's CPU build is not given (--vllm): no comparison with it")
    if not options.points:
        only = [name for name in only if name != "journal"]
    options.peer_arguments = options.peer_arguments.split()
    options.peer = None if options.no_peer else peer.build()
    name, flags = peer.cpu()
    print(f"cpu: {name}, {os.cpu_count()} cores, {options.threads} threads; model: {MODEL.name}\nflags: {flags}")
    if options.peer:
        print(f"peer (b): {peer.PACKAGE}, built here with {' '.join(peer.FLAGS)}; -c 65536 {' '.join(options.peer_arguments)}", flush=True)
    try:
        reports = [compare(case, options) for case in every if case.name in only]
        if "idle" in only:
            reports.append(idle(options))
    finally:
        for folder in CGROUPS:
            folder.rmdir()
    report = {"cpu": name, "flags": flags, "threads": options.threads, "peer": peer.PACKAGE, "peer_flags": peer.FLAGS, "cases": reports}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1), encoding="utf8")
    print(f"written: {options.json}")
    if disturbed := [r["case"] for r in reports if r.get("ratio", 1) is None]:
        die(f"disturbed by other processes: {', '.join(disturbed)}")


if __name__ == "__main__":
    main()
