use super::*;

const REQUEST: [u8; 16] = [7; 16];

/// A submission whose answer is waited for.
fn submitted(link: &Arc<Link>) -> (u64, oneshot::Receiver<Result<Taken, Refusal>>) {
    let ticket = link.ticket();
    (ticket, link.submit(ticket, Vec::new()).unwrap())
}

fn attached() -> ToGateway {
    ToGateway::Attached {
        request: REQUEST,
        key: None,
        context: Vec::new(),
        prompt_tokens: 1,
        created: 0,
        n: 1,
        entries: 0,
        held: false,
    }
}

/// What was told since the last time, without submissions.
async fn told(link: &Link) -> Vec<ToDaemon> {
    // There is always one to take.
    link.outbox.tell(&ToDaemon::Hello { protocol: PROTOCOL }).unwrap();
    let mut buffer = FrameBuffer::new();
    for frame in link.outbox.take().await {
        buffer.push(&frame);
    }
    let mut frames: Vec<ToDaemon> = std::iter::from_fn(|| buffer.next_frame().unwrap()).collect();
    assert!(matches!(frames.pop(), Some(ToDaemon::Hello { .. })));
    frames
}

fn attach() -> ToDaemon {
    ToDaemon::Attach { request: REQUEST, from: 0 }
}

fn detach(done: bool) -> ToDaemon {
    ToDaemon::Detach { request: REQUEST, done }
}

#[tokio::test]
async fn a_client_that_leaves_after_the_shutdown_cancels_nothing() {
    let link = Link::new();
    let (ticket, answer) = submitted(&link);
    link.obey(ToGateway::Accepted { ticket, request: REQUEST, repeated: false, rates: Rates::default() });
    link.obey(attached());
    let Taken { reader, repeated, .. } = answer.await.unwrap().unwrap();
    assert!(!repeated);
    link.obey(ToGateway::Shutdown);
    drop(reader);
    // Neither does one that left before its request was accepted.
    let (ticket, answer) = submitted(&link);
    drop(answer);
    link.obey(ToGateway::Accepted { ticket, request: REQUEST, repeated: false, rates: Rates::default() });
    assert_eq!(told(&link).await, [attach(), attach()]);
}

#[tokio::test]
async fn a_request_that_was_repeated_is_not_cancelled_with_who_never_saw_it() {
    let link = Link::new();
    let (ticket, answer) = submitted(&link);
    drop(answer);
    link.obey(ToGateway::Accepted { ticket, request: REQUEST, repeated: true, rates: Rates::default() });
    assert_eq!(told(&link).await, [attach(), detach(false)]);
    link.obey(ToGateway::Accepted { ticket: 99, request: REQUEST, repeated: true, rates: Rates::default() });
    assert_eq!(told(&link).await, []);
    // The first one is.
    let (ticket, answer) = submitted(&link);
    drop(answer);
    link.obey(ToGateway::Accepted { ticket, request: REQUEST, repeated: false, rates: Rates::default() });
    assert_eq!(told(&link).await, [attach(), ToDaemon::Cancel { request: REQUEST }, detach(true)]);
}

#[tokio::test]
async fn of_two_that_wait_for_a_request_the_last_to_leave_cancels_it() {
    let link = Link::new();
    let (ticket, answer) = submitted(&link);
    link.obey(ToGateway::Accepted { ticket, request: REQUEST, repeated: false, rates: Rates::default() });
    let first = answer.await.unwrap().unwrap();
    let (ticket, answer) = submitted(&link);
    link.obey(ToGateway::Accepted { ticket, request: REQUEST, repeated: true, rates: Rates::default() });
    let mut second = answer.await.unwrap().unwrap();
    second.reader.own(false);
    drop(first);
    assert_eq!(told(&link).await, [attach()]);
    drop(second);
    assert_eq!(told(&link).await, [ToDaemon::Cancel { request: REQUEST }, detach(true)]);
}

#[tokio::test]
async fn a_cancel_is_told_once_and_not_of_what_has_ended() {
    let link = Link::new();
    let mut reader = link.open(RequestId(REQUEST));
    link.obey(attached());
    reader.cancel();
    reader.cancel();
    assert_eq!(told(&link).await, [attach(), ToDaemon::Cancel { request: REQUEST }]);
    let entries = vec![Entry::End { cached_tokens: 0 }];
    link.obey(ToGateway::Entries(vec![Delivery { request: REQUEST, from: 0, entries }]));
    reader.ended().await.unwrap();
    drop(reader);
    assert_eq!(told(&link).await, [detach(true)]);
    let reader = link.open(RequestId(REQUEST));
    link.obey(attached());
    let entries = vec![Entry::End { cached_tokens: 0 }];
    link.obey(ToGateway::Entries(vec![Delivery { request: REQUEST, from: 0, entries }]));
    reader.cancel();
    drop(reader);
    assert_eq!(told(&link).await, [attach(), detach(false)]);
}

#[tokio::test]
async fn the_daemon_is_told_once_somebody_has_all_of_a_request_that_has_ended() {
    let link = Link::new();
    let mut reader = link.open(RequestId(REQUEST));
    let other = link.open(RequestId(REQUEST));
    link.obey(attached());
    let entries = vec![Entry::Token { choice: 0, token: 1 }, Entry::End { cached_tokens: 0 }];
    link.obey(ToGateway::Entries(vec![Delivery { request: REQUEST, from: 0, entries }]));
    reader.next(u64::MAX).await.unwrap();
    drop(reader);
    assert_eq!(told(&link).await, [attach()], "another reads on");
    drop(other);
    assert_eq!(told(&link).await, [detach(true)]);
    // One that leaves in the middle may come back.
    let mut reader = link.open(RequestId(REQUEST));
    link.obey(attached());
    let entries = vec![Entry::Token { choice: 0, token: 1 }, Entry::End { cached_tokens: 0 }];
    link.obey(ToGateway::Entries(vec![Delivery { request: REQUEST, from: 0, entries }]));
    reader.next(1).await.unwrap();
    reader.own(true);
    drop(reader);
    assert_eq!(told(&link).await, [attach(), detach(false)]);
    // Unless it has said that it will not.
    let mut reader = link.open(RequestId(REQUEST));
    link.obey(attached());
    reader.own(false);
    let entries = vec![Entry::Token { choice: 0, token: 1 }, Entry::End { cached_tokens: 0 }];
    link.obey(ToGateway::Entries(vec![Delivery { request: REQUEST, from: 0, entries }]));
    drop(reader);
    assert_eq!(told(&link).await, [attach(), detach(true)]);
}
