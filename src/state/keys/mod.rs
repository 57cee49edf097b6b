//! The catalogue of keys: every family, with its lifetime, its key and its value.
//!
//! Keys are tuples (the FoundationDB tuple encoding, whose byte order is value order) under the prefix of the bus. The
//! first element is the number of the family.
//!
//! | no. | family | key after the number | value | lifetime |
//! |---|---|---|---|---|
//! | 0 | config | nothing, or "import" | format, partitions, incarnation; none: a bus is being imported | as long as the bus, or the import |
//! | 1 | counters | partition, name, instance, 0, slot | 5 lanes × 8 bytes, little-endian: created, deleted, updated, ddoc updated, of these with an id | from an event to its fold |
//! | 1 | last update | partition, name, instance, 1, slot | versionstamp | from an event to its fold |
//! | 1 | pending ddoc | partition, name, instance, 2, ddoc id | versionstamp | from an event to its fold |
//! | 2 | doorbell | partition | 8 bytes, little-endian | as long as the bus |
//! | 3 | fold mark | partition | lease epoch, fold number | as long as the bus |
//! | 4 | feed entry | feed, shard, incarnation, versionstamp | the row | until its id has a newer one |
//! | 5 | newest | feed, id | sequence | as long as the id has a row |
//! | 7 | topology | feed, incarnation, versionstamp | closed, token, scheme and shard ids | as long as a shard of it has rows |
//! | 8 | horizon | feed | sequence | as long as the feed, once rows were dropped |
//! | 9 | ddoc | name, instance, ddoc id or nothing | sequence | as long as the database |
//! | 10 | role | cell, 1, node id, role | how many resources it may own | as long as the node is alive and has the role |
//! | 10 | role | cell, 2, role, node id | the same | the same |
//! | 11 | lease | cell, pool, resource | epoch, owner | as long as the resource |
//! | 13 | age mark | milliseconds that janitors have worked | sequence | until a later one is as old as the retention, or takes its place |
//! | 14 | pool version | cell, 3, number of the pool, which a few share | versionstamp of the last change of its members, leases or resources | as long as the bus |
//! | 14 | node | cell, 4, node id | beat, token, start, its expiry | as long as the node is alive |
//! | 14 | common version | cell, 5 | versionstamp of the last change of any pool | as long as the bus |
//! | 15 | pulse | feed | 16 lanes × 4 bytes, little-endian: appends to the shards of each lane, and reshards | as long as the feed |
//! | 17 | name | name | none: nothing is stored here; it is a conflict key of transactions that decide which instance a name means | never |
//! | 18 | row count | feed, shard | 8 bytes, little-endian: how many rows the shard has | as long as the shard, once it had a row |
//! | 24 | idempotency | 0, key of a run; or 1 | versionstamp, id of the run, its result as JSON; or the version before which results were cleared | five minutes, until the janitor's next pass; or as long as the bus |
//! | 25 | consumer | 0, consumer | identity, token, generation, feed, filter, start, paused, creation, expiry | as long as the consumer |
//! | 25 | checkpoint | 1, consumer, shard | cursor: everything up to its position is done, or deferred | as long as the consumer reads the shard |
//! | 25 | deferred | 2, consumer, shard, id | what is done, due, instance, attempts, time, error, again | from a failure, a long run, or a request to work again, until the id is done and the checkpoint has passed it |
//! | 25 | low watermark | 3, consumer | sequence: no shard has a wanted row before it that is not done or deferred | as long as the consumer, once it is later than the start |
//! | 25 | memberless | 4, consumer | when it last had a member, and how long it has had none | while no node works for a consumer that expires |
//! | 26 | incarnation | incarnation | the last sequence known to exist in it; for an earlier one, also the versions that its store had given out, if known | as long as the bus |
//!
//! The families with number 1 form one range, so that a notifier can read everything that waits for it at once. The number after the
//! instance distinguishes them. Numbers are never reused. `docs/protocol.md` specifies the bytes of some families for other languages.
//!
//! A sequence in a key is an incarnation and a tuple versionstamp, because the store fills in the stamp at commit, and so needs it at a
//! fixed offset.

mod config;
mod consumer;
mod counters;
mod feed;
mod idempotency;
mod lease;
#[cfg(feature = "http")]
mod name;
mod node;
mod partition;
mod pulse;
mod topology;

use bytes::Bytes;
use foundationdb_tuple::{TuplePack, TupleUnpack};

pub(crate) use config::{AgeMark, Config, EndOfIncarnation, end_operand};
pub use consumer::ConsumerName;
pub(crate) use consumer::{ConsumerRow, DeferredRow, Due, MemberlessSince, watermark};
pub(crate) use counters::{DrainKey, DrainRow, stamp_operand};
pub use feed::ShardId;
pub(crate) use feed::{FeedId, RowSpace, row_count, sequence_operand};
pub(crate) use idempotency::RunResult;
pub(crate) use lease::{Lease, Owner, role_of_pool, slot_of_pool};
pub use node::{NodeId, Role};
pub(crate) use node::{NodeRow, role_max};
pub(crate) use partition::{FoldMark, Partition};
pub(crate) use pulse::{Lanes, PulseValue};
pub(crate) use topology::{Layout, SHARDS_MAX, TopologyRow};

use crate::{
    base::{
        encoding::{Incarnation, Sequence, Versionstamp},
        error::{Error, Result},
    },
    store::{KeyRange, key_after},
};

/// The numbers of the families. They are stored and never change. Missing numbers belonged to former families, and are not reused.
mod family {
    pub const CONFIG: u16 = 0;
    pub const COUNTERS: u16 = 1;
    pub const DOORBELL: u16 = 2;
    pub const FOLD_MARK: u16 = 3;
    pub const ENTRY: u16 = 4;
    pub const NEWEST: u16 = 5;
    pub const TOPOLOGY: u16 = 7;
    pub const HORIZON: u16 = 8;
    pub const DDOC: u16 = 9;
    pub const ROLE: u16 = 10;
    pub const LEASE: u16 = 11;
    pub const AGE: u16 = 13;
    pub const POLLED: u16 = 14;
    pub const PULSE: u16 = 15;
    #[cfg(feature = "http")]
    pub const NAME: u16 = 17;
    pub const ROW_COUNT: u16 = 18;
    pub const IDEMPOTENCY: u16 = 24;
    pub const CONSUMER: u16 = 25;
    pub const INCARNATION: u16 = 26;
}

/// The numbers after the cell in keys of family 14. They are stored and never change; 0 to 2 were used before.
///
/// Every process polls the rows of nodes, the common version and, in the next family, the pulse of the notifications. No other key is
/// between them, so one read returns all of them: [`Keys::polled`].
mod polled {
    /// The version of the pools in a slot, whose number follows.
    pub const POOL: u16 = 3;
    /// The row of a node.
    pub const NODE: u16 = 4;
    /// The common version of all pools.
    pub const COMMON: u16 = 5;
}

/// The cell of all nodes and leases. The nodes of a cell divide the work among them. The cell is part of the keys so that each of several
/// sites could have its own.
const CELL: &str = "main";

/// The maximum length of the prefix of a bus, in bytes. It keeps the longest key below the store's limit.
pub(crate) const PREFIX_LEN_MAX: usize = 256;

#[derive(Debug, Clone)]
pub(crate) struct Keys {
    prefix: Bytes,
}

impl Keys {
    /// Creates the keys under `prefix`.
    pub fn new(prefix: &[u8]) -> Result<Self> {
        if prefix.len() > PREFIX_LEN_MAX {
            return Err(Error::invalid(
                "prefix",
                format!("it has {} bytes, at most {PREFIX_LEN_MAX} are allowed", prefix.len()),
            ));
        }
        if prefix.first() == Some(&0xff) {
            return Err(Error::invalid("prefix", "it starts with 0xff, which the store reserves"));
        }
        Ok(Self { prefix: Bytes::copy_from_slice(prefix) })
    }

    pub fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// All keys of the bus.
    pub fn all(&self) -> KeyRange {
        // The tags of the tuple integer 0 and of the tuple integers 1 to 255.
        KeyRange::new([&self.prefix[..], &[0x14]].concat(), [&self.prefix[..], &[0x16]].concat())
    }

    /// Returns the ranges of the keys that move with the bus to another store, with their names: all but the configuration and the keys of
    /// running processes. Sequences in them stay as they are, because they begin with the incarnation, which a move raises.
    pub fn relocated(&self) -> impl Iterator<Item = (&'static str, KeyRange)> {
        let families = [
            (family::COUNTERS, "counters of events that wait to be folded"),
            (family::ENTRY, "rows of feeds"),
            (family::NEWEST, "places of newest rows"),
            (family::TOPOLOGY, "topology entries"),
            (family::HORIZON, "horizons"),
            (family::DDOC, "design documents"),
            (family::CONSUMER, "rows of consumers"),
            (family::AGE, "age marks"),
            (family::ROW_COUNT, "row counts of shards"),
            (family::INCARNATION, "ends of incarnations"),
        ];
        families.into_iter().map(|(number, what)| (what, self.range(&(number,))))
    }

    /// The keys that every process polls: the rows of all nodes, the common version and the pulse of the notifications, in this order.
    pub fn polled(&self) -> KeyRange {
        KeyRange::new(self.nodes().begin, key_after(&self.pulse(&FeedId::notifications())))
    }

    fn pack(&self, elements: &impl TuplePack) -> Vec<u8> {
        let mut key = Vec::with_capacity(self.prefix.len() + 96);
        key.extend_from_slice(&self.prefix);
        elements.pack_into_vec(&mut key);
        key
    }

    /// Packs the key of the tuple `elements`, which has one incomplete versionstamp, as the operand of `SET_VERSIONSTAMPED_KEY`.
    fn pack_stamped(&self, elements: &impl TuplePack) -> Vec<u8> {
        let mut key = Vec::with_capacity(self.prefix.len() + 96);
        key.extend_from_slice(&self.prefix);
        elements.pack_into_vec_with_versionstamp(&mut key);
        key
    }

    /// The keys of tuples that start with `elements`.
    fn range(&self, elements: &impl TuplePack) -> KeyRange {
        let mut begin = self.pack(elements);
        let mut end = begin.clone();
        begin.push(0x00);
        end.push(0xff);
        KeyRange::new(begin, end)
    }

    /// Decodes the tuple in `key`, which must be a key of this bus. `what` names the kind of row in errors.
    fn unpack<'k, T: TupleUnpack<'k>>(&self, what: &'static str, key: &'k [u8]) -> Result<T> {
        let tuple = key
            .strip_prefix(&self.prefix[..])
            .ok_or_else(|| Error::corrupt(what, "its key is outside the prefix of the bus"))?;
        foundationdb_tuple::unpack(tuple).map_err(|error| Error::corrupt(what, error.to_string()))
    }
}

/// Returns the elements that represent a sequence in a key.
fn position(sequence: Sequence) -> (u16, foundationdb_tuple::Versionstamp) {
    let stamp = foundationdb_tuple::Versionstamp::complete(sequence.versionstamp().0, sequence.order());
    (sequence.incarnation().0.into(), stamp)
}

/// Returns the sequence that these elements of a key represent.
fn sequence(incarnation: u16, stamp: &foundationdb_tuple::Versionstamp) -> Result<Sequence> {
    let incarnation = u8::try_from(incarnation)
        .map_err(|_| Error::corrupt("sequence", format!("incarnation {incarnation} is over 255")))?;
    let bytes = stamp.transaction_version().try_into().expect("a stamp has 10 bytes");
    Ok(Sequence::new(Incarnation(incarnation), Versionstamp(bytes), stamp.user_version()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_has_limits() {
        assert!(Keys::new(&[1; PREFIX_LEN_MAX]).is_ok());
        assert!(Keys::new(&[1; PREFIX_LEN_MAX + 1]).is_err());
        assert!(Keys::new(&[0xff, 1]).is_err());
    }

    /// All processes poll these keys with one range read of limited length. Any other key in that range could use up the limit.
    #[test]
    fn what_is_polled_stands_together() {
        let keys = Keys::new(b"p").unwrap();
        let (node, pulse) = (keys.node(NodeId([0xff; 16])), keys.pulse(&FeedId::notifications()));
        let common = keys.common_version();
        assert!(node < common && common < pulse);
        assert!([&node, &common, &pulse].iter().all(|key| keys.polled().contains(key)));
        let slot = keys.pool_version(slot_of_pool(&Role::NOTIFIER));
        assert!(
            !keys.polled().contains(&slot)
                && !keys.polled().contains(&keys.role(NodeId([7; 16]), &Role::HTTP)[0])
        );
    }
}
