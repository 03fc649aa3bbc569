#!/usr/bin/env python3
"""What the programs contain of others: each library of the lock file with its licence, and every licence's and notice's text, once.

  third_party.py FILE.gz
"""
import gzip
import json
import pathlib
import subprocess
import sys

# Files of a library that its licence asks to be passed on.
NAMES = ("licen", "copying", "notice", "unlicense", "copyright")


def linked(metadata):
    """Packages that the workspace's programs are made of: no tests' and no builds' own."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    members = set(metadata["workspace_members"])
    packages = {package["id"]: package for package in metadata["packages"]}
    waiting = [member for member in members if packages[member]["name"] != "pagedd-tests"]
    seen = set(waiting)
    while waiting:
        for edge in nodes[waiting.pop()]["deps"]:
            if edge["pkg"] not in seen and any(kind["kind"] is None for kind in edge["dep_kinds"]):
                seen.add(edge["pkg"])
                waiting.append(edge["pkg"])
    return sorted((packages[one] for one in seen - members), key=lambda package: (package["name"], package["version"]))


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", "x86_64-unknown-linux-gnu"]
    packages = linked(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    texts = {}
    lines = ["The programs of pagedd contain these libraries, each under the licence named. The texts that come with them follow.", ""]
    for package in packages:
        title = f"{package['name']} {package['version']}"
        lines.append(f"{title}: {package['license'] or 'see its text'}")
        folder = pathlib.Path(package["manifest_path"]).parent
        for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name.lower().startswith(NAMES)):
            texts.setdefault(path.read_text(encoding="utf8", errors="replace").strip(), []).append(title)
    for text, titles in sorted(texts.items(), key=lambda item: item[1]):
        lines += ["", "-" * 80, ", ".join(dict.fromkeys(titles)), "-" * 80, "", text]
    # Without name and time: the same libraries make the same file.
    with open(sys.argv[1], "wb") as file, gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=file, mtime=0) as target:
        target.write("\n".join([*lines, ""]).encode())


if __name__ == "__main__":
    main()
