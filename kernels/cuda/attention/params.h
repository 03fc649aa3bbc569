// Launch parameters of the paged attention kernels: plain data, passed by value, mirrored by `#[repr(C)]` structs on the Rust side.
//
// Words: a *sequence* has `context` tokens in the cache, of which the last `q_len` are this step's queries (their K and V are already
// written). A *packed row* is one query head of one query token: with `group` query heads per KV head, row r of a sequence and KV head is
// query token r / group, query head kv_head * group + r % group. Packing fills the 16 rows of a tensor-core tile with heads that read
// the same keys.
// Sequences whose block tables begin alike may form a *group*: its tokens are read once for all of its *members*, each of which has one query, and what
// a member keeps for itself is read after. Groups may lie in groups.
// Chain of a decode step: plan once; for each layer the tiles of large groups, if any, then decode, then combine. On sm_90 each kernel may be launched with programmatic stream serialization: it
// waits for the one before it. A prefill chunk: one launch a layer, with units that the host lists.
#pragma once
#include <cstdint>

namespace pagedd {

/// Packed rows of one decode unit: the M of mma.m16n8k16.
constexpr int kUnitRows = 16;

/// K and V of one layer, read through block tables.
/// Token t of a sequence lies in block `table[t >> log2_block]`; within a layer of a block: [kv, kv_head, token, head_dim], elements of 2 bytes; or of one,
/// with [kv, kv_head, token] scales of 4 bytes behind them all.
struct PagedKv {
    const uint8_t* layer;    // arena base + layer * layer_stride; 16-byte aligned
    int64_t block_stride;    // bytes from one block to the next; a multiple of 16
    const int32_t* tables;   // [sequences, table_stride] block numbers; entries past the context are never used
    int32_t table_stride;    // entries of one sequence's row
    int32_t log2_block;      // a block holds 1 << log2_block tokens, 4..=9
    int32_t kv_heads;
    int32_t group;           // query heads per KV head, 1..=16
};

/// Queries and outputs: [tokens, heads, head_dim], the heads of a token together.
struct Queries {
    const void* q;         // 16-byte aligned
    void* out;             // 16-byte aligned; rows of sequences without work are not touched
    int64_t q_stride;      // elements from one token to the next; a multiple of 8
    int64_t out_stride;
    float scale_log2;      // softmax scale * log2(e)
    int32_t reserved;
};

/// One piece of decode work, for every KV head: up to 16 packed rows of a sequence or of a group against the tokens [first_token, first_token + tokens).
/// The partial results of a sequence lie in `splits` slots, in the order of their positions. With `splits` 0 the unit is a group's: its packed row r is
/// head r % group of member first_query + r / group, every row sees all tokens, and row's slot is its member's first slot + `slot`.
struct alignas(16) DecodeUnit {
    int32_t sequence;
    int32_t first_token;
    int32_t tokens;
    uint16_t first_row;
    uint16_t rows;
    int32_t past;          // tokens of the sequence before its first query
    int32_t first_query;   // the sequence's first token in the query and output tensors
    int32_t slot;
    int32_t splits;
};

/// A sequence as the groups that it is in see it.
struct alignas(8) Member {
    int32_t token;       // its query, in the query and output tensors
    int32_t first_slot;
};

/// Work of one CTA for a large group, for every KV head: packed rows of its members from first_row on, at most as many as the kernel's tile has, against
/// the tokens [first_token, first_token + tokens). first_token is a multiple of the block size.
struct alignas(16) SharedTile {
    int32_t sequence;
    int32_t first_token;
    int32_t tokens;
    int32_t first_member;
    int32_t first_row;
    int32_t rows;          // of the group from first_row on; the kernel takes those of its tile
    int32_t slot;          // from the member's first slot
    int32_t reserved;
};

/// What of a sequence's context is read by groups: its first `tokens` tokens, whose partial results take its first `slots` slots.
struct alignas(8) SharedPart {
    int32_t tokens;
    int32_t slots;
};

/// What the combine kernel needs to know of 16 packed rows of a sequence; `splits` is 0 where there is nothing to combine.
struct alignas(16) DecodeTile {
    int32_t first_slot;
    int32_t splits;
    int32_t first_query;
    uint16_t first_row;
    uint16_t rows;
};

/// `pagedd_attention_decode_plan`: one CTA of 1,024 threads, once per step; its lists serve all layers. Splits are at fixed positions, so that the bits of a
/// row that is in no group depend on its own tokens alone. `pagedd_attention_decode_plan_lanes` cuts so that all CTAs have as much to read, at most 16 packed
/// rows of a sequence (tiles_per_sequence is 1), without `log2_split`.
struct DecodePlanParams {
    const int32_t* starts;      // [sequences + 1]: sequence s owns the tokens [starts[s], starts[s + 1]) of the query and output tensors
    const int32_t* contexts;    // [sequences], each 0 (a padded row: no work) or >= its number of queries
    const int32_t* table_rows;  // [sequences]: the row of PagedKv::tables that is a sequence's; null: its own number. With a table_stride of 1 that is the
                                // entry where its table begins, wherever that is
    DecodeUnit* units;          // [max_units]
    int32_t* lane_counts;       // [lanes]: units of each; unit n of lane j is at j + n * lanes
    DecodeTile* tiles;          // [sequences, tiles_per_sequence]
    int32_t sequences;
    int32_t max_units;          // sum over sequences of ceil(q_len * group / 16) * ceil(context / split) must fit, and as many slots; balanced, as many units as
                                // groups have and lanes * sequences, and a slot for each sequence and lane; and those of groups. Else the kernel traps
    int32_t tiles_per_sequence; // ceil(largest q_len * group / 16): else the kernel traps
    int32_t log2_split;         // a split is 1 << log2_split tokens, 6..=9
    int32_t group;
    int32_t lanes;              // decode's grid is lanes * kv_heads; at most 512
    int32_t max_slots;          // room for partial results
    int32_t reserved;
    // Of groups; all of it unused where `shared_counts` is null. Units are listed before all others. A sequence in a group has one query and at least one
    // token that no group reads.
    const int32_t* shared_counts;    // [2]: units, members
    const SharedPart* shared_parts;  // [sequences]
    const DecodeUnit* shared_units;  // [shared_counts[0]], each a group's; behind them [shared_counts[1]] 32-bit numbers: the sequence of each member
    Member* members;                 // [shared_counts[1]]
};

/// `pagedd_attention_decode_*`: a persistent grid of lanes * kv_heads CTAs; CTA c takes lane c / kv_heads of KV head c % kv_heads.
/// `pagedd_attention_combine_*` after it, with the same parameters, on 256 threads: grid x = sequences * tiles_per_sequence * kv_heads, grid y at will up
/// to rows_per_unit (2,048 / x is good).
struct DecodeParams {
    PagedKv kv;
    Queries queries;
    const DecodeUnit* units;
    const int32_t* lane_counts;
    const DecodeTile* tiles;
    const Member* members;      // as in the plan
    float* partial_out;         // [slots, kv_heads, rows_per_unit, head_dim], sums that are not yet divided
    float* partial_sums;        // [slots, kv_heads, rows_per_unit, 2]: maximum (log2 units), sum of weights
    int32_t max_units;
    int32_t rows_per_unit;      // min(16, group * largest q_len)
};

/// `pagedd_attention_shared_*`, before decode: a CTA for each of `tiles` and each KV head, tiles outermost; a grid may have more.
struct SharedParams {
    PagedKv kv;
    Queries queries;
    const SharedTile* tiles;
    const int32_t* tile_count;  // [1]
    const Member* members;
    float* partial_out;         // as decode's
    float* partial_sums;
    int32_t rows_per_unit;
    int32_t reserved;
};

/// Work of one prefill CTA, for every KV head: packed rows of a sequence from first_row on, at most as many as the kernel's tile has.
struct alignas(16) PrefillUnit {
    int32_t sequence;
    int32_t first_row;
    int32_t rows;          // of the sequence from first_row on; the kernel takes those of its tile
    int32_t past;          // tokens of the sequence before its first query
    int32_t first_query;   // the sequence's first token in the query and output tensors
    int32_t reserved[3];
};

/// `pagedd_attention_prefill_*`: grid = units * kv_heads. The host lists the units that see most tokens first, so that the last CTAs are short.
struct PrefillParams {
    PagedKv kv;
    Queries queries;
    const PrefillUnit* units;
};

static_assert(sizeof(DecodeTile) == 16 && sizeof(PagedKv) == 40 && sizeof(Queries) == 40 && sizeof(DecodeUnit) == 32 && sizeof(PrefillUnit) == 32, "mirrored in Rust");
static_assert(sizeof(DecodePlanParams) == 112 && sizeof(DecodeParams) == 136 && sizeof(PrefillParams) == 88 && sizeof(SharedParams) == 128 && sizeof(SharedTile) == 32, "mirrored in Rust");

}  // namespace pagedd
