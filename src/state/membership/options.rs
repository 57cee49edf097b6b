//! How a node lives, and how it divides work with others.

use std::time::Duration;

use crate::{
    base::error::{Error, Result},
    state::keys::NodeId,
};

/// How a node lives. Nodes of a bus can have different times: each says in the store how long others are to wait for it.
/// [`Duration::MAX`] means "never".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeOptions {
    /// Which node it is; no other process may use the id at the same time. Default: one drawn at random.
    pub id: Option<NodeId>,
    /// How often it writes that it lives. Default: 3 s.
    pub heartbeat: Duration,
    /// After how long without a heartbeat others take this node for dead, by the clock of the one who looks; at least twice the
    /// heartbeat. A shorter one has its work taken over sooner, and sooner by mistake. Default: 10 s.
    pub expiry: Duration,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self { id: None, heartbeat: Duration::from_secs(3), expiry: Duration::from_secs(10) }
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

    /// [`NodeOptions::expiry`] as it is stored: `u64::MAX` for never.
    pub(super) fn expiry_ms(&self) -> u64 {
        u64::try_from(self.expiry.as_millis()).unwrap_or(u64::MAX)
    }

    /// How often the node looks at others, however seldom it beats.
    pub(super) fn pace(&self) -> Duration {
        self.heartbeat.min(Self::default().heartbeat)
    }
}

/// How a node takes its part of the work: as many leases as any other, give or take one, unless it may not have so many; then
/// others have more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BalanceOptions {
    /// How often it looks whether nodes or leases have changed. Default: 3 s.
    pub interval: Duration,
    /// How long an owner has to end its work when the lease is to be another node's; after that the other one takes it
    /// anyway. Default: 10 s. [`Duration::MAX`] means "never".
    pub handover: Duration,
    /// The most leases that it takes. What nobody may take stays undone. Default: no limit.
    pub leases_max: Option<u32>,
}

impl Default for BalanceOptions {
    fn default() -> Self {
        Self { interval: Duration::from_secs(3), handover: Duration::from_secs(10), leases_max: None }
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
