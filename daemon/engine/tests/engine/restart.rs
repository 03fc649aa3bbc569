//! An engine that ends in the middle of everything, and the next one on the same arena.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pagedd_core::{BlockId, Blocks, SequenceId, TenantId, Tokens};
use pagedd_engine::{
    BlockLedger, Command, Engine, EngineConfig, EngineHandle, EngineStats, Submission, Worker, WorkerLost,
    WorkersExhausted, inbox,
};
use pagedd_kv::{Ledger, LedgerHeader};
use pagedd_sched::{
    LedgerChange, LedgerRecord, NewRequest, Restored, RestoredChoice, SequenceSnapshot, StepOutput, StepPlan,
};

use crate::bench::{BLOCK, Journaled, Keeper, Recorder, requests, scheduler, share};
use crate::toy;

/// A pool that has room for all, and one that gives blocks out again and again.
const POOLS: [u32; 2] = [1000, 110];

/// A ledger that both engines write, one after the other.
#[derive(Clone)]
struct Shared(Arc<Mutex<Ledger<Vec<u8>>>>);

impl BlockLedger for Shared {
    fn write(&mut self, changes: &[LedgerChange]) {
        BlockLedger::write(&mut *self.0.lock().unwrap(), changes);
    }

    fn records(&self, tenant: TenantId) -> Vec<(BlockId, LedgerRecord)> {
        BlockLedger::records(&*self.0.lock().unwrap(), tenant)
    }
}

/// An arena that outlives the engine, and its worker, which runs plans when they are collected or, where they are even, as they come.
#[derive(Clone)]
struct Arena {
    toy: Rc<RefCell<toy::Worker>>,
    /// Plans without an answer, the blocks that each writes, and outputs of those that have run.
    out: VecDeque<(StepPlan, BTreeSet<BlockId>, Option<StepOutput>)>,
    tables: BTreeMap<SequenceId, Vec<BlockId>>,
    ledger: Shared,
}

impl Arena {
    /// What is written by a plan that has no answer has no record.
    fn check_ledger(&self) {
        let ledger = self.ledger.0.lock().unwrap();
        for block in self.out.iter().flat_map(|(_, written, _)| written) {
            assert_eq!(ledger.record(*block), None, "{block} is written and not cleared");
        }
    }
}

impl Worker for Arena {
    fn submit(&mut self, plan: &StepPlan) -> Result<(), WorkerLost> {
        for begin in &plan.begin {
            self.tables.insert(begin.seq, Vec::new());
        }
        let mut written: BTreeSet<BlockId> = plan.copies.iter().map(|copy| copy.to).collect();
        for row in &plan.rows {
            let table = self.tables.entry(row.seq).or_default();
            table.truncate(row.table.from as usize);
            table.extend(&row.table.blocks);
            let (first, end) = (row.start.0 / BLOCK, row.start.0 + row.inputs.len() as u32);
            written.extend(&table[first as usize..end.div_ceil(BLOCK) as usize]);
        }
        self.out.push_back((plan.clone(), written, None));
        self.check_ledger();
        // In order: those before it first.
        if plan.id.0.is_multiple_of(2) {
            for (plan, _, output) in self.out.iter_mut().filter(|(.., output)| output.is_none()) {
                *output = Some(self.toy.borrow_mut().run(plan));
            }
        }
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, WorkerLost> {
        self.check_ledger();
        let (plan, _, output) = self.out.pop_front().unwrap();
        Ok(output.unwrap_or_else(|| self.toy.borrow_mut().run(&plan)))
    }

    fn recover(&mut self, _: Vec<SequenceSnapshot>) -> Result<(), WorkersExhausted> {
        unreachable!("nobody dies here")
    }
}

struct World {
    depth: usize,
    pool: u32,
    arena: Arena,
    journaled: Rc<RefCell<Journaled>>,
    stats: Rc<RefCell<EngineStats>>,
}

impl World {
    fn new(depth: usize, pool: u32) -> Self {
        let header = LedgerHeader {
            block_size: Tokens(BLOCK),
            blocks: Blocks(pool),
            block_bytes: 32,
            model: [0; 16],
            key_id: [0; 16],
            weight_epoch: 0,
        };
        let ledger = Ledger::format(vec![0; header.ledger_bytes()], &header, 1).unwrap();
        let ledger = Shared(Arc::new(Mutex::new(ledger)));
        let toy = Rc::new(RefCell::new(toy::Worker::new(pool, BLOCK)));
        let arena = Arena { toy, out: VecDeque::new(), tables: BTreeMap::new(), ledger };
        Self { depth, pool, arena, journaled: Rc::default(), stats: Rc::default() }
    }

    /// An engine that obeys `commands` until `open` choices ended or it made so many records.
    fn run(&self, commands: Vec<Command<()>>, open: u32, records: u32) -> EngineStats {
        let (handle, inbox): (EngineHandle<()>, _) = inbox(commands.len() + 2);
        for command in commands {
            handle.send(command).map_err(|(full, _)| full).unwrap();
        }
        self.arena.toy.borrow_mut().respawn(Vec::new());
        let journal = Recorder { journaled: Rc::clone(&self.journaled), handle, open, records };
        let observer = Keeper(Rc::clone(&self.stats));
        let config =
            EngineConfig { observe_every: Duration::ZERO, depth: self.depth, ..EngineConfig::default() };
        let (worker, start) = (self.arena.clone(), Instant::now());
        let engine = Engine::new(config, inbox, scheduler(self.pool), worker, journal, observer, start);
        engine.with_ledger(Box::new(self.arena.ledger.clone())).run().unwrap();
        self.stats.take()
    }

    /// What the journal gives back of a request.
    fn restored(&self, request: &NewRequest) -> Restored {
        let journaled = self.journaled.borrow();
        let choices = (0..request.n).map(|choice| {
            let (emitted, finished) =
                journaled.outputs.get(&(request.id, choice)).cloned().unwrap_or_default();
            RestoredChoice { emitted, finished }
        });
        let started = journaled.started.iter().find(|started| started.request == request.id);
        Restored {
            request: request.clone(),
            choices: choices.collect(),
            cached_tokens: started.map(|started| started.cached_tokens),
        }
    }
}

#[test]
fn the_next_engine_finds_all_full_blocks_and_gives_the_same() {
    for depth in [1, 2] {
        for (pool, records) in POOLS.into_iter().flat_map(|pool| (1..9).map(move |records| (pool, records))) {
            end_and_go_on(depth, pool, records);
        }
    }
}

/// An engine that ends after so many records, and others that go on.
fn end_and_go_on(depth: usize, pool: u32, records: u32) {
    let mut requests = requests();
    requests.iter_mut().step_by(3).for_each(|request| request.n = 2);
    requests.truncate(50);
    let world = World::new(depth, pool);
    let mut commands = vec![share(0, pool), share(1, pool)];
    commands.extend(
        requests
            .iter()
            .map(|request| Command::Submit(Box::new(Submission { request: request.clone(), ticket: () }))),
    );
    world.run(commands, u32::MAX, records);

    let restored: Vec<_> = requests.iter().map(|request| world.restored(request)).collect();
    let ends = |restored: &Restored| restored.choices.iter().filter(|c| c.finished.is_none()).count();
    let open: usize = restored.iter().map(ends).sum();
    let emitted: BTreeSet<_> = restored.iter().flat_map(|r| &r.choices).map(|c| c.emitted.len()).collect();
    let live = restored.into_iter().filter(|restored| ends(restored) > 0);
    let mut commands: Vec<_> =
        live.map(|live| Command::Restore { restored: Box::new(live), reply: Box::new(|_| ()) }).collect();
    // One tenant's share comes before its requests, the other's after them.
    commands.insert(0, share(0, pool));
    commands.push(share(1, pool));
    let first = world.run(commands, open as u32, 1);
    let most = open as u64 * u64::from(BLOCK);
    println!(
        "depth {depth}, {pool} blocks, {records} steps, {emitted:?} tokens each: {} blocks adopted, {} tokens computed for {open} choices",
        first.adopted_blocks, first.computed_tokens
    );
    assert!(first.adopted_blocks > 0, "nothing was adopted");
    if pool == POOLS[0] {
        assert!(first.computed_tokens <= most, "more than a block of each choice");
    }
    // And once more, with nothing lost in between.
    let restored = requests.iter().map(|request| world.restored(request));
    let live = restored.filter(|restored| ends(restored) > 0);
    let mut commands: Vec<_> =
        live.map(|live| Command::Restore { restored: Box::new(live), reply: Box::new(|_| ()) }).collect();
    let open = commands.len();
    commands.extend([share(0, pool), share(1, pool)]);
    if open > 0 {
        let open: usize = requests.iter().map(|request| ends(&world.restored(request))).sum();
        world.run(commands, open as u32, u32::MAX);
    }
    for request in &requests {
        world.journaled.borrow().check(request);
    }
}
