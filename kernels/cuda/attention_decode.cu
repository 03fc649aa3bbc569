// Paged decode attention: entry points `pagedd_attention_decode_plan` or `..._lanes` once a step, then for each layer
// `pagedd_attention_decode_{bf16,f16}_d{64,80,96,128,256}` and `pagedd_attention_combine_{bf16,f16}_d{64,80,96,128,256}`.
#include "attention/combine.cuh"
#include "attention/lanes.cuh"

// Warps, ring stages and bytes of dynamic shared memory of a CTA: about 64 KiB, so that two CTAs fit an SM of sm_80 and sm_90 and one fits one of sm_89.
// The host launches with the same numbers.
#define PAGEDD_DECODE(name, type, dim, warps, stages, shared)                                                                     \
    static_assert(pagedd::DecodeShape<pagedd::type, dim, warps, stages>::kSharedBytes == shared, "the host's number");                          \
    extern "C" __global__ void __launch_bounds__(warps * 32, 2)                                                                   \
        pagedd_attention_decode_##name##_d##dim(const __grid_constant__ pagedd::DecodeParams params) {                            \
        pagedd::decode_attention<pagedd::type, pagedd::type, dim, warps, stages>(params);                                                       \
    }                                                                                                                             \
    extern "C" __global__ void __launch_bounds__(pagedd::kCombineThreads)                                                         \
        pagedd_attention_combine_##name##_d##dim(const __grid_constant__ pagedd::DecodeParams params) {                           \
        pagedd::combine_attention<pagedd::type, dim>(params);                                                                     \
    }

#define PAGEDD_DECODE_DIMS(name, type)           \
    PAGEDD_DECODE(name, type, 64, 4, 4, 67216)   \
    PAGEDD_DECODE(name, type, 80, 4, 3, 69264)   \
    PAGEDD_DECODE(name, type, 96, 4, 2, 54928)   \
    PAGEDD_DECODE(name, type, 128, 4, 2, 67216)  \
    PAGEDD_DECODE(name, type, 256, 2, 2, 66960)

PAGEDD_DECODE_DIMS(bf16, Bf16)
PAGEDD_DECODE_DIMS(f16, F16)

extern "C" __global__ void __launch_bounds__(pagedd::kPlanThreads) pagedd_attention_decode_plan(const __grid_constant__ pagedd::DecodePlanParams params) {
    pagedd::decode_plan(params);
}

extern "C" __global__ void __launch_bounds__(pagedd::kPlanThreads) pagedd_attention_decode_plan_lanes(const __grid_constant__ pagedd::DecodePlanParams params) {
    pagedd::decode_plan_lanes(params);
}
