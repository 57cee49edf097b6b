//! [`Bus`]: opens the bus in a store and starts its roles.

mod node;

use std::sync::Arc;

pub use self::node::{Announced, Node};
use crate::{
    context::{Background, Context},
    dispatcher::{Dispatcher, DispatcherOptions, Fanout},
    encoding::Incarnation,
    error::{Error, Result},
    feed::Topology,
    keys::{Config, FeedId, Keys, Partition},
    lease::{Member, NodeOptions, NodeStatus, statuses},
    notification_feed::NotificationFeed,
    notifier::{Notifier, NotifierOptions},
    producer::{Producer, ProducerOptions, ringer},
    stats::StatsSnapshot,
    store::{Database, Isolation, RangeRead, Transaction},
};

/// What a bus is created with. An existing bus must be opened with the same prefix and number of partitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BusOptions {
    /// What all keys of the bus start with; at most 256 bytes, not starting with `0xff`. Default: `notibus`.
    pub prefix: Vec<u8>,
    /// Into how many partitions the counters are divided, 1 to 4,096: the most notifiers that can share the work.
    /// Default: 64.
    pub partitions: u32,
    /// Over how many shards the feed is spread when the bus is created, 1 to 10,000. An existing feed keeps its own.
    /// Default: 4.
    pub shards: u32,
}

impl Default for BusOptions {
    fn default() -> Self {
        Self { prefix: b"notibus".to_vec(), partitions: 64, shards: 4 }
    }
}

/// The most partitions.
const PARTITIONS_MAX: u32 = 4_096;

/// The bus in a store, as seen by one process. Clones share it; roles are started from it.
#[derive(Debug, Clone)]
pub struct Bus {
    /// What the roles share.
    context: Arc<Context>,
}

impl Bus {
    /// Opens the bus in `db`, and creates it if there is none under the prefix. Must be called within a tokio runtime.
    ///
    /// Fails with [`Error::Invalid`] if an option is out of its limits, and with [`Error::ConfigMismatch`] if the bus was
    /// created with another number of partitions.
    pub async fn open(db: &Database, options: BusOptions) -> Result<Self> {
        let BusOptions { prefix, partitions, shards } = options;
        if !(1..=PARTITIONS_MAX).contains(&partitions) {
            return Err(Error::invalid("partitions", format!("{partitions} is not 1 to {PARTITIONS_MAX}")));
        }
        Topology::check_count(shards)?;
        let keys = Keys::new(&prefix)?;
        let config = db.run(async |tx| open_config(&tx, &keys, partitions, shards).await).await?;
        Ok(Self::start(db, keys, config))
    }

    /// Opens the bus that is in `db` under `prefix`, with what it was created with. Must be called within a tokio runtime.
    ///
    /// Fails with [`Error::Invalid`] if there is none.
    pub async fn open_existing(db: &Database, prefix: &[u8]) -> Result<Self> {
        let keys = Keys::new(prefix)?;
        let stored = db.run(async |tx| tx.get(&keys.config(), Isolation::Serializable).await).await?;
        match stored {
            Some(stored) => Ok(Self::start(db, keys.clone(), Config::from_bytes(&stored)?)),
            None => Err(Error::invalid("prefix", "there is no bus under it")),
        }
    }

    /// The bus with this configuration.
    fn start(db: &Database, keys: Keys, config: Config) -> Self {
        let context = Context::new(db.clone(), keys, config);
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

    /// Joins the nodes of the bus.
    async fn join(&self, options: NodeOptions) -> Result<Arc<Member>> {
        let Context { db, keys, stats, .. } = &*self.context;
        Member::join(db, keys, stats, options).await
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

    /// The feed of notifications, to be read directly.
    pub fn feed(&self) -> NotificationFeed {
        NotificationFeed::new(Arc::clone(&self.context))
    }

    /// Whether no recorded event waits to be folded. Reads at most one key.
    pub async fn is_drained(&self) -> Result<bool> {
        let Context { db, keys, config, .. } = &*self.context;
        let waiting = &RangeRead::new(keys.drains(Partition(0), Partition(config.partitions - 1))).limit(1);
        db.run(async |tx| Ok(tx.get_range(waiting, Isolation::Snapshot).await?.rows.is_empty())).await
    }

    /// What the roles of this process have done since the bus was opened.
    pub fn stats(&self) -> StatsSnapshot {
        self.context.stats.snapshot()
    }
}

/// Reads the configuration, or creates the bus.
async fn open_config(tx: &Transaction, keys: &Keys, partitions: u32, shards: u32) -> Result<Config> {
    let key = keys.config();
    if let Some(stored) = tx.get(&key, Isolation::Serializable).await? {
        let stored = Config::from_bytes(&stored)?;
        if stored.partitions != partitions {
            return Err(Error::ConfigMismatch {
                what: "partitions",
                stored: stored.partitions.into(),
                requested: partitions.into(),
            });
        }
        Ok(stored)
    } else {
        let config = Config { partitions, incarnation: Incarnation(0) };
        Topology::create(tx, keys, &FeedId::notifications(), shards);
        tx.set(&key, &config.to_bytes());
        Ok(config)
    }
}
