// Paged prefill attention on sm_90a: entry points `pagedd_attention_prefill_sm90_{bf16,f16}_d{64,128,256}`. In the fatbin's other parts they trap:
// elsewhere, and for the other head sizes, attention_prefill.cu does the work.
#include "attention/prefill_hopper.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PAGEDD_ON_SM90(...) __VA_ARGS__
#else
#define PAGEDD_ON_SM90(...) __trap()
#endif

// Three warpgroups of 64 rows, where their sums leave them registers enough, that take turns at the tensor cores.
#define PAGEDD_PREFILL_SM90(name, type, dim, groups, keys, stages)                                                                             \
    extern "C" __global__ void __launch_bounds__((groups + 1) * 128, 1)                                                                        \
        pagedd_attention_prefill_sm90_##name##_d##dim(const __grid_constant__ pagedd::PrefillParams params) {                                  \
        PAGEDD_ON_SM90(pagedd::prefill_attention_hopper<pagedd::type, pagedd::HopperShape<dim, groups, keys, stages, true>>(params));                \
    }

#define PAGEDD_PREFILL_SM90_DIMS(name, type)      \
    PAGEDD_PREFILL_SM90(name, type, 64, 3, 64, 4)  \
    PAGEDD_PREFILL_SM90(name, type, 128, 3, 64, 3) \
    PAGEDD_PREFILL_SM90(name, type, 256, 2, 64, 2)

PAGEDD_PREFILL_SM90_DIMS(bf16, Bf16)
PAGEDD_PREFILL_SM90_DIMS(f16, F16)
