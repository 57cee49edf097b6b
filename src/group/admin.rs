//! Creating, resetting and deleting a group.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use super::{Group, GroupOptions};
use crate::{
    bugs::{Bug, is_on},
    cursor::Start,
    encoding::Sequence,
    env::Env,
    error::{Error, Result},
    feed::Topology,
    keys::{GroupRow, Lease, LeaseRow, NodeId, ShardId},
    lease::{NodeOptions, changed, nodes, roles},
    store::{Isolation, KeyRange, Transaction},
};

/// How often the beats of members are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// The row of a node, as far as it tells whether the node lives.
type Beats = BTreeMap<NodeId, ([u8; 16], u64)>;

impl<R> Group<R> {
    /// Creates the group, unless it is there; then nothing is changed. Returns whether it was created. Every process of a group
    /// can call it when it starts.
    ///
    /// Where it starts is stored with it: with [`Start::Now`] the first row after this is delivered, whoever reads when.
    ///
    /// # Errors
    ///
    /// [`Error::Expired`] if the start is below the feed's horizon, [`Error::Invalid`] if it is ahead of the store or an option is
    /// out of its limits, and [`Error::NoFeed`] if there is no such feed. Nothing is changed then.
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
            return Ok(row.token == token);
        }
        let created_ms = self.context.env().wall_ms();
        self.begin_at(
            tx,
            start,
            GroupRow { token, generation: 1, start: Sequence::MIN, created_ms, expiry_ms },
        )
        .await?;
        Ok(true)
    }

    /// Sets the group to another position: to now, to nothing, or behind a sequence. Consumers of before can write nothing any more;
    /// those that live close their observers, and start again from there within a balance interval. Dead letters stay.
    ///
    /// Without `force` it is refused while members live. Whether one lives that has not left is found out by watching its
    /// heartbeats, which takes 10 s if it does not.
    ///
    /// # Errors
    ///
    /// As [`Group::create`]; [`Error::GroupInUse`] if it is refused; [`Error::NoGroup`]. Nothing is changed then.
    pub async fn reset(&self, to: impl Into<Start>, force: bool) -> Result<()> {
        let to = to.into();
        let dead = self.without_members(force).await?;
        let (dead, token) = (dead.as_ref(), draw(self.context.env()));
        let reset = async |tx: Transaction| {
            let row = self.row(&tx).await?.ok_or_else(|| self.missing())?;
            if row.token == token {
                return Ok(());
            }
            self.check_members(&tx, dead).await?;
            self.begin_at(&tx, to, GroupRow { token, generation: row.generation + 1, ..row }).await
        };
        self.context.db.run(reset).await
    }

    /// Deletes the group, with its checkpoints and dead letters. Consumers that live close their observers, and get nothing until
    /// it is created again.
    ///
    /// Without `force` it is refused while members live, as [`Group::reset`] is.
    ///
    /// Fails with [`Error::GroupInUse`] if it is refused, and with [`Error::NoGroup`] if there is no such group.
    pub async fn delete(&self, force: bool) -> Result<()> {
        let dead = self.without_members(force).await?;
        // After an unknown result it may be gone because of this.
        let (dead, was_there) = (dead.as_ref(), &AtomicBool::new(false));
        let delete = async |tx: Transaction| {
            if self.row(&tx).await?.is_none() {
                return if was_there.load(Ordering::Relaxed) { Ok(()) } else { Err(self.missing()) };
            }
            self.check_members(&tx, dead).await?;
            for range in self.context.keys.whole_group(&self.id) {
                tx.clear_range(&range);
            }
            changed(&tx, &self.context.keys);
            was_there.store(true, Ordering::Relaxed);
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
        changed(tx, keys);
        for range in [keys.checkpoints_of(&self.id)].iter().chain(&keys.statuses_of(&self.id)) {
            tx.clear_range(range);
        }
        let begun = if is_on(Bug::GroupForgetsShards) { 1 } else { shards.len() };
        for shard in shards.into_iter().take(begun) {
            tx.set(&keys.checkpoint(&self.id, shard), start.as_bytes());
        }
        tx.set(&keys.group(&self.id), &GroupRow { start, ..row }.to_bytes());
        Ok(())
    }

    /// Takes the leases away from whoever owns them. Those of shards other than `shards` are removed.
    async fn take_leases(&self, tx: &Transaction, shards: &[ShardId]) -> Result<()> {
        let (keys, pool) = (&self.context.keys, self.id.pool());
        for (key, value) in tx.all_rows(keys.leases(&pool), Isolation::Serializable).await? {
            match keys.lease_row(&key, &value)? {
                (_, resource, LeaseRow::Lease(lease)) if shards.binary_search(&ShardId(resource)).is_ok() => {
                    tx.set(&key, &Lease { epoch: lease.epoch + 1, owner: None }.to_bytes());
                }
                _ => tx.clear(&key),
            }
        }
        Ok(())
    }

    /// The nodes that are listed as members, whether they live or not; read so that they make nothing fail.
    pub(super) async fn members(&self, tx: &Transaction) -> Result<Beats> {
        let (keys, role) = (&self.context.keys, self.id.role());
        let (nodes, roles) = tokio::join!(nodes(tx, keys), roles(tx, keys));
        let roles = roles?;
        let members =
            nodes?.into_iter().filter(|(node, _)| roles.get(node).is_some_and(|roles| roles.contains(&role)));
        Ok(members.map(|(node, row)| (node, (row.token, row.beat))).collect())
    }

    /// Watches the members until it is certain that none of them lives, and returns those that are listed although they are dead;
    /// `None` if it does not matter. Fails if one lives.
    async fn without_members(&self, force: bool) -> Result<Option<Beats>> {
        if force {
            return Ok(None);
        }
        let (db, env) = (&self.context.db, self.context.env());
        let read = async || db.run(async |tx| self.members(&tx).await).await;
        let first = read().await?;
        let deadline = env.now().saturating_add(NodeOptions::default().expiry);
        let mut seen = first.clone();
        while !seen.is_empty() && env.now() < deadline {
            env.sleep(LOOK_INTERVAL).await;
            let now = read().await?;
            let alive = now.iter().filter(|(node, beat)| first.get(node) != Some(beat)).count();
            if alive > 0 {
                return Err(self.in_use(alive));
            }
            seen = now;
        }
        Ok(Some(seen))
    }

    /// Fails if there are members other than `dead`, and makes `tx` fail if one of those beats before the commit. One that joins in
    /// between finds the group as it is then.
    async fn check_members(&self, tx: &Transaction, dead: Option<&Beats>) -> Result<()> {
        let Some(dead) = dead else { return Ok(()) };
        let members = self.members(tx).await?;
        // Those that are dead do not beat; others may, and must not make this fail.
        let alive = members.iter().filter(|(node, beat)| dead.get(node) != Some(beat)).count();
        if alive > 0 {
            return Err(self.in_use(alive));
        }
        for node in members.keys() {
            tx.add_read_conflict(&KeyRange::key(&self.context.keys.node(*node)));
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
