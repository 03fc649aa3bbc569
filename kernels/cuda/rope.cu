// Rotary embedding, and keys and values into the blocks of their sequences.
#include "attention/tensor.cuh"
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

// One block per token. A thread takes eight pairs of a head: two packs, in halves of the head or side by side.
template <class T> __device__ __forceinline__ void rope_into_kv(const RopeArgs& a) {
    pagedd::let_next_kernel_start();
    pagedd::wait_for_previous_kernel();
    const unsigned token = blockIdx.x, units = a.head_dim / 16;
    const unsigned all_heads = a.heads + 2 * a.kv_heads;
    const T* from = static_cast<const T*>(a.qkv) + size_t(token) * a.qkv_stride;
    T* queries = static_cast<T*>(a.q) + size_t(token) * a.q_stride;
    const uint32_t row = a.token_rows[token], position = a.positions[token];
    T* layer = nullptr;
    if (row != NO_ROW) {
        const uint32_t block = a.tables[a.row_tables[row] + (position >> a.block_shift)];
        layer = reinterpret_cast<T*>(a.arena + block * a.block_stride + a.layer_offset);
    }
    const unsigned slot = position & ((1u << a.block_shift) - 1);

    for (unsigned index = threadIdx.x; index < all_heads * units; index += blockDim.x) {
        const unsigned head = index / units, unit = index % units;
        const unsigned first = a.interleaved ? 2 * unit : unit;
        const unsigned second = a.interleaved ? first + 1 : first + units;
        const T* source = from + head * a.head_dim;
        const Pack<T> packs[2] = {load(source, first), load(source, second)};
        float low[8], high[8];
#pragma unroll
        for (unsigned j = 0; j < 8; ++j) {
            low[j] = to_f32(packs[0].at[j]);
            high[j] = to_f32(packs[1].at[j]);
        }
        if (a.bias) {
            const float* bias = a.bias + head * a.head_dim;
#pragma unroll
            for (unsigned j = 0; j < 8; ++j) {
                low[j] += bias[first * 8 + j];
                high[j] += bias[second * 8 + j];
            }
        }
        if (head < a.heads + a.kv_heads) {
            turn<T>(low, high, a.turns + size_t(token) * (a.head_dim / 2) + unit * 8, a.interleaved);
        }
        T* target;
        if (head < a.heads) {
            target = queries + head * a.head_dim;
        } else if (layer) {
            // [key or value][kv head][token][head_dim]
            target = layer + (size_t(head - a.heads) << a.block_shift) * a.head_dim + size_t(slot) * a.head_dim;
        } else {
            continue;
        }
        Pack<T> out[2];
#pragma unroll
        for (unsigned j = 0; j < 8; ++j) {
            out[0].at[j] = from_f32<T>(low[j]);
            out[1].at[j] = from_f32<T>(high[j]);
        }
        store(target, first, out[0]);
        store(target, second, out[1]);
    }
}
FOR_ELEMENTS(rope_into_kv, RopeArgs)
