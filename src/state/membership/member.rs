//! [`Member`]: a node in its own process, with its heartbeat and its watch over others.

use std::{fmt, sync::Arc};

use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};

use super::{
    NodeOptions,
    heartbeat::{Claim, Heartbeat},
    neighbours::NeighbourWatch,
    shared::{Command, Entered, RoleGuard, Roles, Shared},
};
use crate::{
    base::{
        error::{Error, Result},
        tasks::in_time,
    },
    state::{
        keys::{Config, Keys, NodeId, Role},
        last_seen::NodesSeen,
        polls::Polls,
        stats::Stats,
    },
    store::Store,
};

/// The maximum number of commands that wait for the heartbeat. The sender of another one has to wait.
const COMMANDS_MAX: usize = 16;

/// A node in its own process. Dropping it ends the heartbeat at once, and others consider the node dead after its expiry.
///
/// Only handles own a member. The node's tasks own only the [`Shared`] state, so dropping the last handle ends the node even if an aborted
/// task is still running.
pub(crate) struct Member {
    shared: Arc<Shared>,
    /// The heartbeat, and the watch over other nodes.
    tasks: Mutex<JoinSet<()>>,
}

impl Member {
    /// Joins the nodes of the bus, whose configuration must stay `config`. Fails with [`Error::Invalid`] if another process is alive under
    /// the same id. If a process under this id has died, waits until that is certain.
    pub async fn join(
        store: &Store,
        keys: &Keys,
        config: Option<Config>,
        (stats, polls, seen): (&Arc<Stats>, &Arc<Polls>, &Arc<NodesSeen>),
        options: NodeOptions,
    ) -> Result<Arc<Self>> {
        options.check()?;
        let (commands, received) = mpsc::channel(COMMANDS_MAX);
        let shared = Arc::new(Shared {
            id: options.id.unwrap_or_else(|| NodeId::random(store.env())),
            store: store.clone(),
            keys: keys.clone(),
            config,
            options,
            stats: Arc::clone(stats),
            polls: Arc::clone(polls),
            seen: Arc::clone(seen),
            roles: watch::Sender::new(Roles::default()),
            commands,
            registration: watch::Sender::new(None),
            stop: watch::Sender::new(false),
            versions: watch::Sender::default(),
        });
        let mut heartbeat = Heartbeat::new(&shared);
        let mut known = false;
        while let Claim::Taken { changed } = heartbeat.write().await? {
            if known && changed {
                let id = shared.id;
                return Err(Error::invalid(
                    "node id",
                    format!("another process is node {id}: give each its own id, or use random ids"),
                ));
            }
            known = true;
            store.env().sleep(shared.options.pace()).await;
        }
        let mut tasks = JoinSet::new();
        tasks.spawn(heartbeat.run(received));
        tasks.spawn(NeighbourWatch::new(&shared).run());
        Ok(Arc::new(Self { shared, tasks: Mutex::new(tasks) }))
    }

    pub fn id(&self) -> NodeId {
        self.shared.id
    }

    pub fn keys(&self) -> &Keys {
        &self.shared.keys
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Does the same as [`Shared::enter`], without a limit or a worker.
    pub async fn enter(&self, role: Role) -> Result<RoleGuard> {
        self.shared.enter(role, Entered { max: u32::MAX, idle: None, worker: None }).await
    }

    /// Ends the workers of the node, which release what they hold, and removes the node's row.
    pub async fn leave(&self) -> Result<()> {
        self.shared.stop.send_replace(true);
        let mut roles = self.shared.roles.subscribe();
        let left = roles.wait_for(|roles| roles.workers().next().is_none()).await;
        drop(left.expect("the sender is in what is shared"));
        let left = in_time(
            self.shared.store.env(),
            "leaving the nodes of the bus",
            self.shared.command(Command::Leave),
        )
        .await;
        // After this returns, the caller may close the store at once, and open it again.
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        tasks.shutdown().await;
        left
    }

    /// Whether the node was asked to leave.
    pub fn has_left(&self) -> bool {
        *self.shared.stop.borrow()
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Member").field(&self.id()).finish()
    }
}
