//! [`Node`]: a process that shares the work of a bus.

use std::sync::Arc;

use crate::{
    base::{error::Result, notification::Notification},
    roles::{
        consumer::ConsumerBuilder,
        janitor::{Janitor, JanitorOptions},
        notifier::{Notifier, NotifierOptions},
    },
    state::{
        context::Context,
        keys::{NodeId, Role},
        membership::{Member, RoleGuard},
    },
};

/// A process that shares the work of a bus, under one id and with one heartbeat, whatever its roles.
///
/// Work is divided evenly among the nodes that have the role for it, and again whenever one comes or goes. If a node shows no
/// heartbeat for [`NodeOptions::expiry`](crate::NodeOptions::expiry), others take it for dead and take over its
/// leases. If it was only paused, it notices that, gives everything up and joins again.
///
/// Its clones and its roles are handles on the same node. The heartbeat goes on while one of them exists. [`Node::shutdown`] leaves
/// at once, and so does the shutdown of a role if nothing else is left of the node.
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
    context: Arc<Context>,
    member: Arc<Member>,
}

/// A role that a node lists, until this or the node is dropped.
#[derive(Debug)]
#[must_use = "dropping it takes the role off the list"]
pub struct Announced {
    _role: RoleGuard,
}

impl Node {
    pub(super) fn new(context: Arc<Context>, member: Arc<Member>) -> Self {
        Self { context, member }
    }

    /// The id of the node.
    pub fn id(&self) -> NodeId {
        self.member.id()
    }

    /// Starts the notifier of the node; there can be one. It takes its share of the partitions.
    pub async fn notifier(&self, options: NotifierOptions) -> Result<Notifier> {
        Notifier::start(&self.context, &self.member, options).await
    }

    /// Starts the janitor of the node; there can be one. One of all janitors of the bus works at a time.
    pub async fn janitor(&self, options: JanitorOptions) -> Result<Janitor> {
        Janitor::start(&self.context, &self.member, options).await
    }

    /// A member of the consumer `name`, which this node is to run. Fails with [`Error::Invalid`](crate::Error::Invalid) if the name is
    /// empty or longer than 256 bytes.
    pub fn consumer(&self, name: &str) -> Result<ConsumerBuilder<Notification>> {
        ConsumerBuilder::new(&self.context, &self.member, name)
    }

    /// Lists a role that shares no work, such as [`Role::DISPATCHER`] and [`Role::HTTP`], in
    /// [`Bus::nodes`](super::Bus::nodes). Fails with [`Error::Invalid`](crate::Error::Invalid) if it is listed already.
    pub async fn announce(&self, role: Role) -> Result<Announced> {
        Ok(Announced { _role: self.member.enter(role).await? })
    }

    /// Ends the shared work of the node, releases all its leases, and leaves the nodes of the bus.
    /// This ends its roles that share work; they may be shut down as well.
    pub async fn shutdown(self) -> Result<()> {
        self.member.leave().await
    }
}
