//! How long clients wait when parts die: `make bench-crash`.
//!
//! Four streams of the real model; `--kills N` workers and as many daemons are killed (100 by default).

use pagedd_tests::asks::Mix;
use pagedd_tests::campaign::seed;
use pagedd_tests::daemon::smollm2_yaml;
use pagedd_tests::gaps::measure;

const MIX: Mix<'static> = Mix { model: "smollm2", words: 40, tokens: 512 };

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let kills = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => 100,
        ["--kills", count] => count.parse().expect("--kills is a number"),
        _ => panic!("the only option is --kills N"),
    };
    // Guesses that come true make several tokens one step: the median gap would be that within a step.
    let yaml = smollm2_yaml() + "    prompt_lookup: false\n";
    measure(&yaml, MIX, seed(1), kills);
}
