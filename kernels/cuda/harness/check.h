// Correctness of the attention kernels against float64.
#pragma once

namespace harness {

/// Every kernel on many shapes, and the promises about bits. Returns the number of failures.
int check_decode_kernels();
int check_prefill_kernels();
int check_hopper_kernels();
/// Decode of sequences that share blocks.
int check_group_kernels();
/// Every kernel on the smallest shape that reaches all of its code: for compute-sanitizer.
int check_minimal();
/// A shared-memory race on purpose, to see that racecheck would report one.
void planted_race();

}  // namespace harness
