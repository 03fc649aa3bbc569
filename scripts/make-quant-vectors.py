#!/usr/bin/env python3
"""Makes kernels/tests/fixtures/quant.bin: blocks of every tensor type, and what the `gguf` package dequantises them to.

Usage: make-quant-vectors.py OUTPUT      (needs the PyPI packages `gguf` and `numpy`)

File: for each type its name (8 bytes, zero padded), u32 bytes of data, u32 elements, the data, the elements as float32; little-endian.
Types that the package can quantise are quantised from random rows; beside them stand blocks of random bits with finite scales, so
that every bit of the format counts.
"""

import struct
import sys

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
# Offsets of the half-precision scales in a block.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
ELEMENTS = 1024


def random_blocks(rng, name, ty):
    elements, size = GGML_QUANT_SIZES[ty]
    blocks = rng.integers(0, 256, (ELEMENTS // elements, size), dtype=np.uint8)
    for at in HALVES[name]:
        scales = (rng.standard_normal(len(blocks)) * 0.02).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(1, -1)


def main():
    rng = np.random.default_rng(7)
    with open(sys.argv[1], "wb") as out:
        for name in TYPES:
            ty = GGMLQuantizationType[name]
            rows = (rng.standard_normal((1, ELEMENTS)) * 0.1).astype(np.float32)
            try:
                data = np.ascontiguousarray(quantize(rows, ty)).view(np.uint8).reshape(1, -1)
            except NotImplementedError:
                data = np.empty((1, 0), np.uint8)
            if name in HALVES:
                data = np.concatenate([data, random_blocks(rng, name, ty)], axis=1)
            values = rows if name == "F32" else dequantize(data.view(np.uint8) if name != "F16" else data.view(np.float16), ty)
            values = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
            out.write(name.encode().ljust(8, b"\0") + struct.pack("<II", data.size, values.size))
            out.write(data.tobytes() + values.tobytes())


main()
