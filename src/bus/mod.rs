//! [`Bus`]: opens the bus in a store and starts its roles.

mod canary;
mod node;
#[cfg(feature = "http")]
pub(crate) mod observed;
#[cfg(feature = "http")]
mod readiness;
mod relocation;
pub(crate) mod running;
#[cfg(any(feature = "cli", feature = "http"))]
mod signals;
pub(crate) mod status;

use std::{
    io::{Read, Write},
    sync::Arc,
};

pub use self::{
    node::{Announced, Node},
    relocation::{ExportOptions, Exported},
};
use crate::{
    base::{
        encoding::Incarnation,
        error::{Error, Result},
        event::DbInstance,
        notification::Notification,
    },
    roles::{
        changes::{Change, Changes},
        dispatcher::{Dispatcher, DispatcherOptions, Fanout},
        group::{self, Consumer, ConsumerOptions, Group, GroupStatus, Observer},
        janitor::{Janitor, JanitorOptions},
        jobs::StoredTrigger,
        notifier::{Notifier, NotifierOptions},
        producer::{Producer, ProducerOptions, ringer},
    },
    state::{
        context::{Background, Context},
        feed::{FeedRow, NewTopology, RawFeed},
        keys::{Config, Keys, Partition, ShardId},
        membership::{Member, NodeOptions, NodeStatus, forget_nodes, statuses},
        named_cursor::NamedCursor,
        notification_feed::NotificationFeed,
        routing::Schemes,
        skipped::{Place, SkippedRow},
        stats::StatsSnapshot,
    },
    store::{Database, Isolation, RangeRead, Transaction},
};

/// What a bus is created with. An existing bus must be opened with the same prefix and number of partitions.
#[derive(Debug, Clone)]
pub struct BusOptions {
    /// What all keys of the bus start with; at most 256 bytes, not starting with `0xff`. Default: `notibus`.
    pub prefix: Vec<u8>,
    /// Into how many partitions the counters are divided, 1 to 4,096: the most notifiers that can share the work.
    /// Default: 64.
    pub partitions: u32,
    /// Over how many shards the feed is spread when the bus is created, 1 to 10,000. An existing feed keeps its own.
    /// Default: 4.
    pub shards: u32,
    /// How ids can be routed to shards. Every process that uses the bus needs the same ones. Default: those of this crate.
    pub schemes: Schemes,
}

impl Default for BusOptions {
    fn default() -> Self {
        Self { prefix: b"notibus".to_vec(), partitions: 64, shards: 4, schemes: Schemes::default() }
    }
}

/// The most partitions.
const PARTITIONS_MAX: u32 = 4_096;

/// Removes the nodes of earlier processes, if `db` knows that they are dead: nobody has to wait until they expire.
async fn forget_dead(db: &Database, prefix: &[u8], keys: &Keys) -> Result<()> {
    if db.is_first_use(prefix) {
        db.run(async |tx| forget_nodes(&tx, keys).await).await?;
    }
    Ok(())
}

/// The bus in a store, as seen by one process. Clones share it; roles are started from it.
#[derive(Debug, Clone)]
pub struct Bus {
    /// What the roles share.
    context: Arc<Context>,
}

impl Bus {
    /// Opens the bus in `db`, and creates it if there is none under the prefix. Must be called within a tokio runtime.
    ///
    /// Fails with [`Error::Invalid`] if an option is out of its limits, with [`Error::ConfigMismatch`] if the bus was created with
    /// another number of partitions, and with [`Error::ImportUnderWay`] while one is imported under the prefix.
    pub async fn open(db: &Database, options: BusOptions) -> Result<Self> {
        let BusOptions { prefix, partitions, shards, schemes } = options;
        if !(1..=PARTITIONS_MAX).contains(&partitions) {
            return Err(Error::invalid("partitions", format!("{partitions} is not 1 to {PARTITIONS_MAX}")));
        }
        let topology = NewTopology::new(shards, None, db.env())?;
        let keys = Keys::new(&prefix)?;
        let new = Config { partitions, incarnation: Incarnation(0) };
        let context = &Context::new(db.clone(), keys.clone(), new, schemes.clone());
        let config = db.run(async |tx| open_config(&tx, context, &topology).await).await?;
        forget_dead(db, &prefix, &keys).await?;
        Ok(Self::new(db, keys, config, schemes))
    }

    /// Opens the bus that is in `db` under `prefix`, with what it was created with. Must be called within a tokio runtime.
    ///
    /// Fails with [`Error::Invalid`] if there is none, and with [`Error::ImportUnderWay`] while one is imported.
    pub async fn open_existing(db: &Database, prefix: &[u8]) -> Result<Self> {
        let keys = Keys::new(prefix)?;
        let stored = db.run(async |tx| {
            let stored = tx.get(&keys.config(), Isolation::Serializable).await?;
            if stored.is_none() {
                relocation::check_no_import(&tx, &keys).await?;
            }
            Ok(stored)
        });
        match stored.await? {
            Some(stored) => {
                let config = Config::from_bytes(&stored)?;
                forget_dead(db, prefix, &keys).await?;
                Ok(Self::new(db, keys, config, Schemes::default()))
            }
            None => Err(Error::invalid("prefix", "there is no bus under it")),
        }
    }

    /// Writes everything that the bus keeps to `out`, for [`Bus::import`] into another store; says what that was. It blocks the
    /// thread as long as `out` does.
    ///
    /// Stop producers and roles first, and let nothing write to this bus after. Nodes are watched for as long as they may be silent
    /// ([`NodeOptions::expiry`](crate::NodeOptions::expiry)), to find out whether one lives; a producer is noticed if it writes
    /// meanwhile. [`ExportOptions::while_running`] exports beside them all the same.
    ///
    /// Fails with [`Error::BusInUse`] if nodes live, with [`Error::Invalid`] if something was written meanwhile, as far as it can
    /// tell, and with [`Error::Io`] if `out` does.
    pub async fn export(&self, out: &mut impl Write, options: ExportOptions) -> Result<Exported> {
        relocation::export(&self.context, out, options).await
    }

    /// Brings what [`Bus::export`] has written into `db`, under `prefix`, with the incarnation raised by one: positions of
    /// readers stay valid, and sort before all that is written from now on. Open the bus with the same hashing schemes.
    ///
    /// Until it has ended, opening a bus there fails with [`Error::ImportUnderWay`]. If it fails, it removes what it has written; if
    /// its process dies or the future is dropped, that is left to the next import, or to [`Bus::discard_import`].
    ///
    /// Fails with [`Error::Invalid`] if there is something under the prefix, or the export is damaged, with [`Error::BusInUse`]
    /// if nodes live under the prefix, and with [`Error::Io`] if `input` fails or ends too early.
    pub async fn import(db: &Database, prefix: &[u8], input: &mut impl Read) -> Result<()> {
        relocation::import(db, &Keys::new(prefix)?, input).await
    }

    /// Removes what an import whose process has died has left under `prefix`. Returns whether there was anything. An import that is
    /// still under way fails.
    pub async fn discard_import(db: &Database, prefix: &[u8]) -> Result<bool> {
        relocation::discard(db, &Keys::new(prefix)?).await
    }

    /// The incarnation of the bus in `db` under `prefix`, without opening it.
    ///
    /// Fails with [`Error::Invalid`] if there is none.
    pub async fn stored_incarnation(db: &Database, prefix: &[u8]) -> Result<Incarnation> {
        let keys = Keys::new(prefix)?;
        Ok(db.run(async |tx| relocation::stored(&tx, &keys).await).await?.incarnation)
    }

    /// Raises the incarnation of the bus in `db` under `prefix` from `from` by one, after the store as a whole was moved to
    /// another cluster, as by a backup and its restoration. No process may have the bus open. Returns the new one; trying again
    /// after a failure does not raise it twice.
    ///
    /// Nodes that are listed are watched for as long as they may be silent, unless it is forced, and in any case removed together
    /// with all leases: what a forgotten process has under way in a role is not committed any more. Producers and
    /// writers of documents have no lease: stop them.
    ///
    /// Fails with [`Error::BusInUse`] if nodes live, and with [`Error::Invalid`] if the incarnation is neither `from` nor the one after it.
    pub async fn raise_incarnation(
        db: &Database,
        prefix: &[u8],
        from: Incarnation,
        force: bool,
    ) -> Result<Incarnation> {
        relocation::raise(db, &Keys::new(prefix)?, from, force).await
    }

    /// The store that it is in.
    pub fn store(&self) -> &Database {
        &self.context.db
    }

    /// How often the bus has moved to another cluster.
    pub fn incarnation(&self) -> Incarnation {
        self.context.config.incarnation
    }

    /// The bus with this configuration.
    fn new(db: &Database, keys: Keys, config: Config, schemes: Schemes) -> Self {
        let context = Context::new(db.clone(), keys, config, schemes);
        let ringer = tokio::spawn(ringer(Arc::clone(&context.signals), Arc::downgrade(&context)));
        context.ringer.set(Background(ringer)).expect("the context is new");
        Self { context }
    }

    /// A producer with the default options.
    pub fn producer(&self) -> Producer {
        self.producer_with(ProducerOptions::default()).expect("the default options are valid")
    }

    /// A producer. Fails with [`Error::Invalid`] if an option is out of its limits.
    pub fn producer_with(&self, options: ProducerOptions) -> Result<Producer> {
        Producer::new(Arc::clone(&self.context), options)
    }

    /// Joins the nodes of the bus. Each call makes another node; a process needs one, from which its roles are started.
    ///
    /// Fails with [`Error::Invalid`] if an option is out of its limits, or another process lives under the same id. If a
    /// process has died under it, this waits until that is certain.
    pub async fn node(&self, options: NodeOptions) -> Result<Node> {
        Ok(Node::new(Arc::clone(&self.context), self.join(options).await?))
    }

    /// Starts a notifier as a node of its own, with the default [`NodeOptions`]. It takes its part of the partitions.
    ///
    /// A process with several roles starts them from one node: see [`Bus::node`].
    pub async fn notifier(&self, options: NotifierOptions) -> Result<Notifier> {
        options.check()?;
        let member = self.join(NodeOptions::default()).await?;
        Notifier::start_alone(&self.context, member, options).await
    }

    /// Starts a janitor as a node of its own, with the default [`NodeOptions`]. Of all nodes that have one, one works at a
    /// time.
    pub async fn janitor(&self, options: JanitorOptions) -> Result<Janitor> {
        options.check()?;
        let member = self.join(NodeOptions::default()).await?;
        Janitor::start_alone(&self.context, member, options).await
    }

    /// Joins the nodes of the bus.
    async fn join(&self, options: NodeOptions) -> Result<Arc<Member>> {
        let Context { db, keys, config, stats, .. } = &*self.context;
        Member::join(db, keys, Some(*config), stats, options).await
    }

    /// The nodes that have joined and not left, in the order of their ids. Some may have died since: only one whose beat
    /// changes lives. Changes nothing.
    pub async fn nodes(&self) -> Result<Vec<NodeStatus>> {
        statuses(&self.context.db, &self.context.keys).await
    }

    /// Starts a dispatcher in this process.
    pub async fn dispatcher(&self, options: DispatcherOptions) -> Result<Dispatcher> {
        Dispatcher::start(Arc::clone(&self.context), options, None).await
    }

    /// A dispatcher without a tail, at the end of the feed: rows are pushed by hand.
    pub async fn fanout(&self, options: DispatcherOptions) -> Result<Fanout> {
        let start = self.feed().now().await?;
        Fanout::new(Arc::clone(&self.context), &options, start)
    }

    /// The changes feeds of the databases' documents, with producers of the default options.
    pub fn changes(&self) -> Changes {
        self.changes_with(self.producer())
    }

    /// The changes feeds of the databases' documents; `producer` records the events of the databases.
    pub fn changes_with(&self, producer: Producer) -> Changes {
        Changes::new(Arc::clone(&self.context), producer)
    }

    /// The feed of notifications, to be read directly.
    pub fn feed(&self) -> NotificationFeed {
        NotificationFeed::new(Arc::clone(&self.context), self.context.feed.clone())
    }

    /// The group `name` of the feed of notifications, to be created, consumed or looked at. Groups of other feeds:
    /// [`Feed::group`](crate::feed::Feed::group).
    ///
    /// Fails with [`Error::Invalid`] if the name is empty or longer than 256 bytes.
    pub fn group(&self, name: &str) -> Result<Group<Notification>> {
        self.feed().group(name)
    }

    /// The group `name` of the notifications, or of the documents of `instance`, to be looked at and managed.
    pub fn any_group(&self, instance: Option<DbInstance>, name: &str) -> Result<Group<()>> {
        Group::untyped(&self.context, instance, name)
    }

    /// The groups of all feeds, and what the store says of them. Changes nothing.
    pub async fn groups(&self) -> Result<Vec<GroupStatus>> {
        group::statuses(&self.context).await
    }

    /// Starts a consumer of `group` as a node of its own, with the default [`NodeOptions`]. `factory` makes an observer for each
    /// shard that it works on.
    ///
    /// A process with several roles starts them from one node: see [`Node::consumer`].
    pub async fn consumer<R, F, O>(
        &self,
        group: &Group<R>,
        factory: F,
        options: ConsumerOptions,
    ) -> Result<Consumer>
    where
        R: FeedRow,
        F: Fn(ShardId) -> O + Send + Sync + 'static,
        O: Observer<R>,
    {
        let member = self.join(NodeOptions::default()).await?;
        Consumer::start_alone(group, member, factory, options).await
    }

    /// The cursor `name` of the bus as a whole, for a durable subscriber or a trigger, of which one runs at a time, on whatever
    /// node. One that each node has for itself: [`Node::cursor`].
    ///
    /// Fails with [`Error::Invalid`] if the name is empty or longer than 256 bytes.
    pub fn cursor(&self, name: &str) -> Result<NamedCursor> {
        NamedCursor::new(&self.context, None, name)
    }

    /// What is kept of the trigger `name`: where it is, and which databases it has parked.
    ///
    /// Fails with [`Error::Invalid`] if the name is empty or longer than 256 bytes.
    pub fn trigger(&self, name: &str) -> Result<StoredTrigger> {
        StoredTrigger::new(&self.context, name)
    }

    /// The names of the triggers that have worked on any database. It takes two reads for each cursor of the bus.
    pub async fn triggers(&self) -> Result<Vec<String>> {
        StoredTrigger::names(&self.context).await
    }

    /// Whether no recorded event waits to be folded. Reads at most one key.
    pub async fn is_drained(&self) -> Result<bool> {
        let Context { db, keys, config, .. } = &*self.context;
        let waiting = &RangeRead::new(keys.drains(Partition(0), Partition(config.partitions - 1))).limit(1);
        db.run(async |tx| Ok(tx.get_range(waiting, Isolation::Snapshot).await?.rows.is_empty())).await
    }

    /// The rows that this process has met and cannot decode, as far as they are still there: damaged ones, and those of a later
    /// version of the program. Whoever met them went on without them. A fold mark that was damaged is named as long as the process
    /// lives, although it was replaced at once. Of more than 1,000 only the last ones are known. It reads each of them.
    pub async fn skipped_rows(&self) -> Result<Vec<SkippedRow>> {
        let context = &*self.context;
        for place in &context.skipped.places() {
            let is_mended = async |tx: Transaction| match place {
                Place::Key(key) => Ok(tx.get(key, Isolation::Snapshot).await?.is_none()),
                Place::Row(id, sequence) => {
                    let row = match RawFeed::new(context, id).row_at(&tx, *sequence).await {
                        Err(Error::NoFeed { .. }) => None,
                        row => row?,
                    };
                    Ok(row.is_none_or(|row| match id.instance() {
                        None => Notification::from_stored(*sequence, &row.value).is_ok(),
                        Some(_) => Change::from_stored(*sequence, &row.value).is_ok(),
                    }))
                }
            };
            if context.db.run(is_mended).await? {
                context.skipped.forget(place);
            }
        }
        Ok(context.skipped.rows())
    }

    /// What the roles of this process have done since the bus was opened.
    pub fn stats(&self) -> StatsSnapshot {
        self.context.stats.snapshot()
    }
}

/// Reads the configuration, or creates the bus with that of `new` and this topology.
async fn open_config(tx: &Transaction, new: &Context, topology: &NewTopology) -> Result<Config> {
    let key = new.keys.config();
    if let Some(stored) = tx.get(&key, Isolation::Serializable).await? {
        let stored = Config::from_bytes(&stored)?;
        if stored.partitions != new.config.partitions {
            return Err(Error::ConfigMismatch {
                what: "partitions",
                stored: stored.partitions.into(),
                requested: new.config.partitions.into(),
            });
        }
        return Ok(stored);
    }
    relocation::check_no_import(tx, &new.keys).await?;
    RawFeed::notifications(new).create(tx, topology).await?;
    tx.set(&key, &new.config.to_bytes());
    Ok(new.config)
}
