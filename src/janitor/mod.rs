//! The janitor: drops what nobody needs any more.
//!
//! - tombstones of databases that were deleted long ago ([`tombstones`]); the horizon tells readers that were away for longer;
//! - closed topology entries without rows ([`topologies`]);
//! - transaction ids that crashed processes have left.
//!
//! It works in bounded transactions of batch priority, which a busy cluster puts off.

mod tombstones;
mod topologies;

use std::time::Duration;

use crate::{
    context::Context,
    encoding::Sequence,
    error::{Error, Result},
    lease::Held,
    store::{Priority, Transaction, TransactionOption},
};

/// How a janitor works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JanitorOptions {
    /// How often it looks for what to drop. Default: 10 min.
    pub interval: Duration,
    /// For how long the row of a deleted database stays, at least. A subscriber that was away for longer may be told
    /// [`Error::Expired`]. Only time during which a janitor works counts. Default: 7 days.
    pub tombstone_retention: Duration,
    /// For how long the transaction ids of a crashed process stay, at least. Default: 1 h.
    pub transaction_id_retention: Duration,
}

impl Default for JanitorOptions {
    fn default() -> Self {
        Self {
            interval: Duration::from_mins(10),
            tombstone_retention: Duration::from_hours(7 * 24),
            transaction_id_retention: Duration::from_hours(1),
        }
    }
}

/// What janitors have in hand while they hold the lease.
struct Pass<'a> {
    /// What the roles share.
    context: &'a Context,
    /// The right to work.
    lease: &'a Held,
    /// How to work.
    options: &'a JanitorOptions,
}

impl Pass<'_> {
    /// Reads at batch priority.
    async fn read<T>(&self, body: impl AsyncFn(Transaction) -> Result<T>) -> Result<T> {
        self.context
            .db
            .run(async |tx| {
                tx.set_option(TransactionOption::Priority(Priority::Batch));
                body(tx).await
            })
            .await
    }

    /// Writes at batch priority, if the lease is still held.
    async fn write<T>(&self, body: impl AsyncFn(Transaction) -> Result<T>) -> Result<T> {
        self.read(async |tx| {
            self.lease.check(&tx).await?;
            body(tx).await
        })
        .await
    }

    /// The janitor's own clock, in milliseconds.
    fn now_ms(&self) -> u64 {
        u64::try_from(self.context.env().now().as_millis()).expect("no process lives so long")
    }
}
