//! The worker against its promises: reference outputs, batch independence, replay, protocol, element types.

mod driver;
mod independence;
mod models;
mod protocol;
mod reference;
mod replay;
mod types;
