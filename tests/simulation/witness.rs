//! The faults of a simulation, and the interesting states that it has met.
//!
//! A simulation that meets nothing interesting proves nothing. So each state that the design is made for has a name
//! here, and enough seeds must have met every one.

/// Declares an enumeration whose members have names and explanations.
macro_rules! named {
    ($(#[$doc:meta])* $type:ident { $($(#[doc = $text:literal])+ $name:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $type { $($(#[doc = $text])+ $name,)* }

        impl $type {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The explanation.
            pub fn explanation(self) -> &'static str {
                match self { $(Self::$name => concat!($($text),+).trim_ascii(),)* }
            }
        }
    };
}

named! {
    /// A fault of a world.
    Fault {
        /// A commit fails with 1020 although nothing was written.
        Conflict,
        /// A commit fails with 1021, and has happened.
        UnknownCommitted,
        /// A commit fails with 1021, and has not happened.
        UnknownLost,
        /// A commit fails with 1039, and has happened.
        VersionChanged,
        /// A commit fails with 1031, and happens later.
        LateCommit,
        /// A commit fails with 1031, and never happens.
        TimedOut,
        /// A commit fails with 1007.
        CommitTooOld,
        /// A commit fails with 1038 or 1042.
        Refused,
        /// A commit takes long to be decided, or to be answered.
        SlowCommit,
        /// A read fails with 1007, and so do all later operations.
        ReadTooOld,
        /// A read fails with 1009, 1037 or 1038.
        ReadBehind,
        /// A read fails with 1031.
        ReadTimedOut,
        /// A read takes long.
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
        /// The power of the machine with the store and all processes fails while a commit or a snapshot is written or synced.
        PowerLoss,
        /// An operation of the disk fails: an error of the device, a full disk, too many open files, half a write.
        DiskFails,
        /// The disk has no room for some commits, and has some again later.
        NoRoom,
        /// A process is paused, and goes on later.
        Pause,
        /// A clock jumps ahead.
        ClockJump,
        /// A handler of a consumer returns an error.
        HandlerError,
        /// A handler of a consumer panics.
        HandlerPanic,
        /// A handler of a consumer never returns.
        HandlerHangs,
        /// A handler of a consumer returns an error, and leaves a task that commits its work later.
        HandlerLeavesTask,
    }
}

named! {
    /// An interesting state that a world has been in.
    Witness {
        /// A fold was refused, because of a lost lease or of a reshard.
        FoldRefused,
        /// A commit with a checkpoint or a key of a consumer was refused.
        ConsumerRefused,
        /// A transaction of a handler was refused.
        WorkRefused,
        /// An operation of the disk has failed.
        DiskFailed,
        /// A fold whose commit came late was committed.
        LateFoldCommitted,
        /// A late commit was refused by the store.
        LateCommitRefused,
        /// A fold was too large for its store, and came again in parts.
        FoldTooLarge,
        /// A task read on and on without waiting, and others of its process had their turn.
        BusyTaskGaveWay,
        /// One fold found the deletion of a database and the creation of its successor.
        DeletionAndCreationInOneFold,
        /// The janitor dropped a tombstone.
        TombstoneDropped,
        /// A subscriber that skips got `Lagged`.
        SubscriberLagged,
        /// A subscriber without a pace was given a row for an older one that waited for it in the ring.
        CoalescedInRing,
        /// A subscriber got `Expired`.
        SubscriberExpired,
        /// A subscriber was restarted within its first scan, after it had received some of it.
        RestartWithinFirstScan,
        /// The filter of a subscriber was replaced.
        FilterReplaced,
        /// The filter of a subscriber was replaced within its first scan, after it had received some of it.
        ReplacedWithinFirstScan,
        /// A tombstone was dropped before a subscriber that knew the database had received it.
        TombstoneDroppedWhileWaiting,
        /// A name was deleted twice or more between two deliveries to a subscriber that knew it.
        RecreatedTwiceBetween,
        /// A callback received a delivery again after it had panicked.
        GivenAgainAfterPanic,
        /// A callback was called with a batch of several deliveries.
        BatchCalledBack,
        /// A callback has passed a barrier.
        BarrierPassed,
        /// A mirror showed databases after everything had come to rest.
        MirrorAtRest,
        /// Several filters of a set wanted the same delivery.
        WantedByMany,
        /// A subscriber of some design documents received only a change that may be of any.
        DdocMayBeAny,
        /// A subscriber of some design documents received the deletion of a database with its documents.
        DdocsGone,
        /// A design document changed again between a row and the read of its changed documents.
        DdocAheadOfRow,
        /// A shard was read to its end, and its successors from there.
        ShardFollowedOver,
        /// A parallel job over the feed got `Expired`.
        CatalogueExpired,
        /// The feed of the documents of a database was resharded.
        DocumentsResharded,
        /// A database was deleted, and the feed of its documents with it.
        DocumentsRemoved,
        /// A layer named a wrong previous edit of a document.
        WrongEditNamed,
        /// A tail of documents learned that they are gone.
        DocumentTailEnded,
        /// A consumer has worked on a document.
        DocumentsWorked,
        /// A consumer of documents has ended, because its database was deleted.
        DocumentConsumerEnded,
        /// A handler found that its work was committed already.
        WorkFoundDone,
        /// A handler found that its run was cancelled, or its lease lost.
        WorkFoundCancelled,
        /// A consumer has deferred an id.
        IdDeferred,
        /// The work on a deferred id has succeeded.
        DeferredIdDone,
        /// A deferred id was discarded.
        DeferredIdDiscarded,
        /// The work on an id was done again, because somebody had asked for it.
        WorkedAgain,
        /// The end of a database came to a handler after its tombstone was dropped.
        GoneWithoutRow,
        /// A database ended while a handler worked on it, and the next one of its name came with its end.
        EndBeforeNextWork,
        /// A key was moved to the successor of its shard.
        KeyMoved,
        /// A consumer went over to the shards of a reshard.
        ConsumerWentOver,
        /// A consumer was reset while it had worked.
        ConsumerReset,
        /// A consumer was deleted while it had worked.
        ConsumerDeleted,
        /// A consumer was paused while it had worked.
        ConsumerPaused,
        /// A consumer was deleted because it had had no member for long enough.
        ConsumerExpired,
        /// A member learned that its consumer is gone.
        ConsumerFoundGone,
        /// A member came to a consumer that the janitor had found without one.
        IdleConsumerUsedAgain,
        /// A consumer went over to shards that were closed already.
        ConsumerWentOverToClosed,
        /// A run began while another process still had one of its id.
        RunsOverlap,
        /// A row came while a handler worked on its id.
        RowWhileRunning,
        /// A database ended while a handler worked on it.
        EndWhileRunning,
        /// A database ended while it was deferred.
        EndWhileDeferred,
        /// A checkpoint was behind a row whose id is deferred.
        DeferredIdPassed,
        /// An id on which the work always fails was tried again after the faults.
        FailingIdTriedAtRest,
        /// The low watermark of a consumer was ahead of a checkpoint.
        LowWatermarkAhead,
        /// A client over HTTP learned that its position is too old.
        WebClientExpired,
        /// A client over HTTP was sent several rows of one database.
        WebRowsOfOneDatabase,
        /// A client over HTTP has cut its connection.
        WebConnectionCut,
        /// An orphaned commit was committed after its process had crashed.
        OrphanCommitted,
        /// A commit that was not synced when the power failed survived.
        CommitOutlivedPower,
        /// A commit that was not synced when the power failed was lost.
        CommitWentWithPower,
        /// A commit that was not synced when the power failed survived in part, and was discarded.
        CommitTorn,
        /// The power failed while a journal or a snapshot was begun.
        PowerFailedWithinSnapshot,
        /// The disk has failed a commit, and the store has ended because of it.
        StoreFailedWithDisk,
        /// A commit had no room on the disk, and others had some later.
        CommitHadNoRoom,
        /// A copy of the store was put in its place.
        StoreRestored,
        /// A process opened a store that stands before its own rows.
        OlderStoreOpened,
        /// A node found that the incarnation was raised, and opened the bus again.
        RaiseFound,
        /// A client over HTTP that knew what a restore has lost was refused.
        LostPositionRefused,
        /// The feed had a database whose name is as long as a name may be.
        LongNameFolded,
        /// A dispatcher had hundreds of subscribers.
        ManySubscribers,
    }
}

impl Fault {
    /// Whether it strikes handlers of consumers only.
    pub fn is_of_handlers(self) -> bool {
        matches!(self, Self::HandlerError | Self::HandlerPanic | Self::HandlerHangs | Self::HandlerLeavesTask)
    }
}

impl Witness {
    /// Whether it takes many worlds to meet it.
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

    /// Whether so many worlds must have met it: rare ones take ten times as many.
    pub fn is_due(self, worlds: u64) -> bool {
        worlds >= if self.is_rare() { 10_000 } else { 1_000 }
    }
}
