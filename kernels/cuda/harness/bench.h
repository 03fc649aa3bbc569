// Speed of the attention kernels on working sets several times the L2 cache.
#pragma once

namespace harness {

/// The card's ceilings: a device-to-device copy and a kernel that only reads.
void bench_ceilings();
/// Decode in CUDA graphs, each node another layer. `variants`: other tile sizes, splits and grids of head_dim 128 beside the entry points.
void bench_decode(bool variants);
/// Decode of sequences that share blocks, with and without groups.
void bench_groups();
void bench_prefill(bool variants);
/// Prefill with the kernels for sm_90a.
void bench_hopper(bool variants);
/// A few launches of the llama-3-8b shape, for a profiler.
void profile_decode();
void profile_prefill(bool hopper);

}  // namespace harness
