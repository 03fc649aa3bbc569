// Products of at most 8 rows with a matrix of four-bit weights, at the speed at which the matrix can be read.
//
// A CTA takes tiles of 16 outputs that follow each other, and its warps take equal parts of the sequence of their units, each a run of memory. It goes through
// a ring in shared memory that belongs to the warp alone, kStages units ahead, beginning before the kernel waits for the one before it. (Loads into registers do
// not do: a warp has six scoreboards, so that waiting for the oldest load is waiting for newer ones.) The input is in shared memory, in the order of the matrix
// fragments, with the sum of every group beside it: numbers are multiplied with the offset that makes them elements, and minimum and offset count for the
// group's sum. Where a warp comes to the end of a tile or of its part, its sums go to shared memory; at the end of all they are
// added in the order of the warps. The bits of a result depend on the operands and on the number of CTAs, not on other rows.
//
// A CTA leaves room for another on its multiprocessor, where its rows allow that: the next kernel's, whose ring fills while this one ends. Rows that are too
// long for it have a shorter ring, or a multiprocessor of their own; what does not fit there either is for the kernels of more rows.
#pragma once
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
    uint32_t rows;        // 8 at most
    float epsilon;
};

/// Packs that a thread loads at once.
constexpr int kFewLoads = 8;

/// Bytes of shared memory: the ring, rows, the sums of their groups, the sums of the warps.
constexpr uint32_t four_bit_few_shared(uint32_t inputs, uint32_t outputs, uint32_t rows, uint32_t blocks, uint32_t stages) {
    const uint32_t units = inputs / kFourBitUnit, tiles = (outputs / kFourBitTile + blocks - 1) / blocks;
    return kFewWarps * stages * kFourBitBytes + rows * (units * kFourBitUnit * 2 + kInputPad) + units * 64 + (tiles + kFewWarps) * 512;
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
template <typename T>
__device__ __forceinline__ void put_pack(uint8_t* input, float* sums, uint32_t pitch, unsigned row, unsigned at, const Pack<T>& pack, bool there) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += to_f32(pack.at[i]);
    sum = quad_sum(sum);
    if (!there) return;
    const uint4 words = reinterpret_cast<const uint4&>(pack);
    uint32_t* to = reinterpret_cast<uint32_t*>(input + row * pitch + at / 4 * (kFourBitGroup * 2)) + at % 4;
    to[0] = words.x;
    to[4] = words.y;
    to[8] = words.z;
    to[12] = words.w;
    if (at % 4 == 0) sums[(at / 8 * 4 + row / 2) * 4 + at / 4 % 2 * 2 + row % 2] = sum;
}

template <typename T, int kStages, bool kNormed, Ending kEnding>
__device__ __forceinline__ void four_bit_few(const FourBitFewParams& a) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float scratch[2 * WARP];
    let_next_kernel_start();
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned units = a.inputs / kFourBitUnit, all_tiles = a.outputs / kFourBitTile;
    const unsigned first_tile = unsigned(uint64_t(all_tiles) * blockIdx.x / gridDim.x);
    const unsigned tiles = unsigned(uint64_t(all_tiles) * (blockIdx.x + 1) / gridDim.x) - first_tile;
    const unsigned pitch = units * kFourBitUnit * 2 + kInputPad;
    uint8_t* const input = shared + kFewWarps * kStages * kFourBitBytes;
    float* const group_sums = reinterpret_cast<float*>(input + a.rows * pitch);
    float4* const slots = reinterpret_cast<float4*>(group_sums + units * 16);
    // Warp w has a slot for each tile that it has a part of: w + tile. Parts that are less than a unit are empty.
    for (unsigned i = threadIdx.x; i < (tiles + kFewWarps) * 32; i += kFewThreads) slots[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const CopyOnce copy_once;

    constexpr bool kHalf = kEnding == Ending::kSilu;
    constexpr unsigned kWide = kHalf ? kFourBitTile / 2 : kFourBitTile;
    const unsigned width = tiles * kWide, row_width = kHalf ? a.outputs / 2 : a.outputs, results = width * a.rows;
    const auto place = [&](unsigned index) { return size_t(index / width) * row_width + first_tile * kWide + index % width; };
    float before = 0.0f;

    // Units of this warp: [first, first + count) of the sequence of all units of all tiles, which lie one behind the other.
    const unsigned first = tiles * units * warp / kFewWarps, count = tiles * units * (warp + 1) / kFewWarps - first;

    // ---- the ring: what is copied next ----
    const uint8_t* const own = shared + warp * (kStages * kFourBitBytes);
    const uint32_t ring = shared_address(own) + lane * 16;
    const uint8_t* next = static_cast<const uint8_t*>(a.weights) + (size_t(first_tile) * units + first) * kFourBitBytes + lane * 16;
    unsigned next_left = count;
    const auto copy_unit = [&](unsigned stage) {
        if (next_left > 0) {
            copy_once(ring + stage, next, 16);
            if (lane < 8) copy_once(ring + stage + kFourBitScales, next + kFourBitScales, 16);
            next += kFourBitBytes;
            --next_left;
        }
        commit_copies();
    };
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) copy_unit(stage * kFourBitBytes);
    unsigned stage = 0;

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
                put_pack<T>(input, group_sums, pitch, row, at, y, at < packs);
            }
        }
    } else {
        wait_for_previous_kernel();
        const unsigned packs = units * (kFourBitUnit / 8), total = a.rows * packs;
        // Several loads at once: each takes as long as all of them.
        for (unsigned base = 0; base < total; base += kFewLoads * kFewThreads) {
            uint4 loaded[kFewLoads];
#pragma unroll
            for (int i = 0; i < kFewLoads; ++i) {
                const unsigned index = base + i * kFewThreads + threadIdx.x, row = index / packs, at = index % packs;
                loaded[i] = make_uint4(0, 0, 0, 0);
                if (index < total) {
                    loaded[i] = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.x) + size_t(row) * a.inputs) + at);
                }
            }
#pragma unroll
            for (int i = 0; i < kFewLoads; ++i) {
                const unsigned index = base + i * kFewThreads + threadIdx.x, row = index / packs, at = index % packs;
                // The same for all threads: they come together in the sums.
                if (base + i * kFewThreads >= total) break;
                put_pack<T>(input, group_sums, pitch, row, at, reinterpret_cast<const Pack<T>&>(loaded[i]), index < total);
            }
        }
    }
    if constexpr (kEnding == Ending::kAdd) {
        if (threadIdx.x < results) before = __ldcg(static_cast<const float*>(a.out) + place(threadIdx.x));
    }
    __syncthreads();

    // ---- units ----
    const uint8_t* row = input + min(g, a.rows - 1) * pitch + t * 16 + first % units * (kFourBitUnit * 2);
    const float4* sums_of = reinterpret_cast<const float4*>(group_sums) + t + first % units * 4;
    unsigned left = units - first % units;
    float4* slot = slots + (warp + first / units) * 32 + lane;
    float d[4] = {};
    const auto put_sums = [&] {
        *slot = make_float4(d[0], d[1], d[2], d[3]);
        d[0] = d[1] = d[2] = d[3] = 0.0f;
        slot += 32;
    };
    const auto multiply_unit = [&](const uint8_t* at) {
        const FourBitPiece piece = {*reinterpret_cast<const uint4*>(at + lane * 16), *reinterpret_cast<const uint4*>(at + kFourBitScales + g * 16)};
        const uint4 b[2] = {*reinterpret_cast<const uint4*>(row), *reinterpret_cast<const uint4*>(row + kFourBitGroup * 2)};
        const float4 sums = *sums_of;
        row += kFourBitUnit * 2;
        sums_of += 4;
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
            float p[4];
            few_multiply<T>(p, steps[0], b[side].x, b[side].y);
            few_multiply_add<T>(p, steps[1], b[side].z, b[side].w);
            const float even = side ? sums.z : sums.x, odd = side ? sums.w : sums.y;
            d[0] = fmaf(of_low.x, p[0], fmaf(of_low.y, even, d[0]));
            d[1] = fmaf(of_low.x, p[1], fmaf(of_low.y, odd, d[1]));
            d[2] = fmaf(of_high.x, p[2], fmaf(of_high.y, even, d[2]));
            d[3] = fmaf(of_high.x, p[3], fmaf(of_high.y, odd, d[3]));
        }
    };
    for (unsigned done = 0; done < count; ++done) {
        wait_copies<kStages - 1>();
        // Scales were copied by others.
        __syncwarp();
        multiply_unit(own + stage);
        __syncwarp();
        copy_unit(stage);
        stage = stage == (kStages - 1) * kFourBitBytes ? 0 : stage + kFourBitBytes;
        if (--left == 0) {
            left = units;
            row -= units * (kFourBitUnit * 2);
            sums_of -= units * 4;
            put_sums();
        }
    }
    if (left != units && count > 0) put_sums();

    // ---- the warps' sums, in their order ----
    __syncthreads();
    const float* const values = reinterpret_cast<const float*>(slots);
    for (unsigned index = threadIdx.x; index < results; index += kFewThreads) {
        const unsigned row = index / width, output = index % width, tile = output / kWide, in_tile = output % kWide;
        const unsigned in_slot = (in_tile % 8 * 4 + row / 2) * 4 + in_tile / 8 * 2 + row % 2;
        float sum = 0.0f, up = 0.0f;
        // The warps that have parts of the tile.
        const unsigned first_warp = kFewWarps * tile / tiles, end_warp = (kFewWarps * (tile + 1) + tiles - 1) / tiles;
        for (unsigned w = first_warp; w < end_warp; ++w) {
            const float* at = values + size_t(w + tile) * 128 + in_slot;
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
