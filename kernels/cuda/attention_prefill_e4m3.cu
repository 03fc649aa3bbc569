// Paged prefill attention on keys and values in e4m3: entry points `pagedd_attention_prefill_e4m3_bf16_d{64,80,96,128,256}`.
#include "attention/prefill.cuh"

// As attention_prefill.cu.
#define PAGEDD_PREFILL_E4M3(dim, warps, row_tiles, keys, shared)                                                                            \
    static_assert(pagedd::PrefillShape<pagedd::E4m3, dim, warps, row_tiles, keys, 2>::kSharedBytes == shared, "the host's number");        \
    extern "C" __global__ void __launch_bounds__(warps * 32, 2)                                                                             \
        pagedd_attention_prefill_e4m3_bf16_d##dim(const __grid_constant__ pagedd::PrefillParams params) {                                   \
        pagedd::prefill_attention<pagedd::Bf16, pagedd::PrefillShape<pagedd::E4m3, dim, warps, row_tiles, keys, 2>>(params);                \
    }

PAGEDD_PREFILL_E4M3(64, 4, 2, 64, 43008)
PAGEDD_PREFILL_E4M3(80, 4, 2, 64, 57856)
PAGEDD_PREFILL_E4M3(96, 4, 2, 64, 68608)
PAGEDD_PREFILL_E4M3(128, 4, 2, 32, 59392)
PAGEDD_PREFILL_E4M3(256, 4, 1, 32, 86016)
