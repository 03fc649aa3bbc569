// The same on sm_90a: entry points `pagedd_attention_shared_sm90_{bf16,f16}_d{64,128,256}`, with tiles of 128 packed rows. In the fatbin's other parts they trap:
// elsewhere, and for the other head sizes, attention_shared.cu does the work.
#include "attention/shared.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PAGEDD_ON_SM90(...) __VA_ARGS__
#else
#define PAGEDD_ON_SM90(...) __trap()
#endif

// Tiles and shared memory as in attention_prefill_sm90.cu.
#define PAGEDD_SHARED_SM90(name, type, dim, keys, stages, shared)                                                                            \
    static_assert(pagedd::HopperShape<pagedd::type, dim, 2, keys, stages, 1>::kSharedBytes == shared, "the host's number");                                \
    extern "C" __global__ void __launch_bounds__(384, 1) pagedd_attention_shared_sm90_##name##_d##dim(const __grid_constant__ pagedd::SharedParams params) { \
        PAGEDD_ON_SM90(pagedd::shared_attention<pagedd::type, pagedd::HopperShape<pagedd::type, dim, 2, keys, stages, 1>, true>(params));                  \
    }

#define PAGEDD_SHARED_SM90_DIMS(name, type)             \
    PAGEDD_SHARED_SM90(name, type, 64, 128, 2, 81984)   \
    PAGEDD_SHARED_SM90(name, type, 128, 64, 4, 163968)  \
    PAGEDD_SHARED_SM90(name, type, 256, 64, 2, 196672)

PAGEDD_SHARED_SM90_DIMS(bf16, Bf16)
PAGEDD_SHARED_SM90_DIMS(f16, F16)
