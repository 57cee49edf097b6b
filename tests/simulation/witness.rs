//! The faults of a simulation, and the interesting states that its worlds can be in.
//!
//! A simulation in which nothing interesting happens proves nothing. So each state that the design has to handle has a name here, and over
//! enough seeds every one of them must occur.

/// Declares an enumeration whose members have names and explanations.
macro_rules! named {
    ($(#[$doc:meta])* $type:ident { $($(#[doc = $text:literal])+ $name:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $type { $($(#[doc = $text])+ $name,)* }

        impl $type {
            /// All members of the enumeration.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Returns the explanation.
            pub fn explanation(self) -> &'static str {
                match self { $(Self::$name => concat!($($text),+).trim_ascii(),)* }
            }
        }
    };
}

named! {
    /// A fault that can strike in a world.
    Fault {
        /// A commit fails with 1020 although nothing was written.
        Conflict,
        /// A commit fails with 1021, but happened.
        UnknownCommitted,
        /// A commit fails with 1021, and did not happen.
        UnknownLost,
        /// A commit fails with 1039, but happened.
        VersionChanged,
        /// A commit fails with 1031, but happens later.
        LateCommit,
        /// A commit fails with 1031, and never happens.
        TimedOut,
        /// A commit fails with 1007.
        CommitTooOld,
        /// A commit fails with 1038 or 1042.
        Refused,
        /// A commit takes a long time to be decided or answered.
        SlowCommit,
        /// A read fails with 1007, and so do all later operations.
        ReadTooOld,
        /// A read fails with 1009, 1037 or 1038.
        ReadBehind,
        /// A read fails with 1031.
        ReadTimedOut,
        /// A read takes a long time.
        SlowRead,
        /// A watch never fires.
        WatchDropped,
        /// A watch fires late.
        WatchLate,
        /// A watch fires although nothing was written.
        WatchSpurious,
        /// A watch is refused with 1032.
        WatchRefused,
        /// A watch fails with 1032 after it was set.
        WatchFailed,
        /// A process crashes between two of its steps.
        Crash,
        /// A process crashes after its commit, before the answer.
        CrashBeforeAnswer,
        /// The machine that runs the store and all processes loses power while a commit or a snapshot is written or synced.
        PowerLoss,
        /// A disk operation fails: a device error, a full disk, too many open files, or a partial write.
        DiskFails,
        /// The disk has no room for some commits, and has room again later.
        NoRoom,
        /// A process is paused, and continues later.
        Pause,
        /// A clock jumps ahead.
        ClockJump,
        /// A handler of a consumer returns an error.
        HandlerError,
        /// A handler of a consumer panics.
        HandlerPanic,
        /// A handler of a consumer never returns.
        HandlerHangs,
        /// A handler of a consumer returns an error, and leaves a task behind that commits its work later.
        HandlerLeavesTask,
    }
}

named! {
    /// An interesting state that a world was in.
    Witness {
        /// A fold was refused because of a lost lease or a reshard.
        FoldRefused,
        /// A commit with a checkpoint or a key of a consumer was refused.
        ConsumerRefused,
        /// A transaction of a handler was refused.
        WorkRefused,
        /// A disk operation failed.
        DiskFailed,
        /// A fold whose commit arrived late was committed.
        LateFoldCommitted,
        /// A late commit was refused by the store.
        LateCommitRefused,
        /// A fold was too large for its store, and was repeated in parts.
        FoldTooLarge,
        /// A task kept reading without waiting, and other tasks of its process still got their turn.
        BusyTaskGaveWay,
        /// One fold found the deletion of a database and the creation of its successor.
        DeletionAndCreationInOneFold,
        /// The janitor dropped a tombstone.
        TombstoneDropped,
        /// A subscriber that skips got `Lagged`.
        SubscriberLagged,
        /// A subscriber without rounds received a row in place of an older one that waited in the ring.
        CoalescedInRing,
        /// A subscriber got `Expired`.
        SubscriberExpired,
        /// A subscriber was restarted during its first scan, after it had received some of it.
        RestartWithinFirstScan,
        /// The filter of a subscriber was replaced.
        FilterReplaced,
        /// The filter of a subscriber was replaced during its first scan, after it had received some of it.
        ReplacedWithinFirstScan,
        /// A tombstone was dropped before a subscriber that knew the database had received it.
        TombstoneDroppedWhileWaiting,
        /// A name was deleted twice or more between two deliveries to a subscriber that knew it.
        RecreatedTwiceBetween,
        /// A callback received a delivery again after it panicked.
        GivenAgainAfterPanic,
        /// A callback was called with a batch of several deliveries.
        BatchCalledBack,
        /// A callback passed a barrier.
        BarrierPassed,
        /// A mirror showed databases after everything had come to rest.
        MirrorAtRest,
        /// Several filters of a set wanted the same delivery.
        WantedByMany,
        /// A subscriber of some design documents received only a change that may be to any of them.
        DdocMayBeAny,
        /// A subscriber of some design documents received the deletion of a database with its documents.
        DdocsGone,
        /// A design document changed again between the read of a row and the read of the row's changed documents.
        DdocAheadOfRow,
        /// A shard was read to its end, and its successors were read from there.
        ShardFollowedOver,
        /// A parallel job over the feed got `Expired`.
        CatalogueExpired,
        /// The feed of the documents of a database was resharded.
        DocumentsResharded,
        /// A database was deleted, and the feed of its documents with it.
        DocumentsRemoved,
        /// A layer named a wrong previous edit of a document.
        WrongEditNamed,
        /// A tail of documents learned that its database was gone.
        DocumentTailEnded,
        /// A consumer worked on a document.
        DocumentsWorked,
        /// A consumer of documents ended because its database was deleted.
        DocumentConsumerEnded,
        /// A handler found that its work was already committed.
        WorkFoundDone,
        /// A handler found that its run was cancelled or its lease lost.
        WorkFoundCancelled,
        /// A consumer deferred an id.
        IdDeferred,
        /// The work on a deferred id succeeded.
        DeferredIdDone,
        /// A deferred id was discarded.
        DeferredIdDiscarded,
        /// The work on an id was done again because that had been requested.
        WorkedAgain,
        /// The end of a database reached a handler after the tombstone was dropped.
        GoneWithoutRow,
        /// A database ended while a handler worked on it, and the next one of its name arrived together with this end.
        EndBeforeNextWork,
        /// A key was moved to the successor of its shard.
        KeyMoved,
        /// A consumer moved on to the shards that a reshard had created.
        ConsumerWentOver,
        /// A consumer was reset after it had worked.
        ConsumerReset,
        /// A consumer was deleted after it had worked.
        ConsumerDeleted,
        /// A consumer was paused after it had worked.
        ConsumerPaused,
        /// A consumer was deleted because it had been without a member for long enough.
        ConsumerExpired,
        /// A member learned that its consumer was gone.
        ConsumerFoundGone,
        /// A consumer that the janitor had found without a member got a member again.
        IdleConsumerUsedAgain,
        /// A consumer moved on to shards that were already closed.
        ConsumerWentOverToClosed,
        /// A run began while another process still had a run of the same id.
        RunsOverlap,
        /// A row arrived while a handler worked on its id.
        RowWhileRunning,
        /// A database ended while a handler worked on it.
        EndWhileRunning,
        /// A database ended while it was deferred.
        EndWhileDeferred,
        /// A checkpoint passed a row whose id was deferred.
        DeferredIdPassed,
        /// An id on which the work always fails was tried again after the faults.
        FailingIdTriedAtRest,
        /// The low watermark of a consumer was ahead of a checkpoint.
        LowWatermarkAhead,
        /// An HTTP client learned that its position was too old.
        WebClientExpired,
        /// An HTTP client was sent several rows of one database.
        WebRowsOfOneDatabase,
        /// An HTTP client cut its connection.
        WebConnectionCut,
        /// An orphaned commit happened after its process had crashed.
        OrphanCommitted,
        /// A commit survived that was not synced when the power failed.
        CommitOutlivedPower,
        /// A commit was lost that was not synced when the power failed.
        CommitWentWithPower,
        /// A commit that was not synced when the power failed survived only in part, and was discarded.
        CommitTorn,
        /// The power failed while a journal or a snapshot was being written.
        PowerFailedWithinSnapshot,
        /// The disk failed during a commit, and the store ended because of that.
        StoreFailedWithDisk,
        /// The disk had no room for a commit, but had room again for later ones.
        CommitHadNoRoom,
        /// The store was replaced with a copy.
        StoreRestored,
        /// A process opened a store whose versions were behind those in its rows.
        OlderStoreOpened,
        /// A node found that the incarnation was raised, and opened the bus again.
        RaiseFound,
        /// An HTTP client that had seen rows that a restore lost was refused.
        LostPositionRefused,
        /// The feed had a database whose name had the maximum length.
        LongNameFolded,
        /// A dispatcher had hundreds of subscribers.
        ManySubscribers,
    }
}

impl Fault {
    /// Whether the fault strikes only handlers of consumers.
    pub fn is_of_handlers(self) -> bool {
        matches!(self, Self::HandlerError | Self::HandlerPanic | Self::HandlerHangs | Self::HandlerLeavesTask)
    }
}

impl Witness {
    /// Whether the state occurs only in a small share of worlds.
    fn is_rare(self) -> bool {
        matches!(
            self,
            Self::CommitOutlivedPower
                | Self::CommitTorn
                | Self::PowerFailedWithinSnapshot
                | Self::StoreFailedWithDisk
                | Self::CommitHadNoRoom
                | Self::WebClientExpired
                | Self::GoneWithoutRow
                | Self::RaiseFound
                | Self::LostPositionRefused
                | Self::CoalescedInRing
        )
    }

    /// Whether the state must have occurred after this many worlds: a rare state may take ten times as many.
    pub fn is_due(self, worlds: u64) -> bool {
        worlds >= if self.is_rare() { 10_000 } else { 1_000 }
    }
}
