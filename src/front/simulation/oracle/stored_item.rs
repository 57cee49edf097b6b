//! [`StoredItem`]: the meaning of a key of the bus. The oracle decodes keys by itself, without the decoders of the
//! bus.

use foundationdb_tuple::{Element, unpack};

use crate::{
    base::{
        encoding::{Incarnation, Sequence, Versionstamp},
        event::{Db, DbInstance, DbName, DdocId},
    },
    front::simulation::{
        app::AppKey,
        keyspace::{BROKEN, BUS_PREFIX, OTHER_BUS_PREFIX},
    },
    state::keys::{GroupName, NodeId, ShardId},
};

/// The meaning of a key. Feeds are named by their bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StoredItem {
    App(AppKey),
    Config,
    Counters(Db),
    /// The last update of a database.
    LastUpdate(Db),
    /// A changed design document that waits for a fold.
    PendingDdoc(Db, DdocId),
    Doorbell(u32),
    FoldMark(u32),
    Row(Vec<u8>, ShardId, Sequence),
    /// The position of the newest row of an id.
    Newest(Vec<u8>, Vec<u8>),
    Topology(Vec<u8>, Sequence),
    Horizon(Vec<u8>),
    /// A changed design document; without an id, one that may be any.
    Ddoc(Db, Option<DdocId>),
    Node(NodeId),
    Role(NodeId),
    /// A node with a role, by the role.
    Member(String, NodeId),
    Lease(String, u64),
    Group(GroupName),
    Checkpoint(GroupName, ShardId),
    LowestCheckpoint(GroupName),
    /// Whose turn it is while a group drains its shards.
    DrainTurn(GroupName),
    DeadLetter(GroupName, Sequence),
    GroupParked(GroupName, Vec<u8>),
    /// How long a group has had no consumer.
    Idle(GroupName),
    /// The time of a group's last progress in a shard.
    Progress(GroupName, ShardId),
    /// The last failure in a shard.
    Trouble(GroupName, ShardId),
    /// The position of the feed after janitors had worked for so many milliseconds.
    Age(u64),
    /// The last change of members.
    MembershipVersion,
    /// The last change of the nodes with some roles.
    RoleVersion,
    /// The last change of leases or resources of a pool, or, without a name, of any pool.
    PoolVersion(Option<String>),
    Pulse(Vec<u8>),
    /// A key of another bus in the store.
    OtherBus,
    RowCount(Vec<u8>, ShardId),
    /// A named cursor of the bus.
    Cursor(String),
    /// The mark of a trigger's work on a database.
    Mark(String, Db),
    /// A database that a trigger has parked.
    Parked(String, Db),
    /// Work that a trigger has listed as owed.
    Owed(String, DbName),
    /// The result of a run that was committed exactly once, or how far they were swept.
    OnceResult,
    /// An undecodable row among the counters.
    Broken,
    Unknown,
}

impl StoredItem {
    /// The meaning of `key`.
    pub fn of(key: &[u8]) -> Self {
        if let Some(app) = AppKey::decode(key) {
            return Self::App(app);
        }
        if key.starts_with(OTHER_BUS_PREFIX) {
            return Self::OtherBus;
        }
        if key.starts_with(BUS_PREFIX) && key.ends_with(BROKEN) {
            return Self::Broken;
        }
        let elements = key.strip_prefix(BUS_PREFIX).and_then(|rest| unpack::<Vec<Element<'_>>>(rest).ok());
        elements.and_then(|elements| Self::of_elements(&elements)).unwrap_or(Self::Unknown)
    }

    /// The meaning of the key of the tuple `elements`.
    fn of_elements(elements: &[Element<'_>]) -> Option<Self> {
        let (family, rest) = elements.split_first()?;
        Some(match (int(family)?, rest) {
            (0, []) => Self::Config,
            (1, [_, name, instance, part, last]) => {
                let db =
                    Db::new(DbName::new(text(name)?).ok()?, DbInstance(bytes(instance)?.try_into().ok()?));
                match int(part)? {
                    0 => Self::Counters(db),
                    1 => Self::LastUpdate(db),
                    2 => Self::PendingDdoc(db, DdocId::new(text(last)?).ok()?),
                    _ => return None,
                }
            }
            (2, [partition]) => Self::Doorbell(int(partition)? as u32),
            (3, [partition]) => Self::FoldMark(int(partition)? as u32),
            (4, [feed, shard, incarnation, stamp]) => {
                Self::Row(bytes(feed)?.into(), ShardId(int(shard)?), sequence(incarnation, stamp)?)
            }
            (5, [feed, id]) => Self::Newest(bytes(feed)?.into(), bytes(id)?.into()),
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
            (10, [_, part, node]) if int(part)? == 0 => Self::Node(NodeId(bytes(node)?.try_into().ok()?)),
            (10, [_, part, node, _]) if int(part)? == 1 => Self::Role(NodeId(bytes(node)?.try_into().ok()?)),
            (10, [_, part, role, node]) if int(part)? == 2 => {
                Self::Member(text(role)?.to_owned(), NodeId(bytes(node)?.try_into().ok()?))
            }
            (11, [_, pool, resource]) => Self::Lease(text(pool)?.to_owned(), int(resource)?),
            (12, [feed, part, group, rest @ ..]) => {
                let name = GroupName::new(text(group)?).ok()?;
                Self::of_group(int(part)?, group_key(bytes(feed)?, &name)?, rest)?
            }
            (13, [worked]) => Self::Age(int(worked)?),
            (14, [_, part]) if int(part)? == 0 => Self::MembershipVersion,
            (14, [_, part]) if int(part)? == 1 => Self::PoolVersion(None),
            (14, [_, part, number]) if int(part)? == 3 && int(number)? < 4_096 => Self::RoleVersion,
            (14, [_, part, pool]) if int(part)? == 2 => Self::PoolVersion(Some(text(pool)?.to_owned())),
            (15, [feed]) => Self::Pulse(bytes(feed)?.into()),
            (24, _) => Self::OnceResult,
            (18, [feed, shard]) => Self::RowCount(bytes(feed)?.into(), ShardId(int(shard)?)),
            // The owner is empty: cursors of nodes are not used.
            (16, [owner, name, part, rest @ ..]) if bytes(owner)?.is_empty() => {
                Self::of_cursor(int(part)?, text(name)?.to_owned(), rest)?
            }
            _ => return None,
        })
    }

    /// The meaning of a key of the family of cursors.
    fn of_cursor(part: u64, cursor: String, rest: &[Element<'_>]) -> Option<Self> {
        let db = |name, instance| {
            Some(Db::new(DbName::new(text(name)?).ok()?, DbInstance(bytes(instance)?.try_into().ok()?)))
        };
        Some(match (part, rest) {
            (0, []) => Self::Cursor(cursor),
            (1, [name, instance]) => Self::Mark(cursor, db(name, instance)?),
            (2, [name, instance]) => Self::Parked(cursor, db(name, instance)?),
            (4, [name]) => Self::Owed(cursor, DbName::new(text(name)?).ok()?),
            _ => return None,
        })
    }

    /// The meaning of a key of the family of groups.
    fn of_group(part: u64, group: GroupName, rest: &[Element<'_>]) -> Option<Self> {
        Some(match (part, rest) {
            (0, []) => Self::Group(group),
            (1, [shard]) => Self::Checkpoint(group, ShardId(int(shard)?)),
            (6, []) => Self::DrainTurn(group),
            (5, []) => Self::LowestCheckpoint(group),
            (2, [incarnation, stamp]) => Self::DeadLetter(group, sequence(incarnation, stamp)?),
            (4, [id]) => Self::GroupParked(group, bytes(id)?.into()),
            (3, [kind, rest @ ..]) => match (int(kind)?, rest) {
                (0, []) => Self::Idle(group),
                (1, [shard]) => Self::Progress(group, ShardId(int(shard)?)),
                (2, [shard]) => Self::Trouble(group, ShardId(int(shard)?)),
                _ => return None,
            },
            _ => return None,
        })
    }
}

/// The key of the group `name` of `feed` among the groups of all feeds: for a group of documents it contains the
/// database.
pub(in crate::front::simulation) fn group_key(feed: &[u8], name: &GroupName) -> Option<GroupName> {
    match feed.strip_prefix(b"d") {
        None => Some(name.clone()),
        Some(instance) => GroupName::new(&format!("{}/{name}", DbInstance(instance.try_into().ok()?))).ok(),
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
