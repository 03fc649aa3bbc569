// Copies by the copy engine into shared memory, which count at a barrier there.
#pragma once
#include <cstdint>

namespace pagedd {

/// Makes barriers that were initialised known to the copy engine.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Arrives at a barrier, and says how many bytes come to it.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Has the copy engine bring `bytes`, which count at the barrier.
__device__ __forceinline__ void bring(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

}  // namespace pagedd
