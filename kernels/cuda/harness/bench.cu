#include "bench.h"

#include <algorithm>
#include <memory>
#include <string>

#include "plan.h"
#include "telemetry.h"

namespace harness {
namespace {

constexpr size_t kWorkingSet = size_t{1} << 30;  // bytes: far above 4 times the L2 of any card
constexpr double kSeconds = 0.15;                // of repeats for each row
constexpr int kLog2Split = 9;

struct Heads {
    const char* model;
    int kv_heads;
    int group;
    int dim;
};

constexpr Heads kLlama3{"llama-3-8b", 8, 4, 128};
constexpr Heads kLlama2{"llama-2-7b", 32, 1, 128};
constexpr Heads kQwen{"qwen2.5-7b", 4, 7, 128};
constexpr Heads kSmol{"smollm2-135m", 3, 3, 64};

__global__ void fill_random(uint16_t* to, size_t count) {
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count; i += static_cast<size_t>(gridDim.x) * blockDim.x) {
        uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        // bf16 of random sign and mantissa between 0.25 and 2.
        to[i] = static_cast<uint16_t>((z & 0x8000) | ((125 + (z >> 16) % 3) << 7) | (z >> 32 & 0x7f));
    }
}

__global__ void read_all(const uint4* from, size_t count, unsigned* out) {
    unsigned sum = 0;
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count; i += 4 * stride) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (i + k * stride < count) {
                const uint4 x = __ldcs(from + i + k * stride);
                sum ^= x.x ^ x.y ^ x.z ^ x.w;
            }
        }
    }
    if (sum == 0x12345678u) {
        *out = sum;
    }
}

Telemetry& telemetry() {
    static Telemetry instance;
    return instance;
}

int multiprocessors() {
    int count = 0;
    CUDA_OK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
    return count;
}

/// Median microseconds of `run`, which enqueues work on the stream.
template <class Run>
double median_us(cudaStream_t stream, const Run& run) {
    cudaEvent_t begin;
    cudaEvent_t end;
    CUDA_OK(cudaEventCreate(&begin));
    CUDA_OK(cudaEventCreate(&end));
    const auto once = [&] {
        float ms = 0.0f;
        CUDA_OK(cudaEventRecord(begin, stream));
        run();
        CUDA_OK(cudaEventRecord(end, stream));
        CUDA_OK(cudaEventSynchronize(end));
        CUDA_OK(cudaEventElapsedTime(&ms, begin, end));
        return ms * 1e3;
    };
    for (int i = 0; i < 3; ++i) {
        once();
    }
    telemetry().take();
    const double first = once();
    const int repeats = std::clamp(static_cast<int>(kSeconds * 1e6 / first), 15, 2000);
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) {
        times.push_back(once());
    }
    std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
    CUDA_OK(cudaEventDestroy(begin));
    CUDA_OK(cudaEventDestroy(end));
    return times[repeats / 2];
}

/// Captures `enqueue` and times replays.
template <class Enqueue>
double median_graph_us(const Enqueue& enqueue) {
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreate(&stream));
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    enqueue(stream);
    cudaGraph_t graph;
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t replay;
    CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
    const double us = median_us(stream, [&] { CUDA_OK(cudaGraphLaunch(replay, stream)); });
    CUDA_OK(cudaGraphExecDestroy(replay));
    CUDA_OK(cudaGraphDestroy(graph));
    CUDA_OK(cudaStreamDestroy(stream));
    return us;
}

/// KV of several layers in randomly ordered blocks, and queries, for sequences of the given contexts.
class Setup {
  public:
    Setup(const Heads& heads, const std::vector<int>& contexts, const std::vector<int>& q_lens, int log2_block, bool layers_outermost,
          const std::vector<Group>& groups = {})
        : heads_(heads), log2_block_(log2_block), contexts_(contexts) {
        starts_ = {0};
        int blocks = 0;
        int table_stride = 0;
        size_t tokens = 0;
        for (const Group& g : groups) {
            const size_t others = g.members.size() - 1;
            tokens -= others * g.tokens;
        }
        for (size_t s = 0; s < contexts.size(); ++s) {
            starts_.push_back(starts_.back() + q_lens[s]);
            blocks += ceil_div(contexts[s], 1 << log2_block);
            table_stride = std::max(table_stride, ceil_div(contexts[s], 1 << log2_block));
            tokens += contexts[s];
        }
        bytes_ = tokens * 2 * heads.kv_heads * heads.dim * 2;
        layers = std::clamp(static_cast<int>((kWorkingSet + bytes_ - 1) / bytes_), 2, 256);
        const int64_t layer_bytes = static_cast<int64_t>(4) * heads.kv_heads * heads.dim << log2_block;
        block_stride_ = layers_outermost ? layer_bytes : layer_bytes * layers;
        layer_stride_ = layers_outermost ? layer_bytes * blocks : layer_bytes;
        arena_ = std::make_unique<Device<uint16_t>>(static_cast<size_t>(layer_bytes) * layers * blocks / 2);
        fill_random<<<1024, 256>>>(arena_->get(), arena_->count());
        q_ = std::make_unique<Device<uint16_t>>(static_cast<size_t>(starts_.back()) * heads.kv_heads * heads.group * heads.dim);
        fill_random<<<1024, 256>>>(q_->get(), q_->count());
        out_ = std::make_unique<Device<uint16_t>>(q_->count());

        Random random(7);
        const std::vector<int> order = random.permutation(blocks);
        std::vector<int32_t> tables(contexts.size() * table_stride, 0);
        int next = 0;
        for (size_t s = 0; s < contexts.size(); ++s) {
            for (int b = 0; b < ceil_div(contexts[s], 1 << log2_block); ++b) {
                tables[s * table_stride + b] = order[next++];
            }
        }
        for (const Group& g : groups) {
            const int first = g.first_token >> log2_block;
            const int end = (g.first_token + g.tokens) >> log2_block;
            for (const int member : g.members) {
                std::copy(&tables[g.members[0] * table_stride + first], &tables[g.members[0] * table_stride + end], &tables[member * table_stride + first]);
            }
        }
        table_stride_ = table_stride;
        tables_ = std::make_unique<Device<int32_t>>(tables);
        device_starts_ = std::make_unique<Device<int32_t>>(starts_);
        device_contexts_ = std::make_unique<Device<int32_t>>(contexts_);
        CUDA_OK(cudaDeviceSynchronize());
    }

    pagedd::PagedKv kv(int layer) const {
        return {reinterpret_cast<const uint8_t*>(arena_->get()) + layer * layer_stride_, block_stride_, tables_->get(), table_stride_, log2_block_,
                heads_.kv_heads, heads_.group};
    }

    pagedd::Queries queries() const {
        const int64_t stride = static_cast<int64_t>(heads_.kv_heads) * heads_.group * heads_.dim;
        return {q_->get(), out_->get(), stride, stride, static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(heads_.dim))), 0};
    }

    DecodeMemory decode_memory(int log2_split, int grid, int more = 0) const {
        return DecodeMemory(starts_, contexts_, heads_.kv_heads, heads_.group, heads_.dim, log2_split, grid, more);
    }

    pagedd::DecodePlanParams plan(const DecodeMemory& memory) const { return memory.plan(device_starts_->get(), device_contexts_->get()); }

    std::vector<pagedd::PrefillUnit> units(int tile_rows) const { return prefill_units(starts_, contexts_, heads_.group, tile_rows); }

    /// Bytes of K and V that one layer must read.
    double bytes() const { return static_cast<double>(bytes_); }

    /// Floating-point operations of one layer: two products over the visible pairs.
    double operations() const {
        double pairs = 0.0;
        for (size_t s = 0; s < contexts_.size(); ++s) {
            const double q_len = starts_[s + 1] - starts_[s];
            pairs += q_len * (contexts_[s] - q_len) + q_len * (q_len + 1) / 2;
        }
        return pairs * 4.0 * heads_.dim * heads_.kv_heads * heads_.group;
    }

    int layers;

  private:
    Heads heads_;
    int log2_block_;
    std::vector<int32_t> contexts_;
    std::vector<int32_t> starts_;
    size_t bytes_;
    int64_t block_stride_;
    int64_t layer_stride_;
    int table_stride_;
    std::unique_ptr<Device<uint16_t>> arena_;
    std::unique_ptr<Device<uint16_t>> q_;
    std::unique_ptr<Device<uint16_t>> out_;
    std::unique_ptr<Device<int32_t>> tables_;
    std::unique_ptr<Device<int32_t>> device_starts_;
    std::unique_ptr<Device<int32_t>> device_contexts_;
};

const Kernel& entry_of(const std::vector<Kernel>& kernels, int dim) {
    for (const Kernel& kernel : kernels) {
        if (kernel.dim == dim && kernel.dtype == Dtype::kBf16) {
            return kernel;
        }
    }
    std::fprintf(stderr, "no kernel for head_dim %d\n", dim);
    std::exit(1);
}

/// CTAs that are resident on the whole card.
int resident(const Kernel& kernel) {
    int per_sm = 0;
    allow_shared(kernel);
    CUDA_OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel.kernel, kernel.threads, kernel.shared_bytes));
    return per_sm * multiprocessors();
}

void print_rate(const char* label, double us, double amount, const char* unit) {
    const Telemetry::Reading reading = telemetry().take();
    std::printf("%-74s %9.1f us  %7.3f %s  %4.0f MHz %4.0f W\n", label, us, amount / us * 1e-6, unit, reading.sm_mhz, reading.watts);
    std::fflush(stdout);
}

void time_decode(const char* label, const Setup& setup, const Kernel& kernel, int log2_split, bool early = true) {
    const DecodeMemory memory = setup.decode_memory(log2_split, resident(kernel));
    launch_plan(setup.plan(memory), nullptr);
    CUDA_OK(cudaDeviceSynchronize());
    const int grid = memory.grid();
    const double us = median_graph_us([&](cudaStream_t stream) {
        for (int layer = 0; layer < setup.layers; ++layer) {
            launch_decode(kernel, grid, memory.tile_count(), memory.params(setup.kv(layer), setup.queries()), stream, early);
        }
    });
    char line[160];
    std::snprintf(line, sizeof line, "%s  %s split %d%s", label, kernel.name, log2_split == 0 ? 0 : 1 << log2_split, early ? "" : ", combine not early");
    print_rate(line, us / setup.layers, setup.bytes(), "TB/s");
}

/// Groups read once: those with tiles by `large`, if any.
void time_groups(const char* label, const Setup& setup, const std::vector<Group>& groups, int sequences, int group, const Kernel& kernel, const Kernel* large, int log2_split) {
    const SharedLists lists(groups, sequences, group);
    const SharedMemory shared(lists);
    const DecodeMemory memory = setup.decode_memory(log2_split, resident(kernel), lists.slots() + static_cast<int>(lists.units.size()));
    launch_plan(shared.add_to(setup.plan(memory)), nullptr);
    CUDA_OK(cudaDeviceSynchronize());
    const int grid = memory.grid();
    if (large != nullptr) {
        allow_shared(*large);
    }
    const double us = median_graph_us([&](cudaStream_t stream) {
        for (int layer = 0; layer < setup.layers; ++layer) {
            const pagedd::DecodeParams params = shared.add_to(memory.params(setup.kv(layer), setup.queries()));
            if (large != nullptr) {
                launch(*large, static_cast<int>(lists.tiles.size()) * params.kv.kv_heads, shared.params(params), stream);
            }
            launch_decode(kernel, grid, memory.tile_count(), params, stream);
        }
    });
    char line[160];
    std::snprintf(line, sizeof line, "%s  %s, split %d, %zu units %zu tiles", label, large == nullptr ? "decode" : large->name, log2_split == 0 ? 0 : 1 << log2_split, lists.units.size(), lists.tiles.size());
    print_rate(line, us / setup.layers, setup.bytes(), "TB/s");
}

std::vector<int> mixed_contexts() {
    Random random(3);
    std::vector<int> contexts;
    for (int i = 0; i < 64; ++i) {
        contexts.push_back(static_cast<int>(128.0 * std::pow(128.0, random.uniform())));
    }
    return contexts;
}

void time_prefill(const char* label, const Setup& setup, const Kernel& kernel) {
    allow_shared(kernel);
    const std::vector<pagedd::PrefillUnit> units = setup.units(kernel.tile_rows);
    const Device<pagedd::PrefillUnit> device_units(units);
    const int grid = static_cast<int>(units.size()) * setup.kv(0).kv_heads;
    int layer = 0;
    const double us = median_us(nullptr, [&] {
        layer = (layer + 1) % setup.layers;
        launch(kernel, grid, pagedd::PrefillParams{setup.kv(layer), setup.queries(), device_units.get()}, nullptr);
    });
    char line[160];
    std::snprintf(line, sizeof line, "%s  %s", label, kernel.name);
    print_rate(line, us, setup.operations(), "TFLOP/s");
}

std::vector<int> same(int count, int value) { return std::vector<int>(count, value); }

}  // namespace

void bench_ceilings() {
    const size_t count = size_t{1} << 31;
    Device<uint8_t> from(count);
    Device<uint8_t> to(count);
    fill_random<<<1024, 256>>>(reinterpret_cast<uint16_t*>(from.get()), count / 2);
    double us = median_us(nullptr, [&] { CUDA_OK(cudaMemcpyAsync(to.get(), from.get(), count, cudaMemcpyDeviceToDevice, nullptr)); });
    print_rate("device-to-device copy, read and write", us, 2.0 * count, "TB/s");
    us = median_us(nullptr, [&] { read_all<<<multiprocessors() * 8, 256>>>(reinterpret_cast<const uint4*>(from.get()), count / 16, reinterpret_cast<unsigned*>(to.get())); });
    print_rate("read only", us, count, "TB/s");
}

void bench_decode(bool variants) {
    const auto run = [&](const char* label, const Heads& heads, const std::vector<int>& contexts, int log2_block, bool layers_outermost) {
        const Setup setup(heads, contexts, same(static_cast<int>(contexts.size()), 1), log2_block, layers_outermost);
        const Kernel& entry = entry_of(decode_kernels(), heads.dim);
        if (!variants) {
            time_decode(label, setup, entry, 0);
            time_decode(label, setup, entry, 8);
            time_decode(label, setup, entry, 9);
            return;
        }
        for (const Kernel& kernel : decode_variants()) {
            for (const int log2_split : {0, 8, 9}) {
                time_decode(label, setup, kernel, log2_split);
            }
        }
    };
    run("8b batch 1 context 1024", kLlama3, same(1, 1024), 4, false);
    run("8b batch 8 context 1024", kLlama3, same(8, 1024), 4, false);
    run("8b batch 64 context 1024", kLlama3, same(64, 1024), 4, false);
    run("8b batch 256 context 1024", kLlama3, same(256, 1024), 4, false);
    run("8b batch 1 context 32500", kLlama3, same(1, 32500), 4, false);
    run("8b batch 64 mixed 128-16384", kLlama3, mixed_contexts(), 4, false);
    if (!variants) {
        std::vector<int> one_long = same(63, 512);
        one_long.push_back(65536);
        run("8b 63 x 512 and 1 x 65536", kLlama3, one_long, 4, false);
        run("8b batch 1 context 131072", kLlama3, same(1, 131072), 4, false);
        run("8b batch 64 context 1552", kLlama3, same(64, 1552), 4, false);
        run("8b batch 8 context 32500", kLlama3, same(8, 32500), 4, false);
        run("8b batch 64 context 8192", kLlama3, same(64, 8192), 4, false);
        run("8b batch 64 context 1100", kLlama3, same(64, 1100), 4, false);
        run("8b batch 64 context 1024 layers outermost", kLlama3, same(64, 1024), 4, true);
        run("8b batch 64 context 1024 block 64", kLlama3, same(64, 1024), 6, false);
        run("llama-2-7b batch 64 context 1024", kLlama2, same(64, 1024), 4, false);
        run("qwen2.5-7b batch 64 context 1024", kQwen, same(64, 1024), 4, false);
        run("smollm2-135m batch 64 context 1024", kSmol, same(64, 1024), 4, false);
        run("smollm2-135m batch 256 context 1024", kSmol, same(256, 1024), 4, false);
        const Setup guesses(kLlama3, same(64, 1024), same(64, 4), 4, false);
        time_decode("8b batch 64 context 1024, 4 queries each", guesses, entry_of(decode_kernels(), 128), 8);
        time_decode("8b batch 64 context 1024, 4 queries each", guesses, entry_of(decode_kernels(), 128), 0);
    }
    if (!variants) {
        // From how many queries on a chunk is better off with the prefill kernels.
        for (const int queries : {4, 16, 32, 64}) {
            const Setup chunk(kLlama3, same(1, 4096), same(1, queries), 4, false);
            const std::string label = "8b " + std::to_string(queries) + " queries at context 4096";
            time_decode(label.c_str(), chunk, entry_of(decode_kernels(), 128), 8);
            time_prefill(label.c_str(), chunk, entry_of(prefill_kernels(), 128));
            for (const Kernel& kernel : prefill_hopper_kernels()) {
                if (kernel.dim == 128 && kernel.dtype == Dtype::kBf16) {
                    time_prefill(label.c_str(), chunk, kernel);
                }
            }
        }
    }
    const Setup setup(kLlama3, same(256, 1100), same(256, 1), 4, false);
    for (const int log2_split : {kLog2Split, 0}) {
        const DecodeMemory memory = setup.decode_memory(log2_split, 264);
        const double us = median_graph_us([&](cudaStream_t stream) {
            for (int i = 0; i < 20; ++i) {
                launch_plan(setup.plan(memory), stream);
            }
        });
        std::printf("plan of 256 sequences, context 1100, split %d: %.1f us\n", log2_split == 0 ? 0 : 1 << log2_split, us / 20);
    }
}

void bench_groups() {
    const auto run = [&](const char* label, const Heads& heads, int count, int members, int shared, int own) {
        const int sequences = count * members;
        std::vector<Group> groups;
        for (int g = 0; g < count; ++g) {
            groups.push_back({0, shared, {}, 256, 0});
            for (int m = 0; m < members; ++m) {
                groups.back().members.push_back(g * members + m);
            }
        }
        const Setup setup(heads, same(sequences, shared + own), same(sequences, 1), 4, false, groups);
        const Kernel& entry = entry_of(decode_kernels(), heads.dim);
        time_decode(label, setup, entry, 0);
        for (const int split : {256, 512}) {
            for (Group& group : groups) {
                group.split = split;
            }
            time_groups(label, setup, groups, sequences, heads.group, entry, nullptr, 8);
            time_groups(label, setup, groups, sequences, heads.group, entry, nullptr, 0);
        }
        for (const std::vector<Kernel>* kernels : {&shared_kernels(), &shared_hopper_kernels()}) {
            for (const Kernel& large : *kernels) {
                for (const int splits : {1, 2, 4}) {
                    if (large.dim == heads.dim && large.dtype == Dtype::kBf16 && shared / splits >= 128) {
                        for (Group& group : groups) {
                            group.split = shared / splits;
                            group.tile_rows = large.tile_rows;
                        }
                        time_groups(label, setup, groups, sequences, heads.group, entry, &large, 0);
                    }
                }
            }
        }
        std::printf("\n");
    };
    run("8b 512 x (2048 shared + 96)", kLlama3, 1, 512, 2048, 96);
    run("8b 256 x (2048 shared + 96)", kLlama3, 1, 256, 2048, 96);
    run("8b 64 groups of 4 x (512 + 128)", kLlama3, 64, 4, 512, 128);
    run("8b 32 groups of 8 x (512 + 128)", kLlama3, 32, 8, 512, 128);
    run("8b 16 groups of 16 x (512 + 128)", kLlama3, 16, 16, 512, 128);
    run("8b 8 groups of 32 x (512 + 128)", kLlama3, 8, 32, 512, 128);
    run("8b 1 group of 8 x (8192 + 128)", kLlama3, 1, 8, 8192, 128);
    run("8b 1 group of 32 x (2048 + 128)", kLlama3, 1, 32, 2048, 128);
    run("8b 32 pairs x (128 + 512)", kLlama3, 32, 2, 128, 512);
    run("smollm2-135m 256 x (1024 shared + 96)", kSmol, 1, 256, 1024, 96);
    run("llama-2-7b 64 groups of 4 x (512 + 128)", kLlama2, 64, 4, 512, 128);
}

namespace {

void bench_prefill_with(const std::vector<Kernel>& entries, const std::vector<Kernel>& others, bool variants) {
    const auto run = [&](const char* label, const Heads& heads, const std::vector<int>& contexts, const std::vector<int>& q_lens) {
        const Setup setup(heads, contexts, q_lens, 4, false);
        for (const Kernel& kernel : entries) {
            if (kernel.dim == heads.dim && kernel.dtype == Dtype::kBf16) {
                time_prefill(label, setup, kernel);
            }
        }
        if (variants) {
            for (const Kernel& kernel : others) {
                time_prefill(label, setup, kernel);
            }
        }
    };
    run("8b prompt 8192", kLlama3, same(1, 8192), same(1, 8192));
    run("8b 16 prompts of 512", kLlama3, same(16, 512), same(16, 512));
    if (!variants) {
        run("8b prompt 2048", kLlama3, same(1, 2048), same(1, 2048));
        run("8b prompt 32768", kLlama3, same(1, 32768), same(1, 32768));
        run("8b chunk 512 after 7680", kLlama3, same(1, 8192), same(1, 512));
        run("8b chunk 64 after 1024", kLlama3, same(1, 1088), same(1, 64));
        run("llama-2-7b prompt 8192", kLlama2, same(1, 8192), same(1, 8192));
        run("qwen2.5-7b prompt 8192", kQwen, same(1, 8192), same(1, 8192));
        run("smollm2-135m prompt 8192", kSmol, same(1, 8192), same(1, 8192));
        const Setup blocks(kLlama3, same(1, 8192), same(1, 8192), 6, true);
        time_prefill("8b prompt 8192 block 64 layers outermost", blocks, entry_of(entries, 128));
    }
}

}  // namespace

void bench_prefill(bool variants) { bench_prefill_with(prefill_kernels(), prefill_variants(), variants); }

void bench_hopper(bool variants) { bench_prefill_with(prefill_hopper_kernels(), prefill_hopper_variants(), variants); }

void profile_decode() {
    const Setup setup(kLlama3, same(64, 1024), same(64, 1), 4, false);
    const Kernel& kernel = entry_of(decode_kernels(), 128);
    const DecodeMemory memory = setup.decode_memory(0, resident(kernel));
    launch_plan(setup.plan(memory), nullptr);
    const int grid = memory.grid();
    for (int layer = 0; layer < 3; ++layer) {
        launch_decode(kernel, grid, memory.tile_count(), memory.params(setup.kv(layer), setup.queries()), nullptr);
    }
    CUDA_OK(cudaDeviceSynchronize());
}

void profile_prefill(bool hopper) {
    const Setup setup(kLlama3, same(1, 8192), same(1, 8192), 4, false);
    const Kernel& kernel = entry_of(hopper ? prefill_hopper_kernels() : prefill_kernels(), 128);
    allow_shared(kernel);
    const std::vector<pagedd::PrefillUnit> units = setup.units(kernel.tile_rows);
    const Device<pagedd::PrefillUnit> device_units(units);
    for (int i = 0; i < 3; ++i) {
        launch(kernel, static_cast<int>(units.size()) * kLlama3.kv_heads, pagedd::PrefillParams{setup.kv(0), setup.queries(), device_units.get()}, nullptr);
    }
    CUDA_OK(cudaDeviceSynchronize());
}

}  // namespace harness
