// Checks and benchmarks of the attention kernels on the card that is there: `attention_harness MODE`.
#include <cstdio>
#include <cstring>

#include "bench.h"
#include "check.h"
#include "support.h"

namespace {

int verdict(int failures) {
    std::printf("%s: %d failures\n", failures == 0 ? "ok" : "FAILED", failures);
    return failures == 0 ? 0 : 1;
}

int usage() {
    std::fprintf(stderr,
                 "usage: attention_harness MODE\n"
                 "  check-decode, check-groups, check-prefill, check-hopper   every kernel against float64, and its promises about bits\n"
                 "  check-minimal                 the smallest shapes, for compute-sanitizer\n"
                 "  planted-race                  a race that racecheck must report\n"
                 "  ceilings                      copy and read bandwidth\n"
                 "  groups                        decode of sequences that share blocks\n"
                 "  decode, prefill, hopper       benchmarks of the entry points; hopper: prefill with wgmma\n"
                 "  decode-variants, prefill-variants, hopper-variants   other tile sizes\n"
                 "  profile-decode, profile-prefill, profile-hopper   three launches, for ncu\n");
    return 2;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        return usage();
    }
    const char* mode = argv[1];
    const auto is = [&](const char* name) { return std::strcmp(mode, name) == 0; };
    if (is("check-decode")) {
        return verdict(harness::check_decode_kernels());
    }
    if (is("check-groups")) {
        return verdict(harness::check_group_kernels());
    }
    if (is("check-prefill")) {
        return verdict(harness::check_prefill_kernels());
    }
    if (is("check-hopper")) {
        return verdict(harness::check_hopper_kernels());
    }
    if (is("check-minimal")) {
        return verdict(harness::check_minimal());
    }
    if (is("planted-race")) {
        harness::planted_race();
    } else if (is("ceilings")) {
        harness::bench_ceilings();
    } else if (is("decode") || is("decode-variants")) {
        harness::bench_decode(is("decode-variants"));
    } else if (is("groups")) {
        harness::bench_groups();
    } else if (is("prefill") || is("prefill-variants")) {
        harness::bench_prefill(is("prefill-variants"));
    } else if (is("hopper") || is("hopper-variants")) {
        harness::bench_hopper(is("hopper-variants"));
    } else if (is("profile-decode")) {
        harness::profile_decode();
    } else if (is("profile-prefill")) {
        harness::profile_prefill(false);
    } else if (is("profile-hopper")) {
        harness::profile_prefill(true);
    } else {
        return usage();
    }
    return 0;
}
