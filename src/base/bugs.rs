//! Deliberate bugs, which the simulation must find.
//!
//! Each is a small mistake that a programmer could make: a check left out, a key not written, a conflict not
//! declared. The code asks [`is_on`] at the place of the mistake. Only the test of the simulation turns on the cargo
//! feature `mutations`; without it, `is_on` is constant and the compiler removes the bugs.

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
    /// A fold neither checks its mark nor has it in its conflict set.
    FoldWithoutMark,
    /// Counters that have come to zero are not cleared.
    CompareAndClearLeftOut,
    /// Counters are cleared instead of subtracted.
    CountersCleared,
    /// A fold takes the newest events for the totals.
    TotalsNotAdded,
    /// The lease is read, but not in the conflict set.
    LeaseNotInConflictSet,
    /// An acquisition does not raise the epoch.
    EpochNotRaised,
    /// A lease is released although it may have been lost.
    ReleaseWithoutCheck,
    /// A reshard leaves the previous entry open.
    ReshardWithoutClosing,
    /// A reshard begins with shard ids that were used before.
    ShardIdsUsedAgain,
    /// The topology is read, but not in the conflict set of a fold.
    TopologyNotInConflictSet,
    /// The previous row is not removed.
    RowBeforeLeft,
    /// The newest row of a database is not recorded.
    NewestNotUpdated,
    /// A fold moves the pulse of the feed for the shard of its first row only.
    LaneNotMoved,
    /// Rows of design documents stay when their database goes.
    DdocsLeft,
    /// A fold sets a watch, which is a read that conflicts.
    WatchInWritingTransaction,
    /// No poll finds events whose ring never came.
    PollForgotten,
    /// A fold takes all that fits its options, however large its transaction becomes.
    FoldNotMeasured,
    /// A row of counters that cannot be decoded stops the folds of its partition.
    BrokenCountersStop,
    /// A row of counters that cannot be decoded ends the poll for events whose ring never came.
    BrokenCountersBlindPoll,
    /// A row of the feed that cannot be decoded stops its readers, and the folds of its partition.
    BrokenRowStops,
    /// A row of documents that cannot be decoded stops its readers.
    BrokenDocumentStops,
    /// A row of documents that cannot be decoded is skipped without a word.
    BrokenDocumentNotNamed,
    /// The tail trusts its watches.
    TailWithoutPoll,
    /// A subscriber that has fallen behind the ring skips the rows that it has missed.
    LaggardSkips,
    /// A subscriber that began with nothing never gets the deletion of an instance that was replaced while it read.
    NothingForgetsDeletions,
    /// A durable subscriber that is restarted within its first scan forgets that it knows databases.
    CursorForgetsScan,
    /// A round coalesces a tombstone away although the next row of the name does not report the deletion.
    RoundForgetsTombstone,
    /// A subscriber that wants some design documents does not get a change without an id, which may be of any.
    DdocWithoutIdForgotten,
    /// A set of filters asks its pattern filters only about databases that it does not name.
    SetForgetsPatterns,
    /// A durable subscriber saves the position of the tail instead of its own.
    CursorAhead,
    /// A durable subscriber begins again after a restart instead of reading its cursor.
    CursorNotRead,
    /// The janitor does not read the checkpoints of groups.
    JanitorIgnoresGroups,
    /// The janitor does not notice a group that begins meanwhile.
    JanitorMissesNewGroup,
    /// The lowest checkpoint of a group is that of its first shard.
    LowestOfFirstShard,
    /// The janitor drops a row without raising the horizon.
    HorizonNotRaised,
    /// A group begins with the first shard only.
    GroupForgetsShards,
    /// A consumer does not check its lease when it writes a checkpoint with its work.
    CheckpointWithoutLease,
    /// A consumer does not check whether its checkpoint was written already.
    CheckpointNotCompared,
    /// A late checkpoint sets the group back.
    LateCheckpointSetsBack,
    /// A row goes to the dead letters before the checkpoint passes it, and is delivered again.
    DeadLetterComesAgain,
    /// A group does not park an id whose rows fail, but tries them again and again.
    FailingIdsNotParked,
    /// The checkpoint of a group passes a row that has failed, and nothing parks it.
    ParkedRowForgotten,
    /// A group begins with the next shards before all are drained.
    SuccessorsBegunEarly,
    /// A transaction that must be committed once is tried again without checking whether it was committed.
    CommittedTwice,
    /// A commit is answered before it is synced to the disk.
    CommitNotSynced,
    /// A commit whose write or sync has failed is answered as if it had not happened.
    FailedSyncRefused,
    /// The nodes of earlier processes stay when a folder is opened.
    DeadNodesStay,
    /// A reader at a position of another history does not get `Expired`.
    HistoryNotChecked,
    /// A change of a lease does not move the version of its pool, so that idle workers do not see it.
    LeaseChangeNotCounted,
    /// Resources are divided as if each node could own any number of them.
    MaximaIgnored,
    /// A node takes others for dead after its own pace, whatever expiry they declare.
    ExpiryOfOthersIgnored,
    /// A fold does not move the pulse of the feed.
    PulseNotMoved,
    /// The documents of a database stay when it is deleted.
    DocumentsLeft,
    /// A writer of documents does not check whether its remembered shards are still open.
    DocumentShardsNotChecked,
    /// A client of `_db_updates` gets one row of a database, whatever the kinds of its news.
    WebRowsOfOneType,
    /// A position of `_db_updates` does not say where the reading began.
    WebPositionsPlain,
    /// A tombstone is dropped, and still counted as a row of its shard.
    RemovalNotCounted,
    /// A writer of documents goes on after the feed was removed in its transaction.
    WriterOutlivesRemoval,
    /// The fence of a job does not check whether its work was cancelled.
    FenceNotRead,
    /// A trigger does not park databases whose jobs fail or hang, but tries them again and again.
    FailingJobsNotParked,
    /// A trigger moves its cursor past owed work without listing it.
    OwedNotListed,
    /// A trigger that has another filter than before goes on at its cursor.
    ChangedFilterIgnored,
    /// A trigger informs its job of a deleted database only if it gets a delivery that names the instance.
    GoneInstancesForgotten,
    /// A scan that has failed has seen all that it has read.
    FailedScanCountsAsSeen,
    /// A parallel job reads only the shards of the open topology entry.
    ClosedShardsSkipped,
    /// A parked database whose turn has come is built, although it was deleted and forgotten while it waited.
    DeletedParkedBuiltAgain,
    /// Names that a trigger is about to list as owed count as listed, also if that is dropped or fails.
    OwedCountedBeforeListed,
    /// A trigger believes its dispatcher that a database is gone, and does not look it up.
    LivingReportedAsGone,
    /// Owed work that is read while a parked instance of its name is tried again is dropped as if it was older.
    OwedDroppedBesideRetry,
    /// The end of the retry of a parked database settles work of its name that found no room.
    OwedSettledByRetry,
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
