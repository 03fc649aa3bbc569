// Attention of large groups to the tokens that they share: entry points `pagedd_attention_shared_{bf16,f16}_d{64,80,96,128,256}`.
#include "attention/shared.cuh"

// Tiles and shared memory as in attention_prefill.cu.
#define PAGEDD_SHARED(name, type, dim, warps, row_tiles, keys, slots, shared)                                                        \
    static_assert(pagedd::PrefillShape<pagedd::type, dim, warps, row_tiles, keys, slots>::kSharedBytes == shared, "the host's number");            \
    extern "C" __global__ void __launch_bounds__(warps * 32, 2)                                                                      \
        pagedd_attention_shared_##name##_d##dim(const __grid_constant__ pagedd::SharedParams params) {                               \
        pagedd::shared_attention<pagedd::type, pagedd::PrefillShape<pagedd::type, dim, warps, row_tiles, keys, slots>, false>(params);             \
    }

#define PAGEDD_SHARED_DIMS(name, type)                 \
    PAGEDD_SHARED(name, type, 64, 4, 2, 64, 3, 40960)  \
    PAGEDD_SHARED(name, type, 80, 4, 2, 64, 3, 56320)  \
    PAGEDD_SHARED(name, type, 96, 4, 2, 64, 3, 66560)  \
    PAGEDD_SHARED(name, type, 128, 4, 2, 64, 3, 81920) \
    PAGEDD_SHARED(name, type, 256, 4, 1, 32, 3, 81920)

PAGEDD_SHARED_DIMS(bf16, Bf16)
PAGEDD_SHARED_DIMS(f16, F16)
