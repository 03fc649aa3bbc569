//! Accounts over made-up time.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::account::{Account, Charge};
use super::window::{SLOT_US, Window};
use super::*;

const SECOND: u64 = 1_000_000;

fn limits(set: &[(Quota, u64)]) -> Quotas {
    let mut quotas = Quotas::default();
    for (quota, limit) in set {
        quotas.set(*quota, Some(*limit));
    }
    quotas
}

fn account(set: &[(Quota, u64)]) -> Account {
    let mut account = Account::default();
    account.set(limits(set));
    account
}

fn cost(prompt: u64, output: u64) -> Cost {
    Cost { prompt, output }
}

fn wait_of(refused: Result<Charge, Excess>) -> (Quota, u64) {
    match refused {
        Err(Excess::Later { quota, wait_us, .. }) => (quota, wait_us),
        other => panic!("not for later: {other:?}"),
    }
}

#[test]
fn a_minutes_requests_are_admitted_and_the_next_one_when_it_is_told() {
    let mut account = account(&[(Quota::RequestsPerMinute, 3)]);
    let start = 7 * SECOND;
    let charges: Vec<Charge> =
        (0..3).map(|i| account.admit(start + i * SECOND, cost(1, 1)).unwrap()).collect();
    let now = start + 10 * SECOND;
    let (quota, wait) = wait_of(account.admit(now, cost(1, 1)));
    assert_eq!(quota, Quota::RequestsPerMinute);
    assert!((50 * SECOND..=50 * SECOND + SLOT_US).contains(&wait), "{wait}");
    wait_of(account.admit(now + wait - 1, cost(1, 1)));
    let next = account.admit(now + wait, cost(1, 1)).unwrap();
    wait_of(account.admit(now + wait, cost(1, 1)));
    charges.into_iter().chain([next]).for_each(|charge| account.end(now + wait, charge));
}

#[test]
fn a_request_takes_all_it_can_come_to_and_gives_back_what_it_did_not() {
    let mut account = account(&[(Quota::TokensPerMinute, 100)]);
    let mut first = account.admit(0, cost(20, 60)).unwrap();
    let (quota, _) = wait_of(account.admit(0, cost(10, 11)));
    assert_eq!(quota, Quota::TokensPerMinute);
    account.start(SECOND, &mut first);
    account.spend(2 * SECOND, &mut first, 5);
    assert_eq!(account.used(2 * SECOND, Quota::TokensPerMinute), 80);
    account.end(3 * SECOND, first);
    assert_eq!(account.used(3 * SECOND, Quota::TokensPerMinute), 25, "20 of the prompt, 5 generated");
    let second = account.admit(3 * SECOND, cost(10, 65)).unwrap();
    account.refund(second);
    assert_eq!(account.used(3 * SECOND, Quota::TokensPerMinute), 25);
    assert_eq!(account.used(3 * SECOND, Quota::RequestsPerMinute), 1, "a refund is as if it had not come");
    assert_eq!(account.used(62 * SECOND + SLOT_US, Quota::TokensPerMinute), 0);
}

#[test]
fn what_the_window_keeps_whoever_ends_is_waited_for() {
    let mut account = account(&[(Quota::TokensPerMinute, 4000)]);
    let mut first = account.admit(0, cost(1, 3000)).unwrap();
    account.start(0, &mut first);
    account.spend(0, &mut first, 3000);
    account.end(SECOND, first);
    let running = account.admit(SECOND, cost(1, 800)).unwrap();
    let (quota, wait) = wait_of(account.admit(2 * SECOND, cost(1, 3900)));
    assert_eq!(quota, Quota::TokensPerMinute);
    assert!(
        (58 * SECOND..=58 * SECOND + SLOT_US).contains(&wait),
        "{wait}: 3,001 of 4,000 stay for the minute"
    );
    account.end(2 * SECOND, running);
    let asked = account.admit(2 * SECOND + wait, cost(1, 3900)).expect("it is true");
    account.end(2 * SECOND + wait, asked);
}

#[test]
fn what_alone_is_more_than_a_quota_is_never_taken() {
    let mut account = account(&[(Quota::TokensPerMinute, 100), (Quota::MaxQueuedTokens, 30)]);
    let never = |quota, limit, asked| Excess::Never { quota, limit, asked };
    assert_eq!(account.admit(0, cost(20, 81)).unwrap_err(), never(Quota::TokensPerMinute, 100, 101));
    assert_eq!(account.admit(0, cost(31, 1)).unwrap_err(), never(Quota::MaxQueuedTokens, 30, 31));
    assert_eq!(account.standing(0, Quota::TokensPerMinute), (Some(100), 0, 1));
}

#[test]
fn queue_caps_count_what_has_not_started() {
    let mut account =
        account(&[(Quota::MaxQueuedRequests, 2), (Quota::MaxQueuedTokens, 10), (Quota::MaxConcurrent, 3)]);
    let mut first = account.admit(0, cost(5, 1)).unwrap();
    assert_eq!(wait_of(account.admit(0, cost(6, 1))).0, Quota::MaxQueuedTokens);
    let mut second = account.admit(0, cost(5, 1)).unwrap();
    assert_eq!(wait_of(account.admit(0, cost(1, 1))).0, Quota::MaxQueuedRequests);
    account.start(SECOND, &mut first);
    account.start(SECOND, &mut second);
    account.start(SECOND, &mut second);
    let third = account.admit(SECOND, cost(9, 1)).unwrap();
    assert_eq!(wait_of(account.admit(SECOND, cost(1, 1))).0, Quota::MaxConcurrent);
    account.end(SECOND, first);
    assert_eq!(account.used(SECOND, Quota::MaxConcurrent), 2);
    account.end(SECOND, second);
    account.end(SECOND, third);
    for quota in [Quota::MaxConcurrent, Quota::MaxQueuedRequests, Quota::MaxQueuedTokens] {
        assert_eq!(account.used(SECOND, quota), 0, "{quota}");
    }
}

#[test]
fn limits_that_change_count_what_was_used_before() {
    let mut account = account(&[]);
    let charges: Vec<Charge> = (0..5).map(|_| account.admit(0, cost(1, 1)).unwrap()).collect();
    account.set(limits(&[(Quota::RequestsPerMinute, 5)]));
    assert_eq!(wait_of(account.admit(SECOND, cost(1, 1))).0, Quota::RequestsPerMinute);
    account.set(limits(&[(Quota::RequestsPerMinute, 6)]));
    let sixth = account.admit(SECOND, cost(1, 1)).unwrap();
    charges.into_iter().chain([sixth]).for_each(|charge| account.end(SECOND, charge));
}

/// Requests of one queue, each served for so long, one after the other; the cap is full all the time. What is told is off by less than
/// a third of a service, whenever it is asked.
#[test]
fn the_wait_for_a_place_in_a_queue_is_as_long_as_it_is_told() {
    for service in [SECOND / 5, 3 * SECOND, 40 * SECOND] {
        let mut account = account(&[(Quota::MaxQueuedRequests, 4)]);
        let mut now = SECOND;
        let mut queue: VecDeque<Charge> = (0..4).map(|_| account.admit(now, cost(8, 8)).unwrap()).collect();
        for round in 0..40 {
            for part in 0..4 {
                let asked = now + service * part / 4;
                let (_, wait) = wait_of(account.admit(asked, cost(8, 8)));
                let real = now + service - asked;
                // The first has nothing to go by.
                let error = wait.abs_diff(real);
                assert!(
                    round == 0 || error * 10 <= service * 3,
                    "{service}: {wait} for {real} in round {round}"
                );
            }
            now += service;
            let mut next = queue.pop_front().unwrap();
            account.start(now, &mut next);
            account.end(now, next);
            queue.push_back(account.admit(now, cost(8, 8)).unwrap());
        }
        for charge in queue {
            account.end(now, charge);
        }
    }
}

#[test]
fn an_idle_hour_says_nothing_of_a_queues_pace() {
    let mut account = account(&[(Quota::MaxQueuedRequests, 1)]);
    let mut now = SECOND;
    for _ in 0..20 {
        let mut charge = account.admit(now, cost(1, 1)).unwrap();
        now += 2 * SECOND;
        account.start(now, &mut charge);
        account.end(now, charge);
        now += 3600 * SECOND;
    }
    let waits = account.admit(now, cost(1, 1)).unwrap();
    let (_, wait) = wait_of(account.admit(now, cost(1, 1)));
    assert_eq!(wait, 2 * SECOND);
    account.end(now, waits);
}

#[test]
fn dropped_grants_count_for_nothing_and_dropped_spendings_have_ended() {
    let accounts = Accounts::default();
    let (one, two) = (accounts.of(TenantId(1)), accounts.of(TenantId(2)));
    one.set(limits(&[(Quota::MaxConcurrent, 1)]));
    let grant = one.admit(cost(3, 4)).unwrap();
    assert!(accounts.of(TenantId(1)).admit(cost(3, 4)).is_err(), "it is one account");
    two.admit(cost(3, 4)).unwrap().accepted().start();
    drop(grant);
    let mut spending = one.admit(cost(3, 4)).unwrap().accepted();
    spending.start();
    spending.spend(2);
    assert_eq!(one.standing(Quota::TokensPerMinute), (None, 7, 0));
    drop(spending);
    assert_eq!(one.standing(Quota::TokensPerMinute), (None, 5, 0));
    assert_eq!(one.standing(Quota::MaxConcurrent), (Some(1), 0, 1));
    assert_eq!(one.standing(Quota::RequestsPerMinute).1, 1);
}

#[test]
fn what_was_used_before_a_daemon_counts_until_its_minute_is_over() {
    let accounts = Accounts::default();
    let one = accounts.of(TenantId(1));
    one.set(limits(&[(Quota::RequestsPerMinute, 10), (Quota::TokensPerMinute, 1000)]));
    one.recall(75, 9, 900);
    one.recall(20, 3, 300);
    let live = one.resume(cost(100, 50), true);
    one.recall(0, 1, 120);
    let rates = one.rates();
    assert_eq!(rates.requests.map(|rate| (rate.limit, rate.remaining)), Some((10, 6)));
    assert_eq!(rates.tokens.map(|rate| (rate.limit, rate.remaining)), Some((1000, 530)));
    drop(live);
    assert_eq!(one.rates().tokens.map(|rate| rate.remaining), Some(580), "what it did not use is free");
}

/// What happens to an account.
#[derive(Clone, Debug)]
enum Act {
    Pass(u64),
    Ask(u64, u64),
    Start(usize),
    Spend(usize, u64),
    End(usize),
    Refund(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0..20 * SECOND).prop_map(Act::Pass),
        6 => (1..40u64, 1..60u64).prop_map(|(prompt, output)| Act::Ask(prompt, output)),
        4 => any::<usize>().prop_map(Act::Start),
        6 => (any::<usize>(), 1..30u64).prop_map(|(which, tokens)| Act::Spend(which, tokens)),
        3 => any::<usize>().prop_map(Act::End),
        1 => any::<usize>().prop_map(Act::Refund),
    ]
}

/// A request under way, with what it may still generate.
struct Live {
    charge: Charge,
    at: u64,
    started: bool,
    prompt: u64,
    left: u64,
}

proptest! {
    /// No minute, wherever it begins, has more requests or computed tokens than the quotas; and a wait that is told for a full window is
    /// true: nothing is admitted before, and at that moment it is.
    #[test]
    fn no_minute_has_more_than_the_quotas(acts in prop::collection::vec(act(), 1..200)) {
        let (most_requests, most_tokens) = (6, 200);
        let set = [
            (Quota::RequestsPerMinute, most_requests),
            (Quota::TokensPerMinute, most_tokens),
            (Quota::MaxConcurrent, 4),
            (Quota::MaxQueuedRequests, 3),
            (Quota::MaxQueuedTokens, 60),
        ];
        let mut account = account(&set);
        let mut now = 100 * SECOND;
        let mut live: Vec<Live> = Vec::new();
        let (mut requests, mut tokens): (Vec<u64>, Vec<(u64, u64)>) = (Vec::new(), Vec::new());
        for act in acts {
            let pick = |which: usize| which % live.len().max(1);
            match act {
                Act::Pass(time) => now += time,
                Act::Ask(prompt, output) => match account.admit(now, cost(prompt, output)) {
                    Ok(charge) => {
                        requests.push(now);
                        live.push(Live { charge, at: now, started: false, prompt, left: output });
                    }
                    Err(Excess::Later { quota: Quota::RequestsPerMinute, wait_us, .. }) => {
                        // Requests alone decide: what is reserved may hold it up for longer.
                        let recent = |at: &&u64| **at + MINUTE_US > now + wait_us;
                        prop_assert!((requests.iter().filter(recent).count() as u64) < most_requests);
                        let before = (now + wait_us).saturating_sub(SLOT_US + 1);
                        let recent = |at: &&u64| **at + MINUTE_US > before;
                        prop_assert!(requests.iter().filter(recent).count() as u64 >= most_requests);
                    }
                    Err(Excess::Later { .. }) => {}
                    Err(never @ Excess::Never { .. }) => prop_assert!(false, "{never:?}"),
                },
                Act::Start(which) => {
                    let which = pick(which);
                    if let Some(one) = live.get_mut(which).filter(|one| !one.started) {
                        account.start(now, &mut one.charge);
                        tokens.push((now, one.prompt));
                        one.started = true;
                    }
                }
                Act::Spend(which, amount) => {
                    let which = pick(which);
                    if let Some(one) = live.get_mut(which).filter(|one| one.started) {
                        let amount = amount.min(one.left);
                        account.spend(now, &mut one.charge, amount);
                        tokens.push((now, amount));
                        one.left -= amount;
                    }
                }
                Act::End(which) if !live.is_empty() => {
                    let which = pick(which);
                    account.end(now, live.swap_remove(which).charge);
                }
                Act::Refund(which) if !live.is_empty() => {
                    let which = pick(which);
                    if !live[which].started {
                        let one = live.swap_remove(which);
                        account.refund(one.charge);
                        let at = requests.iter().position(|at| *at == one.at).unwrap();
                        requests.swap_remove(at);
                    }
                }
                Act::End(_) | Act::Refund(_) => {}
            }
            let within = |at: u64| at + MINUTE_US > now;
            let made = requests.iter().filter(|at| within(**at)).count() as u64;
            let used: u64 = tokens.iter().filter(|(at, _)| within(*at)).map(|(_, amount)| amount).sum();
            prop_assert!(made <= most_requests, "{made} requests in a minute");
            prop_assert!(used <= most_tokens, "{used} tokens in a minute");
            prop_assert_eq!(account.used(now, Quota::MaxConcurrent), live.len() as u64);
            let queued: u64 = live.iter().filter(|one| !one.started).map(|one| one.prompt).sum();
            prop_assert_eq!(account.used(now, Quota::MaxQueuedTokens), queued);
        }
        for one in live.drain(..) {
            account.end(now, one.charge);
        }
        let later = now + MINUTE_US + SLOT_US;
        for (quota, _) in set {
            prop_assert_eq!(account.used(later, quota), 0, "{} is never given back", quota);
        }
    }

    /// A window that waits for `amount` has let go of as much by then, and not of as much before.
    #[test]
    fn a_window_tells_when_it_has_room(adds in prop::collection::vec((0..3 * SECOND, 1..9u64), 1..60), amount in 1..200u64) {
        let (mut window, mut now) = (Window::default(), 0);
        for (pause, amount) in adds {
            now += pause;
            window.add(now, amount);
        }
        let sum = window.sum(now);
        let wait = window.wait(now, amount);
        prop_assert!(sum - window.clone().sum(now + wait) >= amount.min(sum));
        if wait > 0 {
            prop_assert!(sum - window.clone().sum(now + wait - 1) < amount.min(sum));
        }
        prop_assert_eq!(window.sum(now + window.empties_in(now)), 0);
    }
}
