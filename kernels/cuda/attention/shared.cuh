// Attention of a large group to the tokens that its members share: their queries as the rows of one tile, as if they were one sequence's. What leaves a tile
// is a partial result of each row, which `pagedd_attention_combine_*` merges with those of the member's own tokens.
//
// The bodies are those of prefill: a tile says where its rows' queries are and which tokens they see, and takes the rows when they are done.
#pragma once
#include "prefill_hopper.cuh"

namespace pagedd {

/// The CTA's tile of packed rows of a group.
struct GroupTile {
    int kv_head;
    int group;
    int first_row;
    int rows;       // that exist, from first_row on
    int first_token;
    int keys;       // one past the last token
    int slot;
    const Member* members;

    __device__ __forceinline__ GroupTile(const SharedParams& params, const SharedTile& unit, int kv_head_, int tile_rows)
        : kv_head(kv_head_),
          group(params.kv.group),
          first_row(unit.first_row),
          rows(min(tile_rows, unit.rows)),
          first_token(unit.first_token),
          keys(unit.first_token + unit.tokens),
          slot(unit.slot),
          members(params.members + unit.first_member) {}

    __device__ __forceinline__ int first() const { return first_token; }

    /// All rows see all tokens.
    __device__ __forceinline__ int limit(int) const { return keys; }

    /// Where a row's head begins in a tensor [token, stride].
    __device__ __forceinline__ int64_t element(int row, int64_t stride, int dim) const {
        const int packed = first_row + row;
        return members[packed / group].token * stride + (kv_head * group + packed % group) * dim;
    }

    /// Of the partial results, where a row's are.
    __device__ __forceinline__ int64_t partial_row(const SharedParams& params, int row) const {
        const int packed = first_row + row;
        const int64_t at = members[packed / group].first_slot + slot;
        return (at * params.kv.kv_heads + kv_head) * params.rows_per_unit + packed % group;
    }
};

/// Writes one row's share of a thread: columns 2t and 2t + 1 of each eight, which are sums[n][first] and the next.
template <int kDim>
__device__ __forceinline__ void leave_partial(const SharedParams& params, const GroupTile& tile, int row, const float (&sums)[kDim / 8][4], int first, float m,
                                              float l, int lane) {
    const float total = quad_sum(l);
    if (row >= tile.rows) {
        return;
    }
    const int64_t at = tile.partial_row(params, row);
    float* out = params.partial_out + at * kDim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<float2*>(out + n * 8) = make_float2(sums[n][first], sums[n][first + 1]);
    }
    if (lane % 4 == 0) {
        *reinterpret_cast<float2*>(params.partial_sums + at * 2) = make_float2(m, total);
    }
}

template <typename T, class Shape>
__device__ __forceinline__ void leave_rows(const SharedParams& params, const GroupTile& tile, PrefillRows<T, Shape>& state, uint8_t*, int own_row, int lane) {
#pragma unroll
    for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = own_row + r * 16 + half * 8 + lane / 4;
            leave_partial<Shape::kDim>(params, tile, row, state.sums[r], 2 * half, state.m[r][half], state.l[r][half], lane);
        }
    }
}

template <typename T, class Shape>
__device__ __forceinline__ void leave_rows(const SharedParams& params, const GroupTile& tile, GroupRows<T, Shape>& state, uint8_t*, int group_row, int warp_row,
                                           int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = group_row + warp_row + half * 8 + lane / 4;
        leave_partial<Shape::kDim>(params, tile, row, state.sums, 2 * half, state.m[half], state.l[half], lane);
    }
}

/// A CTA has tile x / kv_heads of KV head x % kv_heads; those past the last tile do nothing.
template <typename T, class Shape, bool kHopper>
__device__ __forceinline__ void shared_attention(const SharedParams& params) {
    wait_for_previous_kernel();
    const int index = blockIdx.x / params.kv.kv_heads;
    if (index >= *params.tile_count) {
        return;
    }
    const SharedTile unit = params.tiles[index];
    const GroupTile tile(params, unit, blockIdx.x % params.kv.kv_heads, Shape::kRows);
    if constexpr (kHopper) {
        attend_tile_hopper<T, Shape>(params, tile, unit.sequence);
    } else {
        attend_tile<T, Shape>(params, tile, unit.sequence);
    }
}

}  // namespace pagedd
