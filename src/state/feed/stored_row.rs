//! [`StoredRow`]: a row as a feed keeps it.

use bytes::Bytes;

use crate::base::encoding::Sequence;

/// A row of a feed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredRow {
    /// Where it stands.
    pub sequence: Sequence,
    /// Its content, which its feed's users decode.
    pub value: Bytes,
}
