//! [`Oracle`]: a naive model of what the bus has promised, and what becomes of it, commit by commit.
//!
//! The oracle sees every commit at the moment when it happens: the keys that it touched, before and after. It believes the
//! history that producers write in the same transactions, and nothing else. Everything that the bus writes has to follow from
//! it:
//!
//! - what is taken out of counters is in a row, once, or belongs to an instance that is gone ([`feed`]);
//! - each database has one row, in a shard that is open, and nobody who has lost a lease commits ([`feed`], [`leases`]);
//! - a group leaves no row behind itself, works on each once, and keeps the janitor from what it has still to read ([`groups`]);
//! - subscribers and readers of shards have received what the history owes them, by names and kinds ([`ledger`], [`account`],
//!   [`readers`], [`wish`]);
//! - each document of a database is in its feed as it was last edited, and its readers have received it ([`documents`]);
//! - no named cursor stands ahead of what its subscriber was told ([`cursors`]).
//!
//! When nothing goes wrong any more all of it has to come to rest, and at the end the store must hold what the model says, key by
//! key ([`finish`]).

mod account;
mod cursors;
mod documents;
mod feed;
mod finish;
mod given;
mod groups;
mod interest;
mod leases;
mod ledger;
mod readers;
mod stored_item;
#[cfg(feature = "http")]
mod web;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::Bytes;

#[cfg(feature = "http")]
pub(super) use self::web::WebClientId;
pub(super) use self::{
    documents::DocTailId,
    given::{Given, GivenDdocs, GivenRow, Start},
    interest::{GLOBS, Interest, PREDICATES, Which},
    readers::{FollowerId, Manner, SubscriberId},
    stored_item::group_key,
};
use self::{
    documents::{DocFeed, DocTail},
    groups::GroupModel,
    ledger::Ledger,
    readers::{Follower, Subscriber},
    stored_item::StoredItem,
};
use super::{
    app::{AppKey, Line, instance_of},
    draw::Plan,
    guarantee::{Broken, Guarantee},
    shared::{BUS_PREFIX, Issuer, Shared},
    witness::Witness,
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::{Counters, Sequence, Versionstamp},
        error::{Error, StoreError},
        event::{Db, DbInstance, DbName, DdocId},
        notification::Notification,
    },
    state::keys::{GroupName, Keys, NodeId, ShardId, TopologyRow},
    store::{KeyRange, Mutation},
};

/// The feed of notifications, as it stands in keys.
const FEED: &[u8] = b"n";

/// What the oracle says of something that is not as it should be.
type Verdict = Result<(), Broken>;

/// What a commit did to a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Change {
    /// The value before.
    pub before: Option<Bytes>,
    /// The value after.
    pub after: Option<Bytes>,
}

/// A commit, as the oracle sees it.
pub(super) struct ObservedCommit<'a> {
    /// Whose it is.
    pub issuer: Issuer,
    /// When it happened.
    pub stamp: Versionstamp,
    /// Whether its process had been informed that it has failed.
    pub is_late: bool,
    pub touched: BTreeMap<Bytes, Change>,
    /// Any value before it.
    pub before: &'a dyn Fn(&[u8]) -> Option<Bytes>,
}

impl ObservedCommit<'_> {
    /// Whether it records events.
    pub fn records(&self) -> bool {
        self.touched.keys().any(|key| StoredItem::of(key) == StoredItem::App(AppKey::History))
    }
}

/// Whether a transaction with these writes is a fold.
pub(super) fn is_fold(mutations: &[Mutation]) -> bool {
    let keys = mutations.iter().filter_map(|mutation| match mutation {
        Mutation::Set(key, _) => Some(StoredItem::of(key)),
        _ => None,
    });
    let items: Vec<_> = keys.collect();
    let is = |test: fn(&StoredItem) -> bool| items.iter().any(test);
    is(|item| matches!(item, StoredItem::FoldMark(_))) && !is(|item| matches!(item, StoredItem::Lease(..)))
}

/// The keys that a commit touched, distinguished.
type Items<'a> = [(StoredItem, &'a Change)];

/// The newest row of a database.
#[derive(Debug, Clone)]
struct Placed {
    shard: ShardId,
    row: Arc<Notification>,
}

/// The model.
pub(super) struct Oracle {
    /// The keys of the bus.
    keys: Keys,
    /// Partitions of the bus.
    partitions: u32,
    /// The names that databases have.
    names: Vec<DbName>,
    /// The nodes that each process has been, life by life.
    nodes: BTreeMap<Issuer, BTreeSet<NodeId>>,
    /// The databases that exist.
    databases: BTreeMap<DbName, DbInstance>,
    /// All that was recorded.
    recorded: BTreeMap<Db, Counters>,
    /// What of it waits in the counters.
    waiting: BTreeMap<Db, Counters>,
    /// What of it was folded into no row.
    stale: BTreeMap<Db, Counters>,
    /// What of it was in the row of a tombstone that was dropped.
    dropped: BTreeMap<Db, Counters>,
    /// How often each thing that must happen once has happened.
    once: BTreeMap<u64, u32>,
    /// The newest rows.
    rows: BTreeMap<DbName, Placed>,
    /// The facts that folds have made visible.
    ledger: Ledger,
    /// All rows that there ever were.
    past: BTreeMap<Sequence, Arc<Notification>>,
    /// When a change of each design document was last recorded.
    recorded_ddocs: BTreeMap<(Db, Option<DdocId>), Versionstamp>,
    /// Design documents that were told, and are stored as such.
    ddocs: BTreeMap<(Db, Option<DdocId>), Sequence>,
    /// The rows that told of each design document last, also when nothing is stored of it any more.
    told_ddocs: BTreeMap<(Db, Option<DdocId>), Sequence>,
    /// The topology entries that there are.
    topology: Vec<TopologyRow>,
    /// All topology entries that there ever were.
    entries: Vec<TopologyRow>,
    /// The first shard id that was never used.
    next_shard: u64,
    /// From where on readers miss nothing.
    horizon: Sequence,
    groups: BTreeMap<GroupName, GroupModel>,
    subscribers: BTreeMap<SubscriberId, Subscriber>,
    /// Whether databases have documents.
    has_documents: bool,
    /// The feeds of the documents of the databases that exist.
    documents: BTreeMap<DbInstance, DocFeed>,
    /// Those who read the documents of a database as they come.
    doc_tails: BTreeMap<DocTailId, DocTail>,
    /// The clients of `_db_updates`.
    #[cfg(feature = "http")]
    web_clients: BTreeMap<WebClientId, web::WebClient>,
    /// Those who follow the feed shard by shard.
    followers: BTreeMap<FollowerId, Follower>,
    /// Where the named cursors stand.
    cursors: BTreeMap<String, Cursor>,
    /// The number of the next subscriber or follower.
    next_reader: u64,
    /// Watches on doorbells that were lost.
    lost_watches: BTreeSet<(Issuer, Vec<u8>)>,
    /// Whether a process has ever crashed.
    has_crashed: bool,
}

impl Oracle {
    /// The model of a bus that does not exist yet.
    pub fn new(plan: &Plan) -> Self {
        Self {
            keys: Keys::new(BUS_PREFIX).expect("the prefix is short"),
            partitions: plan.partitions,
            names: plan.names.clone(),
            nodes: BTreeMap::new(),
            databases: BTreeMap::new(),
            recorded: BTreeMap::new(),
            waiting: BTreeMap::new(),
            stale: BTreeMap::new(),
            dropped: BTreeMap::new(),
            once: BTreeMap::new(),
            rows: BTreeMap::new(),
            ledger: Ledger::default(),
            past: BTreeMap::new(),
            recorded_ddocs: BTreeMap::new(),
            ddocs: BTreeMap::new(),
            told_ddocs: BTreeMap::new(),
            topology: Vec::new(),
            entries: Vec::new(),
            next_shard: 0,
            horizon: Sequence::MIN,
            groups: BTreeMap::new(),
            subscribers: BTreeMap::new(),
            has_documents: plan.documents.is_some(),
            documents: BTreeMap::new(),
            doc_tails: BTreeMap::new(),
            #[cfg(feature = "http")]
            web_clients: BTreeMap::new(),
            followers: BTreeMap::new(),
            cursors: BTreeMap::new(),
            next_reader: 0,
            lost_watches: BTreeSet::new(),
            has_crashed: false,
        }
    }

    /// How many topology entries there were.
    pub fn entries(&self) -> u32 {
        self.entries.len() as u32
    }

    /// A process has joined as `node`.
    pub fn joined(&mut self, issuer: Issuer, node: NodeId) {
        self.nodes.entry(issuer).or_default().insert(node);
    }

    /// A watch of a process will never fire.
    pub fn watch_lost(&mut self, issuer: Issuer, key: &[u8]) {
        self.lost_watches.insert((issuer, key.to_vec()));
    }

    /// A process has crashed: its readers are gone, and its subscribers, other than durable ones.
    pub fn crashed(&mut self, issuer: Issuer) {
        self.has_crashed = true;
        self.gone(issuer);
    }

    /// A process has dropped all that it had begun, and begins again.
    pub fn gone(&mut self, issuer: Issuer) {
        self.subscribers.retain(|_, subscriber| subscriber.issuer != issuer || subscriber.cursor.is_some());
        self.followers.retain(|_, follower| follower.issuer != issuer);
        self.doc_tails.retain(|_, tail| tail.issuer != issuer);
    }

    /// An instance of `name` that is deleted, if there is one; `random` decides which.
    pub fn gone_instance(&self, name: &DbName, random: u64) -> Option<Db> {
        let lives = self.databases.get(name);
        let gone = self.recorded.keys().filter(|db| db.name == *name && Some(&db.instance) != lives);
        let gone: Vec<_> = gone.collect();
        let place = random % (gone.len() as u64).max(1);
        gone.get(place as usize).map(|&db| db.clone())
    }

    /// A commit has happened.
    pub fn committed(&mut self, shared: &Shared, seen: &ObservedCommit<'_>) {
        let items: Vec<(StoredItem, &Change)> =
            seen.touched.iter().map(|(key, change)| (StoredItem::of(key), change)).collect();
        if let Err(broken) = self.judge(shared, seen, &items) {
            let Issuer { process, generation } = seen.issuer;
            let Broken { guarantee, reason } = broken;
            let place = format!("process {process}.{generation}, at {:?}", seen.stamp);
            shared.fail(guarantee.broken(format!("{reason} ({place})")));
        }
    }

    /// What is wrong with a commit, if anything is.
    fn judge(&mut self, shared: &Shared, seen: &ObservedCommit<'_>, items: &Items<'_>) -> Verdict {
        if let Some((_, change)) = items.iter().find(|(item, _)| *item == StoredItem::Unknown) {
            return Guarantee::Consistent.fails(format!("a key was written that is none: {change:?}"));
        }
        let is_of = |other: bool| {
            let of_bus = |item: &StoredItem| {
                !matches!(item, StoredItem::App(_) | StoredItem::TransactionId | StoredItem::OtherBus)
            };
            items.iter().any(|(item, _)| if other { *item == StoredItem::OtherBus } else { of_bus(item) })
        };
        if is_of(true) && is_of(false) {
            return Guarantee::Consistent.fails("a transaction has touched the keys of two buses".to_owned());
        }
        let recorded = self.judge_app(seen, items)?;
        self.judge_documents(shared, seen, items)?;
        self.judge_topology(shared, items)?;
        self.judge_leases(shared, seen, items)?;
        self.judge_feed(shared, seen, items, &recorded)?;
        self.judge_cursors(items)?;
        self.judge_groups(shared, seen, items)
    }

    /// Takes note of what the layer has done; returns what it has recorded.
    fn judge_app(
        &mut self,
        seen: &ObservedCommit<'_>,
        items: &Items<'_>,
    ) -> Result<BTreeMap<Db, Counters>, Broken> {
        let mut recorded: BTreeMap<Db, Counters> = BTreeMap::new();
        for (item, change) in items {
            match (item, &change.after) {
                (StoredItem::App(AppKey::History), Some(value)) => {
                    let line = Line::from_bytes(value).map_err(|error| error.to_string())?;
                    *recorded.entry(line.db.clone()).or_default() += line.counters;
                    *self.recorded.entry(line.db.clone()).or_default() += line.counters;
                    let nameless = (line.counters.ddoc_updated > line.ddocs.len() as u64).then_some(None);
                    for id in line.ddocs.into_iter().map(Some).chain(nameless) {
                        self.recorded_ddocs.insert((line.db.clone(), id), seen.stamp);
                    }
                }
                (StoredItem::App(AppKey::Database(name)), Some(value)) => {
                    let instance = instance_of(value).map_err(|error| error.to_string())?;
                    self.databases.insert(name.clone(), instance);
                }
                (StoredItem::App(AppKey::Database(name)), None) => drop(self.databases.remove(name)),
                (StoredItem::App(AppKey::Once(number)), Some(_)) => {
                    let times = self.once.entry(*number).or_default();
                    *times += 1;
                    if *times > 1 {
                        return Guarantee::ExactlyOnce
                            .fails(format!("what must be committed once was committed {times} times"));
                    }
                }
                _ => {}
            }
        }
        Ok(recorded)
    }

    /// A commit was refused by the store.
    pub fn refused(
        &mut self,
        shared: &Shared,
        (issuer, is_late): (Issuer, bool),
        error: &Error,
        keys: &[Bytes],
        conflicts: &[KeyRange],
    ) {
        if is_late {
            shared.witness(Witness::LateCommitRefused);
        }
        if error.code() != Some(StoreError::NOT_COMMITTED.code()) {
            return;
        }
        let items: Vec<_> = keys.iter().map(|key| StoredItem::of(key)).collect();
        let meets = |range: &KeyRange| conflicts.iter().any(|conflict| conflict.intersects(range));
        let feed = crate::state::keys::FeedId::notifications();
        let writes = |is: fn(&StoredItem) -> bool| items.iter().any(is);
        if writes(|item| matches!(item, StoredItem::FoldMark(_)))
            && !writes(|item| matches!(item, StoredItem::Lease(..)))
        {
            if meets(&self.keys.all_leases()) {
                shared.witness(Witness::ZombieFoldRefused);
            }
            if meets(&self.keys.topologies(&feed)) {
                shared.witness(Witness::ReshardRacedFold);
            }
        }
        if writes(|item| matches!(item, StoredItem::Checkpoint(..))) && meets(&self.keys.all_leases()) {
            shared.witness(Witness::ZombieConsumerRefused);
        }
        if writes(|item| matches!(item, StoredItem::Horizon(_))) && meets(&self.keys.groups(&feed)) {
            shared.witness(Witness::JanitorRacedNewGroup);
        }
        let is_producer = writes(|item| matches!(item, StoredItem::Counters(_)))
            && !writes(|item| matches!(item, StoredItem::FoldMark(_)));
        // Of the feed of documents that it writes to, a producer reads whether its shards are still those.
        let is_topology = |range: &KeyRange| self.keys.all_topologies().intersects(range);
        if is_producer
            && conflicts.iter().any(|range| range.intersects(&self.keys.all()) && !is_topology(range))
        {
            let Issuer { process, generation } = issuer;
            shared.fail(Guarantee::Blind.broken(format!(
                "recording events made a transaction of process {process}.{generation} conflict"
            )));
        }
    }
}
