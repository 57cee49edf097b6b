//! [`Health`]: what keeps the roles of a process from working, and how often that is logged.
//!
//! A failing loop tries again, often many times a second, and many loops fail for the same reason: if the store is unavailable, all of them
//! do. So loops report their failures here. Each cause is logged once, and then with growing pauses and a count; all failures of the store
//! are one cause. Current failures are kept, so that `ready` and the status can name them.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::base::{env::Env, error::Error, log_throttle::LogThrottle};

/// The failing work, as the subject of a message, and its partition or zero.
type FailureKey = (&'static str, u64);

/// A part of the process that has to end when the bus that the process opened no longer exists. A part without a lease would otherwise
/// continue with whatever is under the prefix by then.
pub(crate) trait EndsWithBus: Send + Sync {
    /// Ends the part. [`Health::ended`] already says why.
    fn end_with_bus(&self);
}

/// What keeps the roles of a process from working.
#[derive(Default)]
pub(crate) struct Health {
    /// The current failures.
    troubles: Mutex<BTreeMap<FailureKey, Trouble>>,
    /// The number of `troubles`, readable without a lock.
    troubled: AtomicUsize,
    /// Whether a failure has been logged since everything last worked.
    is_said: AtomicBool,
    log: LogThrottle,
    /// Why the process can no longer work, however long it waits.
    ended: OnceLock<Error>,
    /// Wakes everybody who waits for `ended`.
    is_ended: Notify,
    /// The parts that end with the bus, unless they have ended before.
    ends_with_bus: Mutex<Vec<Weak<dyn EndsWithBus>>>,
    /// The nodes of this process with their tokens; `None` for a node that has expired.
    nodes: Mutex<BTreeMap<[u8; 16], Option<[u8; 16]>>>,
}

/// A failure that persists.
#[derive(Debug, Clone)]
pub(crate) struct Trouble {
    /// The failing work.
    #[cfg_attr(not(feature = "http"), expect(dead_code, reason = "`ready` reports it"))]
    pub what: &'static str,
    /// When the work began to fail, on the clock of the process.
    #[cfg_attr(not(feature = "http"), expect(dead_code, reason = "`ready` reports it"))]
    pub since: Duration,
    /// The latest failure.
    pub error: Error,
}

impl Health {
    /// Records that `what` failed at `place`, and will be tried again.
    pub fn failed(&self, env: &Env, what: &'static str, place: u64, error: &Error) {
        let now = env.now();
        let mut troubles = self.troubles.lock();
        let trouble = troubles.entry((what, place)).or_insert_with(|| Trouble {
            what,
            since: now,
            error: error.clone(),
        });
        trouble.error = error.clone();
        self.troubled.store(troubles.len(), Ordering::Relaxed);
        drop(troubles);
        self.complain(env, what, error);
    }

    /// Records that `what` works at `place`, whether or not it failed before.
    pub fn works(&self, what: &'static str, place: u64) {
        if self.troubled.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut troubles = self.troubles.lock();
        if troubles.remove(&(what, place)).is_some() {
            self.troubled.store(troubles.len(), Ordering::Relaxed);
            // The end of the trouble is logged only if the trouble itself was.
            if troubles.is_empty() && self.is_said.swap(false, Ordering::Relaxed) {
                tracing::warn!(what, "works again");
            }
        }
    }

    /// Logs that `what` failed, unless that was logged recently.
    pub fn complain(&self, env: &Env, what: &'static str, error: &Error) {
        if self.ended().is_some() {
            return;
        }
        let Some(unsaid) = self.log.is_due(env.now(), cause(what, error)) else { return };
        self.is_said.store(true, Ordering::Relaxed);
        // One line is enough, with the number of failures that were not logged.
        tracing::warn!(what, %error, unsaid, "failed, trying again");
    }

    /// Decides, with growing pauses between lines, whether to log a remark that is not a failure. If so, returns how many were skipped.
    pub fn remark(&self, env: &Env, what: &str) -> Option<u64> {
        self.log.is_due(env.now(), what.to_owned())
    }

    /// Logs that `what` panicked and starts again: once, and then with growing pauses.
    pub fn panicked(&self, env: &Env, what: &str, panic: &str) {
        if let Some(unsaid) = self.log.is_due(env.now(), format!("panic of {what}")) {
            tracing::error!(what, panic, unsaid, "panicked, starting again");
        }
    }

    /// Returns the current failures, oldest first.
    #[cfg(feature = "http")]
    pub fn troubles(&self) -> Vec<Trouble> {
        let mut troubles: Vec<_> = self.troubles.lock().values().cloned().collect();
        troubles.sort_by_key(|trouble| trouble.since);
        troubles
    }

    /// Records that the bus that the process opened no longer exists, so waiting does not help. This is logged once.
    pub fn end(&self, error: Error) {
        let mut error = Some(error);
        let ended = self.ended.get_or_init(|| error.take().expect("it is taken once"));
        if error.is_none() {
            self.is_ended.notify_waiters();
            tracing::error!(%ended, "this process can no longer work for its bus, and its roles end: start it again");
            // Ending a part wakes tasks of other parts, so the lock is released first.
            let parts = std::mem::take(&mut *self.ends_with_bus.lock());
            for part in parts.iter().filter_map(Weak::upgrade) {
                part.end_with_bus();
            }
        }
    }

    /// Ends `part` once the process can no longer work, or at once if it already cannot.
    pub fn end_with_bus(&self, part: &Arc<impl EndsWithBus + 'static>) {
        let known = Arc::downgrade(part);
        let mut parts = self.ends_with_bus.lock();
        parts.retain(|part| part.strong_count() > 0);
        parts.push(known);
        drop(parts);
        // If the bus ends at this moment, the part is ended twice, which is harmless.
        if self.ended().is_some() {
            part.end_with_bus();
        }
    }

    /// Completes when the process can no longer work.
    pub async fn end_of_work(&self) -> &Error {
        loop {
            let ended = self.is_ended.notified();
            if let Some(error) = self.ended() {
                return error;
            }
            ended.await;
        }
    }

    /// Returns why the process can no longer work; `None` if it still can.
    pub fn ended(&self) -> Option<&Error> {
        self.ended.get()
    }

    /// Records that `node` of this process is a member under `token`, or has expired.
    pub fn set_membership(&self, node: [u8; 16], token: Option<[u8; 16]>) {
        self.nodes.lock().insert(node, token);
    }

    /// Records that `node` of this process left, or that its heartbeat was dropped.
    pub fn left(&self, node: [u8; 16]) {
        self.nodes.lock().remove(&node);
    }

    /// Returns the nodes of this process with their tokens; `None` for a node that has expired.
    #[cfg(feature = "http")]
    pub fn nodes(&self) -> Vec<([u8; 16], Option<[u8; 16]>)> {
        self.nodes.lock().iter().map(|(&node, &token)| (node, token)).collect()
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health").field("troubles", &self.troubled).finish_non_exhaustive()
    }
}

/// Returns the name of a cause. If the store is unavailable or slow, everything fails, with various codes; all of that is one cause.
fn cause(what: &str, error: &Error) -> String {
    match error {
        error if error.is_of_store() => "store".to_owned(),
        error => format!("{what}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::error::StoreError;

    /// If the store is unavailable, everything fails, with various codes: one line is enough.
    #[test]
    fn all_failures_of_the_store_are_one_cause() {
        let of = |error| cause("fold", &Error::Store(error));
        assert_eq!(
            of(StoreError::TRANSACTION_TIMED_OUT),
            cause("poll", &Error::Store(StoreError::PROCESS_BEHIND))
        );
        let other = Error::corrupt("row", "bad");
        assert_ne!(cause("fold", &other), cause("poll", &other));
    }

    #[tokio::test]
    async fn what_fails_is_kept_until_it_works() {
        let (health, env) = (Health::default(), Env::system());
        let error = Error::Store(StoreError::DATABASE_LOCKED);
        health.failed(&env, "fold", 3, &error);
        health.failed(&env, "fold", 4, &error);
        health.works("fold", 3);
        health.works("fold", 5);
        assert_eq!(health.troubles().len(), 1);
        health.works("fold", 4);
        assert!(health.troubles().is_empty());
        health.end(Error::corrupt("bus", "gone"));
        health.end(Error::corrupt("bus", "gone again"));
        assert!(health.ended().unwrap().to_string().contains("gone"));
    }
}
