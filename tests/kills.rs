//! Parts are killed under load, by a schedule: nothing that was accepted is lost, doubled or changed. `make test-crash` is the
//! long form.

mod tiny;

use pagedd_tests::campaign::{Campaign, seed};
use pagedd_tests::kills::Victim;

#[test]
fn forty_kills_under_load_lose_double_and_change_nothing() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let (victims, mix) = (&Victim::ALL, tiny::MIX);
    let campaign = Campaign { seed: seed(1), strikes: 32, victims, clients: 64, asks: 72, mix, depth: None };
    let hits = campaign.run(&tiny::yaml(folder.path()));
    assert!(hits.total() >= 38, "{hits}");
}

#[test]
fn twenty_four_kills_while_workers_have_two_plans_at_a_time_lose_double_and_change_nothing() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let (victims, mix) = (&[Victim::Worker, Victim::Daemon], tiny::MIX);
    let campaign =
        Campaign { seed: seed(2), strikes: 20, victims, clients: 64, asks: 48, mix, depth: Some(2) };
    let hits = campaign.run(&tiny::yaml(folder.path()));
    assert!(hits.total() >= 24, "{hits}");
}
