#!/usr/bin/env bash
# One folder for a bare GPU host: release programs with GPU support, the model, and run.sh, which checks and measures there.
#
#   gpu_bundle.sh [FOLDER]      default target/gpu-bundle
#   MODEL=copy|link|none        how SmolLM2 (98 MB) is in it; default copy
#   JOBS=N                      compilers at a time
set -euo pipefail
. "$(dirname "$0")/lib.sh"
PATH=$PATH:$HOME/.cargo/bin
need_rust
need_compiler
need strip binutils

folder=${1:-$root/target/gpu-bundle}
case ${MODEL:=copy} in copy | link | none) ;; *) die "MODEL=$MODEL is none of copy, link, none" ;; esac
[ -x "$cache/cuda/nvidia/cu13/bin/nvcc" ] || die "nvcc is missing; fetch it: make cuda-toolchain"
# Everything is of a known place: nothing else may be lost with it.
if [ -e "$folder" ] && [ ! -e "$folder/run.sh" ]; then die "$folder is there and is no bundle: name another folder"; fi

cd "$root"
build() { cargo build --locked --release ${JOBS:+--jobs "$JOBS"} "$@"; }
build --package pagedd --package pagedd-gateway --package pagedctl --bins
built=${CARGO_TARGET_DIR:-$root/target}/release
# Of what it is made of, only its own crate and `fail` differ from the one below, which takes its place.
build --package pagedd-worker --features cuda,failpoints --bins
points=$(mktemp)
trap 'rm -f "$points"' EXIT
strip -o "$points" "$built/pagedd-worker"
build --package pagedd-worker --features cuda --bins
build --package pagedd-kernels --features cuda --example cuda_bench
# The worker's own tests on a GPU.
tests=$(cargo test --locked --release ${JOBS:+--jobs "$JOBS"} --package pagedd-worker --features cuda --test worker --no-run --message-format json |
  sed -n 's/.*"name":"worker".*"executable":"\([^"]*\)".*/\1/p' | tail -1)
[ -x "$tests" ] || die "the worker's tests were not built"

rm -rf "$folder"
mkdir -p "$folder/bin/points" "$folder/bench" "$folder/models" "$folder/tests/fixtures/reference"
for program in pagedd pagedd-worker pagedd-gateway pagedctl examples/cuda_bench; do
  strip -o "$folder/bin/${program##*/}" "$built/$program"
done
strip -o "$folder/bin/worker_tests" "$tests"
install -m 755 "$points" "$folder/bin/points/pagedd-worker"
cp scripts/gpu/{run.sh,check.sh,rows.txt,pagedd.yaml} "$folder/"
cp scripts/bench/*.py "$folder/bench/"
cp tests/fixtures/reference/*.json "$folder/tests/fixtures/reference/"
model=$cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
if [ "$MODEL" != none ]; then
  [ -f "$model" ] || die "$model is missing; fetch it: make model"
  if [ "$MODEL" = copy ]; then cp "$(realpath "$model")" "$folder/models/"; else ln -s "$(realpath "$model")" "$folder/models/"; fi
fi
say "$folder: $(du -sh --exclude=models "$folder" | cut -f1) without models"
(cd "$folder" && du -ah bin && ls -l models)
say "on the GPU host: ./run.sh, or ./run.sh GROUP...; what there is: ./run.sh list"
