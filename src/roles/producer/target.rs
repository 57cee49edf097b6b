//! [`EventTarget`]: the transactions that events can be recorded in, and the [`Receipt`] that rings afterwards.

use std::{fmt, sync::Arc};

use bytes::Bytes;

use crate::{
    base::encoding::Tally,
    state::{context::Context, keys::Partition},
    store::{AfterCommit, Transaction},
};

/// A transaction that events can be recorded in: ours, or one of a layer that knows nothing of our
/// [`Database`](crate::store::Database).
pub trait EventTarget {
    /// What the caller gets: nothing where the commit rings by itself, a [`Receipt`] where the caller has to.
    type Receipt;

    /// Applies `ADD` with [`Tally::to_bytes`] to `key`.
    fn add(&self, key: Vec<u8>, tally: &Tally);

    /// Applies `SET_VERSIONSTAMPED_VALUE` with `operand` to `key`.
    fn set_versionstamped_value(&self, key: &[u8], operand: &[u8]);

    /// A number that stays the same for this transaction and differs between transactions: it spreads a hot database over
    /// its slots.
    fn spread(&self) -> u64;

    /// Takes the receipt over, or hands it to the caller.
    fn receive(&self, receipt: Receipt) -> Self::Receipt;
}

/// Our own transaction merges the events of one database into one `ADD`, sets no stamp twice, and rings by itself after
/// its commit.
impl EventTarget for Transaction {
    type Receipt = ();

    fn add(&self, key: Vec<u8>, tally: &Tally) {
        self.add_merged(Bytes::from(key), tally);
    }

    fn set_versionstamped_value(&self, key: &[u8], operand: &[u8]) {
        self.stamp_merged(Bytes::copy_from_slice(key), Bytes::copy_from_slice(operand));
    }

    fn spread(&self) -> u64 {
        self.salt()
    }

    fn receive(&self, receipt: Receipt) {
        let partition = receipt.partition.0.into();
        let context: Arc<dyn AfterCommit> = receipt.context;
        self.after_commit(&context, partition);
    }
}

/// Rings for the partition whose number the token is.
impl AfterCommit for Context {
    fn committed(&self, token: u64) {
        self.signals.ring(Partition(token as u32));
    }
}

/// Proof that an event was recorded. Ring it once the transaction has committed.
///
/// A ring is a hint: if it never comes, because the process crashed in between, the notifier finds the event by its poll.
#[must_use = "ring it after the commit, or the event waits for the notifier's poll"]
pub struct Receipt {
    /// Whose signals to ring.
    context: Arc<Context>,
    /// Where the event lies.
    partition: Partition,
}

impl Receipt {
    /// The receipt of an event in `partition`.
    pub(super) fn new(context: Arc<Context>, partition: Partition) -> Self {
        Self { context, partition }
    }

    /// Wakes the notifier of this process, or has the doorbell rung for that of another. Never waits.
    pub fn ring(self) {
        self.context.signals.ring(self.partition);
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Receipt").field(&self.partition).finish()
    }
}
