//! A model whose device fails under it.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use pagedd_core::StepCost;
use pagedd_wire::Channel;
use pagedd_wire::worker::{
    Arena as Which, BlockCopy, Dtype, FromWorker, Hello, ModelInfo, Plan, Sampled, ToWorker,
};
use pagedd_worker::arena::{Arena, Header, Kind};
use pagedd_worker::batch::{Batch, Limits};
use pagedd_worker::load::LoadError;
use pagedd_worker::runner::{ArenaFd, Compute, Loaded, Pendings, RunError};
use pagedd_worker::sequence::Sequences;
use pagedd_worker::serve::serve_by;
use pagedd_worker::{Fds, ModelRunner};

use crate::models::hello;

const LIMIT: Duration = Duration::from_mins(1);

/// A device of this kind takes long to give its memory back.
static LET_GO: AtomicBool = AtomicBool::new(false);

/// Every step of it fails.
#[derive(Debug)]
struct Broken(Arena);

impl Drop for Broken {
    fn drop(&mut self) {
        LET_GO.store(true, Ordering::SeqCst);
    }
}

impl Compute for Broken {
    fn is_alone(&self, _: &Pendings, _: &Sequences) -> bool {
        false
    }

    fn forget(&mut self) {}

    fn submit(
        &mut self,
        _: &[BlockCopy],
        _: &Batch,
        _: &Pendings,
        _: &Sequences,
        _: &Limits,
    ) -> Result<bool, RunError> {
        Ok(false)
    }

    fn collect(&mut self, _: &Pendings) -> Result<Vec<Result<Sampled, String>>, RunError> {
        Err(RunError::Fd(std::io::Error::other("an illegal address")))
    }

    fn arena(&self, _: Which) -> Result<ArenaFd, RunError> {
        let fd = self.0.as_fd().try_clone_to_owned().map_err(RunError::Fd)?;
        Ok(ArenaFd { fd, bytes: 4096 })
    }

    fn data(&self, _: Which) -> &[u8] {
        &[]
    }

    fn set_aside(&mut self, _: u32) -> Result<(), RunError> {
        Ok(())
    }

    fn put_back(&mut self) {}
}

fn load(hello: &Hello, _: Fds, _: &mut dyn FnMut(u32) -> bool) -> Result<ModelRunner, LoadError> {
    let header = Header { kind: Kind::Kv, data_bytes: 4096, identity: [7; 32] };
    let model = Broken(Arena::create(header).and_then(Arena::complete)?);
    let info = ModelInfo {
        architecture: "broken".to_owned(),
        parameters: 0,
        vocab_size: 100,
        max_model_len: 64,
        block_size: hello.block_size,
        blocks: 4,
        block_bytes: 1024,
        weight_bytes: 4096,
        scratch_bytes: 0,
        pinned_bytes: 0,
        digest: [1; 16],
        file_digest: [2; 16],
        kv_id: model.0.id(),
        weights_reused: false,
        kv_reused: false,
        threads: 1,
        kernels: "none".to_owned(),
        load_us: 0,
        cost: StepCost::UNKNOWN.into(),
        algorithms: Vec::new(),
    };
    let hello = Hello { measure: false, ..hello.clone() };
    Ok(ModelRunner::new(&hello, Loaded { model: Box::new(model), info }))
}

#[test]
fn a_worker_whose_device_fails_says_so_and_leaves_its_memory_to_the_system() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let worker = thread::spawn(move || serve_by(&mut Channel::new(theirs).unwrap(), load));
    let mut channel = Channel::new(ours).unwrap();
    channel.send(&ToWorker::Hello(hello("nowhere".as_ref(), Dtype::Auto)), &[]).unwrap();
    while !matches!(channel.recv_timeout(LIMIT).unwrap(), FromWorker::Ready(_)) {}
    channel.send(&ToWorker::Plan(Plan { id: 1, ..Plan::default() }), &[]).unwrap();
    channel.send(&ToWorker::Collect, &[]).unwrap();
    let FromWorker::Failed { error, retry } = channel.recv_timeout(LIMIT).unwrap() else {
        panic!("no failure")
    };
    assert!(error.contains("an illegal address") && retry, "{error}");
    worker.join().unwrap().unwrap_err();
    assert!(!LET_GO.load(Ordering::SeqCst), "it gave back piece by piece what the system takes at once");
}
