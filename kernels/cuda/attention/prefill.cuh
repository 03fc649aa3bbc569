// Paged prefill attention: many queries a sequence, causal, limited by the tensor cores.
//
// A CTA owns a tile of packed rows of one sequence and KV head, and walks over the keys in tiles counted from position 0, K and V tiles in turn
// through one ring of shared memory. Each warp owns its rows for good, so that warps meet only where the ring advances. A row's bits depend on its
// own queries, keys and values only: not on the batch, and not on how a prompt was cut into chunks.
#pragma once
#include "raw_tiles.cuh"

namespace pagedd {

/// `S`: how K and V are kept. `kRowTiles`: tiles of 16 rows of a warp; each K and V fragment that it loads serves all of them. `kKeys`: tokens of a step.
/// `kSlots`: ring slots of one K or V tile each.
template <typename S, int kDim_, int kWarps_, int kRowTiles_, int kKeys_, int kSlots_>
struct PrefillShape {
    using Element = S;
    static constexpr int kDim = kDim_;
    static constexpr int kWarps = kWarps_;
    static constexpr int kRowTiles = kRowTiles_;
    static constexpr int kKeys = kKeys_;
    static constexpr int kSlots = kSlots_;
    using Layout = TileLayout<kDim>;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kWarpRows = kRowTiles * 16;
    static constexpr int kRows = kWarps * kWarpRows;
    static constexpr int kQueryBytes = kRows * Layout::kRowBytes;
    static constexpr int kPieceBytes = kPieceTokens * Layout::kRowBytes;
    static constexpr int kSlotBytes = kKeys / kPieceTokens * kPieceBytes;
    static constexpr int kRawSlots = Stored<S>::kScaled ? 2 : 0;
    static constexpr int kRawBytes = raw_tile_bytes<kDim, kKeys>();
    static constexpr int kSharedBytes = kQueryBytes + kSlots * kSlotBytes + kRawSlots * kRawBytes;
    static_assert(!Stored<S>::kScaled || kSlots == 2, "a tile is widened while the one before it is computed on");
    static_assert(kSlots >= 2 && kKeys % kPieceTokens == 0, "a slot is computed on while another is filled");
};

/// The CTA's tile of packed rows.
struct PrefillTile {
    int kv_head;
    int group;
    int first_row;
    int rows;         // that exist, from first_row on
    int first_query;  // the sequence's first token in the query and output tensors
    int past;         // tokens before it
    int keys;         // that the last row sees

    __device__ __forceinline__ PrefillTile(const PrefillParams& params, const PrefillUnit& unit, int kv_head_, int tile_rows)
        : kv_head(kv_head_),
          group(params.kv.group),
          first_row(unit.first_row),
          rows(min(tile_rows, unit.rows)),
          first_query(unit.first_query),
          past(unit.past),
          keys(limit(rows - 1)) {}

    /// The first token that is read.
    static __device__ __forceinline__ int first() { return 0; }

    /// Tokens that a row of the tile sees.
    __device__ __forceinline__ int limit(int row) const { return past + (first_row + row) / group + 1; }

    /// Where a row's head begins in a tensor [token, stride].
    __device__ __forceinline__ int64_t element(int row, int64_t stride, int dim) const {
        const int packed = first_row + row;
        return (first_query + packed / group) * stride + (kv_head * group + packed % group) * dim;
    }
};

/// The CTA's way through K and V tiles: K of tile 0, V of tile 0, K of tile 1, ...
template <class Shape, class Tile>
class TileStream {
    using Layout = typename Shape::Layout;

  public:
    __device__ __forceinline__ TileStream(const PagedKv& kv, int sequence, const Tile& tile, uint32_t ring)
        : kv_(kv), table_(kv.tables + static_cast<int64_t>(sequence) * kv.table_stride), head_(kv, tile.kv_head), keys_(tile.keys), ring_(ring), token_(tile.first()) {
        blocks_ = next_blocks_ = load_blocks(token_);
    }

    /// Waits for this thread's copies of the tile that is computed on next.
    __device__ __forceinline__ void wait() const { wait_copies<Shape::kSlots - 2>(); }

    /// Starts the copies of the next K or V tile into the next slot. Past the last tile the copy group is empty, so that groups can be counted.
    __device__ __forceinline__ void issue() {
        if (token_ < keys_) {
            if (!values_next_) {
                // The table entries of a tile are loaded one tile ahead of their use.
                blocks_ = next_blocks_;
                next_blocks_ = load_blocks(token_ + Shape::kKeys);
            }
            const uint8_t* from = values_next_ ? head_.keys + head_.values : head_.keys;
            const int mask = (1 << kv_.log2_block) - 1;
#pragma unroll
            for (int piece = 0; piece < Shape::kKeys / kPieceTokens; ++piece) {
                const int at = piece * kPieceTokens;
                const int block = __shfl_sync(kFullWarp, blocks_, at >> kv_.log2_block);
                copy_piece<Layout, Shape::kThreads>(ring_ + slot_ * Shape::kSlotBytes + piece * Shape::kPieceBytes,
                                                         from + block * kv_.block_stride + ((token_ + at) & mask) * head_.kRowBytes,
                                                         keys_ - token_ - at, threadIdx.x);
            }
            token_ += values_next_ ? Shape::kKeys : 0;
            values_next_ = !values_next_;
            slot_ = slot_ + 1 == Shape::kSlots ? 0 : slot_ + 1;
        }
        commit_copies();
    }

  private:
    /// This lane's entry of the table, of the blocks of the tile at `token`. Lanes past the last key keep block 0: its memory exists and is not read.
    __device__ __forceinline__ int load_blocks(int token) const {
        const int at = token + (threadIdx.x % 32 << kv_.log2_block);
        return at < min(keys_, token + Shape::kKeys) ? table_[at >> kv_.log2_block] : 0;
    }

    const PagedKv& kv_;
    const int32_t* table_;
    const KvHead<typename Shape::Element, Shape::kDim> head_;
    int keys_;
    uint32_t ring_;
    int token_;
    bool values_next_ = false;
    int slot_ = 0;
    int blocks_;
    int next_blocks_;
};

/// The same where tiles are widened on their way: one comes in raw while the one before it is widened.
template <typename T, class Shape, class Tile>
class WidenedStream {
    using Layout = typename Shape::Layout;

  public:
    /// Commits what the thread copied before.
    __device__ __forceinline__ WidenedStream(const PagedKv& kv, int sequence, const Tile& tile, uint32_t ring)
        : raw_(kv, sequence, tile, ring + Shape::kSlots * Shape::kSlotBytes), ring_(ring), left_(raw_.count()) {
        raw_.start();
    }

    __device__ __forceinline__ void wait() const {}

    /// Widens the next tile into the next slot.
    __device__ __forceinline__ void issue() {
        raw_.start();
        wait_copies<1>();
        if (left_ > 0) {
            --left_;
            raw_.template finish<T, Layout>(ring_ + slot_ * Shape::kSlotBytes);
            slot_ = slot_ + 1 == Shape::kSlots ? 0 : slot_ + 1;
        }
    }

  private:
    RawTiles<Shape, Tile> raw_;
    uint32_t ring_;
    int left_;
    int slot_ = 0;
};

template <typename T, class Shape, class Tile, bool kScaled = Stored<typename Shape::Element>::kScaled>
struct StreamOf {
    using Type = TileStream<Shape, Tile>;
};

template <typename T, class Shape, class Tile>
struct StreamOf<T, Shape, Tile, true> {
    using Type = WidenedStream<T, Shape, Tile>;
};

/// One warp's rows: their running softmax and sums.
template <typename T, class Shape>
struct PrefillRows {
    using Layout = TileLayout<Shape::kDim>;
    static constexpr int kKeyTiles = Shape::kKeys / 8;
    static constexpr int kDimTiles = Shape::kDim / 8;

    float sums[Shape::kRowTiles][kDimTiles][4];
    float m[Shape::kRowTiles][2];
    float l[Shape::kRowTiles][2];

    __device__ __forceinline__ PrefillRows() {
#pragma unroll
        for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums[r][n][i] = 0.0f;
                }
            }
            m[r][0] = m[r][1] = -INFINITY;
            l[r][0] = l[r][1] = 0.0f;
        }
    }

    /// scores = Q K^T of the warp's rows at `queries` and the keys at `keys`.
    static __device__ __forceinline__ void score(float (&scores)[Shape::kRowTiles][kKeyTiles][4], uint32_t queries, uint32_t keys, int lane) {
#pragma unroll
        for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    scores[r][n][i] = 0.0f;
                }
            }
        }
        const uint32_t q_address = Layout::rows_first(queries, lane);
        const uint32_t k_address = Layout::depth_first(keys, lane);
#pragma unroll
        for (int k = 0; k < Shape::kDim / 16; ++k) {
            uint32_t a[Shape::kRowTiles][4];
#pragma unroll
            for (int r = 0; r < Shape::kRowTiles; ++r) {
                load_matrices(a[r], Layout::advance(q_address, k) + r * 16 * Layout::kRowBytes);
            }
#pragma unroll
            for (int piece = 0; piece < Shape::kKeys / 16; ++piece) {
                uint32_t b[4];
                load_matrices(b, Layout::advance(k_address, k) + piece * Shape::kPieceBytes);
#pragma unroll
                for (int r = 0; r < Shape::kRowTiles; ++r) {
                    multiply_add<T>(scores[r][2 * piece], a[r], b[0], b[1]);
                    multiply_add<T>(scores[r][2 * piece + 1], a[r], b[2], b[3]);
                }
            }
        }
    }

    /// Turns scores into weights, and scales the sums where a row's maximum has grown.
    __device__ __forceinline__ void soften(float (&scores)[Shape::kRowTiles][kKeyTiles][4], float scale_log2) {
#pragma unroll
        for (int r = 0; r < Shape::kRowTiles; ++r) {
            const float low = softmax_step<kKeyTiles, false>(scores[r], scale_log2, m[r][0], l[r][0]);
            const float high = softmax_step<kKeyTiles, true>(scores[r], scale_log2, m[r][1], l[r][1]);
            // Once a row has seen its largest score the factors are exactly 1.
            if (__any_sync(kFullWarp, low != 1.0f || high != 1.0f)) {
#pragma unroll
                for (int n = 0; n < kDimTiles; ++n) {
                    sums[r][n][0] *= low;
                    sums[r][n][1] *= low;
                    sums[r][n][2] *= high;
                    sums[r][n][3] *= high;
                }
            }
        }
    }

    /// sums += weights V, of the values at `values`.
    __device__ __forceinline__ void gather(const float (&weights)[Shape::kRowTiles][kKeyTiles][4], uint32_t values, int lane) {
        const uint32_t v_address = Layout::rows_first(values, lane);
#pragma unroll
        for (int piece = 0; piece < Shape::kKeys / 16; ++piece) {
            uint32_t a[Shape::kRowTiles][4];
#pragma unroll
            for (int r = 0; r < Shape::kRowTiles; ++r) {
                const float(&left)[4] = weights[r][2 * piece];
                const float(&right)[4] = weights[r][2 * piece + 1];
                a[r][0] = pack<T>(left[0], left[1]);
                a[r][1] = pack<T>(left[2], left[3]);
                a[r][2] = pack<T>(right[0], right[1]);
                a[r][3] = pack<T>(right[2], right[3]);
            }
#pragma unroll
            for (int n = 0; n < kDimTiles / 2; ++n) {
                uint32_t b[4];
                load_matrices_transposed(b, Layout::advance(v_address, n) + piece * Shape::kPieceBytes);
#pragma unroll
                for (int r = 0; r < Shape::kRowTiles; ++r) {
                    multiply_add<T>(sums[r][2 * n], a[r], b[0], b[1]);
                    multiply_add<T>(sums[r][2 * n + 1], a[r], b[2], b[3]);
                }
            }
        }
    }

    /// Divides the sums and writes them over the warp's own rows of queries at `to`, from where they leave 16 bytes at a time.
    __device__ __forceinline__ void finish(uint8_t* to, int lane) {
#pragma unroll
        for (int r = 0; r < Shape::kRowTiles; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float scale = 1.0f / quad_sum(l[r][half]);
                const int row = r * 16 + half * 8 + lane / 4;
#pragma unroll
                for (int n = 0; n < kDimTiles; ++n) {
                    *reinterpret_cast<uint32_t*>(to + Layout::offset(row, n) + lane % 4 * 4) =
                        pack<T>(sums[r][n][2 * half] * scale, sums[r][n][2 * half + 1] * scale);
                }
            }
        }
    }
};

/// Copies the tile's queries to shared memory; rows that do not exist become zeros.
template <typename T, class Shape, class Tile>
__device__ __forceinline__ void load_queries(const Queries& queries, const Tile& tile, uint32_t to) {
    using Layout = TileLayout<Shape::kDim>;
    const T* q = static_cast<const T*>(queries.q);
    for (int i = threadIdx.x; i < Shape::kRows * Layout::kChunks; i += Shape::kThreads) {
        const int row = i / Layout::kChunks;
        const int chunk = i % Layout::kChunks;
        const bool real = row < tile.rows;
        const T* from = real ? q + tile.element(row, queries.q_stride, Shape::kDim) + chunk * 8 : q;
        copy_async(to + Layout::offset(row, chunk), from, real ? 16 : 0);
    }
}

/// Writes a warp's rows to the output; `own` is where its queries were.
template <typename T, class Shape>
__device__ __forceinline__ void leave_rows(const PrefillParams& params, const PrefillTile& tile, PrefillRows<T, Shape>& state, uint8_t* own, int own_row,
                                           int lane) {
    using Layout = TileLayout<Shape::kDim>;
    state.finish(own, lane);
    __syncwarp();
    T* out = static_cast<T*>(params.queries.out);
    for (int i = lane; i < Shape::kWarpRows * Layout::kChunks; i += 32) {
        const int row = i / Layout::kChunks;
        const int chunk = i % Layout::kChunks;
        if (own_row + row < tile.rows) {
            *reinterpret_cast<uint4*>(out + tile.element(own_row + row, params.queries.out_stride, Shape::kDim) + chunk * 8) =
                *reinterpret_cast<const uint4*>(own + Layout::offset(row, chunk));
        }
    }
}

/// Attention of a tile of packed rows to the tokens [tile.first(), tile.keys) of a table.
template <typename T, class Shape, class Params, class Tile>
__device__ __forceinline__ void attend_tile(const Params& params, const Tile& tile, int sequence) {
    using Layout = TileLayout<Shape::kDim>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const uint32_t ring = shared_address(shared) + Shape::kQueryBytes;
    load_queries<T, Shape>(params.queries, tile, shared_address(shared));
    typename StreamOf<T, Shape, Tile>::Type stream(params.kv, sequence, tile, ring);
#pragma unroll
    for (int slot = 0; slot < Shape::kSlots - 1; ++slot) {
        stream.issue();  // the first group holds the queries too
    }

    const int own_row = warp * Shape::kWarpRows;
    const bool has_rows = own_row < tile.rows;
    const int lowest_limit = tile.limit(own_row);
    const int highest_limit = has_rows ? tile.limit(min(own_row + Shape::kWarpRows, tile.rows) - 1) : 0;
    int limits[Shape::kRowTiles][2];
#pragma unroll
    for (int r = 0; r < Shape::kRowTiles; ++r) {
        limits[r][0] = tile.limit(own_row + r * 16 + lane / 4);
        limits[r][1] = tile.limit(own_row + r * 16 + lane / 4 + 8);
    }
    uint8_t* own = shared + own_row * Layout::kRowBytes;

    PrefillRows<T, Shape> state;
    int slot = 0;
    for (int token = tile.first(); token < tile.keys; token += Shape::kKeys) {
        // A warp whose rows see nothing of this tile only keeps step with the others.
        const bool sees = token < highest_limit;
        float scores[Shape::kRowTiles][Shape::kKeys / 8][4];

        // The barrier says both that this slot is filled and that every warp is done with the one before, which is filled anew.
        stream.wait();
        __syncthreads();
        stream.issue();
        if (sees) {
            PrefillRows<T, Shape>::score(scores, shared_address(own), ring + slot * Shape::kSlotBytes, lane);
            if (token + Shape::kKeys > lowest_limit) {
#pragma unroll
                for (int r = 0; r < Shape::kRowTiles; ++r) {
                    mask_scores(scores[r], token, limits[r], lane);
                }
            }
            state.soften(scores, params.queries.scale_log2);
        }
        slot = slot + 1 == Shape::kSlots ? 0 : slot + 1;

        stream.wait();
        __syncthreads();
        stream.issue();
        if (sees) {
            state.gather(scores, ring + slot * Shape::kSlotBytes, lane);
        }
        slot = slot + 1 == Shape::kSlots ? 0 : slot + 1;
    }

    if (has_rows) {
        leave_rows<T, Shape>(params, tile, state, own, own_row, lane);
    }
}

template <typename T, class Shape>
__device__ __forceinline__ void prefill_attention(const PrefillParams& params) {
    wait_for_previous_kernel();
    const PrefillUnit unit = params.units[blockIdx.x / params.kv.kv_heads];
    const PrefillTile tile(params, unit, blockIdx.x % params.kv.kv_heads, Shape::kRows);
    attend_tile<T, Shape>(params, tile, unit.sequence);
}

}  // namespace pagedd
