//! The step loop.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use fail::fail_point;
use pagedd_core::{FinishReason, TenantId};
use pagedd_sched::{AdmitError, Applied, Finished, Restored, Scheduler, StepOutput, StepPlan};
use tracing::{error, warn};

use crate::handle::{Command, Inbox, Placed};
use crate::held::Held;
use crate::traits::{BlockLedger, EngineStats, Journal, Observer, Worker, WorkerLost, WorkersExhausted};

/// How an engine behaves.
#[derive(Clone, Copy, Debug)]
pub struct EngineConfig {
    /// Between two observations while the engine works.
    pub observe_every: Duration,
    /// Plans that the worker may have, 1 at least. With 1 each plan is applied before the next one is made. With 2 the worker has its next
    /// plan before the output of the last one is collected, and never waits for this thread.
    pub depth: usize,
    /// A plan that has taken this many workers with it is accused: from then on parts of it run alone, and one death is enough,
    /// until the request is found that kills workers.
    pub plan_deaths: u32,
    /// After this many deaths without a completed step no single request is to blame: all that are under suspicion fail.
    pub deaths_in_a_row: u32,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { observe_every: Duration::from_millis(100), depth: 1, plan_deaths: 2, deaths_in_a_row: 16 }
    }
}

/// How long an engine waits whose requests cannot run before it looks again.
const IDLE_TURN: Duration = Duration::from_secs(1);

/// A plan that was not applied yet.
struct Flight {
    plan: StepPlan,
    /// Workers that were lost while they had it.
    deaths: u32,
}

/// One model's engine. Lives on its own thread, inside [`Engine::run`].
pub struct Engine<W, J: Journal, O> {
    config: EngineConfig,
    inbox: Inbox<J::Ticket>,
    scheduler: Scheduler,
    held: Held,
    ledger: Option<Box<dyn BlockLedger + Send>>,
    worker: W,
    /// Oldest first.
    flights: VecDeque<Flight>,
    /// So many of them the worker has, the oldest.
    sent: usize,
    journal: J,
    observer: O,
    start: Instant,
    observed: Option<Instant>,
    /// Workers lost since the last completed step.
    deaths: u32,
    /// Numbers that the scheduler does not keep; its own are filled in when observed.
    stats: EngineStats,
}

impl<W: Worker, J: Journal, O: Observer> Engine<W, J, O> {
    /// An engine that has not started. `start` is the zero of its clock.
    pub fn new(
        config: EngineConfig,
        inbox: Inbox<J::Ticket>,
        scheduler: Scheduler,
        worker: W,
        journal: J,
        observer: O,
        start: Instant,
    ) -> Self {
        let (held, stats) = (Held::default(), EngineStats::default());
        Self {
            config,
            inbox,
            scheduler,
            held,
            ledger: None,
            worker,
            flights: VecDeque::new(),
            sent: 0,
            journal,
            observer,
            start,
            observed: None,
            deaths: 0,
            stats,
        }
    }

    /// With a ledger of the arena. A tenant's blocks in it are adopted as soon as the tenant has a share.
    #[must_use]
    pub fn with_ledger(mut self, ledger: Box<dyn BlockLedger + Send>) -> Self {
        self.scheduler.watch_blocks();
        self.ledger = Some(ledger);
        self
    }

    /// Runs until [`Command::Stop`] or until every handle is gone, also where no worker can be had: then every request ends as the worker
    /// says, those too that were in the inbox or come later, so that none waits for ever.
    ///
    /// # Errors
    /// [`WorkersExhausted`]: no worker could be had, and not since this process ends; every request was finished.
    pub fn run(mut self) -> Result<(), WorkersExhausted> {
        self.steps().inspect_err(|_| self.run_without_worker())
    }

    /// Ends every request that still comes.
    fn run_without_worker(&mut self) {
        if self.worker.ends_as().is_none() {
            return;
        }
        loop {
            let Some(command) = self.rest() else { return };
            if self.obey(command).is_break() {
                return;
            }
            self.end_all();
        }
    }

    fn end_all(&mut self) {
        let Some(reason) = self.worker.ends_as() else { return };
        let mut finished = self.scheduler.fail_all();
        for end in &mut finished {
            end.reason = reason;
        }
        let held = self.held.take(None).into_iter();
        finished.extend(held.flat_map(|mut held| held.finish(reason)));
        self.commit_finished(finished);
        self.observe(true);
    }

    /// The loop: the worker is given what it may have, then the oldest plan is waited for. A plan that is out when the engine is told to stop
    /// is as lost as with a process that ends: it is made again from the journal.
    fn steps(&mut self) -> Result<(), WorkersExhausted> {
        loop {
            self.observer.turned();
            fail_point!("engine-turn");
            if self.drain_inbox().is_break() {
                return Ok(());
            }
            match self.submit().and_then(|()| self.collect()) {
                Ok(Some((plan, output))) => self.complete(plan, output),
                Ok(None) => {
                    if self.idle().is_break() {
                        return Ok(());
                    }
                }
                // With its worker killed for that, no request is to blame.
                Err(_) if self.worker.ends_as().is_none() => return Ok(()),
                Err(lost) => {
                    if let Err(exhausted) = self.replace_worker(&lost) {
                        // The process may have begun to end while another was looked for.
                        return if self.worker.ends_as().is_some() { Err(exhausted) } else { Ok(()) };
                    }
                }
            }
        }
    }

    /// Gives the worker as many plans as it may have. What a plan may write is cleared in the ledger before the plan is sent.
    fn submit(&mut self) -> Result<(), WorkerLost> {
        while self.sent < self.depth() {
            if self.sent == self.flights.len() {
                let now = self.now_us();
                let Some(plan) = self.scheduler.schedule(now) else { break };
                fail_point!("before-blocks-are-cleared");
                self.write_ledger();
                fail_point!("after-blocks-are-cleared");
                self.flights.push_back(Flight { plan, deaths: 0 });
            }
            // Where sending fails, the worker may have it.
            self.sent += 1;
            self.worker.submit(&self.flights[self.sent - 1].plan)?;
        }
        Ok(())
    }

    /// How many plans the worker may have: one while a request is looked for that kills workers, and until all plans were applied that
    /// a lost worker had.
    fn depth(&self) -> usize {
        let died = self.flights.iter().any(|flight| flight.deaths > 0);
        if died || self.scheduler.suspects() > 0 { 1 } else { self.config.depth.max(1) }
    }

    /// The oldest plan and its output; `None` where the worker has none.
    fn collect(&mut self) -> Result<Option<(StepPlan, StepOutput)>, WorkerLost> {
        if self.sent == 0 {
            return Ok(None);
        }
        let output = self.worker.collect()?;
        self.sent -= 1;
        Ok(self.flights.pop_front().map(|Flight { plan, .. }| (plan, output)))
    }

    /// From a plan's output to its commit.
    fn complete(&mut self, plan: StepPlan, output: StepOutput) {
        self.deaths = 0;
        self.stats.steps += 1;
        self.stats.compute_us += output.compute_us;
        let cost = &self.scheduler.config().cost;
        if cost.is_known() {
            let predicted_us = plan.predicted_us(cost) as u64;
            self.stats.predicted_us += predicted_us;
            self.stats.misjudged_us += predicted_us.abs_diff(output.compute_us);
        }
        self.stats.computed_tokens += u64::from(plan.input_tokens().0);
        for later in &mut self.flights {
            later.plan.resolve(&output);
        }
        let record = self.scheduler.apply(plan, output);
        fail_point!("before-blocks-are-committed");
        self.write_ledger();
        fail_point!("after-blocks-are-committed");
        self.stats.last_step_us = Some(self.now_us());
        let computed = Instant::now();
        self.journal.commit(record);
        self.stats.commit_ns += computed.elapsed().as_nanos() as u64;
        self.observe(false);
    }

    /// Brings up another worker, which is then given the plans that were not applied, or fewer where one of them kills workers.
    ///
    /// Any plan that a worker had may have ended it: it may run one while nobody asked for the output of the one before. So a death
    /// counts for all that it had. They go on one at a time, and only the death of a worker that had a single plan accuses: the one that
    /// kills does so again, after as many deaths in all as if they had never been out together, and none is accused for what another
    /// does. (Where workers die only of two plans together, each gets through alone.)
    fn replace_worker(&mut self, lost: &WorkerLost) -> Result<(), WorkersExhausted> {
        self.stats.workers_lost += 1;
        self.deaths += 1;
        let sent = std::mem::take(&mut self.sent);
        self.flights.iter_mut().take(sent).for_each(|flight| flight.deaths += 1);
        let most = if self.scheduler.suspects() > 0 { 1 } else { self.config.plan_deaths };
        if let Some(Flight { plan, deaths }) = self.flights.front() {
            warn!(
                plan = plan.id.0,
                sent,
                rows = plan.rows.len(),
                deaths,
                reason = lost.reason,
                "worker lost"
            );
            if sent == 1 && *deaths >= most {
                // Before another comes up, which is not to know of it.
                self.accuse();
            }
        }
        self.recover()?;
        fail_point!("before-replay");
        Ok(())
    }

    fn recover(&mut self) -> Result<(), WorkersExhausted> {
        let sequences = self.scheduler.snapshot();
        self.worker.recover(sequences).inspect_err(|exhausted| {
            if self.worker.ends_as().is_some() {
                error!(reason = exhausted.reason, "no worker can be had; every request of this model ends");
                self.end_all();
            }
        })
    }

    /// The oldest plan kills workers: undoes it, and before it those that were made after it, which never ran alone. What they would have
    /// begun, copied or written never happened: the next worker is told the scheduler's state.
    fn accuse(&mut self) {
        let Some(oldest) = self.flights.pop_front() else { return };
        for later in self.flights.drain(..).rev() {
            self.scheduler.revert(later.plan);
        }
        let mut finished = self.scheduler.accuse(oldest.plan);
        if self.deaths >= self.config.deaths_in_a_row {
            self.deaths = 0;
            finished.extend(self.scheduler.fail_suspects());
        }
        for request in finished.iter().filter(|end| end.ended.is_some()).map(|end| end.request) {
            error!(%request, "workers die on this request; it fails");
        }
        self.commit_finished(finished);
    }

    /// Takes every command that waits.
    fn drain_inbox(&mut self) -> ControlFlow<()> {
        loop {
            match self.inbox.receiver.try_recv() {
                Ok(command) => self.obey(command)?,
                Err(TryRecvError::Empty) => return ControlFlow::Continue(()),
                Err(TryRecvError::Disconnected) => return ControlFlow::Break(()),
            }
        }
    }

    /// Nothing can run: waits for a command.
    fn idle(&mut self) -> ControlFlow<()> {
        if let Err(violation) = self.scheduler.check() {
            error!(%violation, "the block ledger does not add up");
        }
        self.observe(true);
        if self.scheduler.is_idle() {
            return self.rest().map_or(ControlFlow::Break(()), |command| self.obey(command));
        }
        match self.inbox.receiver.recv_timeout(IDLE_TURN) {
            Ok(command) => self.obey(command),
            Err(RecvTimeoutError::Timeout) => ControlFlow::Continue(()),
            Err(RecvTimeoutError::Disconnected) => ControlFlow::Break(()),
        }
    }

    /// The next command, however long it takes; `None` once there is no handle.
    fn rest(&mut self) -> Option<Command<J::Ticket>> {
        self.observer.rests();
        let command = self.inbox.receiver.recv().ok();
        self.observer.turned();
        command
    }

    fn obey(&mut self, command: Command<J::Ticket>) -> ControlFlow<()> {
        match command {
            Command::Submit(submission) => {
                let id = submission.request.id;
                match self.scheduler.admit(submission.request) {
                    Ok(()) => self.journal.admitted(id, submission.ticket),
                    Err(error) => self.journal.refused(submission.ticket, error),
                }
            }
            Command::Restore { restored, reply } => {
                reply(self.restore(*restored));
            }
            Command::Hold(restored) => self.held.keep(*restored),
            Command::Cancel(request) => {
                let mut finished = self.scheduler.cancel(request);
                finished.extend(self.held.cancel(request));
                self.commit_finished(finished);
            }
            Command::FinishChoice { request, choice, reason } => {
                let mut finished = self.scheduler.finish_choice(request, choice, reason);
                finished.extend(self.held.finish_choice(request, choice, reason));
                self.commit_finished(finished);
            }
            Command::SetTenant { tenant, share, prompt_lookup, reply } => {
                let set = self.scheduler.set_share(tenant, share);
                if set.is_ok() {
                    self.scheduler.set_prompt_lookup(tenant, prompt_lookup);
                    self.adopt(tenant);
                    let held = self.held.take_waiting(tenant);
                    for restored in held {
                        self.restore(restored);
                    }
                }
                reply(set);
                self.observe(true);
            }
            Command::RemoveTenant { tenant, reply } => {
                let mut finished = self.scheduler.remove_tenant(tenant);
                let held = self.held.take(Some(tenant)).into_iter();
                finished.extend(held.flat_map(|mut held| held.finish(FinishReason::Cancelled)));
                self.commit_finished(finished);
                self.write_ledger();
                reply(());
                self.observe(true);
            }
            Command::Tune(tuning) => self.scheduler.tune(tuning),
            Command::Stop => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    fn write_ledger(&mut self) {
        if let Some(ledger) = &mut self.ledger {
            let changes = self.scheduler.take_ledger_changes();
            fail_point!("blocks-are-half-written", changes.len() > 1, |_| {
                ledger.write(&changes[..changes.len() / 2]);
                std::process::abort();
            });
            ledger.write(&changes);
        }
    }

    fn adopt(&mut self, tenant: TenantId) {
        if let Some(ledger) = &self.ledger {
            self.stats.adopted_blocks += u64::from(self.scheduler.adopt(ledger.records(tenant)));
        }
    }

    /// Its admission is durable already, so that the journal hears of it again only when something of it ends.
    fn restore(&mut self, mut restored: Restored) -> Placed {
        match self.scheduler.restore(&restored) {
            Ok(finished) => self.commit_finished(finished),
            Err(AdmitError::UnknownTenant(_)) => {
                self.held.push(restored);
                return Placed::Waits;
            }
            Err(error @ AdmitError::Duplicate(_)) => error!(%error, "restored twice"),
            Err(
                error @ (AdmitError::ContextLength { .. }
                | AdmitError::NeverFits { .. }
                | AdmitError::QueueFull { .. }
                | AdmitError::Nothing { .. }),
            ) => {
                error!(request = %restored.request.id, %error, "an accepted request cannot go on");
                let finished = restored.finish(FinishReason::Failed);
                self.commit_finished(finished);
            }
        }
        Placed::Taken
    }

    fn commit_finished(&mut self, finished: Vec<Finished>) {
        if !finished.is_empty() {
            self.journal.commit(Applied { finished, ..Applied::default() });
        }
    }

    fn observe(&mut self, now: bool) {
        let due = self.observed.is_none_or(|at| at.elapsed() >= self.config.observe_every);
        if now || due {
            self.observed = Some(Instant::now());
            self.observer.observe(EngineStats { scheduler: self.scheduler.stats(), ..self.stats.clone() });
        }
    }

    fn now_us(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }
}
