// Paged prefill attention with the warpgroup instructions of sm_90a.
//
// One warpgroup copies K and V tiles from their blocks into a ring; each of the others owns 64 packed rows and multiplies from shared memory. While
// the tensor cores work on weights * V of one tile and Q K^T of the next, a warpgroup computes the softmax in between. Tiles are counted from
// position 0, so that a row's bits depend on its own queries, keys and values only, as in prefill.cuh.
#pragma once
#include "prefill.cuh"
#include "wgmma.cuh"

namespace pagedd {

/// Rows of kDim elements as blocks of 64 columns, each block rows of 128 bytes with their chunks permuted: what a wgmma operand looks like.
template <int kDim, int kRows>
struct OperandLayout {
    static constexpr int kChunks = kDim / 8;
    static constexpr int kColumnBytes = kRows * 128;
    static constexpr int kBytes = kDim / 64 * kColumnBytes;

    static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
        return chunk / 8 * kColumnBytes + row * 128 + ((chunk ^ row) & 7) * 16;
    }

    /// As TileLayout's.
    static __device__ __forceinline__ uint32_t down(uint32_t address, int rows) { return (address ^ ((rows & 7) * 16)) + rows * 128; }
};

/// `S`: how K and V are kept.
template <typename S, int kDim_, int kGroups_, int kKeys_, int kStages_, int kCtas_>
struct HopperShape {
    using Element = S;
    static constexpr int kDim = kDim_;
    static constexpr int kGroups = kGroups_;  // warpgroups that compute
    static constexpr int kKeys = kKeys_;      // tokens of a K or V tile
    static constexpr int kStages = kStages_;  // of one K and one V tile each
    static constexpr int kCtas = kCtas_;      // an SM
    /// The groups' products follow one another, so that one's softmax falls into the others' products.
    static constexpr bool kTurns = kGroups > 1;
    static constexpr int kProducerRegisters = Stored<S>::kScaled ? 56 : 40;
    static constexpr int kRegisters = (65536 / 128 / kCtas - kProducerRegisters) / kGroups / 8 * 8;
    static constexpr int kRows = kGroups * 64;
    static constexpr int kThreads = (kGroups + 1) * 128;
    static constexpr int kSlots = 2 * kStages;
    using QueryLayout = OperandLayout<kDim, 64>;
    using Layout = OperandLayout<kDim, kKeys>;
    static constexpr int kQueryBytes = kGroups * QueryLayout::kBytes;
    static constexpr int kSlotBytes = Layout::kBytes;
    static constexpr int kPieceBytes = kPieceTokens * 128;  // from a piece of 16 tokens to the next, in each block of columns
    /// Of tiles that come in raw: as many as there is room for, up to four.
    static constexpr int kRawBytes = raw_tile_bytes<kDim, kKeys>();
    static constexpr int kBarrierBytes = 2 * kSlots * 8;
    static constexpr int kRawRoom = (232448 / kCtas - 1024 * (kCtas - 1) - kQueryBytes - kSlots * kSlotBytes - kBarrierBytes) / kRawBytes;
    static constexpr int kRawSlots = !Stored<S>::kScaled ? 0 : kRawRoom < 4 ? kRawRoom : 4;
    static constexpr int kSharedBytes = kQueryBytes + kSlots * kSlotBytes + kBarrierBytes + kRawSlots * kRawBytes;
    static_assert(!Stored<S>::kScaled || kRawSlots >= 2, "a tile comes in while the one before it is widened");
    static_assert(kDim % 64 == 0, "columns come in blocks of 64");
    static_assert(kStages >= 2, "a tile is handed over once the next is started, for which V of the tile before must not be waited for");
};

/// The barriers of the ring: slot 2s holds K of stage s, slot 2s + 1 its V.
template <class Shape>
struct Ring {
    uint32_t tiles;
    uint32_t barriers;

    __device__ __forceinline__ uint32_t tile(int slot) const { return tiles + slot * Shape::kSlotBytes; }
    __device__ __forceinline__ uint32_t filled(int slot) const { return barriers + slot * 8; }
    __device__ __forceinline__ uint32_t empty(int slot) const { return barriers + (Shape::kSlots + slot) * 8; }
};

/// The producer warpgroup: K of tile 0, V of tile 0, K of tile 1, ... into the slots in turn.
template <class Shape, class Tile>
__device__ __forceinline__ void fill_ring(const PagedKv& kv, int sequence, const Tile& tile, const Ring<Shape>& ring) {
    const int thread = threadIdx.x % 128;
    const int lane = threadIdx.x % 32;
    const int32_t* table = kv.tables + static_cast<int64_t>(sequence) * kv.table_stride;
    const KvHead<typename Shape::Element, Shape::kDim> head(kv, tile.kv_head);
    const int mask = (1 << kv.log2_block) - 1;
    const auto load_blocks = [&](int token) {
        const int at = token + (lane << kv.log2_block);
        return at < min(tile.keys, token + Shape::kKeys) ? table[at >> kv.log2_block] : 0;
    };
    int blocks = 0;
    int next_blocks = load_blocks(tile.first());
    int slot = 0;
    int last_slot = -1;
    int parity = 1;  // of the end of the slot's last use: the first use waits for nothing
    for (int token = tile.first(); token < tile.keys; token += Shape::kKeys) {
        blocks = next_blocks;
        next_blocks = load_blocks(token + Shape::kKeys);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            barrier_wait(ring.empty(slot), parity);
            const uint8_t* from = side == 0 ? head.keys : head.keys + head.values;
#pragma unroll
            for (int piece = 0; piece < Shape::kKeys / kPieceTokens; ++piece) {
                const int at = piece * kPieceTokens;
                const int block = __shfl_sync(kFullWarp, blocks, at >> kv.log2_block);
                copy_piece<typename Shape::Layout, 128>(ring.tile(slot) + piece * Shape::kPieceBytes,
                                                        from + block * kv.block_stride + ((token + at) & mask) * head.kRowBytes,
                                                        tile.keys - token - at, thread);
            }
            commit_copies();
            // One tile stays in flight while the next is started; then it is handed over.
            if (last_slot >= 0) {
                wait_copies<1>();
                fence_for_matrix_units();
                barrier_arrive(ring.filled(last_slot));
            }
            last_slot = slot;
            slot = slot + 1 == Shape::kSlots ? 0 : slot + 1;
            parity ^= slot == 0 ? 1 : 0;
        }
    }
    wait_copies<0>();
    fence_for_matrix_units();
    barrier_arrive(ring.filled(last_slot));
}

/// The same where tiles are widened on their way.
template <typename T, class Shape, class Tile>
__device__ __forceinline__ void fill_ring_widened(const PagedKv& kv, int sequence, const Tile& tile, const Ring<Shape>& ring) {
    RawTiles<Shape, Tile> raw(kv, sequence, tile, ring.barriers + Shape::kBarrierBytes);
    const int count = raw.count();
#pragma unroll
    for (int i = 0; i < Shape::kRawSlots - 1; ++i) {
        raw.start();
    }
    int slot = 0;
    int parity = 1;  // as above
    for (int i = 0; i < count; ++i) {
        raw.start();
        wait_copies<Shape::kRawSlots - 1>();
        barrier_wait(ring.empty(slot), parity);
        raw.template finish<T, typename Shape::Layout>(ring.tile(slot));
        fence_for_matrix_units();
        barrier_arrive(ring.filled(slot));
        slot = slot + 1 == Shape::kSlots ? 0 : slot + 1;
        parity ^= slot == 0 ? 1 : 0;
    }
    wait_copies<0>();
}

/// A computing warpgroup's 64 rows as one thread sees them: rows g and g + 8 of its warp's 16.
template <typename T, class Shape>
struct GroupRows {
    static constexpr int kKeyTiles = Shape::kKeys / 8;
    static constexpr int kDimTiles = Shape::kDim / 8;
    float sums[kDimTiles][4];
    float scores[kKeyTiles][4];
    uint32_t weights[Shape::kKeys / 16][4];
    float m[2];
    float l[2];

    __device__ __forceinline__ void reset() {
        m[0] = m[1] = -INFINITY;
        l[0] = l[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums[n][i] = 0.0f;
            }
        }
    }

    /// Scales the sums where a row's maximum has grown.
    __device__ __forceinline__ void scale(float low, float high) {
        if (__any_sync(kFullWarp, low != 1.0f || high != 1.0f)) {
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                sums[n][0] *= low;
                sums[n][1] *= low;
                sums[n][2] *= high;
                sums[n][3] *= high;
            }
        }
    }

    /// Starts scores = Q K^T.
    __device__ __forceinline__ void score(uint32_t queries, uint32_t keys) {
        pin(scores);
        products_begin();
#pragma unroll
        for (int k = 0; k < Shape::kDim / 16; ++k) {
            Warpgroup<T, kKeyTiles>::from_shared(scores, operand(queries + k / 4 * Shape::QueryLayout::kColumnBytes + k % 4 * 32, 16),
                                                 operand(keys + k / 4 * Shape::Layout::kColumnBytes + k % 4 * 32, 16), k > 0);
        }
        products_commit();
        pin(scores);
    }

    /// Starts sums += weights V.
    __device__ __forceinline__ void gather(uint32_t values) {
        pin(sums);
        products_begin();
#pragma unroll
        for (int k = 0; k < Shape::kKeys / 16; ++k) {
            Warpgroup<T, kDimTiles>::from_registers(sums, weights[k], operand(values + k * Shape::kPieceBytes, Shape::Layout::kColumnBytes));
        }
        products_commit();
        pin(sums);
    }

    __device__ __forceinline__ void pack_weights() {
#pragma unroll
        for (int k = 0; k < Shape::kKeys / 16; ++k) {
            weights[k][0] = pack<T>(scores[2 * k][0], scores[2 * k][1]);
            weights[k][1] = pack<T>(scores[2 * k][2], scores[2 * k][3]);
            weights[k][2] = pack<T>(scores[2 * k + 1][0], scores[2 * k + 1][1]);
            weights[k][3] = pack<T>(scores[2 * k + 1][2], scores[2 * k + 1][3]);
        }
    }
};

/// Writes a warp's 16 rows into its part of the query tile and from there to the output, 16 bytes at a time.
template <typename T, class Shape>
__device__ __forceinline__ void leave_rows(const PrefillParams& params, const PrefillTile& tile, GroupRows<T, Shape>& rows, uint8_t* queries, int group_row,
                                           int warp_row, int lane) {
    using Layout = typename Shape::QueryLayout;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float scale = 1.0f / quad_sum(rows.l[half]);
        const int row = warp_row + half * 8 + lane / 4;
#pragma unroll
        for (int n = 0; n < Shape::kDim / 8; ++n) {
            *reinterpret_cast<uint32_t*>(queries + Layout::offset(row, n) + lane % 4 * 4) =
                pack<T>(rows.sums[n][2 * half] * scale, rows.sums[n][2 * half + 1] * scale);
        }
    }
    __syncwarp();
    T* out = static_cast<T*>(params.queries.out);
    for (int i = lane; i < 16 * Layout::kChunks; i += 32) {
        const int row = warp_row + i / Layout::kChunks;
        const int chunk = i % Layout::kChunks;
        if (group_row + row < tile.rows) {
            *reinterpret_cast<uint4*>(out + tile.element(group_row + row, params.queries.out_stride, Shape::kDim) + chunk * 8) =
                *reinterpret_cast<const uint4*>(queries + Layout::offset(row, chunk));
        }
    }
}

/// Starts the copies of a warpgroup's queries; rows that do not exist become zeros.
template <typename T, class Shape, class Tile>
__device__ __forceinline__ void copy_queries(const Queries& queries, const Tile& tile, int group_row, uint32_t to, int thread) {
    using Layout = typename Shape::QueryLayout;
    const T* q = static_cast<const T*>(queries.q);
    for (int i = thread; i < 64 * Layout::kChunks; i += 128) {
        const int row = i / Layout::kChunks;
        const int chunk = i % Layout::kChunks;
        const bool real = group_row + row < tile.rows;
        const T* from = real ? q + tile.element(group_row + row, queries.q_stride, Shape::kDim) + chunk * 8 : q;
        copy_async(to + Layout::offset(row, chunk), from, real ? 16 : 0);
    }
}

/// A computing warpgroup: `group` of them, with its queries at `queries`.
template <typename T, class Shape, class Params, class Tile>
__device__ __forceinline__ void compute_rows(const Params& params, const Tile& tile, const Ring<Shape>& ring, uint8_t* queries, int group) {
    const int thread = threadIdx.x % 128;
    const int lane = threadIdx.x % 32;
    const int warp_row = thread / 32 * 16;
    const int group_row = group * 64;
    const float scale_log2 = params.queries.scale_log2;
    const uint32_t q_tile = shared_address(queries);

    copy_queries<T, Shape>(params.queries, tile, group_row, q_tile, thread);
    commit_copies();
    const int lowest_limit = tile.limit(group_row + warp_row);
    const int limits[2] = {tile.limit(group_row + warp_row + lane / 4), tile.limit(group_row + warp_row + lane / 4 + 8)};
    GroupRows<T, Shape> rows;
    rows.reset();
    wait_copies<0>();
    fence_for_matrix_units();
    named_sync(1 + group, 128);

    const auto release = [&](int slot) {
        if (lane == 0) {
            barrier_arrive(ring.empty(slot));
        }
    };
    float low = 1.0f;
    float high = 1.0f;
    const auto soften = [&](int token) {
        if (token + Shape::kKeys > lowest_limit) {
            mask_scores(rows.scores, token, limits, lane);
        }
        low = softmax_step<Shape::kKeys / 8, false>(rows.scores, scale_log2, rows.m[0], rows.l[0]);
        high = softmax_step<Shape::kKeys / 8, true>(rows.scores, scale_log2, rows.m[1], rows.l[1]);
    };

    barrier_wait(ring.filled(0), 0);
    rows.score(q_tile, ring.tile(0));
    products_wait<0>();
    pin(rows.scores);
    release(0);
    soften(tile.first());
    rows.pack_weights();

    // Barrier kTurn + g says that it is the turn of group g; the last group gives the first turn.
    constexpr int kTurn = 1 + Shape::kGroups;
    const bool last_group = group == Shape::kGroups - 1;
    const auto give_turn = [&] { named_arrive(kTurn + (last_group ? 0 : group + 1), 256); };
    if (Shape::kTurns && last_group && tile.keys > tile.first() + Shape::kKeys) {
        give_turn();
    }
    int stage = 0;  // of the tile whose weights are ready
    int parity = 0;
    for (int token = tile.first() + Shape::kKeys; token < tile.keys; token += Shape::kKeys) {
        const int next = stage + 1 == Shape::kStages ? 0 : stage + 1;
        const int next_parity = parity ^ (next == 0 ? 1 : 0);
        barrier_wait(ring.filled(2 * next), next_parity);
        if (Shape::kTurns) {
            named_sync(kTurn + group, 256);
        }
        rows.score(q_tile, ring.tile(2 * next));
        barrier_wait(ring.filled(2 * stage + 1), parity);
        rows.gather(ring.tile(2 * stage + 1));
        // The turn that nobody would take is not given.
        if (Shape::kTurns && (!last_group || token + Shape::kKeys < tile.keys)) {
            give_turn();
        }
        products_wait<1>();
        pin(rows.scores);
        release(2 * next);
        soften(token);
        products_wait<0>();
        pin(rows.sums);
        release(2 * stage + 1);
        rows.scale(low, high);
        rows.pack_weights();
        stage = next;
        parity = next_parity;
    }
    barrier_wait(ring.filled(2 * stage + 1), parity);
    rows.gather(ring.tile(2 * stage + 1));
    products_wait<0>();
    pin(rows.sums);
    // The other warps' products read the queries too; they are over once all have come here.
    named_sync(1 + group, 128);
    leave_rows<T, Shape>(params, tile, rows, queries, group_row, warp_row, lane);
}

/// Attention of a tile of packed rows to the tokens [tile.first(), tile.keys) of a table.
template <typename T, class Shape, class Params, class Tile>
__device__ __forceinline__ void attend_tile_hopper(const Params& params, const Tile& tile, int sequence) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = shared_address(shared);
    const Ring<Shape> ring = {base + Shape::kQueryBytes, base + Shape::kQueryBytes + Shape::kSlots * Shape::kSlotBytes};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < Shape::kSlots; ++slot) {
            barrier_init(ring.filled(slot), 128);
            barrier_init(ring.empty(slot), Shape::kGroups * 4);
        }
    }
    __syncthreads();
    if (threadIdx.x >= Shape::kGroups * 128) {
        give_registers<Shape::kProducerRegisters>();
        if constexpr (Stored<typename Shape::Element>::kScaled) {
            fill_ring_widened<T, Shape>(params.kv, sequence, tile, ring);
        } else {
            fill_ring<Shape>(params.kv, sequence, tile, ring);
        }
    } else {
        take_registers<Shape::kRegisters>();
        const int group = threadIdx.x / 128;
        compute_rows<T, Shape>(params, tile, ring, shared + group * Shape::QueryLayout::kBytes, group);
    }
}

template <typename T, class Shape>
__device__ __forceinline__ void prefill_attention_hopper(const PrefillParams& params) {
    wait_for_previous_kernel();
    const PrefillUnit unit = params.units[blockIdx.x / params.kv.kv_heads];
    const PrefillTile tile(params, unit, blockIdx.x % params.kv.kv_heads, Shape::kRows);
    attend_tile_hopper<T, Shape>(params, tile, unit.sequence);
}

}  // namespace pagedd
