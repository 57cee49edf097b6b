//! [`Node`]: a process that takes part in the work of a bus.

use std::sync::Arc;

use crate::{
    base::error::Result,
    roles::{
        dispatcher::{Dispatcher, DispatcherOptions},
        group::{Consumer, ConsumerOptions, Group, Observer},
        janitor::{Janitor, JanitorOptions},
        notifier::{Notifier, NotifierOptions},
    },
    state::{
        context::Context,
        feed::FeedRow,
        keys::{NodeId, Role, ShardId},
        membership::{Member, RoleGuard},
        named_cursor::NamedCursor,
    },
};

/// A process that takes part in the work of a bus, under one id and with one heartbeat, whatever its roles.
///
/// Work is divided evenly among the nodes that have the role for it, and again whenever one comes or goes. A node that
/// others have not heard of for [`NodeOptions::expiry`](crate::NodeOptions::expiry) is taken for dead, and what it holds is
/// taken over; if it was only paused, it finds out, gives everything up and joins again.
///
/// Clones are handles on the same node. The heartbeat goes on as long as one of them, or a role that divides work, is
/// there; [`Node::shutdown`] leaves at once.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, NodeOptions, NotifierOptions, node::Role, store::Database};
///
/// let bus = Bus::open(&Database::memory(), BusOptions::default()).await?;
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
    /// What the roles share.
    context: Arc<Context>,
    /// Its membership.
    member: Arc<Member>,
}

/// A role that a node lists; until it is dropped, and as long as the node is there.
#[derive(Debug)]
#[must_use = "dropping it takes the role off the list"]
pub struct Announced {
    /// The role.
    _role: RoleGuard,
}

impl Node {
    /// The node of `member`.
    pub(super) fn new(context: Arc<Context>, member: Arc<Member>) -> Self {
        Self { context, member }
    }

    /// Which node it is.
    pub fn id(&self) -> NodeId {
        self.member.id()
    }

    /// Starts a notifier on the node, which has at most one. It takes its part of the partitions.
    pub async fn notifier(&self, options: NotifierOptions) -> Result<Notifier> {
        Notifier::start(&self.context, &self.member, options).await
    }

    /// Starts a dispatcher on the node, which has at most one. It divides no work; the node lists it.
    pub async fn dispatcher(&self, options: DispatcherOptions) -> Result<Dispatcher> {
        let role = self.member.enter(Role::DISPATCHER).await?;
        Dispatcher::start(Arc::clone(&self.context), options, Some(role)).await
    }

    /// Starts a janitor on the node, which has at most one. Of all nodes that have one, one works at a time.
    pub async fn janitor(&self, options: JanitorOptions) -> Result<Janitor> {
        Janitor::start(&self.context, &self.member, options).await
    }

    /// Starts a consumer of `group` on the node, which has at most one of each group. It takes its part of the shards; `factory`
    /// makes an observer for each of them.
    ///
    /// Fails with [`Error::NoGroup`](crate::Error::NoGroup) if the group was not created, and with
    /// [`Error::Invalid`](crate::Error::Invalid) if an option is out of its limits.
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
        Consumer::start(group, &self.member, factory, options).await
    }

    /// The cursor `name` of this node, for a durable subscriber that each node has for itself. It is found again after a restart
    /// only if the node has the same id then ([`NodeOptions::id`](crate::NodeOptions::id)).
    ///
    /// Fails with [`Error::Invalid`](crate::Error::Invalid) if the name is empty or longer than 256 bytes.
    pub fn cursor(&self, name: &str) -> Result<NamedCursor> {
        NamedCursor::new(&self.context, Some(&self.id()), name)
    }

    /// Lists a role for which no work is divided, such as [`Role::HTTP`], for anyone who looks at
    /// [`Bus::nodes`](super::Bus::nodes). Fails with [`Error::Invalid`](crate::Error::Invalid) if it is listed already.
    pub async fn announce(&self, role: Role) -> Result<Announced> {
        Ok(Announced { _role: self.member.enter(role).await? })
    }

    /// Ends the work that the node shares with others, releases all that it holds, and leaves the nodes of the bus.
    /// Roles that divide work end by this; shutting them down as well is fine.
    pub async fn shutdown(self) -> Result<()> {
        self.member.leave().await
    }
}
