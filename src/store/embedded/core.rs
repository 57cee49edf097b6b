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

use super::{
    atomic::{self, Effect},
    conflicts::{Conflicts, ReadConflict},
    rows::Rows,
    undo::Undo,
    watches::{self, Watches},
};
use crate::{
    base::{
        encoding::Versionstamp,
        error::{Result, StoreError},
    },
    store::{AtomicOp, KeyRange, TRANSACTION_LIFETIME, mutation::Mutation},
};

/// The rows at the read version of a transaction.
#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    pub root: Rows,
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
    pub root: Rows,
    /// The group's version.
    pub version: u64,
    undo: Undo,
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
    pub fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.undo.keys()
    }

    /// Gives `key` what `change` makes of its value.
    fn change<V: AsRef<[u8]>>(&mut self, key: &[u8], change: impl FnOnce(Option<&[u8]>) -> Option<V>) {
        if self.undo.is_full() {
            self.undo.share(self.root.clone());
        }
        self.root.change(key, |before| {
            self.undo.push(key, before);
            change(before)
        });
    }
}

/// A published group.
#[derive(Debug)]
struct Past {
    version: u64,
    /// When it was published.
    at: Duration,
    /// When the previous version was last given out.
    given_out_before: Duration,
    undo: Undo,
}

/// The newest rows, and the state for deciding commits.
#[derive(Debug)]
pub(super) struct Core {
    /// The newest rows.
    root: Rows,
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
    /// Memory for what the next group replaces.
    spare: Undo,
}

impl Core {
    /// A core that starts with `root` at `version`.
    pub fn new(root: Rows, version: u64) -> Self {
        Self {
            root,
            version,
            history: VecDeque::new(),
            forgotten: version,
            conflicts: Conflicts::default(),
            watches: Watches::default(),
            given_out: Duration::ZERO,
            version_start: version,
            spare: Undo::default(),
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
            past.undo.revert(&mut snapshot.root);
            snapshot.taken = past.given_out_before;
        }
        snapshot.version = version;
        Ok(snapshot)
    }

    /// Decides `group` and applies the commits to `root`, which must be the newest one. They can be read only after
    /// [`Core::publish`].
    pub fn stage(&mut self, root: Rows, group: Vec<Request>, now: Duration) -> Staged {
        let elapsed_us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        let version = (self.version + 1).max(self.version_start.saturating_add(elapsed_us));
        let mut staged = Staged {
            root,
            version,
            undo: std::mem::take(&mut self.spare),
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
        match mutation {
            Mutation::Set(key, value) => self.write(&key, staged, |_| Some(value)),
            Mutation::Clear(key) => self.write(&key, staged, |_| None::<Bytes>),
            Mutation::ClearRange(begin, end) => {
                let range = KeyRange { begin, end };
                self.conflicts.range_written(&range, staged.version);
                let keys: Vec<_> = staged.root.range(&range, false).map(|(key, _)| key.to_vec()).collect();
                for key in keys {
                    staged.change(&key, |_| None::<Bytes>);
                }
            }
            Mutation::Atomic(AtomicOp::SetVersionstampedKey, key, value) => {
                self.write(&atomic::stamped(&key, stamp), staged, |_| Some(value));
            }
            Mutation::Atomic(AtomicOp::SetVersionstampedValue, key, value) => {
                self.write(&key, staged, |_| Some(atomic::stamped(&value, stamp)));
            }
            Mutation::Atomic(AtomicOp::Add, key, operand) => {
                self.write(&key, staged, |value| Some(atomic::add(value.unwrap_or_default(), &operand)));
            }
            Mutation::Atomic(op, key, operand) => match atomic::apply(op, staged.root.get(&key), &operand) {
                Effect::Keep => self.conflicts.key_written(&key, staged.version),
                Effect::Become(value) => self.write(&key, staged, |_| value),
            },
        }
    }

    /// Gives `key` what `change` makes of its value.
    fn write<V: AsRef<[u8]>>(
        &mut self,
        key: &[u8],
        staged: &mut Staged,
        change: impl FnOnce(Option<&[u8]>) -> Option<V>,
    ) {
        staged.change(key, change);
        self.conflicts.key_written(key, staged.version);
    }

    /// Takes the newest rows, to be changed in place. Until [`Core::publish`] the core has none.
    pub fn take_root(&mut self) -> Rows {
        std::mem::take(&mut self.root)
    }

    pub fn share_root(&self) -> Rows {
        self.root.clone()
    }

    /// Makes the group readable, fires and arms watches, and forgets old history.
    pub fn publish(&mut self, mut staged: Staged, now: Duration) -> Vec<Outcome> {
        let is_commit = staged.is_commit();
        self.root = staged.root;
        if is_commit {
            self.version = staged.version;
            if !self.watches.is_empty() {
                for key in staged.undo.keys() {
                    self.watches.key_changed(key, self.root.get(key));
                }
            }
            let given_out_before = std::mem::replace(&mut self.given_out, now);
            let undo = staged.undo.take();
            self.history.push_back(Past { version: staged.version, at: now, given_out_before, undo });
        }
        staged.undo.clear();
        self.spare = staged.undo;
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
        let mut core = Core::new(Rows::default(), 0);
        let second = Duration::from_secs(1);
        let first = commit(&mut core, set("k", "1"), second).unwrap().unwrap().version();
        let newer = commit(&mut core, set("k", "2"), 2 * second).unwrap().unwrap().version();
        assert!(newer > first && newer - first >= 1_000_000, "versions advance with time");

        let then = core.snapshot_at(first).unwrap();
        assert_eq!(then.root.get(b"k").unwrap(), b"1");
        assert_eq!(then.taken, second, "it ages from when it was last given out");
        assert_eq!(core.snapshot_at(newer + 1).unwrap_err(), StoreError::FUTURE_VERSION);

        commit(&mut core, set("other", "x"), 8 * second).unwrap();
        assert_eq!(core.snapshot_at(first).unwrap_err(), StoreError::TRANSACTION_TOO_OLD);
        assert!(core.conflicts.written_after(&ReadConflict::Key("other".into()), newer));
    }

    #[test]
    fn transactions_of_one_group_see_each_other_as_conflicts() {
        let mut core = Core::new(Rows::default(), 0);
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

    /// Regression: each operation that kept a value copied it, so a transaction of 200 kB took hundreds of megabytes for 5 s.
    #[test]
    fn operations_that_keep_a_large_value_copy_nothing() {
        let mut core = Core::new(Rows::default(), 0);
        let second = Duration::from_secs(1);
        let large = Mutation::Set("k".into(), vec![7; 100_000].into());
        commit(&mut core, Request { mutations: vec![large], ..Request::default() }, second).unwrap();
        let before = core.version();
        let operations = [AtomicOp::CompareAndClear, AtomicOp::ByteMax];
        let mutations =
            (0..1_000).map(|n| Mutation::Atomic(operations[n % 2], "k".into(), Bytes::from_static(b"a")));
        let mutations: Vec<_> = mutations.collect();
        commit(&mut core, Request { mutations, ..Request::default() }, 2 * second).unwrap();
        // 97 is greater than 7, so the first ByteMax has replaced the value, and nothing else has.
        assert!(core.history.back().unwrap().undo.len() < 2 * 100_000);
        assert_eq!(core.root.get(b"k").unwrap(), b"a");
        assert!(core.conflicts.written_after(&ReadConflict::Key("k".into()), before));
    }

    /// Regression: a clear copied all that it cleared, twice while it was published.
    #[test]
    fn a_big_clear_shares_what_it_clears() {
        let mut core = Core::new(Rows::default(), 0);
        let second = Duration::from_secs(1);
        let rows =
            (0..2_000_u32).map(|n| Mutation::Set(n.to_be_bytes().to_vec().into(), vec![7; 100].into()));
        commit(&mut core, Request { mutations: rows.collect(), ..Request::default() }, second).unwrap();
        let (before, full) = (core.version(), core.share_root());
        let clear = Mutation::ClearRange(Bytes::new(), Bytes::from_static(b"\xff"));
        let and = Mutation::Set("k".into(), "v".into());
        commit(&mut core, Request { mutations: vec![clear, and], ..Request::default() }, 2 * second).unwrap();
        assert_eq!(core.root.len(), 1);
        assert!(core.history.back().unwrap().undo.len() < 10_000);
        let past = core.snapshot_at(before).unwrap().root;
        assert!(past.iter().eq(full.iter()));
    }
}
