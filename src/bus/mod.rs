//! [`Bus`]: opens the bus in a store and starts its roles.

#[cfg(feature = "http")]
pub(crate) mod readiness;
mod relocation;
pub(crate) mod running;
pub(crate) mod snapshot;
pub(crate) mod status;

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use serde::{Serialize, de::DeserializeOwned};

use self::snapshot::{Observer, Snapshot};
pub use self::{
    relocation::{ExportOptions, Exported},
    running::Node,
};
#[cfg(feature = "http")]
use crate::state::membership::Handovers;
use crate::{
    base::{
        encoding::Incarnation,
        error::{Error, Result},
    },
    roles::{
        changes::Changes,
        consumer::{ConsumerHandle, ConsumerStatus},
        dispatcher::{Dispatcher, DispatcherOptions},
        notifier::Backlog,
        producer::{Producer, ProducerOptions, RINGER, ringer},
    },
    state::{
        context::{Background, Context},
        exactly_once::{CommittedOnce, exactly_once},
        feed::{NewTopology, RawFeed, check_shards},
        history::{Claim, History},
        keys::{self, Config, Keys, Partition},
        membership::{NodeStatus, forget_nodes},
        notification_feed::NotificationFeed,
        routing::Schemes,
        skipped::SkippedRow,
        stats::StatsSnapshot,
    },
    store::{Isolation, RangeRead, Store, Transaction},
};

/// The pause before the incarnation is read again if the store did not answer.
#[cfg(any(feature = "cli", feature = "http"))]
const RAISED_PAUSE: Duration = Duration::from_secs(1);

/// Options for creating or opening a bus. An existing bus must be opened with the same prefix and number of partitions.
///
/// There is a method for each field, because later versions may add fields: `BusOptions::default().prefix(b"events".to_vec())`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BusOptions {
    /// The prefix of all keys of the bus: at most 256 bytes, not starting with `0xff`. Default: `notibus`.
    pub prefix: Vec<u8>,
    /// The number of partitions of the counters, 1 to 4,096: the maximum number of notifiers that can share the work. Default: 64.
    pub partitions: u32,
    /// The number of shards of the feed when the bus is created, 1 to 1,000. An existing feed keeps its own. Default: 4.
    pub shards: u32,
    /// The schemes that route ids to shards. Every process that uses the bus needs the same schemes. Default: those of this crate.
    pub schemes: Schemes,
}

crate::base::macros::setters!(BusOptions { prefix: Vec<u8>, partitions: u32, shards: u32, schemes: Schemes });

impl BusOptions {
    /// The maximum number of partitions.
    pub const PARTITIONS_MAX: u32 = 4_096;
    /// The maximum length of a prefix, in bytes.
    pub const PREFIX_LEN_MAX: usize = keys::PREFIX_LEN_MAX;
    /// The maximum number of shards of a feed.
    pub const SHARDS_MAX: u32 = keys::SHARDS_MAX;

    /// Fails with [`Error::Invalid`] if an option is outside its limits, as [`Bus::open`] does.
    pub fn check(&self) -> Result<()> {
        let Self { prefix, partitions, shards, .. } = self;
        if !(1..=Self::PARTITIONS_MAX).contains(partitions) {
            let reason = format!("{partitions} is not 1 to {}", Self::PARTITIONS_MAX);
            return Err(Error::invalid("partitions", reason));
        }
        check_shards(*shards)?;
        Keys::new(prefix).map(drop)
    }
}

impl Default for BusOptions {
    fn default() -> Self {
        Self { prefix: b"notibus".to_vec(), partitions: 64, shards: 4, schemes: Schemes::default() }
    }
}

/// Runs `open`, which opens the bus under `prefix`. When the bus is opened for the first time since its folder was opened, the same
/// transaction removes the nodes of earlier processes: they are dead, and no node should have to wait until they expire.
///
/// Nodes join only through an open bus, so before the bus is marked as used there is no live node. A transaction that has its read
/// version and then finds no mark reads only dead nodes, and conflicts if a node joins before its commit.
async fn opened<T, R>(store: &Store, prefix: &[u8], keys: &Keys, open: impl Fn(Transaction) -> R) -> Result<T>
where
    R: Future<Output = Result<T>>,
{
    let opened = store.run(async |tx| {
        tx.read_version().await?;
        if store.is_unused(prefix) {
            forget_nodes(&tx, keys).await?;
        }
        open(tx).await
    });
    let opened = opened.await?;
    store.mark_used(prefix);
    Ok(opened)
}

/// The bus in a store, as one process opened it. It starts roles. Clones are handles to the same bus.
#[derive(Debug, Clone)]
pub struct Bus {
    context: Arc<Context>,
    seen: Arc<Observer>,
    #[cfg(feature = "http")]
    handovers: Arc<Handovers>,
}

impl Bus {
    /// Opens the bus in `store`, or creates it if there is none under the prefix. Must be called within a tokio runtime.
    ///
    /// Fails with [`Error::Invalid`] if an option is outside its limits, with [`Error::ConfigMismatch`] if the bus was created with a
    /// different number of partitions, and with [`Error::ImportUnderWay`] while a bus is being imported under the prefix.
    pub async fn open(store: &Store, options: BusOptions) -> Result<Self> {
        options.check()?;
        let BusOptions { prefix, partitions, shards, schemes } = options;
        let topology = NewTopology::new(shards, None, store.env())?;
        let keys = Keys::new(&prefix)?;
        let new = Config { partitions, incarnation: Incarnation(0) };
        let context = &Context::new(store.clone(), keys.clone(), new, schemes.clone());
        let config =
            opened(store, &prefix, &keys, async |tx| open_config(&tx, context, &topology).await).await?;
        Self::checked(store, keys, config, schemes).await
    }

    /// Opens an existing bus in `store` under `prefix`, with its stored options. Must be called within a tokio runtime.
    ///
    /// Fails with [`Error::Invalid`] if there is no bus, and with [`Error::ImportUnderWay`] while one is being imported.
    pub async fn open_existing(store: &Store, prefix: &[u8]) -> Result<Self> {
        let keys = Keys::new(prefix)?;
        let config = opened(store, prefix, &keys, async |tx| {
            if let Some(stored) = tx.get(&keys.config(), Isolation::Serializable).await? {
                return Config::from_bytes(&stored);
            }
            relocation::check_no_import(&tx, &keys).await?;
            Err(Config::missing(prefix))
        });
        Self::checked(store, keys.clone(), config.await?, Schemes::default()).await
    }

    /// Runs `body` in a transaction of the bus's store and commits it exactly once. This is like [`Store::run`], but never commits twice,
    /// neither after an unknown commit nor in another run with the same `key` (1 to 255 bytes), on any node.
    ///
    /// The result is stored under the key, in the same transaction. A later run with the key returns that result, and does not call its
    /// body. A run without a key draws a random one, which only its own attempts know.
    ///
    /// `body` may be called several times, so it should only read and write through the transaction; it must not commit, cancel or reset
    /// the transaction, nor set its read version.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
    /// use notibus::{Bus, BusOptions, store::{StoreError, AtomicOp, Store, Isolation, testing::{CommitFault, Faults}}};
    ///
    /// let faults = Faults::new(&Store::memory());
    /// let db = faults.store();
    /// let bus = Bus::open(&db, BusOptions::default()).await?;
    /// // The commit happens, but nobody knows.
    /// faults.script_commits([CommitFault::After(StoreError::COMMIT_UNKNOWN_RESULT)]);
    /// for is_repeat in [false, true] {
    ///     let paid = bus
    ///         .run_exactly_once(Some(b"order 17"), async |tx| {
    ///             tx.atomic(AtomicOp::Add, b"payments", &1_u64.to_le_bytes());
    ///             Ok("paid".to_owned())
    ///         })
    ///         .await?;
    ///     assert_eq!((paid.value.as_str(), paid.is_repeat), ("paid", is_repeat));
    ///     println!("at {:?}", paid.committed.versionstamp);
    /// }
    /// let payments = db.run(async |tx| tx.get(b"payments", Isolation::Serializable).await).await?;
    /// assert_eq!(payments.as_deref(), Some(&1_u64.to_le_bytes()[..]));
    /// # Ok(()) }
    /// ```
    ///
    /// # How long a result is kept
    ///
    /// A result, of about 40 bytes, is kept for at least five minutes. The time is counted in versions of the store, a million per second,
    /// and each recovery of a cluster uses up as many versions as 100 s. Then the janitor clears the result, and a new run with the key
    /// calls its body again. A run that is retried for so long that its result may have been cleared fails with an unknown commit.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the key is empty or too long, or its stored result is not a `T`; any error of `body` that is not retryable;
    /// and [`Error::RetriesExhausted`] at the limits of [`RetryPolicy::default`](crate::store::RetryPolicy). If
    /// [`Error::is_maybe_committed`] is true, the transaction may have been committed, once; after any other error it was not and will not
    /// be. After `transaction_timed_out` (1031), which is not retried, the commit may still happen, within [`Transaction::LIFETIME`].
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the transaction may or may not have been committed, once.
    pub async fn run_exactly_once<T, F, R>(&self, key: Option<&[u8]>, body: F) -> Result<CommittedOnce<T>>
    where
        T: Serialize + DeserializeOwned,
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T>>,
    {
        exactly_once(&self.context.store, &self.context.keys, key, body).await
    }

    /// Returns the store of the bus.
    pub fn store(&self) -> &Store {
        &self.context.store
    }

    /// Returns how many times the bus has moved to another cluster.
    pub fn incarnation(&self) -> Incarnation {
        self.context.config.incarnation
    }

    /// Creates the opened bus, and records whether the store is older than its own rows. Such a bus can still be opened: it records events
    /// and says what is wrong, but nothing is folded until the incarnation is raised.
    async fn checked(store: &Store, keys: Keys, config: Config, schemes: Schemes) -> Result<Self> {
        let bus = Self::new(store, keys, config, schemes);
        let context = &*bus.context;
        let check = store.run(async |tx| History::of(context).check(&tx, Claim::Rows).await).await;
        match context.note_history(check) {
            Err(error) if !matches!(error, Error::OlderThanRows { .. }) => Err(error),
            _ => Ok(bus),
        }
    }

    /// Completes once this process or another one has raised the incarnation of the bus, so that this process has to open the bus again.
    /// Never completes if the bus is gone for another reason.
    #[cfg(any(feature = "cli", feature = "http"))]
    pub async fn raised(&self) {
        let Context { store, keys, config, stats, .. } = &*self.context;
        stats.health.end_of_work().await;
        loop {
            match Self::stored_incarnation(store, keys.prefix()).await {
                Ok(stored) if stored > config.incarnation => return,
                Err(Error::Store(_) | Error::RetriesExhausted { .. }) => {
                    store.env().sleep(RAISED_PAUSE).await;
                }
                _ => std::future::pending::<()>().await,
            }
        }
    }

    fn new(store: &Store, keys: Keys, config: Config, schemes: Schemes) -> Self {
        let context = Context::new(store.clone(), keys, config, schemes);
        let (signals, weak) = (Arc::clone(&context.signals), Arc::downgrade(&context));
        let make = move || ringer(Arc::clone(&signals), Weak::clone(&weak));
        let ringing = tokio::spawn(context.stats.supervised(context.env(), RINGER, make));
        context.ringer.set(Background(ringing)).expect("the context is new");
        Self {
            seen: Arc::new(Observer::new(&context)),
            #[cfg(feature = "http")]
            handovers: Arc::default(),
            context,
        }
    }

    /// Returns a producer with the default options.
    pub fn producer(&self) -> Producer {
        self.producer_with(ProducerOptions::default()).expect("the default options are valid")
    }

    /// Returns a producer. Fails with [`Error::Invalid`] if an option is outside its limits.
    pub fn producer_with(&self, options: ProducerOptions) -> Result<Producer> {
        Producer::new(Arc::clone(&self.context), options)
    }

    /// Returns the nodes that have joined and not left, ordered by id. Some may have died: see [`NodeStatus::is_silent`], which this
    /// process can determine only after two reads. Writes nothing. Fails if the store does not answer within 2 s.
    pub async fn nodes(&self) -> Result<Vec<NodeStatus>> {
        self.seen.nodes().await
    }

    /// Starts a dispatcher in this process. Dispatchers do not divide work among themselves, so a dispatcher needs no node.
    pub async fn dispatcher(&self, options: DispatcherOptions) -> Result<Dispatcher> {
        Ok(self.suspended_dispatcher(options).await?.resume())
    }

    /// Returns a suspended dispatcher at the end of the feed: the caller resumes it, or pushes rows into it.
    pub async fn suspended_dispatcher(&self, options: DispatcherOptions) -> Result<Dispatcher> {
        let start = self.feed().now().await?;
        Dispatcher::suspended(Arc::clone(&self.context), options, start)
    }

    /// Returns the changes feeds of the databases' documents, with a producer that has the default options.
    pub fn changes(&self) -> Changes {
        self.changes_with(self.producer())
    }

    /// Returns the changes feeds of the databases' documents; `producer` records the events of the databases.
    pub fn changes_with(&self, producer: Producer) -> Changes {
        Changes::new(Arc::clone(&self.context), producer)
    }

    /// Returns the notification feed, for direct reads.
    pub fn feed(&self) -> NotificationFeed {
        NotificationFeed::new(Arc::clone(&self.context), self.context.feed.clone())
    }

    /// Returns a handle to the consumer `name` as a whole, whether or not it exists. Fails with [`Error::Invalid`] if the name is empty or
    /// longer than 256 bytes.
    pub fn consumer(&self, name: &str) -> Result<ConsumerHandle> {
        ConsumerHandle::new(&self.context, name)
    }

    /// Returns the states of all consumers, ordered by name. Fails if the store does not answer within a few seconds.
    pub async fn consumers(&self) -> Result<Vec<ConsumerStatus>> {
        self.seen.all_of_consumers().await
    }

    /// Returns what is known about the bus, in parts that were read less than `age_max` ago.
    pub(crate) async fn snapshot(&self, age_max: Duration) -> Snapshot {
        Box::pin(self.seen.snapshot(age_max)).await
    }

    /// Reads the backlog: the recorded events that are not folded yet. Counts about [`Backlog::ROWS_MAX`] rows at most, beginning with the
    /// lowest partition. Fails if the store does not answer within 2 s.
    pub async fn backlog(&self) -> Result<Backlog> {
        let now = Duration::ZERO;
        let (backlog, ages) = tokio::try_join!(self.seen.backlog(now), self.seen.ages(now))?;
        Ok(backlog.aged(&ages))
    }

    /// Whether no recorded event is waiting to be folded. Reads at most one key.
    pub async fn is_drained(&self) -> Result<bool> {
        let Context { store, keys, config, .. } = &*self.context;
        let waiting = &RangeRead::new(keys.drains(Partition(0), Partition(config.partitions - 1))).limit(1);
        store.run(async |tx| Ok(tx.get_range(waiting, Isolation::Snapshot).await?.rows.is_empty())).await
    }

    /// Returns the last rows of counters and feeds that this process came across and cannot decode, newest last: damaged rows, and rows of
    /// a later version of the program. Readers have skipped them. At most 20 are kept; [`StatsSnapshot::rows_skipped`] counts all of them.
    pub fn skipped_rows(&self) -> Vec<SkippedRow> {
        self.context.skipped.rows()
    }

    /// Returns what the roles of this process have done since the bus was opened.
    pub fn stats(&self) -> StatsSnapshot {
        self.context.stats.snapshot()
    }
}

/// Reads the configuration, or creates the bus with the configuration in `new` and with `topology`.
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
    // Whenever counters are cleared, a storage server of a cluster reads every watched key up to the next key that exists. Doorbells that
    // never rang do not exist, so this one, which comes before all others, is created.
    tx.set(&new.keys.doorbell(Partition(0)), &0_u64.to_le_bytes());
    Ok(new.config)
}
