#!/usr/bin/env python3
"""Workers that die under load on a GPU, over HTTP: how many streams complete, how long they wait, and whether what they were told holds.

  gpu_faults.py [--binaries FOLDER] [--points FOLDER] [--path synthetic:llama-3-8b] [--device cuda:0] [--faults none,kill,address]
                [--streams 256] [--input-len 512] [--output-len 512] [--after 7] [--deterministic] [--json FILE]

A round of streams for each fault, on one server: `none` is undisturbed; `kill` is kill -9 of the worker; at `address` a kernel of the worker
reads where no memory is. The worker is one with fail points (--points). It strikes --after seconds after the streams are started; how many ran then is in
the row. `contradicted` counts streams whose text or number of tokens is not that which the server keeps of the request, or, with --deterministic, whose
text differs from the undisturbed one's. Exit code 1: a stream did not complete, or is contradicted, or the fault did not strike.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.request

import cpu
import gpu_http
import load

FAULTS = ["none", "kill", "address"]
# What the log has of a kernel that read where no memory is.
ILLEGAL = "CUDA_ERROR_ILLEGAL_ADDRESS"
HEADINGS = ["fault", "streams", "running", "complete", "contradicted", "gap max ms", "gap50 ms", "gap99 ms", "seconds"]


def programs(binaries, points, folder, mark):
    """The server's programs in `folder`, with a worker whose device breaks once `mark` is there."""
    for name in ["pagedd", "pagedd-gateway", "pagedctl"]:
        shutil.copy2(binaries / name, folder / name)
    worker = folder / "pagedd-worker"
    worker.write_text(f"#!/bin/sh\nFAILPOINTS='gpu-fault=return({mark})' exec '{points / 'pagedd-worker'}' \"$@\"\n", encoding="utf8")
    worker.chmod(0o755)


def worker_of(server):
    """The id of its worker's process."""
    for pid in load.family(server.process.pid):
        try:
            if b"pagedd-worker" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except OSError:
            pass
    return None


class Fault:
    """Strikes once, after a while; nobody waits for it."""

    def __init__(self, kind, after, server, mark):
        self.kind, self.server, self.mark, self.at, self.worker = kind, server, mark, None, worker_of(server)
        self.log_before = server.log.read_text(errors="replace").count(ILLEGAL)
        self.timer = threading.Timer(after, self.strike)
        self.timer.start()

    def strike(self):
        self.at = time.perf_counter()
        if self.kind == "kill":
            os.kill(self.worker, signal.SIGKILL)
        elif self.kind == "address":
            self.mark.write_bytes(b"")

    def struck(self):
        """Whether it did what it is for; to be asked after the round."""
        self.timer.join()
        if self.kind == "none":
            return True
        other = worker_of(self.server) not in (None, self.worker)
        return other and (self.kind == "kill" or self.server.log.read_text(errors="replace").count(ILLEGAL) > self.log_before)


def kept(base, request):
    """Text and tokens of a request that has ended, as the server keeps them."""
    with urllib.request.urlopen(f"{base}/v1/requests/{request}", timeout=60) as answer:
        whole = json.load(answer)
    return whole["choices"][0].get("text"), whole.get("usage", {}).get("completion_tokens")


def strike(server, kind, mark, options, asked, undisturbed):
    """One round: its row, and the texts by prompt."""
    fault = Fault(kind, options.after, server, mark)
    results, wall, _ = gpu_http.drive(server.base, options.streams, asked, options.output_len, options.temperature)
    struck = fault.struck()
    good = [r for r in results if "error" not in r]
    for result in [r for r in results if "error" in r][:3]:
        print(f"  a stream failed: {result['error']}")
    contradicted = 0
    for result in good:
        holds = result["tokens"] == options.output_len and kept(server.base, result["id"]) == (result["text"], result["tokens"])
        contradicted += not holds or (undisturbed is not None and undisturbed.get(result["asked"]) != result["text"])
    gaps = [1000 * gap for r in good for gap in r["gaps"]]
    row = {
        "fault": kind, "streams": options.streams, "running": sum(r["began"] + r["first"] < fault.at < r["ended"] for r in good),
        "complete": len(good), "contradicted": contradicted, "itl_ms_max": max(gaps, default=None),
        "itl_ms_p50": load.percentile(gaps, 0.5), "itl_ms_p99": load.percentile(gaps, 0.99), "elapsed_time": wall, "struck": int(struck),
        "max_num_batched_tokens": options.budget, "input_len": options.input_len, "output_len": options.output_len, "prefix_cache": "on",
        "sampling": "greedy" if options.temperature == 0 else f"T={options.temperature:g}",
    }
    return row, {r["asked"]: r["text"] for r in good}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, default=cpu.built())
    parser.add_argument("--points", type=pathlib.Path, help="folder of a pagedd-worker with fail points; default: `points` in that of the binaries")
    parser.add_argument("--path", default="synthetic:llama-3-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--faults", type=lambda text: text.split(","), default=FAULTS)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--after", type=float, default=7, help="seconds from the start of the client to the fault")
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--deterministic", action="store_true", help="the same prompts in each round, and the same texts are expected")
    parser.add_argument("--vocabulary", type=int, default=32000, help="prompts have ids below this")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if unknown := set(options.faults) - set(FAULTS):
        parser.error(f"--faults: {', '.join(sorted(unknown))}: use some of {', '.join(FAULTS)}")
    if options.deterministic and options.faults[0] != "none":
        parser.error("--deterministic: the first of --faults must be none")
    binaries = options.binaries.absolute()
    points = (options.points or binaries / "points").absolute()
    if not (points / "pagedd-worker").exists():
        cpu.die(f"{points / 'pagedd-worker'} is missing; build it: make gpu-bundle")
    length = options.input_len + options.output_len + 64
    lines = [f"path: {cpu.model_path(options.path)}", f"device: {options.device}", f"max_num_seqs: {options.streams}",
             f"max_num_batched_tokens: {options.budget}", f"max_model_len: {length}", f"kv_memory: {options.streams * length * 5 // 4} tokens"]
    lines += ["deterministic: true"] * options.deterministic
    rows, failed, undisturbed = [], False, None
    print(f"{options.path} on {options.device}, {options.input_len}/{options.output_len} tokens, T={options.temperature:g}, {', '.join(lines[2:])}")
    gpu_http.line(HEADINGS)
    with tempfile.TemporaryDirectory(prefix="faults-", dir=binaries.parent) as work:
        work = pathlib.Path(work)
        mark = work / "mark"
        (work / "bin").mkdir()
        programs(binaries, points, work / "bin", mark)
        server, _ = cpu.pagedd(work / "bin", work, "bench", lines)
        draw = random.Random(5)
        asked = gpu_http.prompts(options.streams, options.input_len, options.vocabulary, draw)
        try:
            for kind in options.faults:
                row, texts = strike(server, kind, mark, options, asked, undisturbed)
                rows.append(row)
                gpu_http.line(list(row.values())[:len(HEADINGS)])
                failed |= row["complete"] != options.streams or row["contradicted"] != 0 or not row["struck"]
                if options.deterministic:
                    undisturbed = undisturbed or texts
                else:
                    asked = gpu_http.prompts(options.streams, options.input_len, options.vocabulary, draw)
        finally:
            server.stop()
            if failed or len(rows) < len(options.faults):
                print(server.log.read_text(errors="replace")[-4000:])
    if options.json:
        text = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        options.json.write_text(f'{{"bench": "faults", "rows": [\n{text}\n]}}\n', encoding="utf8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
