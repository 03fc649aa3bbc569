// Work lists on the host, and the device memory of one decode launch.
#pragma once
#include <algorithm>
#include <vector>

#include "support.h"

namespace harness {

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// The largest number of units that the plan of these rows can have.
inline int decode_units(const std::vector<int32_t>& starts, const std::vector<int32_t>& contexts, int group, int log2_split) {
    int units = 0;
    for (size_t s = 0; s < contexts.size(); ++s) {
        units += ceil_div((starts[s + 1] - starts[s]) * group, pagedd::kUnitRows) * ceil_div(contexts[s], 1 << log2_split);
    }
    return units;
}

/// The units of a prefill launch, those that see most tokens first.
inline std::vector<pagedd::PrefillUnit> prefill_units(const std::vector<int32_t>& starts, const std::vector<int32_t>& contexts, int group, int tile_rows) {
    struct Sized {
        pagedd::PrefillUnit unit;
        int keys;
    };
    std::vector<Sized> sized;
    for (size_t s = 0; s < contexts.size(); ++s) {
        const int q_len = starts[s + 1] - starts[s];
        for (int row = 0; contexts[s] > 0 && row < q_len * group; row += tile_rows) {
            const int last = std::min(row + tile_rows, q_len * group) - 1;
            const int past = contexts[s] - q_len;
            sized.push_back({{static_cast<int32_t>(s), row, q_len * group - row, past, starts[s], {}}, past + last / group + 1});
        }
    }
    std::stable_sort(sized.begin(), sized.end(), [](const Sized& a, const Sized& b) { return a.keys > b.keys; });
    std::vector<pagedd::PrefillUnit> units;
    for (const Sized& s : sized) {
        units.push_back(s.unit);
    }
    return units;
}

/// Plan and partial results of a decode launch. Partial results begin as NaN, so that one that is read before it was written shows.
struct DecodeMemory {
    Device<pagedd::DecodeUnit> units;
    Device<int32_t> unit_count;
    Device<pagedd::DecodeTile> tiles;
    Device<float> partial_out;
    Device<float> partial_sums;
    int sequences;
    int rows_per_unit;
    int log2_split;
    int group;

    DecodeMemory(const std::vector<int32_t>& starts, const std::vector<int32_t>& contexts, int kv_heads, int group_, int dim, int log2_split_)
        : DecodeMemory(std::max(1, decode_units(starts, contexts, group_, log2_split_)), static_cast<int>(contexts.size()), most_rows(starts, group_), kv_heads,
                       group_, dim, log2_split_) {}

    pagedd::DecodePlanParams plan(const int32_t* starts, const int32_t* contexts) const {
        return {starts,    contexts,  nullptr, units.get(), unit_count.get(), tiles.get(), sequences, static_cast<int32_t>(units.count()), tile_count() / sequences,
                log2_split, group, 0};
    }

    pagedd::DecodeParams params(const pagedd::PagedKv& kv, const pagedd::Queries& queries) const {
        return {kv,        queries, units.get(), unit_count.get(), tiles.get(), partial_out.get(), partial_sums.get(), static_cast<int32_t>(units.count()),
                rows_per_unit, log2_split, 0};
    }

    int tile_count() const { return static_cast<int>(tiles.count()); }

  private:
    static int most_rows(const std::vector<int32_t>& starts, int group) {
        int most = 0;
        for (size_t s = 0; s + 1 < starts.size(); ++s) {
            most = std::max(most, (starts[s + 1] - starts[s]) * group);
        }
        return most;
    }

    DecodeMemory(int max_units, int sequences_, int rows, int kv_heads, int group_, int dim, int log2_split_)
        : units(max_units),
          unit_count(1),
          tiles(static_cast<size_t>(sequences_) * ceil_div(rows, pagedd::kUnitRows)),
          partial_out(static_cast<size_t>(max_units) * kv_heads * std::min(rows, pagedd::kUnitRows) * dim),
          partial_sums(static_cast<size_t>(max_units) * kv_heads * std::min(rows, pagedd::kUnitRows) * 2),
          sequences(sequences_),
          rows_per_unit(std::min(rows, pagedd::kUnitRows)),
          log2_split(log2_split_),
          group(group_) {
        partial_out.fill(0xff);
        partial_sums.fill(0xff);
    }
};

}  // namespace harness
