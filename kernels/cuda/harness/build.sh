#!/bin/sh
# Builds the attention harness: build.sh NVCC OUT [ARCH]. One binary that needs the driver only; ARCH is e.g. 90a (the default), 80, 89.
set -eu
nvcc=$1
out=$2
arch=${3:-90a}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
for source in "$here"/../attention_decode.cu "$here"/../attention_prefill.cu "$here"/../attention_prefill_sm90.cu "$here"/../attention_shared.cu "$here"/../attention_shared_sm90.cu \
    "$here"/*.cu; do
    object=$out/$(basename "$source" .cu).o
    # The kernels' headers are few: an object is built anew when any source is younger.
    if [ ! -e "$object" ] || [ -n "$(find "$here/.." -newer "$object" \( -name '*.cu' -o -name '*.cuh' -o -name '*.h' \) -print -quit)" ]; then
        "$nvcc" -O3 -std=c++17 -lineinfo -Xptxas -v -gencode="arch=compute_$arch,code=sm_$arch" -c "$source" -o "$object" 2>"$object.log" || { cat "$object.log"; exit 1; }
    fi
done
"$nvcc" -gencode="arch=compute_$arch,code=sm_$arch" -cudart static -L"$(dirname "$nvcc")/../lib" -o "$out/attention_harness" "$out"/*.o -ldl -lpthread
strip "$out/attention_harness"
