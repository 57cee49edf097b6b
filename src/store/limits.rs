//! The limits of all backends, for their own code. Users know them as constants of [`Transaction`](super::Transaction) and
//! [`Database`](super::Database).

use std::time::Duration;

/// The longest key, in bytes.
pub(crate) const KEY_LEN_MAX: usize = 10_000;

/// The longest value, in bytes.
pub(crate) const VALUE_LEN_MAX: usize = 100_000;

/// The largest transaction, in bytes of keys, values and conflict ranges.
pub(crate) const TRANSACTION_LEN_MAX: usize = 10_000_000;

/// How long a transaction can read and commit.
pub(crate) const TRANSACTION_LIFETIME: Duration = Duration::from_secs(5);

/// How many watches a client can have at once.
pub(super) const WATCHES_MAX: usize = 10_000;
