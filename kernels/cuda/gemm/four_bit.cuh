// Weights of four bits: one order for all formats, chosen so that a lane reads what it multiplies with in one piece.
//
// A matrix [outputs][inputs] is tiles of 16 outputs, each a row of units of 64 inputs. A unit is 640 bytes: 16 bytes of numbers for each lane of a warp,
// then 128 bytes of scales. Lane (g, t) = (lane / 4, lane % 4) has four words: eight numbers of output g of the first 32 inputs, eight of the second, and the
// same of output g + 8. The eight are the lane's of two matrix fragments: inputs 2t, 2t + 1, 2t + 8, 2t + 9, then the same behind 16. The first of a
// pair, the i-th, is in bits 4i .. 4i + 4 of the word, the second in bits 16 + 4i ... Scales are pairs of halves (s, m) for groups of 32 inputs: a weight is
// s q + m. The four pairs of outputs g and g + 8 are 16 bytes: (g, first group), (g, second
// group), (g + 8, first), (g + 8, second). In an interleaved matrix outputs g are of its first half and outputs g + 8 of the second: gate and up.
#pragma once
#include "../attention/tensor.cuh"
#include "../common.cuh"

namespace pagedd {

/// Elements of the inner dimension of a unit, those of a group with one scale, outputs of a tile.
constexpr int kFourBitUnit = 64;
constexpr int kFourBitGroup = 32;
constexpr int kFourBitTile = 16;
/// Bytes of a unit of a tile, and where its scales begin.
constexpr int kFourBitBytes = 640;
constexpr int kFourBitScales = 512;

/// What a lane holds of a unit: its numbers, and the scales and minima of its two outputs.
struct FourBitPiece {
    uint4 numbers;
    uint4 scales;
};

/// Word of the numbers, or pair of the scales, of output g (`half` 0) or g + 8 (1), of the first or the second group.
__device__ __forceinline__ uint32_t word_of(const uint4& four, int half, int side) {
    return half ? (side ? four.w : four.z) : (side ? four.y : four.x);
}

__device__ __forceinline__ float2 scale_and_minimum(uint32_t pair) { return __half22float2(reinterpret_cast<const __half2&>(pair)); }

/// (x & 0x000f000f) | bits: one instruction, where the compiler would make two.
__device__ __forceinline__ uint32_t nibbles_onto(uint32_t x, uint32_t bits) {
    uint32_t y;
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(y) : "r"(x), "r"(bits));
    return y;
}

/// How numbers become elements: `kBits | q` is kOffset + q, exactly.
template <typename T>
struct Widening;

template <>
struct Widening<Bf16> {
    using Pair = __nv_bfloat162;
    static constexpr uint32_t kBits = 0x43004300u;
    static constexpr float kOffset = 128.0f;
    static __device__ __forceinline__ Pair both(float x) { return __float2bfloat162_rn(x); }
};

template <>
struct Widening<F16> {
    using Pair = __half2;
    static constexpr uint32_t kBits = 0x64006400u;
    static constexpr float kOffset = 1024.0f;
    static __device__ __forceinline__ Pair both(float x) { return __float2half2_rn(x); }
};

/// Pair i of a word's numbers, with the offset on them.
template <typename T>
__device__ __forceinline__ uint32_t offset_pair(uint32_t word, int i) {
    return nibbles_onto(word >> (4 * i), Widening<T>::kBits);
}

/// Numbers as they are, not offset: what half precision needs, whose offset is so large that sums lose bits to it.
template <typename T>
__device__ __forceinline__ uint32_t exact_pair(uint32_t word, int i) {
    using W = Widening<T>;
    const uint32_t offset = offset_pair<T>(word, i);
    const typename W::Pair exact = __hsub2(reinterpret_cast<const typename W::Pair&>(offset), W::both(W::kOffset));
    return reinterpret_cast<const uint32_t&>(exact);
}

/// What makes elements of the numbers of two groups of an output, two at once. An element is off by one rounding of the weight, in bf16 beside that by two of
/// m + 8 s, which is little where weights lie around zero, and by 2^-15 of s.
template <typename T>
struct Weights;

/// s q + m: scale and minimum are elements already.
template <>
struct Weights<F16> {
    __half2 groups[2];

    __device__ __forceinline__ Weights(uint32_t first, uint32_t second)
        : groups{reinterpret_cast<const __half2&>(first), reinterpret_cast<const __half2&>(second)} {}

    __device__ __forceinline__ uint32_t pair(uint32_t word, int side, int i) const {
        const uint32_t numbers = exact_pair<F16>(word, i);
        const __half2 weights = __hfma2(reinterpret_cast<const __half2&>(numbers), __low2half2(groups[side]), __high2half2(groups[side]));
        return reinterpret_cast<const uint32_t&>(weights);
    }
};

/// s n + (s' n + c) with n = q - 8 and c = m + 8 s: the scale is the sum of the elements s and s' exactly, and s' n is one.
template <>
struct Weights<Bf16> {
    using Pair = __nv_bfloat162;
    Pair scales, rests, middles;

    __device__ __forceinline__ Weights(uint32_t first, uint32_t second) {
        const float2 a = scale_and_minimum(first), b = scale_and_minimum(second);
        scales = __floats2bfloat162_rn(a.x, b.x);
        rests = __floats2bfloat162_rn(a.x - __low2float(scales), b.x - __high2float(scales));
        middles = __floats2bfloat162_rn(fmaf(8.0f, a.x, a.y), fmaf(8.0f, b.x, b.y));
    }

    static __device__ __forceinline__ Pair both(const Pair& groups, int side) { return side ? __high2bfloat162(groups) : __low2bfloat162(groups); }

    __device__ __forceinline__ uint32_t pair(uint32_t word, int side, int i) const {
        using W = Widening<Bf16>;
        const uint32_t offset = offset_pair<Bf16>(word, i);
        const Pair numbers = __hsub2(reinterpret_cast<const Pair&>(offset), W::both(W::kOffset + 8.0f));
        const Pair weights = __hfma2(numbers, both(scales, side), __hfma2(numbers, both(rests, side), both(middles, side)));
        return reinterpret_cast<const uint32_t&>(weights);
    }
};

/// Weights of a unit as elements: the operand a of four steps along the depth.
template <typename T>
__device__ __forceinline__ void widen_unit(uint32_t (&a)[4][4], const FourBitPiece& piece) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Weights<T> weights(word_of(piece.scales, half, 0), word_of(piece.scales, half, 1));
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            // Pair i of 32 inputs: step i / 2 of the two, and in it the low or the high inputs.
#pragma unroll
            for (int i = 0; i < 4; ++i) a[side * 2 + i / 2][i % 2 * 2 + half] = weights.pair(word_of(piece.numbers, half, side), side, i);
        }
    }
}

/// Weights as elements, row by row: a warp a unit at a time. `interleaved` matrices come out with their first half first.
template <typename T>
__device__ __forceinline__ void widen_four_bit(const void* weights, void* out, uint32_t outputs, uint32_t inputs, bool interleaved) {
    const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned units = inputs / kFourBitUnit, all = outputs / kFourBitTile * units, step = gridDim.x * blockDim.x / 32;
    for (unsigned index = (blockIdx.x * blockDim.x + threadIdx.x) / 32; index < all; index += step) {
        const unsigned tile = index / units, unit = index % units;
        const uint8_t* from = static_cast<const uint8_t*>(weights) + size_t(index) * kFourBitBytes;
        const FourBitPiece piece = {__ldcs(reinterpret_cast<const uint4*>(from) + lane), __ldcs(reinterpret_cast<const uint4*>(from + kFourBitScales) + g)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned row = interleaved ? tile * 8 + g + half * (outputs / 2) : tile * kFourBitTile + half * 8 + g;
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const float2 of = scale_and_minimum(word_of(piece.scales, half, side));
                const uint32_t word = word_of(piece.numbers, half, side);
                // The four lanes of an output exchange their pairs, so that each has eight inputs in a row: 8t .. 8t + 8.
                uint32_t eight[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint32_t pair = __shfl_sync(kFullWarp, word, lane / 4 * 4 + i) >> (4 * t);
                    eight[i] = pack<T>(fmaf(of.x, float(pair & 15), of.y), fmaf(of.x, float(pair >> 16 & 15), of.y));
                }
                T* to = static_cast<T*>(out) + size_t(row) * inputs + unit * kFourBitUnit + side * kFourBitGroup + t * 8;
                *reinterpret_cast<uint4*>(to) = make_uint4(eight[0], eight[1], eight[2], eight[3]);
            }
        }
    }
}

}  // namespace pagedd
