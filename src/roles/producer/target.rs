//! [`EventTarget`]: the transactions in which events can be recorded, and [`Receipt`], which rings after the commit.

use std::{fmt, sync::Arc};

use bytes::Bytes;

use super::pending_events::PendingEvents;
use crate::{
    base::encoding::Tally,
    state::{context::Context, keys::Partition},
    store::{AfterCommit, Transaction},
};

/// A transaction in which events can be recorded: a [`Transaction`] of this crate, or one of a layer that does not use
/// [`Store`](crate::store::Store).
pub trait EventTarget {
    /// The result of recording: nothing if the commit rings by itself, a [`Receipt`] if the caller has to ring.
    type Receipt;

    /// Applies `ADD` with [`Tally::to_bytes`] to `key`.
    fn add(&self, key: Vec<u8>, tally: &Tally);

    /// Applies `SET_VERSIONSTAMPED_VALUE` with `operand` to `key`.
    fn set_versionstamped_value(&self, key: &[u8], operand: &[u8]);

    /// Returns a number that stays the same for this transaction and differs between transactions. It spreads a hot database over its
    /// slots.
    fn spread(&self) -> u64;

    /// Keeps the receipt until the commit, or returns it to the caller.
    fn receive(&self, receipt: Receipt) -> Self::Receipt;
}

/// Merges the events of one database into one `ADD`, sets no versionstamp twice, and rings by itself after the commit.
impl EventTarget for Transaction {
    type Receipt = ();

    fn add(&self, key: Vec<u8>, tally: &Tally) {
        PendingEvents::add(self, key, tally);
    }

    fn set_versionstamped_value(&self, key: &[u8], operand: &[u8]) {
        PendingEvents::stamp(self, Bytes::copy_from_slice(key), Bytes::copy_from_slice(operand));
    }

    fn spread(&self) -> u64 {
        self.salt()
    }

    fn receive(&self, receipt: Receipt) {
        let partition = receipt.partition.0;
        let context: Arc<dyn AfterCommit> = receipt.context;
        self.after_commit(&context, partition);
    }
}

/// Rings for the partition whose number is `token`.
impl AfterCommit for Context {
    fn committed(&self, token: u32, _: bool) {
        self.signals.ring(Partition(token));
    }
}

/// Proof that an event was recorded. Ring it once the transaction has committed.
///
/// A ring is a hint: if it is lost, for instance in a crash, the notifier's poll finds the event.
#[must_use = "ring it after the commit, or the event waits for the notifier's poll"]
pub struct Receipt {
    context: Arc<Context>,
    partition: Partition,
}

impl Receipt {
    pub(super) fn new(context: Arc<Context>, partition: Partition) -> Self {
        Self { context, partition }
    }

    /// Wakes the notifier of this process, or has the doorbell of the partition rung for another process. Never waits.
    pub fn notify(self) {
        self.context.signals.ring(self.partition);
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Receipt").field(&self.partition).finish()
    }
}
