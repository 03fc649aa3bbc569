// Warpgroup matrix instructions, barriers in shared memory and register budgets of sm_90a.
#pragma once
#include "tensor.cuh"

namespace pagedd {

// ---- mbarrier ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Waits for the end of the phase with this parity: 0 for the first.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

/// Makes this thread's ordinary writes to shared memory visible to the matrix units, once a barrier has passed them on.
__device__ __forceinline__ void fence_for_matrix_units() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Waits at a named barrier for `threads` threads, those that only arrive counted in; ids from 1 on.
__device__ __forceinline__ void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- register budgets ----

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- wgmma ----

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving uses of accumulators over this point: it does not know that instructions in flight write them.
template <int kTiles>
__device__ __forceinline__ void pin(float (&x)[kTiles][4]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        asm volatile("" : "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])::"memory");
    }
}

/// Operand descriptor of a tile in rows of 128 bytes with 128-byte swizzle, which begins at a multiple of 1,024 bytes. `leading` is the distance in
/// bytes between column blocks of 64 elements (operand b with its depth outermost only), 1,024 that between groups of eight rows.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t leading) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(1024 >> 4) << 32 |
           static_cast<uint64_t>(1) << 62;
}

#define PAGEDD_F4(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define PAGEDD_F32(d, n)                                                                                                            \
    PAGEDD_F4(d, n), PAGEDD_F4(d, n + 1), PAGEDD_F4(d, n + 2), PAGEDD_F4(d, n + 3), PAGEDD_F4(d, n + 4), PAGEDD_F4(d, n + 5),        \
        PAGEDD_F4(d, n + 6), PAGEDD_F4(d, n + 7)
#define PAGEDD_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define PAGEDD_R32_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PAGEDD_R32_1 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PAGEDD_R32_2                                                                                                                  \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define PAGEDD_R32_3                                                                                                                        \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122," \
    "%123,%124,%125,%126,%127"

/// d (+)= a b with d 64 x 8 * kTiles in f32 over the warpgroup (each warp 16 rows, laid out as in multiply_add), depth 16. `from_shared`: a and b both
/// row by row along the depth; d is overwritten unless `add`. `from_registers`: a as in multiply_add, b with its depth outermost (V); `from_registers_along`: b row by
/// row along the depth.
template <typename T, int kTiles>
struct Warpgroup;

#define PAGEDD_WARPGROUP(type, ptx, n, tiles, registers, outputs, a0, a1, a2, a3, a4, a5)                                                     \
    template <>                                                                                                                             \
    struct Warpgroup<type, tiles> {                                                                                                         \
        static __device__ __forceinline__ void from_shared(float (&d)[tiles][4], uint64_t a, uint64_t b, int add) {                         \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a2 ", 0;\n"                                                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx "." ptx " {" registers "}, %" #a0 ", %" #a1                  \
                         ", p, 1, 1, 0, 0;\n}\n"                                                                                            \
                         : outputs                                                                                                          \
                         : "l"(a), "l"(b), "r"(add));                                                                                       \
        }                                                                                                                                   \
        static __device__ __forceinline__ void from_registers(float (&d)[tiles][4], const uint32_t (&a)[4], uint64_t b) {                   \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a5 ", 0;\n"                                                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx "." ptx " {" registers "}, {%" #a0 ", %" #a1 ", %" #a2       \
                         ", %" #a3 "}, %" #a4 ", p, 1, 1, 1;\n}\n"                                                                          \
                         : outputs                                                                                                          \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                                                     \
        }                                                                                                                                   \
        static __device__ __forceinline__ void from_registers_along(float (&d)[tiles][4], const uint32_t (&a)[4], uint64_t b, int add) {    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a5 ", 0;\n"                                                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx "." ptx " {" registers "}, {%" #a0 ", %" #a1 ", %" #a2       \
                         ", %" #a3 "}, %" #a4 ", p, 1, 1, 0;\n}\n"                                                                          \
                         : outputs                                                                                                          \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                                     \
        }                                                                                                                                   \
    };

#define PAGEDD_WARPGROUPS(type, ptx)                                                                                                     \
    PAGEDD_WARPGROUP(type, ptx, 16, 2, "%0,%1,%2,%3,%4,%5,%6,%7", PAGEDD_F4(d, 0) PAGEDD_COMMA PAGEDD_F4(d, 1), 8, 9, 10, 11, 12, 13)    \
    PAGEDD_WARPGROUP(type, ptx, 32, 4, PAGEDD_R16, PAGEDD_F4(d, 0) PAGEDD_COMMA PAGEDD_F4(d, 1) PAGEDD_COMMA PAGEDD_F4(d, 2) PAGEDD_COMMA PAGEDD_F4(d, 3), 16, 17, 18, 19, 20, 21) \
    PAGEDD_WARPGROUP(type, ptx, 64, 8, PAGEDD_R32_0, PAGEDD_F32(d, 0), 32, 33, 34, 35, 36, 37)                                               \
    PAGEDD_WARPGROUP(type, ptx, 128, 16, PAGEDD_R32_0 "," PAGEDD_R32_1, PAGEDD_F32(d, 0) PAGEDD_COMMA PAGEDD_F32(d, 8), 64, 65, 66, 67, 68, 69) \
    PAGEDD_WARPGROUP(type, ptx, 256, 32, PAGEDD_R32_0 "," PAGEDD_R32_1 "," PAGEDD_R32_2 "," PAGEDD_R32_3,                                \
                     PAGEDD_F32(d, 0) PAGEDD_COMMA PAGEDD_F32(d, 8) PAGEDD_COMMA PAGEDD_F32(d, 16) PAGEDD_COMMA PAGEDD_F32(d, 24), 128, 129, 130, 131, 132, 133)
#define PAGEDD_COMMA ,

PAGEDD_WARPGROUPS(Bf16, "bf16")
PAGEDD_WARPGROUPS(F16, "f16")

}  // namespace pagedd
