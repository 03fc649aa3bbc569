#!/usr/bin/env bash
# The Debian package: programs, units, configuration, manual pages, completions (daemon/Cargo.toml names them all). Fetches cargo-deb into
# .cache/tools, once. The package's path is the last line.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need_rust
need_compiler
need python3 python3
need dpkg-deb dpkg
need dpkg-shlibdeps dpkg-dev
need strip binutils

version=3.8.0
deb=$cache/tools/cargo-deb-$version
cd "$root"
target=${CARGO_TARGET_DIR:-$root/target}

mkdir -p "$target"
# Two at once make one after the other.
exec 9>"$target/deb.lock"
flock 9

{
  if [ ! -x "$deb" ]; then
    say "cargo-deb $version (once; takes minutes)"
    mkdir -p "$cache/tools"
    tmp=$(mktemp -d "$cache/tools/.fetch.XXXXXX")
    trap 'rm -rf "$tmp"' EXIT
    # It compresses a package, which is its only work: little is gained by optimising more.
    CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_LTO=false CARGO_TARGET_DIR=$tmp/target \
      cargo install --quiet --locked --root "$tmp" --version "$version" cargo-deb
    mv -f "$tmp/bin/cargo-deb" "$deb"
  fi
  # In one build: of single packages, dependencies would be compiled once more, with other features.
  cargo build --locked --release --workspace --bins --example pagedctl_pages --example pagedd_pages
  pages=$target/release/pages
  rm -rf "$pages"
  "$target/release/examples/pagedctl_pages" "$pages"
  "$target/release/examples/pagedd_pages" "$pages"
  gzip -9 --no-name "$pages"/*.[158]
  python3 scripts/third_party.py "$pages/third-party.txt.gz"
  # Whoever finds a package finds a whole one that was checked.
  making=$target/debian/making
  rm -rf "$making"
  made=$("$deb" deb --locked --no-build --strip --quiet --package pagedd --output "$making/" | tail -n 1)
  python3 scripts/deb_check.py "$made"
  mv -f "$made" "$target/debian/"
  rmdir "$making"
} >&2
printf '%s\n' "$target/debian/${made##*/}"
