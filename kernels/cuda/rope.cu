// Rotary embedding, and keys and values into the blocks of their sequences.
#include "attention/stored.cuh"
#include "common.cuh"

struct AngleArgs {
    const uint32_t* positions;  // [tokens]
    const float* frequencies;   // [pairs], radians per position
    float2* turns;              // [tokens][pairs], cosine and sine
    uint32_t tokens;
    uint32_t pairs;
    float magnitude;            // on both
};

// Cosines and sines of a step, used by every layer.
extern "C" __global__ void rope_angles(const __grid_constant__ AngleArgs a) {
    const uint64_t index = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= uint64_t(a.tokens) * a.pairs) return;
    const uint32_t token = index / a.pairs, pair = index % a.pairs;
    // The angle in single precision, as in the models' own code.
    float sine, cosine;
    sincosf(__fmul_rn(float(a.positions[token]), a.frequencies[pair]), &sine, &cosine);
    a.turns[index] = make_float2(cosine * a.magnitude, sine * a.magnitude);
}

// A token that is in no row: its keys and values are not written.
constexpr uint32_t NO_ROW = 0xffffffffu;

struct RopeArgs {
    const void* qkv;            // [tokens][qkv_stride]: heads of queries, then of keys, then of values
    const float* bias;          // [(heads + 2 kv_heads) head_dim], added first; or null
    void* q;                    // [tokens][q_stride]; may be qkv itself
    const float2* turns;        // [tokens][head_dim / 2]
    const uint32_t* positions;  // [tokens]
    const uint32_t* token_rows; // [tokens], or NO_ROW
    const uint32_t* row_tables; // [rows]: where in tables a row's table begins
    const uint32_t* tables;     // block ids
    uint8_t* arena;
    uint64_t block_stride;      // bytes
    uint64_t layer_offset;      // bytes from a block's address to the layer
    uint32_t qkv_stride;        // elements
    uint32_t q_stride;          // elements
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;          // a multiple of 16
    uint32_t block_shift;       // a block has 2^block_shift tokens
    uint32_t interleaved;       // pairs are (2i, 2i + 1), else (i, i + head_dim / 2)
};

template <class T> __device__ __forceinline__ void turn(float* low, float* high, const float2* turns, bool interleaved) {
    if (interleaved) {
#pragma unroll
        for (unsigned j = 0; j < 8; j += 2) {
            const float2 first = turns[j / 2], second = turns[4 + j / 2];
            const float a = low[j], b = low[j + 1], c = high[j], d = high[j + 1];
            low[j] = a * first.x - b * first.y;
            low[j + 1] = a * first.y + b * first.x;
            high[j] = c * second.x - d * second.y;
            high[j + 1] = c * second.y + d * second.x;
        }
    } else {
#pragma unroll
        for (unsigned j = 0; j < 8; ++j) {
            const float a = low[j], b = high[j];
            low[j] = a * turns[j].x - b * turns[j].y;
            high[j] = a * turns[j].y + b * turns[j].x;
        }
    }
}

// A head's eight pairs of one thread: packs `first` and `second`, in halves of the head or side by side.
struct Pairs {
    unsigned first, second;
    float low[8], high[8];
};

// Reads, adds the bias, and turns queries and keys.
template <class T> __device__ __forceinline__ Pairs load_pairs(const RopeArgs& a, const T* from, unsigned token, unsigned head, unsigned unit) {
    Pairs pairs;
    pairs.first = a.interleaved ? 2 * unit : unit;
    pairs.second = a.interleaved ? pairs.first + 1 : pairs.first + a.head_dim / 16;
    const T* source = from + head * a.head_dim;
    const Pack<T> packs[2] = {load(source, pairs.first), load(source, pairs.second)};
#pragma unroll
    for (unsigned j = 0; j < 8; ++j) {
        pairs.low[j] = to_f32(packs[0].at[j]);
        pairs.high[j] = to_f32(packs[1].at[j]);
    }
    if (a.bias) {
        const float* bias = a.bias + head * a.head_dim;
#pragma unroll
        for (unsigned j = 0; j < 8; ++j) {
            pairs.low[j] += bias[pairs.first * 8 + j];
            pairs.high[j] += bias[pairs.second * 8 + j];
        }
    }
    if (head < a.heads + a.kv_heads) {
        turn<T>(pairs.low, pairs.high, a.turns + size_t(token) * (a.head_dim / 2) + unit * 8, a.interleaved);
    }
    return pairs;
}

template <class T> __device__ __forceinline__ void store_pairs(T* target, const Pairs& pairs) {
    Pack<T> out[2];
#pragma unroll
    for (unsigned j = 0; j < 8; ++j) {
        out[0].at[j] = from_f32<T>(pairs.low[j]);
        out[1].at[j] = from_f32<T>(pairs.high[j]);
    }
    store(target, pairs.first, out[0]);
    store(target, pairs.second, out[1]);
}

// Where a token's keys and values go: the layer of its block, or null where it is in no row.
__device__ __forceinline__ uint8_t* layer_of(const RopeArgs& a, unsigned token, unsigned& slot) {
    const uint32_t row = a.token_rows[token], position = a.positions[token];
    slot = position & ((1u << a.block_shift) - 1);
    if (row == NO_ROW) return nullptr;
    const uint32_t block = a.tables[a.row_tables[row] + (position >> a.block_shift)];
    return a.arena + block * a.block_stride + a.layer_offset;
}

// Block (x, y) has token x, and shares its heads with the other y. A thread takes eight pairs of a head at a time.
template <class T> __device__ __forceinline__ void rope_into_kv(const RopeArgs& a) {
    pagedd::let_next_kernel_start();
    pagedd::wait_for_previous_kernel();
    const unsigned token = blockIdx.x, units = a.head_dim / 16;
    const unsigned all_heads = a.heads + 2 * a.kv_heads;
    const T* from = static_cast<const T*>(a.qkv) + size_t(token) * a.qkv_stride;
    T* queries = static_cast<T*>(a.q) + size_t(token) * a.q_stride;
    unsigned slot;
    T* layer = reinterpret_cast<T*>(layer_of(a, token, slot));

    for (unsigned index = blockIdx.y * blockDim.x + threadIdx.x; index < all_heads * units; index += gridDim.y * blockDim.x) {
        const unsigned head = index / units, unit = index % units;
        const Pairs pairs = load_pairs(a, from, token, head, unit);
        if (head < a.heads) {
            store_pairs(queries + head * a.head_dim, pairs);
        } else if (layer) {
            // [key or value][kv head][token][head_dim]
            store_pairs(layer + (size_t(head - a.heads) << a.block_shift) * a.head_dim + size_t(slot) * a.head_dim, pairs);
        }
    }
}
FOR_ELEMENTS(rope_into_kv, RopeArgs)

// The largest magnitude that e4m3 has, and the largest magnitude of a row below which all of it counts as zero: the reciprocal of its scale would be none.
constexpr float E4M3_MOST = 448.0f;
constexpr float E4M3_LEAST_ROW = 0x1p-100f;

// Eight elements of a row whose largest magnitude has the reciprocal scale `inverse`, rounded to nearest, ties to even.
__device__ __forceinline__ uint2 quantize(const float (&x)[8], float inverse) {
    uint32_t words[2] = {};
#pragma unroll
    for (unsigned j = 0; j < 8; j += 2) {
        const uint32_t two = __nv_cvt_float2_to_fp8x2(make_float2(x[j] * inverse, x[j + 1] * inverse), __NV_SATFINITE, __NV_E4M3);
        words[j / 4] |= two << (j % 4 * 8);
    }
    return make_uint2(words[0], words[1]);
}

// The same into blocks of e4m3, each head's row with its scale. The threads of a head lie in one warp, `1 << team_shift` of them.
template <class T> __device__ __forceinline__ void rope_into_kv_e4m3(const RopeArgs& a) {
    pagedd::let_next_kernel_start();
    pagedd::wait_for_previous_kernel();
    const unsigned token = blockIdx.x, units = a.head_dim / 16;
    const unsigned all_heads = a.heads + 2 * a.kv_heads;
    const T* from = static_cast<const T*>(a.qkv) + size_t(token) * a.qkv_stride;
    T* queries = static_cast<T*>(a.q) + size_t(token) * a.q_stride;
    unsigned slot;
    uint8_t* layer = layer_of(a, token, slot);
    const unsigned team_shift = WARP - __clz(units - 1), unit = threadIdx.x & ((1u << team_shift) - 1);
    const unsigned teams = blockDim.x >> team_shift, team = threadIdx.x >> team_shift;

    // All threads of a warp take as many turns.
    for (unsigned start = blockIdx.y * teams; start < all_heads; start += gridDim.y * teams) {
        const unsigned head = start + team;
        const bool works = head < all_heads && unit < units;
        Pairs pairs = {};
        if (works) pairs = load_pairs(a, from, token, head, unit);
        if (works && head < a.heads) store_pairs(queries + head * a.head_dim, pairs);
        // Bits of magnitudes have the order of their values, and a NaN is above all.
        unsigned most = 0;
#pragma unroll
        for (unsigned j = 0; j < 8; ++j) {
            most = max(most, max(__float_as_uint(fabsf(pairs.low[j])), __float_as_uint(fabsf(pairs.high[j]))));
        }
        for (unsigned width = 1; width < 1u << team_shift; width *= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, width));
        if (!works || head < a.heads || !layer) continue;
        const float largest = __uint_as_float(most);
        float scale = 0.0f, inverse = 0.0f;
        if (largest >= E4M3_LEAST_ROW) {
            scale = __fdiv_rn(largest, E4M3_MOST);
            inverse = __fdiv_rn(E4M3_MOST, largest);
        }
        // Of a row that is not finite nothing is: elements have no infinity.
        if (most >= 0x7f800000u) scale = __uint_as_float(0x7fc00000u);
        const size_t row = (size_t(head - a.heads) << a.block_shift) + slot;
        uint2* target = reinterpret_cast<uint2*>(layer + row * a.head_dim);
        target[pairs.first] = quantize(pairs.low, inverse);
        target[pairs.second] = quantize(pairs.high, inverse);
        if (unit == 0) {
            // Behind all elements: [key or value][kv head][token]
            const size_t elements = (size_t(2 * a.kv_heads) << a.block_shift) * a.head_dim;
            reinterpret_cast<float*>(layer + elements)[row] = scale;
        }
    }
}
FOR_ELEMENTS(rope_into_kv_e4m3, RopeArgs)
