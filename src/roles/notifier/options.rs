//! [`NotifierOptions`]: how a notifier works.

use std::time::Duration;

use crate::{
    base::error::{Error, Result},
    state::membership::BalanceOptions,
};

/// Options for a notifier.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotifierOptions {
    /// How the notifier takes its share of the partitions.
    pub balance: BalanceOptions,
    /// The maximum share of time that a partition's folds may spend computing, in percent, 1 to 100. The longer a fold computes, the longer
    /// it pauses, so that more events are coalesced into the next fold; time spent waiting on the store counts as pausing. Default: 40.
    pub fold_percent: u8,
    /// The longest such pause. If zero, folds do not pause. Default: 25 ms.
    pub fold_interval_max: Duration,
    /// How often the notifier polls for events whose ring was lost. Default: 1 s.
    pub poll_interval: Duration,
    /// The maximum number of rows of counters that one fold reads. Default: 1,000.
    pub fold_rows_max: usize,
}

crate::base::macros::setters!(NotifierOptions {
    balance: BalanceOptions,
    fold_percent: u8,
    fold_interval_max: Duration,
    poll_interval: Duration,
    fold_rows_max: usize
});

impl Default for NotifierOptions {
    fn default() -> Self {
        Self {
            balance: BalanceOptions::default(),
            fold_percent: 40,
            fold_interval_max: Duration::from_millis(25),
            poll_interval: Duration::from_secs(1),
            fold_rows_max: 1_000,
        }
    }
}

impl NotifierOptions {
    pub(crate) fn check(&self) -> Result<()> {
        if self.poll_interval.is_zero() {
            return Err(Error::invalid("poll interval", "it is zero"));
        }
        if !(1..=100).contains(&self.fold_percent) {
            return Err(Error::invalid("fold percent", format!("{} is not 1 to 100", self.fold_percent)));
        }
        self.balance.check()?;
        // One database can have rows for counters, for its last update and for a design document, and each fold must make progress.
        if !(10..=10_000).contains(&self.fold_rows_max) {
            return Err(Error::invalid("fold rows", format!("{} is not 10 to 10,000", self.fold_rows_max)));
        }
        Ok(())
    }
}
