//! The roles of a node: who records events, folds them, delivers rows, cleans up, and works on what has changed.
//!
//! Each has a folder of its own, with its interface in `mod.rs`. Only [`bus`](crate::bus) starts them.

pub(crate) mod changes;
pub(crate) mod dispatcher;
pub(crate) mod group;
pub(crate) mod janitor;
pub(crate) mod jobs;
pub(crate) mod notifier;
pub(crate) mod producer;
