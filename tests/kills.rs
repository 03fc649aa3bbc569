//! Parts are killed under load, by a schedule: nothing that was accepted is lost, doubled or changed. `make test-crash` is the
//! long form.

mod tiny;

use pagedd_tests::campaign::{Campaign, seed};
use pagedd_tests::kills::Victim;

#[test]
fn forty_kills_under_load_lose_double_and_change_nothing() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let campaign =
        Campaign { seed: seed(1), strikes: 32, victims: &Victim::ALL, clients: 64, asks: 72, mix: tiny::MIX };
    let hits = campaign.run(&tiny::yaml(folder.path()));
    assert!(hits.total() >= 38, "{hits}");
}
