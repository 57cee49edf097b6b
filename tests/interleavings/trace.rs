//! [`Trace`]: the observations of an interleaving, in terms that every store shares.
//!
//! Versions and stamps differ from store to store. A trace therefore has no versions, and instead of each stamp it has the number of the
//! stamp's commit: the first commit has 1.

pub(crate) const STAMP_LEN: usize = 10;

/// The code for a transaction that is too old because it asked for an old version.
pub(crate) const TOO_OLD_AS_ASKED: i32 = -1007;

/// A key without its prefix, and its value.
pub(crate) type Row = (Vec<u8>, Vec<u8>);

/// The observation of one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    Silent,
    /// The value of a key, or the code of the error.
    Value(Result<Option<Vec<u8>>, i32>),
    /// The rows of a range, and whether there are more although they are fewer than the limit; or the code of the error.
    Rows(Result<(Vec<Row>, bool), i32>),
    /// The number of the commit, `None` if there was nothing to write; or the code of the error.
    Commit(Result<Option<u64>, i32>),
}

/// All observations of an interleaving.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trace {
    /// One event for each step.
    pub events: Vec<Event>,
    /// All rows at the end.
    pub rows: Vec<Row>,
}

/// The replacement of the stamp of commit number `number`. It sorts as stamps do.
pub(crate) fn stand_in(number: u64) -> [u8; STAMP_LEN] {
    let mut bytes = [b'#'; STAMP_LEN];
    bytes[2..].copy_from_slice(&number.to_be_bytes());
    bytes
}
