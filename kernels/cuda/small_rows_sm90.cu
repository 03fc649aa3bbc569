// Products of at most 16 rows on sm_90a: entry points `pagedd_small_rows_{kept,kept16,normed,streamed,streamed16}_{store,single,add,silu}_{bf16,f16}`.
// In the fatbin's other parts they trap: elsewhere the library multiplies.
#include "gemm/small_rows.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PAGEDD_ON_SM90(...) __VA_ARGS__
#else
#define PAGEDD_ON_SM90(...) __trap()
#endif

// A CTA has so much shared memory that an SM holds one of a kernel: else the CTAs of a kernel that starts early would crowd on the SMs that are free first. The
// number is that of the host: bytes of shared memory beside an input that is kept.
#define PAGEDD_SMALL_ROWS(name, element, form, input, tiles, columns, stages, shared, ending, end)                                           \
    static_assert(pagedd::SmallRowsShape<tiles, columns, stages, pagedd::Input::input>::shared_bytes(0, 0) == shared, "the host's number"); \
    extern "C" __global__ void __launch_bounds__(pagedd::kProductThreads, 1)                                                                 \
        pagedd_small_rows_##form##_##ending##_##name(const __grid_constant__ pagedd::SmallRowsParams params) {                               \
        PAGEDD_ON_SM90(pagedd::small_rows<pagedd::element, tiles, columns, stages, pagedd::Input::input, pagedd::Ending::end>(params));      \
    }

#define PAGEDD_SMALL_ROWS_FORMS(ending, end, name, element)                                                     \
    PAGEDD_SMALL_ROWS(name, element, kept, kKept, 1, 1, 8, 139264, ending, end)                                 \
    PAGEDD_SMALL_ROWS(name, element, kept16, kKept, 1, 2, 4, 81920, ending, end)                                \
    PAGEDD_SMALL_ROWS(name, element, normed, kNormed, 1, 1, 8, 139264, ending, end)                             \
    PAGEDD_SMALL_ROWS(name, element, streamed, kStreamed, 2, 1, 5, 221184, ending, end)                         \
    PAGEDD_SMALL_ROWS(name, element, streamed16, kStreamed, 2, 2, 4, 229376, ending, end)

#define PAGEDD_SMALL_ROWS_TYPES(ending, end)              \
    PAGEDD_SMALL_ROWS_FORMS(ending, end, bf16, Bf16)      \
    PAGEDD_SMALL_ROWS_FORMS(ending, end, f16, F16)

PAGEDD_SMALL_ROWS_TYPES(store, kStore)
PAGEDD_SMALL_ROWS_TYPES(single, kSingle)
PAGEDD_SMALL_ROWS_TYPES(add, kAdd)
PAGEDD_SMALL_ROWS_TYPES(silu, kSilu)
