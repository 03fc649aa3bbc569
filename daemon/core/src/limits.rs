//! Bounds that more than one crate keeps.

/// Most tokens of one step: what a configuration may ask for, and a worker takes.
pub const MOST_STEP_TOKENS: u32 = 65_536;
