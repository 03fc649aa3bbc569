//! A load under kills: requests run undisturbed first, and then again and again while parts of the server are killed.
//!
//! **Owns** the clients of the load, the strikes, and the comparison of each answer with the undisturbed one. **Never** kills
//! a process that is not of the daemon under test.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::asks::{Ask, Form, Mix, Outcome, asks};
use crate::daemon::{Daemon, Site, Tenant};
use crate::exchange::Exchange;
use crate::kills::{Cell, Hits, Phase, Victim, schedule};
use crate::process::{Process, send};
use crate::random::Random;
use crate::wait;

/// Everything runs again by then.
const RECOVERY: Duration = Duration::from_mins(1);
/// Strikes between two lines that say how far it has come.
const PROGRESS: usize = 50;
/// Tries to hit a cell: a request may come further than its phase before the signal is sent.
const TRIES: u32 = 12;

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Campaign<'a> {
    /// Reproduces requests and schedule.
    pub seed: u64,
    /// How many cells are to be hit. Those of recovery take two kills.
    pub strikes: usize,
    /// Who may be killed.
    pub victims: &'a [Victim],
    /// Requests at a time, over both tenants.
    pub clients: usize,
    /// Different requests.
    pub asks: u64,
    /// What they are like.
    pub mix: Mix<'a>,
    /// Plans that the worker has at a time; `None` is as its device has it.
    pub depth: Option<usize>,
}

/// The seed that `PAGEDD_SEED` names, or `default`.
///
/// # Panics
/// It is no number.
pub fn seed(default: u64) -> u64 {
    std::env::var("PAGEDD_SEED").map_or(default, |text| text.parse().expect("PAGEDD_SEED is a number"))
}

/// A request with its undisturbed answer.
#[derive(Debug)]
struct Case {
    ask: Ask,
    answer: Outcome,
}

impl Case {
    /// Says what differs.
    fn check(&self, exchange: &Exchange<'_>, got: &Outcome, is_same: bool) -> Result<(), String> {
        if is_same {
            return Ok(());
        }
        let Self { ask, answer } = self;
        Err(format!(
            "the answer changed.\nundisturbed: {answer:#?}\nunder kills: {got:#?}\n{}\n{}",
            ask.body,
            exchange.so_far()
        ))
    }
}

/// Clients and what they met.
struct Load<'a> {
    tenants: &'a [Tenant; 2],
    cases: &'a [Case],
    seed: u64,
    /// Streams that were accepted, and are not complete.
    live: AtomicUsize,
    answered: AtomicU64,
    /// Connections that broke under an accepted request.
    broken: AtomicU64,
    stop: AtomicBool,
    failures: Mutex<Vec<String>>,
}

impl Load<'_> {
    fn client(&self, number: usize) {
        let mut random = Random::new(self.seed ^ (number as u64 + 1) << 32);
        let tenant = &self.tenants[number % 2];
        for round in 0.. {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let case = &self.cases[random.below(self.cases.len() as u64) as usize];
            let mut exchange =
                Exchange::new(&tenant.http, &case.ask, format!("{}-{number}-{round}", self.seed));
            if let Err(error) = self.one(case, &mut exchange, random.below(16)) {
                self.fail(format!(
                    "client {number} of {}: {error}\n{}\n{}",
                    tenant.name,
                    case.ask.body,
                    exchange.so_far()
                ));
            }
        }
    }

    fn one(&self, case: &Case, exchange: &mut Exchange<'_>, also: u64) -> Result<(), String> {
        exchange.open()?;
        self.live.fetch_add(1, Ordering::Relaxed);
        let finished = exchange.finish().cloned();
        self.live.fetch_sub(1, Ordering::Relaxed);
        let got = finished?;
        self.answered.fetch_add(1, Ordering::Relaxed);
        self.broken.fetch_add(exchange.broken.into(), Ordering::Relaxed);
        case.check(exchange, &got, got == case.answer)?;
        // Some read their answer once more.
        if also == 0 {
            let mut again = exchange.again(Form::Whole);
            let got = again.finish()?.clone();
            case.check(&again, &got, got.says_the_same(&case.answer))?;
        }
        if also == 1 && case.ask.form == Form::Stream {
            let mut again = exchange.again(Form::Stream);
            let got = again.finish()?.clone();
            case.check(&again, &got, got == case.answer)?;
        }
        Ok(())
    }

    fn fail(&self, what: String) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).push(what);
        self.stop.store(true, Ordering::Relaxed);
    }

    fn failed(&self) -> Option<String> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).first().cloned()
    }
}

/// Answers of `asks` while nothing is killed, so many at a time. `name` is different for every call.
fn undisturbed(name: &str, tenant: &Tenant, asks: Vec<Ask>, together: usize) -> Vec<Case> {
    let next = AtomicUsize::new(0);
    let answers = Mutex::new(vec![None; asks.len()]);
    thread::scope(|scope| {
        for _ in 0..together {
            scope.spawn(|| {
                while let Some((i, ask)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, asks.get(i)?)))
                {
                    let mut exchange = Exchange::new(&tenant.http, ask, format!("{name}-{i}"));
                    let answer = exchange
                        .finish()
                        .unwrap_or_else(|e| panic!("undisturbed: {e}\n{}", ask.body))
                        .clone();
                    assert_eq!(exchange.broken, 0, "undisturbed: a connection broke");
                    answers.lock().expect("no other client failed")[i] = Some(answer);
                }
            });
        }
    });
    let answers = answers.into_inner().expect("no client failed");
    asks.into_iter()
        .zip(answers)
        .map(|(ask, answer)| Case { ask, answer: answer.expect("an answer") })
        .collect()
}

/// Requests whose phase a strike chooses.
struct Probes {
    admitting: Vec<Case>,
    prefill: Vec<Case>,
    decode: Vec<Case>,
}

impl Probes {
    fn new(tenant: &Tenant, mix: Mix<'_>, random: &mut Random) -> Self {
        let mut plain = |words: u64, tokens: u64| Ask::plain(mix, random, words, tokens);
        let admitting = vec![
            plain(20, mix.tokens),
            plain(20, mix.tokens).with_choices(4, 7),
            plain(8, mix.tokens / 2).whole(),
        ];
        let prefill = (0..4).map(|_| plain(mix.words, mix.tokens / 2)).collect();
        let decode = (0..4).map(|i| plain(4 + i * 8, mix.tokens)).collect();
        Self {
            admitting: undisturbed("admitting", tenant, admitting, 4),
            prefill: undisturbed("prefill", tenant, prefill, 4),
            decode: undisturbed("decode", tenant, decode, 4),
        }
    }

    fn of(&self, phase: Phase, random: &mut Random) -> &Case {
        let cases = match phase {
            Phase::Admitting => &self.admitting,
            Phase::Prefill => &self.prefill,
            Phase::Decode | Phase::Recovery | Phase::End => &self.decode,
        };
        &cases[random.below(cases.len() as u64) as usize]
    }
}

/// The parts of a daemon with two tenants, while all of them run.
#[derive(Clone, Debug)]
pub struct Parts {
    worker: Process,
    gateways: [Process; 2],
    daemon: Process,
    all: Vec<Process>,
}

impl Parts {
    /// `None` while some part does not run.
    pub fn find(daemon: &Daemon, tenants: &[Tenant; 2]) -> Option<Self> {
        let status = daemon.ctl(&["status"]);
        let status: Value = serde_json::from_str(&status.text).ok()?;
        let all = daemon.processes();
        let part = |pid: &Value| all.iter().skip(1).find(|p| Some(u64::from(p.pid)) == pid.as_u64()).cloned();
        let model = &status["models"][0];
        let gateway = |tenant: &Tenant| {
            let info = status["tenants"].as_array()?.iter().find(|info| info["name"] == *tenant.name)?;
            part(&info["gateway"]["pid"]).filter(|_| info["gateway"]["state"]["is"] == "running")
        };
        Some(Self {
            worker: part(&model["worker_pid"]).filter(|_| model["state"]["is"] == "ready")?,
            gateways: [gateway(&tenants[0])?, gateway(&tenants[1])?],
            daemon: part(&status["pid"])?,
            all: all.clone(),
        })
    }

    /// One of them; of the gateways that of this tenant.
    pub fn of(&self, victim: Victim, tenant: usize) -> &Process {
        match victim {
            Victim::Worker => &self.worker,
            Victim::Gateway => &self.gateways[tenant],
            Victim::Daemon => &self.daemon,
        }
    }
}

/// Strikes at the daemon under load.
struct Killer<'a> {
    daemon: &'a Daemon,
    load: &'a Load<'a>,
    least_live: usize,
    victims: &'a [Victim],
    probes: &'a Probes,
    random: Random,
    hits: Hits,
    strikes: u32,
}

impl Killer<'_> {
    fn strike(&mut self, cell: Cell) -> Result<(), String> {
        for _ in 0..TRIES {
            self.strikes += 1;
            let phase = cell.phase;
            let case = self.probes.of(phase, &mut self.random);
            let tenant = self.random.below(2) as usize;
            let key = format!("{}-strike-{}", self.load.seed, self.strikes);
            let mut probe = Exchange::new(&self.load.tenants[tenant].http, &case.ask, key);
            let hit = self
                .try_strike(cell, tenant, case, &mut probe)
                .map_err(|e| format!("{cell:?}: {e}\n{}\n{}", case.ask.body, probe.so_far()))?;
            if hit {
                self.hits.add(cell);
                return Ok(());
            }
        }
        Err(format!("{cell:?} was not hit in {TRIES} tries"))
    }

    fn try_strike(
        &mut self,
        cell: Cell,
        tenant: usize,
        case: &Case,
        probe: &mut Exchange<'_>,
    ) -> Result<bool, String> {
        let parts = self.wait_for_parts()?;
        let victim = parts.of(cell.victim, tenant);
        let tokens = case.ask.tokens;
        let hit = match cell.phase {
            Phase::Admitting => {
                probe.send()?;
                thread::sleep(Duration::from_micros(self.random.below(800)));
                probe.is_quiet() && kill(victim)
            }
            Phase::Prefill => {
                probe.open()?;
                probe.is_quiet() && kill(victim)
            }
            Phase::Decode => {
                let some = 1 + self.random.below(tokens / 3);
                while probe.last() < some && probe.advance()? {}
                probe.last() < tokens && kill(victim)
            }
            Phase::End => {
                let most = tokens - self.random.below(3);
                while probe.last() < most && probe.advance()? {}
                kill(victim)
            }
            Phase::Recovery => {
                let some = 1 + self.random.below(tokens / 4);
                while probe.last() < some && probe.advance()? {}
                self.strike_twice(cell.victim, tenant, &parts, probe)?
            }
        };
        let got = probe.finish()?.clone();
        case.check(probe, &got, got == case.answer)?;
        // A connection into the dead part was the probe's own.
        let was_cut = cell.victim == Victim::Worker
            || probe.broken > 0
            || !matches!(cell.phase, Phase::Decode | Phase::Prefill);
        Ok(hit && was_cut)
    }

    /// Kills one part, and another before the probe has come further.
    fn strike_twice(
        &mut self,
        victim: Victim,
        tenant: usize,
        parts: &Parts,
        probe: &mut Exchange<'_>,
    ) -> Result<bool, String> {
        let first = self.victims[self.random.below(self.victims.len() as u64) as usize];
        if !kill(parts.of(first, tenant)) {
            return Ok(false);
        }
        self.hits.add(Cell { phase: Phase::Decode, victim: first });
        if first == Victim::Worker {
            // What had been computed before still comes.
            while !probe.is_quiet() && probe.advance()? {}
        }
        let second = if first == victim || first == Victim::Daemon {
            wait::within(RECOVERY, || self.successor(victim, &parts.all))
                .ok_or_else(|| format!("no {victim:?} comes up after the {first:?}'s death"))?
        } else {
            parts.of(victim, tenant).clone()
        };
        let longest_us = match first {
            Victim::Worker => 4_000,
            Victim::Gateway => 10_000,
            Victim::Daemon => 60_000,
        };
        thread::sleep(Duration::from_micros(self.random.below(longest_us)));
        Ok((first != Victim::Worker || probe.is_quiet()) && kill(&second))
    }

    /// A part that was not there before.
    fn successor(&self, victim: Victim, before: &[Process]) -> Option<Process> {
        let now = self.daemon.processes();
        let parent = |p: &Process| {
            now.iter().find(|other| other.pid == p.parent).map(|p| p.name.clone()).unwrap_or_default()
        };
        now.iter()
            .skip(1)
            .filter(|p| !before.contains(p))
            .find(|p| match victim {
                Victim::Worker => p.name == "pagedd-worker",
                // Forked from the template, and named after its tenant.
                Victim::Gateway => parent(p) == "pagedd-gateway",
                Victim::Daemon => p.name == "pagedd" && p.parent == self.daemon.root(),
            })
            .cloned()
    }

    /// Waits until every part runs and the load is on.
    fn wait_for_parts(&self) -> Result<Parts, String> {
        let found = wait::within(RECOVERY, || {
            if let Some(failure) = self.load.failed() {
                return Some(Err(failure));
            }
            let parts = Parts::find(self.daemon, self.load.tenants)?;
            (self.load.live.load(Ordering::Relaxed) >= self.least_live).then_some(Ok(parts))
        });
        found.unwrap_or_else(|| {
            let live = self.load.live.load(Ordering::Relaxed);
            Err(format!(
                "not every part runs after {RECOVERY:?}, with {live} live streams: {}",
                self.daemon.ctl(&["status"]).text
            ))
        })
    }
}

/// Kills a process of the daemon's; whether it lived until then.
pub fn kill(process: &Process) -> bool {
    let lived = process.lives();
    send(process, Signal::SIGKILL);
    wait::until("a killed process is gone", Duration::from_secs(10), || !process.lives());
    lived
}

impl Campaign<'_> {
    /// Runs it in a fresh place with this configuration, prints what was hit, and returns it.
    ///
    /// # Panics
    /// Something accepted was lost, doubled or changed; a block leaked; a cell was not hit.
    #[track_caller]
    pub fn run(&self, yaml: &str) -> Hits {
        println!("PAGEDD_SEED={} reproduces this schedule", self.seed);
        let start = Instant::now();
        let site = Site::new(yaml);
        let daemon = if let Some(depth) = self.depth { site.with_depth(depth) } else { site }.start();
        let model = self.mix.model;
        let tenants = [("acme", "20%", "70%"), ("globex", "10%", "80%")]
            .map(|(name, floor, ceiling)| daemon.add_tenant_of(model, name, floor, ceiling));
        let mut random = Random::new(self.seed);
        let mut cases = undisturbed("mix", &tenants[0], asks(self.mix, &mut random, self.asks), self.clients);
        let stopped = cases.iter().step_by(3).map(|case| case.ask.clone().stopped(&case.answer)).collect();
        cases.extend(undisturbed("stopped", &tenants[0], stopped, self.clients));
        let probes = Probes::new(&tenants[0], self.mix, &mut random);
        println!("{} requests were answered undisturbed within {:.1?}", cases.len(), start.elapsed());
        let cells = schedule(&mut random, self.victims, self.strikes);

        let load = Load {
            tenants: &tenants,
            cases: &cases,
            seed: self.seed,
            live: AtomicUsize::new(0),
            answered: AtomicU64::new(0),
            broken: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            failures: Mutex::new(Vec::new()),
        };
        let least_live = self.clients / 4;
        let mut killer = Killer {
            daemon: &daemon,
            load: &load,
            least_live,
            victims: self.victims,
            probes: &probes,
            random: random.clone(),
            hits: Hits::default(),
            strikes: 0,
        };
        thread::scope(|scope| {
            for number in 0..self.clients {
                let load = &load;
                scope.spawn(move || load.client(number));
            }
            for (i, cell) in cells.iter().enumerate() {
                if let Err(error) = killer.strike(*cell) {
                    load.fail(error);
                    break;
                }
                if (i + 1) % PROGRESS == 0 {
                    println!("{} of {} after {:.0?}", i + 1, cells.len(), start.elapsed());
                }
            }
            load.stop.store(true, Ordering::Relaxed);
        });
        let hits = killer.hits;
        let (answered, broken) = (load.answered.into_inner(), load.broken.into_inner());
        println!("{hits}\n{answered} answers, {broken} broken connections, {:.1?}", start.elapsed());
        let failures = load.failures.into_inner().unwrap_or_else(PoisonError::into_inner);
        assert!(
            failures.is_empty(),
            "seed {}: {} failure(s), the first: {}",
            self.seed,
            failures.len(),
            failures[0]
        );
        for cell in &cells {
            assert!(hits.of(*cell) > 0, "{cell:?} was not hit:\n{hits}");
        }
        nothing_is_held(&daemon);
        daemon.stop();
        hits
    }
}

/// No request is left, and every block is free or cached.
#[track_caller]
fn nothing_is_held(daemon: &Daemon) {
    daemon.wait_idle();
    let model = daemon.model();
    let number = |name: &str| model[name].as_u64().unwrap_or_else(|| panic!("{name}: {model}"));
    assert_eq!(number("blocks_held"), 0, "{model}");
    assert_eq!(number("blocks_free") + number("blocks_cached"), number("blocks_total"), "{model}");
}
