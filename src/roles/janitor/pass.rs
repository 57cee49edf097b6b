//! [`Pass`]: one pass of the janitor that holds the lease, with its options and its transactions.

use std::time::Duration;

use crate::{
    base::error::{Error, Result},
    state::{
        context::Context,
        membership::{BalanceOptions, Held},
    },
    store::{Priority, Transaction, TransactionOption},
};

/// Options for a janitor.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct JanitorOptions {
    /// How often the janitor searches for things to delete. If a pass takes longer than this, ages count more slowly. Default: 10 min.
    pub interval: Duration,
    /// The minimum time for which the row of a deleted database is kept. A subscriber that was away for longer may get [`Error::Expired`].
    /// Only time during which a janitor works counts. Default: 7 days.
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

/// One pass of the janitor that holds the lease.
pub(super) struct Pass<'a> {
    pub context: &'a Context,
    pub lease: &'a Held,
    pub options: &'a JanitorOptions,
}

impl Pass<'_> {
    /// Runs a read-only transaction at batch priority.
    pub async fn read<T, F, R>(&self, body: F) -> Result<T>
    where
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T>>,
    {
        let body = |tx: Transaction| {
            tx.set_option(TransactionOption::Priority(Priority::Batch));
            body(tx)
        };
        self.context.store.run(body).await
    }

    /// Runs, at batch priority, a transaction that fails if the lease is lost.
    pub async fn write<T, F, R>(&self, body: F) -> Result<T>
    where
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T>>,
    {
        let checked = |tx: Transaction| {
            let work = body(tx.clone());
            async move {
                self.lease.check(&tx).await?;
                work.await
            }
        };
        self.read(checked).await
    }
}

/// The first failure of a step. The step continues with the rest, so that one failure does not delay everything else.
#[derive(Debug, Default)]
pub(super) struct Failed(Option<Error>);

impl Failed {
    /// Returns the value of `result`, or keeps its error. Fails if the lease is lost, because then everything else fails too.
    pub fn note<T>(&mut self, result: Result<T>) -> Result<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error @ Error::LeaseLost { .. }) => Err(error),
            Err(error) => {
                self.0.get_or_insert(error);
                Ok(None)
            }
        }
    }

    /// Fails with the first failure, if there was one.
    pub fn end(self) -> Result<()> {
        self.0.map_or(Ok(()), Err)
    }
}
