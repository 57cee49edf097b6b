//! [`Consumer`]: the one durable mechanism. A named consumer works through a feed, on any number of nodes, and survives crashes.
//!
//! A row is the newest of its id, so the feed is the backlog. Stored are only the **checkpoint** of each shard, up to which everything is
//! finished, and a **key** for each id that is not: because its work failed, stalls or runs for long, was committed out of order, or was
//! asked for again. No row is ever copied.
//!
//! ```text
//!  shard 1   ─ a ── b ── c ── d ── e ─────►         no key:  done if the newest row is at or before C
//!                        C              read        a key:   done if the newest row is at or before `done`,
//!  keys      b {done, due, attempts, again}                  and nobody has asked for it again
//! ```
//!
//! # Invariants
//!
//! 1. Whatever is written of a shard is written under its lease, but for what an operator asks: a reset takes the leases away; a discard, and a
//!    request to work again, write the key of an id.
//! 2. Between resets a checkpoint never goes back, and passes an unfinished row only while the key of its id stands. Only the shard's task moves
//!    it outside of a handler's transaction, and only the shard's task removes keys.
//! 3. An id never runs twice at once. A run that ends without success writes what its transactions read, before anything else is called for
//!    the id.
//! 4. At any time the checkpoints are those of the shards of one topology entry. Their successors work only on keys that they have left.
//!    The janitor keeps that entry and all later ones, although they have no rows.
//! 5. Who sets the position of a consumer reads the horizon of the feed, and conflicts with a janitor that has read the consumers before.
//!
//! # Cost
//!
//! A shard saves its checkpoint once per [`ConsumerOptions::checkpoint_interval`] while rows are finished, and not at all otherwise: what
//! nobody wants is passed by the low watermark, one small write per consumer and half a minute. Rows are read once per node, however many
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

/// Describes a member of a consumer, and starts it: [`NodeHandle::consumer`](crate::NodeHandle::consumer).
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
#[must_use = "it does nothing before it is run"]
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

    /// The databases that it wants. The ends of databases come in any case, whatever kinds of events are wanted. Default: all.
    pub fn filter(self, filter: Filter) -> Self {
        Self { settings: self.settings.filter(filter), ..self }
    }

    /// Lets it follow the documents of a database ([`Changes::feed`](crate::changes::Changes::feed)) instead of the notifications.
    pub fn documents(self, feed: &Feed<Change>) -> ConsumerBuilder<Change> {
        let Self { handle, node, settings, tenants, options, .. } = self;
        let settings = settings.documents(feed.id.instance());
        ConsumerBuilder { handle, node, settings, tenants, options, rows: PhantomData }
    }
}

impl<R: ConsumedRow> ConsumerBuilder<R> {
    /// Where it starts when it is created: with new rows, or at a cursor. [`Cursor::BEGINNING`](crate::Cursor::BEGINNING) brings every id first.
    /// A consumer that exists goes on where it is. Default: with new rows.
    pub fn start_from(self, start: impl Into<Start>) -> Self {
        Self { settings: self.settings.start(start.into()), ..self }
    }

    /// The time without a living member after which the janitor deletes it, for a consumer that is created. Only time during which a
    /// janitor works counts. Default: never; it keeps the tombstones of databases that it has to learn of.
    pub fn expire_after(self, expiry: Duration) -> Self {
        Self { settings: self.settings.expiry(Some(expiry)), ..self }
    }

    /// Divides the ids into tenants, which take turns on each node: at most `running_max` ids of one tenant run at once in a shard.
    /// Batches have none: their members are refused with them.
    pub fn tenants(self, running_max: usize, of: impl Fn(&[u8]) -> Bytes + Send + Sync + 'static) -> Self {
        Self { tenants: Some(Tenants { of: Arc::new(of), running_max }), ..self }
    }

    /// How this member works.
    pub fn options(self, options: ConsumerOptions) -> Self {
        Self { options, ..self }
    }

    /// Creates the consumer unless it exists, and starts a member that works on ids side by side.
    ///
    /// # Errors
    ///
    /// As [`ConsumerHandle::create`]; and [`Error::Invalid`] if an option is out of its limits, or the node is a member already. Then nothing
    /// is changed.
    pub async fn run<H: Handler<Work<R>>>(self, handler: H) -> Result<Consumer> {
        let handler: Arc<dyn AnyHandler<R>> = Arc::new(Of(handler, PhantomData));
        self.start(Box::new(move |_| Arc::clone(&handler)), false).await
    }

    /// As [`ConsumerBuilder::run`], with a handler for each shard.
    pub async fn run_with<H: Handler<Work<R>>>(
        self,
        make: impl Fn(ShardId) -> H + Send + Sync + 'static,
    ) -> Result<Consumer> {
        self.start(Box::new(move |shard| Arc::new(Of(make(shard), PhantomData))), false).await
    }

    /// Creates the consumer unless it exists, and starts a member that works on batches of rows, in the order of each shard. Each shard has
    /// a clone of `handler`. Fails as [`ConsumerBuilder::run`] does, and with [`Error::Invalid`] if ids were to be debounced, or have tenants.
    pub async fn run_batches<H: Handler<Batch<R>> + Clone>(self, handler: H) -> Result<Consumer> {
        self.run_batches_with(move |_| handler.clone()).await
    }

    /// As [`ConsumerBuilder::run_batches`], with a handler for each shard.
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
            return Err(Error::invalid("running ids of a tenant", "they are zero"));
        }
        if is_ordered && (tenants.is_some() || !options.debounce.is_zero()) {
            let what = if tenants.is_some() { "tenants" } else { "debounce" };
            let reason = "batches come in the order of the shard: leave it out, or work on ids side by side, with `run`";
            return Err(Error::invalid(what, reason));
        }
        let context = Arc::clone(&handle.context);
        if context.keys.prefix() != node.keys().prefix() {
            return Err(Error::invalid("consumer", "it belongs to another bus than the node"));
        }
        // A node that is a member of a consumer that was deleted is refused, or waits for the end of the member, before it creates anything.
        let is_created = handle.create_unless(&settings, Some(node.id())).await?.is_some();
        let hints = Arc::new(Listener::of_consumer(&context, &settings.feed(), Duration::MAX));
        let idle = Some(context.keys.consumer_idle(&handle.name).into());
        let pool = Pool { name: handle.name.pool().into(), idle };
        let (balance, what) = (options.balance.clone(), (settings.feed(), settings.filter.clone()));
        let member = Arc::new(Member::new(handle, what, (options, tenants), is_ordered));
        let work = Arc::new(Working { member: Arc::clone(&member), factory });
        let worker = Worker::start(&node, pool, work, balance).await?;
        if !is_created && let Err(error) = member.create(&settings).await {
            worker.shutdown().await?;
            return Err(error);
        }
        Ok(Consumer::new(worker, member, hints))
    }
}
