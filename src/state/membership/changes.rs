//! Versions, by which a node finds with few reads that nothing has changed.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use futures_util::future::try_join_all;

use crate::{
    base::error::{Error, Result},
    state::keys::{Keys, stamp_operand},
    store::{AtomicOp, Isolation, Transaction},
};

/// The time of the last change; `None` for never.
pub(super) type Version = Option<Bytes>;

/// The last changes of members and of the resources that they divide, as far as a node has to know them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Versions {
    /// Members and their roles.
    pub membership: Version,
    /// The leases and resources of all pools.
    pools: Version,
    /// The leases and resources of each pool that the node works on.
    pub of_pool: BTreeMap<Arc<str>, Version>,
}

impl Versions {
    /// Reads them by snapshot. It reads those of pools only if any pool has changed since `before`, or if one of
    /// `pools` is not in `before`.
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

/// The version of `pool`, read by snapshot.
pub(super) async fn version_of(tx: &Transaction, keys: &Keys, pool: &str) -> Result<Version> {
    tx.get(&keys.pool_version(pool), Isolation::Snapshot).await
}

/// Makes `tx` move the versions because it changes leases or resources of `pool`.
pub(crate) fn changed(tx: &Transaction, keys: &Keys, pool: &str) {
    for key in [keys.pool_version(pool), keys.pools_version()] {
        tx.atomic(AtomicOp::SetVersionstampedValue, &key, &stamp_operand());
    }
}

/// Makes `tx` move the version of all pools because it removes the resources of `pool`, with its own version.
pub(crate) fn pool_removed(tx: &Transaction, keys: &Keys) {
    tx.atomic(AtomicOp::SetVersionstampedValue, &keys.pools_version(), &stamp_operand());
}

/// Makes `tx` move the membership version because a node comes, goes, or changes its roles.
pub(super) fn members_changed(tx: &Transaction, keys: &Keys) {
    tx.atomic(AtomicOp::SetVersionstampedValue, &keys.membership_version(), &stamp_operand());
}
