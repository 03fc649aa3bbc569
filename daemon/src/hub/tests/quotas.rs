//! What requests take of their tenants' quotas, as delivery sees them live and end.

use pagedd_core::Quota;
use pagedd_engine::StepRecord;
use pagedd_sched::Started;

use super::*;

/// Concurrent, waiting, prompt tokens that wait, and tokens of the minute that [`TENANT`] has.
fn taken(bench: &Bench) -> [u64; 4] {
    let quotas =
        [Quota::MaxConcurrent, Quota::MaxQueuedRequests, Quota::MaxQueuedTokens, Quota::TokensPerMinute];
    let account = bench.hub.accounts.of(TENANT);
    quotas.map(|quota| account.standing(quota).1)
}

fn start(bench: &mut Bench) {
    let started = Started { request: REQUEST, tenant: TENANT, cached_tokens: Tokens(0) };
    bench.hub.handle(Message::Step(StepRecord { started: vec![started], ..StepRecord::default() }));
}

/// [`REQUEST`], admitted within the quotas of this hub.
fn admit(bench: &mut Bench) {
    let grant = bench.hub.accounts.of(TENANT).admit(Cost { prompt: 3, output: 10 }).unwrap();
    let (admission, connection) = (Arc::new(admission(TENANT, REQUEST)), ConnectionId(1));
    let spending = grant.accepted();
    bench.hub.handle(Message::Admitted { admission, model: ModelId(0), connection, number: 5, spending });
}

#[test]
fn a_request_takes_of_its_tenants_quotas_from_its_admission_to_its_end() {
    let mut bench = bench();
    admit(&mut bench);
    assert_eq!(taken(&bench), [1, 1, 3, 13]);
    start(&mut bench);
    bench.tokens([7, 8]);
    assert_eq!(taken(&bench), [1, 0, 0, 13], "what is computed was reserved");
    bench.finish();
    assert_eq!(taken(&bench), [0, 0, 0, 5]);
}

#[test]
fn requests_of_an_earlier_daemon_and_of_removed_tenants_take_what_they_may_still_come_to() {
    let mut bench = bench();
    let entries = vec![pagedd_journal::Entry::Token { choice: 0, token: 7 }; 4];
    let admission = admission(TENANT, REQUEST);
    let kept = Kept { admission, entries, finished_unix: None, replays: 0, cached_tokens: Some(0) };
    bench.hub.restore(Some(ModelId(0)), kept);
    assert_eq!(taken(&bench), [1, 0, 0, 6], "what it had computed is recalled elsewhere");
    bench.tokens([9]);
    assert_eq!(taken(&bench), [1, 0, 0, 6]);
    let account = bench.hub.accounts.of(TENANT);
    bench.hub.handle(Message::Forget(TENANT));
    assert_eq!(account.standing(Quota::MaxConcurrent).1, 0);
    assert_eq!(taken(&bench), [0; 4], "the account is gone with the tenant");
}
