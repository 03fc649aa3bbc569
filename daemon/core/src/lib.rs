//! Words shared by every crate: ids, units, sampling parameters, finish reasons; limits of a cgroup; bounds that several keep; errors as
//! text; lists and maps.
//!
//! **Owns** no state. **Never** depends on another crate of the workspace, serialises, or reads a clock.

mod cgroup;
mod cost;
mod finish;
mod ids;
mod limits;
mod quota;
mod said;
mod sampling;
mod tensor;
mod units;

pub use cgroup::{BlockDevice, CgroupLimits, CpuList, CpuTime, IoLimit, Limit, LimitName, NoCpuList, Weight};
pub use cost::{Pairs, StepCost};
pub use finish::FinishReason;
pub use ids::{BlockId, ModelId, ParseRequestIdError, PlanId, RequestId, SequenceId, TenantId, TokenId};
pub use limits::MOST_STEP_TOKENS;
pub use quota::{Quota, Quotas};
pub use said::said;
pub use sampling::{Penalties, SamplingParams};
pub use tensor::TensorType;
pub use units::{Blocks, Bytes, Tokens};

/// A list that has one element as a rule, which lies in the value itself: steps have a row for each of hundreds of sequences, and nearly all of
/// them one input and one draw.
pub type Few<T> = smallvec::SmallVec<[T; 1]>;

/// A map by numbers that this program gave out itself: whoever could choose them could make it slow.
pub type NumberMap<K, V> = rustc_hash::FxHashMap<K, V>;
