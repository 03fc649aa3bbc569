// Paged decode attention on keys and values in e4m3: entry points `pagedd_attention_decode_e4m3_bf16_d{64,80,96,128,256}`. Plans and combining are those
// of attention_decode.cu.
#include "attention/decode.cuh"

// As attention_decode.cu; with half the bytes in flight as many tokens are, and more warps have to widen them: three CTAs fit an SM of sm_90.
#define PAGEDD_DECODE_E4M3(dim, warps, stages, shared)                                                                                         \
    static_assert(pagedd::DecodeShape<pagedd::E4m3, dim, warps, stages>::kSharedBytes == shared, "the host's number");                        \
    extern "C" __global__ void __launch_bounds__(warps * 32, 3)                                                                                \
        pagedd_attention_decode_e4m3_bf16_d##dim(const __grid_constant__ pagedd::DecodeParams params) {                                        \
        pagedd::decode_attention<pagedd::Bf16, pagedd::E4m3, dim, warps, stages>(params);                                                      \
    }

PAGEDD_DECODE_E4M3(64, 4, 3, 66192)
PAGEDD_DECODE_E4M3(80, 4, 3, 66192)
PAGEDD_DECODE_E4M3(96, 4, 2, 61072)
PAGEDD_DECODE_E4M3(128, 4, 2, 69264)
PAGEDD_DECODE_E4M3(256, 2, 2, 67984)
