//! A tenant's HTTP port: the OpenAI API on one side, the daemon on the other.
//!
//! **Owns** all that is text: JSON, chat templates, tokens to characters, server-sent events. **Never** schedules, stores, or
//! believes what a client says about who it is.
//!
//! A request's way, file by file: [`serve`] accepts, [`connection`] times, [`app`] routes, [`admit`] checks the key, [`headers`]
//! and [`body`] read, [`openai`] understands, [`prepare`] tokenises, [`link`] submits and reads the [`log`], [`render`] makes events of its
//! entries ([`detok`], [`stop`]), and [`stream`] sends them. [`template`] is the process from which gateways are forked.

pub mod admit;
pub mod app;
#[cfg(feature = "failpoints")]
mod attacks;
pub mod body;
pub mod connection;
pub mod detok;
pub mod headers;
pub mod link;
pub mod log;
pub mod metrics;
pub mod openai;
pub mod outbox;
mod point;
pub mod prepare;
pub mod render;
pub mod serve;
pub mod stop;
pub mod stream;
pub mod template;
pub mod text;
