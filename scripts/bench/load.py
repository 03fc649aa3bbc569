#!/usr/bin/env python3
"""A small, bounded load client for OpenAI-compatible chat servers on loopback. Standard library only.

`drive` sends one request per prompt, at most `streams` at a time, and measures each stream:
  first   seconds from the request to the first chunk with text
  token   seconds per token after the first: (last - first) / (tokens - 1)
  gaps    seconds between chunks with text
  text    all of it; `id` names the request where the server says it, `asked` the prompt; `began` and `ended` are of this host's monotonic clock
`level` sums them up. Tokens are those of the usage chunk. A prompt of numbers is token ids, and is not a chat. `processor` reads how much CPU a process family and everybody else took.
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


# What people ask, and texts to work on: for what depends on the words, such as drafting from the prompt.
QUESTIONS = """What is the capital of Australia, and how did it come to be chosen?
Explain in simple words why the sky is blue.
Give me three ideas for a birthday present for my father, who likes gardening.
How do I boil an egg so that the yolk stays soft?
Write a short poem about a lighthouse in winter.
What is the difference between a virus and a bacterium?
My flight is delayed by five hours. What could I do at the airport?
Tell me a story about a fox who learned to read.
How does a refrigerator keep food cold?
What should I look at when I buy a used bicycle?
Why do cats purr?
Describe the water cycle to a ten-year-old.
Write a polite email that asks my landlord to repair the heating.
What are the advantages of learning a second language?
How can I fall asleep faster?
Who was Marie Curie, and what is she known for?""".splitlines()
TEXTS = [
    "The old mill at the end of Harbour Lane was built in 1823 by two brothers who had come from the north to trade in wool. For "
    "sixty years its wheel turned day and night, and the village grew around it. When the railway came, the wool went elsewhere, and "
    "the mill stood empty until a baker bought it and filled it with the smell of bread. Today it is a museum, and every Sunday the "
    "children of the village may start the wheel by pulling a long iron lever beside the door.",
    "Our team met on Tuesday to discuss the new booking system. The designers showed three versions of the first page, and most people "
    "preferred the second one because the calendar is easier to find. The developers need two more weeks for the payment module, since "
    "the bank has changed its interface. We agreed to move the launch from the fourth of May to the eighteenth, to inform the customers "
    "by letter, and to meet again next Tuesday at ten o'clock in the large meeting room on the second floor.",
    "Honey bees talk to each other by dancing. A bee that has found flowers returns to the hive and walks in a straight line while it "
    "shakes its body, then turns back in a half circle and walks the line again. The direction of the line tells the other bees where to "
    "fly, measured against the sun, and the length of the dance tells them how far away the flowers are. The other bees follow the dancer "
    "closely in the dark hive, touch it with their antennae, and fly out to the place that it described.",
]
EDITS = ["Correct the spelling mistakes in this text and change nothing else:", "Repeat this text word for word:",
         "Copy this text, with the first sentence removed:"]


def edits(count):
    """Prompts whose answers repeat much of them."""
    return [f"{EDITS[n % len(EDITS)]}\n\n{TEXTS[n // len(EDITS) % len(TEXTS)]}" for n in range(count)]


def plain(count, words_each, seed, shared_words=0):
    """Prompts of random words that all differ, as (system, prompt); `shared_words` is the length of a common system prompt."""
    system = words(shared_words, 77) if shared_words else ""
    return [(system, words(words_each, seed * 1_000_003 + number)) for number in range(count)]


def percentile(values, part):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else None


def one(base, model, system, prompt, tokens, timeout, temperature=0):
    """One streamed request; a dict with times, or with `error`."""
    where = urllib.parse.urlsplit(base)
    body = {"model": model, "max_tokens": tokens, "temperature": temperature, "seed": 7, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}
    if isinstance(prompt, list):
        path, body["prompt"] = "/v1/completions", prompt
    else:
        path = "/v1/chat/completions"
        body["messages"] = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": prompt}]
    body = json.dumps(body)
    start = time.perf_counter()
    first = last = usage = None
    gaps, pieces, done = [], [], False
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=timeout)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return {"error": f"{answer.status} {answer.read(300)!r}"}
        request = answer.getheader("pagedd-request-id")
        while line := answer.readline():
            if not line.startswith(b"data:"):
                continue
            now = time.perf_counter()
            if line[5:].strip() == b"[DONE]":
                done = True
                break
            event = json.loads(line[5:])
            usage = event.get("usage") or usage
            piece = "".join(c.get("text") or (c.get("delta") or {}).get("content") or "" for c in event.get("choices") or [])
            if piece:
                pieces.append(piece)
                if first is None:
                    first = now
                else:
                    gaps.append(now - last)
                last = now
    except (OSError, http.client.HTTPException, ValueError) as error:
        return {"error": repr(error)}
    finally:
        connection.close()
    if first is None or usage is None or not done:
        return {"error": "the stream had no text, no usage or no end"}
    count = usage["completion_tokens"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return {"first": first - start, "token": (last - first) / max(1, count - 1), "tokens": count,
            "prompt": usage["prompt_tokens"], "cached": cached, "gaps": gaps, "text": "".join(pieces), "id": request,
            "asked": str(prompt), "began": start, "ended": last}


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


def sizes(pid):
    """KiB of a process in memory, in all and without shared memory."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="utf8") as rollup:
        found = {line.split()[0]: int(line.split()[1]) for line in rollup if line.startswith("Pss")}
    return found.get("Pss:", 0), found.get("Pss:", 0) - found.get("Pss_Shmem:", 0)


def private_mib(pid):
    """MiB of a process in memory that are not shared memory."""
    return sizes(pid)[1] / 1024


def processor(root):
    """Seconds of CPU so far: of the whole machine, of the family of `root`, of this client; and the family's MiB in memory, in all and
    without shared memory (where weights and KV blocks are)."""
    with open("/proc/stat", encoding="utf8") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    busy = (sum(fields) - fields[3] - fields[4]) / HERTZ
    server = memory = private = 0
    for pid in family(root):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf8", errors="replace") as stat:
                mine = stat.read().rsplit(")", 1)[1].split()
            all_of_it, own = sizes(pid)
            memory += all_of_it
            private += own
        except OSError:
            continue
        server += (int(mine[11]) + int(mine[12])) / HERTZ
    return busy, server, time.process_time(), memory / 1024, private / 1024


def drive(base, model, streams, prompts, tokens, temperature=0, timeout=600):
    """One request for each of `prompts`, pairs of a system prompt (or "") and a prompt; `streams` at a time. What each came to."""
    results, waiting, lock = [], list(prompts), threading.Lock()

    def work():
        while True:
            with lock:
                if not waiting:
                    return
                system, prompt = waiting.pop(0)
            result = one(base, model, system, prompt, tokens, timeout, temperature)
            with lock:
                results.append(result)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def level(base, model, root, streams, prompts, tokens, temperature=0, timeout=600):
    """The figures of one run of `drive`, and what the processes below `root` took meanwhile."""
    before, start = processor(root), time.perf_counter()
    results = drive(base, model, streams, prompts, tokens, temperature, timeout)
    wall, after = time.perf_counter() - start, processor(root)
    good = [r for r in results if "error" not in r]
    busy, server, client = (after[i] - before[i] for i in range(3))
    return {
        "streams": streams, "requests": len(prompts), "good": len(good), "errors": [r["error"] for r in results if "error" in r][:3],
        "seconds": wall, "tokens": sum(r["tokens"] for r in good), "tokens_per_second": sum(r["tokens"] for r in good) / wall,
        "prompt_tokens": statistics.fmean(r["prompt"] for r in good) if good else None,
        "cached_tokens": sum(r["cached"] or 0 for r in good),
        "first_p50": percentile([r["first"] for r in good], 0.5), "first_p99": percentile([r["first"] for r in good], 0.99),
        "token_p50": percentile([r["token"] for r in good], 0.5), "token_p99": percentile([r["token"] for r in good], 0.99),
        "server_cpu_seconds": server, "client_cpu_seconds": client, "server_mib": after[3], "server_private_mib": after[4],
        "others_cpus": max(0.0, busy - server - client) / wall,
    }
