//! The state of a bus: its families of keys, feeds, cursors and membership in the store, and the state that the roles of a process share.
//!
//! Nothing here starts a role.

pub(crate) mod context;
pub(crate) mod exactly_once;
pub(crate) mod failing;
pub(crate) mod feed;
pub(crate) mod feed_watcher;
pub(crate) mod history;
pub(crate) mod keys;
pub(crate) mod last_seen;
pub(crate) mod membership;
pub(crate) mod notification_feed;
pub(crate) mod page_cache;
pub(crate) mod polls;
pub(crate) mod routing;
pub(crate) mod signals;
pub(crate) mod skipped;
pub(crate) mod stats;
pub(crate) mod wakeups;
