// Products of at most 16 rows with a weight matrix, at the speed at which the matrix can be read.
//
// A CTA takes tiles of 16 or 32 rows of the matrix (outputs), one after the other; its eight warps share the inner dimension in units of 64 elements, warp w
// taking units w, w + 8, ... of every tile. Weights go through a ring in shared memory that belongs to each lane alone: a lane copies exactly the 16-byte
// pieces that it multiplies with, so that nothing but the end of a tile needs a barrier. The ring is filled before the kernel waits for the one before it:
// weights are read while earlier kernels still run. The sums of the warps are added in their order: the bits of a result depend on the operands and the
// kernel's constants only, not on the grid or on other rows.
#pragma once
#include "../attention/tensor.cuh"
#include "../common.cuh"

namespace pagedd {

constexpr int kProductWarps = 8;
constexpr int kProductThreads = kProductWarps * 32;
/// Elements of the inner dimension that a warp takes at once.
constexpr int kUnit = 64;
/// Rows of the matrix in one fragment.
constexpr int kTile = 16;
/// Bytes that the rows of an input in shared memory are padded by, so that rows lie in different banks.
constexpr int kInputPad = 64;
/// Packs of eight elements of a row that a thread normalises.
constexpr int kNormPacks = 4;

/// What a product does with its result.
enum class Ending {
    /// out[rows][outputs] = it, rounded.
    kStore,
    /// out[rows][outputs] = it, in single precision.
    kSingle,
    /// out[rows][outputs] += it, in single precision.
    kAdd,
    /// out[rows][outputs / 2] = silu(first half) * second half, rounded.
    kSilu,
};

/// Where the input is while it is multiplied.
enum class Input {
    /// Rows go through the ring with the weights.
    kStreamed,
    /// All of it is in shared memory.
    kKept,
    /// As kept; what is read is the residual stream, which is normalised first.
    kNormed,
};

struct SmallRowsParams {
    const void* x;        // [rows][inputs]: elements; of kNormed floats
    const float* norm;    // [inputs], of kNormed
    const void* weights;  // [outputs][inputs]
    void* out;            // see Ending
    uint32_t inputs;      // a multiple of 64
    uint32_t outputs;     // a multiple of 8
    uint32_t rows;        // 8 kColumns at most
    uint32_t tiles;       // of kTiles * 16 outputs
    float epsilon;
};

template <int kTiles, int kColumns, int kStages, Input kInput>
struct SmallRowsShape {
    static constexpr int kWeightPieces = kTiles * 4;
    static constexpr int kPieces = kWeightPieces + (kInput == Input::kStreamed ? kColumns * 2 : 0);
    static constexpr int kRingBytes = kProductWarps * kStages * kPieces * 512;
    static constexpr int kSums = kTiles * kColumns * 4;
    static constexpr int kSumBytes = 2 * kProductWarps * kSums * 32 * 4;

    static constexpr uint32_t shared_bytes(uint32_t inputs, uint32_t rows) {
        return kRingBytes + kSumBytes + (kInput == Input::kStreamed ? 0 : rows * (inputs * 2 + kInputPad));
    }
};

template <typename T>
__device__ __forceinline__ T rounded(float x) {
    return ::from_f32<T>(x);
}

/// out = round(x / sqrt(mean(x^2) + epsilon) * weight) of all rows, by all threads of the CTA; the caller loaded the weights.
template <typename T>
__device__ __forceinline__ void norm_into_shared(const SmallRowsParams& a, const Eight (&factors)[kNormPacks], uint8_t* to, float* scratch) {
    const unsigned packs = a.inputs / 8;
    for (unsigned row = 0; row < a.rows; ++row) {
        const float4* x = reinterpret_cast<const float4*>(static_cast<const float*>(a.x) + size_t(row) * a.inputs);
        Eight kept[kNormPacks];
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kNormPacks; ++i) {
            const unsigned pack = i * kProductThreads + threadIdx.x;
            if (pack < packs) {
                reinterpret_cast<float4*>(&kept[i])[0] = __ldcg(x + 2 * pack);
                reinterpret_cast<float4*>(&kept[i])[1] = __ldcg(x + 2 * pack + 1);
            }
        }
#pragma unroll
        for (int i = 0; i < kNormPacks; ++i) {
            if (i * kProductThreads + threadIdx.x < packs) {
#pragma unroll
                for (int j = 0; j < 8; ++j) squares += kept[i].at[j] * kept[i].at[j];
            }
        }
        const float scale = 1.0f / sqrtf(block_sum(squares, scratch + (row % 2) * WARP) / float(a.inputs) + a.epsilon);
#pragma unroll
        for (int i = 0; i < kNormPacks; ++i) {
            const unsigned pack = i * kProductThreads + threadIdx.x;
            if (pack < packs) {
                Pack<T> y;
#pragma unroll
                for (int j = 0; j < 8; ++j) y.at[j] = rounded<T>(kept[i].at[j] * scale * factors[i].at[j]);
                store(reinterpret_cast<T*>(to + row * (a.inputs * 2 + kInputPad)), pack, y);
            }
        }
    }
    __syncthreads();
}

template <typename T, int kTiles, int kColumns, int kStages, Input kInput, Ending kEnding>
__device__ __forceinline__ void small_rows(const SmallRowsParams& a) {
    using Shape = SmallRowsShape<kTiles, kColumns, kStages, kInput>;
    constexpr int kPieces = Shape::kPieces;
    constexpr int kSums = Shape::kSums;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float scratch[2 * WARP];
    float* sums = reinterpret_cast<float*>(shared + Shape::kRingBytes);
    uint8_t* input = shared + Shape::kRingBytes + Shape::kSumBytes;

    let_next_kernel_start();
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const CopyOnce copy_once;
    const unsigned units = a.inputs / kUnit;
    // Units of a tile that are this warp's, and of all tiles of the CTA.
    const unsigned mine = units > warp ? (units - warp + kProductWarps - 1) / kProductWarps : 0;
    const unsigned own_tiles = a.tiles > blockIdx.x ? (a.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    const unsigned total = mine * own_tiles;

    // ---- the ring: what is copied next ----
    const uint32_t ring = shared_address(shared) + (warp * kStages * kPieces * 32 + lane) * 16;
    const T* source[kTiles][2];
    unsigned next_tile = blockIdx.x, next_unit = 0, copied = 0;
    const auto enter_tile = [&] {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned row;
                if (kEnding == Ending::kSilu) {
                    row = min((next_tile * kTiles + tile) * (kTile / 2) + g, a.outputs / 2 - 1) + half * (a.outputs / 2);
                } else {
                    row = min((next_tile * kTiles + tile) * kTile + half * 8 + g, a.outputs - 1);
                }
                source[tile][half] = static_cast<const T*>(a.weights) + size_t(row) * a.inputs + warp * kUnit + t * 8;
            }
        }
    };
    if (total > 0) enter_tile();
    const auto copy_weights = [&](unsigned stage) {
        if (copied < total) {
            const uint32_t to = ring + stage * (kPieces * 512);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const T* from = source[tile][half];
                    copy_once(to + (tile * 4 + half * 2) * 512, from, 16);
                    copy_once(to + (tile * 4 + half * 2 + 1) * 512, from + kUnit / 2, 16);
                    source[tile][half] = from + kProductWarps * kUnit;
                }
            }
            ++copied;
            if (++next_unit == mine) {
                next_unit = 0;
                next_tile += gridDim.x;
                if (copied < total) enter_tile();
            }
        }
    };
    const T* rows[kColumns];
    unsigned next_input = 0, copied_inputs = 0;
    if constexpr (kInput == Input::kStreamed) {
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            rows[column] = static_cast<const T*>(a.x) + size_t(min(column * 8 + g, a.rows - 1)) * a.inputs + warp * kUnit + t * 8;
        }
    }
    const auto copy_input = [&](unsigned stage) {
        if constexpr (kInput == Input::kStreamed) {
            if (copied_inputs < copied) {
                ++copied_inputs;
                const uint32_t to = ring + (stage * kPieces + Shape::kWeightPieces) * 512;
#pragma unroll
                for (int column = 0; column < kColumns; ++column) {
                    const T* from = rows[column] + next_input * (kProductWarps * kUnit);
                    copy_async(to + column * 2 * 512, from, 16);
                    copy_async(to + (column * 2 + 1) * 512, from + kUnit / 2, 16);
                }
                if (++next_input == mine) next_input = 0;
            }
        }
    };

#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
        copy_weights(stage);
        if (kInput != Input::kStreamed) commit_copies();
    }

    Eight factors[kNormPacks];
    if constexpr (kInput == Input::kNormed) {
#pragma unroll
        for (int i = 0; i < kNormPacks; ++i) {
            const unsigned pack = i * kProductThreads + threadIdx.x;
            if (pack < a.inputs / 8) factors[i] = load(a.norm, pack);
        }
    }

    // ---- from here on, what earlier kernels wrote ----
    wait_for_previous_kernel();
    if constexpr (kInput == Input::kStreamed) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) copy_input(stage);
        // The whole ring is one group; after it there is one for each stage.
        commit_copies();
#pragma unroll
        for (int stage = 1; stage < kStages; ++stage) commit_copies();
    } else if constexpr (kInput == Input::kKept) {
        const unsigned packs = a.inputs / 8;
        for (unsigned pack = threadIdx.x; pack < a.rows * packs; pack += kProductThreads) {
            const unsigned row = pack / packs, at = pack % packs;
            const uint4 read = __ldcg(static_cast<const uint4*>(a.x) + pack);
            *reinterpret_cast<uint4*>(input + row * (a.inputs * 2 + kInputPad) + at * 16) = read;
        }
        __syncthreads();
    } else {
        norm_into_shared<T>(a, factors, input, scratch);
    }
    const uint8_t* kept[kColumns];
    if constexpr (kInput != Input::kStreamed) {
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            kept[column] = input + min(column * 8 + g, a.rows - 1) * (a.inputs * 2 + kInputPad) + (warp * kUnit + t * 8) * 2;
        }
    }

    // ---- tiles ----
    const uint4* const own = reinterpret_cast<const uint4*>(shared) + warp * kStages * kPieces * 32 + lane;
    unsigned stage = 0, parity = 0;
    for (unsigned tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
        constexpr int kResults = kTiles * kColumns * 128 / (kEnding == Ending::kSilu ? 2 : 1);
        constexpr int kWide = kEnding == Ending::kSilu ? kTile / 2 : kTile;
        constexpr int kOwn = (kResults + kProductThreads - 1) / kProductThreads;
        const unsigned width = kEnding == Ending::kSilu ? a.outputs / 2 : a.outputs;
        // Result i of a thread: which output, which row.
        const auto place = [&](int i, unsigned& output, unsigned& row) {
            const unsigned index = i * kProductThreads + threadIdx.x;
            const unsigned part = index / (kWide * 8);
            row = (part % kColumns) * 8 + index / kWide % 8;
            output = (tile * kTiles + part / kColumns) * kWide + index % kWide;
            return index < kResults && row < a.rows && output < width;
        };
        float before[kOwn];
        if constexpr (kEnding == Ending::kAdd) {
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                unsigned output, row;
                before[i] = place(i, output, row) ? __ldcg(static_cast<const float*>(a.out) + size_t(row) * width + output) : 0.0f;
            }
        }

        float d[kTiles][kColumns][4] = {};
        for (unsigned unit = 0; unit < mine; ++unit) {
            wait_copies<kStages - 1>();
            const uint4* pieces = own + stage * (kPieces * 32);
            uint4 b[kColumns][2];
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
                if constexpr (kInput == Input::kStreamed) {
                    b[column][0] = pieces[(Shape::kWeightPieces + column * 2) * 32];
                    b[column][1] = pieces[(Shape::kWeightPieces + column * 2 + 1) * 32];
                } else {
                    const uint8_t* at = kept[column] + unit * (kProductWarps * kUnit * 2);
                    b[column][0] = *reinterpret_cast<const uint4*>(at);
                    b[column][1] = *reinterpret_cast<const uint4*>(at + kUnit);
                }
            }
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const uint4 low = pieces[(i * 4 + side) * 32], high = pieces[(i * 4 + 2 + side) * 32];
                    // Eight elements of a row are two fragments: which inner index is which does not matter, as long as both operands agree.
                    const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                    for (int column = 0; column < kColumns; ++column) {
                        multiply_add<T>(d[i][column], first, b[column][side].x, b[column][side].y);
                        multiply_add<T>(d[i][column], second, b[column][side].z, b[column][side].w);
                    }
                }
            }
            copy_weights(stage);
            copy_input(stage);
            commit_copies();
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }

        float* half = sums + parity * (kProductWarps * kSums * 32);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
#pragma unroll
                for (int j = 0; j < 4; ++j) half[(warp * kSums + (i * kColumns + column) * 4 + j) * 32 + lane] = d[i][column][j];
            }
        }
        // The other half is free: whoever passed this barrier has read it.
        __syncthreads();
        parity ^= 1;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            unsigned output, row;
            if (!place(i, output, row)) continue;
            const unsigned index = i * kProductThreads + threadIdx.x, part = index / (kWide * 8);
            const unsigned in_tile = index % kWide, column = index / kWide % 8;
            const float* at = half + (part * 4 + in_tile / 8 * 2 + column % 2) * 32 + in_tile % 8 * 4 + column / 2;
            float sum = at[0];
#pragma unroll
            for (int w = 1; w < kProductWarps; ++w) sum += at[w * kSums * 32];
            const size_t to = size_t(row) * width + output;
            if constexpr (kEnding == Ending::kStore) {
                static_cast<T*>(a.out)[to] = rounded<T>(sum);
            } else if constexpr (kEnding == Ending::kSingle) {
                static_cast<float*>(a.out)[to] = sum;
            } else if constexpr (kEnding == Ending::kAdd) {
                static_cast<float*>(a.out)[to] = before[i] + sum;
            } else {
                float up = at[2 * 32];
#pragma unroll
                for (int w = 1; w < kProductWarps; ++w) up += at[(w * kSums + 2) * 32];
                static_cast<T*>(a.out)[to] = rounded<T>(sum / (1.0f + __expf(-sum)) * up);
            }
        }
    }
}

}  // namespace pagedd
