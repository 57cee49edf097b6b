//! Records events in a layer's own `foundationdb` transaction.
//!
//! The transaction is used by reference. The caller commits it, retries it and rings the receipt. The client merges the `ADD`s of one
//! transaction to one key, so several events of one database cost one mutation here as well, as long as the database has one slot. With
//! more slots each call picks its own; [`Producer::record_all`](super::Producer::record_all) then records any number of events with one
//! mutation.

use ::foundationdb::{RetryableTransaction, Transaction, options::MutationType};

use super::{EventTarget, Receipt};
use crate::base::encoding::Tally;

/// A raw transaction. The caller rings the [`Receipt`] after the commit.
impl EventTarget for Transaction {
    type Receipt = Receipt;

    fn add(&self, key: Vec<u8>, tally: &Tally) {
        self.atomic_op(&key, &tally.to_bytes(), MutationType::Add);
    }

    fn set_versionstamped_value(&self, key: &[u8], operand: &[u8]) {
        self.atomic_op(key, operand, MutationType::SetVersionstampedValue);
    }

    fn spread(&self) -> u64 {
        fastrand::u64(..)
    }

    fn receive(&self, receipt: Receipt) -> Receipt {
        receipt
    }
}

/// A transaction of the client's own retry loop. Ring the receipt of the last attempt.
impl EventTarget for RetryableTransaction {
    type Receipt = Receipt;

    fn add(&self, key: Vec<u8>, tally: &Tally) {
        EventTarget::add(&**self, key, tally);
    }

    fn set_versionstamped_value(&self, key: &[u8], operand: &[u8]) {
        EventTarget::set_versionstamped_value(&**self, key, operand);
    }

    fn spread(&self) -> u64 {
        EventTarget::spread(&**self)
    }

    fn receive(&self, receipt: Receipt) -> Receipt {
        receipt
    }
}
