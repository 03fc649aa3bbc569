//! The long form of the crash test: `make test-crash`.
//!
//! `--kills N` on the generated model (1,000 by default), `--real-kills N` on the real one (30), `--victims worker,gateway`
//! to leave some alone, `--depth 2` for workers that are given the next plan while they have one, as on a GPU. `PAGEDD_SEED` reproduces a run.

#[path = "../tiny.rs"]
mod tiny;

use std::time::{SystemTime, UNIX_EPOCH};

use pagedd_tests::asks::Mix;
use pagedd_tests::campaign::{Campaign, seed};
use pagedd_tests::daemon::smollm2_yaml;
use pagedd_tests::kills::Victim;

const REAL: Mix<'static> = Mix { model: "smollm2", words: 300, tokens: 64 };

fn main() {
    let mut strikes = [1000, 30];
    let mut victims = Victim::ALL.to_vec();
    let mut depth = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(option) = arguments.next() {
        let value = arguments.next().unwrap_or_else(|| panic!("{option} needs a value"));
        match option.as_str() {
            "--kills" => strikes[0] = value.parse().expect("--kills is a number"),
            "--real-kills" => strikes[1] = value.parse().expect("--real-kills is a number"),
            "--victims" => {
                victims.retain(|v| value.split(',').any(|name| format!("{v:?}").to_lowercase() == name));
            }
            "--depth" => depth = Some(value.parse().expect("--depth is a number")),
            _ => panic!("{option} is none of --kills, --real-kills, --victims, --depth"),
        }
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let seed = seed(now);
    let folder = tempfile::tempdir().expect("a folder for the model");
    if strikes[0] > 0 {
        println!("== generated model, 64 clients");
        let mix = tiny::MIX;
        let campaign =
            Campaign { seed, strikes: strikes[0], victims: &victims, clients: 64, asks: 96, mix, depth };
        campaign.run(&tiny::yaml(folder.path()));
    }
    if strikes[1] > 0 {
        println!("== SmolLM2-135M, 16 clients");
        let campaign = Campaign {
            seed,
            strikes: strikes[1],
            victims: &victims,
            clients: 16,
            asks: 24,
            mix: REAL,
            depth,
        };
        campaign.run(&smollm2_yaml());
    }
}
