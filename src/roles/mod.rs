//! The roles of a node: they record events, fold them, deliver rows, clean up, and work on what has changed.
//!
//! Each role has its own folder, with its interface in `mod.rs`. Only [`bus`](crate::bus) starts roles. A [`mirror`] is a subscriber.

pub(crate) mod changes;
pub(crate) mod consumer;
pub(crate) mod dispatcher;
pub(crate) mod janitor;
pub(crate) mod mirror;
pub(crate) mod notifier;
pub(crate) mod producer;
