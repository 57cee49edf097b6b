//! A transaction of the embedded engine: a snapshot, its writes, and the conflicts that its commit must check.

use std::{
    mem,
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::oneshot;

use super::{
    atomic,
    conflicts::ReadConflict,
    core::{Outcome, Request, Snapshot},
    engine::{Commit, Engine, Holds},
    overlay::{self, Overlay},
    watches::{self, ValueHash},
};
use crate::{
    base::{
        encoding::Versionstamp,
        error::{Error, Result, StoreError},
    },
    store::{
        AtomicOp, Isolation, KEY_LEN_MAX, KeyRange, Mutation, Page, RangeRead, TRANSACTION_LEN_MAX,
        TransactionOption, VALUE_LEN_MAX, Watch,
        backend::{Answer, TransactionBackend},
    },
};

/// The bytes that a mutation or conflict range adds to the size of a transaction, besides its keys and values.
const ENTRY_OVERHEAD: usize = 32;

/// The smallest size limit that can be set, in bytes, as in FoundationDB's client.
const SIZE_LIMIT_MIN: usize = 32;

/// The end of the key space that layers may use.
const KEYS_END: &[u8] = b"\xff";

pub(super) struct EmbeddedTransaction {
    engine: Arc<Engine>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// The transaction can read and write.
    #[default]
    Open,
    Committing,
    Cancelled,
}

/// The mutable state of a transaction.
#[derive(Default)]
struct State {
    phase: Phase,
    /// The read version, if the caller set one.
    version: Option<u64>,
    /// The snapshot, taken at the first read.
    snapshot: Option<Snapshot>,
    request: Request,
    /// For each mutation with a versionstamped key, the read version when it was added; 0 if there was none yet.
    stamped_at: Vec<u64>,
    /// The transaction's own writes by key, built by the first read that needs them.
    overlay: Option<Overlay>,
    /// Bytes of keys, values and conflict ranges.
    size: usize,
    /// The error for the first invalid write, which makes all later operations fail.
    bad: Option<StoreError>,
    /// The error of the first failed read, which makes the commit fail.
    failed_read: Option<StoreError>,
    /// Whether the transaction became too old, so that it gave back its snapshot.
    is_expired: bool,
    /// When the transaction was created or reset, on the clock of the engine.
    made: Duration,
    /// Raised whenever the transaction is reset or begins another attempt.
    generation: u64,
    options: Options,
}

#[derive(Debug, Clone, Default)]
struct Options {
    /// The time limit of the transaction.
    timeout: Option<Duration>,
    /// The size limit of the transaction, in bytes.
    size_max: Option<usize>,
    /// Receives the ranges on which the commit conflicted.
    report: Option<Arc<Mutex<Vec<KeyRange>>>>,
}

impl EmbeddedTransaction {
    /// Begins a transaction.
    pub fn new(engine: Arc<Engine>) -> Self {
        let state = State { made: engine.now(), ..State::default() };
        Self { engine, state: Arc::new(Mutex::new(state)) }
    }

    /// Locks the mutable state.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Takes the snapshot, unless there is one already, and runs `read` on the state.
    fn reading<T>(&self, read: impl FnOnce(&mut State) -> Result<T, StoreError>) -> Result<T> {
        let mut state = self.state();
        state.check_usable(&self.engine)?;
        let had_snapshot = state.snapshot.is_some();
        let result = state.take_snapshot(&self.engine).and_then(|()| read(&mut state));
        if !had_snapshot && let Some(snapshot) = &state.snapshot {
            let held: Weak<Mutex<State>> = Arc::downgrade(&self.state);
            self.engine.holds(snapshot.taken, held);
        }
        if let Err(error) = &result
            && is_of_the_read(error)
        {
            state.failed_read.get_or_insert(error.clone());
        }
        Ok(result?)
    }

    /// Returns the error for an operation that is refused: `error`, or the reason why the transaction cannot be used at all.
    fn refusal(&self, error: StoreError) -> Error {
        self.state().check_usable(&self.engine).err().unwrap_or(error).into()
    }
}

impl State {
    /// Fails if the transaction was cancelled or its commit has begun, if it has an invalid write, or if it is past its time limit.
    fn check_usable(&self, engine: &Engine) -> Result<(), StoreError> {
        self.check_open()?;
        if self.is_timed_out(engine) { Err(StoreError::TRANSACTION_TIMED_OUT) } else { Ok(()) }
    }

    /// Fails if the transaction was cancelled or its commit has begun, or if it has an invalid write.
    fn check_open(&self) -> Result<(), StoreError> {
        match (self.phase, &self.bad) {
            (Phase::Committing, _) => Err(StoreError::USED_DURING_COMMIT),
            (Phase::Cancelled, _) => Err(StoreError::TRANSACTION_CANCELLED),
            (Phase::Open, Some(bad)) => Err(bad.clone()),
            (Phase::Open, None) => Ok(()),
        }
    }

    /// Whether the time limit has passed.
    fn is_timed_out(&self, engine: &Engine) -> bool {
        self.options.timeout.is_some_and(|timeout| engine.now().saturating_sub(self.made) > timeout)
    }

    /// Takes the snapshot at the first read, and checks its age at every read.
    fn take_snapshot(&mut self, engine: &Engine) -> Result<(), StoreError> {
        let now = engine.now();
        if self.is_expired {
            return Err(StoreError::TRANSACTION_TOO_OLD);
        }
        let snapshot = if let Some(snapshot) = &self.snapshot {
            snapshot
        } else {
            let snapshot = match self.version {
                Some(version) => {
                    let past = engine.core().past(version)?;
                    past.snapshot()
                }
                None => engine.core().snapshot(now),
            };
            self.request.snapshot = Some((snapshot.version, snapshot.taken));
            self.snapshot.insert(snapshot)
        };
        if snapshot.is_too_old(now) {
            self.give_back();
            return Err(StoreError::TRANSACTION_TOO_OLD);
        }
        Ok(())
    }

    /// Frees what only reads and commits need, because the transaction is too old for both. The writes stay, so that the commit fails.
    fn give_back(&mut self) {
        self.is_expired = true;
        self.snapshot = None;
        self.request.reads = Vec::new();
    }

    fn snapshot(&self) -> &Snapshot {
        self.snapshot.as_ref().expect("a read takes the snapshot first")
    }

    /// Returns the transaction's own writes by key, if it has any.
    fn overlay(&mut self) -> Option<&Overlay> {
        if self.overlay.is_none() && !self.request.mutations.is_empty() {
            let mut overlay = Overlay::default();
            let mut stamped_at = self.stamped_at.iter().copied();
            for mutation in &self.request.mutations {
                let version = if is_stamped_key(mutation) {
                    stamped_at.next().expect("each has its version")
                } else {
                    0
                };
                overlay.apply(mutation, version);
            }
            self.overlay = Some(overlay);
        }
        self.overlay.as_ref()
    }

    /// Returns the value of `key`, with the transaction's own writes applied.
    fn get(&mut self, key: &[u8], isolation: Isolation) -> Result<Option<Bytes>, StoreError> {
        if key.len() > KEY_LEN_MAX {
            return Ok(None);
        }
        let own = self.overlay().and_then(|overlay| overlay.own(key));
        let value = match &own {
            None => self.snapshot().root.get(key).map(Bytes::copy_from_slice),
            Some(own) => own.over(self.snapshot().root.get(key))?,
        };
        if isolation == Isolation::Serializable {
            self.add_read(ReadConflict::Key(Bytes::copy_from_slice(key)));
        }
        Ok(value)
    }

    /// Reads the value of `key` for a watch.
    fn see(&mut self, engine: &Engine, key: &[u8]) -> Result<Option<Bytes>, StoreError> {
        self.check_usable(engine)?;
        self.take_snapshot(engine)?;
        self.get(key, Isolation::Serializable)
    }

    /// Adds `read` to the read-conflict set, except for the parts that the transaction itself has written.
    fn add_read(&mut self, read: ReadConflict) {
        let Some(overlay) = self.overlay() else {
            self.size += ENTRY_OVERHEAD + read_len(&read);
            self.request.reads.push(read);
            return;
        };
        let range = match read {
            ReadConflict::Key(key) => KeyRange::key(&key),
            ReadConflict::Range(range) => range,
        };
        for part in overlay.unwritten(&range) {
            let read = ReadConflict::Range(part);
            self.size += ENTRY_OVERHEAD + read_len(&read);
            self.request.reads.push(read);
        }
    }

    /// Adds a write. If the write is invalid, keeps the error for later operations.
    fn mutate(&mut self, mutation: Mutation) {
        if self.phase == Phase::Committing {
            // The commit already has its writes. This write cannot be added, so it makes all later operations fail.
            self.bad.get_or_insert(StoreError::USED_DURING_COMMIT);
            return;
        }
        match check_mutation(&mutation) {
            Ok(false) => {}
            Ok(true) => {
                self.size += mutation_len(&mutation);
                let snapshot = self.snapshot.as_ref().map(|snapshot| snapshot.version);
                let version = snapshot.or(self.version).unwrap_or(0);
                if is_stamped_key(&mutation) {
                    self.stamped_at.push(version);
                }
                if let Some(overlay) = &mut self.overlay {
                    overlay.apply(&mutation, version);
                }
                self.request.mutations.push(mutation);
            }
            Err(error) => {
                self.bad.get_or_insert(error);
            }
        }
    }

    /// Adds an explicit conflict range.
    fn add_conflict(&mut self, range: KeyRange, add: impl FnOnce(&mut Self, KeyRange)) {
        if range.begin > range.end {
            self.bad.get_or_insert(StoreError::INVERTED_RANGE);
        } else if &range.begin[..] > KEYS_END || &range.end[..] > KEYS_END {
            self.bad.get_or_insert(StoreError::KEY_OUTSIDE_LEGAL_RANGE);
        } else if !range.is_empty() {
            add(self, range);
        }
    }

    /// Closes the transaction and returns its commit request.
    fn begin_commit(&mut self, engine: &Engine) -> Result<Request, StoreError> {
        self.check_usable(engine)?;
        self.phase = Phase::Committing;
        // A read version that the caller set applies to a blind write, too, and declared reads have to be compared with some version.
        let needs_version = self.version.is_some() || self.is_expired || !self.request.reads.is_empty();
        let in_time =
            if needs_version && !self.request.is_read_only() { self.take_snapshot(engine) } else { Ok(()) };
        let mut request = mem::take(&mut self.request);
        request.report.clone_from(&self.options.report);
        request.size = self.size;
        self.snapshot = None;
        // A transaction that only reads sends nothing, so its size has no limit, as in FoundationDB.
        let is_too_large =
            !request.is_read_only() && self.size > self.options.size_max.unwrap_or(TRANSACTION_LEN_MAX);
        let refused = match (self.failed_read.take(), in_time) {
            (Some(failed), _) => failed,
            (None, Err(error)) => error,
            (None, Ok(())) if is_too_large => StoreError::TRANSACTION_TOO_LARGE,
            (None, Ok(())) => return Ok(request),
        };
        watches::fail(request.watches, &refused);
        Err(refused)
    }
}

impl Holds for Mutex<State> {
    fn give_back(&self) {
        // A transaction that is in use right now notices by itself that it is too old.
        if let Some(mut state) = self.try_lock() {
            state.give_back();
        }
    }
}

impl TransactionBackend for EmbeddedTransaction {
    fn read_version(&self) -> Answer<'_, u64> {
        self.reading(|state| Ok(state.snapshot().version)).into()
    }

    fn clock_version(&self) -> Answer<'_, u64> {
        self.reading(|state| Ok(state.snapshot().version.max(self.engine.clock_version()))).into()
    }

    fn set_read_version(&self, version: u64) {
        let mut state = self.state();
        if state.snapshot.is_some() || state.version.is_some() {
            state.bad.get_or_insert(StoreError::READ_VERSION_ALREADY_SET);
        } else if version == 0 {
            state.bad.get_or_insert(StoreError::VERSION_INVALID);
        } else {
            state.version = Some(version);
        }
    }

    fn get(&self, key: &[u8], isolation: Isolation) -> Answer<'_, Option<Bytes>> {
        match check_readable(key) {
            Ok(()) => self.reading(|state| state.get(key, isolation)),
            Err(error) => Err(self.refusal(error)),
        }
        .into()
    }

    fn get_range(&self, read: &RangeRead, isolation: Isolation) -> Answer<'_, Page> {
        if read.range.is_empty() || read.limit == 0 {
            // Such a read returns nothing, so it needs no read version.
            let checked = self.state().check_usable(&self.engine).and_then(|()| check_range(&read.range));
            return checked.map(|()| Page::default()).map_err(Error::Store).into();
        }
        if let Err(error) = check_range(&read.range) {
            return Err(self.refusal(error)).into();
        }
        self.reading(|state| {
            state.overlay();
            let page = overlay::page(&state.snapshot().root, state.overlay.as_ref(), read)?;
            if isolation == Isolation::Serializable {
                state.add_read(ReadConflict::Range(overlay::covered(read, &page)));
            }
            Ok(page)
        })
        .into()
    }

    fn mutate(&self, mutation: Mutation) {
        self.state().mutate(mutation);
    }

    fn add_read_conflict(&self, range: KeyRange) {
        self.state().add_conflict(range, |state, range| state.add_read(ReadConflict::Range(range)));
    }

    fn add_write_conflict(&self, range: KeyRange) {
        self.state().add_conflict(range, |state, range| {
            state.size += ENTRY_OVERHEAD + range.begin.len() + range.end.len();
            state.request.writes.push(range);
        });
    }

    fn watch(&self, key: &[u8]) -> Answer<'_, Watch> {
        let mut state = self.state();
        let allowed = check_watched(key)
            .and_then(|()| self.engine.core().watches.place().ok_or(StoreError::TOO_MANY_WATCHES));
        let place = match allowed {
            Ok(place) if state.phase == Phase::Open => place,
            allowed => {
                let error = state.check_open().err().or(allowed.err()).expect("either fails");
                return Err(error.into()).into();
            }
        };
        // As on a cluster, if the read fails, the watch reports the error, and the transaction can still be committed.
        let seen = match state.see(&self.engine, key) {
            Ok(seen) => seen,
            Err(error) => return Ok(Watch::new(async { Err(error.into()) })).into(),
        };
        let (fire, fired) = oneshot::channel();
        let key = Bytes::copy_from_slice(key);
        let mut armed = Armed { fired, key: key.clone(), engine: Arc::downgrade(&self.engine) };
        state.request.watches.push(watches::Pending {
            key,
            seen: ValueHash::of(seen.as_deref()),
            fire,
            _place: place,
        });
        let done =
            async move { Ok((&mut armed.fired).await.unwrap_or(Err(StoreError::OPERATION_CANCELLED))?) };
        Ok(Watch::new(done)).into()
    }

    fn commit(&self) -> Answer<'_, Option<Versionstamp>> {
        let request = match self.state().begin_commit(&self.engine) {
            Ok(request) => request,
            Err(error) => return Err(error.into()).into(),
        };
        match self.engine.commit(request) {
            Commit::Done(outcome) => finished(outcome).into(),
            Commit::Waiting(waiting) => Answer::Waiting(Box::pin(async { finished(waiting.await) })),
        }
    }

    fn approximate_size(&self) -> Answer<'_, usize> {
        let state = self.state();
        state.check_open().map(|()| state.size).map_err(Error::Store).into()
    }

    fn set_option(&self, option: TransactionOption) {
        let mut state = self.state();
        let State { options, bad, .. } = &mut *state;
        match option {
            TransactionOption::Timeout(timeout) => options.timeout = Some(timeout),
            TransactionOption::SizeLimit(size) if (SIZE_LIMIT_MIN..=TRANSACTION_LEN_MAX).contains(&size) => {
                options.size_max = Some(size);
            }
            TransactionOption::SizeLimit(_) => {
                bad.get_or_insert(StoreError::INVALID_OPTION_VALUE);
            }
            TransactionOption::Priority(_) => {}
            TransactionOption::ReportConflicts => options.report = Some(Arc::default()),
        }
    }

    fn conflicting_ranges(&self) -> Answer<'_, Vec<KeyRange>> {
        let report = self.state().options.report.clone();
        let ranges = report.map(|report| report.lock().clone());
        Ok(ranges.unwrap_or_default()).into()
    }

    fn cancel(&self) {
        let mut state = self.state();
        let State { made, generation, .. } = *state;
        *state = State { phase: Phase::Cancelled, made, generation, ..State::default() };
    }

    fn reset(&self) {
        let mut state = self.state();
        let generation = state.generation + 1;
        *state = State { made: self.engine.now(), generation, ..State::default() };
    }

    fn recover(&self, error: Error, backoff: BoxFuture<'static, ()>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let generation = {
                let state = self.state();
                if state.phase == Phase::Cancelled {
                    return Err(StoreError::TRANSACTION_CANCELLED.into());
                }
                state.generation
            };
            if !error.is_retryable() {
                return Err(error);
            }
            backoff.await;
            let mut state = self.state();
            if state.generation != generation {
                // The transaction was reset meanwhile: its current reads and writes belong to a new one.
                return Ok(());
            }
            if state.phase == Phase::Cancelled {
                return Err(StoreError::TRANSACTION_CANCELLED.into());
            }
            if state.is_timed_out(&self.engine) {
                return Err(StoreError::TRANSACTION_TIMED_OUT.into());
            }
            let options = mem::take(&mut state.options);
            *state = State { made: state.made, generation: generation + 1, options, ..State::default() };
            Ok(())
        })
    }
}

/// The caller's side of a watch. When it is dropped, the engine frees what it holds for the watch.
struct Armed {
    fired: oneshot::Receiver<Result<(), StoreError>>,
    key: Bytes,
    engine: Weak<Engine>,
}

impl Drop for Armed {
    fn drop(&mut self) {
        self.fired.close();
        if let Some(engine) = self.engine.upgrade() {
            engine.disarm(&self.key);
        }
    }
}

/// Converts an outcome into the result that the seam expects.
fn finished(outcome: Outcome) -> Result<Option<Versionstamp>> {
    Ok(outcome?)
}

/// Whether `mutation` sets a key with a versionstamp.
fn is_stamped_key(mutation: &Mutation) -> bool {
    matches!(mutation, Mutation::Atomic(AtomicOp::SetVersionstampedKey, ..))
}

/// Whether `error` belongs to a single read. As in FoundationDB, the commit then fails with it too, but other reads can succeed.
fn is_of_the_read(error: &StoreError) -> bool {
    [StoreError::ACCESSED_UNREADABLE, StoreError::TRANSACTION_TOO_OLD, StoreError::FUTURE_VERSION]
        .contains(error)
}

/// Fails if layers may not read `key`.
fn check_readable(key: &[u8]) -> Result<(), StoreError> {
    if key >= KEYS_END { Err(StoreError::KEY_OUTSIDE_LEGAL_RANGE) } else { Ok(()) }
}

/// Fails if layers may not watch `key`.
fn check_watched(key: &[u8]) -> Result<(), StoreError> {
    check_readable(key)?;
    if key.len() > KEY_LEN_MAX { Err(StoreError::KEY_TOO_LARGE) } else { Ok(()) }
}

/// Fails if layers may not read `range`.
fn check_range(range: &KeyRange) -> Result<(), StoreError> {
    let is_outside = &range.begin[..] > KEYS_END || &range.end[..] > KEYS_END;
    if is_outside { Err(StoreError::KEY_OUTSIDE_LEGAL_RANGE) } else { Ok(()) }
}

/// Whether `mutation` has an effect; fails if it breaks a limit.
fn check_mutation(mutation: &Mutation) -> Result<bool, StoreError> {
    let (key, value) = match mutation {
        Mutation::ClearRange(begin, end) if begin > end => return Err(StoreError::INVERTED_RANGE),
        Mutation::ClearRange(begin, end) if &begin[..] > KEYS_END || &end[..] > KEYS_END => {
            return Err(StoreError::KEY_OUTSIDE_LEGAL_RANGE);
        }
        Mutation::ClearRange(begin, end) => return Ok(begin < end),
        // No key is that long, so there is nothing to clear.
        Mutation::Clear(key) if key.len() > KEY_LEN_MAX && &key[..] < KEYS_END => return Ok(false),
        Mutation::Clear(key) => (key, &Bytes::new()),
        Mutation::Set(key, value) | Mutation::Atomic(_, key, value) => (key, value),
    };
    check_readable(key)?;
    if key.len() > KEY_LEN_MAX {
        return Err(StoreError::KEY_TOO_LARGE);
    }
    if value.len() > VALUE_LEN_MAX {
        return Err(StoreError::VALUE_TOO_LARGE);
    }
    match mutation {
        Mutation::Atomic(AtomicOp::SetVersionstampedKey, key, _) => atomic::stamp_offset(key).map(|_| true),
        Mutation::Atomic(AtomicOp::SetVersionstampedValue, _, value) => {
            atomic::stamp_offset(value).map(|_| true)
        }
        _ => Ok(true),
    }
}

/// Returns the size of a mutation and its write conflict.
fn mutation_len(mutation: &Mutation) -> usize {
    2 * ENTRY_OVERHEAD
        + match mutation {
            Mutation::Clear(key) => 4 * key.len(),
            Mutation::ClearRange(begin, end) => 2 * (begin.len() + end.len()),
            Mutation::Set(key, value) | Mutation::Atomic(_, key, value) => 3 * key.len() + value.len(),
        }
}

fn read_len(read: &ReadConflict) -> usize {
    match read {
        ReadConflict::Key(key) => 2 * key.len() + 1,
        ReadConflict::Range(range) => range.begin.len() + range.end.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::env::Env, store::TRANSACTION_LIFETIME};

    fn memory() -> Arc<Engine> {
        Arc::new(Engine::memory(Env::system()))
    }

    /// Regression: 60 transactions that were no longer used held 315 MB, because each kept a version of all rows even when it was too old.
    #[tokio::test(start_paused = true)]
    async fn a_dead_transaction_holds_no_rows() {
        let engine = memory();
        let dead = EmbeddedTransaction::new(Arc::clone(&engine));
        dead.get(b"k", Isolation::Serializable).await.unwrap();
        assert!(dead.state().snapshot.is_some());
        tokio::time::advance(TRANSACTION_LIFETIME + Duration::from_millis(1)).await;
        let other = EmbeddedTransaction::new(engine);
        other.get(b"k", Isolation::Snapshot).await.unwrap();
        assert!(dead.state().snapshot.is_none() && dead.state().request.reads.is_empty());
        let error = dead.get(b"k", Isolation::Snapshot).await.unwrap_err();
        assert_eq!(error.code(), Some(StoreError::TRANSACTION_TOO_OLD.code()));
        // The transaction has lost its reads, and must not be committed without them.
        dead.mutate(Mutation::Set("k".into(), "v".into()));
        let error = dead.commit().await.unwrap_err();
        assert_eq!(error.code(), Some(StoreError::TRANSACTION_TOO_OLD.code()));
        assert!(other.state().snapshot.is_some());
    }

    /// Regression: 9,000 dropped watches held 864 MB, because each held the value that it had seen. Now a watch holds a hash, and frees
    /// even that when it is dropped.
    #[tokio::test]
    async fn a_dropped_watch_holds_nothing() {
        let engine = memory();
        let tx = EmbeddedTransaction::new(Arc::clone(&engine));
        let watch = tx.watch(b"k").await.unwrap();
        let early = tx.watch(b"l").await.unwrap();
        drop(early);
        tx.commit().await.unwrap();
        assert!(!engine.core().watches.is_empty());
        drop(watch);
        assert!(engine.core().watches.is_empty());
        assert!(size_of::<watches::Pending>() <= 128, "{}", size_of::<watches::Pending>());
    }
}
