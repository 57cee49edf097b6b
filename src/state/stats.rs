//! [`Stats`]: counts of the work done by the roles of one process.

use std::sync::Arc;

use crate::base::{
    durations::{Count, Durations},
    encoding::Counters,
    env::Env,
    health::Health,
    tasks,
};

/// Declares the counts and their snapshot.
macro_rules! stats {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// Counts of the work done by the roles of one process.
        #[derive(Debug, Default)]
        pub(crate) struct Stats {
            $($(#[doc = $doc])* pub $name: Count,)*
            /// Events folded, in the order of the lanes.
            folded: [Count; 4],
            /// The durations of folds that wrote something.
            pub fold_durations: Durations,
            /// The current failures of the roles.
            pub health: Health,
        }

        /// Counts of the work done by this process's roles since the bus was opened.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
        #[non_exhaustive]
        pub struct StatsSnapshot {
            $($(#[doc = $doc])* pub $name: u64,)*
            /// Events folded into notifications, by kind.
            pub folded: Counters,
        }

        impl StatsSnapshot {
            /// Returns each count except those by kind: its name, its description, and its value.
            #[cfg(feature = "http")]
            pub(crate) fn each(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
                [$((stringify!($name), concat!($($doc),*), self.$name),)*].into_iter()
            }
        }

        impl Stats {
            pub fn snapshot(&self) -> StatsSnapshot {
                StatsSnapshot {
                    $($name: self.$name.get(),)*
                    folded: Counters::from_lanes(self.folded.each_ref().map(Count::get)),
                }
            }
        }
    };
}

stats! {
    /// Folds committed.
    folds,
    /// Attempts to fold that failed and were repeated.
    fold_retries,
    /// Rows written to the feed.
    notifications,
    /// Events of database instances that had already been replaced; they changed no row.
    stale_events,
    /// How many times a reader skipped a row that could not be decoded.
    rows_skipped,
    /// Doorbells rung in the store.
    doorbells,
    /// Rows that the tail of the dispatcher has read.
    rows_tailed,
    /// Leases acquired, including those that the process had before.
    leases_acquired,
    /// Leases lost to other nodes while the process worked on them.
    leases_lost,
    /// How many times a node of the process lost its membership in the bus, and gave up all its work.
    nodes_dropped_out,
    /// Panics in the work on a leased resource. The work starts again after each.
    work_panics,
    /// How many times a lease was left without running work because the work failed. The work starts again after a pause.
    leases_without_work,
    /// Panics in tasks that keep a process going, such as heartbeats and polls. The task starts again after each.
    task_panics,
    /// Rows of deleted databases that the janitor has dropped.
    tombstones_dropped,
    /// Closed topology entries that the janitor has dropped.
    topologies_dropped,
    /// Consumers that the janitor has deleted because they had had no member for too long.
    consumers_expired,
    /// Rows that consumer handlers have finished.
    consumer_rows,
    /// Consumer checkpoints that were written outside the handlers' own transactions.
    consumer_checkpoints,
    /// Failures of consumer handlers, including panics and stalls.
    consumer_failures,
    /// Panics in consumer handlers.
    consumer_panics,
    /// How many times an id was deferred because its work failed too many times, or stalled.
    consumer_deferred,
    /// Panics in callbacks, and in the filter predicates that run before them.
    callback_panics,
    /// Items that were skipped because a callback panicked on them as many times as its policy allows.
    callback_skips,
    /// Panics in the tail of the dispatcher. The tail starts again after each.
    tail_panics,
    /// Rows sent by HTTP feeds.
    http_feed_rows,
    /// Bytes of HTTP feeds that were handed to connections.
    http_feed_bytes,
    /// HTTP feeds that were cut off by a failure.
    http_feed_failures,
}

impl Stats {
    /// Runs the work that `make` returns, until it ends. After a panic, which is counted and reported, calls `make` again.
    pub fn supervised<W: Future<Output = ()>, M: FnMut() -> W>(
        self: &Arc<Self>,
        env: &Env,
        what: &'static str,
        make: M,
    ) -> impl Future<Output = ()> + use<W, M> {
        let (stats, env) = (Arc::clone(self), env.clone());
        async move { tasks::supervised(&env, make, |panic| stats.panicked(&env, what, panic)).await }
    }

    /// Counts and reports a panic in the task `what`, which keeps going.
    pub fn panicked(&self, env: &Env, what: &str, panic: &str) {
        self.task_panics.add(1);
        self.health.panicked(env, what, panic);
    }

    /// Adds `counters` to the counts of folded events.
    pub fn add_folded(&self, counters: &Counters) {
        for (count, lane) in self.folded.iter().zip(counters.lanes()) {
            count.add(lane);
        }
    }
}
