#!/usr/bin/env python3
"""Asks a tenant's port at a steady rate, each request on a connection of its own, and says what came of them.

  ask.py --port N --key KEY --model NAME [--rate R] [--seconds S] [--tokens T] [--json FILE]

A line for each second, and one of all at the end. Fine are answers (200), whole, and a 503 with Retry-After. An answer that was begun and broken off is
asked for again by its id until it is there: then it is fine, too. SIGTERM ends the asking early. Exit code 1 where a request was lost, refused or answered otherwise.
"""
import argparse
import http.client
import json
import signal
import sys
import threading
import time

PATIENCE = 60.0
PAUSE = 0.1


class Asker:
    def __init__(self, options):
        self.options = options
        self.lock = threading.Lock()
        self.counts = {"answered": 0, "attached again": 0, "unavailable": 0}
        self.wrong = []
        self.slowest = 0.0

    def connect(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.options.port, timeout=PATIENCE)
        connection.connect()
        return connection

    def request(self, connection, method, path, body=None):
        headers = {"authorization": f"Bearer {self.options.key}", "content-type": "application/json", "pagedd-resumable": "1"}
        connection.request(method, path, body and json.dumps(body), headers)
        return connection.getresponse()

    def ask(self, number):
        start, kind, request = time.monotonic(), None, None
        try:
            connection = self.connect()
        except OSError as error:
            return self.note(f"request {number}: refused: {error!r}", start)
        try:
            body = {"model": self.options.model, "prompt": f"Say {number}", "max_tokens": self.options.tokens, "ignore_eos": True}
            response = self.request(connection, "POST", "/v1/completions", body)
            request = response.getheader("pagedd-request-id")
            data = response.read()
            if response.status == 200 and json.loads(data)["usage"]["completion_tokens"] == self.options.tokens:
                kind = "answered"
            elif response.status == 503 and response.getheader("retry-after"):
                kind = "unavailable"
            else:
                return self.note(f"request {number}: {response.status} {data[:200]!r}", start)
        except (OSError, http.client.HTTPException, ValueError) as error:
            # Without headers nothing was accepted, as far as the client can know: it may ask again, and is answered.
            kind = self.again(number, request)
            if kind is None:
                return self.note(f"request {number}: {error!r}, id {request}, and not there again", start)
        finally:
            connection.close()
        return self.note(None, start, kind)

    def again(self, number, request):
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                connection = self.connect()
                if request is None:
                    body = {"model": self.options.model, "prompt": f"Say {number}", "max_tokens": self.options.tokens, "ignore_eos": True}
                    response = self.request(connection, "POST", "/v1/completions", body)
                else:
                    response = self.request(connection, "GET", f"/v1/requests/{request}")
                data = response.read()
                connection.close()
                if response.status == 200 and (request is None or json.loads(data).get("status") != "in_progress"):
                    return "attached again"
            except ConnectionRefusedError:
                return None
            except (OSError, http.client.HTTPException, ValueError):
                pass
            time.sleep(PAUSE)
        return None

    def note(self, wrong, start, kind=None):
        with self.lock:
            self.slowest = max(self.slowest, time.monotonic() - start)
            if wrong:
                self.wrong.append(wrong)
            else:
                self.counts[kind] += 1


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--key", required=True)
    options.add_argument("--model", required=True)
    options.add_argument("--rate", type=float, default=10.0)
    options.add_argument("--seconds", type=float, default=10.0)
    options.add_argument("--tokens", type=int, default=1)
    options.add_argument("--json", help="write what came of them, too")
    options = options.parse_args()
    asker = Asker(options)
    enough = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: enough.set())
    threads, start, said = [], time.monotonic(), 0
    for number in range(int(options.rate * options.seconds)):
        # At its own time, whatever became of the others.
        if enough.wait(max(0.0, start + number / options.rate - time.monotonic())):
            break
        thread = threading.Thread(target=asker.ask, args=(number,))
        thread.start()
        threads.append(thread)
        if time.monotonic() - start > said:
            said += 1
            print(f"{said - 1} s: {asker.counts}, {len(asker.wrong)} wrong", flush=True)
    for thread in threads:
        thread.join()
    result = {**asker.counts, "asked": len(threads), "wrong": len(asker.wrong), "slowest_s": round(asker.slowest, 3)}
    if options.json:
        with open(options.json, "w", encoding="utf8") as file:
            json.dump(result, file)
    for wrong in asker.wrong[:10]:
        print(wrong)
    print(", ".join(f"{name.replace('_s', ' s')} {value}" for name, value in result.items()))
    sys.exit(bool(asker.wrong))


if __name__ == "__main__":
    main()
