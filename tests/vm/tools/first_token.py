#!/usr/bin/env python3
"""Time to the first token of streamed chats, one after the other, each with a prompt of its own.

  first_token.py --port N --key KEY --model NAME [--requests 200] [--tokens 4] [--pause SECONDS] [--seed S] [--json FILE]

Writes every time, in milliseconds. Exit code 1 where an answer was not whole.
"""
import argparse
import http.client
import json
import math
import random
import sys
import time

WORDS = "river stone letter window garden silver market winter engine paper bridge summer island candle forest harbour".split()


def percentile(values, share):
    """The smallest value that so many of them do not exceed."""
    values = sorted(values)
    return values[max(0, math.ceil(len(values) * share / 100) - 1)]


def ask(options, draw):
    body = {"model": options.model, "stream": True, "temperature": 0, "max_tokens": options.tokens, "ignore_eos": True,
            "messages": [{"role": "user", "content": "Tell me about " + " ".join(draw.choices(WORDS, k=12)) + "."}]}
    connection = http.client.HTTPConnection("127.0.0.1", options.port, timeout=60)
    start = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body),
                       {"authorization": f"Bearer {options.key}", "content-type": "application/json"})
    response = connection.getresponse()
    first, done = None, False
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            done = True
            break
        choices = json.loads(line[6:]).get("choices") or [{}]
        if first is None and choices[0].get("delta", {}).get("content"):
            first = time.monotonic()
    connection.close()
    if response.status != 200 or not done or first is None:
        raise http.client.HTTPException(f"status {response.status}, whole: {done}, with text: {first is not None}")
    return (first - start) * 1000


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--key", required=True)
    options.add_argument("--model", required=True)
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--tokens", type=int, default=4)
    options.add_argument("--pause", type=float, default=0.0, help="between two requests")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json")
    options = options.parse_args()
    draw, times, wrong = random.Random(options.seed), [], []
    for number in range(options.requests):
        time.sleep(options.pause)
        try:
            times.append(ask(options, draw))
        except (OSError, http.client.HTTPException, ValueError) as error:
            wrong.append(f"request {number}: {error!r}")
    if options.json:
        with open(options.json, "w", encoding="utf8") as file:
            json.dump({"times": times, "wrong": wrong}, file)
    for line in wrong[:5]:
        print(line)
    if times:
        print(f"first token of {len(times)}: p50 {percentile(times, 50):.1f} ms, p99 {percentile(times, 99):.1f} ms, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
