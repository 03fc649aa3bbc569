// Which stride of the KV arena should be the outer one? Reads random blocks of 100 GiB as decode attention reads them, both ways.
//
// A stand-alone program: nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o strides strides.cu
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include <cuda_runtime.h>

#define CHECK(call)                                                                                 \
    do {                                                                                            \
        const cudaError_t status = (call);                                                          \
        if (status != cudaSuccess) {                                                                \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status));    \
            std::exit(1);                                                                           \
        }                                                                                           \
    } while (0)

constexpr unsigned THREADS = 128, FLIGHT = 4;

// grid: (kv heads, splits of the block list). A thread block reads the key and value runs of one head of `each` blocks.
__global__ void __launch_bounds__(THREADS) read_blocks(const uint8_t* arena, const uint32_t* blocks, unsigned count, unsigned each,
                                                       uint64_t block_stride, uint64_t layer_offset, unsigned run_packs, uint4* sink) {
    const unsigned heads = gridDim.x, head = blockIdx.x;
    const unsigned first = blockIdx.y * each, last = min(count, first + each);
    uint4 all = make_uint4(0, 0, 0, 0);
    for (unsigned at = first; at < last; at += FLIGHT) {
        for (unsigned pack = threadIdx.x; pack < run_packs; pack += THREADS) {
            uint4 got[FLIGHT][2];
#pragma unroll
            for (unsigned i = 0; i < FLIGHT; ++i) {
                const uint8_t* layer = arena + blocks[min(at + i, last - 1)] * block_stride + layer_offset;
                got[i][0] = __ldg(reinterpret_cast<const uint4*>(layer) + uint64_t(head) * run_packs + pack);
                got[i][1] = __ldg(reinterpret_cast<const uint4*>(layer) + uint64_t(heads + head) * run_packs + pack);
            }
#pragma unroll
            for (unsigned i = 0; i < FLIGHT; ++i) {
#pragma unroll
                for (unsigned j = 0; j < 2; ++j) {
                    all.x ^= got[i][j].x, all.y ^= got[i][j].y, all.z ^= got[i][j].z, all.w ^= got[i][j].w;
                }
            }
        }
    }
    if ((all.x ^ all.y ^ all.z ^ all.w) == 0x12345678u) *sink = all;
}

int main(int argc, char** argv) {
    const uint64_t total = (argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100) << 30;
    const unsigned layers = 32, heads = 8, head_dim = 128;
    uint8_t* arena;
    uint4* sink;
    CHECK(cudaMalloc(&arena, total));
    CHECK(cudaMalloc(&sink, sizeof(uint4)));
    CHECK(cudaMemset(arena, 0x5a, total));
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    std::printf("%u layers, %u kv heads of %u, %llu GiB; median of 3 rounds over all layers\n", layers, heads, head_dim,
                static_cast<unsigned long long>(total >> 30));
    std::printf("%10s %8s %14s %22s %22s %8s\n", "block size", "run KiB", "blocks a layer", "blocks outermost GB/s", "layers outermost GB/s",
                "ratio");
    for (const unsigned block_size : {16u, 32u, 64u}) {
        const uint64_t run = uint64_t(block_size) * head_dim * 2, layer = 2 * heads * run, block = layers * layer;
        const unsigned capacity = total / block;
        std::vector<uint32_t> order(capacity);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(7));
        uint32_t* list;
        CHECK(cudaMalloc(&list, capacity * sizeof(uint32_t)));
        CHECK(cudaMemcpy(list, order.data(), capacity * sizeof(uint32_t), cudaMemcpyHostToDevice));
        // Contexts of 1,100 x 8, 1,100 x 64, 8,192 x 64, and as much as there is.
        for (unsigned tokens : {8u * 1100, 64u * 1100, 64u * 8192, ~0u}) {
            const unsigned count = std::min(tokens / block_size, capacity);
            const unsigned each = std::max(4u, std::min(32u, count * heads / (132 * 12)));
            double rates[2];
            for (const bool blocks_outermost : {true, false}) {
                const uint64_t block_stride = blocks_outermost ? block : layer;
                const uint64_t layer_stride = blocks_outermost ? layer : capacity * layer;
                std::vector<float> times;
                for (int round = 0; round < 4; ++round) {
                    CHECK(cudaEventRecord(start));
                    for (unsigned at = 0; at < layers; ++at) {
                        read_blocks<<<dim3(heads, (count + each - 1) / each), THREADS>>>(arena, list, count, each, block_stride,
                                                                                         at * layer_stride, run / 16, sink);
                        CHECK(cudaGetLastError());
                    }
                    CHECK(cudaEventRecord(end));
                    CHECK(cudaEventSynchronize(end));
                    float ms;
                    CHECK(cudaEventElapsedTime(&ms, start, end));
                    if (round > 0) times.push_back(ms);
                }
                std::sort(times.begin(), times.end());
                rates[blocks_outermost ? 0 : 1] = double(count) * layer * layers / times[1] / 1e6;
            }
            std::printf("%10u %8llu %14u %22.0f %22.0f %8.3f\n", block_size, static_cast<unsigned long long>(run >> 10), count, rates[0],
                        rates[1], rates[0] / rates[1]);
        }
        CHECK(cudaFree(list));
    }
    return 0;
}
