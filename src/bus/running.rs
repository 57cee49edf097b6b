//! [`Running`]: one handle on all roles of a process.

use std::{fmt, time::Duration};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;

use super::{Bus, Node, node::Announced};
use crate::{
    base::{
        error::{Error, Result},
        notification::Notification,
    },
    roles::{
        changes::Changes,
        consumer::ConsumerBuilder,
        dispatcher::{Dispatcher, DispatcherOptions},
        janitor::{Janitor, JanitorOptions},
        notifier::{Notifier, NotifierOptions},
    },
    state::{keys::Role, membership::NodeOptions},
};

/// The roles of a process, and their options. By default a node has all roles, each with its defaults.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Roles {
    /// Options of the node.
    pub node: NodeOptions,
    /// Options of the dispatcher.
    pub dispatcher: DispatcherOptions,
    /// Options of the notifier; `None` leaves folding to other nodes. Default: with the default options.
    pub notifier: Option<NotifierOptions>,
    /// Options of the janitor; `None` leaves cleaning to other nodes. Default: with the default options.
    pub janitor: Option<JanitorOptions>,
    /// The most time that [`Running::shutdown`] takes: one half for feeds, connections and subscribers, which are cut off after it, and
    /// one half for leaving the bus. [`Duration::MAX`] sets no limit. Default: 10 s.
    pub shutdown_timeout: Duration,
}

crate::base::macros::setters!(Roles { node: NodeOptions, dispatcher: DispatcherOptions, notifier: Option<NotifierOptions>, janitor: Option<JanitorOptions>, shutdown_timeout: Duration });

impl Default for Roles {
    fn default() -> Self {
        Self {
            node: NodeOptions::default(),
            dispatcher: DispatcherOptions::default(),
            notifier: Some(NotifierOptions::default()),
            janitor: Some(JanitorOptions::default()),
            shutdown_timeout: Duration::from_secs(10),
        }
    }
}

/// Ends a part that serves clients on top of the roles, and has to end before them.
pub(crate) type Ending = Box<dyn FnOnce() -> BoxFuture<'static, ()> + Send>;

/// The running roles of a process.
///
/// Dropping it stops all of them at once, and other nodes take over when this one has expired. [`Running::shutdown`] ends them in
/// order and releases their leases.
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
/// let db = Db::new("orders".parse()?, DbInstance::new());
/// store.run(async |tx| Ok(bus.producer().created(&tx, &db))).await?;
/// assert!(updates.next().await.is_some());
/// running.shutdown().await
/// # }
/// ```
#[must_use = "dropping it stops all roles: nothing is delivered any more"]
pub struct Running {
    /// Ends what serves clients, in this order.
    endings: Mutex<Vec<Ending>>,
    dispatcher: Dispatcher,
    listed: Announced,
    notifier: Option<Notifier>,
    janitor: Option<Janitor>,
    node: Node,
    bus: Bus,
    shutdown_timeout: Duration,
}

impl Bus {
    /// Starts the roles of a process, as a node of its own. One handle ends them in order. To have handles on single roles,
    /// start them from [`Bus::node`] and [`Bus::dispatcher`].
    ///
    /// Fails with [`Error::Invalid`] if an option is out of its limits, and as [`Bus::node`] does.
    pub async fn start(&self, roles: Roles) -> Result<Running> {
        Running::start(self, roles).await
    }
}

impl Running {
    async fn start(bus: &Bus, roles: Roles) -> Result<Self> {
        let Roles { node, dispatcher, notifier, janitor, shutdown_timeout } = roles;
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
            let listed = node.announce(Role::DISPATCHER).await?;
            Ok((notifier, janitor, listed, bus.dispatcher(dispatcher).await?))
        };
        match begun.await {
            Ok((notifier, janitor, listed, dispatcher)) => {
                let (endings, bus) = (Mutex::default(), bus.clone());
                Ok(Self { endings, dispatcher, listed, notifier, janitor, node, bus, shutdown_timeout })
            }
            Err(error) => {
                // The first failure is returned; a node that cannot leave expires.
                drop(node.shutdown().await);
                Err(error)
            }
        }
    }

    /// The bus.
    pub fn bus(&self) -> &Bus {
        &self.bus
    }

    /// The node, for further roles.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// A member of the consumer `name`, which this process is to run. Fails with [`Error::Invalid`] if the name is empty or longer than 256
    /// bytes.
    pub fn consumer(&self, name: &str) -> Result<ConsumerBuilder<Notification>> {
        self.node.consumer(name)
    }

    /// The dispatcher, which starts subscribers and mirrors.
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

    /// Calls `ending` before the roles end, after endings that were added before.
    #[cfg(feature = "http")]
    pub(crate) fn end_first(&self, ending: Ending) {
        self.endings.lock().push(ending);
    }

    /// Ends everything in order: feeds with their last lines, connections, subscribers, then the work that is shared with other nodes. It
    /// releases the leases, so that other nodes take over at once. When it returns, nothing of the bus runs any more: streams end, however
    /// much waits for them, and their cursors cover what was delivered.
    ///
    /// Fails with [`Error::GaveUp`] if a part takes longer than [`Roles::shutdown_timeout`] allows, and with the failure of the
    /// store. After a failure the rest is ended as well.
    pub async fn shutdown(self) -> Result<()> {
        let Self { endings, dispatcher, listed, notifier, janitor, node, bus, shutdown_timeout } = self;
        let half = shutdown_timeout / 2;
        let within = async |what, work: BoxFuture<'_, Result<()>>| {
            tokio::select! {
                biased;
                done = work => done,
                () = bus.store().env().sleep(half) => Err(Error::GaveUp { what, after: half }),
            }
        };
        let endings = endings.into_inner();
        let subscriptions = dispatcher.subscriptions();
        let close = async move {
            for ending in endings {
                ending().await;
            }
            dispatcher.shutdown().await;
            Ok(())
        };
        let closed = within("closing feeds and connections, which are cut off", Box::pin(close)).await;
        // Even if these were cut off, leave in order, so that other nodes need not wait until this one expires.
        let leave = async { tokio::join!(node.shutdown(), subscriptions.cut_off()).0 };
        let left = within("leaving the nodes of the bus", Box::pin(leave)).await;
        drop((listed, notifier, janitor));
        closed.and(left)
    }

    /// Runs until an interrupt or a request to terminate, or until the store takes no more writes; then
    /// does the same as [`Running::shutdown`]. A second signal ends it at once, as dropping it would.
    ///
    /// Fails with the failure of the store, with [`Error::Io`] if signals cannot be received, and as [`Running::shutdown`] does.
    #[cfg(any(feature = "cli", feature = "http"))]
    pub async fn shutdown_on_signal(self) -> Result<()> {
        self.shutdown_on_signal_or(std::future::pending()).await
    }

    /// As [`Running::shutdown_on_signal`], but also ends when `end` completes.
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
                tracing::warn!("asked to end again: ended at once; its leases expire by themselves");
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
