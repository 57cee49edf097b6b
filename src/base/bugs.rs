//! Deliberate bugs: what the simulation must be able to find.
//!
//! Each is a small mistake that somebody could make: a check left out, a key not written, a conflict not declared. The code
//! asks [`is_on`] at the place of the mistake. Without the cargo feature `mutations`, which nothing but the test of the
//! simulation turns on, the answer is a constant, and nothing of it is left in the program.

/// Declares the bugs, with what each does.
macro_rules! bugs {
    ($($(#[doc = $text:literal])+ $name:ident,)*) => {
        /// A deliberate bug.
        #[cfg_attr(not(feature = "http"), allow(dead_code, reason = "some are in what only HTTP needs"))]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Bug { $($(#[doc = $text])+ $name,)* }

        impl Bug {
            /// All of them.
            #[cfg(feature = "mutations")]
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// What it does.
            #[cfg(feature = "mutations")]
            pub fn explanation(self) -> &'static str {
                match self { $(Self::$name => concat!($($text),+).trim_ascii(),)* }
            }
        }
    };
}

bugs! {
    /// A fold neither looks at its mark nor has it in its conflict set.
    FoldWithoutMark,
    /// Counters that have come to zero are not cleared.
    CompareAndClearLeftOut,
    /// Counters are cleared instead of subtracted.
    CountersCleared,
    /// A fold takes the newest events for all that there ever were.
    TotalsNotAdded,
    /// The lease is read, but not in the conflict set.
    LeaseNotInConflictSet,
    /// An acquisition does not raise the epoch.
    EpochNotRaised,
    /// A lease is given back although it may have been lost.
    ReleaseWithoutCheck,
    /// A reshard leaves the entry before it open.
    ReshardWithoutClosing,
    /// A reshard begins with shard ids that were used before.
    ShardIdsUsedAgain,
    /// The topology is read, but not in the conflict set of a fold.
    TopologyNotInConflictSet,
    /// The row before is not removed.
    RowBeforeLeft,
    /// The newest row of a database is not told.
    NewestNotUpdated,
    /// The head of a shard is not moved.
    HeadNotMoved,
    /// What was told of design documents stays when their database goes.
    DdocsLeft,
    /// A fold sets a watch, which is a read that conflicts.
    WatchInWritingTransaction,
    /// Nobody looks for events whose ring never came.
    PollForgotten,
    /// A fold takes all that fits its options, however large its transaction becomes.
    FoldNotMeasured,
    /// A row of counters that cannot be decoded stops the folds of its partition.
    BrokenCountersStop,
    /// A row of counters that cannot be decoded ends the look for events whose ring never came.
    BrokenCountersBlindPoll,
    /// A row of the feed that cannot be decoded stops its readers, and the folds of its partition.
    BrokenRowStops,
    /// The tail trusts its watches.
    TailWithoutPoll,
    /// A subscriber that has fallen behind the ring goes on without what it has missed.
    LaggardSkips,
    /// Anyone who began with nothing is never delivered the deletion of an instance that was replaced while it read.
    NothingForgetsDeletions,
    /// A durable subscriber that is restarted within its first scan begins as one who knows nothing.
    CursorForgetsScan,
    /// A round coalesces a tombstone away of which the row that took its place says nothing.
    RoundForgetsTombstone,
    /// Anyone who wants some design documents is not told of one that may be any.
    DdocWithoutIdForgotten,
    /// A set of filters asks those of patterns only about databases that it does not name.
    SetForgetsPatterns,
    /// A durable subscriber saves where the tail is, not how far it has come itself.
    CursorAhead,
    /// A durable subscriber begins again after a restart, and leaves its cursor where it is.
    CursorNotRead,
    /// The janitor does not ask where groups are.
    JanitorIgnoresGroups,
    /// The janitor does not notice a group that begins meanwhile.
    JanitorMissesNewGroup,
    /// The janitor drops a row without raising the horizon.
    HorizonNotRaised,
    /// A group begins with the first shard only.
    GroupForgetsShards,
    /// A consumer does not look whether it still has the lease when it writes a checkpoint with its work.
    CheckpointWithoutLease,
    /// A consumer does not look whether its checkpoint is there already.
    CheckpointNotCompared,
    /// A checkpoint that comes late sets the group back.
    LateCheckpointSetsBack,
    /// A row goes to the dead letters, and comes again.
    DeadLetterComesAgain,
    /// A group begins with the next shards before all are drained.
    SuccessorsBegunEarly,
    /// A transaction that is to be committed once is tried again without a look.
    CommittedTwice,
    /// A commit is answered before it is synced to the disk.
    CommitNotSynced,
    /// What changes leases does not count it, so that those who rest do not see it.
    LeaseChangeNotCounted,
    /// A fold does not move the pulse of the feed.
    PulseNotMoved,
    /// The documents of a database stay when it is deleted.
    DocumentsLeft,
    /// A writer of documents does not look whether the shards that it remembers are still those.
    DocumentShardsNotChecked,
    /// A client of `_db_updates` is sent one row of a database, whatever is news of it.
    WebRowsOfOneType,
    /// A position of `_db_updates` does not say where the reading began.
    WebPositionsPlain,
    /// A tombstone is dropped, and still counted as a row of its shard.
    RemovalNotCounted,
}

/// Whether `bug` is in the program.
#[cfg(not(feature = "mutations"))]
#[inline]
pub(crate) const fn is_on(_: Bug) -> bool {
    false
}

#[cfg(feature = "mutations")]
thread_local! {
    /// The bug that is in the program, as far as this thread runs it.
    static ON: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Whether `bug` is in the program.
#[cfg(feature = "mutations")]
pub(crate) fn is_on(bug: Bug) -> bool {
    ON.get() == Some(bug)
}

/// Runs `work` with `bug` in the program, as far as this thread runs it.
#[cfg(feature = "mutations")]
pub(crate) fn with<T>(bug: Option<Bug>, work: impl FnOnce() -> T) -> T {
    /// Takes the bug out again, also after a panic.
    struct Out(Option<Bug>);
    impl Drop for Out {
        fn drop(&mut self) {
            ON.set(self.0);
        }
    }
    let _out = Out(ON.replace(bug));
    work()
}
