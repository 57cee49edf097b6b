//! [`Oracle`]: a naive model of the promises of the bus, which judges every commit.
//!
//! The oracle sees every commit when it happens: the touched keys, before and after. It trusts only the history that
//! producers write in the same transactions. Everything that the bus writes has to follow from it:
//!
//! - events taken from counters are in a row, once, or belong to an instance that is gone ([`feed`]);
//! - each database has one row, in a shard that is open, and no commit happens under a lost lease ([`feed`],
//!   [`leases`]);
//! - a group passes no row without work, works on each once, and keeps the janitor from dropping its rows
//!   ([`groups`]), and expires only after it has had no member for long enough ([`expiry`]);
//! - subscribers and readers of shards have received what the history owes them, by names and kinds ([`ledger`],
//!   [`account`], [`readers`], [`interest`]);
//! - each document of a database is in its feed with its last edit, and its readers have received it ([`documents`]);
//! - the jobs of triggers work on every change, and cancelled work writes nothing ([`jobs`]);
//! - who has passed a barrier, and a mirror, knows everything that was recorded before ([`freshness`]);
//! - no named cursor is ahead of the deliveries to its subscriber ([`cursors`]);
//! - a move to another store takes all of it along ([`moves`]).
//!
//! After the faults all of it has to come to rest, and at the end the store must agree with the model, key by key
//! ([`finish`]).

mod account;
mod commit;
mod cursors;
mod documents;
mod expiry;
mod feed;
mod finish;
mod freshness;
mod given;
mod groups;
mod interest;
mod jobs;
mod leases;
mod ledger;
mod models;
mod moves;
mod operations;
mod parked;
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
pub(super) use self::models::web::WebClientId;
pub(super) use self::{
    commit::{Change, ObservedCommit, is_fold},
    given::{Given, GivenDdocs, GivenRow, Start},
    interest::{GLOBS, Interest, PREDICATES, Which},
    models::{
        documents::DocTailId,
        follower::FollowerId,
        subscriber::{Manner, SubscriberId},
    },
    moves::{judge_moved, unfinished},
    stored_item::group_key,
};
use self::{
    commit::{StoredChanges, Verdict},
    jobs::Jobs,
    ledger::Ledger,
    models::{
        documents::{DocFeed, DocTail},
        follower::Follower,
        group::GroupModel,
        members::{Members, Working},
        operation::Operation,
        subscriber::Subscriber,
    },
    stored_item::StoredItem,
};
use super::{
    app::{AppKey, Line, instance_of},
    findings::Findings,
    guarantee::{Broken, Guarantee},
    issuer::{Issuer, ProcessId},
    keyspace::BUS_PREFIX,
    witness::Witness,
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::{Counters, Incarnation, Sequence},
        error::StoreError,
        event::{Db, DbInstance, DbName, DdocId},
        notification::Notification,
    },
    state::keys::{GroupName, Keys, NodeId, ShardId, TopologyRow},
    store::KeyRange,
};

/// The id of the feed of notifications in keys.
const FEED: &[u8] = b"n";

/// The newest row of a database.
#[derive(Debug, Clone)]
struct Placed {
    shard: ShardId,
    row: Arc<Notification>,
}

pub(super) struct Oracle {
    keys: Keys,
    partitions: u32,
    /// How often the bus has moved.
    incarnation: Incarnation,
    /// The process that moves the bus.
    mover: Option<ProcessId>,
    names: Vec<DbName>,
    /// The nodes that each process has been, life by life.
    nodes: BTreeMap<Issuer, BTreeSet<NodeId>>,
    /// The owners of leases, by pool and resource.
    owners: BTreeMap<(String, u64), NodeId>,
    /// The nodes of processes, each with the resources that it works on in some pools, as it last reported at rest.
    working: BTreeMap<Issuer, (NodeId, Working)>,
    /// The nodes of before the store was opened again, which its first user has to remove.
    dead: BTreeSet<NodeId>,
    /// When each node has last written its row, in versions, which are microseconds.
    beats: BTreeMap<NodeId, u64>,
    /// Whether no clock jumps in this world, so that no node may be taken for dead too soon.
    has_steady_clocks: bool,
    databases: BTreeMap<DbName, DbInstance>,
    recorded: BTreeMap<Db, Counters>,
    /// The recorded events that wait in the counters.
    waiting: BTreeMap<Db, Counters>,
    /// The recorded events that were folded into no row.
    stale: BTreeMap<Db, Counters>,
    /// The recorded events in rows of dropped tombstones.
    dropped: BTreeMap<Db, Counters>,
    /// How often each thing that must happen once has happened.
    once: BTreeMap<u64, u32>,
    rows: BTreeMap<DbName, Placed>,
    /// The facts that folds have made visible.
    ledger: Ledger,
    /// All rows so far.
    past: BTreeMap<Sequence, Arc<Notification>>,
    /// When a change of each design document was last recorded.
    recorded_ddocs: BTreeMap<(Db, Option<DdocId>), Sequence>,
    /// The stored rows of design documents.
    ddocs: BTreeMap<(Db, Option<DdocId>), Sequence>,
    /// The last notification of each design document, also when its row is gone.
    reported_ddocs: BTreeMap<(Db, Option<DdocId>), Sequence>,
    /// The present topology entries.
    topology: Vec<TopologyRow>,
    entries: Vec<TopologyRow>,
    /// The first shard id that was never used.
    next_shard: u64,
    horizon: Sequence,
    groups: BTreeMap<GroupName, GroupModel>,
    /// The nodes with each role.
    members: BTreeMap<String, Members>,
    /// The last reset or deletion of a group by each operator.
    operations: BTreeMap<Issuer, Operation>,
    /// The groups that have to expire after the faults, if there is a janitor.
    given_up: Option<Vec<GroupName>>,
    /// The names of the databases that groups can only park, if groups park.
    unworkable: Option<BTreeSet<DbName>>,
    subscribers: BTreeMap<SubscriberId, Subscriber>,
    /// Whether databases have documents.
    has_documents: bool,
    /// The feeds of the documents of the databases that exist.
    documents: BTreeMap<DbInstance, DocFeed>,
    /// The work of triggers, if there are any.
    jobs: Option<Jobs>,
    doc_tails: BTreeMap<DocTailId, DocTail>,
    /// The clients of `_db_updates`.
    #[cfg(feature = "http")]
    web_clients: BTreeMap<WebClientId, models::web::WebClient>,
    /// The followers, which read the feed shard by shard.
    followers: BTreeMap<FollowerId, Follower>,
    /// The positions of the named cursors.
    cursors: BTreeMap<String, Cursor>,
    /// The number of the next subscriber or follower.
    next_reader: u64,
    /// Watches on doorbells that were lost.
    lost_watches: BTreeSet<(Issuer, Vec<u8>)>,
    /// Whether a process has ever crashed.
    has_crashed: bool,
}

impl Oracle {
    /// The model of a bus of `partitions` that does not exist yet, with databases of these names, which may have documents. If there
    /// are triggers, their jobs fail for the databases with `failing` names.
    pub fn new(
        partitions: u32,
        names: Vec<DbName>,
        has_documents: bool,
        failing: Option<Vec<DbName>>,
    ) -> Self {
        Self {
            keys: Keys::new(BUS_PREFIX).expect("the prefix is short"),
            partitions,
            incarnation: Incarnation(0),
            mover: None,
            names,
            nodes: BTreeMap::new(),
            owners: BTreeMap::new(),
            working: BTreeMap::new(),
            dead: BTreeSet::new(),
            beats: BTreeMap::new(),
            has_steady_clocks: false,
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
            reported_ddocs: BTreeMap::new(),
            topology: Vec::new(),
            entries: Vec::new(),
            next_shard: 0,
            horizon: Sequence::MIN,
            groups: BTreeMap::new(),
            members: BTreeMap::new(),
            operations: BTreeMap::new(),
            given_up: None,
            unworkable: None,
            subscribers: BTreeMap::new(),
            has_documents,
            documents: BTreeMap::new(),
            jobs: failing.map(Jobs::new),
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

    /// From now on no node may be removed before its expiry, because no clock of this world jumps.
    pub fn trust_clocks(&mut self) {
        self.has_steady_clocks = true;
    }

    /// The number of topology entries so far.
    pub fn entries(&self) -> u32 {
        self.entries.len() as u32
    }

    /// A process has joined as `node`.
    pub fn joined(&mut self, issuer: Issuer, node: NodeId) {
        self.nodes.entry(issuer).or_default().insert(node);
    }

    /// The process works as `node` on these resources of some pools, while no fault strikes any more.
    pub fn works(&mut self, issuer: Issuer, node: NodeId, pools: Working) {
        self.working.insert(issuer, (node, pools));
    }

    /// The store was opened again after all processes had crashed. These nodes are in it.
    pub fn opened_again(&mut self, nodes: BTreeSet<NodeId>) {
        self.dead = nodes;
    }

    /// A watch of a process will never fire.
    pub fn watch_lost(&mut self, issuer: Issuer, key: &[u8]) {
        self.lost_watches.insert((issuer, key.to_vec()));
    }

    /// A process has crashed: its readers are gone, and its subscribers, except for durable ones.
    pub fn crashed(&mut self, issuer: Issuer) {
        self.has_crashed = true;
        self.forget(issuer);
    }

    /// A process has dropped everything that it had begun, and begins again.
    pub fn gone(&mut self, issuer: Issuer) {
        self.forget(issuer);
    }

    /// Forgets what a process had begun.
    fn forget(&mut self, issuer: Issuer) {
        self.subscribers.retain(|_, subscriber| subscriber.issuer != issuer || subscriber.cursor.is_some());
        self.followers.retain(|_, follower| follower.issuer != issuer);
        self.doc_tails.retain(|_, tail| tail.issuer != issuer);
        self.working.remove(&issuer);
        self.operations.remove(&issuer);
    }

    /// One of the deleted instances of `name`, if there is one, as `random` decides.
    pub fn gone_instance(&self, name: &DbName, random: u64) -> Option<Db> {
        let lives = self.databases.get(name);
        let gone = self.recorded.keys().filter(|db| db.name == *name && Some(&db.instance) != lives);
        let gone: Vec<_> = gone.collect();
        let place = random % (gone.len() as u64).max(1);
        gone.get(place as usize).map(|&db| db.clone())
    }

    /// A commit has happened.
    pub fn committed(&mut self, findings: &Findings, seen: &ObservedCommit<'_>) {
        if self.mover == Some(seen.issuer.process) {
            return self.judge_move(findings, seen);
        }
        let items: Vec<(StoredItem, &Change)> =
            seen.touched.iter().map(|(key, change)| (StoredItem::of(key), change)).collect();
        if let Err(broken) = self.judge(findings, seen, &items) {
            let Issuer { process, generation } = seen.issuer;
            let Broken { guarantee, reason } = broken;
            let place = format!("process {process}.{generation}, at {:?}", seen.stamp);
            findings.fail(guarantee.broken(format!("{reason} ({place})")));
        }
    }

    fn judge(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
    ) -> Verdict {
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
        self.judge_documents(findings, seen, items)?;
        if let Some(jobs) = &mut self.jobs {
            jobs.judge(findings, seen, items, &self.documents)?;
        }
        self.judge_topology(findings, items)?;
        self.judge_leases(findings, seen, items)?;
        self.judge_feed(findings, seen, items, &recorded)?;
        self.judge_cursors(items)?;
        self.judge_members(findings, seen, items);
        self.judge_groups(findings, seen, items)
    }

    /// Judges and records the changes of the layer; returns the recorded events.
    fn judge_app(
        &mut self,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
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
                        let at = Sequence::new(self.incarnation, seen.stamp, 0);
                        self.recorded_ddocs.insert((line.db.clone(), id), at);
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
        findings: &Findings,
        (issuer, is_late): (Issuer, bool),
        code: Option<i32>,
        keys: &[Bytes],
        conflicts: &[KeyRange],
    ) {
        if self.mover == Some(issuer.process) {
            return;
        }
        if is_late {
            findings.witness(Witness::LateCommitRefused);
        }
        if code != Some(StoreError::NOT_COMMITTED.code()) {
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
                findings.witness(Witness::ZombieFoldRefused);
            }
            if meets(&self.keys.topologies(&feed)) {
                findings.witness(Witness::ReshardRacedFold);
            }
        }
        if writes(|item| matches!(item, StoredItem::Checkpoint(..))) && meets(&self.keys.all_leases()) {
            findings.witness(Witness::ZombieConsumerRefused);
        }
        if writes(|item| matches!(item, StoredItem::App(AppKey::Derived(..))))
            && meets(&self.keys.shared_cursors())
        {
            findings.witness(Witness::CancelledWorkRefused);
        }
        if writes(|item| matches!(item, StoredItem::Horizon(_))) && meets(&self.keys.groups(&feed)) {
            findings.witness(Witness::JanitorRacedNewGroup);
        }
        let is_producer = writes(|item| matches!(item, StoredItem::Counters(_)))
            && !writes(|item| matches!(item, StoredItem::FoldMark(_)));
        // A producer reads whether the shards of the feed of documents that it writes to are still open.
        let is_topology = |range: &KeyRange| self.keys.all_topologies().intersects(range);
        if is_producer
            && conflicts.iter().any(|range| range.intersects(&self.keys.all()) && !is_topology(range))
        {
            let Issuer { process, generation } = issuer;
            findings.fail(Guarantee::Blind.broken(format!(
                "recording events made a transaction of process {process}.{generation} conflict"
            )));
        }
    }
}
