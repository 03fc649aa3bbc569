// The work lists of a decode step that need not be exact: what the CTAs of a KV head read is cut into as many parts of the same length as there are CTAs,
// wherever that is in a sequence. A sequence counts for what it costs beside its bytes, too, so that a CTA with many short ones has fewer bytes to read.
// Few rows have partial results.
#pragma once
#include <climits>

#include "plan.cuh"

namespace pagedd {

/// Sequences are cut at multiples of so many tokens from where they begin.
constexpr int kCutTokens = 64;
/// A piece of a sequence is at least so many cuts long, if the sequence is.
constexpr int kLeastCuts = 2;
/// What a sequence costs a CTA beside its tokens (its queries, a round that begins anew, merging warps), in cuts: of those shorter than what a CTA reads.
/// A longer one is the first that a CTA meets, and every CTA has one.
constexpr int kSequenceCuts = 2;
constexpr int kMostLanes = 512;

__device__ __forceinline__ int cuts_of(int tokens) { return (tokens + kCutTokens - 1) / kCutTokens; }

/// What a sequence of `cuts` counts for beside them, where a CTA has `share` of them: that lies before its first token.
__device__ __forceinline__ int lead_of(int cuts, int share) { return cuts > 0 && cuts < share ? kSequenceCuts : 0; }

struct LanesShared {
    int sums[32];
    int load[kMostLanes];      // of each lane, cuts of groups
    int cut[kMostLanes + 1];   // part i of the sequences' extents, laid end to end, is [cut[i], cut[i + 1])
    int lane_of[kMostLanes];   // who reads part i
    int first_in[kMostLanes];  // which of the sequences that read anything is the first in part i
    int count[kMostLanes];     // sequences in part i
};

/// The sum over the threads before this one, and in `total` that over all.
__device__ __forceinline__ int sum_before(int own, LanesShared& shared, int& total) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    int sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(kFullWarp, sum, distance);
        sum += lane >= distance ? other : 0;
    }
    if (lane == 31) {
        shared.sums[warp] = sum;
    }
    __syncthreads();
    const int of_warp = shared.sums[lane];
    total = __reduce_add_sync(kFullWarp, of_warp);
    const int before = __reduce_add_sync(kFullWarp, lane < warp ? of_warp : 0);
    __syncthreads();
    return before + sum - own;
}

/// Units of groups that a lane has: they lie in turns.
__device__ __forceinline__ int group_units(int units, int lanes, int lane) { return (units + lanes - 1 - lane) / lanes; }

/// The part that has the place `at` of all extents.
__device__ __forceinline__ int part_at(const LanesShared& shared, int parts, int at) {
    int low = 0;
    int high = parts;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (shared.cut[middle] <= at) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/// Cuts `all` into parts, so that no lane has more than an equal share, unless groups alone gave it more. Returns how many parts there are; none is empty.
__device__ __forceinline__ int cut_parts(LanesShared& shared, int lanes, int all, int all_of_groups) {
    const int lane = threadIdx.x;
    const int most = max(kLeastCuts, (all + all_of_groups + lanes - 1) / lanes);
    const int own = lane < lanes ? max(0, most - shared.load[lane]) : 0;
    int total;
    const int first = min(all, sum_before(own, shared, total));
    const int end = min(all, first + own);
    int parts;
    const int part = sum_before(end > first ? 1 : 0, shared, parts);
    if (end > first) {
        shared.cut[part] = first;
        shared.lane_of[part] = lane;
    }
    if (lane < kMostLanes) {
        shared.first_in[lane] = INT_MAX;
        shared.count[lane] = 0;
    }
    if (lane == 0) {
        shared.cut[parts] = all;
    }
    __syncthreads();
    return parts;
}

/// Where a sequence of `cuts` is cut that would be at `at` of them, or before them: pieces that are too short go to a neighbour.
__device__ __forceinline__ int cut_inside(int at, int cuts) { return at < kLeastCuts ? 0 : cuts - at < kLeastCuts ? cuts : at; }

/// Of a sequence, what it reads for itself, in cuts.
__device__ __forceinline__ int own_cuts(const DecodePlanParams& params, int s) {
    return params.contexts[s] > 0 ? cuts_of(params.contexts[s] - shared_part(params, s).tokens) : 0;
}

/// Lists the units of a step, part by part: unit n of lane j is at j + n * lanes.
__device__ __forceinline__ void decode_plan_lanes(const DecodePlanParams& params) {
    __shared__ LanesShared shared;
    const int thread = threadIdx.x;
    const int lanes = params.lanes;
    wait_for_previous_kernel();
    const int shared_units = params.shared_counts == nullptr ? 0 : params.shared_counts[0];
    const int members = params.shared_counts == nullptr ? 0 : params.shared_counts[1];
    if (shared_units > params.max_units || lanes > kMostLanes || params.tiles_per_sequence != 1) {
        __trap();
    }
    if (thread < kMostLanes) {
        shared.load[thread] = 0;
    }
    __syncthreads();
    int of_groups = 0;
    for (int unit = thread; unit < shared_units; unit += kPlanThreads) {
        const DecodeUnit copy = params.shared_units[unit];
        params.units[unit] = copy;
        atomicAdd(&shared.load[unit % lanes], cuts_of(copy.tokens));
        of_groups += cuts_of(copy.tokens);
    }
    int own = 0;
    for (int s = thread; s < params.sequences; s += kPlanThreads) {
        own += own_cuts(params, s);
    }
    int all_of_groups;
    int all;
    sum_before(of_groups, shared, all_of_groups);
    sum_before(own, shared, all);
    const int share = (all + all_of_groups + lanes - 1) / lanes;
    int leads = 0;
    for (int s = thread; s < params.sequences; s += kPlanThreads) {
        leads += lead_of(own_cuts(params, s), share);
    }
    int all_leads;
    sum_before(leads, shared, all_leads);
    all += all_leads;
    const int parts = cut_parts(shared, lanes, all, all_of_groups);

    int extent_total = 0;
    int number_total = 0;
    int slot_total = 0;
    for (int chunk = 0; chunk < params.sequences; chunk += kPlanThreads) {
        const int s = chunk + thread;
        const bool real = s < params.sequences;
        const SharedPart part = real ? shared_part(params, s) : SharedPart{0, 0};
        const int context = real ? params.contexts[s] : 0;
        const int first_query = real ? params.starts[s] : 0;
        const int queries = real ? params.starts[s + 1] - first_query : 0;
        const int table_row = real && params.table_rows != nullptr ? params.table_rows[s] : s;
        const int tokens = context - part.tokens;
        const int cuts = context > 0 ? cuts_of(tokens) : 0;
        if (context > 0 && (cuts <= 0 || row_tiles(queries, params.group) > 1 || (part.slots > 0 && queries != 1))) {
            __trap();
        }
        int sum;
        const int lead = lead_of(cuts, share);
        // Where its own cuts begin.
        const int begin = extent_total + sum_before(lead + cuts, shared, sum) + lead;
        extent_total += sum;
        const int number = number_total + sum_before(cuts > 0 ? 1 : 0, shared, sum);
        number_total += sum;

        // Parts [first, last] have a piece each.
        int first = 0;
        int last = -1;
        if (cuts > 0) {
            first = part_at(shared, parts, begin - lead);
            last = part_at(shared, parts, begin + cuts - 1);
            while (first < last && cut_inside(shared.cut[first + 1] - begin, cuts) == 0) {
                ++first;
            }
            while (first < last && cut_inside(shared.cut[last] - begin, cuts) == cuts) {
                --last;
            }
            for (int i = first; i <= last; ++i) {
                atomicMin(&shared.first_in[i], number);
            }
        }
        const int splits = cuts > 0 ? last - first + 1 + part.slots : 0;
        const int slot = slot_total + sum_before(splits, shared, sum);
        slot_total += sum;
        if (slot_total > params.max_slots) {
            __trap();
        }
        if (real) {
            params.tiles[s] = splits > 1 ? DecodeTile{slot, splits, first_query, 0, static_cast<uint16_t>(queries * params.group)} : DecodeTile{slot, 0, 0, 0, 0};
        }
        for (int i = first; i <= last; ++i) {
            const int lane = shared.lane_of[i];
            const int in_part = number - shared.first_in[i];
            const int at = lane + (group_units(shared_units, lanes, lane) + in_part) * lanes;
            const int from = i == first ? 0 : cut_inside(shared.cut[i] - begin, cuts);
            const int to = i == last ? cuts : cut_inside(shared.cut[i + 1] - begin, cuts);
            if (at >= params.max_units) {
                __trap();
            }
            DecodeUnit unit;
            unit.sequence = table_row;
            unit.first_token = part.tokens + from * kCutTokens;
            unit.tokens = min(tokens, to * kCutTokens) - from * kCutTokens;
            unit.first_row = 0;
            unit.rows = static_cast<uint16_t>(queries * params.group);
            unit.past = context - queries;
            unit.first_query = first_query;
            unit.slot = slot + part.slots + i - first;
            unit.splits = splits;
            params.units[at] = unit;
            atomicMax(&shared.count[i], in_part + 1);
        }
        __syncthreads();
    }

    if (thread < lanes) {
        params.lane_counts[thread] = group_units(shared_units, lanes, thread);
    }
    __syncthreads();
    if (thread < parts) {
        params.lane_counts[shared.lane_of[thread]] += shared.count[thread];
    }
    list_members(params, shared_units, members);
}

}  // namespace pagedd
