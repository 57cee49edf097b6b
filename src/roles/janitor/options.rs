//! [`JanitorOptions`].

use std::time::Duration;

use crate::{
    base::error::{Error, Result},
    state::membership::BalanceOptions,
    store::{Database, TransactionIdSweeper},
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
    /// For how long the transaction ids of a crashed process stay, at least; longer than
    /// [`Database::UNKNOWN_RESULT_AGE_MAX`](crate::store::Database::UNKNOWN_RESULT_AGE_MAX). Default: 1 h.
    pub transaction_id_retention: Duration,
    /// How the nodes agree on which of them is the janitor.
    pub balance: BalanceOptions,
}

crate::base::options::setters!(JanitorOptions {
    interval: Duration,
    tombstone_retention: Duration,
    transaction_id_retention: Duration,
    balance: BalanceOptions
});

impl Default for JanitorOptions {
    fn default() -> Self {
        Self {
            interval: Duration::from_mins(10),
            tombstone_retention: Duration::from_hours(7 * 24),
            transaction_id_retention: Duration::from_hours(1),
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

    pub(super) fn sweeper(&self, db: &Database) -> Result<TransactionIdSweeper> {
        TransactionIdSweeper::new(db, self.transaction_id_retention)
    }
}
