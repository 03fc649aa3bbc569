// Sampling: penalties and bias, draws, log-probabilities.
//
// `adjust_logits` changes the few logits that penalties and biases name, `restore_logits` puts them back. `survey` finds the best logit of
// each part and of each group of a row. `draw_whole`, `draw` and `log_softmax_top` weigh the parts, and the last of a row's thread blocks to
// come by draws, or ranks. The few best are found through the groups: at least k logits are as good as the k-th best of the groups' bests.
#include "sample.cuh"

struct Adjustment {
    uint32_t token;
    uint32_t seen;  // in prompt or output
    float output;   // how often in the output
    float bias;
    float original; // the logit before
};

struct AdjustArgs {
    float* logits;                 // [..][stride]
    Adjustment* adjustments;       // of all rows, in order; a row names a token once
    const uint32_t* ends;          // [grid]: where a row's adjustments end
    const float4* penalties;       // [grid]: repetition, frequency, presence
    const uint32_t* rows;          // [grid]: which row of logits
    uint32_t stride;
};

extern "C" __global__ void adjust_logits(const __grid_constant__ AdjustArgs a) {
    const unsigned row = blockIdx.x;
    float* logits = a.logits + size_t(a.rows[row]) * a.stride;
    const float4 penalty = a.penalties[row];
    for (unsigned i = (row ? a.ends[row - 1] : 0) + threadIdx.x; i < a.ends[row]; i += blockDim.x) {
        const Adjustment by = a.adjustments[i];
        a.adjustments[i].original = logits[by.token];
        float x = __fadd_rn(logits[by.token], by.bias);
        if (by.seen) x = x > 0.0f ? __fdiv_rn(x, penalty.x) : __fmul_rn(x, penalty.x);
        x = __fsub_rn(x, __fmul_rn(penalty.y, by.output));
        if (by.output > 0.0f) x = __fsub_rn(x, penalty.z);
        logits[by.token] = x;
    }
}

extern "C" __global__ void restore_logits(const __grid_constant__ AdjustArgs a) {
    const unsigned row = blockIdx.x;
    float* logits = a.logits + size_t(a.rows[row]) * a.stride;
    for (unsigned i = (row ? a.ends[row - 1] : 0) + threadIdx.x; i < a.ends[row]; i += blockDim.x) {
        logits[a.adjustments[i].token] = a.adjustments[i].original;
    }
}

// How one row is drawn from, or ranked.
struct Row {
    float inverse;      // of the temperature; 0 takes the best
    float top_p;        // 1 and more keeps all
    float min_p;        // 0 keeps all
    uint32_t top_k;     // 0 keeps all
    uint32_t seed[2];
    uint32_t choice;
    uint32_t position;
    uint32_t logits_row;
    uint32_t ranks;     // log-probabilities: how many of the best; NONE for no ranking at all

    // Takes the best, or draws from all.
    __device__ __forceinline__ bool whole(unsigned vocabulary) const {
        return inverse == 0.0f || (top_p >= 1.0f && (top_k == 0 || top_k >= vocabulary));
    }
};

struct Drawn {
    uint32_t token; // NONE where a logit is not finite
    uint32_t bad;   // the first such token, or NONE
};

struct Ranked {
    uint32_t token;
    float logprob;
};

struct Best {
    uint64_t key;
    uint32_t bad;
    uint32_t unused;
};

// What the thread blocks of a row leave for the last of them. Zeroed by `survey`; of a row for `draw_whole` from `arrived` on.
struct Sums {
    Mass bucket_masses[BUCKETS];
    uint32_t bucket_counts[BUCKETS];
    Mass chunks[CHUNK]; // by CHUNK logits of the vocabulary
    uint32_t arrived;
    uint32_t unused[3];
};

struct SelectArgs {
    const float* logits; // [..][stride]
    const Row* rows;     // [grid.y]
    Best* best;          // [grid.y][parts]
    uint32_t* maxima;    // [grid.y][MOST_GROUPS]: the best logit of a group, as `order` has it
    Sums* sums;          // [grid.y]
    Sums* more_sums;     // [grid.y], for the survey to zero too; or null
    Drawn* drawn;        // [grid.y]: draws write it, ranking reads it
    float* logprobs;     // [grid.y]: of the token drawn
    Ranked* ranked;      // [grid.y][ranks]
    uint32_t ranks;      // row length of ranked
    uint32_t stride;     // a multiple of 4
    uint32_t vocabulary;
    uint32_t part;       // logits of a part, a multiple of CHUNK
    uint32_t ranked_only; // the survey passes over rows that are not ranked
    uint32_t parts;       // of the survey: its grid.x
};

__device__ __forceinline__ unsigned part_end(const SelectArgs& a) {
    return min(a.vocabulary, (blockIdx.x + 1) * a.part);
}

extern "C" __global__ void __launch_bounds__(THREADS) survey(const __grid_constant__ SelectArgs a) {
    __shared__ uint64_t keys[WARP];
    __shared__ uint32_t bads[WARP];
    const Row row = a.rows[blockIdx.y];
    if (a.ranked_only && row.ranks == NONE) return;
    const float* logits = a.logits + size_t(row.logits_row) * a.stride;
    for (Sums* sums : {a.sums, a.more_sums}) {
        if (!sums) continue;
        uint4* words = reinterpret_cast<uint4*>(&sums[blockIdx.y]);
        // Draws from the whole vocabulary look at no buckets, and write all chunks.
        const bool drawn_whole = sums == a.sums && !a.ranked_only && row.whole(a.vocabulary);
        const unsigned first = drawn_whole ? offsetof(Sums, arrived) / 16 : 0;
        for (unsigned i = first + blockIdx.x * THREADS + threadIdx.x; i < sizeof(Sums) / 16; i += gridDim.x * THREADS) {
            words[i] = make_uint4(0, 0, 0, 0);
        }
    }
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, last = part_end(a);
    uint32_t* maxima = a.maxima + size_t(blockIdx.y) * MOST_GROUPS;
    float top = -INFINITY, odd = 0.0f;
    uint32_t at = NONE;
#pragma unroll 4
    for (unsigned group = blockIdx.x * a.part + warp * GROUP; group < last; group += 4 * THREADS) {
        const unsigned id = group + 4 * lane;
        float most = -INFINITY;
        if (id < last) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(logits + id));
            most = fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
            // Times 0, what is not finite is no number.
            odd = fmaf(four.x, 0.0f, fmaf(four.y, 0.0f, fmaf(four.z, 0.0f, fmaf(four.w, 0.0f, odd))));
            if (most > top) top = most, at = id + (four.x == most ? 0 : four.y == most ? 1 : four.z == most ? 2 : 3);
        }
        const uint32_t best_of_group = __reduce_max_sync(ALL_LANES, order(most));
        if (lane == 0) maxima[group / GROUP] = best_of_group;
    }
    uint64_t best = at == NONE ? ~0ull : key(top, at);
    uint32_t bad = NONE;
    if (odd != 0.0f) {
        for (unsigned group = blockIdx.x * a.part + warp * GROUP; group < last && bad == NONE; group += 4 * THREADS) {
            for (unsigned id = group + 4 * lane; id < min(last, group + 4 * lane + 4); ++id) {
                if (!isfinite(logits[id])) bad = min(bad, id);
            }
        }
    }
    for (unsigned width = WARP / 2; width > 0; width /= 2) {
        best = min(best, __shfl_xor_sync(ALL_LANES, best, width));
        bad = min(bad, __shfl_xor_sync(ALL_LANES, bad, width));
    }
    if (lane == 0) keys[warp] = best, bads[warp] = bad;
    __syncthreads();
    if (threadIdx.x < WARP) {
        best = keys[threadIdx.x], bad = bads[threadIdx.x];
        for (unsigned width = WARP / 2; width > 0; width /= 2) {
            best = min(best, __shfl_xor_sync(ALL_LANES, best, width));
            bad = min(bad, __shfl_xor_sync(ALL_LANES, bad, width));
        }
        if (threadIdx.x == 0) a.best[blockIdx.y * a.parts + blockIdx.x] = Best{best, bad, 0};
    }
}

// What a thread block works with: candidates in their order, or a histogram in three words each.
__shared__ union {
    uint64_t list[CANDIDATES];
    struct {
        uint32_t low[BUCKETS], high[BUCKETS], counts[BUCKETS];
    } digits;
} memory;
__shared__ Tally scratch[WARP];
__shared__ Tally found;
__shared__ uint32_t word;

__device__ __forceinline__ void clear_digits() {
    uint32_t* words = memory.digits.low;
    for (unsigned i = threadIdx.x; i < 3 * BUCKETS; i += THREADS) words[i] = 0;
    __syncthreads();
}
__device__ __forceinline__ void count_digit(unsigned digit, Mass mass) {
    atomicAdd(&memory.digits.counts[digit], 1);
    add_mass(&memory.digits.low[digit], &memory.digits.high[digit], mass);
}
__device__ __forceinline__ Tally digit_tally(unsigned digit) {
    return {Mass(memory.digits.high[digit]) << 32 | memory.digits.low[digit], memory.digits.counts[digit]};
}

// Lists up to so many entries are sorted by counting, and searched by one warp.
constexpr unsigned SHORT = 256;

// Sorts the first `count` entries of the list; what lies behind them, up to a power of two, is lost.
__device__ __noinline__ void sort(unsigned count) {
    uint64_t* list = memory.list;
    if (count <= SHORT) {
        // Four threads count for an entry how many come before it; all are different.
        const unsigned entry = threadIdx.x / 4;
        const uint64_t own = entry < count ? list[entry] : 0;
        unsigned before = 0;
        for (unsigned i = threadIdx.x % 4; i < count; i += 4) before += list[i] < own;
        before += __shfl_xor_sync(ALL_LANES, before, 1);
        before += __shfl_xor_sync(ALL_LANES, before, 2);
        __syncthreads();
        if (entry < count && threadIdx.x % 4 == 0) list[before] = own;
        __syncthreads();
        return;
    }
    unsigned size = 2;
    while (size < count) size *= 2;
    for (unsigned i = count + threadIdx.x; i < size; i += THREADS) list[i] = ~0ull;
    __syncthreads();
    for (unsigned run = 2; run <= size; run *= 2) {
        for (unsigned gap = run / 2; gap > 0; gap /= 2) {
            for (unsigned i = threadIdx.x; i < size / 2; i += THREADS) {
                const unsigned first = (i / gap) * 2 * gap + i % gap;
                const uint64_t x = list[first], y = list[first + gap];
                if ((x > y) == ((first & run) == 0)) list[first] = y, list[first + gap] = x;
            }
            // With a gap up to a warp's width, a warp keeps to 64 entries of its own.
            if (gap > WARP || (gap == 1 && run > WARP)) {
                __syncthreads();
            } else {
                __syncwarp();
            }
        }
    }
    __syncthreads();
}

// A row seen by the last of its thread blocks.
struct Selector {
    const float* logits;
    const uint32_t* maxima;
    unsigned vocabulary;
    Weigh weigh;
    Sums& sums;
    uint32_t listed;    // entries of the list
    uint32_t list_low;  // it holds the buckets [list_low, list_high]
    uint32_t list_high;

    // Fills the list with the candidates that `wanted` takes, best first, looking at the groups whose best logit `near` takes. Whether they
    // are no more than CANDIDATES; else the list is of no use.
    template <class Near, class Wanted> __device__ bool gather(Near near, Wanted wanted) {
        __syncthreads();
        if (threadIdx.x == 0) word = 0;
        __syncthreads();
        for_groups(logits, maxima, vocabulary, near, [&](float logit, unsigned id) {
            if (wanted(logit, id)) {
                const unsigned at = atomicAdd(&word, 1);
                if (at < CANDIDATES) memory.list[at] = key(logit, id);
            }
        });
        __syncthreads();
        listed = word;
        __syncthreads();
        if (listed > CANDIDATES) return false;
        sort(listed);
        return true;
    }

    __device__ __noinline__ void load_buckets(unsigned from, unsigned to) {
        if (from == list_low && to == list_high) return;
        gather([&](float best) { return weigh.bucket(best) <= to; },
               [&](float logit, unsigned) {
                   const unsigned bucket = weigh.bucket(logit);
                   return from <= bucket && bucket <= to;
               });
        list_low = from, list_high = to;
    }

    // Lists the `count` best and some more, where that is quick and possible.
    __device__ __noinline__ bool load_best(unsigned count) {
        const unsigned groups = (vocabulary + GROUP - 1) / GROUP;
        if (4 * count > groups) return false;
        // The largest number, in its high bits, that `count` groups reach. A thread has two groups.
        const uint32_t first = threadIdx.x < groups ? maxima[threadIdx.x] : 0;
        const uint32_t second = threadIdx.x + THREADS < groups ? maxima[threadIdx.x + THREADS] : 0;
        uint32_t least = 0;
        for (int bit = 31; bit >= 12; --bit) {
            const uint32_t more = least | 1u << bit;
            unsigned reached = __syncthreads_count(first >= more);
            if (groups > THREADS) reached += __syncthreads_count(second >= more);
            if (reached >= count) least = more;
        }
        const bool done = gather([&](float best) { return order(best) >= least; },
                                 [&](float logit, unsigned) { return order(logit) >= least; });
        list_low = 0, list_high = done ? BUCKETS : NONE;
        return done;
    }

    // Where the sums over `size` tallies, `at(i)` each, first reach `mass` or `count`, in order. `before` is what comes before them, and
    // becomes what comes before the one found. Returns its index; `size` where the sums never reach.
    template <class At> __device__ unsigned first_to_reach(unsigned size, At at, Mass mass, uint32_t count, Tally& before) {
        const unsigned each = (size + THREADS - 1) / THREADS;
        Tally own = {0, 0};
        for (unsigned i = threadIdx.x * each; i < min(size, (threadIdx.x + 1) * each); ++i) {
            const Tally one = at(i);
            own.mass += one.mass, own.count += one.count;
        }
        const Tally through = block_scan(own, scratch);
        if (threadIdx.x == 0) word = size;
        __syncthreads();
        Tally sum = {before.mass + through.mass - own.mass, before.count + through.count - own.count};
        const bool reached = sum.mass >= mass || sum.count >= count;
        const bool reaches = sum.mass + own.mass >= mass || sum.count + own.count >= count;
        if (!reached && reaches) {
            for (unsigned i = threadIdx.x * each;; ++i) {
                const Tally one = at(i);
                if (sum.mass + one.mass >= mass || sum.count + one.count >= count) {
                    word = i;
                    found = sum;
                    break;
                }
                sum.mass += one.mass, sum.count += one.count;
            }
        }
        __syncthreads();
        const unsigned index = word;
        if (index < size) before = found;
        __syncthreads();
        return index;
    }

    __device__ __noinline__ unsigned bucket_to_reach(Mass mass, uint32_t count, Tally& before) {
        return first_to_reach(
            BUCKETS, [&](unsigned i) { return Tally{__ldcg(&sums.bucket_masses[i]), __ldcg(&sums.bucket_counts[i])}; }, mass,
            count, before);
    }

    // The candidate at which the sums in order reach `mass` or `count`, its mass included in `before`. `limit`: the last bucket that any
    // search of this row comes to.
    __device__ __noinline__ uint64_t candidate_to_reach(Mass mass, uint32_t count, unsigned limit, bool few, Tally& before) {
        before = {0, 0};
        unsigned bucket = 0;
        if (few) {
            load_buckets(0, limit);
        } else {
            bucket = bucket_to_reach(mass, count, before);
            if (bucket >= BUCKETS) return ~0ull;
            if (__ldcg(&sums.bucket_counts[bucket]) > CANDIDATES) {
                narrow(bucket, mass, count, before);
            } else {
                load_buckets(bucket, bucket);
            }
        }
        const unsigned index = first_to_reach(
            listed, [&](unsigned i) { return Tally{weigh.of(logit_of_key(memory.list[i])), 1}; }, mass, count, before);
        if (index >= listed) return ~0ull;
        const uint64_t candidate = memory.list[index];
        before.mass += weigh.of(logit_of_key(candidate));
        before.count += 1;
        return candidate;
    }

    // Lists the candidates of a bucket around the one searched for: digit by digit of their keys, until few enough have the same prefix.
    __device__ __noinline__ void narrow(unsigned bucket, Mass mass, uint32_t count, Tally& before) {
        constexpr unsigned DIGIT = 11;
        uint64_t prefix = 0;
        unsigned shift = 64;
        uint32_t inside = CANDIDATES + 1;
        while (inside > CANDIDATES && shift > 0) {
            const unsigned wide = min(DIGIT, shift), next = shift - wide;
            __syncthreads();
            clear_digits();
            for_logits(logits, 0, vocabulary, [&](float logit, unsigned id) {
                const uint64_t k = key(logit, id);
                if (weigh.bucket(logit) != bucket || (shift < 64 && (k >> shift) != prefix)) return;
                const unsigned digit = unsigned(k >> next) & ((1u << wide) - 1);
                count_digit(digit, weigh.of(logit));
            });
            __syncthreads();
            const unsigned digit = first_to_reach(
                1u << wide, [&](unsigned i) { return digit_tally(i); }, mass, count, before);
            inside = digit < BUCKETS ? memory.digits.counts[digit] : 0;
            prefix = shift < 64 ? prefix << wide | digit : digit;
            shift = next;
            __syncthreads();
        }
        gather([](float) { return true; },
               [&](float logit, unsigned id) {
                   return weigh.bucket(logit) == bucket && (key(logit, id) >> shift) == prefix;
               });
        list_low = list_high = NONE;
    }
};

// A uniform number in [0, 1) with 53 bits, as `uniform` of kernels/src/sample.rs.
__device__ double uniform(const Row& row) {
    constexpr uint32_t PURPOSE_TOKEN = 0;
    const uint4 bits = philox4x32_10(make_uint4(row.position, PURPOSE_TOKEN, row.choice, 0), make_uint2(row.seed[0], row.seed[1]));
    return double((uint64_t(bits.y) << 32 | bits.x) >> 11) * 0x1p-53;
}

// The first mass that exceeds u of the whole; never more than the whole, whatever the rounding.
__device__ Mass target_of(const Row& row, Mass whole) {
    return min(Mass(uniform(row) * double(whole)), whole - 1) + 1;
}

// The sum of all chunks.
__device__ __forceinline__ Mass mass_of_chunks(const Sums& sums, unsigned chunks) {
    Mass own = 0;
    for (unsigned i = threadIdx.x; i < chunks; i += THREADS) own += __ldcg(&sums.chunks[i]);
    block_scan({own, 0}, scratch);
    return scratch[WARP - 1].mass;
}

// Weighs logits by chunk.
template <unsigned BLOCK>
__device__ __forceinline__ void weigh_chunks(const float* logits, unsigned first, unsigned last, Weigh weigh, Sums& sums) {
    constexpr unsigned FLIGHT = CHUNK / GROUP;
    const unsigned lane = threadIdx.x % WARP;
    for (unsigned chunk = first + threadIdx.x / WARP * CHUNK; chunk < last; chunk += BLOCK / WARP * CHUNK) {
        const float* own = logits + chunk + 4 * lane;
        const unsigned left = last - chunk;
        float4 fours[FLIGHT];
#pragma unroll
        for (unsigned i = 0; i < FLIGHT; ++i) {
            if (i * GROUP + 4 * lane < left) fours[i] = __ldg(reinterpret_cast<const float4*>(own + i * GROUP));
        }
        Mass mass = 0;
#pragma unroll
        for (unsigned i = 0; i < FLIGHT; ++i) {
            if (i * GROUP + 4 * lane >= left) break;
            mass += weigh.of(fours[i].x) + weigh.of(fours[i].y) + weigh.of(fours[i].z) + weigh.of(fours[i].w);
        }
        mass = warp_mass(mass);
        if (lane == 0) sums.chunks[chunk / CHUNK] = mass;
    }
}

// Weighs logits by bucket.
__device__ __noinline__ void weigh_buckets(const float* logits, unsigned first, unsigned last, Weigh weigh, Sums& sums) {
    __syncthreads();
    clear_digits();
    // The last bucket holds most of a peaked row: it is counted apart.
    Tally far = {0, 0};
    for_logits(logits, first, last, [&](float logit, unsigned) {
        const unsigned bucket = weigh.bucket(logit);
        const Mass mass = weigh.of(logit);
        if (bucket == BUCKETS - 1) {
            far.mass += mass, far.count += 1;
        } else {
            count_digit(bucket, mass);
        }
    });
    far = {warp_mass(far.mass), __reduce_add_sync(ALL_LANES, far.count)};
    if (threadIdx.x % WARP == 0) {
        atomicAdd(&memory.digits.counts[BUCKETS - 1], far.count);
        add_mass(&memory.digits.low[BUCKETS - 1], &memory.digits.high[BUCKETS - 1], far.mass);
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < BUCKETS; i += THREADS) {
        const Tally tally = digit_tally(i);
        if (tally.count == 0) continue;
        atomicAdd(&sums.bucket_counts[i], tally.count);
        atomicAdd(&sums.bucket_masses[i], tally.mass);
    }
    __syncthreads();
}

// The share of a mass that top_p keeps, rounded up.
__device__ __forceinline__ Mass share(const Row& row, Mass of) {
    return row.top_p < 1.0f ? max(Mass(1), Mass(ceil(double(row.top_p) * double(of)))) : of;
}

// `draw_from_best` where the list is short: one warp, eight entries a lane. `listed`: what may be drawn of it, out of a mass of `whole`; 0
// stands for theirs. Gives NONE in all threads where they do not hold top_p of it.
__device__ __noinline__ uint32_t draw_from_short(const Row& row, Weigh weigh, unsigned listed, Mass whole) {
    constexpr unsigned EACH = SHORT / WARP;
    const unsigned lane = threadIdx.x % WARP;
    Mass masses[EACH], own = 0;
#pragma unroll
    for (unsigned i = 0; i < EACH; ++i) {
        const unsigned at = lane * EACH + i;
        masses[i] = at < listed ? weigh.of(logit_of_key(memory.list[at])) : 0;
        own += masses[i];
    }
    Mass through = own;
    for (unsigned width = 1; width < WARP; width *= 2) {
        const Mass mass = __shfl_up_sync(ALL_LANES, through, width);
        if (lane >= width) through += mass;
    }
    // Where the sums first reach `mass`, and what they are there.
    unsigned index = 0;
    const auto reach = [&](Mass mass) {
        Mass sum = through - own;
        const bool here = sum < mass && through >= mass;
        unsigned at = lane * EACH;
#pragma unroll
        for (unsigned i = 0; i < EACH; ++i) {
            if (sum < mass) sum += masses[i], at = lane * EACH + i;
        }
        const unsigned source = max(__ffs(__ballot_sync(ALL_LANES, here)), 1) - 1;
        index = __shfl_sync(ALL_LANES, at, source);
        return __shfl_sync(ALL_LANES, sum, source);
    };
    const Mass all = __shfl_sync(ALL_LANES, through, WARP - 1);
    const Mass target = share(row, whole ? whole : all);
    if (all < target) return NONE;
    reach(target_of(row, reach(target)));
    return uint32_t(memory.list[index]);
}

// A draw from the fewest of the top_k best that hold top_p of their mass. `listed`: the list holds the top_k best already.
__device__ __noinline__ uint32_t draw_from_best(const SelectArgs& a, const Row& row, Selector& s, bool listed) {
    const bool cut = row.top_k != 0 && row.top_k < a.vocabulary;
    Tally before = {0, 0}, kept = {0, 0};
    // The last bucket that matters, and whether the candidates up to it can be listed at once.
    unsigned limit = BUCKETS;
    bool few = true;
    if (!listed) {
        Mass own = 0;
        for (unsigned i = threadIdx.x; i < BUCKETS; i += THREADS) own += __ldcg(&s.sums.bucket_masses[i]);
        block_scan({own, 0}, scratch);
        kept.mass = scratch[WARP - 1].mass;
        limit = min(s.bucket_to_reach(cut ? ~0ull : share(row, kept.mass), cut ? row.top_k : NONE, before), BUCKETS - 1);
        few = before.count + __ldcg(&s.sums.bucket_counts[limit]) <= CANDIDATES;
    }
    if (cut) s.candidate_to_reach(~0ull, row.top_k, limit, few, kept);
    if (row.top_p < 1.0f) s.candidate_to_reach(share(row, kept.mass), NONE, limit, few, kept);
    return uint32_t(s.candidate_to_reach(target_of(row, kept.mass), NONE, limit, few, before));
}

// A draw from the fewest that hold top_p of all.
__device__ __noinline__ uint32_t draw_from_nucleus(const SelectArgs& a, const Row& row, Selector& s) {
    constexpr unsigned FIRST_TRIED = 64;
    const Mass whole = mass_of_chunks(s.sums, (a.vocabulary + CHUNK - 1) / CHUNK);
    if (s.load_best(FIRST_TRIED) && s.listed <= SHORT) {
        const uint32_t token = draw_from_short(row, s.weigh, s.listed, whole);
        if (token != NONE) return token;
    }
    weigh_buckets(s.logits, 0, a.vocabulary, s.weigh, s.sums);
    s.list_low = s.list_high = NONE;
    return draw_from_best(a, row, s, false);
}

// Log-probabilities of the token drawn and of the best.
__device__ __noinline__ void rank(const SelectArgs& a, const Row& row, Selector& s) {
    const Mass whole = mass_of_chunks(s.sums, (a.vocabulary + CHUNK - 1) / CHUNK);
    const double norm = double(s.weigh.top) + log(double(whole) / double(MASS_ONE));
    const uint32_t token = a.drawn[blockIdx.y].token;
    if (threadIdx.x == 0) {
        a.logprobs[blockIdx.y] = token < a.vocabulary ? float(double(s.logits[token]) - norm) : nanf("");
    }
    const unsigned ranks = min(row.ranks, a.vocabulary);
    if (ranks == 0) return;
    if (!s.load_best(ranks)) {
        weigh_buckets(s.logits, 0, a.vocabulary, s.weigh, s.sums);
        Tally before = {0, 0};
        const unsigned limit = s.bucket_to_reach(~0ull, ranks, before);
        const bool few = before.count + __ldcg(&s.sums.bucket_counts[limit]) <= CANDIDATES;
        const uint64_t last = s.candidate_to_reach(~0ull, ranks, limit, few, before);
        if (!few) s.gather([](float) { return true; }, [&](float logit, unsigned id) { return key(logit, id) <= last; });
    }
    for (unsigned i = threadIdx.x; i < ranks; i += THREADS) {
        const uint64_t candidate = memory.list[i];
        a.ranked[size_t(blockIdx.y) * a.ranks + i] =
            Ranked{uint32_t(candidate), float(double(logit_of_key(candidate)) - norm)};
    }
}

// What the survey found of a row, in all lanes of a warp.
__device__ __forceinline__ Best surveyed(const SelectArgs& a) {
    // A row has at most as many parts as a warp has lanes.
    const unsigned lane = threadIdx.x % WARP;
    Best best = lane < a.parts ? a.best[blockIdx.y * a.parts + lane] : Best{~0ull, NONE, 0};
    best.bad = __reduce_min_sync(ALL_LANES, best.bad);
    for (unsigned width = WARP / 2; width > 0; width /= 2) best.key = min(best.key, __shfl_xor_sync(ALL_LANES, best.key, width));
    return best;
}

// Where a warp's sums over `size` masses, `at(i)` each, first reach `target(their sum)`, with `before` before them; `before` becomes what comes
// before the one found. They do reach it.
template <class At, class Target> __device__ __forceinline__ unsigned warp_reach(unsigned size, At at, Target target, Mass& before) {
    const unsigned lane = threadIdx.x % WARP, each = (size + WARP - 1) / WARP;
    const unsigned first = min(size, lane * each), last = min(size, first + each);
    Mass own = 0;
    for (unsigned i = first; i < last; ++i) own += at(i);
    Mass through = own;
    for (unsigned width = 1; width < WARP; width *= 2) {
        const Mass mass = __shfl_up_sync(ALL_LANES, through, width);
        if (lane >= width) through += mass;
    }
    const Mass wanted = target(__shfl_sync(ALL_LANES, through, WARP - 1));
    Mass sum = before + through - own;
    const unsigned source = max(__ffs(__ballot_sync(ALL_LANES, sum + own >= wanted)), 1) - 1;
    unsigned index = first;
    if (lane == source) {
        for (; index + 1 < last; ++index) {
            const Mass next = sum + at(index);
            if (next >= wanted) break;
            sum = next;
        }
    }
    before = __shfl_sync(ALL_LANES, sum, source);
    return __shfl_sync(ALL_LANES, index, source);
}

// Threads of a block of `draw_whole`, and blocks of a multiprocessor, as kernels/src/cuda/sample.rs has them: many small ones hide how long the
// draw at a row's end takes.
constexpr unsigned WHOLE_THREADS = 256, WHOLE_BLOCKS = 6;

// Rows that take the best, or draw from the whole vocabulary in the order of ids.
extern "C" __global__ void __launch_bounds__(WHOLE_THREADS, WHOLE_BLOCKS) draw_whole(const __grid_constant__ SelectArgs a) {
    const Row row = a.rows[blockIdx.y];
    if (!row.whole(a.vocabulary)) return;
    const auto best = surveyed(a);
    if (best.bad != NONE || row.inverse == 0.0f) {
        if (blockIdx.x == 0 && threadIdx.x == 0) a.drawn[blockIdx.y] = Drawn{best.bad == NONE ? uint32_t(best.key) : NONE, best.bad};
        return;
    }
    const float* logits = a.logits + size_t(row.logits_row) * a.stride;
    const Weigh weigh = {logit_of_key(best.key), row.inverse, row.min_p};
    Sums& sums = a.sums[blockIdx.y];
    weigh_chunks<WHOLE_THREADS>(logits, blockIdx.x * a.part, part_end(a), weigh, sums);
    __threadfence();
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    const uint32_t arrived = threadIdx.x == 0 ? atomicAdd(&sums.arrived, 1) : 0;
    if (__shfl_sync(ALL_LANES, arrived, 0) != gridDim.x - 1) return;
    __threadfence();
    Mass target = 0, before = 0;
    const unsigned chunk = warp_reach(
        (a.vocabulary + CHUNK - 1) / CHUNK, [&](unsigned i) { return __ldcg(&sums.chunks[i]); },
        [&](Mass whole) { return target = target_of(row, whole); }, before);
    const unsigned first = chunk * CHUNK;
    const unsigned token = first + warp_reach(
        min(CHUNK, a.vocabulary - first), [&](unsigned i) { return weigh.of(logits[first + i]); }, [&](Mass) { return target; }, before);
    if (threadIdx.x == 0) a.drawn[blockIdx.y] = Drawn{token, NONE};
}

template <bool RANK> __device__ __forceinline__ void select_row(const SelectArgs& a) {
    Row row = a.rows[blockIdx.y];
    if (RANK && row.ranks == NONE) return;
    if (!RANK && row.whole(a.vocabulary)) return;
    if (RANK) row.inverse = 1.0f, row.min_p = 0.0f;
    const float* logits = a.logits + size_t(row.logits_row) * a.stride;
    const auto best = surveyed(a);
    if (best.bad != NONE) {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            if (!RANK) {
                a.drawn[blockIdx.y] = Drawn{NONE, best.bad};
            } else {
                a.logprobs[blockIdx.y] = nanf("");
            }
        }
        return;
    }
    const Weigh weigh = {logit_of_key(best.key), row.inverse, row.min_p};
    Sums& sums = a.sums[blockIdx.y];
    const uint32_t* maxima = a.maxima + size_t(blockIdx.y) * MOST_GROUPS;
    Selector s = {logits, maxima, a.vocabulary, weigh, sums, 0, NONE, NONE};

    // The few best need no weights of the rest: one block finds them.
    const bool quick = !RANK && row.top_k != 0 && row.top_k < a.vocabulary && 4 * row.top_k * GROUP <= a.vocabulary;
    if (quick) {
        if (blockIdx.x != 0) return;
        const bool listed = s.load_best(row.top_k);
        if (!listed) weigh_buckets(logits, 0, a.vocabulary, weigh, sums);
        const bool is_short = listed && s.listed <= SHORT;
        const uint32_t token = is_short ? draw_from_short(row, weigh, row.top_k, 0) : draw_from_best(a, row, s, listed);
        if (threadIdx.x == 0) a.drawn[blockIdx.y] = Drawn{token, NONE};
        return;
    }
    // top_p alone, as a rule, keeps few as well: those are tried before the histogram.
    const bool by_chunk = RANK || row.top_k == 0 || row.top_k >= a.vocabulary;
    if (by_chunk) {
        weigh_chunks<THREADS>(logits, blockIdx.x * a.part, part_end(a), weigh, sums);
    } else {
        weigh_buckets(logits, blockIdx.x * a.part, part_end(a), weigh, sums);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) word = atomicAdd(&sums.arrived, 1);
    __syncthreads();
    if (word != gridDim.x - 1) return;
    __threadfence();
    if (RANK) {
        rank(a, row, s);
    } else {
        const uint32_t token = by_chunk ? draw_from_nucleus(a, row, s) : draw_from_best(a, row, s, false);
        if (threadIdx.x == 0) a.drawn[blockIdx.y] = Drawn{token, NONE};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) draw(const __grid_constant__ SelectArgs a) { select_row<false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) log_softmax_top(const __grid_constant__ SelectArgs a) { select_row<true>(a); }
