//! What stands in the file: every key, each optional.

use crate::leaf::{Address, Auto, BlockSize, Flag, Maybe, PathText, Ranged, UidText};
use crate::{
    Amount, Cgroups, ComputeDtype, Device, Fsync, KvDtype, LogFormat, LogLevel, ModelName, Policy, Size, Span,
};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use std::fmt;

macro_rules! section {
    ($(#[$doc:meta])* $type:ident { $($key:ident: $value:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Default, Deserialize)]
        #[serde(default, deny_unknown_fields, expecting = "keys with values")]
        pub(crate) struct $type { $(pub $key: Option<$value>,)* }

        impl $type {
            /// Every key.
            pub(crate) const KEYS: &'static [&'static str] = &[$(stringify!($key)),*];
        }
    };
}

section!(
    /// The file.
    RawConfig {
        state_dir: PathText,
        admin_socket: PathText,
        listen: Address,
        log: RawLog,
        gateway: RawGateway,
        tenant_uids: UidText,
        cgroups: Cgroups,
        fsync: Fsync,
        retention: Span,
        reattach_grace: Span,
        drain_timeout: Span,
        models: RawModels,
    }
);
section!(
    /// `log`.
    RawLog {
        level: LogLevel,
        format: LogFormat,
    }
);
section!(
    /// `gateway`.
    RawGateway {
        max_body: Size,
        max_connections: Ranged<1, 65_536>,
        header_timeout: Span,
        idle_timeout: Span,
    }
);
section!(
    /// `models.<name>`.
    RawModel {
        path: PathText,
        device: Device,
        dtype: ComputeDtype,
        kv_dtype: Auto<KvDtype>,
        kv_memory: Auto<Amount>,
        block_size: BlockSize,
        max_num_seqs: Ranged<1, 4_096>,
        max_num_batched_tokens: Ranged<1, { pagedd_core::MOST_STEP_TOKENS }>,
        itl_target: Maybe<Span>,
        max_model_len: Auto<Ranged<1, 16_777_216>>,
        threads: Auto<Ranged<1, 1_024>>,
        deterministic: Flag,
        max_queued_requests: Ranged<1, 1_000_000>,
        prefix_cache: Flag,
        prompt_lookup: Flag,
        policy: Policy,
        default_max_tokens: Maybe<Ranged<1, 16_777_216>>,
    }
);

/// `models`, in the file's order: a model's number is its place.
#[derive(Debug, Default)]
pub(crate) struct RawModels(pub Vec<(ModelName, RawModel)>);

impl<'de> Deserialize<'de> for RawModels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Models;
        impl<'de> Visitor<'de> for Models {
            type Value = RawModels;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("model names, each with its settings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut models = Vec::new();
                while let Some((name, model)) = map.next_entry::<ModelName, Option<RawModel>>()? {
                    models.push((name, model.unwrap_or_default()));
                }
                Ok(RawModels(models))
            }
        }
        deserializer.deserialize_map(Models)
    }
}

/// Which keys may stand where.
#[derive(Clone, Copy)]
pub(crate) enum Shape {
    /// A single value.
    Leaf,
    /// These keys, and the shape below each.
    Keys(&'static [&'static str], fn(&str) -> Shape),
    /// Any names, and the shape below each.
    Names(fn() -> Shape),
}

/// The shape of the whole file.
pub(crate) fn shape() -> Shape {
    Shape::Keys(RawConfig::KEYS, |key| match key {
        "log" => Shape::Keys(RawLog::KEYS, |_| Shape::Leaf),
        "gateway" => Shape::Keys(RawGateway::KEYS, |_| Shape::Leaf),
        "models" => Shape::Names(|| Shape::Keys(RawModel::KEYS, |_| Shape::Leaf)),
        _ => Shape::Leaf,
    })
}
