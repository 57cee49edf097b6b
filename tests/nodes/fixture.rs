//! Shared by the tests of nodes.

use std::time::Duration;

use bytes::Bytes;
use notibus::{
    Bus, Notifier,
    store::{
        AtomicOp, KeyRange, Store, Transaction,
        testing::{Attempt, Operation},
    },
};

use crate::common::{joined, stored, unpolled};

/// The default heartbeat, which is longer than the balance interval.
pub(crate) const INTERVAL: Duration = Duration::from_secs(2);

/// The default expiry.
pub(crate) const EXPIRY: Duration = Duration::from_secs(5);

/// The prefix of the keys of nodes, including the default prefix of the bus.
pub(crate) const NODES: &[u8] = b"notibus\x15\x0e\x02main\x00\x15\x04";

/// The prefix of the keys of the nodes' roles.
pub(crate) const ROLES: &[u8] = b"notibus\x15\x0a";

/// Returns everything that is stored about nodes.
pub(crate) async fn of_nodes(store: &Store) -> Vec<(Bytes, Bytes)> {
    [stored(store, NODES).await, stored(store, ROLES).await].concat()
}

/// Removes everything that is stored about nodes.
pub(crate) fn forget_nodes(tx: &Transaction) {
    for keys in [NODES, ROLES] {
        tx.clear_range(&KeyRange::prefix(keys));
    }
}

/// The prefix of the keys of leases.
pub(crate) const LEASES: &[u8] = b"notibus\x15\x0b";

/// Whether an attempt writes a key that starts with `prefix`.
pub(crate) fn writes(attempt: &Attempt, prefix: &[u8]) -> bool {
    attempt.mutations().any(|mutation| match mutation {
        Operation::Set { key, .. } | Operation::Clear { key } => key.starts_with(prefix),
        _ => false,
    })
}

/// Whether an attempt clears a key that starts with `prefix`.
pub(crate) fn removes(attempt: &Attempt, prefix: &[u8]) -> bool {
    attempt
        .mutations()
        .any(|mutation| matches!(mutation, Operation::Clear { key } if key.starts_with(prefix)))
}

pub(crate) fn is_fold(attempt: &Attempt) -> bool {
    attempt.applies(AtomicOp::CompareAndClear)
}

/// Starts `count` notifiers at once.
pub(crate) async fn started_at_once(bus: &Bus, count: usize) -> Vec<Notifier> {
    let start = (0..count).map(|_| async { joined(bus).await.notifier(unpolled()).await.unwrap() });
    futures_util::future::join_all(start).await
}

/// Returns the number of partitions on which each notifier works.
pub(crate) fn shares(notifiers: &[&Notifier]) -> Vec<usize> {
    notifiers.iter().map(|notifier| notifier.partitions().len()).collect()
}

/// Whether exactly one notifier works on each of `all` partitions, and their shares differ by at most one.
pub(crate) fn is_even(notifiers: &[&Notifier], all: u32) -> bool {
    let mut partitions: Vec<_> = notifiers.iter().flat_map(|notifier| notifier.partitions()).collect();
    partitions.sort_unstable();
    let shares = shares(notifiers);
    partitions.into_iter().eq(0..all) && shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1
}

/// Returns the number of owned leases, whose rows have a node and a token after the epoch.
pub(crate) async fn owned(store: &Store) -> usize {
    stored(store, LEASES).await.iter().filter(|(_, value)| value.len() == 40).count()
}
