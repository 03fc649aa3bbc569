// What all kernels share: element types, vectors of 16 bytes, reductions over a thread block.
//
// Every kernel takes one struct by value, whose twin in Rust has the same fields in the same order (kernels/src/cuda/).
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr unsigned WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float to_f32(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_f32(f16 x) { return __half2float(x); }

template <class T> __device__ __forceinline__ T from_f32(float x);
template <> __device__ __forceinline__ bf16 from_f32<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ f16 from_f32<f16>(float x) { return __float2half_rn(x); }

// Eight elements, moved as 16 bytes.
template <class T> struct alignas(16) Pack {
    static constexpr unsigned SIZE = 8;
    T at[SIZE];
};

template <class T> __device__ __forceinline__ Pack<T> load(const T* from, size_t pack) {
    Pack<T> out;
    *reinterpret_cast<uint4*>(&out) = reinterpret_cast<const uint4*>(from)[pack];
    return out;
}

template <class T> __device__ __forceinline__ void store(T* to, size_t pack, const Pack<T>& value) {
    reinterpret_cast<uint4*>(to)[pack] = *reinterpret_cast<const uint4*>(&value);
}

// Eight floats, moved as twice 16 bytes.
struct alignas(16) Eight {
    float at[8];
};

__device__ __forceinline__ Eight load(const float* from, size_t pack) {
    Eight out;
    reinterpret_cast<float4*>(&out)[0] = reinterpret_cast<const float4*>(from)[2 * pack];
    reinterpret_cast<float4*>(&out)[1] = reinterpret_cast<const float4*>(from)[2 * pack + 1];
    return out;
}

__device__ __forceinline__ void store(float* to, size_t pack, const Eight& value) {
    reinterpret_cast<float4*>(to)[2 * pack] = reinterpret_cast<const float4*>(&value)[0];
    reinterpret_cast<float4*>(to)[2 * pack + 1] = reinterpret_cast<const float4*>(&value)[1];
}

__device__ __forceinline__ float warp_sum(float x) {
    for (unsigned width = WARP / 2; width > 0; width /= 2) x += __shfl_xor_sync(ALL_LANES, x, width);
    return x;
}

// The sum over all threads of the block, in each of them. `scratch` holds a float per warp.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? scratch[lane] : 0.0f);
    return x;
}

// One kernel per element type, under the name NAME_bf16 and NAME_f16.
#define FOR_ELEMENTS(NAME, ARGS)                                                                   \
    extern "C" __global__ void NAME##_bf16(const __grid_constant__ ARGS a) { NAME<bf16>(a); }      \
    extern "C" __global__ void NAME##_f16(const __grid_constant__ ARGS a) { NAME<f16>(a); }

// Philox4x32-10 (Salmon et al., SC'11), as `philox4x32_10` of kernels/src/sample.rs.
__device__ __forceinline__ uint4 philox4x32_10(uint4 counter, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t first_high = __umulhi(0xD2511F53u, counter.x), first_low = 0xD2511F53u * counter.x;
        const uint32_t second_high = __umulhi(0xCD9E8D57u, counter.z), second_low = 0xCD9E8D57u * counter.z;
        counter = make_uint4(second_high ^ counter.y ^ key.x, second_low, first_high ^ counter.w ^ key.y, first_low);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return counter;
}
