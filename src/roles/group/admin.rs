//! Creates, resets and deletes a group.

use parking_lot::Mutex;

use super::{Group, GroupOptions};
use crate::{
    base::{
        cursor::{Cursor, Start},
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

/// The row that an attempt has read and may have changed, if its result is unknown.
struct Attempted(Mutex<Option<GroupRow>>);

impl Attempted {
    fn new() -> Self {
        Self(Mutex::new(None))
    }

    fn get(&self) -> Option<GroupRow> {
        *self.0.lock()
    }

    fn set(&self, row: GroupRow) {
        *self.0.lock() = Some(row);
    }
}

impl<R> Group<R> {
    /// Creates the group, unless it exists; then nothing is changed. Returns whether it was created. Every process of a group
    /// can call it when it starts.
    ///
    /// The start is stored with the group: with [`Start::Now`] the first row after the creation is delivered, whenever it is read.
    ///
    /// # Errors
    ///
    /// [`Error::Expired`] if the start is below the feed's horizon or an embedded store has never returned it; [`Error::Invalid`] if
    /// it is ahead of a cluster or of a later incarnation, or an option is out of its limits; and [`Error::NoFeed`] if there is no such
    /// feed. Then nothing is changed.
    pub async fn create(&self, options: &GroupOptions) -> Result<bool> {
        let (expiry_ms, drawn) = (options.expiry_ms()?, &Mutex::new(Vec::new()));
        self.context.db.run(async |tx| self.create_in(&tx, options.start, expiry_ms, drawn).await).await
    }

    /// [`Group::create`] in one transaction, after attempts that have `drawn` these identities. Each attempt draws its own: an earlier
    /// one may have created a group that was deleted since, and another group has another identity.
    async fn create_in(
        &self,
        tx: &Transaction,
        start: Start,
        expiry_ms: u64,
        drawn: &Mutex<Vec<[u8; 16]>>,
    ) -> Result<bool> {
        if let Some(row) = self.row(tx).await? {
            return Ok(drawn.lock().contains(&row.identity));
        }
        let token = draw(self.context.env());
        drawn.lock().push(token);
        let created_ms = self.context.env().wall_ms();
        self.begin_at(
            tx,
            start,
            GroupRow { identity: token, token, generation: 1, start: Cursor::NOTHING, created_ms, expiry_ms },
        )
        .await?;
        Ok(true)
    }

    /// Moves the group to another position: to now, to nothing, or behind a sequence. Its present consumers can write nothing any more:
    /// living ones close their observers, and start again from there within a balance interval. Dead letters stay; parked ids
    /// are removed.
    ///
    /// Without `force` it fails while members live. To find out whether a member that has not left is alive, it watches the member's
    /// heartbeat for as long as that may pause ([`NodeOptions::expiry`](crate::NodeOptions::expiry)), 5 s by default. A member whose
    /// heartbeat may pause for more than a minute counts as living.
    ///
    /// # Errors
    ///
    /// As [`Group::create`]; [`Error::GroupInUse`] while members live; [`Error::NoGroup`], also if the group is deleted and created again
    /// meanwhile. Then nothing is changed.
    pub async fn reset(&self, to: impl Into<Start>, force: bool) -> Result<()> {
        let to = to.into();
        let (identity, dead) = self.without_members(force).await?;
        let (dead, token, attempted) = (dead.as_ref(), draw(self.context.env()), &Attempted::new());
        let reset = async |tx: Transaction| {
            let row = self.row(&tx).await?.filter(|row| row.identity == identity);
            match (row, attempted.get()) {
                // This attempt has committed, or another reset or deletion has. The other one counts as the later of the two.
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

    /// Deletes the group, with its checkpoints and dead letters. Living consumers close their observers, and receive nothing until
    /// the group is created again. A group of the same name that is created meanwhile stays.
    ///
    /// Without `force` it fails while members live, as [`Group::reset`] does.
    ///
    /// Fails with [`Error::GroupInUse`] while members live, and with [`Error::NoGroup`] if there is no such group.
    pub async fn delete(&self, force: bool) -> Result<()> {
        let (identity, dead) = self.without_members(force).await?;
        let (dead, attempted) = (dead.as_ref(), &Attempted::new());
        let delete = async |tx: Transaction| {
            let Some(row) = self.row(&tx).await?.filter(|row| row.identity == identity) else {
                // An earlier attempt with an unknown result may have deleted it.
                return attempted.get().map(drop).ok_or_else(|| self.missing());
            };
            self.check_members(&tx, dead).await?;
            attempted.set(row);
            self.clear_in(&tx);
            Ok(())
        };
        self.context.db.run(delete).await
    }

    /// Removes all rows of the group.
    fn clear_in(&self, tx: &Transaction) {
        for range in self.context.keys.whole_group(&self.id) {
            tx.clear_range(&range);
        }
        pool_removed(tx, &self.context.keys);
    }

    pub(super) async fn row(&self, tx: &Transaction) -> Result<Option<GroupRow>> {
        let key = self.context.keys.group(&self.id);
        let row = tx.get(&key, Isolation::Serializable).await?;
        row.map(|value| GroupRow::from_bytes(&value).map_err(|error| error.at(&key))).transpose()
    }

    /// Moves the group of `row` to `start`.
    async fn begin_at(&self, tx: &Transaction, start: Start, row: GroupRow) -> Result<()> {
        let (keys, feed) = (&self.context.keys, self.raw());
        let topology = Topology::read(tx, feed, Isolation::Serializable).await?;
        let horizon = feed.horizon(tx, Isolation::Serializable).await?;
        let now = feed.last_readable(tx).await?;
        let start = match start {
            Start::Now => Cursor::from(now),
            Start::At(cursor) => {
                // In its shards a group stores positions only, so one that stopped within a reading starts it over.
                let start = cursor.rewound();
                feed.check_history(start, now)?;
                if start.position() > now {
                    let reason = format!("{start} is ahead of the store, which is at {now}");
                    return Err(Error::invalid("start", reason));
                }
                start.check(horizon)?;
                if start.knew_nothing() { start.begin(now) } else { start }
            }
        };
        let position = start.position();
        let shards: Vec<_> = topology.at(position).shards().collect();
        self.take_leases(tx, &shards).await?;
        changed(tx, keys, &self.id.pool());
        let [lowest, turn] =
            [keys.lowest_checkpoint(&self.id), keys.drain_turn(&self.id)].map(|key| KeyRange::key(&key));
        let places = [keys.checkpoints_of(&self.id), keys.group_parked_ids(&self.id), lowest, turn];
        for range in places.iter().chain(&keys.statuses_of(&self.id)) {
            tx.clear_range(range);
        }
        for shard in shards {
            tx.set(&keys.checkpoint(&self.id, shard), position.as_bytes());
        }
        tx.set(&keys.group(&self.id), &GroupRow { start, ..row }.to_bytes());
        Ok(())
    }

    /// Takes the leases of `shards` away from their owners, and removes the leases of other shards.
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

    /// The identity of the group. Unless `force` is set, also the listed members that are dead; it watches them for long enough to be
    /// certain, and fails if one lives.
    async fn without_members(&self, force: bool) -> Result<([u8; 16], Option<NodeRows>)> {
        let (db, env) = (&self.context.db, self.context.env());
        let read = || db.run(async |tx| self.members(&tx).await);
        let row = db.run(async |tx| self.row(&tx).await?.ok_or_else(|| self.missing())).await?;
        if force {
            return Ok((row.identity, None));
        }
        match watch(env, read).await? {
            Watched::Alive(members) => Err(self.in_use(members)),
            Watched::Dead(members) => Ok((row.identity, Some(members))),
        }
    }

    async fn members(&self, tx: &Transaction) -> Result<NodeRows> {
        member_rows(tx, &self.context.keys, &self.id.role()).await
    }

    /// Fails if there are members other than `dead`. `tx` fails if a member in `dead` sends a heartbeat, or another member joins, before
    /// the commit.
    async fn check_members(&self, tx: &Transaction, dead: Option<&NodeRows>) -> Result<()> {
        let Some(dead) = dead else { return Ok(()) };
        let (keys, role) = (&self.context.keys, self.id.role());
        tx.add_read_conflict(&keys.nodes_with(&role));
        let members = self.members(tx).await?;
        // Dead members send no heartbeat, so only they are in the conflict set: heartbeats of others must not make `tx` fail.
        let alive = members.iter().filter(|(node, row)| dead.get(node) != Some(row)).count();
        if alive > 0 {
            return Err(self.in_use(alive));
        }
        for node in members.keys() {
            tx.add_read_conflict(&KeyRange::key(&keys.node(*node)));
        }
        Ok(())
    }

    fn in_use(&self, members: usize) -> Error {
        Error::GroupInUse { group: self.id.to_string(), members }
    }
}

fn draw(env: &Env) -> [u8; 16] {
    NodeId::random(env).0
}
