# Words shared by the shell scripts: saying, failing, and naming what is missing. Sourced, never run.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=$root/.cache

say() { printf '== %s\n' "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# need COMMAND PACKAGE...: COMMAND is there, or the line that installs it is printed.
need() {
  local command=$1; shift
  command -v "$command" >/dev/null 2>&1 || die "$command is missing; install it: sudo apt-get install -y $*"
}

# need_rust: cargo is there, and not older than the workspace's rust-version.
need_rust() {
  local least found
  least=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' "$root/Cargo.toml")
  command -v cargo >/dev/null 2>&1 || PATH=$HOME/.cargo/bin:$PATH
  command -v cargo >/dev/null 2>&1 || die "cargo is missing; install Rust $least or newer: https://rustup.rs"
  found=$(cargo --version | cut -d' ' -f2)
  printf '%s\n' "$least" "$found" | sort -CV || die "cargo is $found; install Rust $least or newer: https://rustup.rs"
}

need_compiler() { need cc build-essential; need c++ build-essential; }
need_pip() {
  need python3 python3 python3-pip
  python3 -m pip --version >/dev/null 2>&1 || die "python3 has no pip; install it: sudo apt-get install -y python3-pip"
}

# sha256_is FILE DIGEST
sha256_is() { [ "$(sha256sum "$1" | cut -d' ' -f1)" = "$2" ]; }

# pip_wheel REQUIREMENT DIR: downloads one wheel or sdist, without its dependencies, into DIR.
pip_wheel() {
  python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --dest "$2" "$1" \
    || die "pip could not download $1; is the package index reachable?"
}
