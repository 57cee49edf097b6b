//! [`Running`]: all roles of a process behind one handle.

use std::{
    fmt,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::task::JoinSet;

use super::{Bus, Node, canary, status::BusStatus};
use crate::{
    base::error::{Error, Result},
    roles::{
        changes::Changes,
        dispatcher::{Dispatcher, DispatcherOptions},
        janitor::{Janitor, JanitorOptions},
        notifier::{Notifier, NotifierOptions},
    },
    state::membership::NodeOptions,
};

/// Which roles a process takes, and how they work. The default is a node with all roles, each with its defaults.
#[derive(Debug, Clone)]
pub struct Roles {
    /// How the node lives.
    pub node: NodeOptions,
    /// How it delivers to the subscribers of this process.
    pub dispatcher: DispatcherOptions,
    /// How it folds events into the feed; `None` leaves that to other nodes. Default: with the default options.
    pub notifier: Option<NotifierOptions>,
    /// How it drops what is old; `None` leaves that to other nodes. Default: with the default options.
    pub janitor: Option<JanitorOptions>,
    /// How often the node records an event of its own, and waits for its delivery: one that does not come back keeps the node from being
    /// ready, and how long it took is a metric. It costs a transaction, a fold and a row each time, and subscribers of everything see
    /// the database `_notibus/canary` updated as often. Default: never.
    pub canary_interval: Option<Duration>,
    /// How long [`Running::shutdown`] takes at most: one half for feeds, connections and subscribers, which are cut off then, and
    /// one half for leaving the bus. [`Duration::MAX`] means "as long as it takes". Default: 10 s.
    pub shutdown_timeout: Duration,
}

impl Default for Roles {
    fn default() -> Self {
        Self {
            node: NodeOptions::default(),
            dispatcher: DispatcherOptions::default(),
            notifier: Some(NotifierOptions::default()),
            janitor: Some(JanitorOptions::default()),
            canary_interval: None,
            shutdown_timeout: Duration::from_secs(10),
        }
    }
}

/// What serves clients on top of the roles, and has to end before them.
pub(crate) type Ending = Box<dyn FnOnce() -> BoxFuture<'static, ()> + Send>;

/// The roles of a process at work.
///
/// Dropping it stops all of them at once, and other nodes take over when this one has expired. [`Running::shutdown`] ends them in
/// order and releases what they hold.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, Db, DbInstance, Filter, Roles, store::Database};
/// use tokio_stream::StreamExt;
///
/// let store = Database::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let running = bus.start(Roles::default()).await?;
/// let mut updates = running.dispatcher().subscribe(Filter::all()).stream();
///
/// let db = Db::new("orders".parse()?, DbInstance::random(store.env()));
/// store.run(async |tx| Ok(bus.producer().created(&tx, &db))).await?;
/// assert!(updates.next().await.is_some());
/// running.shutdown().await
/// # }
/// ```
#[must_use = "dropping it stops all roles: nothing is delivered any more"]
pub struct Running {
    /// Records events of its own, if that is wanted.
    canary: JoinSet<()>,
    /// What serves clients, in the order in which it ends.
    endings: Mutex<Vec<Ending>>,
    /// Delivers.
    dispatcher: Dispatcher,
    /// Folds.
    notifier: Option<Notifier>,
    /// Cleans up.
    janitor: Option<Janitor>,
    /// Its membership.
    node: Node,
    /// The bus.
    bus: Bus,
    /// [`Roles::shutdown_timeout`].
    shutdown_timeout: Duration,
}

impl Bus {
    /// Starts the roles of a process, as a node of its own, behind one handle that ends them in order. A program that wants a part of
    /// them under handles of their own starts them from [`Bus::node`].
    ///
    /// Fails with [`Error::Invalid`] if an option is out of its limits, and as [`Bus::node`] does.
    pub async fn start(&self, roles: Roles) -> Result<Running> {
        Running::start(self, roles).await
    }
}

impl Running {
    /// Starts `roles` on a node of their own.
    async fn start(bus: &Bus, roles: Roles) -> Result<Self> {
        let Roles { node, dispatcher, notifier, janitor, canary_interval, shutdown_timeout } = roles;
        if canary_interval.is_some_and(|interval| interval.is_zero()) {
            return Err(Error::invalid("canary interval", "it is zero"));
        }
        if let Some(options) = &notifier {
            options.check()?;
        }
        if let Some(options) = &janitor {
            options.check()?;
        }
        let node = bus.node(node).await?;
        let begun = async {
            let notifier = match notifier {
                Some(options) => Some(node.notifier(options).await?),
                None => None,
            };
            let janitor = match janitor {
                Some(options) => Some(node.janitor(options).await?),
                None => None,
            };
            Ok((notifier, janitor, node.dispatcher(dispatcher).await?))
        };
        match begun.await {
            Ok((notifier, janitor, dispatcher)) => {
                let mut canary = JoinSet::new();
                if let Some(interval) = canary_interval {
                    canary.spawn(canary::run(bus.clone(), dispatcher.subscriptions(), interval));
                }
                let (endings, bus) = (Mutex::default(), bus.clone());
                Ok(Self { canary, endings, dispatcher, notifier, janitor, node, bus, shutdown_timeout })
            }
            Err(error) => {
                // The first failure is the one to tell; a node that cannot leave expires.
                drop(node.shutdown().await);
                Err(error)
            }
        }
    }

    /// The bus.
    pub fn bus(&self) -> &Bus {
        &self.bus
    }

    /// The node, from which consumers of groups are started.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The dispatcher, which subscribers, mirrors and triggers are started from.
    pub fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    /// The notifier, if the process has one.
    pub fn notifier(&self) -> Option<&Notifier> {
        self.notifier.as_ref()
    }

    /// The changes feeds of the databases' documents.
    pub fn changes(&self) -> Changes {
        self.bus.changes()
    }

    /// How the bus is, as [`Bus::status`] says.
    pub async fn status(&self) -> Result<BusStatus> {
        self.bus.status().await
    }

    /// Has `ending` run before the roles end, after those that were added before it.
    #[cfg(feature = "http")]
    pub(crate) fn end_first(&self, ending: Ending) {
        self.endings.lock().unwrap_or_else(PoisonError::into_inner).push(ending);
    }

    /// Ends everything in order: feeds with their last lines, connections, subscribers after what they have been given, then the work
    /// that is divided among the nodes. Leases are released, so that other nodes go on at once.
    ///
    /// Fails with [`Error::GaveUp`] of what has taken longer than [`Roles::shutdown_timeout`] allows, and with what the store has
    /// failed with. Whatever failed, the rest is ended as well.
    pub async fn shutdown(self) -> Result<()> {
        let Self { mut canary, endings, dispatcher, notifier, janitor, node, bus, shutdown_timeout } = self;
        let half = shutdown_timeout / 2;
        let within = async |what, work: BoxFuture<'_, Result<()>>| {
            tokio::select! {
                biased;
                done = work => done,
                () = bus.store().env().sleep(half) => Err(Error::GaveUp { what, after: half }),
            }
        };
        let endings = endings.into_inner().unwrap_or_else(PoisonError::into_inner);
        let close = async move {
            canary.shutdown().await;
            for ending in endings {
                ending().await;
            }
            dispatcher.shutdown().await;
            Ok(())
        };
        let closed = within("closing feeds and connections, which are cut off", Box::pin(close)).await;
        // Whatever became of those, the others should not have to wait until this node expires.
        let leave = async {
            node.shutdown().await?;
            bus.store().clear_finished_ids().await
        };
        let left = within("leaving the nodes of the bus", Box::pin(leave)).await;
        drop((notifier, janitor));
        closed.and(left)
    }

    /// Runs until the process is asked to end, by an interrupt or a request to terminate, or until its store takes no more writes; then
    /// does what [`Running::shutdown`] does. A second signal ends it at once, as dropping it would.
    ///
    /// Fails with what the store has failed with, with [`Error::Io`] if signals cannot be had, and as [`Running::shutdown`] does.
    #[cfg(any(feature = "cli", feature = "http"))]
    pub async fn shutdown_on_signal(self) -> Result<()> {
        self.shutdown_on_signal_or(std::future::pending()).await
    }

    /// As [`Running::shutdown_on_signal`], and also once `end` has come.
    #[cfg(any(feature = "cli", feature = "http"))]
    pub async fn shutdown_on_signal_or(self, end: impl Future<Output = ()>) -> Result<()> {
        let failed = |error| Error::Io { what: "signals", source: std::sync::Arc::new(error) };
        let mut signals = super::signals::Signals::listen().map_err(failed)?;
        let store_failed = self.bus.store().failed();
        let failure = tokio::select! {
            biased;
            () = signals.next() => None,
            error = store_failed => Some(error),
            () = end => None,
        };
        let ended = tokio::select! {
            biased;
            ended = self.shutdown() => ended,
            () = signals.next() => {
                tracing::warn!("asked to end again: ended at once; what it held expires by itself");
                Ok(())
            }
        };
        failure.map_or(ended, Err)
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("node", &self.node.id()).finish_non_exhaustive()
    }
}
