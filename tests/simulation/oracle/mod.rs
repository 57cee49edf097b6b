//! [`Oracle`]: a naive model of the promises of the bus, which judges every commit.
//!
//! The oracle sees every commit as it happens: the keys that the commit touched, with their values before and after. It trusts only the
//! history that producers write in the same transactions, and judges from outside: all that a reader receives must follow from it.
//!
//! - each database has one row, which counts its recorded events once, and no fold commits under a lost lease ([`feed`]);
//! - subscribers and readers of shards have received what the history entitles them to, by names and kinds ([`ledger`], [`account`],
//!   [`readers`], [`interest`]);
//! - each document of a database is in the database's feed with its last edit, and the feed's readers have received it ([`documents`]);
//! - a consumer works on everything that it wants, effects happen once, and cancelled work writes nothing ([`consumers`]); a consumer is
//!   reset or deleted only when that is allowed ([`members`]);
//! - events recorded after a restore are not lost, and no reader that has seen what the restore lost may continue ([`restored`]);
//! - a reader that has passed a barrier knows everything that was recorded before it, and so does a mirror ([`freshness`]).
//!
//! After the faults, all of this must come to rest ([`finish`]).

mod account;
mod commit;
mod consumers;
mod documents;
mod feed;
mod finish;
mod freshness;
mod given;
mod interest;
mod ledger;
mod members;
mod models;
mod readers;
mod restored;
mod stored_item;
mod web;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
};

use bytes::Bytes;
use notibus::{
    consumer::FencingToken,
    event::{Counters, Db, DbInstance, DbName, DdocId, Incarnation, Notification, Sequence},
    feed::ShardId,
    node::NodeId,
    store::{KeyRange, StoreError},
};

pub(crate) use self::{
    commit::{Change, ObservedCommit, is_fold},
    given::{Given, GivenDdocs, GivenRow, Start},
    interest::{GLOBS, Interest, PREDICATES, Which},
    models::{
        consumer::{RunId, Shown},
        documents::DocTailId,
        subscriber::{Manner, SubscriberId},
    },
    readers::FollowerId,
    restored::Restored,
    web::WebClientId,
};
use self::{
    commit::{StoredChanges, Verdict},
    ledger::Ledger,
    members::{Members, Operation},
    models::{
        consumer::{ConsumerModel, Run},
        documents::{DocFeed, DocTail},
        subscriber::Subscriber,
    },
    readers::Follower,
    stored_item::StoredItem,
};
use crate::{
    app::{AppKey, Line, instance_of},
    draw::ConsumerPlan,
    findings::Findings,
    guarantee::{Broken, Guarantee},
    kernel::Issuer,
    keyspace::BUS_PREFIX,
    witness::Witness,
};

/// The id of the feed of notifications, as used in keys.
const FEED: &[u8] = b"n";

/// The number of the key family of topologies, as packed into keys.
const TOPOLOGIES: &[u8] = b"\x15\x07";

/// Returns the key of `node`'s row.
fn node_key(node: NodeId) -> Vec<u8> {
    [BUS_PREFIX, &foundationdb_tuple::pack(&(10_u16, "main", 0_u16, &node.0[..]))].concat()
}

/// The newest row of a database.
#[derive(Debug, Clone)]
struct Placed {
    shard: ShardId,
    row: Arc<Notification>,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a property of the world by itself")]
#[derive(Clone)]
pub(crate) struct Oracle {
    names: Vec<DbName>,
    /// The nodes as which each life of a process has joined.
    nodes: BTreeMap<Issuer, BTreeSet<NodeId>>,
    /// The nodes that existed before the store was opened again. They must be gone when the first new node joins.
    dead: BTreeSet<NodeId>,
    /// The version at which each node last wrote its row, in microseconds.
    beats: BTreeMap<NodeId, u64>,
    /// Whether clocks never jump in this world, so that no node may be presumed dead too early.
    pub has_steady_clocks: bool,
    /// Whether layers leave older rows of documents behind.
    pub leaves_rows: bool,
    databases: BTreeMap<DbName, DbInstance>,
    recorded: BTreeMap<Db, Counters>,
    /// How many times each transaction that must be committed once was committed, by its number.
    once: BTreeMap<u64, u32>,
    rows: BTreeMap<DbName, Placed>,
    /// The facts that folds made visible.
    ledger: Ledger,
    /// All rows so far, including removed ones.
    past: BTreeMap<Sequence, Arc<Notification>>,
    /// When a change to each design document was last recorded.
    recorded_ddocs: BTreeMap<(Db, Option<DdocId>), Sequence>,
    /// The stored rows of design documents.
    ddocs: BTreeMap<(Db, Option<DdocId>), Sequence>,
    /// The position of the last notification about each design document, even if its row is gone.
    reported_ddocs: BTreeMap<(Db, Option<DdocId>), Sequence>,
    /// The shards of all topology entries so far.
    entries: Vec<Range<u64>>,
    horizon: Sequence,
    /// The nodes with each role.
    members: BTreeMap<String, Members>,
    /// Each operator's last reset or deletion of a consumer.
    operations: BTreeMap<Issuer, Operation>,
    /// The consumers that must expire after the faults, if there is a janitor.
    given_up: Option<Vec<String>>,
    subscribers: BTreeMap<SubscriberId, Subscriber>,
    /// Whether databases have documents.
    has_documents: bool,
    /// The document feeds of all existing databases.
    documents: BTreeMap<DbInstance, DocFeed>,
    /// The consumers that should exist; those that do are in `consumers`.
    consumer_plans: BTreeMap<String, ConsumerPlan>,
    consumers: BTreeMap<String, ConsumerModel>,
    /// The calls of the consumers' handlers.
    runs: BTreeMap<RunId, Run>,
    /// The latest run for each id of each consumer.
    last_runs: BTreeMap<(String, String), (FencingToken, RunId)>,
    /// Whether the faults have ended.
    is_calm: bool,
    /// All consumers that were ever deleted.
    deleted: BTreeSet<String>,
    /// How many times consumers were created, reset or deleted.
    consumer_changes: u64,
    /// The number of commits so far.
    commits: u64,
    doc_tails: BTreeMap<DocTailId, DocTail>,
    /// The clients of `_db_updates`.
    web_clients: BTreeMap<WebClientId, web::WebClient>,
    /// The followers, which read the feed shard by shard.
    followers: BTreeMap<FollowerId, Follower>,
    /// The last number that was given to a reader, a client or a run.
    next_reader: u64,
    /// The incarnation of the rows that are written next.
    incarnation: Incarnation,
    /// Whether the store's versions are behind those in its rows (`Error::OlderThanRows`).
    is_older: bool,
    /// The end of the previous incarnation. A document row after this position may be edited while it is read.
    end: Sequence,
}

impl Oracle {
    /// Makes the model of a bus that does not exist yet, with databases of these names, which may have documents.
    pub fn new(names: Vec<DbName>, has_documents: bool) -> Self {
        Self {
            names,
            nodes: BTreeMap::new(),
            dead: BTreeSet::new(),
            beats: BTreeMap::new(),
            has_steady_clocks: false,
            leaves_rows: false,
            databases: BTreeMap::new(),
            recorded: BTreeMap::new(),
            once: BTreeMap::new(),
            rows: BTreeMap::new(),
            ledger: Ledger::default(),
            past: BTreeMap::new(),
            recorded_ddocs: BTreeMap::new(),
            ddocs: BTreeMap::new(),
            reported_ddocs: BTreeMap::new(),
            entries: Vec::new(),
            horizon: Sequence::MIN,
            members: BTreeMap::new(),
            operations: BTreeMap::new(),
            given_up: None,
            subscribers: BTreeMap::new(),
            has_documents,
            documents: BTreeMap::new(),
            consumer_plans: BTreeMap::new(),
            consumers: BTreeMap::new(),
            runs: BTreeMap::new(),
            last_runs: BTreeMap::new(),
            is_calm: false,
            deleted: BTreeSet::new(),
            consumer_changes: 0,
            commits: 0,
            doc_tails: BTreeMap::new(),
            web_clients: BTreeMap::new(),
            followers: BTreeMap::new(),
            next_reader: 0,
            incarnation: Incarnation(0),
            is_older: false,
            end: Sequence::MAX,
        }
    }

    /// Returns the number of topology entries so far.
    pub fn entries(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Records that a process joined as `node`.
    pub fn joined(&mut self, issuer: Issuer, node: NodeId) {
        self.nodes.entry(issuer).or_default().insert(node);
    }

    /// Records that the store was opened again after all processes crashed, so that the next node need not wait for the others to expire.
    pub fn opened_again(&mut self) {
        self.dead = self.nodes.values().flatten().copied().collect();
    }

    /// Records that a process crashed, or dropped everything that it had begun, so that its readers are gone.
    pub fn gone(&mut self, issuer: Issuer) {
        self.subscribers.retain(|_, subscriber| subscriber.issuer != issuer);
        self.followers.retain(|_, follower| follower.issuer != issuer);
        self.doc_tails.retain(|_, tail| tail.issuer != issuer);
        for run in self.runs.values_mut().filter(|run| run.issuer == issuer) {
            run.is_over = true;
        }
        self.operations.remove(&issuer);
    }

    /// Returns a deleted instance of `name`, chosen by `random`; `None` if there is none.
    pub fn gone_instance(&self, name: &DbName, random: u64) -> Option<Db> {
        let lives = self.databases.get(name);
        let gone = self.recorded.keys().filter(|db| db.name == *name && Some(&db.instance) != lives);
        let gone: Vec<_> = gone.collect();
        let place = random % (gone.len() as u64).max(1);
        gone.get(place as usize).map(|&db| db.clone())
    }

    /// Judges and records a commit that happened.
    pub fn committed(&mut self, findings: &Findings, seen: &ObservedCommit<'_>) {
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
        self.judge_app(seen, items)?;
        self.judge_joins(seen, items)?;
        self.judge_documents(findings, seen, items)?;
        self.judge_feed(findings, seen, items)?;
        self.judge_members(findings, seen, items);
        self.judge_consumers(findings, seen, items)
    }

    /// Judges whether earlier nodes are gone when the first node joins after the store was opened again.
    fn judge_joins(&mut self, seen: &ObservedCommit<'_>, items: &StoredChanges<'_>) -> Verdict {
        let joins = |(item, change): &(StoredItem, &Change)| {
            matches!(item, StoredItem::Node(_)) && change.before.is_none() && change.after.is_some()
        };
        if self.dead.is_empty() || !items.iter().any(joins) {
            return Ok(());
        }
        let dead = std::mem::take(&mut self.dead);
        match dead.iter().find(|node| (seen.before)(&node_key(**node)).is_some()) {
            Some(node) => {
                Guarantee::Live.fails(format!("{node} of a dead process was there when another one joined"))
            }
            None => Ok(()),
        }
    }

    /// Judges and records the changes that a commit made to the rows of the layer.
    fn judge_app(&mut self, seen: &ObservedCommit<'_>, items: &StoredChanges<'_>) -> Verdict {
        for (item, change) in items {
            match (item, &change.after) {
                (StoredItem::App(AppKey::History), Some(value)) => {
                    let line = Line::from_bytes(value);
                    *self.recorded.entry(line.db.clone()).or_default() += line.counters;
                    let nameless = (line.counters.ddoc_updated > line.ddocs.len() as u64).then_some(None);
                    for id in line.ddocs.into_iter().map(Some).chain(nameless) {
                        let at = Sequence::new(self.incarnation, seen.stamp, 0);
                        self.recorded_ddocs.insert((line.db.clone(), id), at);
                    }
                }
                (StoredItem::App(AppKey::Database(name)), Some(value)) => {
                    let instance = instance_of(value);
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
        Ok(())
    }

    /// Judges a commit that the store refused.
    pub fn refused(
        findings: &Findings,
        (issuer, is_late): (Issuer, bool),
        code: Option<i32>,
        keys: &[Bytes],
        conflicts: &[KeyRange],
    ) {
        if is_late {
            findings.witness(Witness::LateCommitRefused);
        }
        if code != Some(StoreError::NOT_COMMITTED.code()) {
            return;
        }
        let items: Vec<_> = keys.iter().map(|key| StoredItem::of(key)).collect();
        let writes = |is: fn(&StoredItem) -> bool| items.iter().any(is);
        let folds = writes(|item| matches!(item, StoredItem::FoldMark(_)));
        if folds && !writes(|item| matches!(item, StoredItem::Lease(..))) {
            findings.witness(Witness::FoldRefused);
        }
        if writes(|item| matches!(item, StoredItem::ConsumerCheckpoint(..) | StoredItem::Deferred(..))) {
            findings.witness(Witness::ConsumerRefused);
        }
        if writes(|item| matches!(item, StoredItem::App(AppKey::Worked(..)))) {
            findings.witness(Witness::WorkRefused);
        }
        // A producer reads the topology of the document feed that it writes to, to see whether the shards are still open.
        let of_topologies = [BUS_PREFIX, TOPOLOGIES].concat();
        let is_of_bus = |range: &KeyRange| {
            range.begin.starts_with(BUS_PREFIX) && !range.begin.starts_with(&of_topologies)
        };
        if writes(|item| *item == StoredItem::Counters) && !folds && conflicts.iter().any(is_of_bus) {
            let Issuer { process, generation } = issuer;
            findings.fail(Guarantee::Blind.broken(format!(
                "recording events made a transaction of process {process}.{generation} conflict"
            )));
        }
    }
}

/// Pairs the names of functions with the functions.
macro_rules! tests {
    ($($($part:ident)::* { $($name:ident)* })*) => {
        [$({
            use self::$($part)::*::tests::*;
            vec![$((stringify!($name), $name as fn())),*]
        }),*].concat()
    };
}

/// Lists the tests of the oracle itself.
pub fn tests() -> Vec<(&'static str, fn())> {
    tests! {
        ledger {
            the_creation_of_another_instance_is_the_deletion_of_the_one_before
        }
        account {
            a_reader_that_may_know_a_name_is_owed_its_deletion
            one_who_has_expired_or_skipped_is_owed_nothing_of_before
            what_a_new_filter_wants_is_owed_from_its_start
        }
        interest {
            a_set_wants_what_one_of_it_does_and_the_whole_allows
        }
        models::consumer {
            work_is_finished_once_more_for_each_request
        }
        models::subscriber {
            a_batch_comes_again_from_its_first_row_on_after_a_panic
        }
    }
}
