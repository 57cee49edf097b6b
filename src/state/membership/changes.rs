//! Versions: what has to be read to know that nothing has changed.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use futures_util::future::try_join_all;

use crate::{
    base::{
        bugs::{Bug, is_on},
        error::{Error, Result},
    },
    state::keys::{Keys, stamp_operand},
    store::{AtomicOp, Isolation, Transaction},
};

/// When something has last changed; `None` for never.
pub(super) type Version = Option<Bytes>;

/// When members, and what they divide, have last changed, as far as a node has to know.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Versions {
    /// Who lives, and does what.
    pub membership: Version,
    /// The leases and resources of all pools.
    pools: Version,
    /// Those of each pool that the node works on.
    pub of_pool: BTreeMap<Arc<str>, Version>,
}

impl Versions {
    /// Reads them, so that they make nothing fail. Those of pools are only read if any pool has changed since `before`, or one is
    /// not among them.
    pub async fn read(tx: &Transaction, keys: &Keys, pools: Vec<Arc<str>>, before: &Self) -> Result<Self> {
        let (mut membership, mut all) = (None, None);
        for (key, version) in tx.all_rows(keys.common_versions(), Isolation::Snapshot).await? {
            *(if key[..] == keys.membership_version()[..] { &mut membership } else { &mut all }) =
                Some(version);
        }
        let is_known = all == before.pools && pools.iter().all(|pool| before.of_pool.contains_key(pool));
        let of_pool = if is_known {
            before.of_pool.clone()
        } else {
            let read = pools.into_iter().map(|pool| async move {
                let version = version_of(tx, keys, &pool).await?;
                Ok::<_, Error>((pool, version))
            });
            try_join_all(read).await?.into_iter().collect()
        };
        Ok(Self { membership, pools: all, of_pool })
    }
}

/// When `pool` has last changed, read so that it makes nothing fail.
pub(super) async fn version_of(tx: &Transaction, keys: &Keys, pool: &str) -> Result<Version> {
    tx.get(&keys.pool_version(pool), Isolation::Snapshot).await
}

/// Makes `tx` tell all nodes that leases or resources of `pool` change by it.
pub(crate) fn changed(tx: &Transaction, keys: &Keys, pool: &str) {
    if !is_on(Bug::LeaseChangeNotCounted) {
        for key in [keys.pool_version(pool), keys.pools_version()] {
            tx.atomic(AtomicOp::SetVersionstampedValue, &key, &stamp_operand());
        }
    }
}

/// Makes `tx` tell all nodes that the resources of `pool` are gone by it, with the row of its version.
pub(crate) fn pool_removed(tx: &Transaction, keys: &Keys) {
    if !is_on(Bug::LeaseChangeNotCounted) {
        tx.atomic(AtomicOp::SetVersionstampedValue, &keys.pools_version(), &stamp_operand());
    }
}

/// Makes `tx` tell all nodes that one comes, goes, or has other roles by it.
pub(super) fn members_changed(tx: &Transaction, keys: &Keys) {
    tx.atomic(AtomicOp::SetVersionstampedValue, &keys.membership_version(), &stamp_operand());
}
