//! [`Consuming`]: what the tasks of a consumer share.

use std::sync::{Arc, atomic::AtomicBool};

use bytes::Bytes;
use tokio::sync::watch;

use super::{
    ConsumerOptions, Group,
    lowest::{Lowest, Working},
    observer::PendingCloses,
};

pub(super) struct Consuming<R, F> {
    pub group: Group<R>,
    pub options: ConsumerOptions,
    /// Makes an observer for a shard.
    pub factory: F,
    /// Observers that are being closed.
    pub pending_closes: PendingCloses,
    /// Whether the group did not exist when it was last read.
    pub is_gone: AtomicBool,
    /// The facts behind the group's lowest checkpoint.
    pub lowest: Arc<Lowest>,
    /// Changes when a caller has asked to try parked ids again.
    pub asked: watch::Sender<Option<Bytes>>,
    /// The shards on which it works at the moment.
    pub shards: Working,
}
