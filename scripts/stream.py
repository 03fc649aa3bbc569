#!/usr/bin/env python3
"""Streams of an OpenAI-compatible server, with the standard library alone.

  stream.py post URL KEY BODY     sends BODY, copies the answer's bytes to the output as they come
  stream.py show                  reads server-sent events, prints the text of choice 0 as it comes

`show` ends with 1 where the stream did not end with [DONE].
"""
import json
import sys
import urllib.error
import urllib.request


def post(url, key, body):
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url, data=body.encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            while part := answer.read1(65536):
                sys.stdout.buffer.write(part)
                sys.stdout.buffer.flush()
    except urllib.error.HTTPError as error:
        sys.stdout.buffer.write(error.read())
        return 1
    return 0


def text_of(event):
    choices = [c for c in event.get("choices") or [] if c.get("index") == 0]
    return "".join((c.get("delta") or {}).get("content") or c.get("text") or "" for c in choices)


def show():
    for raw in sys.stdin.buffer:
        line = raw.decode("utf8").rstrip("\r\n")
        if line == "data: [DONE]":
            return 0
        if line.startswith("data:"):
            event = json.loads(line[5:])
            if "error" in event:
                sys.stderr.write(f"{event['error']}\n")
                return 1
            sys.stdout.write(text_of(event))
            sys.stdout.flush()
        elif line and not line.startswith((":", "id:", "event:", "retry:")):
            sys.stderr.write(f"no event stream: {line[:300]}\n")
            return 1
    sys.stderr.write("the stream ended before [DONE]\n")
    return 1


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf8")
    match sys.argv[1:]:
        case ["post", url, key, body]:
            sys.exit(post(url, key, body))
        case ["show"]:
            sys.exit(show())
        case _:
            sys.exit(__doc__)
