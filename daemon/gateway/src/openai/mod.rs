//! The OpenAI API: what a body means, and what an answer looks like.
//!
//! **Owns** the field tables, the error objects and the shapes of answers. **Never** reads a socket or knows the daemon.
//!
//! Every field of a body is honoured, refused with 400, or answered with a warning; none is ignored in silence.

pub mod answer;
pub mod detached;
pub mod error;
mod fields;
pub mod request;

pub use error::ApiError;
