// One attention problem with its data on host and device, and its float64 answer.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "plan.h"
#include "support.h"

namespace harness {

struct Sequence {
    int context;  // tokens in the cache, the queries included; 0: a padded row of a graph, which still owns q_len query tokens
    int q_len;
};

struct Shape {
    Dtype dtype;
    int dim;
    int kv_heads;
    int group;
    int log2_block;
    bool layers_outermost;  // else blocks are

    int heads() const { return kv_heads * group; }
    std::string text() const;
};

/// Random data in a paged arena: random block order, table entries past the context that point nowhere, NaN in every slot and every other layer
/// that no token was written to, gaps between the tokens of queries and outputs, and guard words around the outputs.
class Problem {
  public:
    Problem(const Shape& shape, const std::vector<Sequence>& sequences, int log2_split, uint64_t seed, const std::vector<Group>& groups = {});

    /// Runs a kernel over the given sequences, which may be others than the problem's own (parts of them), with the tables of the sequences from
    /// `first_sequence` and the queries from `first_token` on. Returns the output buffer's bits.
    std::vector<uint16_t> decode(const Kernel& kernel, int grid, const std::vector<Sequence>& sequences, int first_sequence, int first_token);
    std::vector<uint16_t> prefill(const Kernel& kernel, const std::vector<Sequence>& sequences, int first_sequence, int first_token);
    /// Decode of the problem's own sequences, with its groups read once; `shared` is for those with tiles. `balanced`: cut so that CTAs have as much to read.
    std::vector<uint16_t> decode_groups(const Kernel& kernel, const Kernel* shared, int grid, const std::vector<Group>& groups, bool balanced);
    /// Plan and decode captured into one graph for the largest contexts, replayed with the given ones.
    std::vector<uint16_t> decode_in_graph(const Kernel& kernel, int grid, const std::vector<Sequence>& sequences);

    const std::vector<Sequence>& sequences() const { return sequences_; }
    const Shape& shape() const { return shape_; }
    int first_token(int sequence) const;

    /// The float64 answer, [token, head, dim].
    std::vector<double> reference() const;
    /// Elements of an output row in the buffer that a run returns.
    size_t output_index(int token, int head) const;
    size_t output_elements() const;

  private:
    size_t arena_index(int sequence, int kv, int kv_head, int token) const;
    size_t block_elements() const;
    pagedd::PagedKv kv(int first_sequence) const;
    pagedd::Queries queries(int first_token) const;
    void poison_output();

    Shape shape_;
    std::vector<Sequence> sequences_;
    int log2_split_;
    int tokens_ = 0;
    int blocks_ = 0;
    int table_stride_ = 0;
    size_t q_stride_;
    size_t out_stride_;
    std::vector<uint16_t> arena_;
    std::vector<int32_t> tables_;
    std::vector<uint16_t> q_;
    std::unique_ptr<Device<uint16_t>> device_arena_;
    std::unique_ptr<Device<int32_t>> device_tables_;
    std::unique_ptr<Device<uint16_t>> device_q_;
    std::unique_ptr<Device<uint16_t>> device_out_;
};

/// The 16-bit pattern that outputs and guards hold before a run.
constexpr uint16_t kPoison = 0xa5a5;

}  // namespace harness
