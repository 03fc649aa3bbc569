//! Threads that run one task together and wait for each other.
//!
//! **Owns** the threads and the hand-over between them. **Never** decides how work is split: a task sees its index and takes its part.
//!
//! A waiting thread spins for at most [`SPIN`], then parks: idle costs no CPU time, and a cgroup's quota is not burned at a barrier.
#![allow(unsafe_code)]

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::disjoint::Disjoint;

/// How long a thread looks before it parks.
const SPIN: Duration = Duration::from_micros(20);
/// Looks between two readings of the clock.
const LOOKS: u32 = 32;

type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Threads that run a task together.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the one call of [`ThreadPool::run`] that has the workers.
    turn: Mutex<()>,
}

struct Shared {
    /// Changes when there is a new task or the pool ends.
    epoch: AtomicU32,
    /// Address of the running call's `&Task`; valid from the change of `epoch` until `pending` is 0.
    task: AtomicPtr<&'static Task<'static>>,
    /// Workers that have not finished the task.
    pending: AtomicUsize,
    /// All threads, the caller included.
    threads: usize,
    quit: AtomicBool,
    /// Per worker: it is parked or about to.
    asleep: Vec<AtomicBool>,
    caller_asleep: AtomicBool,
    caller: Mutex<Option<Thread>>,
    /// First panic of a worker in the running task.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl ThreadPool {
    /// A pool of `threads` threads (at least 1), of which the caller of [`ThreadPool::run`] is the first.
    ///
    /// `cpus` pins thread `i` to `cpus[i % cpus.len()]`; the calling thread counts as thread 0 and is pinned too.
    ///
    /// # Errors
    /// The system refuses a thread, or a CPU to pin to.
    pub fn new(threads: usize, cpus: Option<&[usize]>) -> io::Result<Self> {
        let threads = threads.max(1);
        let cpu = |index: usize| cpus.filter(|c| !c.is_empty()).map(|c| c[index % c.len()]);
        if let Some(cpu) = cpu(0) {
            pin(cpu)?;
        }
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            task: AtomicPtr::new(std::ptr::null_mut()),
            pending: AtomicUsize::new(0),
            threads,
            quit: AtomicBool::new(false),
            asleep: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            caller_asleep: AtomicBool::new(false),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
        });
        let mut pool = Self { shared, workers: Vec::with_capacity(threads - 1), turn: Mutex::new(()) };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let cpu = cpu(index);
            let (report, reported) = std::sync::mpsc::sync_channel(1);
            pool.workers.push(thread::Builder::new().name(format!("compute-{index}")).spawn(move || {
                let pinned = cpu.map_or(Ok(()), pin);
                let start = pinned.is_ok();
                // The receiver waits below; were it gone, so is the pool.
                if report.send(pinned).is_ok() && start {
                    shared.work(index);
                }
            })?);
            reported.recv().map_err(io::Error::other)??;
        }
        Ok(pool)
    }

    /// Number of threads, the caller included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.shared.threads
    }

    /// Runs `task(index, of)` once on each thread, `index` in `[0, of)`, the caller being index 0; returns when all are done.
    ///
    /// While another call has the workers (from another thread, or from inside a task), the caller runs `task(0, 1)` alone.
    ///
    /// # Panics
    /// With the panic of a task, after all threads have finished.
    pub fn run(&self, task: &Task<'_>) {
        let threads = self.shared.threads;
        if threads == 1 {
            return task(0, 1);
        }
        let turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            // A panic of a task passed through an earlier call; the lock guards no data.
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => return task(0, 1),
        };
        let shared = &*self.shared;
        let task: *const &Task<'_> = &raw const task;
        shared.task.store(task.cast_mut().cast(), Ordering::Relaxed);
        shared.pending.store(threads - 1, Ordering::Relaxed);
        // SeqCst: a worker sets `asleep` and then reads `epoch`; here it is the other way round. One of both sees the other.
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.wake();
        // SAFETY: `task` points at this function's own parameter, which lives until the function returns.
        let mine = catch_unwind(AssertUnwindSafe(|| unsafe { *task }(0, threads)));
        shared.wait_for_workers();
        let theirs = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(turn);
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        if let Some(panic) = theirs {
            resume_unwind(panic);
        }
    }

    /// Runs `each(index, part)` for the parts of `data` of `size` elements (the last may be shorter), spread over the threads.
    pub fn for_parts<T: Send>(&self, data: &mut [T], size: usize, each: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let (size, len) = (size.max(1), data.len());
        let parts = len.div_ceil(size);
        if parts <= 1 || self.threads() == 1 {
            data.chunks_mut(size).enumerate().for_each(|(index, part)| each(index, part));
            return;
        }
        let data = Disjoint::new(data);
        self.for_each(parts, &|index| {
            // SAFETY: `for_each` gives each index to one thread, and the ranges of different indices do not overlap.
            let part = unsafe { data.part(index * size..len.min((index + 1) * size)) };
            each(index, part);
        });
    }

    /// Runs `each(index)` once for every index in `[0, count)`, spread over the threads as they come free.
    pub(crate) fn for_each(&self, count: usize, each: &(dyn Fn(usize) + Sync)) {
        if count <= 1 || self.threads() == 1 {
            return (0..count).for_each(each);
        }
        let next = AtomicUsize::new(0);
        self.run(&|_, _| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    break;
                }
                each(index);
            }
        });
    }

    fn wake(&self) {
        for (worker, asleep) in self.workers.iter().zip(&self.shared.asleep) {
            if asleep.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.wake();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so joining it cannot fail.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThreadPool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut seen = 0;
        loop {
            let asleep = &self.asleep[index - 1];
            wait(asleep, || self.epoch.load(Ordering::SeqCst) != seen);
            seen = self.epoch.load(Ordering::SeqCst);
            if self.quit.load(Ordering::SeqCst) {
                return;
            }
            let task = self.task.load(Ordering::Relaxed);
            // SAFETY: `run` stored the address of its own `&Task` before it changed `epoch`, and does not return before this
            // worker's decrement of `pending` below; the pool's end, which stores none, was handled above.
            let task: &Task<'_> = unsafe { *task };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(index, self.threads))) {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
            if self.pending.fetch_sub(1, Ordering::SeqCst) == 1 && self.caller_asleep.load(Ordering::SeqCst) {
                let caller = self.caller.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(caller) = &*caller {
                    caller.unpark();
                }
            }
        }
    }

    fn wait_for_workers(&self) {
        let done = || self.pending.load(Ordering::SeqCst) == 0;
        if spin(done) {
            return;
        }
        *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
        park(&self.caller_asleep, done);
    }
}

fn wait(asleep: &AtomicBool, done: impl Fn() -> bool) {
    if !spin(&done) {
        park(asleep, done);
    }
}

/// Looks for at most [`SPIN`]; whether `done` came true.
fn spin(done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..LOOKS {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            return done();
        }
    }
}

/// Parks until `done`. Who makes it true and then sees `asleep` must unpark this thread.
fn park(asleep: &AtomicBool, done: impl Fn() -> bool) {
    asleep.store(true, Ordering::SeqCst);
    while !done() {
        thread::park();
    }
    asleep.store(false, Ordering::SeqCst);
}

#[cfg(target_os = "linux")]
fn pin(cpu: usize) -> io::Result<()> {
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("no CPU {cpu} to pin a thread to")));
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

#[cfg(not(target_os = "linux"))]
fn pin(_cpu: usize) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn every_thread_runs_the_task_once_and_run_returns_after_all() {
        for threads in 1..=4 {
            let pool = ThreadPool::new(threads, None).unwrap();
            for round in 0..200_u64 {
                let seen = AtomicU64::new(0);
                pool.run(&|index, of| {
                    assert_eq!(of, threads);
                    seen.fetch_add(1 << (8 * index), Ordering::Relaxed);
                });
                let all = (0..threads).fold(0, |all, index| all | 1 << (8 * index));
                assert_eq!(seen.into_inner(), all, "{threads} threads, round {round}");
            }
        }
    }

    #[test]
    fn a_parked_pool_wakes_up_again() {
        let pool = ThreadPool::new(3, None).unwrap();
        for _ in 0..5 {
            while !pool.shared.asleep.iter().all(|asleep| asleep.load(Ordering::SeqCst)) {
                thread::yield_now();
            }
            let count = AtomicUsize::new(0);
            pool.run(&|_, _| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 3);
        }
    }

    #[test]
    fn a_panic_of_a_task_reaches_the_caller_and_the_pool_stays_usable() {
        let pool = ThreadPool::new(3, None).unwrap();
        for bad in 0..3 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|index, _| assert_ne!(index, bad, "on purpose"));
            }));
            assert!(outcome.is_err(), "index {bad}");
            let count = AtomicUsize::new(0);
            pool.run(&|_, _| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 3);
        }
    }

    #[test]
    fn a_task_inside_a_task_runs_on_its_own_thread() {
        let pool = ThreadPool::new(2, None).unwrap();
        let inner = AtomicUsize::new(0);
        pool.run(&|_, _| {
            pool.run(&|index, of| {
                assert_eq!((index, of), (0, 1));
                inner.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(inner.into_inner(), 2);
    }

    #[test]
    fn parts_cover_a_slice_once() {
        let pool = ThreadPool::new(3, None).unwrap();
        for len in [0, 1, 5, 64, 1000] {
            for size in [0, 1, 7, 64] {
                let mut data = vec![0_u32; len];
                pool.for_parts(&mut data, size, &|index, part| {
                    assert!(part.len() <= size.max(1));
                    for x in part {
                        *x += 1 + index as u32;
                    }
                });
                let want: Vec<u32> = (0..len).map(|i| 1 + (i / size.max(1)) as u32).collect();
                assert_eq!(data, want, "{len} in parts of {size}");
            }
        }
    }

    #[test]
    fn a_cpu_that_does_not_exist_is_an_error() {
        assert!(ThreadPool::new(2, Some(&[usize::MAX])).is_err());
    }
}
