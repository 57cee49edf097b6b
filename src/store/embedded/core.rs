//! [`Core`]: the newest rows, and the state for deciding commits.
//!
//! # Invariants
//!
//! 1. `root` holds every commit up to `version` and none after it; both change together.
//! 2. `history` holds every published group of the last [`TRANSACTION_LIFETIME`], oldest first, each with the values that
//!    it replaced: any version since `forgotten` can be read again by undoing the groups after it.
//! 3. `conflicts` holds every write of those groups, and of the group that is being persisted. A transaction younger than
//!    the lifetime therefore finds every write that came after its read version.
//! 4. Versions grow with every group, and with time: about a million a second.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use imbl::OrdMap;

use super::{
    atomic,
    conflicts::{Conflicts, ReadConflict, bounds},
    watches::{self, Watches},
};
use crate::{
    base::{
        encoding::Versionstamp,
        error::{Result, StoreError},
    },
    store::{AtomicOp, KeyRange, TRANSACTION_LIFETIME, mutation::Mutation},
};

pub(super) type Root = OrdMap<Bytes, Bytes>;

/// The rows at the read version of a transaction.
#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    pub root: Root,
    pub version: u64,
    /// Since when a newer version may exist, on the clock of the engine.
    pub taken: Duration,
}

impl Snapshot {
    /// Whether the snapshot is older than a transaction may get.
    pub fn is_too_old(&self, now: Duration) -> bool {
        now.saturating_sub(self.taken) > TRANSACTION_LIFETIME
    }
}

/// A transaction to be committed.
#[derive(Debug, Default)]
pub(super) struct Request {
    /// The version and time of its snapshot, if it has read anything.
    pub snapshot: Option<(u64, Duration)>,
    pub reads: Vec<ReadConflict>,
    /// The ranges that it declares as written besides its mutations.
    pub writes: Vec<KeyRange>,
    pub mutations: Vec<Mutation>,
    pub watches: Vec<watches::Pending>,
    /// Receives the ranges on which it has failed, if the caller asked for them.
    pub report: Option<Arc<parking_lot::Mutex<Vec<KeyRange>>>>,
}

impl Request {
    /// Whether it changes nothing that other transactions could notice.
    pub fn is_read_only(&self) -> bool {
        self.mutations.is_empty() && self.writes.is_empty()
    }
}

/// The answer to a [`Request`]; `None` if it wrote nothing.
pub(super) type Outcome = Result<Option<Versionstamp>, StoreError>;

/// A group of commits that is decided but not published.
#[derive(Debug)]
pub(super) struct Staged {
    /// The rows with the group's writes.
    pub root: Root,
    /// The group's version.
    pub version: u64,
    written: Written,
    /// The answers, in the order of the requests.
    pub outcomes: Vec<Outcome>,
    /// The watches to arm.
    watches: Vec<watches::Pending>,
}

impl Staged {
    /// Whether a transaction of the group commits at its version, even if it only clears missing keys.
    pub fn is_commit(&self) -> bool {
        self.outcomes.iter().any(|outcome| matches!(outcome, Ok(Some(_))))
    }

    /// The keys that the group wrote, each as often as it was written.
    pub fn keys(&self) -> impl Iterator<Item = &Bytes> {
        self.written.undo.iter().map(|(key, _)| key)
    }
}

/// The writes of a group of commits.
#[derive(Debug, Default)]
struct Written {
    /// Each written key with its value before, in order.
    undo: Vec<(Bytes, Option<Bytes>)>,
}

/// A published group.
#[derive(Debug)]
struct Past {
    version: u64,
    /// When it was published.
    at: Duration,
    /// When the previous version was last given out.
    given_out_before: Duration,
    written: Written,
}

/// The newest rows, and the state for deciding commits.
#[derive(Debug)]
pub(super) struct Core {
    /// The newest rows.
    root: Root,
    version: u64,
    /// The groups of the last 5 s.
    history: VecDeque<Past>,
    /// The version of the newest group that has left `history`.
    forgotten: u64,
    /// The writes of the last 5 s.
    conflicts: Conflicts,
    pub watches: Watches,
    /// When the newest version was last given out, as a read version or by its commit.
    given_out: Duration,
    /// The version at time zero of the engine's clock.
    version_start: u64,
}

impl Core {
    /// A core that starts with `root` at `version`.
    pub fn new(root: Root, version: u64) -> Self {
        Self {
            root,
            version,
            history: VecDeque::new(),
            forgotten: version,
            conflicts: Conflicts::default(),
            watches: Watches::default(),
            given_out: Duration::ZERO,
            version_start: version,
        }
    }

    /// The newest version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Whether `version` was given out since the core was made.
    pub fn has_used(&self, version: u64) -> bool {
        (self.version_start..=self.version).contains(&version)
    }

    /// A snapshot of the newest rows.
    pub fn snapshot(&mut self, now: Duration) -> Snapshot {
        self.given_out = now;
        Snapshot { root: self.root.clone(), version: self.version, taken: now }
    }

    /// A snapshot at `version`.
    pub fn snapshot_at(&self, version: u64) -> Result<Snapshot, StoreError> {
        if version > self.version {
            return Err(StoreError::FUTURE_VERSION);
        }
        if version < self.forgotten {
            return Err(StoreError::TRANSACTION_TOO_OLD);
        }
        // On a cluster versions move by themselves. So a version that was not given out lately is too old, even if
        // nothing was written since.
        let mut snapshot = Snapshot { root: self.root.clone(), version: self.version, taken: self.given_out };
        for past in self.history.iter().rev().take_while(|past| past.version > version) {
            for (key, value) in past.written.undo.iter().rev() {
                match value {
                    Some(value) => snapshot.root.insert(key.clone(), value.clone()),
                    None => snapshot.root.remove(key),
                };
            }
            snapshot.taken = past.given_out_before;
        }
        snapshot.version = version;
        Ok(snapshot)
    }

    /// Decides `group` and applies the commits to `root`, which must be the newest one. They can be read only after
    /// [`Core::publish`].
    pub fn stage(&mut self, root: Root, group: Vec<Request>, now: Duration) -> Staged {
        let elapsed_us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        let version = (self.version + 1).max(self.version_start.saturating_add(elapsed_us));
        let mut staged = Staged {
            root,
            version,
            written: Written::default(),
            outcomes: Vec::with_capacity(group.len()),
            watches: Vec::new(),
        };
        for (order, mut request) in group.into_iter().enumerate() {
            let order = u16::try_from(order).expect("a group is smaller than 65,536");
            let watches = std::mem::take(&mut request.watches);
            let outcome = self.decide(request, Versionstamp::new(version, order), &mut staged, now);
            match &outcome {
                Ok(_) => staged.watches.extend(watches),
                Err(error) => watches::fail(watches, error),
            }
            staged.outcomes.push(outcome);
        }
        staged
    }

    /// Decides one transaction, and applies it if it commits.
    fn decide(
        &mut self,
        request: Request,
        stamp: Versionstamp,
        staged: &mut Staged,
        now: Duration,
    ) -> Outcome {
        if request.is_read_only() {
            return Ok(None);
        }
        // Once it has a read version, even a blind write can get too old, as in FoundationDB.
        if let Some((version, taken)) = request.snapshot {
            if now.saturating_sub(taken) > TRANSACTION_LIFETIME || version < self.forgotten {
                return Err(StoreError::TRANSACTION_TOO_OLD);
            }
            let mut written = request.reads.iter().filter(|read| self.conflicts.written_after(read, version));
            if let Some(first) = written.next() {
                if let Some(report) = &request.report {
                    let ranges = [first].into_iter().chain(written).map(ReadConflict::range).collect();
                    *report.lock() = ranges;
                }
                return Err(StoreError::NOT_COMMITTED);
            }
        }
        for range in &request.writes {
            self.conflicts.range_written(range, staged.version);
        }
        for mutation in request.mutations {
            self.apply(mutation, stamp, staged);
        }
        Ok(Some(stamp))
    }

    /// Applies one write to the staged rows.
    fn apply(&mut self, mutation: Mutation, stamp: Versionstamp, staged: &mut Staged) {
        let (key, value) = match mutation {
            Mutation::Set(key, value) => (key, Some(value)),
            Mutation::Clear(key) => (key, None),
            Mutation::ClearRange(begin, end) => {
                let range = KeyRange { begin, end };
                self.conflicts.range_written(&range, staged.version);
                let keys: Vec<_> =
                    staged.root.range::<_, [u8]>(bounds(&range)).map(|(key, _)| key.clone()).collect();
                for key in keys {
                    let old = staged.root.remove(&key);
                    staged.written.undo.push((key, old));
                }
                return;
            }
            Mutation::Atomic(AtomicOp::SetVersionstampedKey, key, value) => {
                (atomic::stamped(&key, stamp), Some(value))
            }
            Mutation::Atomic(AtomicOp::SetVersionstampedValue, key, value) => {
                (key, Some(atomic::stamped(&value, stamp)))
            }
            Mutation::Atomic(op, key, operand) => {
                let value = atomic::apply(op, staged.root.get(&key), &operand);
                (key, value)
            }
        };
        let old = match value {
            Some(value) => staged.root.insert(key.clone(), value),
            None => staged.root.remove(&key),
        };
        self.conflicts.key_written(key.clone(), staged.version);
        staged.written.undo.push((key, old));
    }

    /// Takes the newest rows, to be changed in place. Until [`Core::publish`] the core has none.
    pub fn take_root(&mut self) -> Root {
        std::mem::take(&mut self.root)
    }

    pub fn share_root(&self) -> Root {
        self.root.clone()
    }

    /// Makes the group readable, fires and arms watches, and forgets old history.
    pub fn publish(&mut self, staged: Staged, now: Duration) -> Vec<Outcome> {
        let is_commit = staged.is_commit();
        self.root = staged.root;
        if is_commit {
            self.version = staged.version;
            if !self.watches.is_empty() {
                for (key, _) in &staged.written.undo {
                    self.watches.key_changed(key, self.root.get(key));
                }
            }
            let given_out_before = std::mem::replace(&mut self.given_out, now);
            let written = staged.written;
            self.history.push_back(Past { version: staged.version, at: now, given_out_before, written });
        }
        self.arm(staged.watches);
        self.forget(now);
        staged.outcomes
    }

    /// Ends a transaction without writes: arms its watches, and forgets old history.
    pub fn finish_reading(&mut self, watches: Vec<watches::Pending>, now: Duration) {
        self.arm(watches);
        self.forget(now);
    }

    /// Arms the watches of a transaction that was committed.
    fn arm(&mut self, watches: Vec<watches::Pending>) {
        for watch in watches {
            let value = self.root.get(&watch.key);
            self.watches.arm(watch, value);
        }
    }

    /// Drops the groups that no living transaction can conflict with or read before.
    fn forget(&mut self, now: Duration) {
        while let Some(past) =
            self.history.pop_front_if(|past| now.saturating_sub(past.at) > TRANSACTION_LIFETIME)
        {
            self.forgotten = past.version;
            self.conflicts.forget(past.version);
        }
    }
}

/// The rows in memory. A commit that panicked may have left them half changed, so nothing may read them then.
pub(super) fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().expect("no commit has panicked")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Commits one transaction and returns the stamp's version.
    fn commit(core: &mut Core, request: Request, now: Duration) -> Outcome {
        let root = core.take_root();
        let staged = core.stage(root, vec![request], now);
        core.publish(staged, now).remove(0)
    }

    fn set(key: &'static str, value: &'static str) -> Request {
        Request { mutations: vec![Mutation::Set(key.into(), value.into())], ..Request::default() }
    }

    #[test]
    fn past_versions_can_be_read_until_they_are_forgotten() {
        let mut core = Core::new(Root::new(), 0);
        let second = Duration::from_secs(1);
        let first = commit(&mut core, set("k", "1"), second).unwrap().unwrap().version();
        let newer = commit(&mut core, set("k", "2"), 2 * second).unwrap().unwrap().version();
        assert!(newer > first && newer - first >= 1_000_000, "versions advance with time");

        let then = core.snapshot_at(first).unwrap();
        assert_eq!(then.root.get(&b"k"[..]).unwrap(), "1");
        assert_eq!(then.taken, second, "it ages from when it was last given out");
        assert_eq!(core.snapshot_at(newer + 1).unwrap_err(), StoreError::FUTURE_VERSION);

        commit(&mut core, set("other", "x"), 8 * second).unwrap();
        assert_eq!(core.snapshot_at(first).unwrap_err(), StoreError::TRANSACTION_TOO_OLD);
        assert!(core.conflicts.written_after(&ReadConflict::Key("other".into()), newer));
    }

    #[test]
    fn transactions_of_one_group_see_each_other_as_conflicts() {
        let mut core = Core::new(Root::new(), 0);
        let read = |key: &'static str, request: Request| Request {
            snapshot: Some((0, Duration::ZERO)),
            reads: vec![ReadConflict::Key(key.into())],
            ..request
        };
        let root = core.take_root();
        let staged = core.stage(root, vec![set("a", "1"), read("a", set("b", "1"))], Duration::ZERO);
        let outcomes = core.publish(staged, Duration::ZERO);
        assert!(outcomes[0].is_ok());
        assert_eq!(outcomes[1], Err(StoreError::NOT_COMMITTED));
    }
}
