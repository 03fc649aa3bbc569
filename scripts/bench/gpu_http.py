#!/usr/bin/env python3
"""This server over HTTP on a GPU: one tenant's port on 127.0.0.1, prompts of random token ids, a table of token budgets and streams.

  gpu_http.py [--binaries FOLDER] [--path synthetic:llama-3-8b] [--device cuda:0] [--concurrency 1,64,256]
              [--budgets 256,512,2048,8192] [--input-len 512] [--output-len 128] [--json FILE]

Each budget is a fresh server; each level of streams a closed loop of as many requests as `--rounds` times the streams, behind an untimed
one of as many as run at once. The client is several processes, so that it measures the server and not itself. Inter-token times are all
gaps between a stream's chunks, of all streams together; how much CPU the client took is printed.
"""
import argparse
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

import cpu
import load

# Ids of generated models below this are bytes and control tokens; those above show as words.
FIRST_WORD = 259
# Tokens of an untimed request.
WARMUP = 20
HEADINGS = ["streams", "budget", "requests", "seconds", "req/s", "out tok/s", "TTFT50 ms", "TTFT99 ms", "gap50 ms", "gap99 ms", "gap max",
            "srv CPUs", "cli CPUs", "W", "SM MHz"]


def prompts(count, length, vocabulary, draw):
    return [("", [draw.randrange(FIRST_WORD, vocabulary) for _ in range(length)]) for _ in range(count)]


def share(arguments):
    """A process's part of the streams: what each request came to, when it began and ended, and the CPU that it took."""
    at, *rest = arguments
    # All processes are up by then.
    time.sleep(max(0.0, at - time.monotonic()))
    start, before = time.monotonic(), time.process_time()
    results = load.drive(*rest)
    return results, start, time.monotonic(), time.process_time() - before


def drive(base, streams, asked, tokens, temperature):
    """As `load.drive`, by several processes; and the seconds that it took, of the clock and of their CPU."""
    processes = max(1, min(8, streams, len(os.sched_getaffinity(0)) // 2))
    at = time.monotonic() + 1
    parts = [(at, base, "bench", len(range(i, streams, processes)), asked[i::processes], tokens, temperature) for i in range(processes)]
    # A forked child would have this one's threads' locks.
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        done = list(pool.map(share, parts))
    results, starts, ends, taken = zip(*done)
    return [result for part in results for result in part], max(ends) - min(starts), sum(taken)


class Watch:
    """Power and clock of the GPU, as `nvidia-smi` sees them; nothing where it is not there."""

    def __init__(self, device):
        query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits", "-lms", "200"]
        self.out = tempfile.TemporaryFile("w+")
        try:
            self.process = subprocess.Popen([*query, "-i", device.split(":")[-1]], stdout=self.out, stderr=subprocess.DEVNULL,
                                            stdin=subprocess.DEVNULL) if device.startswith("cuda:") else None
        except OSError:
            self.process = None

    def end(self):
        """Medians."""
        if self.process:
            self.process.kill()
            self.process.wait()
        self.out.seek(0)
        samples = []
        for line in self.out:
            try:
                samples.append([float(value) for value in line.split(",")])
            except ValueError:
                continue
        self.out.close()
        samples = [sample for sample in samples if len(sample) == 2]
        return [statistics.median(column) for column in zip(*samples)] if samples else [None, None]


def level(server, streams, budget, options, draw):
    """One line of the table."""
    ask = lambda count: prompts(count, options.input_len, options.vocabulary, draw)
    drive(server.base, streams, ask(streams), min(options.output_len, WARMUP), options.temperature)
    asked = ask(max(options.least, streams * options.rounds))
    watch = Watch(options.device)
    before = load.processor(server.process.pid)
    results, wall, client = drive(server.base, streams, asked, options.output_len, options.temperature)
    after = load.processor(server.process.pid)
    watts, mhz = watch.end()
    good = [r for r in results if "error" not in r]
    if len(good) != len(asked):
        cpu.die(f"{len(asked) - len(good)} of {len(asked)} requests failed: {[r['error'] for r in results if 'error' in r][:3]}")
    gaps, first = [gap for r in good for gap in r["gaps"]], [r["first"] for r in good]
    milli = lambda values, part: 1000 * load.percentile(values, part) if values else None
    return {
        "streams": streams, "max_num_batched_tokens": budget, "num_requests": len(good), "elapsed_time": wall,
        "requests_per_second": len(good) / wall, "output_tokens_per_second": sum(r["tokens"] for r in good) / wall,
        "ttft_ms_p50": milli(first, 0.5), "ttft_ms_p99": milli(first, 0.99), "itl_ms_p50": milli(gaps, 0.5),
        "itl_ms_p99": milli(gaps, 0.99), "itl_ms_max": 1000 * max(gaps) if gaps else None,
        "server_cpus": (after[1] - before[1]) / wall, "client_cpus": client / wall, "gpu_watts": watts, "gpu_sm_mhz": mhz,
        "warmup_steps": min(options.output_len, WARMUP), "input_len": options.input_len, "output_len": options.output_len, "prefix_cache": "on",
        "sampling": "greedy" if options.temperature == 0 else f"T={options.temperature:g}", "cached_tokens": sum(r["cached"] or 0 for r in good),
    }


def line(values):
    shown = ["-" if v is None else str(v) if isinstance(v, (int, str)) else f"{v:.2f}" for v in values]
    print("  ".join(f"{text:>{max(len(heading), 7)}}" for text, heading in zip(shown, HEADINGS)), flush=True)


def main():
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, default=cpu.built())
    parser.add_argument("--path", default="synthetic:llama-3-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--settings", default="", help="further lines of the model's configuration, by `;`")
    parser.add_argument("--concurrency", type=numbers, default=[1, 64, 256])
    parser.add_argument("--budgets", type=numbers, default=[256, 512, 2048, 8192])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--rounds", type=int, default=4, help="requests of a level, in times of its streams")
    parser.add_argument("--least", type=int, default=16, help="requests of a level, at least")
    parser.add_argument("--vocabulary", type=int, default=32000, help="prompts have ids below this")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    draw, rows = random.Random(7), []
    print(f"{options.path} on {options.device}, {options.input_len}/{options.output_len} tokens, T={options.temperature:g}, prefix cache on; "
          f"warm-up: as many requests as streams, of {WARMUP} tokens")
    line(HEADINGS)
    for budget in options.budgets:
        with tempfile.TemporaryDirectory(prefix="pagedd-bench-") as work:
            seats = min(max(options.concurrency), budget)
            room = 2 * max(options.concurrency) * (options.input_len + options.output_len)
            lines = [f"path: {cpu.model_path(options.path)}", f"device: {options.device}", f"max_num_batched_tokens: {budget}", f"max_num_seqs: {seats}",
                     f"max_model_len: {options.input_len + options.output_len + 64}", f"kv_memory: {room} tokens",
                     *filter(None, options.settings.split(";"))]
            server, _ = cpu.pagedd(options.binaries, pathlib.Path(work), "bench", lines)
            try:
                for streams in options.concurrency:
                    rows.append(level(server, streams, budget, options, draw))
                    line(list(rows[-1].values())[:len(HEADINGS)])
                    if options.json:
                        text = ",\n".join(f"  {json.dumps(row)}" for row in rows)
                        options.json.write_text(f'{{"bench": "http", "rows": [\n{text}\n]}}\n', encoding="utf8")
            finally:
                server.stop()


if __name__ == "__main__":
    sys.exit(main())
