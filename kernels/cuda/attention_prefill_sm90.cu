// Paged prefill attention on sm_90a: entry points `pagedd_attention_prefill_sm90_{bf16,f16}_{d64_r128,d128_r192,d128_r128,d128_r64,d256_r128}`, where r is the packed
// rows of a CTA. In the fatbin's other parts they trap: elsewhere, and for the other head sizes, attention_prefill.cu does the work.
#include "attention/prefill_hopper.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PAGEDD_ON_SM90(...) __VA_ARGS__
#else
#define PAGEDD_ON_SM90(...) __trap()
#endif

// At head_dim 128 more rows are faster, if there are enough of them to fill the card; which kernel takes a row does not change its bits. A CTA has
// 2 * rows + 128 threads; the last number is the bytes of dynamic shared memory that the host launches with.
#define PAGEDD_PREFILL_SM90(name, type, dim, rows, keys, stages, ctas, shared)                                                                 \
    static_assert(pagedd::HopperShape<pagedd::type, dim, rows / 64, keys, stages, ctas>::kSharedBytes == shared, "the host's number");                       \
    extern "C" __global__ void __launch_bounds__(rows * 2 + 128, ctas)                                                                         \
        pagedd_attention_prefill_sm90_##name##_d##dim##_r##rows(const __grid_constant__ pagedd::PrefillParams params) {                        \
        PAGEDD_ON_SM90(pagedd::prefill_attention_hopper<pagedd::type, pagedd::HopperShape<pagedd::type, dim, rows / 64, keys, stages, ctas>>(params));       \
    }

#define PAGEDD_PREFILL_SM90_DIMS(name, type)                     \
    PAGEDD_PREFILL_SM90(name, type, 64, 128, 128, 2, 1, 81984)   \
    PAGEDD_PREFILL_SM90(name, type, 128, 192, 64, 3, 1, 147552)  \
    PAGEDD_PREFILL_SM90(name, type, 128, 128, 64, 4, 1, 163968)  \
    PAGEDD_PREFILL_SM90(name, type, 128, 64, 64, 3, 2, 114784)   \
    PAGEDD_PREFILL_SM90(name, type, 256, 128, 64, 2, 1, 196672)

PAGEDD_PREFILL_SM90_DIMS(bf16, Bf16)
PAGEDD_PREFILL_SM90_DIMS(f16, F16)
