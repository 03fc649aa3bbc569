// Activation, embedding, copies of blocks, seeded weights.
#include "attention/tensor.cuh"
#include "common.cuh"

struct SiluArgs {
    const void* gate_up;  // [rows][2 ffn]: gate, then up
    void* out;            // [rows][ffn]
    uint32_t row_packs;   // ffn / 8
    uint32_t row_blocks;  // thread blocks for a row: grid = rows * row_blocks
};

// out = gate / (1 + exp(-gate)) * up, a pack a thread.
template <class T> __device__ __forceinline__ void silu_mul(const SiluArgs& a) {
    pagedd::let_next_kernel_start();
    pagedd::wait_for_previous_kernel();
    const uint32_t row = blockIdx.x / a.row_blocks, pack = blockIdx.x % a.row_blocks * blockDim.x + threadIdx.x;
    if (pack >= a.row_packs) return;
    const T* gates = static_cast<const T*>(a.gate_up) + size_t(row) * a.row_packs * 2 * Pack<T>::SIZE;
    const Pack<T> gate = load(gates, pack), up = load(gates, pack + a.row_packs);
    Pack<T> out;
#pragma unroll
    for (unsigned j = 0; j < Pack<T>::SIZE; ++j) {
        const float x = to_f32(gate.at[j]);
        out.at[j] = from_f32<T>(__fdividef(x, 1.0f + __expf(-x)) * to_f32(up.at[j]));
    }
    store(static_cast<T*>(a.out) + size_t(row) * a.row_packs * Pack<T>::SIZE, pack, out);
}
FOR_ELEMENTS(silu_mul, SiluArgs)

struct EmbedArgs {
    const void* table;      // [vocabulary][hidden]
    const uint32_t* tokens; // [grid]: an id; with the top bit set, an index into drawn
    const uint32_t* drawn;  // what an earlier step drew, two words each (token, first bad one); or null
    float* out;             // [grid][hidden]
    uint32_t vocabulary;
    uint32_t drawn_count;
    uint32_t hidden;        // a multiple of 8
};

constexpr uint32_t FROM_DRAW = 0x80000000u;

// One block per token. A token outside the vocabulary (a draw that failed) gives zeros.
template <class T> __device__ __forceinline__ void embed(const EmbedArgs& a) {
    uint32_t token = a.tokens[blockIdx.x];
    if (token & FROM_DRAW) {
        const uint32_t index = token & ~FROM_DRAW;
        token = index < a.drawn_count ? a.drawn[2 * index] : a.vocabulary;
    }
    const unsigned packs = a.hidden / Pack<T>::SIZE;
    float* out = a.out + size_t(blockIdx.x) * a.hidden;
    const T* row = static_cast<const T*>(a.table) + size_t(token) * a.hidden;
    for (unsigned pack = threadIdx.x; pack < packs; pack += blockDim.x) {
        Eight values = {};
        if (token < a.vocabulary) {
            const Pack<T> read = load(row, pack);
#pragma unroll
            for (unsigned j = 0; j < Pack<T>::SIZE; ++j) values.at[j] = to_f32(read.at[j]);
        }
        store(out, pack, values);
    }
}
FOR_ELEMENTS(embed, EmbedArgs)

// A copy of the first positions of a block into another.
struct BlockCopy {
    uint32_t from;
    uint32_t to;
    uint32_t tokens;
};

struct CopyArgs {
    const BlockCopy* copies; // [grid.y]
    uint8_t* arena;
    uint64_t block_stride;   // bytes
    uint64_t layer_stride;   // bytes
    uint32_t runs;           // key and value heads of a layer: 2 kv_heads
    uint32_t run_packs;      // 16-byte packs of a head in a block
    uint32_t token_packs;    // 16-byte packs of a token of a head
    uint32_t scales;         // bytes from a layer to the scales of its tokens, a word each, [runs][tokens]; or 0
    uint32_t run_scales;     // tokens of a block
};

// One block per layer and head (grid.x) and copy (grid.y).
extern "C" __global__ void copy_blocks(const __grid_constant__ CopyArgs a) {
    const BlockCopy copy = a.copies[blockIdx.y];
    const uint64_t run = (blockIdx.x / a.runs) * a.layer_stride + uint64_t(blockIdx.x % a.runs) * a.run_packs * 16;
    const uint4* from = reinterpret_cast<const uint4*>(a.arena + copy.from * a.block_stride + run);
    uint4* to = reinterpret_cast<uint4*>(a.arena + copy.to * a.block_stride + run);
    for (unsigned pack = threadIdx.x; pack < copy.tokens * a.token_packs; pack += blockDim.x) to[pack] = from[pack];
    if (a.scales) {
        const uint64_t scales = (blockIdx.x / a.runs) * a.layer_stride + a.scales + uint64_t(blockIdx.x % a.runs) * a.run_scales * 4;
        const uint32_t* scales_from = reinterpret_cast<const uint32_t*>(a.arena + copy.from * a.block_stride + scales);
        uint32_t* scales_to = reinterpret_cast<uint32_t*>(a.arena + copy.to * a.block_stride + scales);
        for (unsigned token = threadIdx.x; token < copy.tokens; token += blockDim.x) scales_to[token] = scales_from[token];
    }
}

// A piece of a host's buffer and the place that it goes to.
struct Piece {
    uint8_t* to;
    uint32_t first; // 16-byte packs before it in the buffer
    uint32_t words; // its length, of 4 bytes
};

struct ScatterArgs {
    const uint8_t* from;
    Piece pieces[12]; // [grid.y]
};

// Reads the host's memory itself: one launch in the place of a copy for each piece.
extern "C" __global__ void scatter(const __grid_constant__ ScatterArgs a) {
    const Piece piece = a.pieces[blockIdx.y];
    const uint4* from = reinterpret_cast<const uint4*>(a.from) + piece.first;
    uint4* to = reinterpret_cast<uint4*>(piece.to);
    const unsigned packs = piece.words / 4, step = gridDim.x * blockDim.x, at = blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned pack = at; pack < packs; pack += step) to[pack] = from[pack];
    const unsigned word = packs * 4 + at;
    if (word < piece.words) reinterpret_cast<uint32_t*>(to)[word] = reinterpret_cast<const uint32_t*>(from)[word];
}

struct FillArgs {
    void* out;
    uint64_t packs;  // elements / 8
    uint64_t seed;
    float deviation; // of a normal distribution around 0
};

// Normal numbers (Box and Muller) of a Philox stream: an element is a function of seed and index.
template <class T> __device__ __forceinline__ void fill_normal(const FillArgs& a) {
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t pack = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; pack < a.packs; pack += step) {
        Pack<T> out;
#pragma unroll
        for (unsigned part = 0; part < 2; ++part) {
            const uint4 bits = philox4x32_10(make_uint4(uint32_t(pack), uint32_t(pack >> 32), part, 0),
                                             make_uint2(uint32_t(a.seed), uint32_t(a.seed >> 32)));
            const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
            for (unsigned j = 0; j < 4; j += 2) {
                const float radius = sqrtf(-2.0f * logf((float(words[j] >> 8) + 0.5f) * 0x1p-24f)) * a.deviation;
                float sine, cosine;
                sincospif(float(words[j + 1] >> 8) * 0x1p-23f, &sine, &cosine);
                out.at[4 * part + j] = from_f32<T>(radius * cosine);
                out.at[4 * part + j + 1] = from_f32<T>(radius * sine);
            }
        }
        store(static_cast<T*>(a.out), pack, out);
    }
}
FOR_ELEMENTS(fill_normal, FillArgs)
