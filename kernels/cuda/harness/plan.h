// Work lists on the host, and the device memory of one decode launch.
#pragma once
#include <algorithm>
#include <vector>

#include "support.h"

namespace harness {

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// Sequences that share the tokens [first_token, first_token + tokens) of their tables. Groups that others lie in come first.
struct Group {
    int first_token;
    int tokens;
    std::vector<int> members;
    int split;      // tokens of a unit or tile
    int tile_rows;  // 0: decode reads it; else rows of a tile of the kernel for large groups
};

/// What the plan needs to know of groups, made on the host.
struct SharedLists {
    std::vector<pagedd::SharedPart> parts;
    std::vector<pagedd::DecodeUnit> units;
    std::vector<pagedd::SharedTile> tiles;
    std::vector<int32_t> members;

    SharedLists(const std::vector<Group>& groups, int sequences, int group) : parts(sequences, pagedd::SharedPart{0, 0}) {
        for (const Group& g : groups) {
            const int table = g.members[0];
            const int rows = static_cast<int>(g.members.size()) * group;
            const int first_member = static_cast<int>(members.size());
            const int slot = parts[table].slots;
            const int splits = ceil_div(g.tokens, g.split);
            members.insert(members.end(), g.members.begin(), g.members.end());
            for (const int member : g.members) {
                parts[member].tokens = g.first_token + g.tokens;
                parts[member].slots += splits;
            }
            for (int split = 0; split < splits; ++split) {
                const int token = g.first_token + split * g.split;
                const int tokens = std::min(g.split, g.first_token + g.tokens - token);
                const int step = g.tile_rows == 0 ? pagedd::kUnitRows : g.tile_rows;
                for (int row = 0; row < rows; row += step) {
                    if (g.tile_rows == 0) {
                        units.push_back({table, token, tokens, static_cast<uint16_t>(row), static_cast<uint16_t>(std::min(step, rows - row)), 0, first_member,
                                         slot + split, 0});
                    } else {
                        tiles.push_back({table, token, tokens, first_member, row, rows - row, slot + split, 0});
                    }
                }
            }
        }
    }

    int slots() const {
        int sum = 0;
        for (const pagedd::SharedPart& part : parts) {
            sum += part.slots;
        }
        return sum;
    }
};

/// The same on the device.
struct SharedMemory {
    Device<pagedd::SharedPart> parts;
    Device<int32_t> units;  // and behind them the members' sequences
    Device<int32_t> counts;
    Device<pagedd::SharedTile> tiles;
    Device<int32_t> tile_count;
    Device<pagedd::Member> members;

    explicit SharedMemory(const SharedLists& lists)
        : parts(lists.parts),
          units(words(lists)),
          counts(std::vector<int32_t>{static_cast<int32_t>(lists.units.size()), static_cast<int32_t>(lists.members.size())}),
          tiles(lists.tiles),
          tile_count(std::vector<int32_t>{static_cast<int32_t>(lists.tiles.size())}),
          members(lists.members.size()) {
        members.fill(0xff);
    }

    pagedd::DecodePlanParams add_to(pagedd::DecodePlanParams plan) const {
        plan.shared_counts = counts.get();
        plan.shared_parts = parts.get();
        plan.shared_units = reinterpret_cast<const pagedd::DecodeUnit*>(units.get());
        plan.members = members.get();
        return plan;
    }

    pagedd::DecodeParams add_to(pagedd::DecodeParams decode) const {
        decode.members = members.get();
        return decode;
    }

    pagedd::SharedParams params(const pagedd::DecodeParams& decode) const {
        return {decode.kv, decode.queries, tiles.get(), tile_count.get(), members.get(), decode.partial_out, decode.partial_sums, decode.rows_per_unit, 0};
    }

  private:
    static std::vector<int32_t> words(const SharedLists& lists) {
        std::vector<int32_t> words(lists.units.size() * 8);
        std::memcpy(words.data(), lists.units.data(), words.size() * 4);
        words.insert(words.end(), lists.members.begin(), lists.members.end());
        return words;
    }
};

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
    Device<int32_t> lane_counts;
    Device<pagedd::DecodeTile> tiles;
    Device<float> partial_out;
    Device<float> partial_sums;
    int sequences;
    int rows_per_unit;
    int log2_split;  // 0: balanced
    int group;
    int kv_heads;
    int slots;

    /// `more` is room for slots of groups.
    DecodeMemory(const std::vector<int32_t>& starts, const std::vector<int32_t>& contexts, int kv_heads_, int group_, int dim, int log2_split_, int grid,
                 int more = 0)
        : DecodeMemory(units_of(starts, contexts, group_, log2_split_, std::max(1, grid / kv_heads_)) + more,
                       slots_of(starts, contexts, group_, log2_split_, std::max(1, grid / kv_heads_)) + more, static_cast<int>(contexts.size()),
                       most_rows(starts, group_), kv_heads_, group_, dim, log2_split_, std::max(1, grid / kv_heads_)) {}

    pagedd::DecodePlanParams plan(const int32_t* starts, const int32_t* contexts) const {
        return {starts, contexts, nullptr, units.get(), lane_counts.get(), tiles.get(), sequences, static_cast<int32_t>(units.count()), tile_count() / sequences,
                log2_split, group, lanes(), slots, 0, nullptr, nullptr, nullptr, nullptr};
    }

    pagedd::DecodeParams params(const pagedd::PagedKv& kv, const pagedd::Queries& queries) const {
        return {kv, queries, units.get(), lane_counts.get(), tiles.get(), nullptr, partial_out.get(), partial_sums.get(), static_cast<int32_t>(units.count()),
                rows_per_unit};
    }

    int lanes() const { return static_cast<int>(lane_counts.count()); }

    /// CTAs of decode.
    int grid() const { return lanes() * kv_heads; }

    int planned_units() const {
        int sum = 0;
        for (const int32_t count : lane_counts.download()) {
            sum += count;
        }
        return sum;
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

    static int units_of(const std::vector<int32_t>& starts, const std::vector<int32_t>& contexts, int group, int log2_split, int lanes) {
        return log2_split > 0 ? std::max(1, decode_units(starts, contexts, group, log2_split)) : lanes * (static_cast<int>(contexts.size()) + 1);
    }

    static int slots_of(const std::vector<int32_t>& starts, const std::vector<int32_t>& contexts, int group, int log2_split, int lanes) {
        return log2_split > 0 ? std::max(1, decode_units(starts, contexts, group, log2_split)) : lanes + static_cast<int>(contexts.size());
    }

    DecodeMemory(int max_units, int slots_, int sequences_, int rows, int kv_heads_, int group_, int dim, int log2_split_, int lanes)
        : units(max_units),
          lane_counts(lanes),
          tiles(static_cast<size_t>(sequences_) * ceil_div(rows, pagedd::kUnitRows)),
          partial_out(static_cast<size_t>(slots_) * kv_heads_ * std::min(rows, pagedd::kUnitRows) * dim),
          partial_sums(static_cast<size_t>(slots_) * kv_heads_ * std::min(rows, pagedd::kUnitRows) * 2),
          sequences(sequences_),
          rows_per_unit(std::min(rows, pagedd::kUnitRows)),
          log2_split(log2_split_),
          group(group_),
          kv_heads(kv_heads_),
          slots(slots_) {
        partial_out.fill(0xff);
        partial_sums.fill(0xff);
    }
};

}  // namespace harness
