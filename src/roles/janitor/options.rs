//! [`JanitorOptions`].

use std::time::Duration;

use crate::{
    base::error::{Error, Result},
    state::membership::BalanceOptions,
};

/// How a janitor works.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct JanitorOptions {
    /// How often it searches for things to delete. Default: 10 min.
    pub interval: Duration,
    /// For how long the row of a deleted database stays, at least. A subscriber that was away for longer may get
    /// [`Error::Expired`]. Only time during which a janitor works counts. Default: 7 days.
    pub tombstone_retention: Duration,
    /// How the nodes agree on which of them is the janitor.
    pub balance: BalanceOptions,
}

crate::base::macros::setters!(JanitorOptions {
    interval: Duration,
    tombstone_retention: Duration,
    balance: BalanceOptions
});

impl Default for JanitorOptions {
    fn default() -> Self {
        Self {
            interval: Duration::from_mins(10),
            tombstone_retention: Duration::from_hours(7 * 24),
            balance: BalanceOptions::default(),
        }
    }
}

impl JanitorOptions {
    pub(crate) fn check(&self) -> Result<()> {
        if self.interval.is_zero() {
            return Err(Error::invalid("janitor interval", "it is zero"));
        }
        self.balance.check()
    }
}
