// The same on sm_90a: entry points `pagedd_attention_prefill_e4m3_sm90_bf16_{d64_r128,d128_r192,d128_r128,d128_r64,d256_r128}`, as in
// attention_prefill_sm90.cu.
#include "attention/prefill_hopper.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PAGEDD_ON_SM90(...) __VA_ARGS__
#else
#define PAGEDD_ON_SM90(...) __trap()
#endif

#define PAGEDD_PREFILL_E4M3_SM90(dim, rows, keys, stages, ctas, shared)                                                                        \
    static_assert(pagedd::HopperShape<pagedd::E4m3, dim, rows / 64, keys, stages, ctas>::kSharedBytes == shared, "the host's number");         \
    extern "C" __global__ void __launch_bounds__(rows * 2 + 128, ctas)                                                                         \
        pagedd_attention_prefill_e4m3_sm90_bf16_d##dim##_r##rows(const __grid_constant__ pagedd::PrefillParams params) {                       \
        PAGEDD_ON_SM90(pagedd::prefill_attention_hopper<pagedd::Bf16, pagedd::HopperShape<pagedd::E4m3, dim, rows / 64, keys, stages, ctas>>(params)); \
    }

PAGEDD_PREFILL_E4M3_SM90(64, 128, 128, 2, 1, 122944)
PAGEDD_PREFILL_E4M3_SM90(128, 192, 64, 3, 1, 188512)
PAGEDD_PREFILL_E4M3_SM90(128, 128, 64, 4, 1, 204928)
PAGEDD_PREFILL_E4M3_SM90(128, 64, 64, 2, 2, 112704)
PAGEDD_PREFILL_E4M3_SM90(256, 128, 32, 2, 1, 172096)
