#!/usr/bin/env bash
# The worker's tests of a GPU, with SmolLM2: distances to the float32 path, takeover of arenas, plans run twice, and bits with `deterministic`.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PAGEDD_REPOSITORY=$here
export PAGEDD_TEST_MODEL=${PAGEDD_TEST_MODEL:-$here/models/SmolLM2-135M-Instruct.Q4_1.gguf}
exec "$here/bin/worker_tests" --nocapture --test-threads=1 gpu::
