//! [`Step`]s, and how random ones are made.
//!
//! The keys are a few single letters and, below one of them, the versionstamped keys. Stamps occur only where no atomic operation computes
//! with them, because the results would differ from store to store.
//!
//! A transaction that is too old does not read after it has written: the client of a cluster answers from its memory what it can answer
//! without the cluster, such as a key that the transaction has set. The embedded store refuses all such reads.

use notibus::store::{
    AtomicOp,
    Isolation::{self, Serializable, Snapshot},
};
use proptest::{collection::vec, prelude::*};

/// The number of transactions that are open at once.
pub(crate) const SLOTS: usize = 4;

/// The keys; each is one letter. Ranges end at any of them.
pub(crate) const LETTERS: &[u8] = b"abcdefg";

/// Versionstamped keys start with this letter.
pub(crate) const STAMPED_KEY: u8 = b'c';

/// Versionstamped values are set at this letter.
pub(crate) const STAMPED_VALUE: u8 = b'e';

/// One operation of one of the transactions, all of which are open from the start.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    /// The transaction.
    pub slot: usize,
    /// What it does.
    pub op: Op,
}

/// What a transaction does. Keys are letters, ranges go from one letter up to but not including another.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    /// Reads a key.
    Get(u8, Isolation),
    /// Reads at most this many rows of a range, from its end if the flag is set.
    Range(u8, u8, usize, bool, Isolation),
    Set(u8, Vec<u8>),
    /// Removes a key.
    Clear(u8),
    ClearRange(u8, u8),
    /// Applies an operation to a key.
    Atomic(AtomicOp, u8, Vec<u8>),
    /// Sets a versionstamped key.
    StampedKey(Vec<u8>),
    /// Sets a key to a versionstamp.
    StampedValue,
    /// Declares a range as read.
    ReadConflict(u8, u8),
    /// Declares a range as written.
    WriteConflict(u8, u8),
    /// Uses a read version that some transaction has had before, which is an error if this transaction has one already; does nothing if
    /// there is no such version.
    ReadAt(usize),
    /// Uses a read version that is older than any transaction may be; an error if this transaction has one already.
    ReadAtOld,
    /// Reads all rows of a range, in pages of about this many bytes, from its end if the flag is set.
    Pages(u8, u8, usize, bool, Isolation),
    /// Reads a key of the client itself, which is refused.
    GetOfClient,
    /// Reads a key, and watches it until the transaction ends.
    Watch(u8),
    /// Commits, and starts again.
    Commit,
    /// Starts again, begins to commit something outside the keys, starts again while that commit is under way, and sets a key.
    ResetDuringCommit(u8, Vec<u8>),
    /// Runs, concurrently with the transaction, a body that adds 1 to a key; it commits by itself, fails, and is tried again.
    RunTwice(u8),
    /// Starts again.
    Reset,
}

impl Op {
    /// Whether the operation reads.
    pub fn reads(&self) -> bool {
        matches!(self, Self::Get(..) | Self::Range(..) | Self::Pages(..) | Self::GetOfClient | Self::Watch(_))
    }

    /// Whether the transaction has written something after the operation.
    pub fn writes(&self) -> bool {
        matches!(
            self,
            Self::Set(..)
                | Self::Clear(_)
                | Self::ClearRange(..)
                | Self::Atomic(..)
                | Self::StampedKey(_)
                | Self::StampedValue
                | Self::ResetDuringCommit(..)
        )
    }
}

fn letter() -> impl Strategy<Value = u8> {
    prop::sample::select(LETTERS)
}

fn number_letter() -> impl Strategy<Value = u8> {
    letter().prop_map(|letter| if letter == STAMPED_VALUE { b'a' } else { letter })
}

/// Two letters in order or, rarely, out of order.
fn range() -> impl Strategy<Value = (u8, u8)> {
    (letter(), letter(), 0..40_u8)
        .prop_map(|(a, b, inverted)| if inverted == 39 { (a.max(b), a.min(b)) } else { (a.min(b), a.max(b)) })
}

/// A short value, one of a few.
fn value() -> impl Strategy<Value = Vec<u8>> {
    vec(prop::sample::select(&[0_u8, 1, 2, 255][..]), 0..4)
}

fn isolation() -> impl Strategy<Value = Isolation> {
    prop_oneof![3 => Just(Serializable), 1 => Just(Snapshot)]
}

/// An operation on numbers.
fn atomic() -> impl Strategy<Value = AtomicOp> {
    prop::sample::select(
        &[
            AtomicOp::Add,
            AtomicOp::Max,
            AtomicOp::Min,
            AtomicOp::ByteMax,
            AtomicOp::ByteMin,
            AtomicOp::CompareAndClear,
        ][..],
    )
}

/// Anything that a transaction can do.
fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (letter(), isolation()).prop_map(|(key, isolation)| Op::Get(key, isolation)),
        5 => (letter(), letter(), 1..5_usize, any::<bool>(), isolation()).prop_map(
            |(begin, end, limit, reverse, isolation)| Op::Range(begin.min(end), begin.max(end), limit, reverse, isolation)
        ),
        1 => (letter(), letter(), isolation()).prop_map(
            |(begin, end, isolation)| Op::Range(begin, end, 100, false, isolation)
        ),
        4 => (letter(), value()).prop_map(|(key, value)| Op::Set(key, value)),
        2 => letter().prop_map(Op::Clear),
        2 => range().prop_map(|(begin, end)| Op::ClearRange(begin, end)),
        5 => (atomic(), number_letter(), value()).prop_map(|(op, key, value)| Op::Atomic(op, key, value)),
        2 => value().prop_map(Op::StampedKey),
        1 => Just(Op::StampedValue),
        2 => range().prop_map(|(begin, end)| Op::ReadConflict(begin, end)),
        1 => range().prop_map(|(begin, end)| Op::WriteConflict(begin, end)),
        1 => any::<usize>().prop_map(Op::ReadAt),
        1 => any::<bool>().prop_map(|is_old| if is_old { Op::ReadAtOld } else { Op::GetOfClient }),
        2 => (range(), prop::sample::select(&[0_usize, 1, 30, 100][..]), any::<bool>(), isolation()).prop_map(
            |((begin, end), target, reverse, isolation)| Op::Pages(begin.min(end), begin.max(end), target, reverse, isolation)
        ),
        2 => letter().prop_map(Op::Watch),
        5 => Just(Op::Commit),
        1 => (letter(), value()).prop_map(|(key, value)| Op::ResetDuringCommit(key, value)),
        1 => number_letter().prop_map(Op::RunTwice),
        1 => Just(Op::Reset),
    ]
}

pub(crate) fn interleaving() -> impl Strategy<Value = Vec<Step>> {
    let step = (0..SLOTS, op()).prop_map(|(slot, op)| Step { slot, op });
    vec(step, 1..45)
}
