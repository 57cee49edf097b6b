//! [`Node`]: a process that shares the work of a bus; and [`NodeHandle`]: one handle to all of its roles.

use std::{fmt, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
#[cfg(any(feature = "cli", feature = "http"))]
use futures_util::{Stream, StreamExt, stream};
use parking_lot::Mutex;

use super::Bus;
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
    state::{
        context::Context,
        keys::{NodeId, Role},
        membership::{Member, NodeOptions, RoleGuard},
    },
};

/// A process that shares the work of a bus. It has one id and one heartbeat, whatever its roles.
///
/// Work is divided evenly among the nodes that have the role for it, and divided again whenever a node joins or leaves. If a node shows no
/// heartbeat for [`NodeOptions::expiry`](crate::NodeOptions::expiry), others consider it dead and take over its leases. A node that was
/// only paused notices this, gives up everything and joins again.
///
/// Clones and roles are handles to the same node. The heartbeat continues as long as one of them exists. [`Node::shutdown`] leaves the bus
/// at once, and so does the shutdown of a role if no other handle is left.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, NodeOptions, NotifierOptions, node::Role, store::Store};
///
/// let bus = Bus::open(&Store::memory(), BusOptions::default()).await?;
/// let node = bus.node(NodeOptions::default()).await?;
/// let notifier = node.notifier(NotifierOptions::default()).await?;
/// assert_eq!(notifier.partitions().len(), 64);
/// assert_eq!(bus.nodes().await?[0].roles, [Role::NOTIFIER]);
/// node.shutdown().await?;
/// assert!(bus.nodes().await?.is_empty());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "dropping it leaves the bus without its roles"]
pub struct Node {
    context: Arc<Context>,
    member: Arc<Member>,
}

impl Node {
    fn new(context: Arc<Context>, member: Arc<Member>) -> Self {
        Self { context, member }
    }

    /// Returns the id of the node.
    pub fn id(&self) -> NodeId {
        self.member.id()
    }

    /// Starts the notifier of the node, which takes its share of the partitions. A node can have only one notifier.
    pub async fn notifier(&self, options: NotifierOptions) -> Result<Notifier> {
        Notifier::start(&self.context, &self.member, options).await
    }

    /// Starts the janitor of the node. A node can have only one, and only one janitor of the bus works at a time.
    pub async fn janitor(&self, options: JanitorOptions) -> Result<Janitor> {
        Janitor::start(&self.context, &self.member, options).await
    }

    /// Returns a builder for a member of the consumer `name` on this node. Fails with [`Error::Invalid`](crate::Error::Invalid) if the name
    /// is empty or longer than 256 bytes.
    pub fn consumer(&self, name: &str) -> Result<ConsumerBuilder<Notification>> {
        ConsumerBuilder::new(&self.context, &self.member, name)
    }

    /// Lists a role that shares no work, such as [`Role::DISPATCHER`] or [`Role::HTTP`], in [`Bus::nodes`](super::Bus::nodes). Fails with
    /// [`Error::Invalid`](crate::Error::Invalid) if the role is already listed, or if it is that of a notifier, a janitor or a consumer:
    /// work would be assigned to a node that does none.
    pub async fn announce(&self, role: Role) -> Result<RoleGuard> {
        if role.shares_work() {
            return Err(Error::invalid(
                "role",
                format!("nodes with the role {role} share its work: start it instead"),
            ));
        }
        self.member.enter(role).await
    }

    /// Ends the shared work of the node, releases all its leases, and leaves the nodes of the bus. This ends the roles that share work;
    /// they may also be shut down separately.
    pub async fn shutdown(self) -> Result<()> {
        self.member.leave().await
    }
}

/// The options of the roles that [`Bus::start`] starts. By default these are a dispatcher, a notifier and a janitor.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StartOptions {
    /// Options of the node.
    pub node: NodeOptions,
    /// Options of the dispatcher.
    pub dispatcher: DispatcherOptions,
    /// Options of the notifier; `None` leaves folding to other nodes. Default: the default options.
    pub notifier: Option<NotifierOptions>,
    /// Options of the janitor; `None` leaves cleaning to other nodes. Default: the default options.
    pub janitor: Option<JanitorOptions>,
    /// The maximum time that [`NodeHandle::shutdown`] takes: two fifths for feeds, connections and subscribers, which are then cut off, and
    /// the rest for leaving the bus, which waits for work in progress. [`Duration::MAX`] sets no limit. Default: 10 s.
    pub shutdown_timeout: Duration,
}

crate::base::macros::setters!(StartOptions { node: NodeOptions, dispatcher: DispatcherOptions, notifier: Option<NotifierOptions>, janitor: Option<JanitorOptions>, shutdown_timeout: Duration });

impl Default for StartOptions {
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

impl StartOptions {
    /// Fails with [`Error::Invalid`] if an option is outside its limits. [`Bus::start`] makes this check before it changes anything.
    pub fn check(&self) -> Result<()> {
        self.node.check()?;
        self.dispatcher.check()?;
        self.notifier.as_ref().map_or(Ok(()), NotifierOptions::check)?;
        self.janitor.as_ref().map_or(Ok(()), JanitorOptions::check)
    }
}

/// Ends a part that serves clients on top of the roles, and that must therefore end before them.
pub(crate) type Ending = Box<dyn FnOnce() -> BoxFuture<'static, ()> + Send>;

/// The running roles of a process.
///
/// Dropping the handle stops all roles at once, and other nodes take over once this one has expired. [`NodeHandle::shutdown`] ends them
/// cleanly and releases their leases.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, Db, DbInstance, Filter, StartOptions, store::Store};
/// use tokio_stream::StreamExt;
///
/// let store = Store::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let running = bus.start(StartOptions::default()).await?;
/// let mut updates = running.dispatcher().subscribe(Filter::all()).stream();
///
/// let db = Db::new("orders".parse()?, DbInstance::new());
/// store.run(async |tx| Ok(bus.producer().created(&tx, &db))).await?;
/// assert!(updates.next().await.is_some());
/// running.shutdown().await
/// # }
/// ```
#[must_use = "dropping it stops all roles: nothing is delivered any more"]
pub struct NodeHandle {
    /// The endings of the parts that serve clients, in the order in which they are called.
    endings: Mutex<Vec<Ending>>,
    dispatcher: Dispatcher,
    listed: RoleGuard,
    notifier: Option<Notifier>,
    janitor: Option<Janitor>,
    node: Node,
    bus: Bus,
    shutdown_timeout: Duration,
}

impl Bus {
    /// Joins the bus as a new node; each call creates another one. A process needs a single node, from which it starts its roles.
    ///
    /// Fails with [`Error::Invalid`] if an option is outside its limits, or another live process has the same id. If that process may be
    /// dead, the call waits until that is certain.
    pub async fn node(&self, options: NodeOptions) -> Result<Node> {
        let Context { store, keys, config, stats, polls, nodes_seen, .. } = &*self.context;
        let member = Member::join(store, keys, Some(*config), (stats, polls, nodes_seen), options).await?;
        Ok(Node::new(Arc::clone(&self.context), member))
    }

    /// Starts the roles of a process, as a node of their own. One handle shuts all of them down cleanly. For handles to single roles, start
    /// them from [`Bus::node`] and [`Bus::dispatcher`].
    ///
    /// Fails with [`Error::Invalid`] if an option is outside its limits, and as [`Bus::node`] does.
    pub async fn start(&self, roles: StartOptions) -> Result<NodeHandle> {
        NodeHandle::start(self, roles).await
    }
}

impl NodeHandle {
    async fn start(bus: &Bus, roles: StartOptions) -> Result<Self> {
        roles.check()?;
        let StartOptions { node, dispatcher, notifier, janitor, shutdown_timeout } = roles;
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
                // Return the first failure: a node that cannot leave will expire.
                drop(node.shutdown().await);
                Err(error)
            }
        }
    }

    /// Returns the bus.
    pub fn bus(&self) -> &Bus {
        &self.bus
    }

    /// Returns the node, for further roles.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Returns a builder for a member of the consumer `name` in this process. Fails with [`Error::Invalid`] if the name is empty or longer
    /// than 256 bytes.
    pub fn consumer(&self, name: &str) -> Result<ConsumerBuilder<Notification>> {
        self.node.consumer(name)
    }

    /// Returns the dispatcher, which starts subscribers and mirrors.
    pub fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    /// Returns the notifier, if the process has one.
    pub fn notifier(&self) -> Option<&Notifier> {
        self.notifier.as_ref()
    }

    /// Returns the changes feeds of the databases' documents.
    pub fn changes(&self) -> Changes {
        self.bus.changes()
    }

    /// Registers `ending`, to be called before the roles end and after the endings that were added earlier.
    #[cfg(feature = "http")]
    pub(crate) fn end_first(&self, ending: Ending) {
        self.endings.lock().push(ending);
    }

    /// Ends everything in order: feeds with their last lines, connections, subscribers, then the work that is shared with other nodes. The
    /// leases are released, so that other nodes take over within a second. When the call returns, no part of the bus is running: streams
    /// have ended, even if items were waiting for them, and their cursors cover what was delivered.
    ///
    /// Fails with [`Error::GaveUp`] if a part takes longer than [`StartOptions::shutdown_timeout`] allows, and with any error of the store.
    /// Even after a failure the other parts are ended.
    pub async fn shutdown(self) -> Result<()> {
        let Self { endings, dispatcher, listed, notifier, janitor, node, bus, shutdown_timeout } = self;
        let (env, begun) = (bus.store().env(), bus.store().env().now());
        // Members of consumers wait for their runs for half of the handover time, 5 s by default. That must fit into the time that is left.
        let within = async |what, work: BoxFuture<'_, Result<()>>, until: Duration| {
            let after = until.saturating_sub(env.now().saturating_sub(begun));
            tokio::select! {
                biased;
                done = work => done,
                () = env.sleep(after) => Err(Error::GaveUp { what, after }),
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
        let what = "closing feeds and connections, which were cut off";
        let closed = within(what, Box::pin(close), shutdown_timeout / 5 * 2).await;
        // Leave the bus cleanly even if feeds or connections were cut off, so that other nodes need not wait until this one expires.
        let leave = async { tokio::join!(node.shutdown(), subscriptions.cut_off()).0 };
        let left = within("leaving the nodes of the bus", Box::pin(leave), shutdown_timeout).await;
        drop((listed, notifier, janitor));
        closed.and(left)
    }

    /// Runs until the process is interrupted or asked to terminate, or until the store takes no more writes, and then does the same as
    /// [`NodeHandle::shutdown`]. A second signal ends the roles at once, as dropping the handle would.
    ///
    /// Fails with the store's error if it failed, with [`Error::Io`] if signals cannot be received, and as [`NodeHandle::shutdown`] does.
    #[cfg(any(feature = "cli", feature = "http"))]
    pub async fn shutdown_on_signal(self) -> Result<()> {
        self.shutdown_on(&mut Self::signals()?, std::future::pending()).await
    }

    /// Returns a stream of the signals that ask the process to end: interrupts, and on Unix SIGTERM. From this call on, they do not end the
    /// process by themselves. Each stream gets every signal, so a process needs only one. Fails with [`Error::Io`].
    #[cfg(any(feature = "cli", feature = "http"))]
    pub fn signals() -> Result<impl Stream<Item = ()> + Send + Unpin> {
        #[cfg(unix)]
        let signals = {
            use tokio::signal::unix::{SignalKind, signal};
            let failed = |error| Error::Io { what: "signals", source: Arc::new(error) };
            let (interrupt, terminate) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()));
            let (mut interrupt, mut terminate) = (interrupt.map_err(failed)?, terminate.map_err(failed)?);
            stream::poll_fn(move |context| {
                let interrupted = interrupt.poll_recv(context);
                if interrupted.is_ready() { interrupted } else { terminate.poll_recv(context) }
            })
        };
        #[cfg(not(unix))]
        let signals = {
            let next = async |()| tokio::signal::ctrl_c().await.ok().map(|()| ((), ()));
            Box::pin(stream::unfold((), next).fuse())
        };
        Ok(signals)
    }

    /// Does the same as [`NodeHandle::shutdown_on_signal`], but takes the signals from `signals`, and also ends when `end` completes.
    #[cfg(any(feature = "cli", feature = "http"))]
    pub async fn shutdown_on(
        self,
        signals: &mut (impl Stream<Item = ()> + Unpin),
        end: impl Future<Output = ()>,
    ) -> Result<()> {
        let store_failed = self.bus.store().failed();
        let failure = tokio::select! {
            biased;
            Some(()) = signals.next() => None,
            error = store_failed => Some(error),
            () = end => None,
        };
        let ended = tokio::select! {
            biased;
            ended = self.shutdown() => ended,
            Some(()) = signals.next() => {
                tracing::warn!("second signal: ending at once; leases expire by themselves");
                Ok(())
            }
        };
        failure.map_or(ended, Err)
    }
}

impl fmt::Debug for NodeHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeHandle").field("node", &self.node.id()).finish_non_exhaustive()
    }
}
