//! How a node lives, and how it divides work with others.

use std::time::Duration;

use crate::{
    error::{Error, Result},
    keys::NodeId,
};

/// How a node lives. Give all nodes of a bus the same times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeOptions {
    /// Which node it is; no other process may use the id at the same time. Default: one drawn at random.
    pub id: Option<NodeId>,
    /// How often it writes that it lives. Default: 3 s.
    pub heartbeat: Duration,
    /// After how long without a heartbeat a node is taken for dead, by the clock of the one who looks; at least twice the
    /// heartbeat. A shorter one takes over sooner, and sooner by mistake. Default: 10 s.
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
}

/// How a node takes its part of the work. Each node has as many leases as any other, give or take one, unless it has limits
/// of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BalanceOptions {
    /// How often it looks whether it has to compare its part with that of others, and does so while there is something to do.
    /// Default: 3 s.
    pub interval: Duration,
    /// How long it waits for an owner that it has asked for a lease, before it takes the lease anyway; and how long its own
    /// work has to end when it is asked. Default: 10 s.
    pub handover: Duration,
    /// The least leases that it tries to get, even if others then have fewer. Default: 0.
    pub leases_min: u32,
    /// The most leases that it takes; what nobody may take stays undone. Default: no limit.
    pub leases_max: Option<u32>,
    /// Whether it asks others for leases if they have more. Without, it takes only what nobody has. Default: true.
    pub steal: bool,
}

impl Default for BalanceOptions {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(3),
            handover: Duration::from_secs(10),
            leases_min: 0,
            leases_max: None,
            steal: true,
        }
    }
}

impl BalanceOptions {
    /// Fails if an option is out of its limits.
    pub(crate) fn check(&self) -> Result<()> {
        if self.interval.is_zero() {
            return Err(Error::invalid("balance interval", "it is zero"));
        }
        if let Some(max) = self.leases_max.filter(|&max| max < self.leases_min) {
            return Err(Error::invalid(
                "leases",
                format!("at most {max} are fewer than at least {}", self.leases_min),
            ));
        }
        Ok(())
    }
}
