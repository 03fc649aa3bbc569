#!/usr/bin/env python3
"""A small, bounded load client for OpenAI-compatible chat servers on loopback. Standard library only.

`level` sends `count` requests, at most `streams` at a time, and measures each stream:
  first   seconds from the request to the first chunk with text
  token   seconds per token after the first: (last - first) / (tokens - 1)
Tokens are those of the usage chunk. `processor` reads how much CPU a process family and everybody else took.
"""
import http.client
import json
import os
import random
import statistics
import threading
import time
import urllib.parse

WORDS = """river stone letter window garden silver market winter engine paper bridge summer island candle forest
harbour mountain mirror basket thunder copper village morning feather anchor planet ribbon lantern meadow hammer orchard
pepper saddle castle violin pebble walnut glacier compass blanket tunnel cotton ladder kettle marble canyon""".split()
HERTZ = os.sysconf("SC_CLK_TCK")


def words(count, seed):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def percentile(values, part):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else None


def one(base, model, system, prompt, tokens, timeout):
    """One streamed request; a dict with times, or with `error`."""
    where = urllib.parse.urlsplit(base)
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    first = last = usage = None
    done = False
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=timeout)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return {"error": f"{answer.status} {answer.read(300)!r}"}
        while line := answer.readline():
            if not line.startswith(b"data:"):
                continue
            if line[5:].strip() == b"[DONE]":
                done = True
                break
            event = json.loads(line[5:])
            usage = event.get("usage") or usage
            if any((c.get("delta") or {}).get("content") for c in event.get("choices") or []):
                last = time.perf_counter()
                first = first or last
    except (OSError, http.client.HTTPException, ValueError) as error:
        return {"error": repr(error)}
    finally:
        connection.close()
    if first is None or usage is None or not done:
        return {"error": "the stream had no text, no usage or no end"}
    count = usage["completion_tokens"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return {"first": first - start, "token": (last - first) / max(1, count - 1), "tokens": count,
            "prompt": usage["prompt_tokens"], "cached": cached}


def family(root):
    """The ids of a process and of all below it."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf8", errors="replace") as stat:
                parents[int(name)] = int(stat.read().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            pass
    found = [root]
    for parent in found:
        found.extend(pid for pid, above in parents.items() if above == parent)
    return found


def processor(root):
    """Seconds of CPU so far: of the whole machine, of the family of `root`, of this client; and the family's MiB in memory."""
    with open("/proc/stat", encoding="utf8") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    busy = (sum(fields) - fields[3] - fields[4]) / HERTZ
    server = memory = 0
    for pid in family(root):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf8", errors="replace") as stat:
                mine = stat.read().rsplit(")", 1)[1].split()
            with open(f"/proc/{pid}/smaps_rollup", encoding="utf8") as rollup:
                memory += next((int(line.split()[1]) for line in rollup if line.startswith("Pss:")), 0)
        except OSError:
            continue
        server += (int(mine[11]) + int(mine[12])) / HERTZ
    return busy, server, time.process_time(), memory / 1024


def level(base, model, root, streams, count, prompt_words, tokens, shared_words=0, seed=0, timeout=600):
    """`count` requests with prompts that differ, `streams` at a time; `shared_words` is the length of a common system prompt."""
    system = words(shared_words, 77) if shared_words else ""
    results, waiting, lock = [], list(range(count)), threading.Lock()

    def work():
        while True:
            with lock:
                if not waiting:
                    return
                number = waiting.pop()
            result = one(base, model, system, words(prompt_words, seed * 1_000_003 + number), tokens, timeout)
            with lock:
                results.append(result)

    before, start = processor(root), time.perf_counter()
    threads = [threading.Thread(target=work, daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall, after = time.perf_counter() - start, processor(root)
    good = [r for r in results if "error" not in r]
    busy, server, client = (after[i] - before[i] for i in range(3))
    return {
        "streams": streams, "requests": count, "good": len(good), "errors": [r["error"] for r in results if "error" in r][:3],
        "seconds": wall, "tokens": sum(r["tokens"] for r in good), "tokens_per_second": sum(r["tokens"] for r in good) / wall,
        "prompt_tokens": statistics.fmean(r["prompt"] for r in good) if good else None,
        "cached_tokens": sum(r["cached"] or 0 for r in good),
        "first_p50": percentile([r["first"] for r in good], 0.5), "first_p99": percentile([r["first"] for r in good], 0.99),
        "token_p50": percentile([r["token"] for r in good], 0.5), "token_p99": percentile([r["token"] for r in good], 0.99),
        "server_cpu_seconds": server, "client_cpu_seconds": client, "server_mib": after[3],
        "others_cpus": max(0.0, busy - server - client) / wall,
    }
