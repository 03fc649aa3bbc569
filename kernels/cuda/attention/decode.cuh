// Paged decode attention: few queries a sequence against all of its cached tokens, at the speed of memory.
//
// The context is cut into splits. A CTA works on one unit (16 packed rows, one KV head, one
// split) at a time: its warps take the split's pieces of 16 tokens in turn, each with a ring of copies of its own, and merge in warp order. A second
// kernel merges the splits of a row in the order of their positions. So the bits of a row depend on its own queries, keys and values only, never
// on the batch or the grid.
//
// With the ring full, memory answers late: what a unit needs beside K and V (its description, its block numbers, its queries) is therefore always
// asked for one unit earlier, and nothing in the loop fences or counts in global memory.
#pragma once
#include "stored.cuh"

namespace pagedd {

/// Descriptions of a CTA's units that lie in shared memory: those of the next kListed / 2 units at least.
constexpr int kListed = 32;

/// What the warps of a CTA share beside their rings.
template <int kWarps>
struct DecodeShared {
    DecodeUnit list[kListed];  // unit n of the CTA at n % kListed
    float m[kWarps][kUnitRows];
    float l[kWarps][kUnitRows];
    int stage[kWarps];         // the ring stage in which a warp left its sums
    int64_t at[kUnitRows];     // of the partial results, where a row's are
};

/// Where a warp's sums of a row lie in the stage where it leaves them: columns in groups of eight, permuted so that the rows of a store fall into
/// different banks.
template <int kDim>
__device__ __forceinline__ int left_column(int row, int column) {
    const int mix = kDim % 32 == 0 ? row & 3 : row >> 1 & 1;
    return column ^ (mix * 8);
}

/// `S`: how K and V are kept. They lie in shared memory as they are in blocks, and become what is multiplied in registers.
template <typename S, int kDim, int kWarps, int kStages>
struct DecodeShape {
    using Layout = TileLayout<kDim * Stored<S>::kBytes / 2>;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kPieces = 2 / Stored<S>::kBytes;  // of a stage
    static constexpr int kStageTokens = kPieces * kPieceTokens;
    static constexpr int kRoundTokens = kWarps * kStageTokens;  // a round gives each warp a stage
    static constexpr int kPieceBytes = kPieceTokens * Layout::kRowBytes;
    static constexpr int kTileBytes = kPieces * kPieceBytes;
    static constexpr int kScaleBytes = Stored<S>::kScaled ? kStageTokens * 4 : 0;
    static constexpr int kStageBytes = 2 * kTileBytes + 2 * kScaleBytes;  // K, V, their scales
    static constexpr int kRingBytes = kStages * kStageBytes;
    static constexpr int kSharedBytes = kWarps * kRingBytes + static_cast<int>(sizeof(DecodeShared<kWarps>));
    static_assert(kStageBytes >= kUnitRows * kDim * 4, "a warp leaves its f32 sums in a stage");
    static_assert(!Layout::kPermuted || kStageBytes % Layout::kRowBytes == 0, "tiles begin at a multiple of their rows");
    static_assert(kStages + 2 <= kListed / 2, "the stream reads descriptions ahead");
};

/// The share of a CTA in the units: those of a lane, for one KV head.
struct UnitShare {
    int lanes;
    int lane;
    int kv_head;
    int count;

    __device__ __forceinline__ UnitShare(const DecodeParams& params)
        : lanes(gridDim.x / params.kv.kv_heads), lane(blockIdx.x / params.kv.kv_heads), kv_head(blockIdx.x % params.kv.kv_heads), count(params.lane_counts[lane]) {}

    __device__ __forceinline__ bool has(int n) const { return n < count; }
};

/// One warp starts the copies of the descriptions of units [first, first + kListed / 2). Past the last unit it copies some other description, which
/// nobody reads.
__device__ __forceinline__ void copy_descriptions(DecodeUnit* list, const DecodeParams& params, int first, int lane) {
    const int n = first + lane / 2;
    const int lanes = gridDim.x / params.kv.kv_heads;
    const int unit = min(static_cast<int>(blockIdx.x) / params.kv.kv_heads + n * lanes, params.max_units - 1);
    copy_async(shared_address(list + n % kListed) + lane % 2 * 16, reinterpret_cast<const uint8_t*>(params.units + unit) + lane % 2 * 16, 16);
}

/// One warp's way through its pieces, a stage of them at a time, in the order in which it computes on them. It runs kStages stages ahead and across the end
/// of a unit, so that copies stay in flight while the CTA merges. Every warp takes part in every round of a unit; a piece past the unit's end is zeros.
template <typename S, int kDim, int kWarps, int kStages>
class PieceStream {
    using Shape = DecodeShape<S, kDim, kWarps, kStages>;

  public:
    __device__ __forceinline__ PieceStream(const DecodeParams& params, const UnitShare& share, const DecodeUnit* list, int warp, int lane)
        : params_(params), share_(share), list_(list), warp_(warp), lane_(lane), next_block_(first_entry(0)), head_(params.kv, share.kv_head) {
        open(0);
    }

    /// Starts the copies of the next pieces into a stage. Past the last unit the copy group is empty, so that groups can be counted.
    __device__ __forceinline__ void issue(uint32_t stage) {
        if (share_.has(unit_)) {
            const PagedKv& kv = params_.kv;
#pragma unroll
            for (int piece = 0; piece < Shape::kPieces; ++piece) {
                // The pieces of a stage lie in one block, or in two whose entries are loaded together.
                const int token = token_ + piece * kPieceTokens;
                const int block = __shfl_sync(kFullWarp, block_, (token >> kv.log2_block) - first_block_);
                const int in_block = token & ((1 << kv.log2_block) - 1);
                const int64_t at = block * kv.block_stride;
                const int valid = end_ - token;
                const uint32_t to = stage + piece * Shape::kPieceBytes;
                const uint8_t* from = head_.keys + at + in_block * head_.kRowBytes;
                copy_piece<typename Shape::Layout, 32>(to, from, valid, lane_, copy_);
                copy_piece<typename Shape::Layout, 32>(to + Shape::kTileBytes, from + head_.values, valid, lane_, copy_);
                if (Stored<S>::kScaled && lane_ < 8) {
                    // Four tokens a lane, of keys and then of values.
                    const int side = lane_ / 4;
                    const int first = lane_ % 4 * 4;
                    copy_(stage + 2 * Shape::kTileBytes + side * Shape::kScaleBytes + (piece * kPieceTokens + first) * 4,
                          head_.scales + side * head_.value_scales + at + (in_block + first) * 4, max(0, min(4, valid - first)) * 4);
                }
            }
            token_ += Shape::kRoundTokens;
            if (token_ - warp_ * Shape::kStageTokens >= end_) {
                open(unit_ + 1);
            } else if ((token_ >> kv.log2_block) - first_block_ >= kEntries) {
                first_block_ += kEntries;
                take_entries();
            }
        }
        commit_copies();
    }

  private:
    __device__ __forceinline__ void open(int unit) {
        unit_ = unit;
        if (!share_.has(unit)) {
            return;
        }
        const PagedKv& kv = params_.kv;
        const DecodeUnit& work = list_[unit % kListed];
        token_ = work.first_token + warp_ * Shape::kStageTokens;
        end_ = work.first_token + work.tokens;
        first_block_ = work.first_token >> kv.log2_block;
        take_entries();
    }

    /// The table's entries from first_block_ on; those that come next are on their way from then on.
    __device__ __forceinline__ void take_entries() {
        block_ = next_block_;
        const int next = first_block_ + kEntries;
        next_block_ = next << params_.kv.log2_block < end_ ? entry(list_[unit_ % kListed], next) : first_entry(unit_ + 1);
    }

    __device__ __forceinline__ int first_entry(int unit) const {
        if (!share_.has(unit)) {
            return 0;
        }
        const DecodeUnit& work = list_[unit % kListed];
        return entry(work, work.first_token >> params_.kv.log2_block);
    }

    /// This lane's entry of the table, of those from `first` on. Lanes past the unit's last block keep block 0, whose memory exists and is not read.
    __device__ __forceinline__ int entry(const DecodeUnit& work, int first) const {
        const PagedKv& kv = params_.kv;
        const int at = first + lane_;
        const bool inside = at <= (work.first_token + work.tokens - 1) >> kv.log2_block;
        return inside ? kv.tables[static_cast<int64_t>(work.sequence) * kv.table_stride + at] : 0;
    }

    static constexpr int kEntries = 32;
    const DecodeParams& params_;
    const UnitShare share_;
    const DecodeUnit* list_;
    const int warp_;
    const int lane_;
    const CopyOnce copy_;  // a step's keys and values are far more than the cache holds
    int unit_;
    int token_;  // first token of this warp's next stage
    int end_;
    int first_block_;
    int block_;
    int next_block_;
    const KvHead<S, kDim> head_;
};

/// The rows of a unit as one thread of a warp sees them: rows g and g + 8, for lane 4g + t. Of queries and sums it has, of each 16 columns, 2t and 2t + 1
/// and the same of the second eight; where elements are of one byte 4t to 4t + 3, as they lie together in a register, those with even numbers first.
template <typename T, typename S, int kDim>
struct DecodeRows {
    static constexpr bool kScaled = Stored<S>::kScaled;
    uint32_t q[kDim / 16][4];
    float sums[kDim / 8][4];
    float m[2];
    float l[2];
    int limits[2];     // tokens that the two rows see, none past the unit's end
    int lowest_limit;  // of all rows of the unit

    /// Starts to load the unit's queries. Of a group's unit, `member_token` of lane r is the query token of row r.
    __device__ __forceinline__ void load(const DecodeParams& params, const DecodeUnit& unit, int kv_head, int member_token, int lane) {
        const Queries& queries = params.queries;
        const int group = params.kv.group;
        const bool of_group = unit.splits == 0;
        const int end = unit.first_token + unit.tokens;
        lowest_limit = of_group ? end : min(end, unit.past + unit.first_row / group + 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + half * 8;
            const bool real = row < unit.rows;
            const int packed = unit.first_row + row;
            // A round may reach past the end of a unit that its rows see more than.
            limits[half] = of_group ? end : min(end, unit.past + packed / group + 1);
            const int of_member = __shfl_sync(kFullWarp, member_token, row);
            const int64_t token = of_group ? of_member : unit.first_query + (real ? packed / group : 0);
            const T* from = static_cast<const T*>(queries.q) + token * queries.q_stride + (kv_head * group + packed % group) * kDim + lane % 4 * (kScaled ? 4 : 2);
#pragma unroll
            for (int k = 0; k < kDim / 16; ++k) {
                if constexpr (kScaled) {
                    const uint2 four = real ? *reinterpret_cast<const uint2*>(from + k * 16) : make_uint2(0, 0);
                    q[k][half] = __byte_perm(four.x, four.y, 0x5410);
                    q[k][half + 2] = __byte_perm(four.x, four.y, 0x7632);
                } else {
                    q[k][half] = real ? *reinterpret_cast<const uint32_t*>(from + k * 16) : 0;
                    q[k][half + 2] = real ? *reinterpret_cast<const uint32_t*>(from + k * 16 + 8) : 0;
                }
            }
        }
    }

    __device__ __forceinline__ void reset() {
        m[0] = m[1] = -INFINITY;
        l[0] = l[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums[n][i] = 0.0f;
            }
        }
    }

    /// Takes in the tokens from `token` on, whose K and V lie in `stage`.
    template <class Shape>
    __device__ __forceinline__ void attend(uint32_t stage, int token, float scale_log2, int lane) {
        if constexpr (kScaled) {
            attend_scaled<Shape>(stage, token, scale_log2, lane);
        } else {
            attend_piece<Shape>(stage, token, scale_log2, lane);
        }
    }

    template <class Shape>
    __device__ __forceinline__ void attend_piece(uint32_t stage, int token, float scale_log2, int lane) {
        using Layout = typename Shape::Layout;
        float scores[2][4] = {};
        const uint32_t keys = Layout::depth_first(stage, lane);
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k) {
            uint32_t b[4];
            load_matrices(b, Layout::advance(keys, k));
            multiply_add<T>(scores[0], q[k], b[0], b[1]);
            multiply_add<T>(scores[1], q[k], b[2], b[3]);
        }
        if (token + kPieceTokens > lowest_limit) {
            mask_scores(scores, token, limits, lane);
        }
        const float factor_low = softmax_step<2, false>(scores, scale_log2, m[0], l[0]);
        const float factor_high = softmax_step<2, true>(scores, scale_log2, m[1], l[1]);
        const uint32_t weights[4] = {pack<T>(scores[0][0], scores[0][1]), pack<T>(scores[0][2], scores[0][3]),
                                     pack<T>(scores[1][0], scores[1][1]), pack<T>(scores[1][2], scores[1][3])};
        const uint32_t values = Layout::rows_first(stage + Shape::kTileBytes, lane);
#pragma unroll
        for (int n = 0; n < kDim / 16; ++n) {
            uint32_t b[4];
            load_matrices_transposed(b, Layout::advance(values, n));
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                float(&sum)[4] = sums[2 * n + side];
                sum[0] *= factor_low;
                sum[1] *= factor_low;
                sum[2] *= factor_high;
                sum[3] *= factor_high;
                multiply_add<T>(sum, weights, b[2 * side], b[2 * side + 1]);
            }
        }
    }

    /// The same of elements of one byte. Scales of keys are factors of scores, those of values of weights.
    template <class Shape>
    __device__ __forceinline__ void attend_scaled(uint32_t stage, int token, float scale_log2, int lane) {
        using Layout = typename Shape::Layout;
        constexpr int kTiles = Shape::kStageTokens / 8;
        float scores[kTiles][4] = {};
#pragma unroll
        for (int piece = 0; piece < Shape::kPieces; ++piece) {
            const uint32_t keys = Layout::rows_first(stage + piece * Shape::kPieceBytes, lane);
#pragma unroll
            for (int k = 0; k < kDim / 16; k += 2) {
                uint32_t raw[4];
                load_matrices(raw, Layout::advance(keys, k / 2));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (k + i / 2 < kDim / 16) {
                        const Widened<T> b = widen<T>(raw[i]);
                        multiply_add<T>(scores[2 * piece + i % 2], q[k + i / 2], b.even, b.odd);
                    }
                }
            }
        }
        const uint32_t scales = stage + 2 * Shape::kTileBytes + lane % 4 * 8;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float2 of_keys = load_two(scales + n * 32);
            scores[n][0] *= of_keys.x;
            scores[n][1] *= of_keys.y;
            scores[n][2] *= of_keys.x;
            scores[n][3] *= of_keys.y;
        }
        if (token + Shape::kStageTokens > lowest_limit) {
            mask_scores(scores, token, limits, lane);
        }
        const float factor_low = softmax_step<kTiles, false>(scores, scale_log2, m[0], l[0]);
        const float factor_high = softmax_step<kTiles, true>(scores, scale_log2, m[1], l[1]);
        uint32_t weights[Shape::kPieces][4];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float2 of_values = load_two(scales + Shape::kScaleBytes + n * 32);
            weights[n / 2][n % 2 * 2] = pack<T>(scores[n][0] * of_values.x, scores[n][1] * of_values.y);
            weights[n / 2][n % 2 * 2 + 1] = pack<T>(scores[n][2] * of_values.x, scores[n][3] * of_values.y);
        }
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
            sums[n][0] *= factor_low;
            sums[n][1] *= factor_low;
            sums[n][2] *= factor_high;
            sums[n][3] *= factor_high;
        }
#pragma unroll
        for (int piece = 0; piece < Shape::kPieces; ++piece) {
            const uint32_t values = Layout::rows_first(stage + Shape::kTileBytes + piece * Shape::kPieceBytes, lane);
#pragma unroll
            for (int n = 0; n < kDim / 16; n += 2) {
                uint32_t raw[4];
                load_matrices_transposed(raw, Layout::advance(values, n / 2));
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (n + i < kDim / 16) {
                        const Widened<T> low = widen<T>(raw[2 * i]);
                        const Widened<T> high = widen<T>(raw[2 * i + 1]);
                        multiply_add<T>(sums[2 * (n + i)], weights[piece], low.even, high.even);
                        multiply_add<T>(sums[2 * (n + i) + 1], weights[piece], low.odd, high.odd);
                    }
                }
            }
        }
    }

    /// Leaves the first `rows` rows' sums at `to` [row, dim] and their maxima and weights in `m_out` and `l_out`.
    __device__ __forceinline__ void leave(float* to, float* m_out, float* l_out, int rows, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float total = quad_sum(l[half]);
            const int row = lane / 4 + half * 8;
            if (row < rows) {
#pragma unroll
                for (int n = 0; n < kDim / 8; ++n) {
                    if constexpr (!kScaled) {
                        *reinterpret_cast<float2*>(to + row * kDim + left_column<kDim>(row, n * 8) + lane % 4 * 2) =
                            make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
                    } else if (n % 2 == 0) {
                        *reinterpret_cast<float4*>(to + row * kDim + left_column<kDim>(row, n * 8 + lane % 4 * 4)) =
                            make_float4(sums[n][2 * half], sums[n + 1][2 * half], sums[n][2 * half + 1], sums[n + 1][2 * half + 1]);
                    }
                }
                if (lane % 4 == 0) {
                    m_out[row] = m[half];
                    l_out[row] = total;
                }
            }
        }
    }
};

__device__ __forceinline__ void add_scaled(float4& sum, float weight, const float4& x) {
    sum.x = fmaf(weight, x.x, sum.x);
    sum.y = fmaf(weight, x.y, sum.y);
    sum.z = fmaf(weight, x.z, sum.z);
    sum.w = fmaf(weight, x.w, sum.w);
}

/// Writes four elements of a packed row's output, divided by the sum of its weights.
template <typename T, int kDim>
__device__ __forceinline__ void write_output(const DecodeParams& params, int first_query, int packed, int kv_head, int column, const float4& sum, float total) {
    const Queries& queries = params.queries;
    const int group = params.kv.group;
    const int64_t token = first_query + packed / group;
    T* to = static_cast<T*>(queries.out) + token * queries.out_stride + (kv_head * group + packed % group) * kDim + column;
    const float scale = 1.0f / total;
    *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(sum.x * scale, sum.y * scale), pack<T>(sum.z * scale, sum.w * scale));
}

/// Row lane % 16 of a group's unit; of a row that is not there, the unit's last. Nothing where the unit is a sequence's.
__device__ __forceinline__ Member member_of(const DecodeParams& params, const DecodeUnit& unit, int lane) {
    const int packed = unit.first_row + min(lane % kUnitRows, unit.rows - 1);
    return unit.splits == 0 ? params.members[unit.first_query + packed / params.kv.group] : Member{0, 0};
}

/// Where the partial results of row lane % 16 of a unit are.
__device__ __forceinline__ int64_t partial_row(const DecodeParams& params, const DecodeUnit& unit, const Member& member, int kv_head, int lane) {
    const int row = lane % kUnitRows;
    const int64_t slot = unit.slot + (unit.splits == 0 ? member.first_slot : 0);
    return (slot * params.kv.kv_heads + kv_head) * params.rows_per_unit + (unit.splits == 0 ? (unit.first_row + row) % params.kv.group : row);
}

/// Merges the warps' sums of a unit in warp order: into the output if the sequence has one split, else into its slot.
template <typename T, typename S, int kDim, int kWarps, int kStages>
__device__ __forceinline__ void merge_warps(const DecodeParams& params, const DecodeUnit& unit, int kv_head, const uint8_t* rings,
                                            const DecodeShared<kWarps>& shared) {
    using Shape = DecodeShape<S, kDim, kWarps, kStages>;
    for (int i = threadIdx.x; i < unit.rows * (kDim / 4); i += Shape::kThreads) {
        const int row = i / (kDim / 4);
        const int column = i % (kDim / 4) * 4;
        float top = -INFINITY;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            top = fmaxf(top, shared.m[w][row]);
        }
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float weight = partial_weight(shared.m[w][row], top);
            const uint8_t* left = rings + w * Shape::kRingBytes + shared.stage[w] * Shape::kStageBytes;
            add_scaled(sum, weight, *reinterpret_cast<const float4*>(left + (row * kDim + left_column<kDim>(row, column)) * 4));
            total = fmaf(weight, shared.l[w][row], total);
        }
        if (unit.splits == 1) {
            write_output<T, kDim>(params, unit.first_query, unit.first_row + row, kv_head, column, sum, total);
        } else {
            *reinterpret_cast<float4*>(params.partial_out + shared.at[row] * kDim + column) = sum;
            if (column == 0) {
                *reinterpret_cast<float2*>(params.partial_sums + shared.at[row] * 2) = make_float2(top, total);
            }
        }
    }
}

template <typename T, typename S, int kDim, int kWarps, int kStages>
__device__ __forceinline__ void decode_attention(const DecodeParams& params) {
    using Shape = DecodeShape<S, kDim, kWarps, kStages>;
    extern __shared__ __align__(1024) uint8_t rings[];
    DecodeShared<kWarps>& shared = *reinterpret_cast<DecodeShared<kWarps>*>(rings + kWarps * Shape::kRingBytes);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const uint32_t ring = shared_address(rings) + warp * Shape::kRingBytes;
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (warp == 0) {
        copy_descriptions(shared.list, params, 0, lane);
        copy_descriptions(shared.list, params, kListed / 2, lane);
        commit_copies();
    }
    const UnitShare share(params);
    if (!share.has(0)) {
        wait_copies<0>();
        return;
    }
    wait_copies<0>();
    __syncthreads();

    PieceStream<S, kDim, kWarps, kStages> stream(params, share, shared.list, warp, lane);
    DecodeRows<T, S, kDim> state;
    Member next = member_of(params, shared.list[0], lane);
    state.load(params, shared.list[0], share.kv_head, next.token, lane);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
        stream.issue(ring + stage * Shape::kStageBytes);
    }

    int stage = 0;
    for (int n = 0; share.has(n); ++n) {
        const DecodeUnit& unit = shared.list[n % kListed];
        if (warp == 0 && lane < kUnitRows) {
            shared.at[lane] = partial_row(params, unit, next, share.kv_head, lane);
        }
        if (share.has(n + 1)) {
            next = member_of(params, shared.list[(n + 1) % kListed], lane);
        }
        state.reset();
        const int end_token = unit.first_token + unit.tokens;
        for (int round = unit.first_token; round < end_token; round += Shape::kRoundTokens) {
            wait_copies<kStages - 1>();
            __syncwarp();
            state.template attend<Shape>(ring + stage * Shape::kStageBytes, round + warp * Shape::kStageTokens, params.queries.scale_log2, lane);
            __syncwarp();
            // The last stage is not refilled yet: the warp leaves its sums there.
            if (round + Shape::kRoundTokens < end_token) {
                stream.issue(ring + stage * Shape::kStageBytes);
                stage = stage + 1 == kStages ? 0 : stage + 1;
            }
        }
        uint8_t* left = rings + warp * Shape::kRingBytes + stage * Shape::kStageBytes;
        state.leave(reinterpret_cast<float*>(left), shared.m[warp], shared.l[warp], unit.rows, lane);
        if (lane == 0) {
            shared.stage[warp] = stage;
        }
        if (share.has(n + 1)) {
            // The next unit's queries are on their way while the CTA merges.
            state.load(params, shared.list[(n + 1) % kListed], share.kv_head, next.token, lane);
        }
        __syncthreads();
        merge_warps<T, S, kDim, kWarps, kStages>(params, unit, share.kv_head, rings, shared);
        __syncthreads();
        if (warp == 0 && n % (kListed / 2) == kListed / 2 - 1) {
            // The half of the list that is done with is filled anew; it joins the copy group of the piece that follows.
            copy_descriptions(shared.list, params, n + 1 + kListed / 2, lane);
        }
        stream.issue(ring + stage * Shape::kStageBytes);
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    wait_copies<0>();
}

}  // namespace pagedd
