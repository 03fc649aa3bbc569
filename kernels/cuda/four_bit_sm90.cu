// Products with four-bit weights on sm_90a: entry points `pagedd_four_bit_{few,few_long,few_normed,few16}_{store,single,add,silu}_{bf16,f16}`
// for at most 8 rows, of few16 for at most 16, and `pagedd_four_bit_wide{16,32,64,128}_…` for more. In the fatbin's other parts they trap: elsewhere weights are
// widened and the library multiplies.
#include "gemm/four_bit_few.cuh"
#include "gemm/four_bit_wide.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PAGEDD_ON_SM90(...) __VA_ARGS__
#else
#define PAGEDD_ON_SM90(...) __trap()
#endif

// The host's numbers.
static_assert(sizeof(pagedd::FourBitWideParams) == 256, "parameters of many rows");
static_assert(pagedd::four_bit_few_shared(4096, 12288, 16, 132, 4, 2) == 4 * 10240 + 16 * 8256 + 2 * (64 * 64 + 22 * 512), "shared memory of few rows");

#define PAGEDD_FEW(name, element, form, columns, stages, normed, ending, end)                                       \
    extern "C" __global__ void __launch_bounds__(pagedd::kFewThreads, 1)                                            \
        pagedd_four_bit_##form##_##ending##_##name(const __grid_constant__ pagedd::FourBitFewParams params) {       \
        PAGEDD_ON_SM90(pagedd::four_bit_few<pagedd::element, columns, stages, normed, pagedd::Ending::end>(params)); \
    }

#define PAGEDD_WIDE(name, element, form, groups, rows, stages, shared, ending, end)                              \
    static_assert(pagedd::FourBitWideShape<groups, rows, stages>::kSharedBytes == shared, "the host's number");  \
    extern "C" __global__ void __launch_bounds__(pagedd::kWideThreads<groups>, pagedd::kWideBlocks<groups>)      \
        pagedd_four_bit_##form##_##ending##_##name(const __grid_constant__ pagedd::FourBitWideParams params) {   \
        PAGEDD_ON_SM90(pagedd::four_bit_wide<pagedd::element, groups, rows, stages, pagedd::Ending::end>(params)); \
    }

#define PAGEDD_FOUR_BIT_FORMS(ending, end, name, element)                                    \
    PAGEDD_FEW(name, element, few, 1, 4, false, ending, end)                                 \
    PAGEDD_FEW(name, element, few_long, 1, 2, false, ending, end)                            \
    PAGEDD_FEW(name, element, few_normed, 1, 4, true, ending, end)                           \
    PAGEDD_FEW(name, element, few16, 2, 4, false, ending, end)                               \
    PAGEDD_WIDE(name, element, wide16, 2, 16, 8, 58368, ending, end)                         \
    PAGEDD_WIDE(name, element, wide32, 2, 32, 6, 56320, ending, end)                         \
    PAGEDD_WIDE(name, element, wide64, 3, 64, 10, 164864, ending, end)                       \
    PAGEDD_WIDE(name, element, wide128, 3, 128, 8, 197632, ending, end)

#define PAGEDD_FOUR_BIT_TYPES(ending, end)               \
    PAGEDD_FOUR_BIT_FORMS(ending, end, bf16, Bf16)       \
    PAGEDD_FOUR_BIT_FORMS(ending, end, f16, F16)

PAGEDD_FOUR_BIT_TYPES(store, kStore)
PAGEDD_FOUR_BIT_TYPES(single, kSingle)
PAGEDD_FOUR_BIT_TYPES(add, kAdd)
PAGEDD_FOUR_BIT_TYPES(silu, kSilu)
