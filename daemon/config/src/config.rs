//! What holds: every setting with its value, checked.

use crate::leaf::{Auto, Maybe, unknown_word};
use crate::locate::{check_keys, describe, place_of};
use crate::raw::{RawConfig, RawGateway, RawLog, RawModel};
use crate::{
    Amount, Cgroups, ComputeDtype, ConfigError, DEFAULT_STATE_DIR, Device, Fsync, KvDtype, LogFormat,
    LogLevel, ModelName, Policy, Size, Span, shown,
};
use pagedd_core::{Bytes, Tokens};
use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest that finished requests may be kept, for all tenants or for one.
pub const MAX_RETENTION: Duration = Duration::from_hours(30 * 24);

/// Most bytes of a configuration that are read.
const MAX_FILE: u64 = 1 << 20;

/// Longest path that a unix socket's address holds, without its NUL.
const MAX_SOCKET_PATH: usize = 107;

/// What the path of a generated model begins with; its shape follows. It takes the place of a file where only speed is looked at.
pub const SYNTHETIC: &str = "synthetic:";

/// Shapes of generated models.
pub const SHAPES: [&str; 5] = ["llama-2-7b", "llama-2-13b", "llama-3-8b", "qwen2.5-7b", "smollm2-135m"];

/// What may stand behind a shape: matrices then have four bits.
pub const FOUR_BITS: &str = ":q4_1";

/// The checked configuration.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// The file; `None` where the defaults are in use.
    pub file: Option<PathBuf>,
    /// Where databases, sockets and locks are.
    pub state_dir: PathBuf,
    /// The admin socket.
    pub admin_socket: PathBuf,
    /// The address that tenants' ports bind.
    pub listen: IpAddr,
    /// What is logged.
    pub log: Log,
    /// Limits of the tenants' HTTP ports.
    pub gateway: Gateway,
    /// User ids for the tenants' gateways, used where the daemon may choose.
    pub tenant_uids: UidRange,
    /// Whether tenants' limits are the kernel's to enforce.
    pub cgroups: Cgroups,
    /// When the journal is on disk.
    pub fsync: Fsync,
    /// How long a finished request can be attached to.
    pub retention: Duration,
    /// How long a request runs on that nobody is attached to.
    pub reattach_grace: Duration,
    /// How long running requests may go on once the daemon is told to end.
    pub drain_timeout: Duration,
    /// The models, in the file's order: [`pagedd_core::ModelId`] is the place in here.
    pub models: Vec<Model>,
}

/// What is logged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Log {
    /// Least severe event.
    pub level: LogLevel,
    /// Form of a line.
    pub format: LogFormat,
}

/// Limits of the tenants' HTTP ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gateway {
    /// Largest request body.
    pub max_body: Bytes,
    /// Most connections of one port at a time.
    pub max_connections: u32,
    /// How long a request's head may take.
    pub header_timeout: Duration,
    /// How long a connection may stay without a request.
    pub idle_timeout: Duration,
}

/// A range of user ids, both ends in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UidRange {
    /// First of them.
    pub first: u32,
    /// Last of them, not below the first.
    pub last: u32,
}

/// How much memory KV blocks get.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvMemory {
    /// What the host has left, within reason.
    Auto,
    /// This much; a percentage is of the memory that is available once the weights are loaded.
    Given(Amount),
}

/// A model to be served.
#[derive(Clone, PartialEq, Debug)]
pub struct Model {
    /// Its name, as clients send it.
    pub name: ModelName,
    /// A GGUF file or a Hugging Face directory, which was there when the configuration was read; or [`SYNTHETIC`] with one of [`SHAPES`],
    /// [`FOUR_BITS`] behind it or not.
    pub path: PathBuf,
    /// Where it runs.
    pub device: Device,
    /// Arithmetic of the products with the weights.
    pub dtype: ComputeDtype,
    /// Element type of the KV blocks, `auto` resolved.
    pub kv_dtype: KvDtype,
    /// How much memory KV blocks get.
    pub kv_memory: KvMemory,
    /// Tokens of a block: a power of two in [16, 512].
    pub block_size: Tokens,
    /// Most sequences of one step.
    pub max_num_seqs: u32,
    /// Most tokens of one step.
    pub max_num_batched_tokens: Tokens,
    /// Longest that a step in which somebody's answer goes on is meant to take; `None` is as long as its tokens take.
    pub itl_target: Option<Duration>,
    /// Longest sequence; `None` is the model's own context.
    pub max_model_len: Option<Tokens>,
    /// Threads of the worker; `None` is what affinity and cgroup quota allow.
    pub threads: Option<NonZeroU32>,
    /// Whether a row's bits depend on its own inputs alone. On the CPU it is always so.
    pub deterministic: bool,
    /// Most waiting requests of one tenant.
    pub max_queued_requests: u32,
    /// Whether prompts reuse KV blocks of earlier ones of their tenant.
    pub prefix_cache: bool,
    /// Whether sequences guess what they say next, for tenants that say nothing of it.
    pub prompt_lookup: bool,
    /// Order of a tenant's waiting requests.
    pub policy: Policy,
    /// `max_tokens` of a request that names none; `None` is what the context has left.
    pub default_max_tokens: Option<Tokens>,
}

/// What the command line puts over the file.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Overrides {
    /// Another state directory.
    pub state_dir: Option<PathBuf>,
}

impl Config {
    /// Reads and checks `file`.
    ///
    /// # Errors
    /// One line with file, line, column and key.
    pub fn load(file: &Path) -> Result<Self, ConfigError> {
        Self::load_with(Some(file), &Overrides::default())
    }

    /// Reads and checks `file`, or takes the defaults where it is `None`, and puts `overrides` over it.
    ///
    /// # Errors
    /// One line with file, line, column and key.
    pub fn load_with(file: Option<&Path>, overrides: &Overrides) -> Result<Self, ConfigError> {
        let text = file.map_or_else(|| Ok(String::new()), read)?;
        Self::parse(file, &text, overrides)
    }

    /// Checks `text`, which stands in `file` (for messages, and for paths relative to its directory).
    ///
    /// # Errors
    /// One line with file, line, column and key.
    pub fn parse(file: Option<&Path>, text: &str, overrides: &Overrides) -> Result<Self, ConfigError> {
        let source = Source { file, text };
        check_keys(text).map_err(|error| source.yaml(&error))?;
        // An empty document is null, and null is no settings.
        let raw: Option<RawConfig> = serde_yaml::from_str(text).map_err(|error| source.yaml(&error))?;
        source.check(raw.unwrap_or_default(), overrides)
    }

    /// The models, where at least one is needed.
    ///
    /// # Errors
    /// [`ConfigError::NoModel`] says how to add one.
    pub fn require_models(&self) -> Result<&[Model], ConfigError> {
        if self.models.is_empty() {
            return Err(ConfigError::NoModel { file: self.file.clone() });
        }
        Ok(&self.models)
    }

    /// The model of this name.
    #[must_use]
    pub fn model(&self, name: &str) -> Option<&Model> {
        self.models.iter().find(|model| model.name.as_str() == name)
    }
}

fn read(file: &Path) -> Result<String, ConfigError> {
    let failed = |source| ConfigError::Read { file: file.to_path_buf(), source };
    let mut text = Vec::new();
    File::open(file).and_then(|open| open.take(MAX_FILE + 1).read_to_end(&mut text)).map_err(failed)?;
    if text.len() as u64 > MAX_FILE {
        return Err(ConfigError::TooLarge { file: file.to_path_buf(), limit: MAX_FILE });
    }
    String::from_utf8(text).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let before = String::from_utf8_lossy(valid);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, |last| last.chars().count()) + 1;
        ConfigError::At { file: file.to_path_buf(), line, column, message: "not UTF-8".to_owned() }
    })
}

/// The text being checked, for the places of errors.
struct Source<'a> {
    file: Option<&'a Path>,
    text: &'a str,
}

impl Source<'_> {
    fn file(&self) -> PathBuf {
        self.file.unwrap_or(Path::new("(defaults)")).to_path_buf()
    }

    fn yaml(&self, error: &serde_yaml::Error) -> ConfigError {
        let (place, message) = describe(error);
        ConfigError::At { file: self.file(), line: place.line, column: place.column, message }
    }

    /// An error about the value of the key at `path`.
    fn wrong(&self, path: &[&str], message: impl std::fmt::Display) -> ConfigError {
        let place = place_of(self.text, path);
        let message = format!("{}: {message}", path.join("."));
        ConfigError::At { file: self.file(), line: place.line, column: place.column, message }
    }

    /// Relative paths are relative to the file's directory.
    fn resolve(&self, path: PathBuf) -> PathBuf {
        match self.file.and_then(Path::parent) {
            Some(directory) if path.is_relative() => directory.join(path),
            _ => path,
        }
    }

    fn check(&self, raw: RawConfig, overrides: &Overrides) -> Result<Config, ConfigError> {
        let RawConfig {
            state_dir,
            admin_socket,
            listen,
            log,
            gateway,
            tenant_uids,
            cgroups,
            fsync,
            retention,
            reattach_grace,
            drain_timeout,
            models,
        } = raw;
        let state_dir = match &overrides.state_dir {
            Some(state_dir) => state_dir.clone(),
            None => state_dir.map_or_else(|| PathBuf::from(DEFAULT_STATE_DIR), |path| self.resolve(path.0)),
        };
        let socket_given = admin_socket.is_some();
        let admin_socket =
            admin_socket.map_or_else(|| state_dir.join("admin.sock"), |path| self.resolve(path.0));
        let length = admin_socket.as_os_str().len();
        if length > MAX_SOCKET_PATH {
            let message = format!(
                "the admin socket's path has {length} bytes, a unix socket's may have {MAX_SOCKET_PATH}: {}; set a shorter admin_socket",
                shown(&admin_socket.to_string_lossy())
            );
            return Err(match (socket_given, &overrides.state_dir) {
                (true, _) => self.wrong(&["admin_socket"], message),
                (false, Some(_)) => ConfigError::Override { message: format!("--state-dir: {message}") },
                (false, None) => self.wrong(&["state_dir"], message),
            });
        }
        let RawLog { level, format } = log.unwrap_or_default();
        Ok(Config {
            file: self.file.map(Path::to_path_buf),
            state_dir,
            admin_socket,
            listen: listen.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |address| address.0),
            log: Log { level: level.unwrap_or(LogLevel::Info), format: format.unwrap_or(LogFormat::Text) },
            gateway: self.check_gateway(&gateway.unwrap_or_default())?,
            tenant_uids: tenant_uids.map_or(UidRange { first: 61_000, last: 61_999 }, |range| UidRange {
                first: range.first,
                last: range.last,
            }),
            cgroups: cgroups.unwrap_or(Cgroups::Auto),
            fsync: fsync.unwrap_or(Fsync::Interval),
            retention: self.span(
                &["retention"],
                retention,
                DEFAULT_RETENTION,
                Duration::ZERO,
                MAX_RETENTION,
            )?,
            reattach_grace: self.span(
                &["reattach_grace"],
                reattach_grace,
                DEFAULT_GRACE,
                Duration::ZERO,
                DAY,
            )?,
            drain_timeout: self.span(
                &["drain_timeout"],
                drain_timeout,
                DEFAULT_DRAIN,
                Duration::ZERO,
                Duration::from_hours(1),
            )?,
            models: models
                .unwrap_or_default()
                .0
                .into_iter()
                .map(|(name, model)| self.check_model(name, model))
                .collect::<Result<_, _>>()?,
        })
    }

    fn check_gateway(&self, raw: &RawGateway) -> Result<Gateway, ConfigError> {
        let RawGateway { max_body, max_connections, header_timeout, idle_timeout } = *raw;
        let max_body = max_body.map_or(Bytes(4 << 20), |size| size.0);
        if !(Bytes(1 << 10)..=Bytes(1 << 30)).contains(&max_body) {
            return Err(
                self.wrong(&["gateway", "max_body"], format!("{} is not from 1KiB to 1GiB", Size(max_body)))
            );
        }
        let timeout = |key, given, default| {
            self.span(&["gateway", key], given, default, Duration::from_millis(100), Duration::from_hours(1))
        };
        Ok(Gateway {
            max_body,
            max_connections: max_connections.map_or(1_024, |n| n.0),
            header_timeout: timeout("header_timeout", header_timeout, Duration::from_secs(30))?,
            idle_timeout: timeout("idle_timeout", idle_timeout, Duration::from_secs(90))?,
        })
    }

    fn check_model(&self, name: ModelName, raw: RawModel) -> Result<Model, ConfigError> {
        let RawModel {
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
        } = raw;
        let key = ["models", name.as_str(), "path"];
        let Some(path) = path else {
            return Err(self.wrong(&key, "is missing: name a GGUF file or a Hugging Face directory"));
        };
        let path = match path.0.to_str().and_then(|path| path.strip_prefix(SYNTHETIC)) {
            Some(shape) if SHAPES.contains(&shape.strip_suffix(FOUR_BITS).unwrap_or(shape)) => path.0,
            Some(shape) => {
                let unknown = unknown_word(shape, &SHAPES);
                let message = format!("no shape of a generated model, or one and {FOUR_BITS}: {unknown}");
                return Err(self.wrong(&key, message));
            }
            None => {
                let path = self.resolve(path.0);
                check_model_path(&path).map_err(|message| self.wrong(&key, message))?;
                path
            }
        };
        let device = device.unwrap_or(Device::Cpu);
        let dtype = dtype.unwrap_or(ComputeDtype::Auto);
        let max_num_batched_tokens = Tokens(max_num_batched_tokens.map_or(512, |n| n.0));
        let kv_memory = match kv_memory {
            None | Some(Auto::Auto) => KvMemory::Auto,
            Some(Auto::Given(Amount::Percent(percent))) if percent.hundredths() == 0 => {
                return Err(self.wrong(&["models", name.as_str(), "kv_memory"], "0% leaves no KV block"));
            }
            Some(Auto::Given(Amount::Bytes(Bytes(0)) | Amount::Tokens(Tokens(0)))) => {
                return Err(self.wrong(&["models", name.as_str(), "kv_memory"], "0 leaves no KV block"));
            }
            Some(Auto::Given(amount)) => KvMemory::Given(amount),
        };
        let itl_target = match itl_target {
            None => Some(DEFAULT_ITL_TARGET),
            Some(Maybe::None) => None,
            Some(Maybe::Given(span)) => {
                let key = ["models", name.as_str(), "itl_target"];
                let (least, most) = (Duration::from_millis(1), Duration::from_hours(1));
                Some(self.span(&key, Some(span), DEFAULT_ITL_TARGET, least, most)?)
            }
        };
        let model = Model {
            path,
            device,
            dtype,
            kv_dtype: kv_dtype.and_then(Auto::given).unwrap_or(match (device, dtype) {
                (Device::Cuda { .. }, _) => KvDtype::Bf16,
                (Device::Cpu, ComputeDtype::Auto) => KvDtype::F16,
                (Device::Cpu, ComputeDtype::F32) => KvDtype::F32,
            }),
            kv_memory,
            block_size: Tokens(block_size.map_or(16, |size| size.0)),
            max_num_seqs: self.max_num_seqs(&name, max_num_seqs.map(|n| n.0), max_num_batched_tokens)?,
            max_num_batched_tokens,
            itl_target,
            max_model_len: max_model_len.and_then(Auto::given).map(|n| Tokens(n.0)),
            threads: threads.and_then(Auto::given).and_then(|n| NonZeroU32::new(n.0)),
            deterministic: deterministic.is_some_and(|flag| flag.0),
            max_queued_requests: max_queued_requests.map_or(1_000, |n| n.0),
            prefix_cache: prefix_cache.is_none_or(|flag| flag.0),
            prompt_lookup: prompt_lookup.is_none_or(|flag| flag.0),
            policy: policy.unwrap_or(Policy::Fcfs),
            default_max_tokens: default_max_tokens.and_then(Maybe::given).map(|n| Tokens(n.0)),
            name,
        };
        match against_device(&model) {
            None => Ok(model),
            Some((key, message)) => Err(self.wrong(&["models", model.name.as_str(), key], message)),
        }
    }

    /// Each sequence of a step has a token of it at least.
    fn max_num_seqs(&self, name: &ModelName, given: Option<u32>, step: Tokens) -> Result<u32, ConfigError> {
        match given {
            None => Ok(step.0.min(64)),
            Some(seqs) if seqs <= step.0 => Ok(seqs),
            Some(seqs) => Err(self.wrong(
                &["models", name.as_str(), "max_num_seqs"],
                format!(
                    "{seqs} is above max_num_batched_tokens, {}: each sequence of a step needs a token of it",
                    step.0
                ),
            )),
        }
    }

    fn span(
        &self,
        path: &[&str],
        given: Option<Span>,
        default: Duration,
        least: Duration,
        most: Duration,
    ) -> Result<Duration, ConfigError> {
        let span = given.map_or(default, |span| span.0);
        if (least..=most).contains(&span) {
            return Ok(span);
        }
        Err(self.wrong(path, format!("{} is not from {} to {}", Span(span), Span(least), Span(most))))
    }
}

const DAY: Duration = Duration::from_hours(24);
const DEFAULT_RETENTION: Duration = Duration::from_mins(10);
const DEFAULT_GRACE: Duration = Duration::from_mins(1);
const DEFAULT_DRAIN: Duration = Duration::from_secs(30);
/// On processors: ten tokens a second, a little faster than people read.
const DEFAULT_ITL_TARGET: Duration = Duration::from_millis(100);

/// The key of a setting that the model's device cannot follow, and why.
fn against_device(model: &Model) -> Option<(&'static str, String)> {
    let Model { device, kv_dtype, .. } = model;
    match (device, model.dtype, kv_dtype, model.threads) {
        (Device::Cpu, _, KvDtype::Bf16 | KvDtype::Fp8, _) => {
            Some(("kv_dtype", format!("{kv_dtype} is what a GPU keeps; on the CPU KV blocks are f16 or f32")))
        }
        (Device::Cuda { .. }, ComputeDtype::F32, _, _) => {
            Some(("dtype", format!("f32 is for the CPU; {device} multiplies bf16 weights: leave it at auto")))
        }
        (Device::Cuda { .. }, ComputeDtype::Auto, KvDtype::F16 | KvDtype::F32, _) => Some((
            "kv_dtype",
            format!("{kv_dtype} is for the CPU; on {device} KV blocks are bf16 (auto) or fp8"),
        )),
        (Device::Cuda { .. }, ComputeDtype::Auto, KvDtype::Bf16 | KvDtype::Fp8, Some(_)) => Some((
            "threads",
            format!("their number is for the CPU; {device} computes itself: leave it at auto"),
        )),
        (Device::Cpu, _, KvDtype::F16 | KvDtype::F32, _)
        | (Device::Cuda { .. }, ComputeDtype::Auto, KvDtype::Bf16 | KvDtype::Fp8, None) => None,
    }
}

/// Whether a model can be there at all; what is in it is the worker's to read.
fn check_model_path(path: &Path) -> Result<(), String> {
    let metadata = path.metadata().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            format!(
                "there is no file or directory {}; correct the path, or put the model there",
                path.display()
            )
        }
        std::io::ErrorKind::PermissionDenied => {
            format!("{} cannot be reached: permission denied on the way to it", path.display())
        }
        _ => format!("{}: {error}", path.display()),
    })?;
    if metadata.is_dir() {
        if !path.join("config.json").is_file() {
            return Err(format!(
                "directory {} has no config.json; name a Hugging Face model directory or a GGUF file",
                path.display()
            ));
        }
    } else if !metadata.is_file() {
        return Err(format!("{} is neither a file nor a directory", path.display()));
    }
    Ok(())
}
