//! Words shared by every crate: ids, units, sampling parameters, finish reasons; and lists and maps made for them.
//!
//! **Owns** no behaviour and no state. **Never** depends on another crate of the workspace, serialises, or reads a clock.

mod cost;
mod few;
mod finish;
mod hash;
mod ids;
mod sampling;
mod tensor;
mod units;

pub use cost::StepCost;
pub use few::Few;
pub use finish::FinishReason;
pub use hash::{NumberHasher, NumberMap};
pub use ids::{BlockId, ModelId, ParseRequestIdError, PlanId, RequestId, SequenceId, TenantId, TokenId};
pub use sampling::{Penalties, SamplingParams};
pub use tensor::TensorType;
pub use units::{Blocks, Bytes, Tokens};
