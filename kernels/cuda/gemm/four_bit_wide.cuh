// Products of more than a few rows with a matrix of four-bit weights, on sm_90a.
//
// A CTA takes 64 kGroups outputs and kRows rows of the input; the CTAs of a cluster share the inner dimension and add their sums up through each other's
// shared memory, in their order. A few warps have the copy engine bring a unit of the depth at a time into a ring: the input, permuted as the matrix units want
// it, and the tiles' numbers. kGroups warpgroups make elements of the numbers in registers, where the matrix units take them from, 64 outputs
// each, so that one unit becomes elements while the one before is multiplied.
//
// A weight is rounded to an element here; see Weights.
#pragma once
#include <cuda.h>

#include "../attention/wgmma.cuh"
#include "copy.cuh"
#include "four_bit.cuh"
#include "small_rows.cuh"

namespace pagedd {

constexpr int kWideCopiers = 4;

/// Threads of a CTA with so many warpgroups that multiply, and how many of it a multiprocessor has.
template <int kGroups>
constexpr int kWideThreads = kGroups * 128 + kWideCopiers * 32;
template <int kGroups>
constexpr int kWideBlocks = kGroups == 3 ? 1 : 2;

struct FourBitWideParams {
    CUtensorMap x;        // [rows][inputs] in boxes of kRows x 64, permuted in rows of 128 bytes; what is outside are zeros
    const void* weights;  // tiles
    void* out;            // see Ending
    uint32_t inputs;      // a multiple of 64
    uint32_t outputs;     // a multiple of 16
    uint32_t rows;
    uint32_t row_blocks;  // of kRows
};

template <int kGroups, int kRows, int kStages>
struct FourBitWideShape {
    static constexpr int kTiles = kGroups * 4;
    static constexpr int kOutputs = kTiles * kFourBitTile;
    static constexpr int kInputBytes = kRows * kFourBitUnit * 2;
    static constexpr int kWeightBytes = kTiles * kFourBitBytes;
    static constexpr int kStageBytes = (kInputBytes + kWeightBytes + 1023) / 1024 * 1024;
    static_assert(kInputBytes % 1024 == 0, "operands begin at multiples of 1,024 bytes");
    /// Floats from one row of the sums to the next: rows 2t lie in different banks.
    static constexpr int kPitch = kOutputs + 4;
    static constexpr int kRingBytes = kStages * kStageBytes;
    static constexpr int kSumBytes = kRows * kPitch * 4;
    /// With what the ring may begin behind.
    static constexpr int kSharedBytes = (kRingBytes > kSumBytes ? kRingBytes : kSumBytes) + 1024;
};

__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ uint32_t rank_in_cluster() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
    return x;
}

__device__ __forceinline__ uint32_t ctas_of_cluster() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(x));
    return x;
}

/// Four floats at the same address in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ float4 load_from_rank(uint32_t address, uint32_t rank) {
    float4 x;
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
        : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
        : "r"(address), "r"(rank)
        : "memory");
    return x;
}

/// Has the copy engine bring a box of a matrix: columns from `column`, rows from `row`.
__device__ __forceinline__ void bring_box(uint32_t to, const CUtensorMap& map, uint32_t column, uint32_t row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(column),
                 "r"(row), "r"(barrier)
                 : "memory");
}

template <typename T, int kGroups, int kRows, int kStages, Ending kEnding>
__device__ __forceinline__ void four_bit_wide(const FourBitWideParams& a) {
    using Shape = FourBitWideShape<kGroups, kRows, kStages>;
    constexpr int kConsumers = kGroups * 4, kThreads = kWideThreads<kGroups>;
    // What a thread has at the start, and what is left of the CTA's where consumers have theirs: more would be waited for without end.
    constexpr int kAtStart = 65536 / (kThreads * kWideBlocks<kGroups>) / 8 * 8, kConsumer = kGroups == 3 ? 152 : 104;
    constexpr int kCopier = (kAtStart * kThreads - kConsumer * kConsumers * 32) / 128 / 8 * 8;
    static_assert(kCopier >= 24, "registers of a CTA");
    constexpr int kColumns = kRows / 8;
    extern __shared__ __align__(128) uint8_t unaligned[];
    __shared__ __align__(8) uint64_t barriers[2 * kStages];
    uint8_t* const shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned rank = rank_in_cluster(), ranks = ctas_of_cluster(), index = blockIdx.x / ranks;
    const unsigned block = index / a.row_blocks, first_row = index % a.row_blocks * kRows;
    const unsigned units = a.inputs / kFourBitUnit, first = units * rank / ranks, count = units * (rank + 1) / ranks - first;
    const unsigned tiles = a.outputs / kFourBitTile;
    const uint32_t ring = shared_address(shared), full = shared_address(barriers), empty = full + kStages * 8;

    if (threadIdx.x == 0) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(full + stage * 8, 1);
            barrier_init(empty + stage * 8, kConsumers);
        }
        fence_barriers();
        fence_for_matrix_units();
    }
    __syncthreads();
    let_next_kernel_start();

    if (warp >= kConsumers) {
        // ---- four warps copy, a unit each in turn: starting a unit's copies takes one longer than it takes to multiply it ----
        give_registers<kCopier>();
        const auto weights = [&](unsigned unit) {
            const uint32_t stage = unit % kStages, barrier = full + stage * 8;
            if (lane == 0) barrier_expect(barrier, Shape::kInputBytes + Shape::kWeightBytes);
            __syncwarp();
            if (lane < Shape::kTiles) {
                const unsigned tile = min(block * Shape::kTiles + lane, tiles - 1);
                const uint8_t* from = static_cast<const uint8_t*>(a.weights) + (size_t(tile) * units + first + unit) * kFourBitBytes;
                bring(ring + stage * Shape::kStageBytes + Shape::kInputBytes + lane * kFourBitBytes, from, kFourBitBytes, barrier);
            }
        };
        const auto input = [&](unsigned unit) {
            const uint32_t stage = unit % kStages;
            if (lane == 0) bring_box(ring + stage * Shape::kStageBytes, a.x, (first + unit) * kFourBitUnit, first_row, full + stage * 8);
        };
        const unsigned own = warp - kConsumers, ahead = min(count, unsigned(kStages));
        for (unsigned unit = own; unit < ahead; unit += kWideCopiers) weights(unit);
        wait_for_previous_kernel();
        unsigned unit = own;
        for (; unit < ahead; unit += kWideCopiers) input(unit);
        for (; unit < count; unit += kWideCopiers) {
            barrier_wait(empty + unit % kStages * 8, unit / kStages - 1 & 1);
            weights(unit);
            input(unit);
        }
    } else {
        // ---- the warps that multiply ----
        take_registers<kConsumer>();
        float d[kColumns][4];
        uint32_t elements[2][4][4];
        const auto take_piece = [&](unsigned unit) {
            const unsigned stage = unit % kStages;
            barrier_wait(full + stage * 8, unit / kStages & 1);
            const uint8_t* pieces = shared + stage * Shape::kStageBytes + Shape::kInputBytes + warp * kFourBitBytes;
            return FourBitPiece{*reinterpret_cast<const uint4*>(pieces + lane * 16), *reinterpret_cast<const uint4*>(pieces + kFourBitScales + lane / 4 * 16)};
        };
        // The numbers of a unit are loaded while the one before becomes elements.
        FourBitPiece coming = take_piece(0);
        // Multiplies a unit, whose elements come into `next`, for which all but the newest instructions have to be over: the stage of the unit before
        // that one is free.
        const auto multiply_unit = [&](unsigned unit, uint32_t(&next)[4][4]) {
            const uint32_t at = ring + unit % kStages * Shape::kStageBytes;
            if (unit > 1) {
                // One lane arrives for its warp, behind what all have read. (racecheck sees only what a lane did itself: it takes this for a race.)
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + (unit - 2) % kStages * 8);
            }
            const FourBitPiece piece = coming;
            if (unit + 1 < count) coming = take_piece(unit + 1);
            widen_unit<T>(next, piece);
            products_begin();
#pragma unroll
            for (int step = 0; step < 4; ++step) Warpgroup<T, kColumns>::from_registers_along(d, next[step], operand(at + step * 32, 16), step > 0 || unit > 0);
            products_commit();
            products_wait<1>();
        };
        unsigned unit = 0;
        for (; unit + 1 < count; unit += 2) {
            multiply_unit(unit, elements[0]);
            multiply_unit(unit + 1, elements[1]);
        }
        if (unit < count) multiply_unit(unit, elements[0]);
        products_wait<0>();
        pin(d);
        // The ring becomes the place of the sums when nobody reads it any more; what was copied into it has all been waited for.
        named_sync(1, kConsumers * 32);
        float* const sums = reinterpret_cast<float*>(shared);
        const unsigned first_output = warp * kFourBitTile + lane / 4;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            float* to = sums + (column * 8 + lane % 4 * 2) * Shape::kPitch + first_output;
            to[0] = d[column][0];
            to[Shape::kPitch] = d[column][1];
            to[8] = d[column][2];
            to[Shape::kPitch + 8] = d[column][3];
        }
    }
    // Only now: nothing of an earlier kernel is read or overwritten before its end.
    __syncwarp();
    wait_for_previous_kernel();
    arrive_at_cluster();
    wait_for_cluster();
    if (warp < kConsumers) {
        // ---- the cluster's sums: rows rank, rank + ranks, ... are this CTA's ----
        constexpr bool kHalf = kEnding == Ending::kSilu;
        constexpr unsigned kPacks = Shape::kOutputs / (kHalf ? 8 : 4);
        const unsigned rows = min(a.rows - first_row, unsigned(kRows)), own = rows > rank ? (rows - rank + ranks - 1) / ranks : 0;
        const unsigned row_width = kHalf ? a.outputs / 2 : a.outputs, most_output = a.outputs - block * Shape::kOutputs;
        {
            const auto total = [&](unsigned row, unsigned output) {
                const uint32_t at = ring + (row * Shape::kPitch + output) * 4;
                float4 sum = load_from_rank(at, 0);
                for (unsigned other = 1; other < ranks; ++other) {
                    const float4 x = load_from_rank(at, other);
                    sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
                }
                return sum;
            };
            for (unsigned i = threadIdx.x; i < own * kPacks; i += kConsumers * 32) {
                const unsigned row = i / kPacks * ranks + rank, at = i % kPacks;
                // Of halves, packs 2i and 2i + 1 are the gates of tile i.
                const unsigned output = kHalf ? at / 2 * kFourBitTile + at % 2 * 4 : at * 4;
                if (output >= most_output) continue;
                const size_t to = size_t(first_row + row) * row_width + (block * Shape::kOutputs) / (kHalf ? 2 : 1) + at * 4;
                float4 before;
                if constexpr (kEnding == Ending::kAdd) before = __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(a.out) + to));
                float4 sum = total(row, output);
                if constexpr (kHalf) {
                    const float4 up = total(row, output + 8);
                    const auto gated = [](float gate, float x) { return gate / (1.0f + __expf(-gate)) * x; };
                    sum = make_float4(gated(sum.x, up.x), gated(sum.y, up.y), gated(sum.z, up.z), gated(sum.w, up.w));
                }
                if constexpr (kEnding == Ending::kAdd) {
                    *reinterpret_cast<float4*>(static_cast<float*>(a.out) + to) = make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w);
                } else if constexpr (kEnding == Ending::kSingle) {
                    *reinterpret_cast<float4*>(static_cast<float*>(a.out) + to) = sum;
                } else {
                    *reinterpret_cast<uint2*>(static_cast<T*>(a.out) + to) = make_uint2(pack<T>(sum.x, sum.y), pack<T>(sum.z, sum.w));
                }
            }
        }
    }
    // Nobody leaves while others read.
    __syncwarp();
    arrive_at_cluster();
    wait_for_cluster();
}

}  // namespace pagedd
