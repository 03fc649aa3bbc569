#include "problem.h"

#include <thread>

#include "plan.h"

namespace harness {
namespace {

constexpr int kLayers = 3;
constexpr int kLayer = 1;
constexpr int kGuard = 512;         // elements before and after the outputs
constexpr int kQueryGap = 16;       // elements between the tokens' queries
constexpr int kOutputGap = 8;
constexpr int32_t kNowhere = 1 << 30;  // a table entry that must not be used

std::vector<int32_t> starts_of(const std::vector<Sequence>& sequences) {
    std::vector<int32_t> starts = {0};
    for (const Sequence& s : sequences) {
        starts.push_back(starts.back() + s.q_len);
    }
    return starts;
}

std::vector<int32_t> contexts_of(const std::vector<Sequence>& sequences) {
    std::vector<int32_t> contexts;
    for (const Sequence& s : sequences) {
        contexts.push_back(s.context);
    }
    return contexts;
}

}  // namespace

std::string Shape::text() const {
    char line[128];
    std::snprintf(line, sizeof line, "%s d%d %dx%d heads block %d %s", name_of(dtype), dim, kv_heads, group, 1 << log2_block,
                  layers_outermost ? "layers outermost" : "blocks outermost");
    return line;
}

Problem::Problem(const Shape& shape, const std::vector<Sequence>& sequences, int log2_split, uint64_t seed, const std::vector<Group>& groups)
    : shape_(shape),
      sequences_(sequences),
      log2_split_(log2_split),
      q_stride_(shape.heads() * shape.dim + kQueryGap),
      out_stride_(shape.heads() * shape.dim + kOutputGap) {
    Random random(seed);
    const int block_tokens = 1 << shape.log2_block;
    int used = 0;
    for (const Sequence& s : sequences) {
        tokens_ += s.q_len;
        used += ceil_div(s.context, block_tokens);
        table_stride_ = std::max(table_stride_, ceil_div(s.context, block_tokens) + 3);
    }
    blocks_ = used + 2;

    const std::vector<int> order = random.permutation(blocks_);
    tables_.assign(sequences.size() * table_stride_, kNowhere);
    arena_.assign(static_cast<size_t>(blocks_) * kLayers * block_elements(), 0xffff);  // NaN in both formats
    int next = 0;
    for (size_t s = 0; s < sequences.size(); ++s) {
        for (int b = 0; b < ceil_div(sequences[s].context, block_tokens); ++b) {
            tables_[s * table_stride_ + b] = order[next++];
        }
    }
    for (const Group& g : groups) {
        const int32_t* from = &tables_[static_cast<size_t>(g.members[0]) * table_stride_];
        for (const int member : g.members) {
            std::copy(from + g.first_token / block_tokens, from + (g.first_token + g.tokens) / block_tokens,
                      &tables_[static_cast<size_t>(member) * table_stride_ + g.first_token / block_tokens]);
        }
    }
    for (size_t s = 0; s < sequences.size(); ++s) {
        for (int kv = 0; kv < 2; ++kv) {
            for (int head = 0; head < shape.kv_heads; ++head) {
                for (int token = 0; token < sequences[s].context; ++token) {
                    uint16_t* row = &arena_[arena_index(static_cast<int>(s), kv, head, token)];
                    for (int e = 0; e < shape.dim; ++e) {
                        row[e] = to_bits(shape.dtype, static_cast<float>(random.normal()));
                    }
                }
            }
        }
    }
    q_.assign(tokens_ * q_stride_, 0xffff);
    for (int token = 0; token < tokens_; ++token) {
        // Some queries are sharp, so that single keys dominate and the running maximum moves.
        const float scale = token % 3 == 0 ? 4.0f : 1.0f;
        for (int e = 0; e < shape.heads() * shape.dim; ++e) {
            q_[token * q_stride_ + e] = to_bits(shape.dtype, scale * static_cast<float>(random.normal()));
        }
    }
    device_arena_ = std::make_unique<Device<uint16_t>>(arena_);
    device_tables_ = std::make_unique<Device<int32_t>>(tables_);
    device_q_ = std::make_unique<Device<uint16_t>>(q_);
    device_out_ = std::make_unique<Device<uint16_t>>(output_elements());
}

int Problem::first_token(int sequence) const { return starts_of(sequences_)[sequence]; }

size_t Problem::block_elements() const { return static_cast<size_t>(2) * shape_.kv_heads * shape_.dim << shape_.log2_block; }

size_t Problem::output_index(int token, int head) const { return kGuard + token * out_stride_ + static_cast<size_t>(head) * shape_.dim; }

size_t Problem::output_elements() const { return 2 * kGuard + tokens_ * out_stride_; }

size_t Problem::arena_index(int sequence, int kv, int kv_head, int token) const {
    const int block = tables_[static_cast<size_t>(sequence) * table_stride_ + (token >> shape_.log2_block)];
    const size_t layer_of_block = shape_.layers_outermost ? static_cast<size_t>(kLayer) * blocks_ + block : static_cast<size_t>(block) * kLayers + kLayer;
    const size_t row = ((static_cast<size_t>(kv) * shape_.kv_heads + kv_head) << shape_.log2_block) + (token & ((1 << shape_.log2_block) - 1));
    return layer_of_block * block_elements() + row * shape_.dim;
}

pagedd::PagedKv Problem::kv(int first_sequence) const {
    const int64_t bytes = static_cast<int64_t>(block_elements()) * 2;
    const int64_t layer_stride = shape_.layers_outermost ? bytes * blocks_ : bytes;
    const int64_t block_stride = shape_.layers_outermost ? bytes : bytes * kLayers;
    return {reinterpret_cast<const uint8_t*>(device_arena_->get()) + kLayer * layer_stride,
            block_stride,
            device_tables_->get() + static_cast<size_t>(first_sequence) * table_stride_,
            table_stride_,
            shape_.log2_block,
            shape_.kv_heads,
            shape_.group};
}

pagedd::Queries Problem::queries(int first_token) const {
    return {device_q_->get() + first_token * q_stride_,
            device_out_->get() + kGuard + first_token * out_stride_,
            static_cast<int64_t>(q_stride_),
            static_cast<int64_t>(out_stride_),
            static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(shape_.dim))),
            0};
}

void Problem::poison_output() {
    device_out_->upload(std::vector<uint16_t>(output_elements(), kPoison));
    CUDA_OK(cudaDeviceSynchronize());
}

std::vector<uint16_t> Problem::decode(const Kernel& kernel, int grid, const std::vector<Sequence>& sequences, int first_sequence, int first_token) {
    const std::vector<int32_t> starts = starts_of(sequences);
    const std::vector<int32_t> contexts = contexts_of(sequences);
    const Device<int32_t> device_starts(starts);
    const Device<int32_t> device_contexts(contexts);
    const DecodeMemory memory(starts, contexts, shape_.kv_heads, shape_.group, shape_.dim, log2_split_, grid);
    poison_output();
    launch_plan(memory.plan(device_starts.get(), device_contexts.get()), nullptr);
    launch_decode(kernel, memory.grid(), memory.tile_count(), memory.params(kv(first_sequence), queries(first_token)), nullptr);
    CUDA_OK(cudaGetLastError());
    CUDA_OK(cudaDeviceSynchronize());
    const int units = decode_units(starts, contexts, shape_.group, log2_split_);
    if (memory.planned_units() != units) {
        std::printf("  plan has %d units, expected %d\n", memory.planned_units(), units);
        return {};
    }
    return device_out_->download();
}

std::vector<uint16_t> Problem::decode_groups(const Kernel& kernel, const Kernel* shared, int grid, const std::vector<Group>& groups, bool balanced) {
    const std::vector<int32_t> starts = starts_of(sequences_);
    const std::vector<int32_t> contexts = contexts_of(sequences_);
    const Device<int32_t> device_starts(starts);
    const Device<int32_t> device_contexts(contexts);
    const SharedLists lists(groups, static_cast<int>(sequences_.size()), shape_.group);
    const SharedMemory group_memory(lists);
    const int more = lists.slots() + static_cast<int>(lists.units.size());
    const DecodeMemory memory(starts, contexts, shape_.kv_heads, shape_.group, shape_.dim, balanced ? 0 : log2_split_, grid, more);
    const pagedd::DecodeParams params = group_memory.add_to(memory.params(kv(0), queries(0)));
    poison_output();
    launch_plan(group_memory.add_to(memory.plan(device_starts.get(), device_contexts.get())), nullptr);
    if (shared != nullptr) {
        // Some more than there are tiles.
        launch(*shared, static_cast<int>(lists.tiles.size() + 2) * shape_.kv_heads, group_memory.params(params), nullptr);
    }
    launch_decode(kernel, memory.grid(), memory.tile_count(), params, nullptr);
    CUDA_OK(cudaGetLastError());
    CUDA_OK(cudaDeviceSynchronize());
    return device_out_->download();
}

std::vector<uint16_t> Problem::decode_in_graph(const Kernel& kernel, int grid, const std::vector<Sequence>& sequences) {
    Device<int32_t> device_starts(starts_of(sequences_));
    Device<int32_t> device_contexts(contexts_of(sequences_));
    const DecodeMemory memory(starts_of(sequences_), contexts_of(sequences_), shape_.kv_heads, shape_.group, shape_.dim, log2_split_, grid);
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreate(&stream));
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    launch_plan(memory.plan(device_starts.get(), device_contexts.get()), stream);
    launch_decode(kernel, memory.grid(), memory.tile_count(), memory.params(kv(0), queries(0)), stream);
    cudaGraph_t graph;
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t replay;
    CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
    CUDA_OK(cudaGraphLaunch(replay, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    poison_output();
    device_starts.upload(starts_of(sequences));
    device_contexts.upload(contexts_of(sequences));
    CUDA_OK(cudaGraphLaunch(replay, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    CUDA_OK(cudaGraphExecDestroy(replay));
    CUDA_OK(cudaGraphDestroy(graph));
    CUDA_OK(cudaStreamDestroy(stream));
    return device_out_->download();
}

std::vector<uint16_t> Problem::prefill(const Kernel& kernel, const std::vector<Sequence>& sequences, int first_sequence, int first_token) {
    const std::vector<int32_t> starts = starts_of(sequences);
    const std::vector<int32_t> contexts = contexts_of(sequences);
    const std::vector<pagedd::PrefillUnit> units = prefill_units(starts, contexts, shape_.group, kernel.tile_rows);
    const Device<pagedd::PrefillUnit> device_units(units);
    poison_output();
    const pagedd::PrefillParams params = {kv(first_sequence), queries(first_token), device_units.get()};
    launch(kernel, static_cast<int>(units.size()) * shape_.kv_heads, params, nullptr);
    CUDA_OK(cudaGetLastError());
    CUDA_OK(cudaDeviceSynchronize());
    return device_out_->download();
}

std::vector<double> Problem::reference() const {
    const int heads = shape_.heads();
    const int dim = shape_.dim;
    std::vector<double> answer(static_cast<size_t>(tokens_) * heads * dim, 0.0);
    const std::vector<int32_t> starts = starts_of(sequences_);
    const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
    const auto attend = [&](int sequence, int query, int head) {
        const int kv_head = head / shape_.group;
        const int token = starts[sequence] + query;
        const int seen = sequences_[sequence].context - sequences_[sequence].q_len + query + 1;
        std::vector<double> q(dim);
        for (int e = 0; e < dim; ++e) {
            q[e] = from_bits(shape_.dtype, q_[token * q_stride_ + static_cast<size_t>(head) * dim + e]);
        }
        std::vector<double> weights(seen);
        double top = -INFINITY;
        for (int t = 0; t < seen; ++t) {
            const uint16_t* k = &arena_[arena_index(sequence, 0, kv_head, t)];
            double sum = 0.0;
            for (int e = 0; e < dim; ++e) {
                sum += q[e] * from_bits(shape_.dtype, k[e]);
            }
            weights[t] = sum * scale;
            top = std::max(top, weights[t]);
        }
        double* out = &answer[(static_cast<size_t>(token) * heads + head) * dim];
        double total = 0.0;
        for (int t = 0; t < seen; ++t) {
            const double weight = std::exp(weights[t] - top);
            const uint16_t* v = &arena_[arena_index(sequence, 1, kv_head, t)];
            total += weight;
            for (int e = 0; e < dim; ++e) {
                out[e] += weight * from_bits(shape_.dtype, v[e]);
            }
        }
        for (int e = 0; e < dim; ++e) {
            out[e] /= total;
        }
    };
    const int threads = std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::thread> pool;
    for (int worker = 0; worker < threads; ++worker) {
        pool.emplace_back([&, worker] {
            int item = 0;
            for (size_t s = 0; s < sequences_.size(); ++s) {
                for (int query = 0; sequences_[s].context > 0 && query < sequences_[s].q_len; ++query) {
                    for (int head = 0; head < heads; ++head) {
                        if (item++ % threads == worker) {
                            attend(static_cast<int>(s), query, head);
                        }
                    }
                }
            }
        });
    }
    for (std::thread& thread : pool) {
        thread.join();
    }
    return answer;
}

}  // namespace harness
