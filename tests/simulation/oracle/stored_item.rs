//! [`StoredItem`]: the meaning of a key of the bus, as far as a judge needs it. Keys are decoded without the decoders of the bus.

use foundationdb_tuple::{Element, unpack};
use notibus::{
    event::{Db, DbInstance, DbName, DdocId, Incarnation, Sequence, Versionstamp},
    feed::ShardId,
    node::NodeId,
};

use crate::{app::AppKey, keyspace::BUS_PREFIX};

/// The meaning of a key. A feed is identified by its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoredItem {
    App(AppKey),
    /// Part of the events that wait for a fold.
    Counters,
    FoldMark(u32),
    Row(Vec<u8>, ShardId, Sequence),
    Topology(Vec<u8>, Sequence),
    Horizon(Vec<u8>),
    /// A changed design document. Without an id, the change may be to any of them.
    Ddoc(Db, Option<DdocId>),
    Node(NodeId),
    /// A node that has a role, by the name of the role.
    Member(String, NodeId),
    Lease(String, u64),
    /// The row of a consumer.
    Consumer(String),
    ConsumerCheckpoint(String, ShardId),
    /// An id whose work is not covered by the checkpoint of its shard.
    Deferred(String, ShardId, Vec<u8>),
    LowWatermark(String),
    /// How long a consumer has been without a member.
    Idle(String),
    /// A key that is not judged.
    Other,
}

impl StoredItem {
    /// Decodes `key`.
    pub fn of(key: &[u8]) -> Self {
        if let Some(app) = AppKey::decode(key) {
            return Self::App(app);
        }
        let elements = key.strip_prefix(BUS_PREFIX).and_then(|rest| unpack::<Vec<Element<'_>>>(rest).ok());
        elements.and_then(|elements| Self::of_elements(&elements)).unwrap_or(Self::Other)
    }

    /// Decodes a key that consists of the tuple `elements`.
    fn of_elements(elements: &[Element<'_>]) -> Option<Self> {
        let (family, rest) = elements.split_first()?;
        Some(match (int(family)?, rest) {
            (1, _) => Self::Counters,
            (3, [partition]) => Self::FoldMark(int(partition)? as u32),
            (4, [feed, shard, incarnation, stamp]) => {
                Self::Row(bytes(feed)?.into(), ShardId(int(shard)?), sequence(incarnation, stamp)?)
            }
            (7, [feed, incarnation, stamp]) => {
                Self::Topology(bytes(feed)?.into(), sequence(incarnation, stamp)?)
            }
            (8, [feed]) => Self::Horizon(bytes(feed)?.into()),
            (9, [name, instance, id]) => {
                let db =
                    Db::new(DbName::new(text(name)?).ok()?, DbInstance(bytes(instance)?.try_into().ok()?));
                let id = Some(text(id)?).filter(|id| !id.is_empty());
                Self::Ddoc(db, id.map(DdocId::new).transpose().ok()?)
            }
            (10, [_, part, role, node]) if int(part)? == 2 => {
                Self::Member(text(role)?.to_owned(), NodeId(bytes(node)?.try_into().ok()?))
            }
            (11, [_, pool, resource]) => Self::Lease(text(pool)?.to_owned(), int(resource)?),
            (14, [_, part, node]) if int(part)? == 4 => Self::Node(NodeId(bytes(node)?.try_into().ok()?)),
            (25, [part, name, rest @ ..]) => Self::of_consumer(int(part)?, text(name)?.to_owned(), rest)?,
            _ => return None,
        })
    }

    /// Decodes a key of the consumers' key family.
    fn of_consumer(part: u64, consumer: String, rest: &[Element<'_>]) -> Option<Self> {
        Some(match (part, rest) {
            (0, []) => Self::Consumer(consumer),
            (1, [shard]) => Self::ConsumerCheckpoint(consumer, ShardId(int(shard)?)),
            (2, [shard, id]) => Self::Deferred(consumer, ShardId(int(shard)?), bytes(id)?.into()),
            (3, []) => Self::LowWatermark(consumer),
            (4, []) => Self::Idle(consumer),
            _ => return None,
        })
    }
}

fn int(element: &Element<'_>) -> Option<u64> {
    match element {
        Element::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

fn text<'a>(element: &'a Element<'_>) -> Option<&'a str> {
    match element {
        Element::String(text) => Some(text),
        _ => None,
    }
}

fn bytes<'a>(element: &'a Element<'_>) -> Option<&'a [u8]> {
    match element {
        Element::Bytes(bytes) => Some(bytes),
        _ => None,
    }
}

fn sequence(incarnation: &Element<'_>, stamp: &Element<'_>) -> Option<Sequence> {
    let Element::Versionstamp(stamp) = stamp else { return None };
    let version = Versionstamp(stamp.transaction_version().try_into().ok()?);
    Some(Sequence::new(Incarnation(u8::try_from(int(incarnation)?).ok()?), version, stamp.user_version()))
}
