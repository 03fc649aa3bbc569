// Products of at most 16 rows with a matrix of four-bit weights, at the speed at which the matrix can be read.
//
// A CTA takes tiles of 16 outputs that follow each other, and its warps take equal parts of the sequence of their units, each a run of memory. It goes through
// a ring in shared memory that belongs to the warp alone, which the copy engine fills kStages units ahead, beginning before the kernel waits for the one before
// it. (Loads into registers do not do: a warp has six scoreboards, so that waiting for the oldest load is waiting for newer ones.) Two units are copied at once:
// what the multiplication of one takes is a hundred instructions, and copies by a warp's own lanes took forty beside. The input is in shared memory, in the order of the
// matrix fragments, with the sum of every group beside it: numbers are multiplied with the offset that makes them elements, and minimum and offset count for
// the group's sum. Where a warp comes to the end of a tile or of its part, its sums go to shared memory; at the end of all they are
// added in the order of the warps. The bits of a result depend on the operands and on the number of CTAs, not on other rows.
//
// The host asks for so much shared memory that no multiprocessor has two CTAs, of one kernel or of two: where the CTAs before leave some multiprocessors sooner,
// those would get two, and others none, and so would the next kernel's, to the end of a step. What does not fit is for the kernels of more rows.
#pragma once
#include "../attention/wgmma.cuh"
#include "copy.cuh"
#include "four_bit.cuh"
#include "small_rows.cuh"

namespace pagedd {

constexpr int kFewWarps = 16;
constexpr int kFewThreads = kFewWarps * 32;
/// Packs of eight elements of a row that a thread normalises.
constexpr int kFewNormPacks = 2;

struct FourBitFewParams {
    const void* x;        // [rows][inputs]: elements; floats where they are normalised
    const float* norm;    // [inputs]
    const void* weights;  // tiles
    void* out;            // see Ending
    uint32_t inputs;      // a multiple of 64
    uint32_t outputs;     // a multiple of 16
    uint32_t rows;        // 8 kColumns at most
    float epsilon;
};

/// Packs that a thread loads at once.
constexpr int kFewLoads = 8;

/// Bytes of shared memory: the ring, rows, the sums of their groups, the sums of the warps.
constexpr uint32_t four_bit_few_shared(uint32_t inputs, uint32_t outputs, uint32_t rows, uint32_t blocks, uint32_t stages, uint32_t columns) {
    const uint32_t units = inputs / kFourBitUnit, tiles = (outputs / kFourBitTile + blocks - 1) / blocks;
    return kFewWarps * stages * kFourBitBytes + rows * (units * kFourBitUnit * 2 + kInputPad) + (units * 64 + (tiles + kFewWarps) * 512) * columns;
}

/// d = a b.
template <typename T>
__device__ __forceinline__ void few_multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void few_multiply<Bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

template <>
__device__ __forceinline__ void few_multiply<F16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

/// d += a b, which the compiler may move.
template <typename T>
__device__ __forceinline__ void few_multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void few_multiply_add<Bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void few_multiply_add<F16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Puts eight elements of a row, pack `at` of it, where the fragments want them, and the sum of the group beside. Lanes of four packs of a group
/// come together; of those that are not `there` nothing is put.
template <typename T, int kColumns>
__device__ __forceinline__ void put_pack(uint8_t* row_of, float* sums, unsigned row, unsigned at, const Pack<T>& pack, bool there) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += to_f32(pack.at[i]);
    sum = quad_sum(sum);
    if (!there) return;
    const uint4 words = reinterpret_cast<const uint4&>(pack);
    uint32_t* to = reinterpret_cast<uint32_t*>(row_of + at / 4 * (kFourBitGroup * 2)) + at % 4;
    to[0] = words.x;
    to[4] = words.y;
    to[8] = words.z;
    to[12] = words.w;
    if (at % 4 == 0) sums[(at / 8 * (4 * kColumns) + row / 2) * 4 + at / 4 % 2 * 2 + row % 2] = sum;
}

template <typename T, int kColumns, int kStages, bool kNormed, Ending kEnding>
__device__ __forceinline__ void four_bit_few(const FourBitFewParams& a) {
    constexpr unsigned kPairs = kStages / 2, kPairBytes = 2 * kFourBitBytes;
    static_assert(kStages % 2 == 0, "units are copied in pairs");
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ __align__(8) uint64_t barriers[kFewWarps * kPairs];
    __shared__ float scratch[2 * WARP];
    let_next_kernel_start();
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned units = a.inputs / kFourBitUnit, all_tiles = a.outputs / kFourBitTile;
    const unsigned first_tile = unsigned(uint64_t(all_tiles) * blockIdx.x / gridDim.x);
    const unsigned tiles = unsigned(uint64_t(all_tiles) * (blockIdx.x + 1) / gridDim.x) - first_tile;
    const unsigned pitch = units * kFourBitUnit * 2 + kInputPad;

    // Units of this warp: [first, first + count) of the sequence of all units of all tiles, which lie one behind the other.
    const unsigned first = tiles * units * warp / kFewWarps, count = tiles * units * (warp + 1) / kFewWarps - first;

    // ---- the ring ----
    const uint8_t* const own = shared + warp * (kStages * kFourBitBytes);
    const uint32_t ring = shared_address(own), full = shared_address(barriers + warp * kPairs);
    const uint8_t* next = static_cast<const uint8_t*>(a.weights) + (size_t(first_tile) * units + first) * kFourBitBytes;
    unsigned next_left = count;
    // For one lane.
    const auto copy_pair = [&](unsigned pair) {
        const unsigned bytes = min(next_left, 2u) * kFourBitBytes;
        if (bytes == 0) return;
        barrier_expect(full + pair * 8, bytes);
        bring(ring + pair * kPairBytes, next, bytes, full + pair * 8);
        next += bytes;
        next_left -= min(next_left, 2u);
    };
    if (lane == 0) {
#pragma unroll
        for (unsigned pair = 0; pair < kPairs; ++pair) barrier_init(full + pair * 8, 1);
        fence_barriers();
#pragma unroll
        for (unsigned pair = 0; pair < kPairs; ++pair) copy_pair(pair);
    }
    __syncwarp();

    // Warp w has a slot for each tile that it has a part of: w + tile. Parts that are less than a unit are empty.
    float4* const slots = reinterpret_cast<float4*>(shared + kFewWarps * kStages * kFourBitBytes);
    uint8_t* const input = reinterpret_cast<uint8_t*>(slots + (tiles + kFewWarps) * (32 * kColumns));
    float* const group_sums = reinterpret_cast<float*>(input + a.rows * pitch);
    for (unsigned i = threadIdx.x; i < (tiles + kFewWarps) * (32 * kColumns); i += kFewThreads) slots[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    constexpr bool kHalf = kEnding == Ending::kSilu;
    constexpr unsigned kWide = kHalf ? kFourBitTile / 2 : kFourBitTile;
    const unsigned width = tiles * kWide, row_width = kHalf ? a.outputs / 2 : a.outputs, results = width * a.rows;
    const auto place = [&](unsigned index) { return size_t(index / width) * row_width + first_tile * kWide + index % width; };
    float before = 0.0f;

    // ---- the input: what earlier kernels wrote ----
    if constexpr (kNormed) {
        Eight factors[kFewNormPacks];
        const unsigned packs = a.inputs / 8;
#pragma unroll
        for (int i = 0; i < kFewNormPacks; ++i) {
            if (i * kFewThreads + threadIdx.x < packs) factors[i] = load(a.norm, i * kFewThreads + threadIdx.x);
        }
        wait_for_previous_kernel();
        for (unsigned row = 0; row < a.rows; ++row) {
            const float4* x = reinterpret_cast<const float4*>(static_cast<const float*>(a.x) + size_t(row) * a.inputs);
            Eight kept[kFewNormPacks] = {};
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < kFewNormPacks; ++i) {
                const unsigned at = i * kFewThreads + threadIdx.x;
                if (at < packs) {
                    reinterpret_cast<float4*>(&kept[i])[0] = __ldcg(x + 2 * at);
                    reinterpret_cast<float4*>(&kept[i])[1] = __ldcg(x + 2 * at + 1);
                }
            }
#pragma unroll
            for (int i = 0; i < kFewNormPacks; ++i) {
#pragma unroll
                for (int j = 0; j < 8; ++j) squares += kept[i].at[j] * kept[i].at[j];
            }
            const float scale = 1.0f / sqrtf(block_sum(squares, scratch + (row % 2) * WARP) / float(a.inputs) + a.epsilon);
#pragma unroll
            for (int i = 0; i < kFewNormPacks; ++i) {
                const unsigned at = i * kFewThreads + threadIdx.x;
                Pack<T> y;
#pragma unroll
                for (int j = 0; j < 8; ++j) y.at[j] = rounded<T>(at < packs ? kept[i].at[j] * scale * factors[i].at[j] : 0.0f);
                put_pack<T, kColumns>(input + row * pitch, group_sums, row, at, y, at < packs);
            }
        }
    } else {
        wait_for_previous_kernel();
        // Each row has as many warps as there are for all.
        const unsigned packs = units * (kFourBitUnit / 8), parts = kFewWarps / a.rows, row = warp % a.rows, part = warp / a.rows;
        if (part < parts) {
            const uint4* x = reinterpret_cast<const uint4*>(static_cast<const T*>(a.x) + size_t(row) * a.inputs);
            // Several loads at once: each takes as long as all of them.
            for (unsigned base = part * 32; base < packs; base += parts * (32 * kFewLoads)) {
                uint4 loaded[kFewLoads];
#pragma unroll
                for (int i = 0; i < kFewLoads; ++i) {
                    const unsigned at = base + i * parts * 32 + lane;
                    loaded[i] = at < packs ? __ldcg(x + at) : make_uint4(0, 0, 0, 0);
                }
#pragma unroll
                for (int i = 0; i < kFewLoads; ++i) {
                    // The same for all lanes: they come together in the sums.
                    if (base + i * parts * 32 >= packs) break;
                    const unsigned at = base + i * parts * 32 + lane;
                    put_pack<T, kColumns>(input + row * pitch, group_sums, row, at, reinterpret_cast<const Pack<T>&>(loaded[i]), at < packs);
                }
            }
        }
    }
    if constexpr (kEnding == Ending::kAdd) {
        if (threadIdx.x < results) before = __ldcg(static_cast<const float*>(a.out) + place(threadIdx.x));
    }
    __syncthreads();

    // ---- units ----
    const uint8_t* row = input + min(g, a.rows - 1) * pitch + t * 16 + first % units * (kFourBitUnit * 2);
    const uint32_t second = kColumns > 1 ? (min(8 + g, a.rows - 1) - min(g, a.rows - 1)) * pitch : 0;
    const float4* sums_of = reinterpret_cast<const float4*>(group_sums) + t + first % units * (4 * kColumns);
    unsigned left = units - first % units;
    float4* slot = slots + (warp + first / units) * (32 * kColumns) + lane;
    float d[kColumns][4] = {};
    const auto put_sums = [&] {
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            slot[column * 32] = make_float4(d[column][0], d[column][1], d[column][2], d[column][3]);
            d[column][0] = d[column][1] = d[column][2] = d[column][3] = 0.0f;
        }
        slot += 32 * kColumns;
    };
    const auto multiply_unit = [&](const uint8_t* at) {
        const FourBitPiece piece = {*reinterpret_cast<const uint4*>(at + lane * 16), *reinterpret_cast<const uint4*>(at + kFourBitScales + g * 16)};
        uint4 b[kColumns][2];
        float4 sums[kColumns];
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            const uint8_t* from = row + column * second;
            b[column][0] = *reinterpret_cast<const uint4*>(from);
            b[column][1] = *reinterpret_cast<const uint4*>(from + kFourBitGroup * 2);
            sums[column] = sums_of[column * 4];
        }
        row += kFourBitUnit * 2;
        sums_of += 4 * kColumns;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const uint32_t low = word_of(piece.numbers, 0, side), high = word_of(piece.numbers, 1, side);
            float2 of_low = scale_and_minimum(word_of(piece.scales, 0, side)), of_high = scale_and_minimum(word_of(piece.scales, 1, side));
            uint32_t steps[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (std::is_same<T, Bf16>::value) {
                    steps[i / 2][i % 2 * 2] = offset_pair<T>(low, i);
                    steps[i / 2][i % 2 * 2 + 1] = offset_pair<T>(high, i);
                } else {
                    steps[i / 2][i % 2 * 2] = exact_pair<T>(low, i);
                    steps[i / 2][i % 2 * 2 + 1] = exact_pair<T>(high, i);
                }
            }
            if constexpr (std::is_same<T, Bf16>::value) {
                of_low.y = fmaf(-Widening<T>::kOffset, of_low.x, of_low.y);
                of_high.y = fmaf(-Widening<T>::kOffset, of_high.x, of_high.y);
            }
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
                float p[4];
                few_multiply<T>(p, steps[0], b[column][side].x, b[column][side].y);
                few_multiply_add<T>(p, steps[1], b[column][side].z, b[column][side].w);
                const float even = side ? sums[column].z : sums[column].x, odd = side ? sums[column].w : sums[column].y;
                d[column][0] = fmaf(of_low.x, p[0], fmaf(of_low.y, even, d[column][0]));
                d[column][1] = fmaf(of_low.x, p[1], fmaf(of_low.y, odd, d[column][1]));
                d[column][2] = fmaf(of_high.x, p[2], fmaf(of_high.y, even, d[column][2]));
                d[column][3] = fmaf(of_high.x, p[3], fmaf(of_high.y, odd, d[column][3]));
            }
        }
    };
    const auto end_unit = [&] {
        if (--left == 0) {
            left = units;
            row -= units * (kFourBitUnit * 2);
            sums_of -= units * (4 * kColumns);
            put_sums();
        }
    };
    unsigned pair = 0, parity = 0, done = 0;
    for (; done + 1 < count; done += 2) {
        barrier_wait(full + pair * 8, parity);
        multiply_unit(own + pair * kPairBytes);
        end_unit();
        multiply_unit(own + pair * kPairBytes + kFourBitBytes);
        end_unit();
        __syncwarp();
        if (lane == 0) copy_pair(pair);
        if (++pair == kPairs) {
            pair = 0;
            parity ^= 1;
        }
    }
    if (done < count) {
        barrier_wait(full + pair * 8, parity);
        multiply_unit(own + pair * kPairBytes);
        end_unit();
    }
    if (left != units && count > 0) put_sums();

    // ---- the warps' sums, in their order ----
    __syncthreads();
    const float* const values = reinterpret_cast<const float*>(slots);
    for (unsigned index = threadIdx.x; index < results; index += kFewThreads) {
        const unsigned row = index / width, output = index % width, tile = output / kWide, in_tile = output % kWide, in_column = row % 8;
        const unsigned in_slot = row / 8 * 128 + (in_tile % 8 * 4 + in_column / 2) * 4 + in_tile / 8 * 2 + in_column % 2;
        float sum = 0.0f, up = 0.0f;
        // The warps that have parts of the tile.
        const unsigned first_warp = kFewWarps * tile / tiles, end_warp = (kFewWarps * (tile + 1) + tiles - 1) / tiles;
        for (unsigned w = first_warp; w < end_warp; ++w) {
            const float* at = values + size_t(w + tile) * (128 * kColumns) + in_slot;
            sum += at[0];
            if (kHalf) up += at[2];
        }
        const size_t to = place(index);
        if constexpr (kEnding == Ending::kStore) {
            static_cast<T*>(a.out)[to] = rounded<T>(sum);
        } else if constexpr (kEnding == Ending::kSingle) {
            static_cast<float*>(a.out)[to] = sum;
        } else if constexpr (kEnding == Ending::kAdd) {
            float* const out = static_cast<float*>(a.out) + to;
            *out = (index == threadIdx.x ? before : __ldcg(out)) + sum;
        } else {
            static_cast<T*>(a.out)[to] = rounded<T>(sum / (1.0f + __expf(-sum)) * up);
        }
    }
}

}  // namespace pagedd
