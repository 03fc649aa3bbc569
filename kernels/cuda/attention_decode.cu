// Paged decode attention: entry points `pagedd_attention_decode_plan` once a step, then for each layer
// `pagedd_attention_decode_{bf16,f16}_d{64,80,96,128,256}` and `pagedd_attention_combine_{bf16,f16}_d{64,80,96,128,256}`.
#include "attention/combine.cuh"

// Warps and ring stages of a CTA: rings of about 64 KiB, so that two CTAs fit an SM of sm_80 and sm_90 and one fits one of sm_89.
#define PAGEDD_DECODE(name, type, dim, warps, stages)                                                                             \
    extern "C" __global__ void __launch_bounds__(warps * 32, 2)                                                                   \
        pagedd_attention_decode_##name##_d##dim(const __grid_constant__ pagedd::DecodeParams params) {                            \
        pagedd::decode_attention<pagedd::type, dim, warps, stages>(params);                                                       \
    }                                                                                                                             \
    extern "C" __global__ void __launch_bounds__(pagedd::kCombineThreads)                                                         \
        pagedd_attention_combine_##name##_d##dim(const __grid_constant__ pagedd::DecodeParams params) {                           \
        pagedd::combine_attention<pagedd::type, dim>(params);                                                                     \
    }

#define PAGEDD_DECODE_DIMS(name, type)    \
    PAGEDD_DECODE(name, type, 64, 4, 4)   \
    PAGEDD_DECODE(name, type, 80, 4, 3)   \
    PAGEDD_DECODE(name, type, 96, 4, 2)   \
    PAGEDD_DECODE(name, type, 128, 4, 2)  \
    PAGEDD_DECODE(name, type, 256, 2, 2)

PAGEDD_DECODE_DIMS(bf16, Bf16)
PAGEDD_DECODE_DIMS(f16, F16)

extern "C" __global__ void __launch_bounds__(1024) pagedd_attention_decode_plan(const __grid_constant__ pagedd::DecodePlanParams params) {
    pagedd::decode_plan(params);
}
