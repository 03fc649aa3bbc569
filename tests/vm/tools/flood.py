#!/usr/bin/env python3
"""A tenant at its worst: many connections, each with large bodies, in turn one long text and JSON that is nested deeply.

  flood.py --port N --key KEY --model NAME [--connections 64] [--megabytes 30] [--seconds S]

Says at the end what came of it, and never fails for it: refusals, resets and silence are what such a client has to expect.
"""
import argparse
import collections
import http.client
import json
import signal
import sys
import threading
import time


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--key", required=True)
    options.add_argument("--model", required=True)
    options.add_argument("--connections", type=int, default=64)
    options.add_argument("--megabytes", type=int, default=30)
    options.add_argument("--seconds", type=float, default=30.0)
    options = options.parse_args()
    size = options.megabytes * 1_000_000
    head = json.dumps({"model": options.model, "max_tokens": 1, "messages": [{"role": "user", "content": ""}]})
    before, after = head.split('""', 1)
    long = (before + '"' + "word " * (size // 5) + '"' + after).encode()
    deep = (before + "[" * (size // 2) + "]" * (size // 2) + after).encode()
    until = time.monotonic() + options.seconds
    counts, lock = collections.Counter(), threading.Lock()

    def client(number):
        while time.monotonic() < until:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", options.port, timeout=30)
                headers = {"authorization": f"Bearer {options.key}", "content-type": "application/json"}
                connection.request("POST", "/v1/chat/completions", deep if number % 2 else long, headers)
                outcome = str(connection.getresponse().status)
                connection.close()
            except (OSError, http.client.HTTPException) as error:
                outcome = type(error).__name__
                # A client that is refused at once would only measure itself.
                time.sleep(0.01)
            number += 1
            with lock:
                counts[outcome] += 1

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(options.connections)]
    for thread in threads:
        thread.start()
    # Ended from outside it still says what came of it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    finally:
        with lock:
            print(f"flood: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
