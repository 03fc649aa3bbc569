//! The real binary over a socket.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use pagedd_core::TensorType;
use pagedd_model::testing::{GgufValue, TinyModel, gguf_writer};
use pagedd_wire::PROTOCOL;
use pagedd_wire::worker::{
    Arena, Dtype, FromWorker, Hello, MOST_IN_FLIGHT, ModelInfo, Output, Plan, ToWorker,
};
use pagedd_wire::{Channel, ChannelError};
use pagedd_worker::ModelRunner;

use crate::driver::{Driver, Seq, bits};
use crate::models::{hello, load, load_real, real, tiny, tokens};

const LIMIT: Duration = Duration::from_mins(1);

struct Worker {
    child: Child,
    channel: Channel,
    /// Arenas that it made, weights first.
    weights: Option<OwnedFd>,
    kv: Option<OwnedFd>,
}

impl Worker {
    fn start() -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        // The shell moves its standard input to descriptor 3.
        let child = Command::new("sh")
            .args(["-c", "exec \"$0\" 3<&0 </dev/null", env!("CARGO_BIN_EXE_pagedd-worker")])
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, channel: Channel::new(ours).unwrap(), weights: None, kv: None }
    }

    fn recv(&mut self) -> FromWorker {
        self.channel.recv_timeout(LIMIT).unwrap()
    }

    /// Up to `Ready` or `Failed`.
    fn hello(
        &mut self,
        hello: &Hello,
        weights: Option<OwnedFd>,
        kv: Option<OwnedFd>,
    ) -> Result<ModelInfo, (String, bool)> {
        let hello = Hello { weights_fd: weights.is_some(), kv_fd: kv.is_some(), ..hello.clone() };
        let fds: Vec<_> = weights.iter().chain(&kv).map(OwnedFd::as_fd).collect();
        self.channel.send(&ToWorker::Hello(hello), &fds).unwrap();
        let mut loading = None;
        let info = loop {
            match self.recv() {
                FromWorker::Loading { permille } => {
                    assert!(loading < Some(permille) && permille <= 1000, "{loading:?}, then {permille}");
                    loading = Some(permille);
                }
                FromWorker::Arena { arena, bytes } => {
                    let fd = self.channel.take_fd().unwrap();
                    assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size as u64, bytes);
                    match arena {
                        Arena::Weights => self.weights = Some(fd),
                        Arena::Kv => self.kv = Some(fd),
                    }
                }
                FromWorker::Ready(info) => break *info,
                FromWorker::Failed { error, retry } => return Err((error, retry)),
                FromWorker::Output(output) => panic!("{output:?} before ready"),
            }
        };
        assert_eq!(info.weights_reused, self.weights.is_none());
        assert_eq!(info.kv_reused, self.kv.is_none());
        self.weights = self.weights.take().or(weights);
        self.kv = self.kv.take().or(kv);
        Ok(info)
    }

    fn send(&mut self, message: &ToWorker) {
        self.channel.send(message, &[]).unwrap();
    }

    fn run(&mut self, plan: &Plan) -> Output {
        self.send(&ToWorker::Plan(plan.clone()));
        self.collect()
    }

    /// The output of the oldest plan that has no answer.
    fn collect(&mut self) -> Output {
        self.send(&ToWorker::Collect);
        match self.recv() {
            FromWorker::Output(output) => output,
            other => panic!("{other:?}"),
        }
    }

    /// The next frame is `Failed`, and the worker ends.
    fn failed(&mut self) -> (String, bool) {
        match self.recv() {
            FromWorker::Failed { error, retry } => {
                assert!(!self.child.wait().unwrap().success());
                (error, retry)
            }
            other => panic!("{other:?}"),
        }
    }

    /// It ends within the limit, the socket closed by then.
    fn ends(&mut self) -> ExitStatus {
        assert!(matches!(self.channel.recv_timeout::<FromWorker>(LIMIT), Err(ChannelError::Closed)));
        self.child.wait().unwrap()
    }

    /// A number of `/proc/PID/status`, in KiB.
    fn memory(&self, key: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim_start_matches(':').trim().trim_end_matches("kB").trim().parse().unwrap()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn driver(runner: &ModelRunner, want: usize) -> Driver {
    let mut driver = Driver::new(runner);
    driver.overlap = true;
    let vocab = runner.info().vocab_size;
    for id in 1..=3 {
        driver.seqs.push(Seq::new(id, &tokens(id, 40 + id as usize, vocab), want));
    }
    driver
}

/// Runs `driver` on a worker that is killed after every `every` plans, its last output being lost.
fn run_with_kills(mut driver: Driver, hello: &Hello, every: usize) -> Driver {
    let mut worker = Worker::start();
    let first = worker.hello(hello, None, None).unwrap();
    let mut since = 0;
    loop {
        let before = driver.clone();
        let Some(mut plan) = driver.plan() else { return driver };
        since += 1;
        if since == every {
            since = 0;
            // In the middle of the plan, or before it, or after: the outcome must be the same.
            worker.send(&ToWorker::Plan(plan.clone()));
            worker.child.kill().unwrap();
            worker.child.wait().unwrap();
            let (weights, kv) = (worker.weights.take(), worker.kv.take());
            worker = Worker::start();
            let start = Instant::now();
            let info = worker.hello(hello, weights, kv).unwrap();
            assert!(info.weights_reused && info.kv_reused);
            assert_eq!((info.digest, info.blocks), (first.digest, first.blocks));
            println!("ready again after {:?}", start.elapsed());
            worker.send(&ToWorker::Resync(before.snapshot()));
            plan = crate::driver::known(&plan, &before);
        }
        let output = worker.run(&plan);
        driver.apply(&plan, &output);
    }
}

#[test]
fn a_killed_worker_is_replaced_with_its_arenas_and_draws_the_same_tokens() {
    let (_dir, path) = tiny(&TinyModel::of_type(TensorType::Q4_1));
    let hello = hello(&path, Dtype::Auto);
    let mut runner = load(&hello);
    let mut expected = driver(&runner, 20);
    expected.finish(&mut runner);
    for every in [1, 2, 5] {
        let got = run_with_kills(driver(&runner, 20), &hello, every);
        for id in 1..=3 {
            assert_eq!(bits(&expected.drawn[&id]), bits(&got.drawn[&id]), "killed after every {every} plans");
        }
    }
}

#[test]
fn the_real_model_survives_a_kill_without_loading_its_weights_again() {
    let mut runner = load_real(Dtype::Auto, |_| {});
    let mut expected = driver(&runner, 6);
    expected.finish(&mut runner);
    let got = run_with_kills(driver(&runner, 6), &hello(&real(), Dtype::Auto), 4);
    for id in 1..=3 {
        assert_eq!(bits(&expected.drawn[&id]), bits(&got.drawn[&id]));
    }
}

#[test]
fn private_memory_stays_small_beside_the_arenas() {
    let mut worker = Worker::start();
    let hello = hello(&real(), Dtype::Auto);
    let info = worker.hello(&hello, None, None).unwrap();
    let loaded = worker.memory("RssAnon");
    let runner = load_real(Dtype::Auto, |_| {});
    let mut driver = driver(&runner, 4);
    while let Some(plan) = driver.plan() {
        let output = worker.run(&plan);
        driver.apply(&plan, &output);
    }
    let (anon, shared) = (worker.memory("RssAnon"), worker.memory("RssShmem"));
    println!("RssAnon {loaded} KiB loaded, {anon} KiB after work; RssShmem {shared} KiB");
    assert!(loaded < 32 << 10, "RssAnon {loaded} KiB");
    assert!(anon < 48 << 10, "RssAnon {anon} KiB");
    // KV takes memory as it is used.
    assert!(shared < (info.weight_bytes >> 10) + (16 << 10), "RssShmem {shared} KiB");
}

#[test]
fn end_of_file_and_shutdown_end_the_worker_cleanly() {
    let (_dir, path) = tiny(&TinyModel::default());
    let mut worker = Worker::start();
    worker.hello(&hello(&path, Dtype::Auto), None, None).unwrap();
    worker.send(&ToWorker::Shutdown);
    assert!(worker.ends().success());

    let mut worker = Worker::start();
    worker.hello(&hello(&path, Dtype::Auto), None, None).unwrap();
    let (ours, _) = UnixStream::pair().unwrap();
    worker.channel = Channel::new(ours).unwrap();
    assert!(worker.child.wait().unwrap().success());
}

#[test]
fn a_worker_without_a_socket_says_who_starts_it() {
    let output = Command::new("sh")
        .args(["-c", "exec \"$0\" 3<&-", env!("CARGO_BIN_EXE_pagedd-worker")])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.contains("no socket on descriptor 3: pagedd-worker is started by the pagedd daemon"),
        "{text}"
    );
}

#[test]
fn a_bad_plan_ends_the_worker_with_its_reason() {
    let (_dir, path) = tiny(&TinyModel::default());
    let runner = load(&hello(&path, Dtype::Auto));
    let mut worker = Worker::start();
    worker.hello(&hello(&path, Dtype::Auto), None, None).unwrap();
    let mut plan = driver(&runner, 1).plan().unwrap();
    plan.rows[1].table.blocks[0] = 5000;
    worker.send(&ToWorker::Plan(plan));
    assert_eq!(worker.failed(), ("plan 1: block 5000 of 1024".to_owned(), false));
}

#[test]
fn a_plan_is_taken_while_another_has_no_answer_and_each_is_answered_when_it_is_asked_for() {
    let (_dir, path) = tiny(&TinyModel::default());
    let mut runner = load(&hello(&path, Dtype::Auto));
    let mut driver = driver(&runner, 10);
    let mut history = Vec::new();
    while let Some(plan) = driver.plan() {
        let output = runner.run(&plan).unwrap();
        driver.apply(&plan, &output);
        history.push((plan, output));
    }
    let mut worker = Worker::start();
    worker.hello(&hello(&path, Dtype::Auto), None, None).unwrap();
    let mut plans = history.iter().map(|(plan, _)| ToWorker::Plan(plan.clone()));
    worker.send(&plans.next().unwrap());
    for (plan, expected) in &history {
        if let Some(next) = plans.next() {
            worker.send(&next);
        }
        let output = worker.collect();
        assert_eq!(output.plan, plan.id);
        assert_eq!(Output { compute_us: 0, ..output }, Output { compute_us: 0, ..expected.clone() });
    }
}

#[test]
fn more_plans_than_agreed_and_a_question_for_no_plan_are_refused() {
    let (_dir, path) = tiny(&TinyModel::default());
    let mut worker = Worker::start();
    worker.hello(&hello(&path, Dtype::Auto), None, None).unwrap();
    for id in 1..=MOST_IN_FLIGHT as u64 + 1 {
        worker.send(&ToWorker::Plan(Plan { id, ..Plan::default() }));
    }
    let (error, _) = worker.failed();
    assert!(error.contains("plan 3 comes while 2 have no answer"), "{error}");

    let mut worker = Worker::start();
    worker.hello(&hello(&path, Dtype::Auto), None, None).unwrap();
    worker.run(&Plan { id: 1, ..Plan::default() });
    worker.send(&ToWorker::Collect);
    let (error, _) = worker.failed();
    assert!(error.contains("it collects, and every plan has its answer"), "{error}");
}

#[test]
fn another_protocol_version_and_a_wrong_first_frame_are_refused() {
    let (_dir, path) = tiny(&TinyModel::default());
    let mut worker = Worker::start();
    let hello = Hello { protocol: 99, ..hello(&path, Dtype::Auto) };
    let (error, retry) = worker.hello(&hello, None, None).unwrap_err();
    assert!(error.contains(&format!("it has version 99, this worker {PROTOCOL}")), "{error}");
    assert!(!retry);
    let mut worker = Worker::start();
    worker.send(&ToWorker::Plan(Plan::default()));
    assert!(worker.failed().0.contains("the first frame is no hello"));
}

#[test]
fn models_that_lie_are_refused_with_the_tensor_or_key_named() {
    let model = TinyModel::default();
    let whole = gguf_writer(7, &model).bytes();
    let mut cases = vec![("cut short", whole[..whole.len() - 5000].to_vec(), "blk.1.")];
    let mut writer = gguf_writer(7, &model);
    writer.tensor("blk.0.ffn_down.weight").unwrap().extents = vec![1 << 40, 1 << 20];
    cases.push(("huge", writer.bytes(), "blk.0.ffn_down.weight"));
    let mut writer = gguf_writer(7, &model);
    writer.tensors.retain(|tensor| tensor.name != "blk.1.attn_k.weight");
    cases.push(("a tensor less", writer.bytes(), "blk.1.attn_k.weight"));
    let mut writer = gguf_writer(7, &model);
    writer.set("llama.attention.head_count", GgufValue::U32(0));
    cases.push(("no heads", writer.bytes(), "head_count"));
    let mut writer = gguf_writer(7, &model);
    writer.set("general.architecture", "mamba");
    cases.push(("another family", writer.bytes(), "mamba"));

    let dir = tempfile::tempdir().unwrap();
    for (what, bytes, named) in cases {
        let path = dir.path().join("bad.gguf");
        std::fs::write(&path, bytes).unwrap();
        refused(&path, what, named);
    }
    refused(&dir.path().join("absent.gguf"), "absent", "absent.gguf");
}

fn refused(path: &Path, what: &str, named: &str) {
    let mut worker = Worker::start();
    let (error, _) = worker.hello(&hello(path, Dtype::Auto), None, None).unwrap_err();
    println!("{what}: {error}");
    assert!(error.contains(named) && !error.contains('\n'), "{what}: {error}");
    assert!(!worker.ends().success());
}

#[test]
fn foreign_and_stale_fds_are_replaced() {
    let (_a, path) = tiny(&TinyModel::default());
    let (_b, other) = tiny(&TinyModel::of_type(TensorType::Q8_0));
    let hello_of = |path: &Path| hello(path, Dtype::Auto);
    let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let mut worker = Worker::start();
    let info = worker.hello(&hello_of(&path), Some(null()), Some(null())).unwrap();
    assert!(!info.weights_reused && !info.kv_reused);
    // Arenas of another model.
    let (weights, kv) = (worker.weights.take(), worker.kv.take());
    let mut worker = Worker::start();
    let info = worker.hello(&hello_of(&other), weights, kv).unwrap();
    assert!(!info.weights_reused && !info.kv_reused);
    // Only one is passed on.
    let weights = worker.weights.take();
    let mut worker = Worker::start();
    let info = worker.hello(&hello_of(&other), weights, None).unwrap();
    assert!(info.weights_reused && !info.kv_reused);
}
