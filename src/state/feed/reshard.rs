//! Creates and changes the topology of a feed.

use bytes::Bytes;

use super::{RawFeed, Topology, writer::moved};
use crate::{
    base::{
        encoding::Sequence,
        env::Env,
        error::{Error, Result},
    },
    state::{
        context::Context,
        history::History,
        keys::{Lanes, Layout, SHARDS_MAX, ShardId, TopologyRow},
        routing::SchemeId,
    },
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Transaction},
};

const LEGACY_PREFIX_LEN_MAX: usize = 1_024;

pub(crate) fn check_shards(shards: u32) -> Result<()> {
    if (1..=SHARDS_MAX).contains(&shards) {
        Ok(())
    } else {
        Err(Error::invalid("shards", format!("{shards} is not 1 to {SHARDS_MAX}")))
    }
}

/// Fails unless rows under `prefix` can be adopted.
pub(crate) fn check_legacy_prefix(context: &Context, prefix: &[u8]) -> Result<()> {
    if !(1..=LEGACY_PREFIX_LEN_MAX).contains(&prefix.len()) || prefix[0] == 0xff {
        let reason =
            format!("it has {} bytes, not 1 to {LEGACY_PREFIX_LEN_MAX}, or starts with 0xff", prefix.len());
        return Err(Error::invalid("legacy prefix", reason));
    }
    if KeyRange::prefix(prefix.to_vec()).intersects(&context.keys.all()) {
        return Err(Error::invalid("legacy prefix", "keys of the bus itself start with it"));
    }
    Ok(())
}

/// The next topology of a feed.
#[derive(Debug, Clone)]
pub(crate) struct NewTopology {
    shards: u32,
    /// The scheme that routes ids to shards; the current one if `None`.
    scheme: Option<SchemeId>,
    /// Identifies this attempt when it is repeated.
    token: [u8; 16],
}

impl NewTopology {
    /// Creates a topology of `shards` shards. Fails if the number is outside its limits.
    pub fn new(shards: u32, scheme: Option<SchemeId>, env: &Env) -> Result<Self> {
        check_shards(shards)?;
        let token = u128::from(env.random()) << 64 | u128::from(env.random());
        Ok(Self { shards, scheme, token: token.to_be_bytes() })
    }

    /// Returns the same topology, but with the token of an earlier attempt.
    pub fn with_token(self, token: [u8; 16]) -> Self {
        Self { token, ..self }
    }

    /// Returns the stored row, whose shards begin with `first_shard`.
    fn row(&self, first: Sequence, first_shard: ShardId, scheme: SchemeId) -> TopologyRow {
        let layout = Layout::Sharded { scheme: scheme.0, first: first_shard, count: self.shards };
        TopologyRow { first, closed: false, token: self.token, layout }
    }
}

impl RawFeed<'_> {
    /// Writes the first topology of the feed, which must not exist yet, in the caller's transaction. A repetition with the same `new`,
    /// after an unknown result, changes nothing.
    pub async fn create(self, tx: &Transaction, new: &NewTopology) -> Result<()> {
        let scheme = new.scheme.unwrap_or(SchemeId::ID);
        self.context.schemes.check(scheme)?;
        let row = new.row(Sequence::MIN, ShardId(1), scheme);
        if self.is_new(tx, &row, None).await? {
            tx.set(&self.context.keys.topology(self.id, row.first), &row.to_bytes());
        }
        Ok(())
    }

    /// Adopts the unsharded rows under `prefix` as the first topology entry; rows written from this transaction on go to shards. The key of
    /// each row is the prefix, an incarnation and a tuple versionstamp. `rows` is the number of adopted rows.
    pub async fn adopt(
        self,
        tx: &Transaction,
        (prefix, rows): (&[u8], u64),
        new: &NewTopology,
    ) -> Result<()> {
        let scheme = new.scheme.unwrap_or(SchemeId::ID);
        self.context.schemes.check(scheme)?;
        check_legacy_prefix(self.context, prefix)?;
        let layout = Layout::Legacy(Bytes::copy_from_slice(prefix));
        let legacy = TopologyRow { first: Sequence::MIN, closed: false, token: new.token, layout };
        let second = new.row(Sequence::MIN, legacy.next_shard(), scheme);
        if self.is_new(tx, &legacy, Some(&second)).await? {
            History::check_opened(self.context, tx).await?;
            tx.set(&self.context.keys.row_count(self.id, ShardId(0)), &rows.to_le_bytes());
            self.succeed(tx, &legacy, new, scheme);
        }
        Ok(())
    }

    /// Closes the current entry and opens the next one at the stamp of `tx`, which no other write to the feed in `tx` may use. Returns the
    /// new entry, whose first sequence is known only after the commit. Writers that have read the current entry can no longer commit. A
    /// repetition with the same `new`, after an unknown result, changes nothing, and returns the stored entry.
    pub async fn reshard(self, tx: &Transaction, new: &NewTopology) -> Result<TopologyRow> {
        let topology = Topology::read(tx, self, Isolation::Serializable).await?;
        if let Some(written) = topology.entries().iter().find(|entry| entry.token == new.token) {
            return Ok(written.clone());
        }
        History::check_opened(self.context, tx).await?;
        let current = topology.current();
        let scheme = new.scheme.unwrap_or(match current.layout {
            Layout::Legacy(_) => SchemeId::ID,
            Layout::Sharded { scheme, .. } => SchemeId(scheme),
        });
        self.context.schemes.check(scheme)?;
        if current.next_shard().0.checked_add(new.shards.into()).is_none() {
            return Err(Error::corrupt("topology", "the shard ids are exhausted"));
        }
        Ok(self.succeed(tx, current, new, scheme))
    }

    /// Returns true if the feed does not exist yet, and false if it begins with `first` and, if given, `second`. Fails if the feed began in
    /// another way.
    async fn is_new(
        self,
        tx: &Transaction,
        first: &TopologyRow,
        second: Option<&TopologyRow>,
    ) -> Result<bool> {
        let read = RangeRead::new(self.context.keys.topologies(self.id)).limit(2);
        let rows = tx.get_range(&read, Isolation::Serializable).await?.rows;
        let rows =
            rows.iter().map(|row| Ok(self.context.keys.topology_row(row)?.1)).collect::<Result<Vec<_>>>()?;
        let is = |row: Option<&TopologyRow>, expected: &TopologyRow| {
            row.is_some_and(|row| row.token == expected.token && row.layout == expected.layout)
        };
        if rows.is_empty() {
            Ok(true)
        } else if is(rows.first(), first) && second.is_none_or(|second| is(rows.get(1), second)) {
            Ok(false)
        } else {
            Err(Error::invalid("feed", format!("the feed of {} began differently", self.id)))
        }
    }

    /// Closes `current`, and writes its successor.
    fn succeed(
        self,
        tx: &Transaction,
        current: &TopologyRow,
        new: &NewTopology,
        scheme: SchemeId,
    ) -> TopologyRow {
        let keys = &self.context.keys;
        let closed = TopologyRow { closed: true, ..current.clone() };
        tx.set(&keys.topology(self.id, closed.first), &closed.to_bytes());
        let next = new.row(Sequence::MIN, current.next_shard(), scheme);
        let operand = keys.next_topology(self.id, self.context.config.incarnation);
        tx.atomic(AtomicOp::SetVersionstampedKey, &operand, &next.to_bytes());
        if self.id.instance().is_none() {
            // Readers that wait for rows poll only the pulse. Readers of documents are woken by notifications.
            moved(tx, self, Lanes::ALL);
        }
        next
    }
}
