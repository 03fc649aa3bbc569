//! Processes end, and writes fail, at each await and each write of the ways back.
//!
//! A case is a place with a daemon of its own, under a small load of clients that do not give up: streams, a whole answer, four choices, one
//! in the background, one that is cancelled, and all of them read again. Each case goes on until all of its points were met. Then a daemon
//! serves, every answer is what it is without any of this, to the last event's id, and no block is held.

mod tiny;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use pagedd_tests::asks::{Ask, Form, Outcome};
use pagedd_tests::daemon::{Daemon, Site, Tenant};
use pagedd_tests::exchange::Exchange;
use pagedd_tests::http::Incoming;
use pagedd_tests::random::Random;
use pagedd_tests::wait;

/// Cases that run at once: most of their time is a start's.
const TOGETHER: usize = 4;
/// A case whose points are not met by then does not meet them.
const LIMIT: Duration = Duration::from_mins(2);

/// What happens in one place.
#[derive(Clone, Copy, Default)]
struct Case {
    /// Points by daemon: each of these daemons ends at one, or goes on where it is an error.
    daemons: &'static [&'static str],
    /// Points at which a child ends once: those after the first `n` of its visits.
    children: &'static [(&'static str, u32)],
    /// What the log says of errors that were met.
    says: &'static [&'static str],
    /// The last daemon's points are errors.
    stays: bool,
    load: Load,
    /// Its worker is given two plans at a time.
    ahead: bool,
}

/// What is asked meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Load {
    /// All kinds, again and again.
    #[default]
    Mixed,
    /// One long stream alone, accepted before any point: while nothing can be written, what is accepted is lost with its daemon, and a second
    /// stream could come that late.
    Long,
    /// All kinds, with nothing kept for long.
    Forgotten,
    /// All kinds, and a tenant that is removed.
    Removal,
}

const fn kills(daemons: &'static [&'static str]) -> Case {
    Case { daemons, children: &[], says: &[], stays: false, load: Load::Mixed, ahead: false }
}

const fn long(daemons: &'static [&'static str]) -> Case {
    Case { load: Load::Long, ..kills(daemons) }
}

const fn children(children: &'static [(&'static str, u32)]) -> Case {
    Case { children, ..kills(&[]) }
}

const fn errors(daemons: &'static [&'static str], says: &'static [&'static str]) -> Case {
    Case { says, stays: true, ..kills(daemons) }
}

/// Names of points between the making of a plan and its commit. Their cases come once more, with two plans at a time.
const OF_PLANS: [&str; 4] = ["before-plan", "before-output", "blocks-are-", "worker-plan"];

/// The first daemon ends under load, the second mostly on its way back to where that one was. No third: a request at whose readmission two
/// daemons end is set aside.
const KILLS: [Case; 20] = [
    kills(&["journal-append=20*off->panic", "journal-count-replay=panic"]),
    kills(&["before-append=30*off->panic", "journal-clear-replays=panic"]),
    kills(&["after-append=30*off->panic", "before-readmission=panic"]),
    kills(&["before-delivery=10*off->panic", "after-readmission=panic"]),
    kills(&["before-accepted=panic", "readmitted=panic"]),
    kills(&["before-claim-is-told=panic", "worker-spawn=panic"]),
    kills(&["before-submit=1*off->panic", "worker-spawned=panic"]),
    kills(&["after-submit=1*off->panic", "worker-hello=panic"]),
    kills(&["before-attached=1*off->panic", "worker-ready=panic"]),
    kills(&["before-cancel=panic", "before-lookup-is-told=panic"]),
    kills(&["before-plan=20*off->panic", "before-worker-is-gone=panic"]),
    kills(&["before-output=20*off->panic", "ledger-open=panic"]),
    kills(&["before-blocks-are-cleared=20*off->panic", "fdstore-put=panic"]),
    kills(&["after-blocks-are-cleared=20*off->panic", "template-spawn=panic"]),
    kills(&["before-blocks-are-committed=20*off->panic", "gateway-fork=panic"]),
    kills(&["after-blocks-are-committed=20*off->panic", "gateway-forked=panic"]),
    kills(&["blocks-are-half-written=return", "before-plan=panic"]),
    kills(&[
        "before-output=20*off->1*return;before-recovery=panic",
        "before-output=40*off->1*return;before-resync=panic",
    ]),
    kills(&[
        "before-output=20*off->1*return;after-resync=panic",
        "before-output=40*off->1*return;before-replay=panic",
    ]),
    kills(&["journal-fold=panic", "journal-sync=panic"]),
];

/// A first start that does not come far.
const STARTS: [Case; 2] = [
    kills(&["journal-migrate=panic", "journal-migrate=1*off->panic"]),
    kills(&["arena-kept=panic", "before-ledger-is-made=panic"]),
];

/// Nothing can be written for a while, and the daemon ends before, while or after it is written again.
const SNAPSHOTS: [Case; 3] = [
    long(&[
        "journal-append=120*off->1*return;before-snapshot=panic",
        "journal-append=120*off->1*return;snapshot-is-taken=panic",
    ]),
    long(&[
        "journal-append=120*off->1*return;before-snapshot-is-written=panic",
        "journal-append=120*off->1*return;journal-snapshot=panic",
    ]),
    long(&["journal-append=120*off->1*return;journal-truncate-log=panic"]),
];

/// What goes.
const REMOVALS: [Case; 3] = [
    Case { load: Load::Forgotten, ..kills(&["journal-delete=panic"]) },
    Case { load: Load::Removal, ..kills(&["fdstore-remove=panic", "journal-delete=panic"]) },
    Case {
        load: Load::Forgotten,
        ..errors(&["journal-delete=1*return"], &["requests that nobody needs any more could not be deleted"])
    },
];

/// Children end, and where a daemon notices, it does, too.
const CHILDREN: [Case; 6] = [
    children(&[("worker-load", 0), ("worker-mapped", 0), ("worker-arenas-sent", 0)]),
    children(&[("worker-plan", 10), ("worker-resync", 0), ("worker-output", 30)]),
    children(&[("gateway-submit", 1), ("gateway-accepted", 2), ("gateway-attached", 1)]),
    children(&[("gateway-entries", 9), ("gateway-cancel", 0), ("gateway-background", 0)]),
    children(&[("template-fork", 0), ("template-forked", 0), ("gateway-begins", 0)]),
    Case {
        children: &[("gateway-entries", 9), ("gateway-attached", 1)],
        ..kills(&["gateway-down=panic", "gateway-fenced=panic"])
    },
];

const ERRORS: [Case; 5] = [
    errors(
        &["before-plan=30*off->1*return;before-output=90*off->1*return"],
        &["fail point before-plan", "fail point before-output"],
    ),
    errors(
        &[
            "before-delivery=10*off->panic",
            "worker-spawn=1*return;worker-spawned=1*return;worker-hello=1*return;worker-ready=1*return;\
             template-spawn=1*return;gateway-fork=1*return;gateway-forked=1*return",
        ],
        &[
            "fail point worker-spawn",
            "fail point worker-spawned",
            "fail point worker-hello",
            "fail point worker-ready",
            "fail point template-spawn",
            "fail point gateway-fork",
            "fail point gateway-forked",
        ],
    ),
    errors(
        &[
            "before-delivery=10*off->panic",
            "journal-count-replay=1*return;journal-clear-replays=1*return;fdstore-put=1*return;ledger-open=1*return",
        ],
        &[
            "it is not on disk that requests of an earlier daemon are admitted again",
            "it is not on disk that requests of an earlier daemon go on",
            "cannot reach the service manager about fd worker-tiny",
            "what is in the KV arena will not be known after a restart",
        ],
    ),
    errors(
        &["journal-append=40*off->1*return;journal-snapshot=1*return"],
        &["the journal cannot be written; going on without", "a snapshot is on disk"],
    ),
    errors(
        &["journal-fold=1*return;journal-sync=1*return"],
        &["the journal could not be tidied up", "the journal cannot be written; going on without"],
    ),
];

/// What clients ask, with the answers of a daemon that nothing happens to.
struct Asks {
    mixed: Vec<(Ask, Outcome)>,
    long: [(Ask, Outcome); 1],
    /// Cancelled before it has an answer.
    endless: Ask,
}

impl Asks {
    fn new(tenant: &Tenant) -> Self {
        let mut random = Random::new(11);
        let mut plain = |words, tokens| Ask::plain(tiny::MIX, &mut random, words, tokens);
        let mixed = vec![
            plain(30, 160),
            plain(60, 120).with_choices(4, 5),
            plain(20, 100).whole(),
            plain(25, 90).with_choices(1, 7).background(),
        ];
        let (long, endless) = (plain(20, 1500), plain(10, 8000));
        let answered = |ask: Ask| {
            let outcome = finish(&mut Exchange::new(&tenant.http, &ask, unique()));
            (ask, outcome)
        };
        Self { mixed: mixed.into_iter().map(answered).collect(), long: [answered(long)], endless }
    }
}

/// A key that no other request has.
fn unique() -> String {
    static NEXT: Mutex<u64> = Mutex::new(0);
    let mut next = NEXT.lock().expect("the next key");
    *next += 1;
    format!("request-{next}")
}

#[track_caller]
fn finish(exchange: &mut Exchange<'_>) -> Outcome {
    let finished = exchange.finish().cloned();
    finished.unwrap_or_else(|error| panic!("{error}: {}", exchange.so_far()))
}

/// Asks, and asks again for what was answered.
fn ask(tenant: &Tenant, (ask, expected): &(Ask, Outcome), read_again: bool) {
    let mut exchange = Exchange::new(&tenant.http, ask, unique());
    let check = |outcome: &Outcome| {
        // Where all came as events of one choice, each had its id.
        let same = if ask.n == 1 { outcome == expected } else { outcome.says_the_same(expected) };
        assert!(same, "not the answer: {outcome:#?}, expected {expected:#?}");
    };
    check(&finish(&mut exchange));
    if read_again {
        check(&finish(&mut exchange.again(ask.form)));
        let other = if ask.form == Form::Whole { Form::Stream } else { Form::Whole };
        if !ask.body["stream"].is_null() {
            assert!(finish(&mut exchange.again(other)).says_the_same(expected));
        }
    }
}

/// Cancels a request under way, until it is known to have ended.
fn cancel(tenant: &Tenant, ask: &Ask) {
    let mut exchange = Exchange::new(&tenant.http, ask, unique());
    assert_eq!(exchange.advance(), Ok(true), "{}", exchange.so_far());
    let path = format!("/v1/requests/{}/cancel", exchange.id().expect("it has an id"));
    wait::until("the request is cancelled", LIMIT, || {
        let answer = tenant.http.send("POST", &path, &[], b"").ok().and_then(Incoming::try_read_head);
        answer.is_some_and(|answer| {
            let status = answer.header("pagedd-request-status").map(str::to_owned);
            answer.status == 200 && status.is_some_and(|status| status == "cancelled")
        })
    });
}

/// Asks for a request that is nowhere, until that is said.
fn look_for_a_strangers(tenant: &Tenant) {
    let path = format!("/v1/requests/{}", "0".repeat(32));
    wait::until("a request that nobody made is not found", LIMIT, || {
        let answer = tenant.http.send("GET", &path, &[], b"").ok().and_then(Incoming::try_read_head);
        answer.is_some_and(|answer| answer.status == 404)
    });
}

/// One round of what a case's clients want.
fn round(tenant: &Tenant, asks: &Asks, load: Load) {
    let all = if load == Load::Long { &asks.long[..] } else { &asks.mixed };
    thread::scope(|scope| {
        for one in all {
            scope.spawn(|| ask(tenant, one, load != Load::Forgotten));
        }
        if load != Load::Long {
            scope.spawn(|| cancel(tenant, &asks.endless));
            scope.spawn(|| look_for_a_strangers(tenant));
        }
    });
}

/// A tenant comes and goes. Whether the daemon lived to say so is not what counts.
fn remove(daemon: &Daemon) {
    let listed = || {
        let list = daemon.ctl(&["tenant", "list"]);
        (list.code == Some(0)).then(|| list.text.contains("\"initech\""))
    };
    wait::until("the daemon answers", LIMIT, || listed().is_some());
    if listed() == Some(false) {
        let [port] = pagedd_tests::daemon::free_ports();
        daemon.ctl(&["tenant", "add", "initech", "--port", &port.to_string(), "--model", tiny::MIX.model]);
    }
    wait::until("the tenant is removed", LIMIT, || {
        daemon.ctl(&["tenant", "remove", "initech", "--force"]);
        listed() == Some(false)
    });
}

impl Case {
    fn name(&self) -> String {
        let children = self.children.iter().map(|(point, visits)| format!("{point} after {visits}"));
        let points = children.chain(self.daemons.iter().map(|line| (*line).to_owned()));
        let ahead = self.ahead.then(|| "two plans at a time".to_owned());
        points.chain(ahead).collect::<Vec<_>>().join(" | ")
    }

    /// The same with two plans at a time, where that may make a difference.
    fn ahead(&self) -> Option<Self> {
        let name = self.name();
        OF_PLANS.iter().any(|point| name.contains(point)).then_some(Self { ahead: true, ..*self })
    }

    fn site(&self, yaml: &str) -> Site {
        let forgotten = if self.load == Load::Forgotten { "retention: 5s\n" } else { "" };
        let site = Site::new(&format!("{forgotten}{yaml}"));
        let points = self
            .children
            .iter()
            .map(|(point, visits)| format!("{point}={visits}*off->return({})", site.mark(point).display()));
        // A count of 0 would be no action at all.
        let points: Vec<String> = points.map(|point| point.replace("=0*off->", "=")).collect();
        let site = site.with_points(points.join(";")).with_points_by_start(self.daemons);
        if self.ahead { site.with_depth(2) } else { site }
    }

    /// What has not happened yet.
    fn open(&self, site: &Site) -> Vec<String> {
        let starts = self.daemons.len() + usize::from(!self.stays);
        let log = site.log_text();
        let mut open: Vec<String> =
            self.says.iter().filter(|line| !log.contains(*line)).map(|line| format!("`{line}`")).collect();
        let children = self.children.iter().map(|(point, _)| *point);
        open.extend(children.filter(|point| !site.mark(point).exists()).map(str::to_owned));
        if let Some(points) = self.daemons.get(site.starts() - 1).filter(|_| site.starts() < starts) {
            open.push((*points).to_owned());
        }
        open
    }

    fn run(&self, yaml: &str, asks: &Asks) {
        let mut daemon = self.site(yaml).start();
        let acme = daemon.add_tenant_of(tiny::MIX.model, "acme", "0%", "100%");
        let start = Instant::now();
        loop {
            round(&acme, asks, self.load);
            if self.load == Load::Removal {
                remove(&daemon);
            }
            let open = self.open(daemon.site());
            if open.is_empty() {
                break;
            }
            assert!(start.elapsed() < LIMIT, "not met: {open:?}");
            if self.load == Load::Long {
                wait::until("all points are met", LIMIT, || self.open(daemon.site()).is_empty());
            }
        }
        wait::until("the daemon answers", LIMIT, || daemon.ctl(&["status"]).code == Some(0));
        daemon.wait_ready();
        wait::until("what was accepted is durable", LIMIT, || daemon.status()["durable"]["is"] == "yes");
        ask(&acme, &asks.mixed[0], false);
        daemon.wait_idle();
        assert_eq!(daemon.model()["blocks_held"], 0);
        let log = daemon.site().log_text();
        assert!(!log.contains("it is set aside"), "a request was set aside");
        assert_eq!(log.contains("plans=2"), self.ahead, "so many plans at a time");
        daemon.stop();
    }
}

#[test]
fn wherever_a_process_ends_or_a_write_fails_every_stream_is_complete_and_nothing_came_twice() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let yaml = tiny::yaml(folder.path());
    let asks = {
        let daemon = Site::new(&yaml).start();
        Asks::new(&daemon.add_tenant_of(tiny::MIX.model, "acme", "0%", "100%"))
    };
    let mut cases = [&KILLS[..], &STARTS, &SNAPSHOTS, &REMOVALS, &CHILDREN, &ERRORS].concat();
    cases.extend(cases.clone().iter().filter_map(Case::ahead));
    let only = std::env::var("PAGEDD_POINT").ok();
    let wanted = |case: &Case| only.as_ref().is_none_or(|only| case.name().contains(only));
    let queue: Mutex<VecDeque<Case>> = Mutex::new(cases.into_iter().filter(wanted).collect());
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..TOGETHER {
            scope.spawn(|| {
                let next = || queue.lock().expect("the queue").pop_front();
                while let Some(case) = next() {
                    let start = Instant::now();
                    let done = catch_unwind(AssertUnwindSafe(|| case.run(&yaml, &asks)));
                    println!("{:6.2} s  {}", start.elapsed().as_secs_f64(), case.name());
                    if done.is_err() {
                        failed.lock().expect("what failed").push(case.name());
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("what failed");
    assert!(failed.is_empty(), "{failed:#?}");
}
