//! The one error type of the crate.
//!
//! A kind says what the caller can do about it, not which line failed: correct the input, open with other options, try the transaction
//! again, or give up on the store. Sources are kept, so that a log shows the whole chain.
//!
//! Errors of the store carry FoundationDB's numeric codes on every backend, because existing layers already base their decisions on them.

use std::{any::Any, path::PathBuf, sync::Arc};

use crate::base::sequence::Sequence;

/// The result of every fallible function in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns the message of a panic, for logs.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message")
}

/// What went wrong. The kinds differ in what the caller can do about it.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is outside its documented limits. Nothing was changed; correct the argument.
    #[error("invalid {what}: {reason}")]
    Invalid {
        /// The argument.
        what: &'static str,
        /// What is wrong with the argument, and what is allowed.
        reason: String,
    },

    /// The store failed a transaction. [`Error::is_retryable`] says whether trying again can help.
    #[error("store: {0}")]
    Store(#[from] StoreError),

    /// A retry limit was reached. The last failure is the source; the transaction may be tried again later.
    #[error("gave up after {attempts} attempts: {last}")]
    RetriesExhausted {
        /// How many times the transaction was tried.
        attempts: u32,
        /// The failure of the last attempt.
        #[source]
        last: StoreError,
    },

    /// The store cannot be opened. The cause says whether another attempt can help, and the reason says what to do.
    #[error("cannot open the store at {}: {reason}", path.display())]
    Open {
        /// The folder, or the cluster file.
        path: PathBuf,
        /// The kind of cause, by what can be done about it.
        cause: OpenCause,
        /// Why the store cannot be opened, and what to do.
        reason: String,
    },

    /// The bus in the store was created with different fixed settings. Open it with the stored ones.
    #[error("the bus was created with {what} = {stored}, but {requested} was requested")]
    ConfigMismatch {
        /// The setting.
        what: &'static str,
        /// The stored value of the setting.
        stored: u64,
        /// The value that the caller asked for.
        requested: u64,
    },

    /// The stored data has the format of another version of this program. Nothing is damaged, and nothing was changed: use the program that
    /// wrote it, or export the bus with that program and import it with this one.
    #[error(
        "{what} has format {found}, and this program knows format {known}: use the program that wrote it, or move the bus with \
         its `export` and this program's `import`"
    )]
    OtherFormat {
        /// What is stored in that format.
        what: &'static str,
        /// The stored format.
        found: u16,
        /// The format of this program.
        known: u16,
    },

    /// A key or value in the store cannot be decoded. It was written by something else, or is damaged.
    #[error("corrupt {what}: {reason}")]
    Corrupt {
        /// The key family or value.
        what: &'static str,
        /// Why it cannot be decoded.
        reason: String,
    },

    /// The position is below the feed's horizon: rows that the reader has not seen may have been dropped for good. Or the position belongs
    /// to another history: the store was replaced by an older copy, a store in memory was started again, or a move did not copy that far.
    /// List all databases again (read from [`Cursor::BEGINNING`](crate::Cursor::BEGINNING)), and continue from there.
    #[error("the position has expired: rows up to {horizon} may be missed; read everything again")]
    Expired {
        /// A position from which a reader misses nothing.
        horizon: Sequence,
    },

    /// The store is older than its own rows: an older state was restored, and the incarnation was not raised. Raise it
    /// ([`Bus::raise_incarnation`](crate::Bus::raise_incarnation)). Until then nothing is folded: new rows would get positions before the
    /// old ones, where no reader looks for them.
    #[error(
        "the store is at {store}, but its rows go up to {rows}: an older state was restored; raise the incarnation of the bus \
         (`notibus incarnation raise`)"
    )]
    OlderThanRows {
        /// The last sequence known to exist.
        rows: Sequence,
        /// The position that the store is at.
        store: Sequence,
    },

    /// The feed does not have this shard. Ask the feed for the shards that were live at your position.
    #[error("the feed has no shard {shard}{}", if *.is_trimmed { ": it was closed, and removed once it was empty" } else { "" })]
    NoShard {
        /// The id that was asked for.
        shard: u64,
        /// Whether the shard once existed. A reader that had not read the shard to its end missed nothing, because the shard was empty.
        is_trimmed: bool,
    },

    /// There is no such feed: the database has no changes feed, or was deleted. Create it, or list the databases again.
    #[error("there is no feed of {feed}")]
    NoFeed {
        /// The database, or the name of the feed.
        feed: String,
    },

    /// There is no such consumer: it never ran, or was deleted.
    #[error("there is no consumer {consumer}")]
    NoConsumer {
        /// The name of the consumer.
        consumer: String,
    },

    /// Nodes still work for the consumer. Stop them first, or force the change: then they continue with the changed consumer. Nothing was
    /// changed.
    #[error(
        "{members} nodes work for consumer {consumer}: stop them, wait until crashed ones are removed, or force it"
    )]
    ConsumerInUse {
        /// The name of the consumer.
        consumer: String,
        /// How many nodes are members. A crashed node counts until it is removed.
        members: usize,
    },

    /// Nodes of the bus are alive. Stop them first, or use the option that allows running nodes, if there is one. Nothing was changed.
    #[error("{nodes} nodes of the bus are alive: stop them first")]
    BusInUse {
        /// How many nodes were seen alive, or have an expiry that is too long to wait for.
        nodes: usize,
    },

    /// A bus is being imported under the prefix. Wait until the import ends. If its process died, import again: the new import begins from
    /// the start.
    #[error(
        "a bus is being imported under the prefix {prefix:?}: wait for the import to end; if its process died, import again"
    )]
    ImportUnderWay {
        /// The prefix.
        prefix: String,
    },

    /// An earlier transaction, which was thought to have failed, saved a part of the batch. Return this error from the handler: the rest of
    /// the batch is then delivered again, without that part. Nothing of this transaction was committed.
    #[error(
        "rows up to {stored} were saved by an earlier transaction: return this error, and the rest is delivered again"
    )]
    PartlyDone {
        /// The position up to which the batch is done.
        stored: Sequence,
    },

    /// A stored topology names a hashing scheme that this process does not know. Register it when opening the bus, or
    /// upgrade the program.
    #[error("hashing scheme {scheme} is unknown; register it when opening the bus, or upgrade this program")]
    UnknownScheme {
        /// The stored number of the scheme.
        scheme: u16,
    },

    /// A task of a job used up its attempts, or panicked. The job has no result: fix the cause, and run the job again from where it
    /// started.
    #[error("a task{} failed after {attempts} attempts: {source}", shard.map_or(String::new(), |shard| format!(" on shard {shard}")))]
    Task {
        /// The shard of the task; unknown if the task panicked.
        shard: Option<u64>,
        /// How many attempts the task had.
        attempts: u32,
        /// Why the last attempt failed.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },

    /// A file or stream could not be read or written. The store is unchanged; after a failed import, import again.
    #[error("{what}: {source}")]
    Io {
        /// What was read or written.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: Arc<std::io::Error>,
    },

    /// There is no subscriber under this id or name, or it has ended. Nothing was changed.
    #[error("there is no subscriber {subscriber}")]
    NoSubscriber {
        /// The id or name.
        subscriber: String,
    },

    /// The work was cancelled, or another worker did it in the meantime: stop, and write nothing more. Nothing of this transaction was
    /// committed.
    #[error("the work on {what} was cancelled: stop, and write nothing more for it")]
    Cancelled {
        /// What was being worked on.
        what: String,
    },

    /// The bus that this process opened no longer exists: the store was wiped or restored, or the bus was moved. Everything that this
    /// process knows about the bus is void, and waiting does not help: end the process, and open the bus again.
    #[error("the bus that was opened no longer exists: {reason}")]
    BusGone {
        /// What was found in the store instead.
        reason: String,
    },

    /// The operation took too long, for example because the store does not answer or work in progress does not end, so it was abandoned.
    /// Leases of the process expire by themselves.
    #[error("gave up {what} after {after:?}: leases that are still held expire by themselves")]
    GaveUp {
        /// The operation.
        what: &'static str,
        /// How long the operation waited.
        after: std::time::Duration,
    },

    /// Another owner took the lease: stop working on the resource. Nothing of this transaction was committed.
    #[error("the lease of {resource} is lost: epoch {held} was held, but the store has {found}")]
    LeaseLost {
        /// The leased resource.
        resource: String,
        /// The epoch of the caller.
        held: u64,
        /// The epoch in the store.
        found: u64,
    },
}

/// Why a store cannot be opened. The causes differ in what can be done about them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenCause {
    /// The path is not suitable for a store, or this user may not use it: choose another path, or change its permissions. Another attempt
    /// does not help.
    Unusable,
    /// The store is damaged: restore it from a copy. Another attempt does not help.
    Damaged,
    /// Another process, or another handle in this process, has the store open: close it there, or wait until it is closed.
    InUse,
    /// The disk or the operating system failed: the disk is full or broken, or too many files are open. The store can be opened once that
    /// is fixed.
    SystemFailed,
    /// The cluster does not answer: wait until it does.
    Unreachable,
}

impl From<&std::io::Error> for OpenCause {
    fn from(error: &std::io::Error) -> Self {
        use std::io::ErrorKind;
        match error.kind() {
            ErrorKind::PermissionDenied
            | ErrorKind::NotFound
            | ErrorKind::NotADirectory
            | ErrorKind::IsADirectory
            | ErrorKind::AlreadyExists
            | ErrorKind::InvalidData
            | ErrorKind::InvalidInput
            | ErrorKind::InvalidFilename => Self::Unusable,
            _ => Self::SystemFailed,
        }
    }
}

impl Error {
    /// A shorthand for [`Error::Invalid`].
    pub(crate) fn invalid(what: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { what, reason: reason.into() }
    }

    /// A shorthand for [`Error::Corrupt`].
    pub(crate) fn corrupt(what: &'static str, reason: impl Into<String>) -> Self {
        Self::Corrupt { what, reason: reason.into() }
    }

    /// Adds `key`, where the corrupt value is stored, to the message. Other errors stay as they are.
    pub(crate) fn at(self, key: &[u8]) -> Self {
        match self {
            Self::Corrupt { what, reason } => {
                Self::Corrupt { what, reason: format!("{reason}; its key is {}", key.escape_ascii()) }
            }
            error => error,
        }
    }

    /// Whether the same transaction can succeed if it is tried again from its start.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_retryable())
    }

    /// Whether the transaction may have been committed although it failed. For exhausted retries, only the last failure counts.
    pub fn is_maybe_committed(&self) -> bool {
        match self {
            Self::Store(error) | Self::RetriesExhausted { last: error, .. } => error.is_maybe_committed(),
            _ => false,
        }
    }

    /// Whether the store failed, as opposed to the request being wrong.
    pub(crate) fn is_of_store(&self) -> bool {
        matches!(self, Self::Store(_) | Self::RetriesExhausted { .. })
    }

    /// Returns FoundationDB's error code, if the store failed.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Store(error) | Self::RetriesExhausted { last: error, .. } => Some(error.code()),
            _ => None,
        }
    }
}

/// A failure of the store, with FoundationDB's code for it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} ({code}){}", self.name(), self.detail.as_ref().map(|d| format!(": {d}")).unwrap_or_default())]
pub struct StoreError {
    /// FoundationDB's error code.
    code: i32,
    /// What the backend adds to the code, such as the operating system's message.
    detail: Option<String>,
    /// Whether the store takes no more writes, so that trying again cannot help, whatever the code says.
    is_final: bool,
}

/// Names the codes that this crate raises or checks; the numbers are FoundationDB's.
macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        impl StoreError {
            $($(#[$doc])* pub const $name: Self = Self { code: $code, detail: None, is_final: false };)*

            /// Returns FoundationDB's name for the code.
            pub fn name(&self) -> &'static str {
                match self.code {
                    $($code => $text,)*
                    _ => "unnamed_error",
                }
            }
        }
    };
}

codes! {
    /// The transaction is older than 5 s, or began before the window that the store keeps.
    TRANSACTION_TOO_OLD = 1007, "transaction_too_old";
    /// The read version is later than any that the store has handed out.
    FUTURE_VERSION = 1009, "future_version";
    /// A key that the transaction read has been written since.
    NOT_COMMITTED = 1020, "not_committed";
    /// The commit may or may not have happened; either way, it is settled by now.
    COMMIT_UNKNOWN_RESULT = 1021, "commit_unknown_result";
    /// The transaction was cancelled.
    TRANSACTION_CANCELLED = 1025, "transaction_cancelled";
    /// The transaction exceeded its time limit; its commit may still happen later.
    TRANSACTION_TIMED_OUT = 1031, "transaction_timed_out";
    /// The client already has the maximum number of watches.
    TOO_MANY_WATCHES = 1032, "too_many_watches";
    /// A read would see a versionstamp, which is not known before the commit.
    ACCESSED_UNREADABLE = 1036, "accessed_unreadable";
    /// The storage process is lagging behind.
    PROCESS_BEHIND = 1037, "process_behind";
    /// The database is locked.
    DATABASE_LOCKED = 1038, "database_locked";
    /// The cluster was upgraded; the commit of the transaction may still happen.
    CLUSTER_VERSION_CHANGED = 1039, "cluster_version_changed";
    /// The commit proxy is out of memory for now.
    COMMIT_PROXY_MEMORY_LIMIT_EXCEEDED = 1042, "commit_proxy_memory_limit_exceeded";
    /// The cluster is too busy for transactions of batch priority.
    BATCH_TRANSACTION_THROTTLED = 1051, "batch_transaction_throttled";
    /// The proxy that hands out read versions is out of memory for now.
    GRV_PROXY_MEMORY_LIMIT_EXCEEDED = 1078, "grv_proxy_memory_limit_exceeded";
    /// The operation was cancelled, for example a watch whose transaction never committed.
    OPERATION_CANCELLED = 1101, "operation_cancelled";
    /// The cluster is throttling a tag of the transaction.
    TAG_THROTTLED = 1213, "tag_throttled";
    /// The cluster has throttled a tag of the transaction for too long.
    PROXY_TAG_THROTTLED = 1223, "proxy_tag_throttled";
    /// The disk failed. The store takes no more writes until it is opened again.
    IO_ERROR = 1510, "io_error";
    /// The disk has no room for the commit, which did not happen. Once there is room, later commits succeed. FoundationDB has no such code.
    NO_ROOM = 1599, "no_room";
    /// An operand is malformed, such as a versionstamp offset outside its key.
    CLIENT_INVALID_OPERATION = 2000, "client_invalid_operation";
    /// The key is outside the key space that layers may use.
    KEY_OUTSIDE_LEGAL_RANGE = 2004, "key_outside_legal_range";
    /// A range begins after its end.
    INVERTED_RANGE = 2005, "inverted_range";
    /// An option has a value outside its limits.
    INVALID_OPTION_VALUE = 2006, "invalid_option_value";
    /// The transaction already has a read version.
    READ_VERSION_ALREADY_SET = 2010, "read_version_already_set";
    /// The version is not valid.
    VERSION_INVALID = 2011, "version_invalid";
    /// The transaction was used after its commit began; reset it first.
    USED_DURING_COMMIT = 2017, "used_during_commit";
    /// A read-only transaction has no commit version and no versionstamp.
    NO_COMMIT_VERSION = 2021, "no_commit_version";
    /// The transaction is larger than 10 MB.
    TRANSACTION_TOO_LARGE = 2101, "transaction_too_large";
    /// A key is larger than 10,000 bytes.
    KEY_TOO_LARGE = 2102, "key_too_large";
    /// A value is larger than 100,000 bytes.
    VALUE_TOO_LARGE = 2103, "value_too_large";
}

impl StoreError {
    /// Returns the error with this code.
    #[cfg(feature = "foundationdb")]
    pub(crate) fn from_code(code: i32) -> Self {
        Self { code, detail: None, is_final: false }
    }

    /// Returns FoundationDB's error code.
    pub fn code(&self) -> i32 {
        self.code
    }

    /// Returns the same error with a detail from the backend.
    pub(crate) fn with_detail(self, detail: impl std::fmt::Display) -> Self {
        Self { detail: Some(detail.to_string()), ..self }
    }

    /// Returns the same failure, marked as final: the store takes no more writes, so trying again cannot help.
    pub(crate) fn of_failed_store(self) -> Self {
        Self { is_final: true, ..self }
    }

    /// Whether the error says that the disk of the store failed, so that the store takes no more writes until it is opened again. The
    /// commit that hit the failure is [maybe committed](Self::is_maybe_committed); later ones are not.
    #[cfg(feature = "http")]
    pub(crate) fn is_of_failed_disk(&self) -> bool {
        self.code == Self::IO_ERROR.code || (self.is_final && self.is_maybe_committed())
    }

    /// Whether the same transaction can succeed if it is tried again from its start: FoundationDB's predicate `RETRYABLE`, unless the store
    /// takes no more writes ([`Store::failure`](crate::store::Store::failure)).
    pub fn is_retryable(&self) -> bool {
        !self.is_final
            && matches!(
                self.code,
                1007 | 1009 | 1020 | 1021 | 1037 | 1038 | 1039 | 1042 | 1051 | 1078 | 1213 | 1223
            )
    }

    /// Whether the transaction may have been committed (FoundationDB's predicate `MAYBE_COMMITTED`; with 1031 the commit may even happen
    /// later).
    pub fn is_maybe_committed(&self) -> bool {
        matches!(self.code, 1021 | 1031 | 1039)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_error_names_its_code_and_keeps_the_detail() {
        let error = Error::from(StoreError::IO_ERROR.with_detail("disk full"));
        assert_eq!(error.to_string(), "store: io_error (1510): disk full");
        assert_eq!(error.code(), Some(1510));
        assert!(!error.is_retryable());
    }
}
