// Paged prefill attention: entry points `pagedd_attention_prefill_{bf16,f16}_d{64,80,96,128,256}`.
#include "attention/prefill.cuh"

// Two CTAs of 4 warps an SM, within the shared memory and the registers of sm_80 and sm_90: 128 rows (64 at head_dim 256) against 64 keys (32). The
// last number is the bytes of dynamic shared memory that the host launches with.
#define PAGEDD_PREFILL(name, type, dim, warps, row_tiles, keys, slots, shared)                                                       \
    static_assert(pagedd::PrefillShape<pagedd::type, dim, warps, row_tiles, keys, slots>::kSharedBytes == shared, "the host's number");            \
    extern "C" __global__ void __launch_bounds__(warps * 32, 2)                                                                      \
        pagedd_attention_prefill_##name##_d##dim(const __grid_constant__ pagedd::PrefillParams params) {                             \
        pagedd::prefill_attention<pagedd::type, pagedd::PrefillShape<pagedd::type, dim, warps, row_tiles, keys, slots>>(params);                   \
    }

#define PAGEDD_PREFILL_DIMS(name, type)                 \
    PAGEDD_PREFILL(name, type, 64, 4, 2, 64, 3, 40960)  \
    PAGEDD_PREFILL(name, type, 80, 4, 2, 64, 3, 56320)  \
    PAGEDD_PREFILL(name, type, 96, 4, 2, 64, 3, 66560)  \
    PAGEDD_PREFILL(name, type, 128, 4, 2, 64, 3, 81920) \
    PAGEDD_PREFILL(name, type, 256, 4, 1, 32, 3, 81920)

PAGEDD_PREFILL_DIMS(bf16, Bf16)
PAGEDD_PREFILL_DIMS(f16, F16)
