// Four-bit weights as elements, for products that the library multiplies: entry points `widen_four_bit_{bf16,f16}`.
#include "gemm/four_bit.cuh"

struct WidenArgs {
    const void* tiles;
    void* out;  // [outputs][inputs]
    uint32_t outputs;
    uint32_t inputs;
    uint32_t interleaved;
};

template <class T> __device__ __forceinline__ void widen_four_bit(const WidenArgs& a) {
    pagedd::widen_four_bit<T>(a.tiles, a.out, a.outputs, a.inputs, a.interleaved != 0);
}
FOR_ELEMENTS(widen_four_bit, WidenArgs)
