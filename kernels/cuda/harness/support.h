// What the checks and the benchmarks of the attention kernels share: error checks, random numbers, 16-bit floats, device buffers, kernel tables.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "../attention/params.h"

#define CUDA_OK(call)                                                                                            \
    do {                                                                                                         \
        const cudaError_t cuda_error = (call);                                                                   \
        if (cuda_error != cudaSuccess) {                                                                         \
            std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(cuda_error)); \
            std::exit(1);                                                                                        \
        }                                                                                                        \
    } while (false)

namespace harness {

enum class Dtype { kBf16, kF16 };

inline const char* name_of(Dtype dtype) { return dtype == Dtype::kBf16 ? "bf16" : "f16"; }

/// One entry point, or one more instance of its body with other tile sizes. `kernel` takes DecodeParams or PrefillParams.
struct Kernel {
    const char* name;
    const void* kernel;
    Dtype dtype;
    int dim;
    int threads;
    int shared_bytes;
    int tile_rows;        // packed rows of a CTA's unit
    const void* combine;  // the kernel that runs after a decode kernel
};

/// The entry points in the fatbins, and other tile sizes of head_dim 128 in bf16 for comparison.
const std::vector<Kernel>& decode_kernels();
const std::vector<Kernel>& prefill_kernels();
const std::vector<Kernel>& decode_variants();
const std::vector<Kernel>& prefill_variants();
/// Those for sm_90a; none on other cards.
const std::vector<Kernel>& prefill_hopper_kernels();
const std::vector<Kernel>& prefill_hopper_variants();
/// Those of large groups, for sm_90a where it is the card and has one.
const std::vector<Kernel>& shared_kernels();
const std::vector<Kernel>& shared_hopper_kernels();
const void* decode_plan_kernel(bool lanes);

inline void allow_shared(const Kernel& kernel) {
    CUDA_OK(cudaFuncSetAttribute(kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes));
}

template <class Params>
void launch(const Kernel& kernel, int grid, const Params& params, cudaStream_t stream) {
    Params copy = params;
    void* arguments[] = {&copy};
    CUDA_OK(cudaLaunchKernel(kernel.kernel, dim3(grid), dim3(kernel.threads), arguments, kernel.shared_bytes, stream));
}

/// Decode and what combines its splits; `tiles` is sequences * tiles_per_sequence of the plan. `early`: the second kernel's CTAs come while the first
/// still runs, where the card can do that.
inline void launch_decode(const Kernel& kernel, int grid, int tiles, const pagedd::DecodeParams& params, cudaStream_t stream, bool early = true) {
    launch(kernel, grid, params, stream);
    pagedd::DecodeParams copy = params;
    void* arguments[] = {&copy};
    const int x = tiles * params.kv.kv_heads;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(x, std::clamp(2048 / x, 1, params.rows_per_unit));
    config.blockDim = dim3(256);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    CUDA_OK(cudaLaunchKernelExC(&config, kernel.combine, arguments));
}

inline void launch_plan(const pagedd::DecodePlanParams& params, cudaStream_t stream) {
    pagedd::DecodePlanParams copy = params;
    void* arguments[] = {&copy};
    CUDA_OK(cudaLaunchKernel(decode_plan_kernel(params.log2_split == 0), dim3(1), dim3(1024), arguments, 0, stream));
}

/// splitmix64: the same numbers on every machine.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t bits() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }

    int below(int n) { return static_cast<int>(bits() % static_cast<uint64_t>(n)); }
    double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

    /// About normal, mean 0 and variance 1: the sum of four uniform numbers. Millions are drawn, so it must be cheap.
    double normal() {
        const uint64_t z = bits();
        const double sum = static_cast<double>((z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48));
        return (sum / 65536.0 - 2.0) * 1.7320508;
    }

    std::vector<int> permutation(int n) {
        std::vector<int> order(n);
        for (int i = 0; i < n; ++i) {
            order[i] = i;
        }
        for (int i = n - 1; i > 0; --i) {
            std::swap(order[i], order[below(i + 1)]);
        }
        return order;
    }

  private:
    uint64_t state_;
};

uint16_t to_bits(Dtype dtype, float x);
float from_bits(Dtype dtype, uint16_t bits);

/// An array in device memory.
template <class T>
class Device {
  public:
    explicit Device(size_t count) : count_(count) { CUDA_OK(cudaMalloc(&data_, bytes() > 0 ? bytes() : 1)); }
    explicit Device(const std::vector<T>& values) : Device(values.size()) { upload(values); }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    ~Device() { cudaFree(data_); }

    T* get() const { return data_; }
    size_t count() const { return count_; }
    size_t bytes() const { return count_ * sizeof(T); }
    void fill(int byte) { CUDA_OK(cudaMemset(data_, byte, bytes())); }
    void upload(const std::vector<T>& values) { CUDA_OK(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice)); }

    std::vector<T> download() const {
        std::vector<T> values(count_);
        CUDA_OK(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost));
        return values;
    }

  private:
    T* data_ = nullptr;
    size_t count_;
};

}  // namespace harness
