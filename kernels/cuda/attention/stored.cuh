// How an element of keys and values is kept in blocks, and the way from there to what the tensor cores multiply.
//
// Of 16 bits they are what is multiplied. E4m3 has one scale for each row of a head, in single precision behind the elements of a layer: an element's
// value is their product.
#pragma once
#include <cuda_fp8.h>

#include "params.h"
#include "tensor.cuh"

namespace pagedd {

using E4m3 = __nv_fp8_e4m3;

template <typename S>
struct Stored {
    static constexpr int kBytes = 2;
    static constexpr bool kScaled = false;
};

template <>
struct Stored<E4m3> {
    static constexpr int kBytes = 1;
    static constexpr bool kScaled = true;
};

/// Where the rows of a KV head lie in a layer of a block.
template <typename S, int kDim>
struct KvHead {
    static constexpr int kRowBytes = kDim * Stored<S>::kBytes;
    const uint8_t* keys;    // of block 0
    const uint8_t* scales;  // of its keys; of scaled elements only
    int64_t values;         // bytes from keys to values
    int64_t value_scales;   // and from their scales to those of values

    __device__ __forceinline__ KvHead(const PagedKv& kv, int kv_head) {
        const int64_t rows = static_cast<int64_t>(kv.kv_heads) << kv.log2_block;
        const int64_t first = static_cast<int64_t>(kv_head) << kv.log2_block;
        keys = kv.layer + first * kRowBytes;
        values = rows * kRowBytes;
        scales = kv.layer + 2 * values + first * 4;
        value_scales = rows * 4;
    }
};

/// Four elements as two pairs of numbers that are multiplied, without their scale: elements 0 and 2, and elements 1 and 3.
template <typename T>
struct Widened {
    uint32_t even;
    uint32_t odd;
};

/// Sign, exponent and fraction go where T has them; what the exponents' biases differ by is a factor, which also sets numbers right that are too small
/// for an exponent. There is no NaN: a row that has one has it as its scale.
template <typename T>
__device__ __forceinline__ Widened<T> widen(uint32_t four);

template <>
__device__ __forceinline__ Widened<Bf16> widen<Bf16>(uint32_t four) {
    uint32_t even = (four << 4 & 0x07f007f0u) | (four << 8 & 0x80008000u);
    uint32_t odd = (four >> 4 & 0x07f007f0u) | (four & 0x80008000u);
    const __nv_bfloat162 bias = __float2bfloat162_rn(0x1p120f);
    const __nv_bfloat162 even_value = __hmul2(reinterpret_cast<const __nv_bfloat162&>(even), bias);
    const __nv_bfloat162 odd_value = __hmul2(reinterpret_cast<const __nv_bfloat162&>(odd), bias);
    return {reinterpret_cast<const uint32_t&>(even_value), reinterpret_cast<const uint32_t&>(odd_value)};
}

/// Two neighbours, the first in the lower half, with their scale.
template <typename T>
__device__ __forceinline__ uint32_t widen_pair(uint32_t two, float scale) {
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    const float2 values = __half22float2(__half2(raw));
    return pack<T>(values.x * scale, values.y * scale);
}

}  // namespace pagedd
