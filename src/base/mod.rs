//! The vocabulary of every layer: databases, events, rows, positions and errors; time and randomness; back-off; tasks that end.
//!
//! Nothing here knows about stores.

pub(crate) mod backoff;
pub(crate) mod cursor;
pub(crate) mod durations;
pub(crate) mod encoding;
pub(crate) mod env;
pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod filter;
pub(crate) mod glob;
pub(crate) mod health;
pub(crate) mod log_throttle;
pub(crate) mod macros;
pub(crate) mod notification;
pub(crate) mod sequence;
pub(crate) mod tasks;
