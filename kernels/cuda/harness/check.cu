#include "check.h"

#include <functional>
#include <string>

#include "problem.h"

namespace harness {
namespace {

int failures = 0;

void report(bool good, const std::string& what) {
    failures += good ? 0 : 1;
    if (!good) {
        std::printf("FAIL %s\n", what.c_str());
    }
}

/// The largest relative error of a row, in the Euclidean norm. Rounding weights and outputs to 8 bits (bf16) gives 2e-3 of a row's norm, to 11
/// bits (f16) 3e-4; a row of few elements and one dominant weight may reach twice that.
double row_error_bound(Dtype dtype) { return dtype == Dtype::kBf16 ? 8e-3 : 1e-3; }

struct Verdict {
    double worst_row = 0.0;  // NaN and infinite outputs count as infinite
    size_t stray = 0;        // elements outside the outputs that were written
};

Verdict judge(const Problem& problem, const std::vector<uint16_t>& out, const std::vector<double>& answer) {
    Verdict verdict;
    const Shape& shape = problem.shape();
    if (out.empty()) {
        verdict.worst_row = INFINITY;
        return verdict;
    }
    std::vector<bool> written(out.size(), false);
    int token = 0;
    for (const Sequence& s : problem.sequences()) {
        for (int query = 0; query < s.q_len; ++query, ++token) {
            for (int head = 0; s.context > 0 && head < shape.heads(); ++head) {
                double error = 0.0;
                double norm = 0.0;
                for (int e = 0; e < shape.dim; ++e) {
                    const size_t at = problem.output_index(token, head) + e;
                    const double expected = answer[(static_cast<size_t>(token) * shape.heads() + head) * shape.dim + e];
                    const double difference = from_bits(shape.dtype, out[at]) - expected;
                    written[at] = true;
                    error += difference * difference;
                    norm += expected * expected;
                }
                const double relative = std::sqrt(error / norm);
                verdict.worst_row = std::isfinite(relative) ? std::max(verdict.worst_row, relative) : INFINITY;
            }
        }
    }
    for (size_t i = 0; i < out.size(); ++i) {
        verdict.stray += !written[i] && out[i] != kPoison;
    }
    return verdict;
}

/// The bits of `count` tokens from `from` on are the same in both outputs.
bool same_tokens(const Problem& problem, const std::vector<uint16_t>& a, const std::vector<uint16_t>& b, int from, int count) {
    if (a.empty() || b.empty()) {
        return false;
    }
    const size_t row = static_cast<size_t>(problem.shape().heads()) * problem.shape().dim;
    for (int token = from; token < from + count; ++token) {
        const size_t at = problem.output_index(token, 0);
        if (std::memcmp(&a[at], &b[at], row * 2) != 0) {
            return false;
        }
    }
    return true;
}

using Run = std::function<std::vector<uint16_t>(const std::vector<Sequence>&, int first_sequence, int first_token)>;

/// The bits of a sequence do not change when its neighbours go, nor those of a part of its queries when the rest is not asked for.
void check_independence(const Problem& problem, const std::vector<uint16_t>& whole, const Run& run, const std::string& name) {
    const std::vector<Sequence>& sequences = problem.sequences();
    for (size_t s = 0; s < sequences.size(); ++s) {
        if (sequences[s].context == 0) {
            continue;
        }
        const int first = problem.first_token(static_cast<int>(s));
        const int q_len = sequences[s].q_len;
        report(same_tokens(problem, whole, run({sequences[s]}, static_cast<int>(s), first), first, q_len),
               name + ": sequence " + std::to_string(s) + " alone has other bits than in the batch");
        if (q_len > 1) {
            const int head = q_len / 3 + 1;
            const int past = sequences[s].context - q_len;
            report(same_tokens(problem, whole, run({{past + head, head}}, static_cast<int>(s), first), first, head),
                   name + ": the first queries of sequence " + std::to_string(s) + " alone have other bits");
            report(same_tokens(problem, whole, run({{sequences[s].context, q_len - head}}, static_cast<int>(s), first + head), first + head, q_len - head),
                   name + ": the last queries of sequence " + std::to_string(s) + " alone have other bits");
        }
    }
}

struct Totals {
    int cases = 0;
    double worst = 0.0;
};

void add_verdict(Totals& totals, const Problem& problem, const Verdict& verdict, const std::string& name) {
    ++totals.cases;
    totals.worst = std::max(totals.worst, verdict.worst_row);
    char line[256];
    std::snprintf(line, sizeof line, "%s, %s: worst row error %.2e, %zu stray writes", name.c_str(), problem.shape().text().c_str(), verdict.worst_row,
                  verdict.stray);
    report(verdict.worst_row <= row_error_bound(problem.shape().dtype) && verdict.stray == 0, line);
}

void check_decode(const Kernel& kernel, const Shape& shape, const std::vector<Sequence>& sequences, int log2_split, uint64_t seed, Totals& totals) {
    Problem problem(shape, sequences, log2_split, seed);
    const std::string name = std::string(kernel.name) + " split " + std::to_string(1 << log2_split);
    const std::vector<uint16_t> out = problem.decode(kernel, 264, sequences, 0, 0);
    add_verdict(totals, problem, judge(problem, out, problem.reference()), name);
    report(out == problem.decode(kernel, 1, sequences, 0, 0), name + ": a grid of one CTA gives other bits");
    check_independence(
        problem, out,
        [&](const std::vector<Sequence>& part, int sequence, int token) { return problem.decode(kernel, 264, part, sequence, token); }, name);

    // A graph captured for these contexts, replayed with shorter ones and two padded rows.
    std::vector<Sequence> shorter = sequences;
    for (size_t s = 0; s < shorter.size(); ++s) {
        if (s < 2 || shorter[s].context == 0) {
            shorter[s].context = 0;
        } else {
            shorter[s].context = std::max(shorter[s].q_len, shorter[s].context - 7);
        }
    }
    report(problem.decode_in_graph(kernel, 264, sequences) == out, name + ": a graph gives other bits");
    report(problem.decode_in_graph(kernel, 264, shorter) == problem.decode(kernel, 264, shorter, 0, 0), name + ": a replay with other contexts gives other bits");
}

void check_prefill(const Kernel& kernel, const Shape& shape, const std::vector<Sequence>& sequences, uint64_t seed, Totals& totals) {
    Problem problem(shape, sequences, 8, seed);
    const std::vector<uint16_t> out = problem.prefill(kernel, sequences, 0, 0);
    add_verdict(totals, problem, judge(problem, out, problem.reference()), kernel.name);
    report(out == problem.prefill(kernel, sequences, 0, 0), std::string(kernel.name) + ": a second run gives other bits");
    check_independence(
        problem, out, [&](const std::vector<Sequence>& part, int sequence, int token) { return problem.prefill(kernel, part, sequence, token); },
        kernel.name);
}

/// The kernels of one head size and type give a row the same bits, whichever is chosen by the size of the batch.
void check_same_bits(const std::vector<Kernel>& kernels) {
    for (const Kernel& a : kernels) {
        for (const Kernel& b : kernels) {
            if (&a < &b && a.dim == b.dim && a.dtype == b.dtype) {
                const std::vector<Sequence> sequences = {{17, 17}, {300, 300}, {333, 70}, {1025, 2}};
                Problem problem({a.dtype, a.dim, 2, 4, 4, false}, sequences, 8, 1);
                report(problem.prefill(a, sequences, 0, 0) == problem.prefill(b, sequences, 0, 0), std::string(a.name) + " and " + b.name + " give other bits");
            }
        }
    }
}

struct Heads {
    int kv_heads;
    int group;
    int log2_block;
    bool layers_outermost;
};

const std::vector<Heads> kHeads = {{2, 4, 4, false}, {3, 3, 5, true}, {1, 16, 4, true}, {4, 1, 9, false}, {2, 7, 6, false}, {1, 8, 7, true}};

void print_totals(const Kernel& kernel, const Totals& totals) {
    std::printf("%-20s %3d shapes, worst row error %.2e (bound %.0e)\n", kernel.name, totals.cases, totals.worst, row_error_bound(kernel.dtype));
    std::fflush(stdout);
}

void check_all_of(const std::vector<Kernel>& decode, const std::vector<Kernel>& prefill) {
    uint64_t seed = 1;
    for (const Kernel& kernel : decode) {
        allow_shared(kernel);
        Totals totals;
        for (const Heads& h : kHeads) {
            const Shape shape = {kernel.dtype, kernel.dim, h.kv_heads, h.group, h.log2_block, h.layers_outermost};
            // Edges of pieces and splits, padded rows, and guesses: several queries a sequence, up to more rows than one unit holds.
            const std::vector<Sequence> singles = {{1, 1}, {0, 1}, {15, 1}, {16, 1}, {17, 1}, {127, 1}, {128, 1}, {129, 1}, {0, 1}, {700, 1}, {1031, 1}};
            const std::vector<Sequence> guesses = {{2, 2}, {5, 5}, {131, 4}, {0, 2}, {259, 6}, {513, 3}, {400, 1}};
            check_decode(kernel, shape, singles, 7, seed++, totals);
            check_decode(kernel, shape, singles, 9, seed++, totals);
            check_decode(kernel, shape, guesses, 8, seed++, totals);
        }
        print_totals(kernel, totals);
    }
    for (const Kernel& kernel : prefill) {
        allow_shared(kernel);
        Totals totals;
        for (const Heads& h : kHeads) {
            const Shape shape = {kernel.dtype, kernel.dim, h.kv_heads, h.group, h.log2_block, h.layers_outermost};
            // Whole prompts, later chunks, single tokens, a padded row.
            check_prefill(kernel, shape, {{1, 1}, {17, 17}, {64, 64}, {0, 3}, {300, 300}, {333, 70}, {129, 1}}, seed++, totals);
            check_prefill(kernel, shape, {{65, 65}, {700, 33}, {1025, 2}}, seed++, totals);
        }
        print_totals(kernel, totals);
    }
}

const Kernel* same_shape(const std::vector<Kernel>& kernels, const Kernel& as) {
    for (const Kernel& kernel : kernels) {
        if (kernel.dim == as.dim && kernel.dtype == as.dtype) {
            return &kernel;
        }
    }
    return nullptr;
}

/// Sequences that begin alike, groups in groups, and some that share nothing, read by decode alone and with the kernels for large groups.
void check_groups(const Kernel& kernel, const Shape& shape, uint64_t seed, const std::vector<int>& grids, Totals& totals) {
    const int block = 1 << shape.log2_block;
    const int shared = ceil_div(200, block) * block;
    std::vector<Sequence> sequences = {{shared + 1, 1}, {0, 1}, {shared + 17, 1}, {150, 1}, {shared + 300, 1}, {2 * shared + 5, 1}, {2 * shared + 64, 1}, {9, 1}};
    std::vector<Group> groups = {{0, shared, {0, 2, 4}, 256, 0}, {0, 2 * shared, {5, 6}, 256, 0}, {0, shared, {}, shared, 0}, {shared, 2 * shared, {}, shared, 0}};
    // A large group, of which all but the first two lie in another that begins where it ends.
    for (int i = 0; i < 23; ++i) {
        const int member = static_cast<int>(sequences.size());
        sequences.push_back({(i < 2 ? 1 : 3) * shared + 1 + i * 13, 1});
        groups[2].members.push_back(member);
        if (i >= 2) {
            groups[3].members.push_back(member);
        }
    }
    Problem problem(shape, sequences, 8, seed, groups);
    const std::vector<double> answer = problem.reference();
    const auto check = [&](const Kernel* large, const std::vector<Group>& with) {
        const std::string name = std::string(kernel.name) + " in groups, " + (large == nullptr ? "without another kernel" : large->name);
        const std::vector<uint16_t> out = problem.decode_groups(kernel, large, 264, with, false);
        add_verdict(totals, problem, judge(problem, out, answer), name);
        report(out == problem.decode_groups(kernel, large, 1, with, false), name + ": a grid of one CTA gives other bits");
        for (const int grid : grids) {
            const std::vector<uint16_t> balanced = problem.decode_groups(kernel, large, grid, with, true);
            add_verdict(totals, problem, judge(problem, balanced, answer), name + ", balanced over " + std::to_string(grid));
            report(balanced == problem.decode_groups(kernel, large, grid, with, true), name + ": a second run gives other bits");
        }
        // Who is in no group has the bits that it has alone.
        for (const int alone : {3, 7}) {
            const int first = problem.first_token(alone);
            report(same_tokens(problem, out, problem.decode(kernel, 264, {sequences[alone]}, alone, first), first, 1), name + ": other bits than alone");
        }
    };
    check(nullptr, groups);
    check(nullptr, {});
    for (const std::vector<Kernel>* kernels : {&shared_kernels(), &shared_hopper_kernels()}) {
        const Kernel* large = same_shape(*kernels, kernel);
        if (large != nullptr) {
            allow_shared(*large);
            std::vector<Group> with = groups;
            with[2].tile_rows = with[3].tile_rows = large->tile_rows;
            check(large, with);
            with[0].tile_rows = large->tile_rows;
            with[3].tile_rows = 0;
            with[3].split = 256;
            check(large, with);
        }
    }
}

__global__ void race_kernel(int* out) {
    __shared__ int shared[64];
    shared[threadIdx.x] = threadIdx.x;
    // No barrier: the other warp's value may not be there.
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

}  // namespace

int check_decode_kernels() {
    failures = 0;
    check_all_of(decode_kernels(), {});
    check_all_of(decode_variants(), {});
    return failures;
}

int check_group_kernels() {
    failures = 0;
    uint64_t seed = 1;
    for (const Kernel& kernel : decode_kernels()) {
        allow_shared(kernel);
        Totals totals;
        for (const Heads& h : kHeads) {
            check_groups(kernel, {kernel.dtype, kernel.dim, h.kv_heads, h.group, h.log2_block, h.layers_outermost}, seed++, {1, 24, 264, 500}, totals);
        }
        print_totals(kernel, totals);
    }
    return failures;
}

int check_prefill_kernels() {
    failures = 0;
    check_all_of({}, prefill_kernels());
    check_all_of({}, prefill_variants());
    return failures;
}

int check_hopper_kernels() {
    failures = 0;
    check_all_of({}, prefill_hopper_kernels());
    check_same_bits(prefill_hopper_kernels());
    check_all_of({}, prefill_hopper_variants());
    return failures;
}

int check_minimal() {
    failures = 0;
    const Heads h = {1, 3, 4, false};
    for (const Kernel& kernel : decode_kernels()) {
        allow_shared(kernel);
        Totals totals;
        const std::vector<Sequence> sequences = {{150, 1}, {0, 1}, {19, 6}, {64, 1}};
        Problem problem({kernel.dtype, kernel.dim, h.kv_heads, h.group, h.log2_block, h.layers_outermost}, sequences, 6, 1);
        add_verdict(totals, problem, judge(problem, problem.decode(kernel, 2, sequences, 0, 0), problem.reference()), kernel.name);
        print_totals(kernel, totals);
    }
    for (const Kernel& kernel : decode_kernels()) {
        Totals totals;
        check_groups(kernel, {kernel.dtype, kernel.dim, h.kv_heads, h.group, h.log2_block, h.layers_outermost}, 1, {24}, totals);
        print_totals(kernel, totals);
    }
    for (const std::vector<Kernel>* kernels : {&prefill_kernels(), &prefill_hopper_kernels()}) {
        for (const Kernel& kernel : *kernels) {
            allow_shared(kernel);
            Totals totals;
            const std::vector<Sequence> sequences = {{70, 70}, {0, 1}, {330, 5}};
            Problem problem({kernel.dtype, kernel.dim, h.kv_heads, h.group, h.log2_block, h.layers_outermost}, sequences, 6, 1);
            add_verdict(totals, problem, judge(problem, problem.prefill(kernel, sequences, 0, 0), problem.reference()), kernel.name);
            print_totals(kernel, totals);
        }
    }
    return failures;
}

void planted_race() {
    Device<int> out(64);
    race_kernel<<<1, 64>>>(out.get());
    CUDA_OK(cudaDeviceSynchronize());
}

}  // namespace harness
