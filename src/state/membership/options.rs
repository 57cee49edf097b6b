//! The options of a node's heartbeat, and of its share of the work in a [`Pool`].

use std::{sync::Arc, time::Duration};

use bytes::Bytes;

use crate::{
    base::error::{Error, Result},
    state::keys::NodeId,
};

/// The longest time between two polls of other nodes.
const PACE_MAX: Duration = Duration::from_secs(3);

/// A pool of resources that nodes divide.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    /// The name of the pool in the keys of its leases. The nodes that divide it have the role [`role_of_pool`].
    pub name: Arc<str>,
    /// The key of the note that no node has the role. Each publication of the role removes it, so no node joins unseen.
    pub idle: Option<Bytes>,
}

/// How a node shows that it lives. Nodes of a bus can have different times: each stores how long others have to wait
/// for it. [`Duration::MAX`] means "never".
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeOptions {
    /// The node's id; no other process may use it at the same time. Default: a random one.
    pub id: Option<NodeId>,
    /// How often the node writes its heartbeat. Default: 2 s.
    pub heartbeat: Duration,
    /// After how long without a heartbeat others take this node for dead, by the observer's clock; at least twice the
    /// heartbeat. With a shorter expiry others take its work over sooner, and sooner by mistake. Default: 5 s.
    pub expiry: Duration,
}

crate::base::macros::setters!(NodeOptions { id: Option<NodeId>, heartbeat: Duration, expiry: Duration });

impl Default for NodeOptions {
    fn default() -> Self {
        Self { id: None, heartbeat: Duration::from_secs(2), expiry: Duration::from_secs(5) }
    }
}

impl NodeOptions {
    /// Fails if an option is out of its limits.
    pub(crate) fn check(&self) -> Result<()> {
        if self.heartbeat.is_zero() {
            return Err(Error::invalid("heartbeat", "it is zero"));
        }
        if self.expiry < self.heartbeat.saturating_mul(2) {
            return Err(Error::invalid(
                "expiry",
                format!("{:?} is less than twice the heartbeat of {:?}", self.expiry, self.heartbeat),
            ));
        }
        Ok(())
    }

    /// The stored form of [`NodeOptions::expiry`]: `u64::MAX` for never.
    pub(super) fn expiry_ms(&self) -> u64 {
        u64::try_from(self.expiry.as_millis()).unwrap_or(u64::MAX)
    }

    /// How often the node polls other nodes, however seldom it beats.
    pub(super) fn pace(&self) -> Duration {
        self.heartbeat.min(PACE_MAX)
    }
}

/// A node's share of the work: as many leases as any other, give or take one. If it may not have so many, others have
/// more.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BalanceOptions {
    /// How often it polls whether nodes or leases have changed. Default: 1 s.
    pub interval: Duration,
    /// How long an owner may take to end its work when the lease should be another node's; then the other node takes
    /// it anyway. Default: 10 s. [`Duration::MAX`] means "never".
    pub handover: Duration,
    /// The most leases that it takes. Resources beyond all nodes' limits have no owner. Default: no limit.
    pub leases_max: Option<u32>,
}

crate::base::macros::setters!(BalanceOptions { interval: Duration, handover: Duration, leases_max: Option<u32> });

impl Default for BalanceOptions {
    fn default() -> Self {
        Self { interval: Duration::from_secs(1), handover: Duration::from_secs(10), leases_max: None }
    }
}

impl BalanceOptions {
    /// Fails if an option is out of its limits.
    pub(crate) fn check(&self) -> Result<()> {
        if self.interval.is_zero() {
            return Err(Error::invalid("balance interval", "it is zero"));
        }
        Ok(())
    }
}
