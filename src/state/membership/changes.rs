//! Versions, by which a node finds with few reads that nothing has changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::Bytes;
use futures_util::future::try_join_all;

use crate::{
    base::error::{Error, Result},
    state::keys::{Keys, Role, stamp_operand},
    store::{AtomicOp, Isolation, Transaction},
};

/// The time of the last change; `None` for never.
pub(super) type Version = Option<Bytes>;

/// The last changes of members and of the resources that they divide, as far as a node has to know them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Versions {
    membership: Version,
    /// The leases and resources of all pools.
    pools: Version,
    /// The last changes of each pool that the node works on.
    pub of_pool: BTreeMap<Arc<str>, OfPool>,
}

/// The last changes that a worker has to know.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct OfPool {
    /// The nodes with the role of the pool, and what each may own by it.
    members: Version,
    leases: Version,
}

impl OfPool {
    /// Reads them by snapshot, except for those that are `unmoved`.
    pub async fn read(
        tx: &Transaction,
        keys: &Keys,
        pool: &str,
        role: &Role,
        unmoved: Unmoved<'_>,
    ) -> Result<Self> {
        let members = async {
            match unmoved.members {
                Some(known) => Ok(known.clone()),
                None => tx.get(&keys.role_version(role), Isolation::Snapshot).await,
            }
        };
        let leases = async {
            match unmoved.leases {
                Some(known) => Ok(known.clone()),
                None => tx.get(&keys.pool_version(pool), Isolation::Snapshot).await,
            }
        };
        let (members, leases) = tokio::try_join!(members, leases)?;
        Ok(Self { members, leases })
    }
}

/// What has not moved of the versions of a pool.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unmoved<'a> {
    members: Option<&'a Version>,
    leases: Option<&'a Version>,
}

impl Versions {
    /// Reads them by snapshot. It reads those of the roles of `pools` only if any member has changed since `before`, those
    /// of their leases only if any pool has, and both if the pool is not in `before`.
    pub async fn read(
        tx: &Transaction,
        keys: &Keys,
        pools: Vec<(Arc<str>, Role)>,
        before: &Self,
    ) -> Result<Self> {
        let (mut membership, mut all) = (None, None);
        for (key, version) in tx.all_rows(keys.common_versions(), Isolation::Snapshot).await? {
            *(if key[..] == keys.membership_version()[..] { &mut membership } else { &mut all }) =
                Some(version);
        }
        let (same_members, same_pools) = (membership == before.membership, all == before.pools);
        let read = pools.into_iter().map(|(pool, role)| async move {
            let before = before.of_pool.get(&pool);
            let members = before.filter(|_| same_members).map(|before| &before.members);
            let leases = before.filter(|_| same_pools).map(|before| &before.leases);
            let of_pool = OfPool::read(tx, keys, &pool, &role, Unmoved { members, leases }).await?;
            Ok::<_, Error>((pool, of_pool))
        });
        let of_pool = try_join_all(read).await?.into_iter().collect();
        Ok(Self { membership, pools: all, of_pool })
    }
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

/// Makes `tx` move the membership version because a node comes, goes, or changes its roles; and the versions of these `roles`.
pub(super) fn members_changed<'a>(tx: &Transaction, keys: &Keys, roles: impl IntoIterator<Item = &'a Role>) {
    let of_roles = roles.into_iter().map(|role| keys.role_version(role));
    let moved: BTreeSet<_> = of_roles.chain([keys.membership_version()]).collect();
    for key in moved {
        tx.atomic(AtomicOp::SetVersionstampedValue, &key, &stamp_operand());
    }
}
