//! [`Consumer`]: the one durable mechanism. A named consumer works through a feed, on any number of nodes, and survives crashes.
//!
//! A feed has only the newest row of each id, so the feed itself is the backlog. All that is stored is the **checkpoint** of each shard, up
//! to which everything is finished, and a **key** for each exception: an id whose work failed, stalled or takes long, was committed out of
//! order, or was requested again. No row is ever copied.
//!
//! If work on an id commits nothing itself, its end is recorded only in memory until the checkpoint has passed the id's row, so the work is
//! repeated after a crash. A transaction that a batch commits saves the checkpoint itself. A shard begins at its checkpoint or at the
//! consumer's low watermark, whichever is later.
//!
//! ```text
//!  shard 1   ─ a ── b ── c ── d ── e ─────►         no key:  done if the newest row is at or before C
//!                        C              read        a key:   done if the newest row is at or before `done`,
//!  keys      b {done, due, attempts, again}                  and it was not requested again
//! ```
//!
//! # Invariants
//!
//! 1. Everything that is written for a shard is written under its lease, except on an operator's request: a reset takes the leases away; a
//!    discard, or a request to work again, writes the key of an id.
//! 2. Between resets a checkpoint never moves back, and passes an unfinished row only while its id has a key. Outside a handler's
//!    transaction only the shard's task moves the checkpoint, and only the shard's task removes keys.
//! 3. An id never runs twice at once. A run that ends without success writes the keys that its transactions read, before the handler is
//!    called for the id again.
//! 4. At any time only the shards of one topology entry have checkpoints. Their successors work only on keys that these shards have handed
//!    over. The janitor keeps that entry and all later ones, even if they have no rows.
//! 5. A transaction that sets a consumer's position reads the feed's horizon, and conflicts with a janitor that read the consumers earlier.
//!
//! # Cost
//!
//! A shard saves its checkpoint once per [`ConsumerOptions::checkpoint_interval`] while rows are being finished, and otherwise not at all:
//! the low watermark passes unwanted rows, with one small write per consumer every half minute. Rows are read once per node, however many
//! consumers it has ([`page_cache`](crate::state::page_cache)).

mod admin;
mod deferred;
mod exactly_once;
mod handle;
mod handler;
mod in_hand;
mod known_keys;
mod low_watermark;
mod member;
mod options;
mod ordered;
mod recipes;
mod reshard;
mod runs;
mod shard;
mod status;
mod stored;

use std::{fmt, marker::PhantomData, sync::Arc, time::Duration};

use bytes::Bytes;

pub(crate) use self::status::{Consumers, deferred, lags, stored};
pub use self::{
    admin::{ConsumerSettings, DeferredId},
    exactly_once::{CommitState, FencingToken, Run},
    handle::Consumer,
    handler::{Batch, CloseReason, ConsumedRow, Handler, HandlerResult, Work},
    options::{ConsumerOptions, FailurePolicy},
    recipes::{
        DbHandler, DeletedDb, Index, IndexBuild, IndexDdocs, ParallelBatch, ParallelJob, ParallelJobOptions,
        Replicate, Scan, index, replicate,
    },
    status::{ConsumerLag, ConsumerShard, ConsumerStatus},
    stored::ConsumerHandle,
};
use self::{
    handler::{AnyHandler, Factory, Of},
    in_hand::Tenants,
    member::{Member, Working},
};
use crate::{
    base::{
        cursor::Start,
        error::{Error, Result},
        filter::Filter,
        notification::Notification,
    },
    roles::changes::Change,
    state::{
        context::Context,
        feed::Feed,
        feed_watcher::Listener,
        keys::ShardId,
        membership::{self, Pool, Worker},
    },
};

/// Describes a member of a consumer, and starts it. [`NodeHandle::consumer`](crate::NodeHandle::consumer) makes a builder.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, Cursor, Db, DbInstance, StartOptions, consumer::Work, store::Store};
///
/// let store = Store::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let running = bus.start(StartOptions::default()).await?;
/// let mail = |work: Work<notibus::Notification>| async move {
///     println!("{:?}: {:?}", work.row().map(|row| &row.name), work.news());
///     Ok(())
/// };
/// let mailer = running.consumer("mailer")?.start_from(Cursor::BEGINNING).run(mail).await?;
///
/// let db = Db::new("orders".parse()?, DbInstance::new());
/// store.run(async |tx| Ok(bus.producer().created(&tx, &db))).await?;
/// while !bus.is_drained().await? {
///     tokio::time::sleep(std::time::Duration::from_millis(5)).await;
/// }
/// mailer.caught_up().await?;
/// assert_eq!(bus.stats().consumer_rows, 1);
/// mailer.shutdown().await?;
/// running.shutdown().await
/// # }
/// ```
#[must_use = "a consumer builder does nothing until it is run"]
pub struct ConsumerBuilder<R> {
    handle: ConsumerHandle,
    node: Arc<membership::Member>,
    settings: ConsumerSettings,
    tenants: Option<Tenants>,
    options: ConsumerOptions,
    rows: PhantomData<fn() -> R>,
}

impl<R> fmt::Debug for ConsumerBuilder<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsumerBuilder").field("name", &self.handle.name).finish_non_exhaustive()
    }
}

impl ConsumerBuilder<Notification> {
    pub(crate) fn new(context: &Arc<Context>, node: &Arc<membership::Member>, name: &str) -> Result<Self> {
        Ok(Self {
            handle: ConsumerHandle::new(context, name)?,
            node: Arc::clone(node),
            settings: ConsumerSettings::default(),
            tenants: None,
            options: ConsumerOptions::default(),
            rows: PhantomData,
        })
    }

    /// Sets the databases that the consumer wants. Their ends are always delivered, whatever kinds of events are wanted. Default: all.
    pub fn filter(self, filter: Filter) -> Self {
        Self { settings: self.settings.filter(filter), ..self }
    }

    /// Makes the consumer follow the documents of a database ([`Changes::feed`](crate::changes::Changes::feed)), not the notifications.
    pub fn documents(self, feed: &Feed<Change>) -> ConsumerBuilder<Change> {
        let Self { handle, node, settings, tenants, options, .. } = self;
        let settings = settings.documents(feed.id.instance());
        ConsumerBuilder { handle, node, settings, tenants, options, rows: PhantomData }
    }
}

impl<R: ConsumedRow> ConsumerBuilder<R> {
    /// Sets where the consumer starts when it is created: with new rows, or at a cursor. [`Cursor::BEGINNING`](crate::Cursor::BEGINNING)
    /// delivers every id first. A consumer that exists continues where it is. Default: with new rows.
    pub fn start_from(self, start: impl Into<Start>) -> Self {
        Self { settings: self.settings.start(start.into()), ..self }
    }

    /// Sets how long the consumer may be without a live member before the janitor deletes it, if this builder creates the consumer. Only
    /// time during which a janitor works counts. Default: never; tombstones are then kept until the consumer has passed them.
    pub fn expire_after(self, expiry: Duration) -> Self {
        Self { settings: self.settings.expiry(Some(expiry)), ..self }
    }

    /// Divides the ids into tenants, which take turns on each node: at most `running_max` ids of one tenant run at once in a shard. Batches
    /// have no tenants: a member that works on batches is refused if tenants are set.
    pub fn tenants(self, running_max: usize, of: impl Fn(&[u8]) -> Bytes + Send + Sync + 'static) -> Self {
        Self { tenants: Some(Tenants { of: Arc::new(of), running_max }), ..self }
    }

    /// Sets how this member works.
    pub fn options(self, options: ConsumerOptions) -> Self {
        Self { options, ..self }
    }

    /// Creates the consumer unless it exists, and starts a member that works on ids side by side.
    ///
    /// # Errors
    ///
    /// The errors of [`ConsumerHandle::create`], and [`Error::Invalid`] if an option is outside its limits, or if the node is already a
    /// member. On failure nothing is changed.
    pub async fn run<H: Handler<Work<R>>>(self, handler: H) -> Result<Consumer> {
        let handler: Arc<dyn AnyHandler<R>> = Arc::new(Of(handler, PhantomData));
        self.start(Box::new(move |_| Arc::clone(&handler)), false).await
    }

    /// Does the same as [`ConsumerBuilder::run`], but with a separate handler for each shard.
    pub async fn run_with<H: Handler<Work<R>>>(
        self,
        make: impl Fn(ShardId) -> H + Send + Sync + 'static,
    ) -> Result<Consumer> {
        self.start(Box::new(move |shard| Arc::new(Of(make(shard), PhantomData))), false).await
    }

    /// Creates the consumer unless it exists, and starts a member that works on batches of rows, in the order of each shard. Each shard
    /// gets a clone of `handler`. Fails as [`ConsumerBuilder::run`] does, and with [`Error::Invalid`] if a debounce or tenants are set.
    pub async fn run_batches<H: Handler<Batch<R>> + Clone>(self, handler: H) -> Result<Consumer> {
        self.run_batches_with(move |_| handler.clone()).await
    }

    /// Does the same as [`ConsumerBuilder::run_batches`], but with a separate handler for each shard.
    pub async fn run_batches_with<H: Handler<Batch<R>>>(
        self,
        make: impl Fn(ShardId) -> H + Send + Sync + 'static,
    ) -> Result<Consumer> {
        self.start(Box::new(move |shard| Arc::new(Of(make(shard), PhantomData))), true).await
    }

    async fn start(self, factory: Factory<R>, is_ordered: bool) -> Result<Consumer> {
        let Self { handle, node, settings, tenants, options, .. } = self;
        options.check()?;
        if tenants.as_ref().is_some_and(|tenants| tenants.running_max == 0) {
            return Err(Error::invalid("running ids of a tenant", "the maximum is zero"));
        }
        if is_ordered && (tenants.is_some() || !options.debounce.is_zero()) {
            let what = if tenants.is_some() { "tenants" } else { "debounce" };
            let reason = "batches come in the order of the shard: leave this out, or use `run` to work on ids side by side";
            return Err(Error::invalid(what, reason));
        }
        let context = Arc::clone(&handle.context);
        if context.keys.prefix() != node.keys().prefix() {
            return Err(Error::invalid("consumer", "it belongs to a different bus than the node"));
        }
        // Nothing is created while a member still runs here, even one of a deleted consumer: `Worker::start` refuses, or awaits its end.
        handle.create_unless(&settings, Some(node.id())).await?;
        let hints = Arc::new(Listener::of_consumer(&context, &settings.feed(), Duration::MAX));
        let idle = Some(context.keys.consumer_idle(&handle.name).into());
        let pool = Pool { name: handle.name.pool().into(), idle };
        let (balance, what) = (options.balance.clone(), (settings.feed(), settings.filter.clone()));
        let member = Arc::new(Member::new(handle, what, (options, tenants), is_ordered));
        let work = Arc::new(Working { member: Arc::clone(&member), factory });
        let worker = Worker::start(&node, pool, work, balance).await?;
        // Until the node was a member, the consumer could expire, or be deleted without `force`.
        if let Err(error) = member.create(&settings).await {
            worker.shutdown().await?;
            return Err(error);
        }
        Ok(Consumer::new(worker, member, hints))
    }
}
