//! The configuration, read again while the daemon runs.
//!
//! **Owns** the configuration in force, and the rule of which settings take effect at once. **Never** puts half a file in force: one that has an
//! error changes nothing.
//!
//! Every setting is named here: one that is new does not compile until it is decided when it takes effect.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pagedd_config::{Cgroups, Config, Gateway, Log, LogLevel, Model as Settings};
use pagedd_control::{ControlError, DrainState, ErrorCode, ReloadInfo, ReloadOutcome};
use pagedd_engine::Command;
use pagedd_host::notify;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tracing::{error, info, warn};

use crate::daemon::{Daemon, Event};
use crate::drain;
use crate::gateway::GatewayLimits;
use crate::hub::Limits;
use crate::model::{Live, Model};
use crate::recorder::{Told, unix};
use crate::worker::ModelState;

/// Reads the configuration as the start did: the same file, under the same command line.
pub type Read = Box<dyn Fn() -> Result<Config, String> + Send + Sync>;
/// Puts another level of the log in force.
pub type SetLevel = Box<dyn Fn(LogLevel) -> Result<(), String> + Send + Sync>;

/// Between two tries to tell an engine whose inbox is full, and how many there are.
const INBOX_RETRY: (Duration, u32) = (Duration::from_millis(50), 100);

/// A file is read by then.
const READ: Duration = Duration::from_secs(5);

/// The configuration, and the way to it.
pub struct Configuration {
    in_force: Mutex<Config>,
    read: Read,
    set_level: SetLevel,
}

/// What a file that was read again changes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Difference {
    /// Settings that take effect now.
    pub now: Vec<String>,
    /// Settings that take effect at the next restart.
    pub later: Vec<String>,
}

impl Difference {
    /// Settings whose names begin so could not be put in force: the next restart reads them.
    fn postpone(&mut self, prefix: &str) {
        self.later.extend(self.now.extract_if(.., |key| key.starts_with(prefix)));
    }
}

impl Configuration {
    /// A daemon started with `config`, and `read` gives what the file says now.
    pub fn new(config: Config, read: Read, set_level: SetLevel) -> Self {
        Self { in_force: Mutex::new(config), read, set_level }
    }

    /// How long running requests may go on at the daemon's end.
    pub fn drain_timeout(&self) -> Duration {
        self.in_force().drain_timeout
    }

    fn in_force(&self) -> MutexGuard<'_, Config> {
        // A configuration is replaced as a whole.
        self.in_force.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Has the daemon's task read the configuration again at each hangup.
pub async fn on_hangup(mut hangup: tokio::signal::unix::Signal, events: mpsc::Sender<Event>) {
    while hangup.recv().await.is_some() {
        info!("SIGHUP: reading the configuration again");
        if events.send(Event::Reload).await.is_err() {
            return;
        }
    }
}

impl Daemon {
    /// Reads the configuration again and puts in force what can be.
    ///
    /// # Errors
    /// The file does not hold, or the daemon goes down. Nothing has changed.
    pub async fn reload(&mut self) -> Result<ReloadInfo, ControlError> {
        if let DrainState::Stopping { .. } = self.drain {
            return Err(drain::stopping());
        }
        tell_manager(notify::reloading());
        let configuration = self.configuration.clone();
        let read = tokio::time::timeout(READ, spawn_blocking(move || (configuration.read)())).await;
        let read = match read {
            Ok(read) => read.unwrap_or_else(|error| Err(error.to_string())),
            Err(_) => Err(format!(
                "the file was not read within {} s: is it a pipe, or on a lost disk?",
                READ.as_secs()
            )),
        };
        let read = read.and_then(|config| self.would_start(&config).map(|()| config));
        let outcome = match read {
            Ok(config) => {
                let Difference { now, later } = self.put_in_force(config).await;
                info!(now = now.join(", "), "the configuration was read again");
                if !later.is_empty() {
                    warn!(settings = later.join(", "), "takes effect at the next restart");
                }
                ReloadOutcome::Applied { now, later }
            }
            Err(error) => {
                error!(error, "the configuration has an error; the one before stays in force");
                ReloadOutcome::Refused { error }
            }
        };
        let info = ReloadInfo { at_unix: unix(), outcome };
        self.reload = Some(info.clone());
        tell_manager(notify::ready());
        match &info.outcome {
            ReloadOutcome::Applied { .. } => Ok(info),
            ReloadOutcome::Refused { error } => {
                Err(ControlError::new(ErrorCode::InvalidConfig, error.clone())
                    .remedy("the configuration before stays in force; correct the file and reload again"))
            }
        }
    }

    /// Whether a daemon would start with this, as far as that can be known without ending: a file that a restart fails on is not taken.
    fn would_start(&self, read: &Config) -> Result<(), String> {
        let before = self.configuration.in_force().clone();
        if read.cgroups == Cgroups::Required
            && before.cgroups == Cgroups::Auto
            && let Some(reason) = self.shop.walls.missing()
        {
            return Err(format!("cgroups: no daemon would start with `required`: {reason}"));
        }
        if read.listen != before.listen
            && let Err(error) = std::net::TcpListener::bind((read.listen, 0))
        {
            return Err(format!("listen: no port can be bound at {}: {error}", read.listen));
        }
        let ids = u64::from(read.tenant_uids.last.saturating_sub(read.tenant_uids.first)) + 1;
        if self.shop.users.is_some() && ids < self.tenants.len() as u64 {
            return Err(format!(
                "tenant_uids: {ids} user ids are too few for {} tenants",
                self.tenants.len()
            ));
        }
        Ok(())
    }

    async fn put_in_force(&mut self, read: Config) -> Difference {
        let before = self.configuration.in_force().clone();
        let (mut merged, mut difference) = merge(&before, &read);
        if merged.log.level != before.log.level
            && let Err(error) = (self.configuration.set_level)(merged.log.level)
        {
            warn!(error, "the level of the log stays");
            merged.log.level = before.log.level;
            difference.postpone("log.level");
        }
        let limits = GatewayLimits::from(merged.gateway);
        self.shop.limits = limits;
        self.shop.retention = merged.retention;
        self.tenants.values().for_each(|tenant| tenant.set_limits(limits));
        if (merged.retention, merged.reattach_grace) != (before.retention, before.reattach_grace) {
            let limits = Limits { retention: merged.retention, reattach_grace: merged.reattach_grace };
            // The recorder ends only with the daemon.
            drop(self.shop.recorder.send(Told::Limits(limits)).await);
        }
        for settings in &mut merged.models {
            let Some(model) = self.models.iter().find(|model| model.name == settings.name.as_str()) else {
                continue;
            };
            let live = Live::of(settings);
            let was = *model.live.borrow();
            if was == live {
                continue;
            }
            if was.tuning != live.tuning && !tune(model, live).await {
                warn!(model = model.name, "its engine is too busy for other settings; reload again");
                if let Some(before) = before.model(&model.name) {
                    settings.clone_from(before);
                }
                difference.postpone(&format!("models.{}.", model.name));
                continue;
            }
            model.live.send_replace(live);
        }
        *self.configuration.in_force() = merged;
        difference
    }
}

/// Whether the engine will go by it. One that has ended has nothing to go by.
async fn tune(model: &Model, live: Live) -> bool {
    let (pause, tries) = INBOX_RETRY;
    for _ in 0..tries {
        if model.engine.send(Command::Tune(live.tuning)).is_ok() {
            return true;
        }
        if let ModelState::Failed { .. } = *model.state.borrow() {
            return true;
        }
        tokio::time::sleep(pause).await;
    }
    false
}

fn tell_manager(told: std::io::Result<()>) {
    if let Err(error) = told {
        warn!(%error, "the service manager does not know of the reload");
    }
}

/// Collects which settings differ.
struct Compare<'a> {
    prefix: &'a str,
    difference: &'a mut Difference,
}

impl Compare<'_> {
    /// It takes effect now.
    fn now<T: PartialEq + Clone>(&mut self, key: &str, before: &mut T, read: &T) {
        if before != read {
            before.clone_from(read);
            self.difference.now.push(format!("{}{key}", self.prefix));
        }
    }

    /// It takes effect at the next restart.
    fn later<T: PartialEq>(&mut self, key: &str, before: &T, read: &T) {
        if before != read {
            self.difference.later.push(format!("{}{key}", self.prefix));
        }
    }
}

/// The configuration that is in force once `read` was read in the place of `before`, and what changes by that.
pub fn merge(before: &Config, read: &Config) -> (Config, Difference) {
    let (mut merged, mut difference) = (before.clone(), Difference::default());
    let Config {
        // The command line names it.
        file: _,
        state_dir,
        admin_socket,
        listen,
        log: Log { level, format },
        gateway: Gateway { max_body, max_connections, header_timeout, idle_timeout },
        tenant_uids,
        cgroups,
        fsync,
        retention,
        reattach_grace,
        drain_timeout,
        models,
    } = &mut merged;
    let mut of = Compare { prefix: "", difference: &mut difference };
    of.later("state_dir", state_dir, &read.state_dir);
    of.later("admin_socket", admin_socket, &read.admin_socket);
    of.later("listen", listen, &read.listen);
    if level != &read.log.level {
        // They were started with theirs.
        of.difference.later.push("log.level of workers and gateways".to_owned());
    }
    of.now("log.level", level, &read.log.level);
    of.later("log.format", format, &read.log.format);
    of.now("gateway.max_body", max_body, &read.gateway.max_body);
    of.now("gateway.max_connections", max_connections, &read.gateway.max_connections);
    of.now("gateway.header_timeout", header_timeout, &read.gateway.header_timeout);
    of.now("gateway.idle_timeout", idle_timeout, &read.gateway.idle_timeout);
    of.later("tenant_uids", tenant_uids, &read.tenant_uids);
    of.later("cgroups", cgroups, &read.cgroups);
    of.later("fsync", fsync, &read.fsync);
    of.now("retention", retention, &read.retention);
    of.now("reattach_grace", reattach_grace, &read.reattach_grace);
    of.now("drain_timeout", drain_timeout, &read.drain_timeout);
    for settings in models.iter_mut() {
        match read.model(settings.name.as_str()) {
            Some(read) => merge_model(settings, read, &mut difference),
            None => difference.later.push(format!("models.{} (removed)", settings.name.as_str())),
        }
    }
    for added in read.models.iter().filter(|model| before.model(model.name.as_str()).is_none()) {
        difference.later.push(format!("models.{} (added)", added.name.as_str()));
    }
    (merged, difference)
}

fn merge_model(before: &mut Settings, read: &Settings, difference: &mut Difference) {
    let prefix = format!("models.{}.", before.name.as_str());
    let mut of = Compare { prefix: &prefix, difference };
    let Settings {
        name: _,
        path,
        device,
        dtype,
        kv_dtype,
        kv_memory,
        block_size,
        max_num_seqs,
        max_num_batched_tokens,
        itl_target,
        max_model_len,
        threads,
        deterministic,
        max_queued_requests,
        prefix_cache,
        prompt_lookup,
        policy,
        default_max_tokens,
    } = before;
    of.later("path", path, &read.path);
    of.later("device", device, &read.device);
    of.later("dtype", dtype, &read.dtype);
    of.later("kv_dtype", kv_dtype, &read.kv_dtype);
    of.later("kv_memory", kv_memory, &read.kv_memory);
    of.later("block_size", block_size, &read.block_size);
    of.later("max_num_seqs", max_num_seqs, &read.max_num_seqs);
    of.later("max_num_batched_tokens", max_num_batched_tokens, &read.max_num_batched_tokens);
    of.now("itl_target", itl_target, &read.itl_target);
    of.later("max_model_len", max_model_len, &read.max_model_len);
    of.later("threads", threads, &read.threads);
    of.later("deterministic", deterministic, &read.deterministic);
    of.now("max_queued_requests", max_queued_requests, &read.max_queued_requests);
    of.later("prefix_cache", prefix_cache, &read.prefix_cache);
    of.now("prompt_lookup", prompt_lookup, &read.prompt_lookup);
    of.later("policy", policy, &read.policy);
    of.now("default_max_tokens", default_max_tokens, &read.default_max_tokens);
}

#[cfg(test)]
mod tests {
    use pagedd_config::Overrides;

    use super::*;

    fn config(text: &str) -> Config {
        Config::parse(None, text, &Overrides::default()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Models whose weights are generated, so that no file is needed.
    const BEFORE: &str = "listen: 127.0.0.1\nretention: 10m\nmodels:\n  a:\n    path: synthetic:smollm2-135m\n    itl_target: 100ms\n  b:\n    path: synthetic:smollm2-135m\n";

    #[test]
    fn what_could_not_be_put_in_force_takes_effect_at_the_next_restart() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let now =
            names(&["log.level", "models.a.itl_target", "models.ab.itl_target", "models.a.prompt_lookup"]);
        let mut difference = Difference { now, later: names(&["listen"]) };
        difference.postpone("models.a.");
        assert_eq!(difference.now, names(&["log.level", "models.ab.itl_target"]));
        assert_eq!(difference.later, names(&["listen", "models.a.itl_target", "models.a.prompt_lookup"]));
    }

    #[test]
    fn what_can_change_does_and_what_cannot_is_named_until_it_does() {
        let before = config(BEFORE);
        let (merged, difference) = merge(&before, &before);
        assert_eq!((&merged, difference), (&before, Difference::default()));
        let read = config(
            "listen: 0.0.0.0\nlog:\n  level: debug\nretention: 1m\ndrain_timeout: 3s\ngateway:\n  max_body: 1MiB\nmodels:\n  a:\n    path: synthetic:smollm2-135m\n    itl_target: none\n    max_queued_requests: 7\n    block_size: 32\n  c:\n    path: synthetic:smollm2-135m\n",
        );
        let (merged, difference) = merge(&before, &read);
        let now = [
            "log.level",
            "gateway.max_body",
            "retention",
            "drain_timeout",
            "models.a.itl_target",
            "models.a.max_queued_requests",
        ];
        let later = [
            "listen",
            "log.level of workers and gateways",
            "models.a.block_size",
            "models.b (removed)",
            "models.c (added)",
        ];
        assert_eq!(
            difference,
            Difference { now: now.map(str::to_owned).to_vec(), later: later.map(str::to_owned).to_vec() }
        );
        assert_eq!(merged.listen, before.listen);
        assert_eq!((merged.retention, merged.log.level), (read.retention, read.log.level));
        assert_eq!(merged.models.len(), 2);
        assert_eq!(merged.models[0].block_size, before.models[0].block_size);
        assert_eq!(merged.models[0].max_queued_requests, 7);
        let (_, again) = merge(&merged, &read);
        assert_eq!(again.now, Vec::<String>::new());
        let still: Vec<_> = later.into_iter().filter(|key| !key.contains("log.level")).collect();
        assert_eq!(again.later, still, "it is named until the restart");
    }
}
