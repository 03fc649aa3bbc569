// Words that the sampling kernels share: the weight of a logit, masses as integers, keys that order candidates.
//
// The definition is that of kernels/src/sample.rs. A weight has the same bits as there. Masses are sums of weights in units of 2^-44, as
// integers: the same in whatever order they were added, so that a draw depends on its row alone.
#pragma once

#include "common.cuh"

constexpr unsigned THREADS = 1024;
// Candidates that are sorted at once.
constexpr unsigned CANDIDATES = 4096;
// Buckets of a row by distance from the best logit, BUCKETS_PER_UNIT in a unit; the last holds all that are farther.
constexpr unsigned BUCKETS = 2048;
constexpr float BUCKETS_PER_UNIT = 64.0f;
// Logits whose mass is kept for a draw from the whole vocabulary.
constexpr unsigned CHUNK = 512;
// Logits whose best is kept: what a warp reads at once.
constexpr unsigned GROUP = 4 * WARP;
constexpr unsigned MOST_GROUPS = 2048;
constexpr uint32_t NONE = 0xffffffffu;

using Mass = unsigned long long;
constexpr float MASS_ONE = 17592186044416.0f; // 2^44: 2^18 weights of 1 fit

// As `exp` of kernels/src/cpu/exp.rs, operation by operation, times MASS_ONE, for x <= 0. A scale of 2^44 keeps all in the range of normal
// numbers: one multiplication gives the bits that the two there give. What is there a weight of 0 is here less than a thousandth of a unit.
__device__ __forceinline__ float scaled_exp(float x) {
    constexpr float ROUND = 12582912.0f;
    constexpr int SCALE = 44;
    const float clamped = fmaxf(x, -87.5f);
    const float rounded = __fadd_rn(__fmul_rn(clamped, 1.44269504088896340736f), ROUND);
    const int n = __float_as_int(rounded) - __float_as_int(ROUND);
    const float whole = __fsub_rn(rounded, ROUND);
    const float r = __fsub_rn(__fsub_rn(clamped, __fmul_rn(whole, 0.6933594f)), __fmul_rn(whole, -2.1219444e-4f));
    float p = 1.984127e-4f;
    p = __fadd_rn(__fmul_rn(p, r), 1.3888889e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 8.333334e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.1666667e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 0.16666667f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    const float e = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(p, r), r), r), 1.0f);
    return __fmul_rn(e, __int_as_float((n + 127 + SCALE) << 23));
}

// From a logit to its mass.
struct Weigh {
    float top;     // the best logit
    float inverse; // of the temperature
    float least;   // a smaller weight is none

    __device__ __forceinline__ Mass of(float logit) const {
        const float scaled = scaled_exp(__fmul_rn(__fsub_rn(logit, top), inverse));
        return scaled < least * MASS_ONE ? 0 : __float2ull_rn(scaled);
    }
    __device__ __forceinline__ unsigned bucket(float logit) const {
        return min(unsigned((top - logit) * BUCKETS_PER_UNIT), BUCKETS - 1);
    }
};

// Larger for larger logits; both zeros are one.
__device__ __forceinline__ uint32_t order(float logit) {
    const uint32_t bits = __float_as_uint(logit + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(uint32_t order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}
// Smaller for a candidate that comes earlier: the likelier, of equals the smaller id.
__device__ __forceinline__ uint64_t key(float logit, uint32_t id) { return uint64_t(~order(logit)) << 32 | id; }
__device__ __forceinline__ float logit_of_key(uint64_t key) { return logit_of(~uint32_t(key >> 32)); }

// Adds to a 64-bit sum in shared memory by two native 32-bit additions: whoever overflows the low word carries.
__device__ __forceinline__ void add_mass(uint32_t* low, uint32_t* high, Mass mass) {
    const uint32_t part = uint32_t(mass);
    const uint32_t carry = part != 0 && atomicAdd(low, part) > ~part;
    const uint32_t rest = uint32_t(mass >> 32) + carry;
    if (rest) atomicAdd(high, rest);
}

__device__ __forceinline__ Mass warp_mass(Mass x) {
    for (unsigned width = WARP / 2; width > 0; width /= 2) x += __shfl_xor_sync(ALL_LANES, x, width);
    return x;
}

// Inclusive sums over the threads of the block, of two values at once. `scratch` holds a pair per warp.
struct Tally {
    Mass mass;
    uint32_t count;
};
__device__ __forceinline__ Tally block_scan(Tally x, Tally* scratch) {
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (unsigned width = 1; width < WARP; width *= 2) {
        const Mass mass = __shfl_up_sync(ALL_LANES, x.mass, width);
        const uint32_t count = __shfl_up_sync(ALL_LANES, x.count, width);
        if (lane >= width) x.mass += mass, x.count += count;
    }
    __syncthreads();
    if (lane == WARP - 1) scratch[warp] = x;
    __syncthreads();
    if (warp == 0) {
        Tally sum = scratch[lane];
        for (unsigned width = 1; width < WARP; width *= 2) {
            const Mass mass = __shfl_up_sync(ALL_LANES, sum.mass, width);
            const uint32_t count = __shfl_up_sync(ALL_LANES, sum.count, width);
            if (lane >= width) sum.mass += mass, sum.count += count;
        }
        scratch[lane] = sum;
    }
    __syncthreads();
    if (warp > 0) x.mass += scratch[warp - 1].mass, x.count += scratch[warp - 1].count;
    return x;
}

// Calls each(logit, id) for the logits [first, last) of a row, 16 bytes at a time, four such in flight. Both are multiples of 4.
template <class Each> __device__ __forceinline__ void for_logits(const float* row, unsigned first, unsigned last, Each each) {
    constexpr unsigned FLIGHT = 4;
    for (unsigned id = first + 4 * threadIdx.x; id < last; id += FLIGHT * 4 * THREADS) {
        float4 fours[FLIGHT];
#pragma unroll
        for (unsigned i = 0; i < FLIGHT; ++i) {
            const unsigned at = id + i * 4 * THREADS;
            if (at < last) fours[i] = __ldg(reinterpret_cast<const float4*>(row + at));
        }
#pragma unroll
        for (unsigned i = 0; i < FLIGHT; ++i) {
            const unsigned at = id + i * 4 * THREADS;
            if (at >= last) break;
            each(fours[i].x, at);
            each(fours[i].y, at + 1);
            each(fours[i].z, at + 2);
            each(fours[i].w, at + 3);
        }
    }
}

// The same for the groups of a row whose best logit `near` takes.
template <class Near, class Each>
__device__ __forceinline__ void for_groups(const float* row, const uint32_t* maxima, unsigned last, Near near, Each each) {
    constexpr unsigned FLIGHT = 4;
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned groups = (last + GROUP - 1) / GROUP;
    for (unsigned first = warp * WARP; first < groups; first += THREADS) {
        uint32_t left = __ballot_sync(ALL_LANES, first + lane < groups && near(logit_of(maxima[min(first + lane, groups - 1)])));
        while (left) {
            float4 fours[FLIGHT];
            unsigned at[FLIGHT];
#pragma unroll
            for (unsigned i = 0; i < FLIGHT; ++i) {
                at[i] = left ? (first + __ffs(left) - 1) * GROUP + 4 * lane : last;
                left &= left - 1;
                if (at[i] < last) fours[i] = __ldg(reinterpret_cast<const float4*>(row + at[i]));
            }
#pragma unroll
            for (unsigned i = 0; i < FLIGHT; ++i) {
                if (at[i] >= last) continue;
                each(fours[i].x, at[i]);
                each(fours[i].y, at[i] + 1);
                each(fours[i].z, at[i] + 2);
                each(fours[i].w, at[i] + 3);
            }
        }
    }
}
