//! How long finished logs stay, and what is under way.

use super::*;

const OWN: ConnectionId = ConnectionId(1);

/// A request of [`TENANT`], whose retention is nothing, that has ended and was sent to its gateway.
fn ended() -> (Bench, mpsc::Receiver<ToGateway>) {
    let mut bench = bench();
    bench.hub.handle(Message::Retain(TENANT, Some(Duration::ZERO)));
    let frames = bench.up(TENANT, 1, 100);
    bench.hub.handle(admitted(1));
    bench.hub.handle(Message::Attach(OWN, REQUEST, 0));
    bench.tokens([1]);
    bench.finish();
    (bench, frames)
}

impl Bench {
    /// Whether the request's log is there so long after its end.
    fn is_kept(&mut self, after: Duration) -> bool {
        self.hub.expire(Instant::now() + after);
        self.hub.logs.contains_key(&REQUEST)
    }

    /// What the journal is told to delete.
    fn spent(&mut self) -> Vec<RequestId> {
        let (answer, mut spent) = oneshot::channel();
        self.hub.handle(Message::Spent(answer));
        spent.try_recv().unwrap()
    }

    fn load(&mut self) -> (u32, u32) {
        let (answer, mut load) = oneshot::channel();
        self.hub.handle(Message::Load(answer));
        let Load { requests, streams, .. } = load.try_recv().unwrap();
        (requests, streams)
    }
}

const SOON: Duration = Duration::from_secs(1);

#[test]
fn with_a_retention_of_nothing_a_request_goes_as_soon_as_its_client_has_all_of_it_and_from_the_journal_too() {
    let (mut bench, _frames) = ended();
    let neighbour = RequestId([3; 16]);
    heavy(&mut bench, STRANGER, neighbour);
    assert!(bench.is_kept(SOON), "its client may be reading");
    bench.hub.handle(Message::Detach(OWN, REQUEST, true));
    assert!(bench.is_kept(Duration::ZERO), "others may just have asked for it");
    assert_eq!(bench.spent(), []);
    assert!(!bench.is_kept(SOON));
    assert_eq!(bench.spent(), [REQUEST]);
    assert_eq!(bench.spent(), [], "it is told once");
    assert!(bench.hub.logs.contains_key(&neighbour), "another tenant's stay as long as they did");
    assert_eq!(bench.hub.finished[&STRANGER].bytes, bench.hub.finished_bytes);
}

#[test]
fn what_its_client_may_come_back_for_stays_for_the_grace_after_its_end() {
    for lose in [Message::Down(OWN), Message::Detach(OWN, REQUEST, false)] {
        let (mut bench, _frames) = ended();
        bench.hub.handle(lose);
        assert!(bench.is_kept(Duration::from_secs(59)));
        assert!(!bench.is_kept(Duration::from_secs(61)));
        assert_eq!(bench.spent(), [], "the journal's time for it is over, too");
    }
    // One that was cancelled is nobody's any more, read or not.
    let mut bench = bench();
    bench.hub.handle(Message::Retain(TENANT, Some(Duration::ZERO)));
    let _frames = bench.up(TENANT, 1, 100);
    bench.hub.handle(admitted(1));
    bench.hub.handle(Message::Cancel(OWN, REQUEST));
    bench.finish();
    assert!(!bench.is_kept(SOON));
    assert_eq!(bench.spent(), [REQUEST]);
}

#[test]
fn a_log_behind_one_that_is_not_read_to_its_end_goes_before_it() {
    let (mut bench, _frames) = ended();
    let second = RequestId([3; 16]);
    heavy(&mut bench, TENANT, second);
    bench.hub.handle(Message::Attach(OWN, second, 0));
    bench.hub.flush();
    bench.hub.handle(Message::Detach(OWN, second, true));
    assert!(bench.is_kept(SOON));
    assert!(!bench.hub.logs.contains_key(&second));
    assert_eq!(bench.spent(), [second]);
    assert_eq!(bench.hub.finished[&TENANT].order.len(), 1);
}

#[test]
fn a_tenants_own_retention_goes_with_the_tenant() {
    let (mut bench, _frames) = ended();
    bench.hub.handle(Message::Forget(TENANT));
    assert_eq!(bench.hub.retentions.of(TENANT), Duration::from_mins(10));
}

#[test]
fn once_the_daemon_ends_nothing_is_cancelled_for_want_of_a_reader_and_what_was_not_read_stays() {
    let (mut bench, _frames) = ended();
    let live = RequestId([3; 16]);
    bench.hub.handle(admitted_as(1, admission(TENANT, live)));
    bench.hub.handle(Message::Hold);
    bench.hub.handle(Message::Down(OWN));
    assert!(bench.is_kept(Duration::from_hours(24)));
    assert!(bench.commands().is_empty(), "a gateway that ends with the daemon leaves nobody's request");
}

#[test]
fn what_is_under_way_is_counted_until_it_has_ended_and_was_sent() {
    let mut bench = bench();
    let mut frames = bench.up(TENANT, 1, 2);
    assert_eq!(bench.load(), (0, 0));
    bench.hub.handle(admitted(1));
    assert_eq!(bench.load(), (1, 0), "nobody reads it yet");
    bench.hub.handle(Message::Attach(OWN, REQUEST, 0));
    assert_eq!(bench.load(), (1, 1));
    bench.finish();
    assert_eq!(bench.load(), (0, 1), "its end waits for room");
    while frames.try_recv().is_ok() {}
    bench.hub.flush();
    assert_eq!(bench.load(), (0, 0));
    // Nothing becomes of a request whose model is not configured.
    let kept = Kept {
        admission: admission(TENANT, live()),
        entries: Vec::new(),
        cached_tokens: None,
        finished_unix: None,
        replays: 0,
    };
    bench.hub.restore(None, kept.clone());
    bench.hub.handle(Message::Attach(OWN, live(), 0));
    assert_eq!(bench.load(), (0, 0));
    // Nor of one that is too large for its model as it is now.
    let mut held = kept;
    held.admission.request = RequestId([5; 16]);
    bench.hub.restore(Some(ModelId(0)), held);
    while frames.try_recv().is_ok() {}
    bench.hub.handle(Message::Attach(OWN, RequestId([5; 16]), 0));
    assert_eq!(bench.load(), (1, 1), "its engine may have room for it");
    bench.hub.handle(Message::Held(RequestId([5; 16])));
    assert_eq!(bench.load(), (0, 0));
}

fn live() -> RequestId {
    RequestId([4; 16])
}
