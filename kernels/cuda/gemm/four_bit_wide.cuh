// Products of more than a few rows with a matrix of four-bit weights, on sm_90a.
//
// A CTA takes 128 kParts outputs and kRows rows of the input; the CTAs of a cluster share the inner dimension and add their sums up through each other's
// shared memory, in their order. One warp has the copy engine bring a unit of the depth at a time into a ring: the input, permuted as the matrix units want
// it, and the tiles' numbers. Two warpgroups make elements of the numbers in registers, where the matrix units take them from, kParts times 64
// outputs each, so that one piece becomes elements while the one before is multiplied.
//
// A weight is rounded to an element here, from a scale and a minimum that are rounded as well; see widen_unit.
#pragma once
#include <cuda.h>

#include "../attention/wgmma.cuh"
#include "four_bit.cuh"
#include "small_rows.cuh"

namespace pagedd {

constexpr int kWideConsumers = 8;
constexpr int kWideThreads = (kWideConsumers + 4) * 32;

struct FourBitWideParams {
    CUtensorMap x;        // [rows][inputs] in boxes of kRows x 64, permuted in rows of 128 bytes; what is outside are zeros
    const void* weights;  // tiles
    void* out;            // see Ending
    uint32_t inputs;      // a multiple of 64
    uint32_t outputs;     // a multiple of 16
    uint32_t rows;
    uint32_t row_blocks;  // of kRows
};

template <int kParts, int kRows, int kStages>
struct FourBitWideShape {
    static constexpr int kTiles = kWideConsumers * kParts;
    static constexpr int kOutputs = kTiles * kFourBitTile;
    static constexpr int kInputBytes = kRows * kFourBitUnit * 2;
    static constexpr int kWeightBytes = kTiles * kFourBitBytes;
    static constexpr int kStageBytes = kInputBytes + kWeightBytes;
    static_assert(kInputBytes % 1024 == 0 && kStageBytes % 1024 == 0, "operands begin at multiples of 1,024 bytes");
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

/// Arrives at a barrier, and says how many bytes come to it.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Has the copy engine bring `bytes`, which count at the barrier.
__device__ __forceinline__ void bring(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/// Has it bring a box of a matrix: columns from `column`, rows from `row`.
__device__ __forceinline__ void bring_box(uint32_t to, const CUtensorMap& map, uint32_t column, uint32_t row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(column),
                 "r"(row), "r"(barrier)
                 : "memory");
}

/// `kBlocks`: CTAs of a multiprocessor, as in the kernel's launch bounds.
template <typename T, int kParts, int kRows, int kStages, int kBlocks, Ending kEnding>
__device__ __forceinline__ void four_bit_wide(const FourBitWideParams& a) {
    using Shape = FourBitWideShape<kParts, kRows, kStages>;
    // What a thread has at the start, and what is left of the CTA's where consumers have theirs: more would be waited for without end.
    constexpr int kAtStart = 65536 / (kWideThreads * kBlocks) / 8 * 8, kConsumer = kBlocks == 1 ? 232 : 104;
    constexpr int kCopier = (kAtStart * kWideThreads - kConsumer * kWideConsumers * 32) / 128 / 8 * 8;
    static_assert(kBlocks <= 2 && kCopier >= 24, "registers of a CTA");
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
            barrier_init(empty + stage * 8, kWideConsumers);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_for_matrix_units();
    }
    __syncthreads();
    let_next_kernel_start();

    if (warp >= kWideConsumers) {
        // ---- one warp copies; it is of a group of its own, which leaves its registers to the others ----
        give_registers<kCopier>();
        if (warp == kWideConsumers) {
            const auto weights = [&](unsigned unit) {
                const uint32_t stage = unit % kStages, barrier = full + stage * 8;
                if (lane == 0) barrier_expect(barrier, Shape::kStageBytes);
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
            const unsigned ahead = min(count, unsigned(kStages));
            for (unsigned unit = 0; unit < ahead; ++unit) weights(unit);
            wait_for_previous_kernel();
            for (unsigned unit = 0; unit < ahead; ++unit) input(unit);
            for (unsigned unit = ahead; unit < count; ++unit) {
                barrier_wait(empty + unit % kStages * 8, unit / kStages - 1 & 1);
                weights(unit);
                input(unit);
            }
        }
        __syncwarp();
        arrive_at_cluster();
        wait_for_cluster();
        arrive_at_cluster();
        wait_for_cluster();
    } else {
        // ---- the warps that multiply ----
        take_registers<kConsumer>();
        const unsigned group = warp / 4;
        float d[kParts][kColumns][4];
        uint32_t elements[2][4][4];
        // Multiplies part `part` of a unit, whose elements come into `next`, for which all but the newest instructions have to be over; with it the stage of
        // `over` units before is free.
        const auto multiply_part = [&](unsigned unit, int part, uint32_t(&next)[4][4], bool frees) {
            const unsigned stage = unit % kStages;
            const uint32_t at = ring + stage * Shape::kStageBytes;
            const uint8_t* pieces = shared + stage * Shape::kStageBytes + Shape::kInputBytes + ((part * 2 + group) * 4 + warp % 4) * kFourBitBytes;
            const FourBitPiece piece = {*reinterpret_cast<const uint4*>(pieces + lane * 16), *reinterpret_cast<const uint4*>(pieces + kFourBitScales + lane / 4 * 16)};
            // With two parts the unit before is over at the second; with one, the unit before the last.
            if (frees) {
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + (unit - (kParts == 2 ? 1 : 2)) % kStages * 8);
            }
            widen_unit<T>(next, piece);
            products_begin();
#pragma unroll
            for (int step = 0; step < 4; ++step) Warpgroup<T, kColumns>::from_registers_along(d[part], next[step], operand(at + step * 32, 16), step > 0 || unit > 0);
            products_commit();
            products_wait<1>();
        };
        if constexpr (kParts == 2) {
            for (unsigned unit = 0; unit < count; ++unit) {
                barrier_wait(full + unit % kStages * 8, unit / kStages & 1);
                multiply_part(unit, 0, elements[0], false);
                multiply_part(unit, 1, elements[1], unit > 0);
            }
        } else {
            unsigned unit = 0;
            for (; unit + 1 < count; unit += 2) {
                barrier_wait(full + unit % kStages * 8, unit / kStages & 1);
                multiply_part(unit, 0, elements[0], unit > 1);
                barrier_wait(full + (unit + 1) % kStages * 8, (unit + 1) / kStages & 1);
                multiply_part(unit + 1, 0, elements[1], unit > 0);
            }
            if (unit < count) {
                products_wait<0>();
                barrier_wait(full + unit % kStages * 8, unit / kStages & 1);
                multiply_part(unit, 0, elements[0], unit > 1);
            }
        }
        products_wait<0>();
#pragma unroll
        for (int part = 0; part < kParts; ++part) pin(d[part]);
        // The ring becomes the place of the sums when nobody reads it any more; what was copied into it has all been waited for.
        named_sync(1, kWideConsumers * 32);
        float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const unsigned output = ((part * 2 + group) * 4 + warp % 4) * kFourBitTile + lane / 4;
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
                float* to = sums + (column * 8 + lane % 4 * 2) * Shape::kPitch + output;
                to[0] = d[part][column][0];
                to[Shape::kPitch] = d[part][column][1];
                to[8] = d[part][column][2];
                to[Shape::kPitch + 8] = d[part][column][3];
            }
        }
        // Only now: nothing of an earlier kernel is read or overwritten before its end.
        wait_for_previous_kernel();
        arrive_at_cluster();
        wait_for_cluster();

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
            for (unsigned i = threadIdx.x; i < own * kPacks; i += kWideConsumers * 32) {
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
        // Nobody leaves while others read.
        __syncwarp();
        arrive_at_cluster();
        wait_for_cluster();
    }
}

}  // namespace pagedd
