// Tensor-core, copy and tile primitives that the attention kernels share. Everything here works from sm_80 on.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace pagedd {

using Bf16 = __nv_bfloat16;
using F16 = __half;

constexpr uint32_t kFullWarp = 0xffffffffu;
/// Tokens of the smallest piece that is contiguous in memory: no block is smaller.
constexpr int kPieceTokens = 16;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- order between kernels ----

/// Waits for the kernel before this one, where it was launched with programmatic stream serialization; else there is nothing to wait for.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel's CTAs come onto the card early. They must wait_for_previous_kernel before they read what this one writes.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---- cp.async ----

/// Copies 16 bytes from global to shared memory past L1. Only `bytes` of them are read, none with 0; the others become zeros.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/// A copy of what others read as well.
struct CopyShared {
    __device__ __forceinline__ void operator()(uint32_t to, const void* from, int bytes) const { copy_async(to, from, bytes); }
};

/// A copy of what is read once: it leaves the second-level cache before all else.
class CopyOnce {
  public:
    __device__ __forceinline__ CopyOnce() { asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_)); }

    __device__ __forceinline__ void operator()(uint32_t to, const void* from, int bytes) const {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes), "l"(policy_) : "memory");
    }

  private:
    uint64_t policy_;
};

/// Copies 4 bytes from global to shared memory; `bytes` = 0 writes zeros and reads nothing.
__device__ __forceinline__ void copy_word_async(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `kPending` of this thread's copy groups are in flight. Other threads' copies need a barrier after it.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Two neighbouring numbers in shared memory.
__device__ __forceinline__ float2 load_two(uint32_t address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ float load_one(uint32_t address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ uint4 load_chunk(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void store_chunk(uint32_t address, const uint4& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// ---- matrix fragments ----

__device__ __forceinline__ void load_matrices(uint32_t (&fragment)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&fragment)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
}

/// d += a * b with a 16 x 16 (rows), b 16 x 8 (columns), d 16 x 8 in f32.
/// Thread (g, t) = (lane / 4, lane % 4) holds d[0..2] = row g, columns 2t and 2t + 1; d[2..4] the same columns of row g + 8.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add<Bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<F16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two numbers rounded to T in one register, `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<Bf16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ __forceinline__ uint32_t pack<F16>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- softmax state ----

/// What a partial sum with maximum `m` counts for beside others whose largest maximum is `top`, both in log2 units.
/// A row that saw no token has m = -infinity and counts for nothing.
__device__ __forceinline__ float partial_weight(float m, float top) {
    return m == -INFINITY ? 0.0f : exp2_approximate(m - top);
}

/// The sum over the four threads that share a row of an mma result.
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

/// One step of the online softmax for one row of `kTiles` mma results: turns scores into weights and returns the factor for what was summed
/// so far. `kUpper` chooses row g + 8. `m` is the running maximum of scores times `scale_log2`, `l` this thread's share of the sum.
template <int kTiles, bool kUpper>
__device__ __forceinline__ float softmax_step(float (&scores)[kTiles][4], float scale_log2, float& m, float& l) {
    constexpr int kFirst = kUpper ? 2 : 0;
    float top = scores[0][kFirst];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        top = fmaxf(top, fmaxf(scores[n][kFirst], scores[n][kFirst + 1]));
    }
    const float new_m = fmaxf(m, quad_max(top) * scale_log2);
    // A row whose tokens are all masked so far keeps weights of exactly zero.
    const float base = new_m == -INFINITY ? 0.0f : new_m;
    const float factor = exp2_approximate(m - base);
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        scores[n][kFirst] = exp2_approximate(fmaf(scores[n][kFirst], scale_log2, -base));
        scores[n][kFirst + 1] = exp2_approximate(fmaf(scores[n][kFirst + 1], scale_log2, -base));
        sum += scores[n][kFirst] + scores[n][kFirst + 1];
    }
    m = new_m;
    l = fmaf(l, factor, sum);
    return factor;
}

/// Hides the keys that a row must not see: key n * 8 + 2t + j of the tile, for tiles that begin at token `first`.
/// `limits` are the tokens that rows g and g + 8 see.
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&scores)[kTiles][4], int first, const int (&limits)[2], int lane) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = first + n * 8 + (lane % 4) * 2 + i % 2;
            if (token >= limits[i / 2]) {
                scores[n][i] = -INFINITY;
            }
        }
    }
}

// ---- tiles in shared memory ----

/// Rows of `kDim` 2-byte units in shared memory, laid out so that eight rows at one column lie in eight different groups of banks
/// (what ldmatrix reads at once). Where the row is a multiple of 128 bytes its 16-byte chunks are permuted by the row number; else the row is
/// padded to an odd number of chunks. Tiles must begin at a multiple of the row's bytes for the former.
template <int kDim>
struct TileLayout {
    static_assert(kDim % 8 == 0, "rows are chunks of 16 bytes");
    static constexpr int kChunks = kDim / 8;
    static constexpr bool kPermuted = kChunks % 8 == 0;
    static constexpr int kRowBytes = kPermuted ? kDim * 2 : (kChunks | 1) * 16;

    static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
        return row * kRowBytes + (kPermuted ? chunk ^ (row & 7) : chunk) * 16;
    }

    /// The address of the chunk `rows` rows below, in steps of a power of two from a row of less than one step.
    static __device__ __forceinline__ uint32_t down(uint32_t address, int rows) {
        return (kPermuted ? address ^ ((rows & 7) * 16) : address) + rows * kRowBytes;
    }

    /// The address of the chunk 2 * `pairs` further on than `address`, which must be that of chunk 0 or 1 of a row.
    static __device__ __forceinline__ uint32_t advance(uint32_t address, int pairs) {
        return kPermuted ? address ^ (pairs * 32) : address + pairs * 32;
    }

    /// This lane's address for load_matrices of a 16 x 16 piece as operand a, or (transposed) of V as operand b.
    static __device__ __forceinline__ uint32_t rows_first(uint32_t tile, int lane) { return tile + offset(lane % 16, lane / 16); }

    /// This lane's address for load_matrices of K as operand b: fragments 0, 1 are tokens 0..8, fragments 2, 3 tokens 8..16.
    static __device__ __forceinline__ uint32_t depth_first(uint32_t tile, int lane) {
        return tile + offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    }
};

/// Starts the copy of 16 tokens, which are contiguous in memory, by `kThreads` threads. Rows from `valid` on become zeros: what the arena holds
/// past the end of a sequence may be NaN, and zero times NaN is NaN.
template <class Layout, int kThreads, class Copy = CopyShared>
__device__ __forceinline__ void copy_piece(uint32_t to, const uint8_t* from, int valid, int thread, const Copy& copy = Copy()) {
    constexpr int kCopies = kPieceTokens * Layout::kChunks;
    if constexpr (kThreads % Layout::kChunks == 0) {
        // Each thread stays in its column, so that its addresses differ by constants only.
        constexpr int kRows = kThreads / Layout::kChunks;
        const int row = thread / Layout::kChunks;
        const uint32_t first = to + Layout::offset(row, thread % Layout::kChunks);
#pragma unroll
        for (int down = 0; down < kPieceTokens; down += kRows) {
            copy(Layout::down(first, down), from + (down * Layout::kChunks + thread) * 16, row + down < valid ? 16 : 0);
        }
    } else {
#pragma unroll
        for (int first = 0; first < kCopies; first += kThreads) {
            const int i = first + thread;
            if (kCopies % kThreads == 0 || i < kCopies) {
                const int row = i / Layout::kChunks;
                copy(to + Layout::offset(row, i % Layout::kChunks), from + i * 16, row < valid ? 16 : 0);
            }
        }
    }
}

}  // namespace pagedd
