//! [`StoredRow`]: a row of a feed, as it is stored.

use bytes::Bytes;

use crate::base::encoding::Sequence;

/// A row of a feed, as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredRow {
    pub sequence: Sequence,
    /// Its content, which the users of the feed decode.
    pub value: Bytes,
}
