// The kernels under test, and instances of the same bodies with other tile sizes for the benchmarks.
#include "../attention/combine.cuh"
#include "../attention/prefill.cuh"
#include "../attention/prefill_hopper.cuh"
#include "../attention/shared.cuh"
#include "support.h"

#define DECODE_ENTRY(name, dim)                                                                                                        \
    extern "C" __global__ void pagedd_attention_decode_##name##_d##dim(const __grid_constant__ pagedd::DecodeParams params);           \
    extern "C" __global__ void pagedd_attention_combine_##name##_d##dim(const __grid_constant__ pagedd::DecodeParams params);
#define PREFILL_ENTRY(name, dim) extern "C" __global__ void pagedd_attention_prefill_##name##_d##dim(const __grid_constant__ pagedd::PrefillParams params);
#define PREFILL_SM90_ENTRY(name, dim, rows) \
    extern "C" __global__ void pagedd_attention_prefill_sm90_##name##_d##dim##_r##rows(const __grid_constant__ pagedd::PrefillParams params);
#define SHARED_ENTRY(name, dim) extern "C" __global__ void pagedd_attention_shared_##name##_d##dim(const __grid_constant__ pagedd::SharedParams params);
#define SHARED_SM90_ENTRY(name, dim) extern "C" __global__ void pagedd_attention_shared_sm90_##name##_d##dim(const __grid_constant__ pagedd::SharedParams params);
#define ENTRIES(name)                                                                                                       \
    DECODE_ENTRY(name, 64) DECODE_ENTRY(name, 80) DECODE_ENTRY(name, 96) DECODE_ENTRY(name, 128) DECODE_ENTRY(name, 256)    \
    PREFILL_ENTRY(name, 64) PREFILL_ENTRY(name, 80) PREFILL_ENTRY(name, 96) PREFILL_ENTRY(name, 128) PREFILL_ENTRY(name, 256) \
    PREFILL_SM90_ENTRY(name, 64, 128) PREFILL_SM90_ENTRY(name, 128, 192) PREFILL_SM90_ENTRY(name, 128, 128) PREFILL_SM90_ENTRY(name, 128, 64) \
    PREFILL_SM90_ENTRY(name, 256, 128)                                                                                          \
    SHARED_ENTRY(name, 64) SHARED_ENTRY(name, 80) SHARED_ENTRY(name, 96) SHARED_ENTRY(name, 128) SHARED_ENTRY(name, 256)    \
    SHARED_SM90_ENTRY(name, 64) SHARED_SM90_ENTRY(name, 128) SHARED_SM90_ENTRY(name, 256)
ENTRIES(bf16)
ENTRIES(f16)
extern "C" __global__ void pagedd_attention_decode_plan(const __grid_constant__ pagedd::DecodePlanParams params);
extern "C" __global__ void pagedd_attention_decode_plan_lanes(const __grid_constant__ pagedd::DecodePlanParams params);

namespace harness {
namespace {

using pagedd::Bf16;

template <int kDim, int kWarps, int kStages, int kCtas>
__global__ void __launch_bounds__(kWarps * 32, kCtas) decode_variant(const __grid_constant__ pagedd::DecodeParams params) {
    pagedd::decode_attention<Bf16, Bf16, kDim, kWarps, kStages>(params);
}

template <class Shape, int kCtas>
__global__ void __launch_bounds__(Shape::kThreads, kCtas) prefill_variant(const __grid_constant__ pagedd::PrefillParams params) {
    pagedd::prefill_attention<Bf16, Shape>(params);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas) prefill_hopper_variant(const __grid_constant__ pagedd::PrefillParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    pagedd::prefill_attention_hopper<Bf16, Shape>(params);
#else
    __trap();
#endif
}

bool has_hopper() {
    int major = 0;
    CUDA_OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    return major == 9;
}

template <int kDim, int kWarps, int kStages>
Kernel decode(const char* name, const void* kernel, const void* combine, Dtype dtype) {
    using Shape = pagedd::DecodeShape<Bf16, kDim, kWarps, kStages>;
    return Kernel{name, kernel, dtype, kDim, Shape::kThreads, Shape::kSharedBytes, pagedd::kUnitRows, combine};
}

template <class Shape>
Kernel prefill(const char* name, const void* kernel, Dtype dtype) {
    return Kernel{name, kernel, dtype, Shape::kDim, Shape::kThreads, Shape::kSharedBytes, Shape::kRows, nullptr};
}

const void* address(void (*kernel)(pagedd::DecodeParams)) { return reinterpret_cast<const void*>(kernel); }
const void* address(void (*kernel)(pagedd::SharedParams)) { return reinterpret_cast<const void*>(kernel); }
const void* address(void (*kernel)(pagedd::PrefillParams)) { return reinterpret_cast<const void*>(kernel); }

}  // namespace

// The same tile sizes as in attention_decode.cu and attention_prefill.cu.
#define DECODE(name, dtype, dim, warps, stages) \
    decode<dim, warps, stages>("decode_" #name "_d" #dim, address(pagedd_attention_decode_##name##_d##dim),             \
                               address(pagedd_attention_combine_##name##_d##dim), dtype)
#define PREFILL(name, dtype, dim, warps, row_tiles, keys, slots)                                                         \
    prefill<pagedd::PrefillShape<Bf16, dim, warps, row_tiles, keys, slots>>("prefill_" #name "_d" #dim,                        \
                                                                      address(pagedd_attention_prefill_##name##_d##dim), dtype)

const std::vector<Kernel>& decode_kernels() {
    static const std::vector<Kernel> kernels = {
        DECODE(bf16, Dtype::kBf16, 64, 4, 4), DECODE(bf16, Dtype::kBf16, 80, 4, 3),  DECODE(bf16, Dtype::kBf16, 96, 4, 2),
        DECODE(bf16, Dtype::kBf16, 128, 4, 2), DECODE(bf16, Dtype::kBf16, 256, 2, 2), DECODE(f16, Dtype::kF16, 64, 4, 4),
        DECODE(f16, Dtype::kF16, 80, 4, 3),    DECODE(f16, Dtype::kF16, 96, 4, 2),    DECODE(f16, Dtype::kF16, 128, 4, 2),
        DECODE(f16, Dtype::kF16, 256, 2, 2),
    };
    return kernels;
}

const std::vector<Kernel>& prefill_kernels() {
    static const std::vector<Kernel> kernels = {
        PREFILL(bf16, Dtype::kBf16, 64, 4, 2, 64, 3),  PREFILL(bf16, Dtype::kBf16, 80, 4, 2, 64, 3), PREFILL(bf16, Dtype::kBf16, 96, 4, 2, 64, 3),
        PREFILL(bf16, Dtype::kBf16, 128, 4, 2, 64, 3), PREFILL(bf16, Dtype::kBf16, 256, 4, 1, 32, 3), PREFILL(f16, Dtype::kF16, 64, 4, 2, 64, 3),
        PREFILL(f16, Dtype::kF16, 80, 4, 2, 64, 3),    PREFILL(f16, Dtype::kF16, 96, 4, 2, 64, 3),   PREFILL(f16, Dtype::kF16, 128, 4, 2, 64, 3),
        PREFILL(f16, Dtype::kF16, 256, 4, 1, 32, 3),
    };
    return kernels;
}

#define PREFILL_SM90(name, dtype, dim, rows, keys, stages, ctas)                                                            \
    prefill<pagedd::HopperShape<Bf16, dim, rows / 64, keys, stages, ctas>>("prefill_sm90_" #name "_d" #dim "_r" #rows,            \
                                                                     address(pagedd_attention_prefill_sm90_##name##_d##dim##_r##rows), dtype)

const std::vector<Kernel>& prefill_hopper_kernels() {
    static const std::vector<Kernel> kernels = {
        PREFILL_SM90(bf16, Dtype::kBf16, 64, 128, 128, 2, 1), PREFILL_SM90(bf16, Dtype::kBf16, 128, 192, 64, 3, 1),
        PREFILL_SM90(bf16, Dtype::kBf16, 128, 128, 64, 4, 1), PREFILL_SM90(bf16, Dtype::kBf16, 128, 64, 64, 3, 2),
        PREFILL_SM90(bf16, Dtype::kBf16, 256, 128, 64, 2, 1), PREFILL_SM90(f16, Dtype::kF16, 64, 128, 128, 2, 1),
        PREFILL_SM90(f16, Dtype::kF16, 128, 192, 64, 3, 1),   PREFILL_SM90(f16, Dtype::kF16, 128, 128, 64, 4, 1),
        PREFILL_SM90(f16, Dtype::kF16, 128, 64, 64, 3, 2),    PREFILL_SM90(f16, Dtype::kF16, 256, 128, 64, 2, 1),
    };
    static const std::vector<Kernel> none;
    return has_hopper() ? kernels : none;
}

#define SHARED(name, dtype, dim, warps, row_tiles, keys, slots) \
    prefill<pagedd::PrefillShape<Bf16, dim, warps, row_tiles, keys, slots>>("shared_" #name "_d" #dim, address(pagedd_attention_shared_##name##_d##dim), dtype)
#define SHARED_SM90(name, dtype, dim, keys, stages) \
    prefill<pagedd::HopperShape<Bf16, dim, 2, keys, stages, 1>>("shared_sm90_" #name "_d" #dim, address(pagedd_attention_shared_sm90_##name##_d##dim), dtype)

const std::vector<Kernel>& shared_kernels() {
    static const std::vector<Kernel> kernels = {
        SHARED(bf16, Dtype::kBf16, 64, 4, 2, 64, 3),  SHARED(bf16, Dtype::kBf16, 80, 4, 2, 64, 3), SHARED(bf16, Dtype::kBf16, 96, 4, 2, 64, 3),
        SHARED(bf16, Dtype::kBf16, 128, 4, 2, 64, 3), SHARED(bf16, Dtype::kBf16, 256, 4, 1, 32, 3), SHARED(f16, Dtype::kF16, 64, 4, 2, 64, 3),
        SHARED(f16, Dtype::kF16, 80, 4, 2, 64, 3),    SHARED(f16, Dtype::kF16, 96, 4, 2, 64, 3),   SHARED(f16, Dtype::kF16, 128, 4, 2, 64, 3),
        SHARED(f16, Dtype::kF16, 256, 4, 1, 32, 3),
    };
    return kernels;
}

const std::vector<Kernel>& shared_hopper_kernels() {
    static const std::vector<Kernel> kernels = {
        SHARED_SM90(bf16, Dtype::kBf16, 64, 128, 2), SHARED_SM90(bf16, Dtype::kBf16, 128, 64, 4), SHARED_SM90(bf16, Dtype::kBf16, 256, 64, 2),
        SHARED_SM90(f16, Dtype::kF16, 64, 128, 2),   SHARED_SM90(f16, Dtype::kF16, 128, 64, 4),   SHARED_SM90(f16, Dtype::kF16, 256, 64, 2),
    };
    static const std::vector<Kernel> none;
    return has_hopper() ? kernels : none;
}

#define DECODE_VARIANT(warps, stages, ctas) \
    decode<128, warps, stages>("w" #warps " s" #stages " c" #ctas, address(decode_variant<128, warps, stages, ctas>), \
                               address(pagedd_attention_combine_bf16_d128), Dtype::kBf16)
#define PREFILL_VARIANT(warps, row_tiles, keys, slots, ctas)                    \
    prefill<pagedd::PrefillShape<Bf16, 128, warps, row_tiles, keys, slots>>(          \
        "w" #warps " r" #row_tiles " k" #keys " s" #slots " c" #ctas,           \
        address(prefill_variant<pagedd::PrefillShape<Bf16, 128, warps, row_tiles, keys, slots>, ctas>), Dtype::kBf16)

const std::vector<Kernel>& decode_variants() {
    static const std::vector<Kernel> kernels = {DECODE_VARIANT(4, 2, 3), DECODE_VARIANT(4, 3, 2)};
    return kernels;
}

const std::vector<Kernel>& prefill_variants() {
    static const std::vector<Kernel> kernels = {PREFILL_VARIANT(4, 2, 64, 3, 2), PREFILL_VARIANT(4, 2, 64, 2, 2)};
    return kernels;
}

#define HOPPER_VARIANT(groups, keys, stages, ctas)                                \
    prefill<pagedd::HopperShape<Bf16, 128, groups, keys, stages, ctas>>(                \
        "sm90 g" #groups " k" #keys " s" #stages " c" #ctas,                      \
        address(prefill_hopper_variant<pagedd::HopperShape<Bf16, 128, groups, keys, stages, ctas>>), Dtype::kBf16)

const std::vector<Kernel>& prefill_hopper_variants() {
    static const std::vector<Kernel> kernels = {HOPPER_VARIANT(2, 128, 2, 1), HOPPER_VARIANT(1, 64, 2, 2)};
    static const std::vector<Kernel> none;
    return has_hopper() ? kernels : none;
}

const void* decode_plan_kernel(bool lanes) {
    return reinterpret_cast<const void*>(lanes ? pagedd_attention_decode_plan_lanes : pagedd_attention_decode_plan);
}

uint16_t to_bits(Dtype dtype, float x) {
    return dtype == Dtype::kBf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}

float from_bits(Dtype dtype, uint16_t bits) {
    return dtype == Dtype::kBf16 ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
}

}  // namespace harness
