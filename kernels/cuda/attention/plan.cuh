// The work lists of a decode step, made on the device from the sequences' lengths, so that one CUDA graph serves every step of its size.
#pragma once
#include "params.h"
#include "tensor.cuh"

namespace pagedd {

constexpr int kPlanThreads = 1024;

/// A sequence, and how many units of whole splits and of rests, and how many slots of groups, the sequences before it have.
struct PlannedSequence {
    int sequence;
    int context;
    int first_query;
    int q_len;
    SharedPart shared;
    int whole_before;
    int rest_before;
    int shared_before;
};

__device__ __forceinline__ SharedPart shared_part(const DecodePlanParams& params, int sequence) {
    return params.shared_counts == nullptr ? SharedPart{0, 0} : params.shared_parts[sequence];
}

/// Tiles of 16 packed rows that a number of queries fills.
__device__ __forceinline__ int row_tiles(int queries, int group) { return (queries * group + kUnitRows - 1) / kUnitRows; }

/// One warp writes the tiles and units of a sequence. Units of whole splits come from `first_whole` on and rests from `first_rest` on; slots are numbered
/// through, sequence by sequence.
__device__ __forceinline__ void list_sequence(const DecodePlanParams& params, const PlannedSequence& planned, int first_whole, int first_rest, int lane) {
    const int split_tokens = 1 << params.log2_split;
    const int tiles = row_tiles(planned.q_len, params.group);
    const int own = planned.context - planned.shared.tokens;
    const int whole_splits = own >> params.log2_split;
    const int own_splits = whole_splits + (own % split_tokens != 0);
    const int splits = planned.shared.slots + own_splits;
    const int slots = planned.whole_before + planned.rest_before + planned.shared_before;
    if (tiles > params.tiles_per_sequence || (planned.shared.slots > 0 && (planned.q_len != 1 || own <= 0)) || slots + tiles * splits > params.max_slots) {
        __trap();
    }
    const int table_row = params.table_rows == nullptr ? planned.sequence : params.table_rows[planned.sequence];
    for (int tile = lane; tile < params.tiles_per_sequence; tile += 32) {
        const int row = tile * kUnitRows;
        const int rows = min(kUnitRows, planned.q_len * params.group - row);
        params.tiles[planned.sequence * params.tiles_per_sequence + tile] =
            rows > 0 && splits > 1 ? DecodeTile{slots + tile * splits, splits, planned.first_query, static_cast<uint16_t>(row), static_cast<uint16_t>(rows)}
                                   : DecodeTile{};
    }
    for (int i = lane; i < tiles * own_splits; i += 32) {
        const int tile = i / own_splits;
        const int split = i % own_splits;
        const int at = split < whole_splits ? first_whole + planned.whole_before + tile * whole_splits + split : first_rest + planned.rest_before + tile;
        if (at >= params.max_units) {
            __trap();
        }
        DecodeUnit unit;
        unit.sequence = table_row;
        unit.first_token = planned.shared.tokens + (split << params.log2_split);
        unit.tokens = min(split_tokens, planned.context - unit.first_token);
        unit.first_row = static_cast<uint16_t>(tile * kUnitRows);
        unit.rows = static_cast<uint16_t>(min(kUnitRows, planned.q_len * params.group - unit.first_row));
        unit.past = planned.context - planned.q_len;
        unit.first_query = planned.first_query;
        unit.slot = slots + tile * splits + planned.shared.slots + split;
        unit.splits = splits;
        params.units[at] = unit;
    }
}

/// Writes what members need to know, behind a barrier after which the tiles of all sequences are written.
__device__ __forceinline__ void list_members(const DecodePlanParams& params, int shared_units, int members) {
    const int32_t* sequences = reinterpret_cast<const int32_t*>(params.shared_units + shared_units);
    for (int member = threadIdx.x; member < members; member += kPlanThreads) {
        const int s = sequences[member];
        params.members[member] = {params.starts[s], params.tiles[s * params.tiles_per_sequence].first_slot};
    }
}

/// Lists the units of a step: those of groups, then whole splits and rests after them, so that the last CTAs to finish are the short ones.
__device__ __forceinline__ void decode_plan(const DecodePlanParams& params) {
    struct Sums {
        int whole[32];
        int rest[32];
        int shared[32];
    };
    __shared__ Sums warps;
    __shared__ int whole_before[kPlanThreads];
    __shared__ int rest_before[kPlanThreads];
    __shared__ int context_of[kPlanThreads];
    __shared__ int first_query_of[kPlanThreads];
    __shared__ int q_len_of[kPlanThreads];
    __shared__ SharedPart shared_of[kPlanThreads];
    __shared__ int shared_before[kPlanThreads];
    __shared__ int chunk_whole;
    __shared__ int chunk_rest;
    __shared__ int chunk_shared;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    wait_for_previous_kernel();

    const int shared_units = params.shared_counts == nullptr ? 0 : params.shared_counts[0];
    const int members = params.shared_counts == nullptr ? 0 : params.shared_counts[1];
    if (shared_units > params.max_units) {
        __trap();
    }
    for (int unit = threadIdx.x; unit < shared_units; unit += kPlanThreads) {
        params.units[unit] = params.shared_units[unit];
    }

    // The rests begin where the whole splits of all sequences end: count those first.
    const int split_tokens = 1 << params.log2_split;
    int all_whole = 0;
    for (int s = threadIdx.x; s < params.sequences; s += kPlanThreads) {
        const int own = params.contexts[s] - shared_part(params, s).tokens;
        all_whole += row_tiles(params.starts[s + 1] - params.starts[s], params.group) * (own >> params.log2_split);
    }
    all_whole = __reduce_add_sync(kFullWarp, all_whole);
    if (lane == 0) {
        warps.whole[warp] = all_whole;
    }
    __syncthreads();
    all_whole = __reduce_add_sync(kFullWarp, warps.whole[lane]);
    __syncthreads();

    int whole_total = 0;
    int rest_total = 0;
    int shared_total = 0;
    for (int chunk = 0; chunk < params.sequences; chunk += kPlanThreads) {
        // Sums over the sequences up to this thread's: within the warp, then over the warps before.
        const int s = chunk + threadIdx.x;
        const bool real = s < params.sequences;
        const int context = real ? params.contexts[s] : 0;
        const int first = real ? params.starts[s] : 0;
        const int q_count = real ? params.starts[s + 1] - first : 0;
        const int tiles = row_tiles(q_count, params.group);
        context_of[threadIdx.x] = context;
        first_query_of[threadIdx.x] = first;
        q_len_of[threadIdx.x] = q_count;
        const SharedPart part = real ? shared_part(params, s) : SharedPart{0, 0};
        shared_of[threadIdx.x] = part;
        int whole = tiles * ((context - part.tokens) >> params.log2_split);
        int rest = (context - part.tokens) % split_tokens == 0 ? 0 : tiles;
        int shared = part.slots;
        const int own_whole = whole;
        const int own_rest = rest;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int w = __shfl_up_sync(kFullWarp, whole, distance);
            const int r = __shfl_up_sync(kFullWarp, rest, distance);
            const int g = __shfl_up_sync(kFullWarp, shared, distance);
            whole += lane >= distance ? w : 0;
            rest += lane >= distance ? r : 0;
            shared += lane >= distance ? g : 0;
        }
        if (lane == 31) {
            warps.whole[warp] = whole;
            warps.rest[warp] = rest;
            warps.shared[warp] = shared;
        }
        __syncthreads();
        int whole_base = whole_total;
        int rest_base = rest_total;
        int shared_base = shared_total;
        for (int w = 0; w < warp; ++w) {
            whole_base += warps.whole[w];
            rest_base += warps.rest[w];
            shared_base += warps.shared[w];
        }
        whole_before[threadIdx.x] = whole_base + whole - own_whole;
        rest_before[threadIdx.x] = rest_base + rest - own_rest;
        shared_before[threadIdx.x] = shared_base + shared - part.slots;
        if (threadIdx.x == kPlanThreads - 1) {
            chunk_whole = whole_base + whole;
            chunk_rest = rest_base + rest;
            chunk_shared = shared_base + shared;
        }
        __syncthreads();
        whole_total = chunk_whole;
        rest_total = chunk_rest;
        shared_total = chunk_shared;

        // A warp per sequence: with a thread per sequence one long context would hold up the others.
        for (int of = warp; of < min(kPlanThreads, params.sequences - chunk); of += kPlanThreads / 32) {
            list_sequence(params, {chunk + of, context_of[of], first_query_of[of], q_len_of[of], shared_of[of], whole_before[of], rest_before[of], shared_before[of]},
                          shared_units, shared_units + all_whole, lane);
        }
        __syncthreads();
    }
    const int units = shared_units + whole_total + rest_total;
    for (int j = threadIdx.x; j < params.lanes; j += kPlanThreads) {
        params.lane_counts[j] = units > j ? (units - j + params.lanes - 1) / params.lanes : 0;
    }
    list_members(params, shared_units, members);
}

}  // namespace pagedd
