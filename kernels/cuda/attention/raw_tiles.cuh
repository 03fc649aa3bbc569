// K and V tiles of one-byte elements on their way to the matrix units: raw bytes come into shared memory by asynchronous copies, and become numbers of 16
// bits, multiplied by their scales and rounded once, in a slot of the ring that the products read. A thread widens what it copied itself, so that
// nothing is waited for but its own copies.
#pragma once
#include "stored.cuh"

namespace pagedd {

/// Bytes of a raw tile: chunks of 16 elements, then the scale of each chunk.
template <int kDim, int kKeys>
constexpr int raw_tile_bytes() {
    return kKeys * (kDim / 16) * (16 + 4);
}

/// A producer's way through raw tiles: K of tile 0, V of tile 0, K of tile 1, ...
template <class Shape, class Tile>
class RawTiles {
    static constexpr int kThreads = 128;  // that produce
    static constexpr int kRowChunks = Shape::kDim / 16;
    static constexpr int kChunks = Shape::kKeys * kRowChunks;
    static constexpr int kEach = (kChunks + kThreads - 1) / kThreads;

  public:
    __device__ __forceinline__ RawTiles(const PagedKv& kv, int sequence, const Tile& tile, uint32_t slots)
        : kv_(kv),
          table_(kv.tables + static_cast<int64_t>(sequence) * kv.table_stride),
          head_(kv, tile.kv_head),
          keys_(tile.keys),
          token_(tile.first()),
          slots_(slots),
          thread_(threadIdx.x % kThreads) {
        next_blocks_ = load_blocks(token_);
    }

    /// Tiles that are not started.
    __device__ __forceinline__ int count() const { return 2 * ((keys_ - token_ + Shape::kKeys - 1) / Shape::kKeys); }

    /// Starts the copies of the next tile. Past the last the copy group is empty, so that groups can be counted.
    __device__ __forceinline__ void start() {
        if (token_ < keys_) {
            if (!values_next_) {
                // The table entries of a tile are loaded one tile ahead of their use.
                blocks_ = next_blocks_;
                next_blocks_ = load_blocks(token_ + Shape::kKeys);
            }
            const uint32_t to = slots_ + started_ * Shape::kRawBytes;
            const uint8_t* rows = head_.keys + (values_next_ ? head_.values : 0);
            const uint8_t* scales = head_.scales + (values_next_ ? head_.value_scales : 0);
            const int mask = (1 << kv_.log2_block) - 1;
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int chunk = thread_ + i * kThreads;
                const int row = chunk / kRowChunks;
                const int block = __shfl_sync(kFullWarp, blocks_, row >> kv_.log2_block);
                if (kChunks % kThreads == 0 || chunk < kChunks) {
                    const int64_t at = block * kv_.block_stride;
                    const int in_block = (token_ + row) & mask;
                    const bool real = token_ + row < keys_;
                    copy_async(to + chunk * 16, rows + at + in_block * head_.kRowBytes + chunk % kRowChunks * 16, real ? 16 : 0);
                    copy_word_async(to + kChunks * 16 + chunk * 4, scales + at + in_block * 4, real ? 4 : 0);
                }
            }
            token_ += values_next_ ? Shape::kKeys : 0;
            values_next_ = !values_next_;
            started_ = started_ + 1 == Shape::kRawSlots ? 0 : started_ + 1;
        }
        commit_copies();
    }

    /// Widens the oldest tile that was started, whose copies were waited for, into a tile of `Layout`.
    template <typename T, class Layout>
    __device__ __forceinline__ void finish(uint32_t tile) {
        const uint32_t from = slots_ + finished_ * Shape::kRawBytes;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int chunk = thread_ + i * kThreads;
            if (kChunks % kThreads == 0 || chunk < kChunks) {
                const uint4 raw = load_chunk(from + chunk * 16);
                const float scale = load_one(from + kChunks * 16 + chunk * 4);
                const int row = chunk / kRowChunks;
                const int column = chunk % kRowChunks * 2;
                store_chunk(tile + Layout::offset(row, column), widen_eight<T>(raw.x, raw.y, scale));
                store_chunk(tile + Layout::offset(row, column + 1), widen_eight<T>(raw.z, raw.w, scale));
            }
        }
        finished_ = finished_ + 1 == Shape::kRawSlots ? 0 : finished_ + 1;
    }

  private:
    template <typename T>
    static __device__ __forceinline__ uint4 widen_eight(uint32_t low, uint32_t high, float scale) {
        return {widen_pair<T>(low & 0xffff, scale), widen_pair<T>(low >> 16, scale), widen_pair<T>(high & 0xffff, scale), widen_pair<T>(high >> 16, scale)};
    }

    /// This lane's entry of the table, of the blocks of the tile at `token`. Lanes past the last key keep block 0: its memory exists and is not read.
    __device__ __forceinline__ int load_blocks(int token) const {
        const int at = token + (static_cast<int>(threadIdx.x) % 32 << kv_.log2_block);
        return at < min(keys_, token + Shape::kKeys) ? table_[at >> kv_.log2_block] : 0;
    }

    const PagedKv& kv_;
    const int32_t* table_;
    const KvHead<E4m3, Shape::kDim> head_;
    int keys_;
    int token_;
    uint32_t slots_;
    int thread_;
    bool values_next_ = false;
    int started_ = 0;
    int finished_ = 0;
    int blocks_ = 0;
    int next_blocks_;
};

}  // namespace pagedd
