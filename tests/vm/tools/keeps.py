#!/usr/bin/env python3
"""A service that has systemd keep COUNT listening sockets over its restarts, under names as pagedd gives them, and writes what it was passed.

  keeps.py COUNT FILE    FILE gets a line `passed N names M bytes B` at each start
"""
import os
import pathlib
import socket
import sys
import time

count, file = int(sys.argv[1]), pathlib.Path(sys.argv[2])
manager = os.environ["NOTIFY_SOCKET"]
address = "\0" + manager[1:] if manager.startswith("@") else manager
notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notify.connect(address)
names = os.environ.get("LISTEN_FDNAMES", "")
passed = int(os.environ.get("LISTEN_FDS", "0"))
if not passed:
    for number in range(count):
        port = socket.create_server(("127.0.0.1", 0))
        message = f"FDSTORE=1\nFDNAME=port-{number}\nFDPOLL=0\n".encode()
        socket.send_fds(notify, [message], [port.fileno()])
with open(file, "a", encoding="utf8") as lines:
    distinct = len(set(names.split(":"))) if names else 0
    lines.write(f"passed {passed} names {distinct} bytes {len(names)}\n")
notify.send(b"READY=1")
while True:
    time.sleep(3600)
