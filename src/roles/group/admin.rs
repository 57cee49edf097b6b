//! Creating, resetting and deleting a group.

use std::sync::{Mutex, PoisonError};

use super::{Group, GroupOptions};
use crate::{
    base::{
        bugs::{Bug, is_on},
        cursor::Start,
        encoding::Sequence,
        env::Env,
        error::{Error, Result},
    },
    state::{
        feed::Topology,
        keys::{GroupRow, Lease, NodeId, ShardId},
        membership::{NodeRows, Watched, changed, member_rows, pool_removed, watch},
    },
    store::{Isolation, KeyRange, Transaction},
};

/// What an attempt has found and may have changed, although nobody knows.
struct Attempted(Mutex<Option<GroupRow>>);

impl Attempted {
    /// Nothing yet.
    fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// What the last attempt has found.
    fn get(&self) -> Option<GroupRow> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An attempt has found `row`, and is about to change it.
    fn set(&self, row: GroupRow) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(row);
    }
}

impl<R> Group<R> {
    /// Creates the group, unless it is there; then nothing is changed. Returns whether it was created. Every process of a group
    /// can call it when it starts.
    ///
    /// Where it starts is stored with it: with [`Start::Now`] the first row after this is delivered, whoever reads when.
    ///
    /// # Errors
    ///
    /// [`Error::Expired`] if the start is below the feed's horizon or an embedded store has never given it out, [`Error::Invalid`] if
    /// it is ahead of a cluster or of a later incarnation or an option is out of its limits, and [`Error::NoFeed`] if there is no such feed. Nothing is changed then.
    pub async fn create(&self, options: &GroupOptions) -> Result<bool> {
        let (expiry_ms, token) = (options.expiry_ms()?, draw(self.context.env()));
        self.context.db.run(async |tx| self.create_in(&tx, options.start, expiry_ms, token).await).await
    }

    /// [`Group::create`] in one transaction.
    async fn create_in(
        &self,
        tx: &Transaction,
        start: Start,
        expiry_ms: u64,
        token: [u8; 16],
    ) -> Result<bool> {
        if let Some(row) = self.row(tx).await? {
            return Ok(row.identity == token);
        }
        let created_ms = self.context.env().wall_ms();
        self.begin_at(
            tx,
            start,
            GroupRow { identity: token, token, generation: 1, start: Sequence::MIN, created_ms, expiry_ms },
        )
        .await?;
        Ok(true)
    }

    /// Sets the group to another position: to now, to nothing, or behind a sequence. Consumers of before can write nothing any more;
    /// those that live close their observers, and start again from there within a balance interval. Dead letters stay; what is parked
    /// is forgotten.
    ///
    /// Without `force` it is refused while members live. Whether one lives that has not left is found out by watching its
    /// heartbeats for as long as it may be silent ([`NodeOptions::expiry`](crate::NodeOptions::expiry)), 10 s by default; one that
    /// may be silent for over a minute counts as living.
    ///
    /// # Errors
    ///
    /// As [`Group::create`]; [`Error::GroupInUse`] if it is refused; [`Error::NoGroup`], also if the group is deleted meanwhile, and
    /// another one created. Nothing is changed then.
    pub async fn reset(&self, to: impl Into<Start>, force: bool) -> Result<()> {
        let to = to.into();
        let (identity, dead) = self.without_members(force).await?;
        let (dead, token, attempted) = (dead.as_ref(), draw(self.context.env()), &Attempted::new());
        let reset = async |tx: Transaction| {
            let row = self.row(&tx).await?.filter(|row| row.identity == identity);
            match (row, attempted.get()) {
                // This was committed, or another reset or deletion, which might as well have come after it.
                (found, Some(before)) if found.is_none_or(|row| row.token != before.token) => Ok(()),
                (None, _) => Err(self.missing()),
                (Some(row), _) => {
                    self.check_members(&tx, dead).await?;
                    attempted.set(row);
                    self.begin_at(&tx, to, GroupRow { token, generation: row.generation + 1, ..row }).await
                }
            }
        };
        self.context.db.run(reset).await
    }

    /// Deletes the group, with its checkpoints and dead letters. Consumers that live close their observers, and get nothing until
    /// it is created again. A group of the name that is created meanwhile stays.
    ///
    /// Without `force` it is refused while members live, as [`Group::reset`] is.
    ///
    /// Fails with [`Error::GroupInUse`] if it is refused, and with [`Error::NoGroup`] if there is no such group.
    pub async fn delete(&self, force: bool) -> Result<()> {
        let (identity, dead) = self.without_members(force).await?;
        let (dead, attempted) = (dead.as_ref(), &Attempted::new());
        let delete = async |tx: Transaction| {
            let Some(row) = self.row(&tx).await?.filter(|row| row.identity == identity) else {
                // After an unknown result it may be gone because of this.
                return attempted.get().map(drop).ok_or_else(|| self.missing());
            };
            self.check_members(&tx, dead).await?;
            attempted.set(row);
            for range in self.context.keys.whole_group(&self.id) {
                tx.clear_range(&range);
            }
            pool_removed(&tx, &self.context.keys);
            Ok(())
        };
        self.context.db.run(delete).await
    }

    /// The row of the group.
    pub(super) async fn row(&self, tx: &Transaction) -> Result<Option<GroupRow>> {
        let row = tx.get(&self.context.keys.group(&self.id), Isolation::Serializable).await?;
        row.map(|value| GroupRow::from_bytes(&value)).transpose()
    }

    /// Sets the group of `row` to `start`, whatever it was before.
    async fn begin_at(&self, tx: &Transaction, start: Start, row: GroupRow) -> Result<()> {
        let (keys, feed) = (&self.context.keys, self.raw());
        let topology = Topology::read(tx, feed, Isolation::Serializable).await?;
        let horizon = feed.horizon(tx, Isolation::Serializable).await?;
        let now = feed.last_readable(tx).await?;
        let start = match start {
            Start::Now => now,
            Start::At(cursor) => {
                // A group keeps positions only: one that stopped in the middle of a reading starts over.
                let start = cursor.rewound();
                feed.check_history(start, now)?;
                if start.position() > now {
                    let reason = format!("{start} is ahead of the store, which is at {now}");
                    return Err(Error::invalid("start", reason));
                }
                start.check(horizon)?;
                start.position()
            }
        };
        let shards: Vec<_> = topology.at(start).shards().collect();
        self.take_leases(tx, &shards).await?;
        changed(tx, keys, &self.id.pool());
        let places = [keys.checkpoints_of(&self.id), keys.group_parked_ids(&self.id)];
        for range in places.iter().chain(&keys.statuses_of(&self.id)) {
            tx.clear_range(range);
        }
        let begun = if is_on(Bug::GroupForgetsShards) { 1 } else { shards.len() };
        for shard in shards.into_iter().take(begun) {
            tx.set(&keys.checkpoint(&self.id, shard), start.as_bytes());
        }
        tx.set(&keys.group(&self.id), &GroupRow { start, ..row }.to_bytes());
        Ok(())
    }

    /// Takes the leases away from anyone who owns them. Those of shards other than `shards` are removed.
    async fn take_leases(&self, tx: &Transaction, shards: &[ShardId]) -> Result<()> {
        let (keys, pool) = (&self.context.keys, self.id.pool());
        for (key, value) in tx.all_rows(keys.leases(&pool), Isolation::Serializable).await? {
            let (_, resource, lease) = keys.lease_row(&key, &value)?;
            if shards.binary_search(&ShardId(resource)).is_ok() {
                tx.set(&key, &Lease { epoch: lease.epoch + 1, owner: None }.to_bytes());
            } else {
                tx.clear(&key);
            }
        }
        Ok(())
    }

    /// Which group it is; and, unless that does not matter, the members that are listed although they are dead, after they have
    /// been watched for so long that this is certain. Fails if one lives.
    async fn without_members(&self, force: bool) -> Result<([u8; 16], Option<NodeRows>)> {
        let (db, env, keys, role) =
            (&self.context.db, self.context.env(), &self.context.keys, self.id.role());
        let read = || db.run(async |tx| member_rows(&tx, keys, &role).await);
        let row = db.run(async |tx| self.row(&tx).await?.ok_or_else(|| self.missing())).await?;
        if force {
            return Ok((row.identity, None));
        }
        match watch(env, read).await? {
            Watched::Alive(members) => Err(self.in_use(members)),
            Watched::Dead(members) => Ok((row.identity, Some(members))),
        }
    }

    /// Fails if there are members other than `dead`, and makes `tx` fail if one of those beats, or another one joins, before the
    /// commit.
    async fn check_members(&self, tx: &Transaction, dead: Option<&NodeRows>) -> Result<()> {
        let Some(dead) = dead else { return Ok(()) };
        let (keys, role) = (&self.context.keys, self.id.role());
        tx.add_read_conflict(&keys.nodes_with(&role));
        let members = member_rows(tx, keys, &role).await?;
        // Those that are dead do not beat; others may, and must not make this fail.
        let alive = members.iter().filter(|(node, row)| dead.get(node) != Some(row)).count();
        if alive > 0 {
            return Err(self.in_use(alive));
        }
        for node in members.keys() {
            tx.add_read_conflict(&KeyRange::key(&keys.node(*node)));
        }
        Ok(())
    }

    /// That it is refused.
    fn in_use(&self, members: usize) -> Error {
        Error::GroupInUse { group: self.id.to_string(), members }
    }
}

/// 16 random bytes.
fn draw(env: &Env) -> [u8; 16] {
    NodeId::random(env).0
}
