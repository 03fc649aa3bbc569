//! Metrics in `OpenMetrics` text, from the numbers that others watch and count.
//!
//! **Owns** names and labels; **never** counts itself. Tenants are a closed set, so their label is bounded. A tenant's own port
//! shows only its own numbers: its share of the pool is the whole pool there.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use pagedd_control::{DrainInfo, DrainState, ReloadInfo, ReloadOutcome, Walls};
use pagedd_core::{Blocks, FinishReason, Quota, TenantId};
use pagedd_engine::EngineStats;
use pagedd_host::hierarchy::{Pressure, Usage};
use pagedd_journal::Durability;
use pagedd_sched::TenantStats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, oneshot, watch};

use crate::daemon::Facts;
use crate::hub::{Counters, Message};
use crate::model::Model;
use crate::quota::{Accounts, TenantAccount};
use crate::status;
use crate::tenants::Tenant;
use crate::worker::ModelState;

/// Renders metrics. Cloneable; the numbers are where they always are.
#[derive(Clone)]
pub struct Exporter {
    hub: mpsc::Sender<Message>,
    durability: watch::Receiver<Durability>,
    /// Requests of an earlier daemon that go no further.
    set_aside: u64,
    accounts: Accounts,
}

type Labels = Vec<(&'static str, String)>;

/// One metric family. Names of counters are without `_total`, which the encoding adds.
#[derive(Debug)]
struct Family {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    samples: Vec<(Labels, f64)>,
}

/// Families in the order of their first sample.
#[derive(Debug, Default)]
struct Families(Vec<Family>);

impl Families {
    fn add(&mut self, kind: MetricType, name: &'static str, help: &'static str, labels: &Labels, value: f64) {
        let sample = (labels.clone(), value);
        match self.0.iter_mut().find(|family| family.name == name) {
            Some(family) => family.samples.push(sample),
            None => self.0.push(Family { name, help, kind, samples: vec![sample] }),
        }
    }

    fn gauge(&mut self, name: &'static str, help: &'static str, labels: &Labels, value: impl Into<f64>) {
        self.add(MetricType::Gauge, name, help, labels, value.into());
    }

    fn counter(&mut self, name: &'static str, help: &'static str, labels: &Labels, value: u64) {
        self.add(MetricType::Counter, name, help, labels, value as f64);
    }

    fn render(self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = text::encode(&mut text, &registry);
        text
    }
}

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for family in &self.0 {
            let mut metric = encoder.encode_descriptor(family.name, family.help, None, family.kind)?;
            for (labels, value) in &family.samples {
                let labels: Vec<(&str, &str)> =
                    labels.iter().map(|(name, value)| (*name, value.as_str())).collect();
                let sample = metric.encode_family(&labels)?;
                match family.kind {
                    MetricType::Counter => ConstCounter::new(*value).encode(sample)?,
                    _ => ConstGauge::new(*value).encode(sample)?,
                }
            }
        }
        Ok(())
    }
}

/// Pool and batch as one reader may see them.
struct View {
    held: u32,
    cached: u32,
    capacity: u32,
    running: u32,
    waiting: u32,
}

impl View {
    fn utilization(&self) -> f64 {
        if self.capacity == 0 { 0.0 } else { f64::from(self.held) / f64::from(self.capacity) }
    }
}

impl Exporter {
    /// An exporter that asks this hub for counters.
    pub fn new(
        hub: mpsc::Sender<Message>,
        durability: watch::Receiver<Durability>,
        set_aside: u64,
        accounts: Accounts,
    ) -> Self {
        Self { hub, durability, set_aside, accounts }
    }

    async fn counters(&self) -> BTreeMap<TenantId, Counters> {
        let (sender, answer) = oneshot::channel();
        if self.hub.send(Message::Counters(sender)).await.is_err() {
            return BTreeMap::new();
        }
        answer.await.unwrap_or_default()
    }

    /// What a tenant's own port shows.
    pub async fn tenant(&self, id: TenantId, name: &str, model: &Model) -> String {
        let counters = self.counters().await.remove(&id).unwrap_or_default();
        let stats = model.stats.borrow().clone();
        let numbers = stats.scheduler.tenant(id).copied().unwrap_or_else(|| nothing(id));
        let view = View {
            held: numbers.held.0,
            cached: numbers.cached.0,
            capacity: numbers.ceiling.0,
            running: numbers.running,
            waiting: numbers.waiting,
        };
        let mut families = Families::default();
        pool(&mut families, model, &view);
        tenant(&mut families, name, model, &numbers, &counters);
        quotas(&mut families, name, model, &self.accounts.of(id));
        vllm(&mut families, model, &view, std::iter::once((&numbers, &counters)));
        families.render()
    }

    /// What the operator sees: everything.
    pub async fn all(
        &self,
        models: &[Arc<Model>],
        tenants: &BTreeMap<String, Tenant>,
        facts: &Facts,
        walls: &Walls,
        drain: &DrainInfo,
        reload: Option<&ReloadInfo>,
    ) -> String {
        let counters = self.counters().await;
        let mut families = Families::default();
        let none = Labels::new();
        families.gauge(
            "pagedd_uptime_seconds",
            "Seconds since the daemon started.",
            &none,
            facts.start.elapsed().as_secs_f64(),
        );
        let (durable, lost) = match *self.durability.borrow() {
            Durability::Durable => (1, 0),
            Durability::Lost { records, .. } => (0, records),
        };
        families.gauge("pagedd_durable", "Whether accepted requests survive the daemon.", &none, durable);
        let help = "Records that the journal did not take since it last could be written.";
        families.gauge("pagedd_journal_lost_records", help, &none, lost as f64);
        let help = "Requests that this daemon found damaged, or with which earlier ones had ended.";
        families.counter("pagedd_requests_set_aside", help, &none, self.set_aside);
        let full = matches!(walls, Walls::Full);
        families.gauge(
            "pagedd_walls",
            "Whether every limit of every tenant is enforced by the kernel as it was given: 1, or 0 where not all of them are.",
            &none,
            u8::from(full),
        );
        let full = matches!(facts.sandbox, pagedd_control::SandboxState::Full);
        let help = "Whether gateways are held by all that the sandbox can be made of.";
        families.gauge("pagedd_sandbox_full", help, &none, u8::from(full));
        let refused = reload.is_some_and(|reload| matches!(reload.outcome, ReloadOutcome::Refused { .. }));
        let help = "Whether the configuration file was in order when it was last read.";
        families.gauge("pagedd_config_last_reload_successful", help, &none, u8::from(!refused));
        cells(&mut families, models, tenants).await;
        admission(&mut families, drain);
        for model in models {
            let stats = model.stats.borrow().clone();
            let view = View {
                held: stats.scheduler.pool.held.0,
                cached: stats.scheduler.pool.cached.0,
                capacity: stats.scheduler.pool.capacity.0,
                running: stats.scheduler.running(),
                waiting: stats.scheduler.waiting(),
            };
            pool(&mut families, model, &view);
            engine(&mut families, model, &stats);
            let mut numbers = Vec::new();
            for owner in tenants.values().filter(|tenant| tenant.model.id == model.id) {
                let of = stats.scheduler.tenant(owner.id()).copied().unwrap_or_else(|| nothing(owner.id()));
                let counted = counters.get(&owner.id()).cloned().unwrap_or_default();
                tenant(&mut families, &owner.record.name, model, &of, &counted);
                quotas(&mut families, &owner.record.name, model, &self.accounts.of(owner.id()));
                numbers.push((of, counted));
            }
            vllm(&mut families, model, &view, numbers.iter().map(|(of, counted)| (of, counted)));
        }
        families.render()
    }
}

/// What cgroups count, and beside it what no cgroup does: memory of devices, and what is pinned for them.
async fn cells(families: &mut Families, models: &[Arc<Model>], tenants: &BTreeMap<String, Tenant>) {
    let cgroups: Vec<_> = tenants.values().map(|tenant| tenant.wall.cgroup()).collect();
    // A dozen small files each: not on the thread that delivers tokens.
    let read = move || cgroups.iter().map(|cgroup| cgroup.as_ref().map(|cgroup| cgroup.usage())).collect();
    let usages: Vec<_> = tokio::task::spawn_blocking(read).await.unwrap_or_default();
    for (owner, usage) in tenants.values().zip(usages) {
        let labels: Labels = vec![("tenant", owner.record.name.clone()), ("model", owner.model.name.clone())];
        let help = "Whether each limit of the tenant is enforced by the kernel as it was given.";
        families.gauge("pagedd_tenant_walls", help, &labels, u8::from(owner.wall.stands()));
        let help = "Memory of the model's device that the tenant's KV blocks take, held and cached ones.";
        families.gauge("pagedd_tenant_device_bytes", help, &labels, owner.device_bytes() as f64);
        if let Some(usage) = usage {
            cell(families, &labels, &usage);
        }
    }
    for (model, memory) in models.iter().zip(status::worker_memory(models).await) {
        let labels = device(model);
        if let Some(memory) = memory {
            let help = "Memory that the cgroup of the model's workers is charged with.";
            families.gauge("pagedd_worker_memory_bytes", help, &labels, memory as f64);
        }
        let state = model.state.borrow();
        let Some(info) = state.model().map(|ready| &ready.info) else { continue };
        let help = "Memory of the model's device, by what it is for.";
        let kinds = [
            ("weights", info.weight_bytes),
            ("kv", info.block_bytes * u64::from(info.blocks)),
            ("scratch", info.scratch_bytes),
        ];
        for (kind, bytes) in kinds {
            let mut labels = labels.clone();
            labels.push(("kind", kind.to_owned()));
            families.gauge("pagedd_worker_device_bytes", help, &labels, bytes as f64);
        }
        let help = "Memory of the host that is pinned for the device.";
        families.gauge("pagedd_worker_pinned_bytes", help, &labels, info.pinned_bytes as f64);
    }
}

/// What a tenant's cgroup counts.
fn cell(families: &mut Families, labels: &Labels, usage: &Usage) {
    let gauges = [
        ("pagedd_tenant_memory_bytes", "Memory of the tenant's gateway.", usage.memory.map(|bytes| bytes.0)),
        (
            "pagedd_tenant_memory_peak_bytes",
            "The most that its memory was.",
            usage.memory_peak.map(|bytes| bytes.0),
        ),
        ("pagedd_tenant_pids", "Processes and threads of the tenant's gateway.", usage.pids),
    ];
    for (name, help, value) in gauges {
        if let Some(value) = value {
            families.gauge(name, help, labels, value as f64);
        }
    }
    let counts = [
        ("pagedd_tenant_oom_kills", "Gateways killed for want of memory.", usage.oom_kills),
        ("pagedd_tenant_pids_refused", "Threads refused by pids.max.", usage.pids_refused),
        ("pagedd_tenant_cpu_microseconds", "CPU time of the tenant's gateway.", usage.cpu_us),
        ("pagedd_tenant_throttled_microseconds", "Time for which cpu.max held it up.", usage.throttled_us),
    ];
    for (name, help, value) in counts {
        if let Some(value) = value {
            families.counter(name, help, labels, value);
        }
    }
    let help = "Time that the tenant's gateway waited for something: some of its threads, or all of them.";
    let pressures =
        [("cpu", usage.cpu_pressure), ("memory", usage.memory_pressure), ("io", usage.io_pressure)];
    for (resource, pressure) in pressures {
        let Some(Pressure { some, full }) = pressure else { continue };
        for (threads, stall) in [("some", Some(some)), ("full", full)] {
            let Some(stall) = stall else { continue };
            let mut labels = labels.clone();
            labels.extend([("resource", resource.to_owned()), ("threads", threads.to_owned())]);
            families.counter("pagedd_tenant_pressure_microseconds", help, &labels, stall.total_us);
        }
    }
}

/// Whether the daemon admits requests, and what is under way.
fn admission(families: &mut Families, drain: &DrainInfo) {
    let none = Labels::new();
    let (draining, deadline) = match drain.state {
        DrainState::Admitting => (0, None),
        DrainState::Draining { deadline_unix, .. } => (1, deadline_unix),
        DrainState::Stopping { deadline_unix, .. } => (1, Some(deadline_unix)),
    };
    families.gauge("pagedd_draining", "Whether new requests of all tenants are refused.", &none, draining);
    let help = "Until when a drain is waited for, in seconds since 1970; NaN without a limit.";
    let deadline = deadline.map_or(f64::NAN, |unix| unix as f64);
    families.gauge("pagedd_drain_deadline_timestamp_seconds", help, &none, deadline);
    let help = "Requests that were accepted and have not ended.";
    families.gauge("pagedd_requests_live", help, &none, drain.requests);
    let help = "Requests that a client reads at this moment.";
    families.gauge("pagedd_streams_open", help, &none, drain.streams);
}

/// Numbers of a tenant that the engine does not know yet.
fn nothing(tenant: TenantId) -> TenantStats {
    TenantStats {
        tenant,
        running: 0,
        waiting: 0,
        queued_requests: 0,
        held: Blocks::ZERO,
        cached: Blocks::ZERO,
        floor: Blocks::ZERO,
        ceiling: Blocks::ZERO,
        share_pending: false,
        preemptions: 0,
        prefix_query_tokens: 0,
        prefix_hit_tokens: 0,
        recomputed_tokens: 0,
        aborted: 0,
        output_tokens: 0,
        draft_tokens: 0,
        draft_tokens_accepted: 0,
    }
}

fn device(model: &Model) -> Labels {
    vec![("device", model.config.device.to_string()), ("model", model.name.clone())]
}

fn pool(families: &mut Families, model: &Model, view: &View) {
    let labels = device(model);
    families.gauge(
        "kv_cache_utilization",
        "Held KV blocks over all that may be held, from 0 to 1.",
        &labels,
        view.utilization(),
    );
    families.gauge("blocks_used", "KV blocks that sequences hold.", &labels, view.held);
    families.gauge(
        "blocks_free",
        "KV blocks that sequences may still take, cached ones included.",
        &labels,
        view.capacity.saturating_sub(view.held),
    );
    families.gauge(
        "pagedd_blocks_cached",
        "KV blocks that are cached and unreferenced.",
        &labels,
        view.cached,
    );
    families.gauge("scheduler_running_requests", "Sequences in the running batch.", &labels, view.running);
    families.gauge("pagedd_scheduler_waiting_requests", "Sequences that wait.", &labels, view.waiting);
}

fn engine(families: &mut Families, model: &Model, stats: &EngineStats) {
    let labels = device(model);
    let state = model.state.borrow();
    let ready = matches!(*state, ModelState::Ready(_));
    families.gauge("pagedd_model_ready", "Whether a worker takes plans.", &labels, u8::from(ready));
    families.counter("pagedd_steps", "Completed steps.", &labels, stats.steps);
    families.counter("pagedd_computed_tokens", "Input tokens computed.", &labels, stats.computed_tokens);
    families.counter("pagedd_compute_microseconds", "Compute time of all steps.", &labels, stats.compute_us);
    families.counter(
        "pagedd_predicted_microseconds",
        "Compute time of all steps as predicted; over pagedd_compute_microseconds it shows how right that is.",
        &labels,
        stats.predicted_us,
    );
    families.counter(
        "pagedd_misjudged_microseconds",
        "Differences between predicted and actual compute time, each step's added up.",
        &labels,
        stats.misjudged_us,
    );
    families.counter(
        "pagedd_commit_microseconds",
        "Time of the engine's thread to hand its results to the journal.",
        &labels,
        stats.commit_ns / 1000,
    );
    families.counter("pagedd_workers_lost", "Workers that died or hung.", &labels, stats.workers_lost);
    families.counter(
        "pagedd_adopted_blocks",
        "KV blocks of an earlier daemon that the prefix cache took over.",
        &labels,
        stats.adopted_blocks,
    );
    let age = model.last_step_age(stats).map_or(f64::NAN, |age| age.as_secs_f64());
    families.gauge(
        "pagedd_last_step_age_seconds",
        "Since the last completed step; NaN before the first.",
        &labels,
        age,
    );
}

fn tenant(families: &mut Families, name: &str, model: &Model, numbers: &TenantStats, counters: &Counters) {
    let labels: Labels = vec![("tenant", name.to_owned()), ("model", model.name.clone())];
    let gauges = [
        ("pagedd_tenant_blocks_held", "KV blocks that the tenant's sequences hold.", numbers.held.0),
        ("pagedd_tenant_blocks_cached", "The tenant's cached and unreferenced KV blocks.", numbers.cached.0),
        ("pagedd_tenant_blocks_floor", "KV blocks guaranteed to the tenant.", numbers.floor.0),
        ("pagedd_tenant_blocks_ceiling", "KV blocks the tenant may hold at most.", numbers.ceiling.0),
        ("pagedd_tenant_running", "The tenant's sequences in the running batch.", numbers.running),
        ("pagedd_tenant_waiting", "The tenant's sequences that wait.", numbers.waiting),
    ];
    for (name, help, value) in gauges {
        families.gauge(name, help, &labels, value);
    }
    let counts = [
        ("pagedd_requests_admitted", "Requests admitted.", counters.admitted),
        ("pagedd_requests_refused", "Requests the engine refused.", counters.refused),
        ("pagedd_prompt_tokens", "Prompt tokens of ended requests.", counters.prompt_tokens),
        (
            "pagedd_prompt_tokens_cached",
            "Prompt tokens of ended requests found in the prefix cache.",
            counters.cached_tokens,
        ),
        ("pagedd_output_tokens", "Tokens generated.", counters.output_tokens),
        ("pagedd_preemptions", "Sequences preempted.", numbers.preemptions),
        ("pagedd_aborted", "Requests cancelled before their end.", numbers.aborted),
        (
            "pagedd_prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            numbers.prefix_query_tokens,
        ),
        ("pagedd_prefix_cache_hits", "Prompt tokens found in the prefix cache.", numbers.prefix_hit_tokens),
        (
            "pagedd_recomputed_tokens",
            "Tokens of sequences of an earlier daemon that were computed again.",
            numbers.recomputed_tokens,
        ),
        ("pagedd_draft_tokens", "Tokens guessed by prompt lookup and tried.", numbers.draft_tokens),
        ("pagedd_draft_tokens_accepted", "Guessed tokens that came true.", numbers.draft_tokens_accepted),
    ];
    for (name, help, value) in counts {
        families.counter(name, help, &labels, value);
    }
    for (reason, count) in FinishReason::ALL.iter().zip(counters.finished) {
        let mut labels = labels.clone();
        labels.push(("reason", reason.to_string()));
        families.counter("pagedd_choices_finished", "Choices that ended, by reason.", &labels, count);
    }
}

/// A tenant's quotas, and what was refused for them.
fn quotas(families: &mut Families, name: &str, model: &Model, account: &TenantAccount) {
    for quota in Quota::ALL {
        let labels: Labels = vec![
            ("tenant", name.to_owned()),
            ("model", model.name.clone()),
            ("quota", quota.as_str().to_owned()),
        ];
        let (limit, used, refused) = account.standing(quota);
        if let Some(limit) = limit {
            families.gauge("pagedd_quota_limit", "A quota of the tenant's.", &labels, limit as f64);
        }
        families.gauge(
            "pagedd_quota_used",
            "How much of a quota is taken, whether it is set or not.",
            &labels,
            used as f64,
        );
        let help = "Requests that were refused for it.";
        families.counter("pagedd_quota_refusals", help, &labels, refused);
    }
}

/// vLLM's names, current and former, for routers and dashboards made for it.
fn vllm<'a>(
    families: &mut Families,
    model: &Model,
    view: &View,
    tenants: impl Iterator<Item = (&'a TenantStats, &'a Counters)>,
) {
    let labels: Labels = vec![("model_name", model.name.clone())];
    let (mut sums, mut finished) = ([0; 7], [0; FinishReason::ALL.len()]);
    for (numbers, counters) in tenants {
        let add = [
            counters.prompt_tokens,
            counters.output_tokens,
            numbers.prefix_query_tokens,
            numbers.prefix_hit_tokens,
            numbers.preemptions,
            numbers.draft_tokens,
            numbers.draft_tokens_accepted,
        ];
        sums.iter_mut().zip(add).for_each(|(sum, add)| *sum += add);
        finished.iter_mut().zip(counters.finished).for_each(|(sum, add)| *sum += add);
    }
    families.gauge("vllm:num_requests_running", "Sequences in the running batch.", &labels, view.running);
    families.gauge("vllm:num_requests_waiting", "Sequences that wait.", &labels, view.waiting);
    for name in ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"] {
        families.gauge(
            name,
            "Held KV blocks over all that may be held, from 0 to 1.",
            &labels,
            view.utilization(),
        );
    }
    let hit_rate = if sums[2] == 0 { 0.0 } else { sums[3] as f64 / sums[2] as f64 };
    families.gauge("vllm:gpu_prefix_cache_hit_rate", "Prefix cache hits over queries.", &labels, hit_rate);
    let names: [&[&'static str]; 7] = [
        &["vllm:prompt_tokens"],
        &["vllm:generation_tokens"],
        &["vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"],
        &["vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"],
        &["vllm:num_preemptions"],
        &["vllm:spec_decode_num_draft_tokens"],
        &["vllm:spec_decode_num_accepted_tokens"],
    ];
    let help = [
        "Prompt tokens.",
        "Tokens generated.",
        "Prompt tokens looked up.",
        "Prompt tokens found.",
        "Preemptions.",
        "Guessed tokens tried.",
        "Guessed tokens that came true.",
    ];
    for ((names, help), sum) in names.iter().zip(help).zip(sums) {
        for name in *names {
            families.counter(name, help, &labels, sum);
        }
    }
    for (reason, count) in FinishReason::ALL.iter().zip(finished) {
        let mut labels = labels.clone();
        labels.push(("finished_reason", reason.to_string()));
        families.counter("vllm:request_success", "Choices that ended, by reason.", &labels, count);
    }
    let mut labels = labels;
    labels.push(("block_size", model.config.block_size.to_string()));
    labels.push(("num_gpu_blocks", view.capacity.to_string()));
    families.gauge("vllm:cache_config_info", "The KV pool, as labels.", &labels, 1);
}
