// Residual addition and RMSNorm in one pass over a row.
#include "attention/tensor.cuh"
#include "common.cuh"

struct NormArgs {
    float* x;             // [.. rows][hidden], the residual stream
    const void* delta;    // [.. rows][hidden], added to it; or null
    const float* weight;  // [hidden]
    const uint32_t* rows; // which row of x the i-th output is of; null: the i-th. With it, x is left as it is
    void* out;            // [grid][hidden]
    uint32_t hidden;      // a multiple of 8
    float epsilon;
};

// Packs that a thread keeps in registers; blocks are made so wide that these are enough.
constexpr unsigned NORM_PACKS = 4;

// x' = x + delta; out = round(x' / sqrt(mean(x'^2) + epsilon) * weight). One block per row.
template <class T> __device__ __forceinline__ void add_rms_norm(const NormArgs& a) {
    __shared__ float scratch[WARP];
    // The next one's blocks may come and read weights ahead; and this one may have come itself while the one before it ran.
    pagedd::let_next_kernel_start();
    pagedd::wait_for_previous_kernel();
    const size_t row = a.rows ? a.rows[blockIdx.x] : blockIdx.x;
    float* x = a.x + row * a.hidden;
    const T* delta = a.delta ? static_cast<const T*>(a.delta) + row * a.hidden : nullptr;
    T* out = static_cast<T*>(a.out) + size_t(blockIdx.x) * a.hidden;
    const unsigned packs = a.hidden / Pack<T>::SIZE;

    Eight kept[NORM_PACKS];
    float squares = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < NORM_PACKS; ++i) {
        const unsigned pack = i * blockDim.x + threadIdx.x;
        if (pack >= packs) break;
        kept[i] = load(x, pack);
        if (delta) {
            const Pack<T> added = load(delta, pack);
#pragma unroll
            for (unsigned j = 0; j < Pack<T>::SIZE; ++j) kept[i].at[j] += to_f32(added.at[j]);
            if (!a.rows) store(x, pack, kept[i]);
        }
#pragma unroll
        for (unsigned j = 0; j < Pack<T>::SIZE; ++j) squares += kept[i].at[j] * kept[i].at[j];
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / float(a.hidden) + a.epsilon);
#pragma unroll
    for (unsigned i = 0; i < NORM_PACKS; ++i) {
        const unsigned pack = i * blockDim.x + threadIdx.x;
        if (pack >= packs) break;
        const Eight factors = load(a.weight, pack);
        Pack<T> y;
#pragma unroll
        for (unsigned j = 0; j < Pack<T>::SIZE; ++j) y.at[j] = from_f32<T>(kept[i].at[j] * scale * factors.at[j]);
        store(out, pack, y);
    }
}
FOR_ELEMENTS(add_rms_norm, NormArgs)
