//! A round of a worker, as one transaction: reads members, leases and resources, decides, and writes.
//!
//! It reads everything by snapshot. So rounds of several nodes conflict only where they meet: each written lease, and
//! the members of the pool, are in the conflict set.

use std::collections::BTreeMap;

use super::{
    Held, Pool, Work,
    heartbeat::draw,
    member::Shared,
    plan::{OwnState, RoundPlan, View},
    roles::{Version, changed, members},
};
use crate::{
    base::error::Result,
    state::keys::{Lease, NodeRow, Owner, role_of_pool},
    store::{Isolation, KeyRange, Transaction},
};

/// The most leases that are acquired in one transaction; the rest follows at once in the next.
const ACQUISITIONS_MAX: usize = 1_000;

/// A round of a worker.
pub(super) struct Round<'a> {
    pub member: &'a Shared,
    /// The token of the node's membership.
    pub joined: [u8; 16],
    pub pool: &'a Pool,
    /// The slot of the pool's version.
    pub slot: u16,
    pub work: &'a dyn Work,
    pub own: OwnState<'a>,
}

/// The result of a round.
pub(super) struct RoundOutcome {
    pub plan: RoundPlan,
    pub acquired: Vec<Held>,
    /// Whether more leases are to be acquired than fit a transaction.
    pub more: bool,
    /// The version of the pool before the round.
    pub version: Version,
}

impl Round<'_> {
    /// The transaction of the round. Returns `None` if the node has no row, which its heartbeat will find.
    pub async fn run(&self, tx: &Transaction) -> Result<Option<RoundOutcome>> {
        let (keys, pool) = (&self.member.keys, &self.pool.name);
        let (mine, role) = (keys.node(self.member.id), role_of_pool(pool));
        let version = keys.pool_version(self.slot);
        let (row, version, members, rows, resources) = tokio::try_join!(
            tx.get(&mine, Isolation::Snapshot),
            tx.get(&version, Isolation::Snapshot),
            members(tx, keys, &role),
            tx.all_rows(keys.leases(pool), Isolation::Snapshot),
            self.work.resources(tx),
        )?;
        let row = row.map(|value| NodeRow::from_bytes(&value)).transpose();
        if row.map_err(|error| error.at(&mine))?.is_none_or(|row| row.token != self.joined) {
            return Ok(None);
        }
        let mut leases = BTreeMap::new();
        for (key, value) in &rows {
            let (_, resource, lease) = keys.lease_row(key, value)?;
            leases.insert(resource, lease);
        }
        let view = View { me: self.member.id, members, resources, leases, own: self.own.clone() };
        let mut plan = view.plan();
        let more = plan.acquire.len() + plan.renew.len() > ACQUISITIONS_MAX;
        plan.acquire.truncate(ACQUISITIONS_MAX);
        plan.renew.truncate(ACQUISITIONS_MAX - plan.acquire.len());
        let acquired = self.write(tx, &view, &plan);
        Ok(Some(RoundOutcome { plan, acquired, more, version }))
    }

    /// Writes `plan`; returns the acquired leases.
    fn write(&self, tx: &Transaction, view: &View<'_>, plan: &RoundPlan) -> Vec<Held> {
        let (keys, pool) = (&self.member.keys, &self.pool.name);
        let lease_of = |resource| view.leases.get(&resource).copied().unwrap_or_default();
        // Leases were read by snapshot, so a written one must not have changed since.
        let claim = |resource| {
            let key = keys.lease(pool, resource);
            tx.add_read_conflict(&KeyRange::key(&key));
            key
        };
        if plan.concerns_others(&view.leases) || !plan.renew.is_empty() {
            tx.add_read_conflict(&keys.nodes_with(&role_of_pool(pool)));
        }
        if plan.concerns_others(&view.leases) {
            changed(tx, keys, pool);
        }
        for &resource in &plan.release {
            let lease = Lease { epoch: lease_of(resource).epoch, owner: None };
            tx.set(&claim(resource), &lease.to_bytes());
        }
        for &resource in &plan.gone {
            let Some(Lease { owner, .. }) = view.leases.get(&resource) else { continue };
            if owner.is_none_or(|owner| owner.node == view.me || !view.is_member(owner.node)) {
                tx.clear(&claim(resource));
            }
        }
        // After an unknown result the next attempt acquires again: the lease may be its own, and has no work.
        let owner = Owner { node: view.me, token: draw(self.member.db.env()) };
        let acquire = plan.acquire.iter().chain(&plan.renew).map(|&resource| {
            let epoch = lease_of(resource).epoch + 1;
            tx.set(&claim(resource), &Lease { epoch, owner: Some(owner) }.to_bytes());
            self.work.acquired(tx, resource, epoch);
            Held::new(keys, pool, resource, epoch, owner)
        });
        acquire.collect()
    }
}
