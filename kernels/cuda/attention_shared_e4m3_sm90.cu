// The same on sm_90a: entry points `pagedd_attention_shared_e4m3_sm90_bf16_d{64,128,256}`, as in attention_shared_sm90.cu.
#include "attention/shared.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PAGEDD_ON_SM90(...) __VA_ARGS__
#else
#define PAGEDD_ON_SM90(...) __trap()
#endif

// Tiles and shared memory as in attention_prefill_e4m3_sm90.cu.
#define PAGEDD_SHARED_E4M3_SM90(dim, keys, stages, shared)                                                                                    \
    static_assert(pagedd::HopperShape<pagedd::E4m3, dim, 2, keys, stages, 1>::kSharedBytes == shared, "the host's number");                   \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                                                      \
        pagedd_attention_shared_e4m3_sm90_bf16_d##dim(const __grid_constant__ pagedd::SharedParams params) {                                  \
        PAGEDD_ON_SM90(pagedd::shared_attention<pagedd::Bf16, pagedd::HopperShape<pagedd::E4m3, dim, 2, keys, stages, 1>, true>(params));     \
    }

PAGEDD_SHARED_E4M3_SM90(64, 128, 2, 122944)
PAGEDD_SHARED_E4M3_SM90(128, 64, 4, 204928)
PAGEDD_SHARED_E4M3_SM90(256, 32, 2, 172096)
