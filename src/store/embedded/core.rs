//! [`Core`]: the newest rows, and the state that is needed to decide commits.
//!
//! # Invariants
//!
//! 1. `root` holds every commit up to `version` and none after it; both change together.
//! 2. `recent` holds every published group of the last [`TRANSACTION_LIFETIME`], with what it wrote and the values that it
//!    replaced: any version since `forgotten` can be read again by undoing the groups after it.
//! 3. `written_ranges` holds every written range of those groups. A transaction younger than the lifetime therefore finds every write after
//!    its read version. A group that was not written leaves nothing behind.
//! 4. Versions grow with every group, and with time: by about a million per second.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;

use super::{
    atomic::{self, Effect},
    conflicts::{ReadConflict, WrittenRanges},
    recent::{Recent, Since},
    rows::Rows,
    undo::Undo,
    watches::{self, Watches},
};
use crate::{
    base::{
        encoding::Versionstamp,
        error::{Result, StoreError},
    },
    store::{AtomicOp, KeyRange, Mutation, TRANSACTION_LIFETIME},
};

/// The rows at the read version of a transaction.
#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    pub root: Rows,
    pub version: u64,
    /// The time from which a newer version may exist, on the clock of the engine.
    pub taken: Duration,
}

impl Snapshot {
    /// Whether the snapshot is older than a transaction may become.
    pub fn is_too_old(&self, now: Duration) -> bool {
        now.saturating_sub(self.taken) > TRANSACTION_LIFETIME
    }
}

/// Everything that is needed to read at an earlier version, without the core.
pub(super) struct Past {
    newest: Snapshot,
    since: Since,
}

impl Past {
    /// Returns the snapshot at the earlier version.
    pub fn snapshot(self) -> Snapshot {
        let Self { mut newest, since } = self;
        since.revert(&mut newest.root);
        newest
    }
}

/// A transaction to be committed.
#[derive(Debug, Default)]
pub(super) struct Request {
    /// The version and time of the transaction's snapshot, if it has read anything.
    pub snapshot: Option<(u64, Duration)>,
    pub reads: Vec<ReadConflict>,
    /// The ranges that the transaction declares as written, besides its mutations.
    pub writes: Vec<KeyRange>,
    pub mutations: Vec<Mutation>,
    pub watches: Vec<watches::Pending>,
    /// Receives the ranges on which the transaction conflicted, if the caller asked for them.
    pub report: Option<Arc<parking_lot::Mutex<Vec<KeyRange>>>>,
    /// Bytes of keys, values and conflict ranges.
    pub size: usize,
}

impl Request {
    /// Whether the request changes nothing that other transactions could notice.
    pub fn is_read_only(&self) -> bool {
        self.mutations.is_empty() && self.writes.is_empty()
    }

    /// Fails the request and its watches with `error`, without trying to commit it.
    pub fn fail(self, error: &StoreError) -> Outcome {
        watches::fail(self.watches, error);
        Err(error.clone())
    }
}

/// The answer to a [`Request`]; `None` if it wrote nothing.
pub(super) type Outcome = Result<Option<Versionstamp>, StoreError>;

/// A group of commits that is decided but not yet published.
#[derive(Debug)]
pub(super) struct Staged {
    /// The rows with the group's writes.
    pub root: Rows,
    /// The group's version.
    pub version: u64,
    undo: Undo,
    /// The written ranges, for decisions within the group.
    ranges: WrittenRanges,
    /// The written ranges, for decisions in later groups.
    written: Vec<KeyRange>,
    /// The answers, in the order of the requests.
    pub outcomes: Vec<Outcome>,
    watches: Vec<watches::Pending>,
}

impl Staged {
    /// Whether any transaction of the group commits at the group's version, even one that only clears missing keys.
    pub fn is_commit(&self) -> bool {
        self.outcomes.iter().any(|outcome| matches!(outcome, Ok(Some(_))))
    }

    /// Begins a group at `version` on top of `root`, reusing the memory of `undo`.
    fn new(root: Rows, version: u64, undo: Undo) -> Self {
        let (ranges, written) = (WrittenRanges::default(), Vec::new());
        Self { root, version, undo, ranges, written, outcomes: Vec::new(), watches: Vec::new() }
    }

    /// Returns the stamp of the next transaction.
    fn stamp(&self) -> Versionstamp {
        let order = u16::try_from(self.outcomes.len()).expect("a group is smaller than 65,536");
        Versionstamp::new(self.version, order)
    }

    /// Adds a transaction, which commits if the core has `allowed` it. No lock is needed, because nobody can see the group yet.
    fn add(&mut self, request: Request, allowed: Result<(), StoreError>) {
        if let Err(error) = allowed {
            self.outcomes.push(request.fail(&error));
            return;
        }
        let stamp = (!request.is_read_only()).then(|| self.stamp());
        for range in request.writes {
            self.written(range);
        }
        for mutation in request.mutations {
            self.apply(mutation, stamp.expect("it is not a read-only transaction"));
        }
        self.watches.extend(request.watches);
        self.outcomes.push(Ok(stamp));
    }

    /// Notes that all of `range` is written.
    fn written(&mut self, range: KeyRange) {
        self.ranges.range_written(&range, self.version);
        self.written.push(range);
    }

    /// Returns the answers for a group that was not written because of `error`. Transactions that failed before keep their own errors.
    pub fn fail(self, error: &StoreError) -> Vec<Outcome> {
        watches::fail(self.watches, error);
        self.outcomes.into_iter().map(|outcome| outcome.and(Err(error.clone()))).collect()
    }

    /// Applies one write.
    fn apply(&mut self, mutation: Mutation, stamp: Versionstamp) {
        match mutation {
            Mutation::Set(key, value) => self.change(&key, |_| Some(value)),
            Mutation::Clear(key) => self.change(&key, |_| None::<Bytes>),
            Mutation::ClearRange(begin, end) => {
                let range = KeyRange { begin, end };
                self.clear_range(&range);
                self.written(range);
            }
            Mutation::Atomic(AtomicOp::SetVersionstampedKey, key, value) => {
                self.change(&atomic::stamped(&key, stamp), |_| Some(value));
            }
            Mutation::Atomic(AtomicOp::SetVersionstampedValue, key, value) => {
                self.change(&key, |_| Some(atomic::stamped(&value, stamp)));
            }
            Mutation::Atomic(AtomicOp::Add, key, operand) => {
                self.change(&key, |value| Some(atomic::add(value.unwrap_or_default(), &operand)));
            }
            Mutation::Atomic(op, key, operand) => match atomic::apply(op, self.root.get(&key), &operand) {
                Effect::Keep => self.undo.push_kept(&key),
                Effect::Become(value) => self.change(&key, |_| value),
            },
        }
    }

    /// Returns the keys that the group wrote, each as many times as it was written.
    pub fn keys(&self) -> impl Iterator<Item = &[u8]> {
        let cleared = self.undo.cleared().iter();
        let cleared = cleared.flat_map(|(range, rows)| rows.range(range, false).map(|(key, _)| key));
        self.undo.keys().chain(cleared)
    }

    /// Replaces the value of `key` with what `change` returns for it.
    fn change<V: AsRef<[u8]>>(&mut self, key: &[u8], change: impl FnOnce(Option<&[u8]>) -> Option<V>) {
        if self.undo.is_full() {
            self.undo.share(self.root.clone());
        }
        self.root.change(key, |before| {
            self.undo.push(key, before);
            change(before)
        });
    }

    fn clear_range(&mut self, range: &KeyRange) {
        // Layers often clear ranges that have no rows, which must cost little.
        if self.root.range(range, false).next().is_some() {
            if self.undo.is_full() {
                self.undo.share(self.root.clone());
            }
            self.undo.push_cleared(range, &self.root);
            self.root.remove_range(range);
        }
    }
}

/// The newest rows, and the state that is needed to decide commits.
#[derive(Debug)]
pub(super) struct Core {
    root: Rows,
    version: u64,
    /// The groups of the last 5 s.
    recent: Recent,
    /// The version of the newest group that has left `recent`.
    forgotten: u64,
    /// The ranges that were written in the last 5 s.
    written_ranges: WrittenRanges,
    pub watches: Watches,
    /// When the newest version was last given out, as a read version or by its commit.
    given_out: Duration,
    /// The version at time zero of the engine's clock.
    version_start: u64,
    /// Memory that the undo of the next group can reuse.
    spare: Undo,
}

impl Core {
    /// Creates a core that starts with `root` at `version`.
    pub fn new(root: Rows, version: u64) -> Self {
        Self {
            root,
            version,
            recent: Recent::default(),
            forgotten: version,
            written_ranges: WrittenRanges::default(),
            watches: Watches::default(),
            given_out: Duration::ZERO,
            version_start: version,
            spare: Undo::default(),
        }
    }

    /// Returns the newest version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the first and the last version that have been given out since the core was created.
    pub fn used(&self) -> (u64, u64) {
        (self.version_start, self.version)
    }

    /// Takes a snapshot of the newest rows.
    pub fn snapshot(&mut self, now: Duration) -> Snapshot {
        self.given_out = now;
        Snapshot { root: self.root.clone(), version: self.version, taken: now }
    }

    /// Returns what is needed to read at `version`. Undoing the later groups takes time, so the caller does that without blocking commits.
    pub fn past(&self, version: u64) -> Result<Past, StoreError> {
        if version > self.version {
            return Err(StoreError::FUTURE_VERSION);
        }
        if version < self.forgotten {
            return Err(StoreError::TRANSACTION_TOO_OLD);
        }
        let since = self.recent.since(version);
        // On a cluster, versions advance even without commits, so a version that was not given out recently is too old even if nothing was
        // written since. The same holds here.
        let taken = since.given_out.unwrap_or(self.given_out);
        Ok(Past { newest: Snapshot { root: self.root.clone(), version, taken }, since })
    }

    /// Returns the next version, at the time `now`.
    pub fn next_version(&self, now: Duration) -> u64 {
        let elapsed_us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        (self.version + 1).max(self.version_start.saturating_add(elapsed_us))
    }

    /// Decides `group` and commits it. The rows are changed in place, because nothing else can use them meanwhile.
    pub fn commit(&mut self, group: Vec<Request>, now: Duration) -> Vec<Outcome> {
        let (version, root) = (self.next_version(now), std::mem::take(&mut self.root));
        let mut staged = Staged::new(root, version, std::mem::take(&mut self.spare));
        for request in group {
            let allowed = self.decide(&request, &mut staged, now);
            staged.add(request, allowed);
        }
        self.publish(staged, now)
    }

    /// Decides one transaction of a group. Fails if the transaction is too old, or conflicts with an earlier one.
    fn decide(&mut self, request: &Request, staged: &mut Staged, now: Duration) -> Result<(), StoreError> {
        if request.is_read_only() {
            return Ok(());
        }
        // Even a blind write can be too old, once the transaction has a read version, as in FoundationDB.
        if let Some((version, taken)) = request.snapshot {
            if now.saturating_sub(taken) > TRANSACTION_LIFETIME || version < self.forgotten {
                return Err(StoreError::TRANSACTION_TOO_OLD);
            }
            staged.undo.prepare(0, request.reads.len());
            self.recent.prepare(version, request.reads.len());
            let is_written = |read: &&ReadConflict| {
                staged.undo.has_written(read, 0)
                    || staged.ranges.written_after(read, 0)
                    || self.recent.written_after(read, version)
                    || self.written_ranges.written_after(read, version)
            };
            let mut written = request.reads.iter().filter(is_written);
            if let Some(first) = written.next() {
                if let Some(report) = &request.report {
                    let ranges = [first].into_iter().chain(written).map(ReadConflict::range).collect();
                    *report.lock() = ranges;
                }
                return Err(StoreError::NOT_COMMITTED);
            }
        }
        Ok(())
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
            for range in &staged.written {
                self.written_ranges.range_written(range, staged.version);
            }
            if !self.watches.is_empty() {
                for key in staged.undo.keys() {
                    self.watches.key_changed(key, self.root.get(key));
                }
                for (range, _) in staged.undo.cleared() {
                    for key in self.watches.keys(range) {
                        self.watches.key_changed(&key, self.root.get(&key));
                    }
                }
            }
            let given_out_before = std::mem::replace(&mut self.given_out, now);
            self.recent.push(staged.version, (now, given_out_before), &mut staged.undo);
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

    /// Drops the groups that are too old for any living transaction to conflict with them, or to read a version before them.
    fn forget(&mut self, now: Duration) {
        if let Some(version) = self.recent.forget(now) {
            self.forgotten = version;
            self.written_ranges.forget(version);
        }
    }
}

/// Decides `group` and applies it to the newest rows. Its commits can be read only after [`Core::publish`]. Readers continue meanwhile: the
/// core is locked for each decision, but not while writes are applied.
pub(super) fn stage(core: &Mutex<Core>, group: Vec<Request>, now: Duration) -> Staged {
    let mut staged = {
        let mut core = lock(core);
        Staged::new(core.share_root(), core.next_version(now), std::mem::take(&mut core.spare))
    };
    for request in group {
        let allowed = lock(core).decide(&request, &mut staged, now);
        staged.add(request, allowed);
    }
    staged
}

/// Locks the rows in memory. A commit that panicked may have left them half changed, so after that nothing may read them.
pub(super) fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().expect("no commit has panicked")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Commits one transaction and returns its outcome.
    fn commit(core: &mut Core, request: Request, now: Duration) -> Outcome {
        core.commit(vec![request], now).remove(0)
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

        let then = core.past(first).unwrap();
        assert_eq!(core.past(newer + 1).err(), Some(StoreError::FUTURE_VERSION));

        commit(&mut core, set("other", "x"), 8 * second).unwrap();
        assert_eq!(core.past(first).err(), Some(StoreError::TRANSACTION_TOO_OLD));
        assert!(core.recent.written_after(&ReadConflict::Key("other".into()), newer));

        // A past version that was requested in time can be built later, without making anybody wait.
        let then = then.snapshot();
        assert_eq!(then.root.get(b"k").unwrap(), b"1");
        assert_eq!(then.taken, second, "it ages from when it was last given out");
    }

    #[test]
    fn transactions_of_one_group_see_each_other_as_conflicts() {
        let mut core = Core::new(Rows::default(), 0);
        let read = |key: &'static str, request: Request| Request {
            snapshot: Some((0, Duration::ZERO)),
            reads: vec![ReadConflict::Key(key.into())],
            ..request
        };
        let outcomes = core.commit(vec![set("a", "1"), read("a", set("b", "1"))], Duration::ZERO);
        assert!(outcomes[0].is_ok());
        assert_eq!(outcomes[1], Err(StoreError::NOT_COMMITTED));
    }

    /// Regression: each operation that kept a value copied it, so a transaction of 200 kB took hundreds of MB for 5 s.
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
        // 97 is greater than 7, so the first ByteMax replaced the value, and nothing else did.
        assert!(core.recent.len() < 2 * 100_000);
        assert_eq!(core.root.get(b"k").unwrap(), b"a");
        assert!(core.recent.written_after(&ReadConflict::Key("k".into()), before));
    }

    /// Regression: a clear copied everything that it cleared, twice while it was published.
    #[test]
    fn a_big_clear_shares_what_it_clears() {
        let mut core = Core::new(Rows::default(), 0);
        let second = Duration::from_secs(1);
        let rows =
            (0..2_000_u32).map(|n| Mutation::Set(n.to_be_bytes().to_vec().into(), vec![7; 100].into()));
        commit(&mut core, Request { mutations: rows.collect(), ..Request::default() }, second).unwrap();
        let (before, full, filled) = (core.version(), core.share_root(), core.recent.len());
        let clear = Mutation::ClearRange(Bytes::new(), Bytes::from_static(b"\xff"));
        let and = Mutation::Set("k".into(), "v".into());
        commit(&mut core, Request { mutations: vec![clear, and], ..Request::default() }, 2 * second).unwrap();
        assert_eq!(core.root.iter().count(), 1);
        let past = core.past(before).unwrap().snapshot().root;
        assert!(past.iter().eq(full.iter()));
        assert!(core.recent.len() < filled + 100, "it has noted {} bytes", core.recent.len() - filled);
    }

    /// Regression: a clear of few rows copied them, however much its transaction had already copied. Many such clears of large rows could
    /// thus copy the whole store, and keep the copy for 5 s.
    #[test]
    fn many_small_clears_share_what_they_clear() {
        let mut core = Core::new(Rows::default(), 0);
        let second = Duration::from_secs(1);
        let key = |n: u32| Bytes::copy_from_slice(&n.to_be_bytes());
        let rows = (0..1_000).map(|n| Mutation::Set(key(n), vec![7; 1_000].into()));
        commit(&mut core, Request { mutations: rows.collect(), ..Request::default() }, second).unwrap();
        let (before, full, filled) = (core.version(), core.share_root(), core.recent.len());
        let clears = (0..100).map(|n| Mutation::ClearRange(key(10 * n), key(10 * n + 10)));
        commit(&mut core, Request { mutations: clears.collect(), ..Request::default() }, 2 * second).unwrap();
        assert_eq!(core.root.iter().count(), 0);
        let past = core.past(before).unwrap().snapshot().root;
        assert!(past.iter().eq(full.iter()));
        let noted = core.recent.len() - filled;
        assert!(noted < 100_000, "it has noted {noted} bytes of a million");
    }
}
