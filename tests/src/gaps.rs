//! How long clients wait when parts die: gaps between the events of streams, and the time from a daemon's death to readiness.
//!
//! **Owns** clocks and percentiles. **Never** judges: it prints figures beside their bars.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::asks::{Ask, Mix};
use crate::campaign::{Parts, kill};
use crate::daemon::{Site, Tenant};
use crate::exchange::Exchange;
use crate::kills::Victim;
use crate::random::Random;
use crate::wait;

/// Streams at a time.
const STREAMS: usize = 4;
/// Events between a kill and the next.
const EVENTS_BETWEEN: u64 = 24;
/// Longest wait for anything.
const LIMIT: Duration = Duration::from_mins(2);

/// When events of one request came.
type Times = Vec<Instant>;

struct Streams {
    times: Mutex<Vec<Times>>,
    events: [AtomicU64; STREAMS],
    stop: AtomicBool,
}

impl Streams {
    fn run(&self, number: usize, tenant: &Tenant, asks: &[Ask]) {
        for round in 0.. {
            let ask = &asks[(number + round) % asks.len()];
            let mut exchange = Exchange::new(&tenant.http, ask, format!("gaps-{number}-{round}"));
            let mut times = Vec::new();
            while exchange.advance().unwrap_or_else(|e| panic!("{e}: {}", exchange.so_far())) {
                times.push(Instant::now());
                self.events[number].fetch_add(1, Ordering::Relaxed);
                if self.stop.load(Ordering::Relaxed) {
                    break;
                }
            }
            self.times.lock().expect("no stream failed").push(times);
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// Waits until every stream has gone on.
    fn go_on(&self) {
        let count = || self.events.each_ref().map(|events| events.load(Ordering::Relaxed));
        let before = count();
        wait::until("every stream goes on", LIMIT, || {
            count().iter().zip(before).all(|(now, before)| *now >= before + EVENTS_BETWEEN)
        });
    }
}

/// Kills workers and daemons under four streams, and prints what clients saw. Of each so many.
///
/// # Panics
/// Something was lost, or does not come back.
pub fn measure(yaml: &str, mix: Mix<'_>, seed: u64, kills: usize) {
    let daemon = Site::new(yaml).start();
    let [acme, globex] = ["acme", "globex"].map(|name| daemon.add_tenant_of(mix.model, name, "10%", "60%"));
    let tenants = [acme, globex];
    let mut random = Random::new(seed);
    let asks: Vec<Ask> = (0..8).map(|_| Ask::plain(mix, &mut random, 40, mix.tokens)).collect();
    let streams =
        Streams { times: Mutex::new(Vec::new()), events: Default::default(), stop: AtomicBool::new(false) };
    let mut deaths: Vec<(Victim, Instant)> = Vec::new();
    let mut ready = Vec::new();
    thread::scope(|scope| {
        for number in 0..STREAMS {
            let (streams, tenant, asks) = (&streams, &tenants[number % 2], &asks);
            scope.spawn(move || streams.run(number, tenant, asks));
        }
        for victim in [vec![Victim::Worker; kills], vec![Victim::Daemon; kills]].concat() {
            streams.go_on();
            let parts = wait::within(LIMIT, || Parts::find(&daemon, &tenants)).expect("every part runs");
            thread::sleep(Duration::from_micros(random.below(50_000)));
            let death = Instant::now();
            assert!(kill(parts.of(victim, 0)), "it was gone before");
            deaths.push((victim, death));
            if victim == Victim::Daemon {
                ready.push(until_ready(&tenants[0], death));
            }
            if deaths.len().is_multiple_of(20) {
                eprintln!("{} of {} kills", deaths.len(), 2 * kills);
            }
        }
        streams.go_on();
        streams.stop.store(true, Ordering::Relaxed);
    });
    let times = streams.times.into_inner().expect("no stream failed");
    let gaps: Vec<(Instant, Duration)> =
        times.iter().flat_map(|times| times.windows(2).map(|w| (w[0], w[1] - w[0]))).collect();
    let usual = percentile(&gaps.iter().map(|(_, gap)| *gap).collect::<Vec<_>>(), 50);
    let over = |victim: Victim| -> Vec<Duration> {
        let of =
            |death: Instant| gaps.iter().filter(move |(from, gap)| *from <= death && death < *from + *gap);
        deaths
            .iter()
            .filter(|(v, _)| *v == victim)
            .flat_map(|(_, death)| of(*death))
            .map(|(_, gap)| gap.saturating_sub(usual))
            .collect()
    };
    println!(
        "{STREAMS} streams, {kills} kills of each, seed {seed}; the median gap between events is {usual:.1?}"
    );
    print("worker killed: gap beyond the median", &over(Victim::Worker), "at most 1.0 s");
    print("daemon killed: until ready", &ready, "at most 3 s");
    print("daemon killed: gap beyond the median", &over(Victim::Daemon), "none");
    daemon.stop();
}

/// From a death until the tenant's port says that it is ready, with no look before the death in it.
fn until_ready(tenant: &Tenant, death: Instant) -> Duration {
    wait::until("the port is ready again", LIMIT, || {
        let asked = tenant.http.send("GET", "/readyz", &[], b"").ok();
        asked.and_then(crate::http::Incoming::try_read_head).is_some_and(|answer| answer.status == 200)
    });
    death.elapsed()
}

fn percentile(values: &[Duration], percent: usize) -> Duration {
    let mut values = values.to_vec();
    values.sort_unstable();
    // The least value that so many are not above.
    let at = (values.len() * percent).div_ceil(100).saturating_sub(1);
    values.get(at).copied().unwrap_or_default()
}

fn print(what: &str, values: &[Duration], bar: &str) {
    let [half, p99, most] = [50, 99, 100].map(|percent| percentile(values, percent));
    println!(
        "{what}: p50 {half:.1?}, p99 {p99:.1?}, most {most:.1?} of {} (bar for p99: {bar})",
        values.len()
    );
}
