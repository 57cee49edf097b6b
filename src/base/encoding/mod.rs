//! Bytes: the sequence, the counters, and the reader and writer of values.
//!
//! Everything here is pure. Keys are big-endian, so that byte order is value order; only the lanes that FoundationDB's `ADD` works on are
//! little-endian.

mod counters;
mod sequence;
mod value;

pub(crate) use counters::ADDED_MAX;
pub use counters::{COUNTERS_LEN, Counters, Tally};
pub(crate) use value::{Reader, versionstamped};

pub(crate) use crate::base::sequence::STAMP_LEN;
pub use crate::base::sequence::{Incarnation, Sequence, Versionstamp};
