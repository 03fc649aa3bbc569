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

need_rust() {
  command -v cargo >/dev/null 2>&1 && return
  [ -x "$HOME/.cargo/bin/cargo" ] && { PATH=$HOME/.cargo/bin:$PATH; return; }
  die "cargo is missing; install a Rust toolchain (1.95 or newer) with rustup: sudo apt-get install -y rustup && rustup default stable"
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
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$2" "$1" \
    || die "pip could not download $1; is the package index reachable?"
}
