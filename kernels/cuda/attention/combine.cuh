// Merges the partial results of decode's splits, row by row, in an order that depends on their positions only.
#pragma once
#include "decode.cuh"

namespace pagedd {

constexpr int kCombineThreads = 256;
/// Splits that a thread loads at once.
constexpr int kCombineRun = 8;

/// A sum of partial results with the maximum that its weights are relative to.
struct Merged {
    float top;
    float total;
    float4 sum;

    static __device__ __forceinline__ Merged empty() { return {-INFINITY, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}}; }

    __device__ __forceinline__ void scale(float new_top) {
        const float factor = partial_weight(top, new_top);
        total *= factor;
        sum = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
        top = new_top;
    }

    __device__ __forceinline__ void add(float m, float l, const float4& x) {
        const float weight = partial_weight(m, top);
        total = fmaf(weight, l, total);
        add_scaled(sum, weight, x);
    }
};

/// CTA (x, y) has tile x / kv_heads of KV head x % kv_heads. A team of threads holds a row, four columns a thread. Up to eight splits are one run: each
/// team of CTA y = 0 takes rows of its own. More splits are runs that go to the teams in turn, whose sums are merged in their order: CTA y takes rows y,
/// y + gridDim.y, ... A larger grid y is faster where few tiles have many splits, and does not change the bits.
template <typename T, int kDim>
__device__ __forceinline__ void combine_attention(const DecodeParams& params) {
    constexpr int kTeam = kDim / 4;
    constexpr int kTeams = kCombineThreads / kTeam;
    __shared__ Merged merged[kTeams][kTeam];
    const int kv_heads = params.kv.kv_heads;
    const int kv_head = blockIdx.x % kv_heads;
    const DecodeTile tile = params.tiles[blockIdx.x / kv_heads];
    // What multiplies next may read its weights meanwhile.
    let_next_kernel_start();
    // Also where there is nothing to do: this kernel must not end before the one that the next kernel relies on.
    wait_for_previous_kernel();
    if (tile.splits == 0) {
        return;
    }
    const int team = threadIdx.x / kTeam;
    const int member = threadIdx.x % kTeam;
    const int64_t step = static_cast<int64_t>(kv_heads) * params.rows_per_unit;
    const int64_t first = tile.first_slot * step + static_cast<int64_t>(kv_head) * params.rows_per_unit;

    const auto take_run = [&](Merged& to, int row, int run) {
        float2 sums[kCombineRun];
        float4 x[kCombineRun];
        float top = to.top;
#pragma unroll
        for (int i = 0; i < kCombineRun; ++i) {
            const int split = run + i;
            const int64_t at = first + split * step + row;
            const bool real = split < tile.splits;
            sums[i] = real ? *reinterpret_cast<const float2*>(params.partial_sums + at * 2) : make_float2(-INFINITY, 0.0f);
            x[i] = real ? *reinterpret_cast<const float4*>(params.partial_out + at * kDim + member * 4) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int i = 0; i < kCombineRun; ++i) {
            top = fmaxf(top, sums[i].x);
        }
        to.scale(top);
#pragma unroll
        for (int i = 0; i < kCombineRun; ++i) {
            to.add(sums[i].x, sums[i].y, x[i]);
        }
    };
    const auto write = [&](const Merged& of, int row) {
        write_output<T, kDim>(params, tile.first_query, tile.first_row + row, kv_head, member * 4, of.sum, of.total);
    };

    if (tile.splits <= kCombineRun) {
        for (int row = team; blockIdx.y == 0 && team < kTeams && row < tile.rows; row += kTeams) {
            Merged own = Merged::empty();
            take_run(own, row, 0);
            write(own, row);
        }
        return;
    }
    for (int row = blockIdx.y; row < tile.rows; row += gridDim.y) {
        if (team < kTeams) {
            Merged own = Merged::empty();
            for (int run = team * kCombineRun; run < tile.splits; run += kTeams * kCombineRun) {
                take_run(own, row, run);
            }
            merged[team][member] = own;
        }
        __syncthreads();
        if (team == 0) {
            Merged all = merged[0][member];
            float top = all.top;
#pragma unroll
            for (int other = 1; other < kTeams; ++other) {
                top = fmaxf(top, merged[other][member].top);
            }
            all.scale(top);
#pragma unroll
            for (int other = 1; other < kTeams; ++other) {
                const Merged& of = merged[other][member];
                all.add(of.top, of.total, of.sum);
            }
            write(all, row);
        }
        __syncthreads();
    }
}

}  // namespace pagedd
