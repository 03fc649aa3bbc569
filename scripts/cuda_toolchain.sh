#!/usr/bin/env bash
# NVIDIA's compiler for kernels/cuda, without root or a GPU: pinned wheels into .cache/cuda, once.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

# nvcc 13.0 is the newest whose output a driver 580 takes.
pins=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85)
folder=$cache/cuda
nvcc=$folder/nvidia/cu13/bin/nvcc
stamp=$folder/.pins

if [ -x "$nvcc" ] && [ "$(cat "$stamp" 2>/dev/null)" = "${pins[*]}" ]; then
  say "nvcc is there: $nvcc"
  exit 0
fi
need_pip
need_compiler
mkdir -p "$cache"
tmp=$(mktemp -d "$cache/.cuda.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
say "fetching nvcc 13.0 (271 MB)"
python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary :all: --target "$tmp" "${pins[@]}" \
  || die "pip could not install ${pins[*]}; is the package index reachable?"
[ -x "$tmp/nvidia/cu13/bin/nvcc" ] || die "the wheels hold no nvcc where it is expected: nothing was kept"
echo "${pins[*]}" > "$tmp/.pins"
rm -rf "$folder"
mv "$tmp" "$folder"
trap - EXIT
chmod 755 "$folder"
say "nvcc: $("$nvcc" --version | tail -1)"
