//! A transaction on a cluster.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};

use ::foundationdb::{
    Database as Client, FdbError, KeySelector, RangeOption, Transaction, TransactionCancelled,
    TransactionCommitError, TransactionCommitted,
    options::{ConflictRangeType, MutationType, StreamingMode, TransactionOption as ClientOption},
};
use bytes::Bytes;
use futures_util::{FutureExt, TryFutureExt, future::BoxFuture};

use super::wakeful::Wakeful;
use crate::{
    base::{
        encoding::Versionstamp,
        error::{Error, Result, StoreError},
    },
    store::{
        AtomicOp, Isolation, KEY_LEN_MAX, KeyRange, Mutation, Page, Priority, RangeRead, TransactionOption,
        Watch,
        backend::{Answer, TransactionBackend},
    },
};

/// The end of the key space that layers may use.
const KEYS_END: &[u8] = b"\xff";

pub(super) struct FdbTransaction {
    /// The connection, for beginning another client transaction if one was lost during its commit.
    client: Arc<Client>,
    state: Mutex<State>,
}

/// The mutable state of a transaction.
struct State {
    /// The client's transaction.
    slot: Slot,
    /// Whether the transaction writes anything, so that it will have a versionstamp.
    writes: bool,
    /// The error for the first invalid operation, which the client library does not get to see. All later operations fail with this error.
    bad: Option<StoreError>,
    options: Vec<TransactionOption>,
    /// Raised whenever the transaction is replaced or cancelled, so that operations that began earlier do not change the new state.
    generation: u64,
    /// When the transaction was created or reset. The time limit starts then.
    made: Instant,
    /// When the client's transaction was created or reset. The client's time limit starts then.
    made_by_client: Instant,
}

/// The client's transaction, by its state.
enum Slot {
    /// The transaction can read and write.
    Open(Transaction),
    /// The commit is under way, or was dropped.
    Committing,
    Committed(TransactionCommitted),
    /// The commit failed. The error is shared with readers of the conflicting ranges.
    Failed(Arc<TransactionCommitError>),
    /// The transaction was cancelled; so was the client's, unless that was busy with a commit or a back-off.
    Cancelled(Option<TransactionCancelled>),
    /// The client's transaction could not be created.
    Unmade(StoreError),
}

impl State {
    fn new(slot: Slot) -> Self {
        let now = Instant::now();
        Self {
            slot,
            writes: false,
            bad: None,
            options: Vec::new(),
            generation: 0,
            made: now,
            made_by_client: now,
        }
    }

    /// Returns the client's transaction, if it can read and write.
    fn open(&self) -> Result<&Transaction, StoreError> {
        match (&self.slot, &self.bad) {
            (Slot::Open(_), Some(bad)) => Err(bad.clone()),
            (Slot::Open(transaction), None) => Ok(transaction),
            (Slot::Committing | Slot::Committed(_) | Slot::Failed(_), _) => {
                Err(StoreError::USED_DURING_COMMIT)
            }
            (Slot::Cancelled(_), _) => Err(StoreError::TRANSACTION_CANCELLED),
            (Slot::Unmade(error), _) => Err(error.clone()),
        }
    }

    /// Sets an option. An invalid option makes all later operations fail.
    fn set_option(&mut self, option: TransactionOption) {
        let Ok(transaction) = self.open() else { return };
        let later = self.made_by_client.duration_since(self.made);
        let set = client_option(&option, later).map_or(Ok(()), |option| transaction.set_option(option));
        match set {
            Ok(()) => self.options.push(option),
            Err(error) => self.refuse(store_error(error)),
        }
    }

    /// Begins the next attempt of the same transaction, on `slot`, with the options and the time limit of the last attempt.
    fn try_again(&mut self, slot: Slot, is_kept_by_client: bool) {
        let now = Instant::now();
        let options = std::mem::take(&mut self.options);
        let made_by_client = if is_kept_by_client { self.made_by_client } else { now };
        *self = Self { generation: self.generation + 1, made: self.made, made_by_client, ..Self::new(slot) };
        for option in options {
            // The client itself keeps only one option, the time limit, which spans its attempts.
            if is_kept_by_client && matches!(option, TransactionOption::Timeout(_)) {
                self.options.push(option);
            } else {
                self.set_option(option);
            }
        }
    }

    /// Whether the time limit has passed.
    fn is_timed_out(&self) -> bool {
        let timeout = self.options.iter().rev().find_map(|option| match option {
            TransactionOption::Timeout(timeout) => Some(*timeout),
            _ => None,
        });
        timeout.is_some_and(|timeout| self.made.elapsed() > timeout)
    }

    /// Makes all later operations fail with `error`, unless they already fail with an earlier one.
    fn refuse(&mut self, error: StoreError) {
        self.bad.get_or_insert(error);
    }
}

impl FdbTransaction {
    /// Creates a transaction of `client`.
    pub fn new(client: Arc<Client>) -> Self {
        let state = Mutex::new(State::new(unused(&client)));
        Self { client, state }
    }

    /// Stores `slot`, the result of the commit that began in `generation`, unless the transaction was reset or cancelled meanwhile.
    fn finish(&self, generation: u64, slot: Slot) {
        let mut state = self.state();
        if state.generation == generation {
            state.slot = slot;
        }
    }

    /// Locks the mutable state.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns the answer to the operation that `question` starts on the open transaction.
    fn ask<T, F>(&self, question: impl FnOnce(&Transaction) -> F) -> Answer<'_, T>
    where
        F: Future<Output = Result<T, FdbError>> + Send + Unpin + 'static,
    {
        let begun = self.state().open().map(question);
        match begun {
            Ok(answer) => {
                let answer = Wakeful(answer).map_err(|error| Error::Store(store_error(error)));
                Answer::Waiting(answer.boxed())
            }
            Err(error) => self.fail(error),
        }
    }

    /// Fails with `error`, or with an earlier error, which perhaps only the client knows.
    fn fail<T>(&self, error: StoreError) -> Answer<'_, T> {
        let state = self.state();
        let error = state.open().err().unwrap_or(error);
        let Slot::Open(transaction) = &state.slot else { return Err(error.into()).into() };
        let earlier = Wakeful(transaction.get_approximate_size());
        Answer::Waiting(Box::pin(async {
            let first = earlier.await.err().map_or(error, store_error);
            Err(first.into())
        }))
    }
}

impl TransactionBackend for FdbTransaction {
    fn read_version(&self) -> Answer<'_, u64> {
        self.ask(|transaction| {
            transaction
                .get_read_version()
                .map_ok(|version| u64::try_from(version).expect("versions are positive"))
        })
    }

    fn set_read_version(&self, version: u64) {
        if let Ok(transaction) = self.state().open() {
            transaction.set_read_version(i64::try_from(version).unwrap_or(i64::MAX));
        }
    }

    fn get(&self, key: &[u8], isolation: Isolation) -> Answer<'_, Option<Bytes>> {
        // From this key on, the client would return some of its own keys.
        if key >= KEYS_END {
            return self.fail(StoreError::KEY_OUTSIDE_LEGAL_RANGE);
        }
        self.ask(|transaction| {
            let value = transaction.get(key, isolation == Isolation::Snapshot);
            value.map_ok(|value| value.map(|value| Bytes::copy_from_slice(&value)))
        })
    }

    fn get_range(&self, read: &RangeRead, isolation: Isolation) -> Answer<'_, Page> {
        if &read.range.begin[..] > KEYS_END || &read.range.end[..] > KEYS_END {
            return self.fail(StoreError::KEY_OUTSIDE_LEGAL_RANGE);
        }
        if read.range.is_empty() || read.limit == 0 {
            // The client treats a limit of zero as no limit, so read an empty range. Returning early would skip the client's checks.
            let place = read.range.begin.clone().max(read.range.end.clone());
            let nothing = KeyRange { begin: place.clone(), end: place };
            return self.part(&RangeRead { limit: 1, range: nothing, ..read.clone() }, isolation);
        }
        // The client treats a target of zero bytes as no target.
        let (limit, read_len) = (read.limit, read.target_bytes.max(1));
        let mut rest = read.clone().target_bytes(read_len);
        Answer::Waiting(Box::pin(async move {
            let mut page = Page::default();
            let mut len = 0;
            loop {
                let part = self.part(&rest, isolation).await?;
                len += part.rows.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>();
                page.rows.extend(part.rows);
                page.more = part.more;
                rest = match rest.after(&page) {
                    Some(rest) if len < read_len && page.rows.len() < limit => rest,
                    _ => return Ok(page),
                };
                rest.limit = limit - page.rows.len();
                rest.target_bytes = read_len - len;
            }
        }))
    }

    fn mutate(&self, mutation: Mutation) {
        let mut state = self.state();
        let Ok(transaction) = state.open() else { return };
        match &mutation {
            Mutation::Set(key, value) => transaction.set(key, value),
            Mutation::Clear(key) => transaction.clear(key),
            // The C API treats an inverted range as a bug in the binding, and aborts the process.
            Mutation::ClearRange(begin, end) if begin > end => {
                return state.refuse(StoreError::INVERTED_RANGE);
            }
            Mutation::ClearRange(begin, end) => transaction.clear_range(begin, end),
            Mutation::Atomic(op, key, operand) => transaction.atomic_op(key, operand, mutation_type(*op)),
        }
        state.writes = true;
    }

    fn add_read_conflict(&self, range: KeyRange) {
        self.add_conflict(&range, ConflictRangeType::Read);
    }

    fn add_write_conflict(&self, range: KeyRange) {
        self.add_conflict(&range, ConflictRangeType::Write);
        self.state().writes |= !range.is_empty();
    }

    fn watch(&self, key: &[u8]) -> Answer<'_, Watch> {
        // The client would report these errors only through the watch.
        let refused = match key {
            _ if key >= KEYS_END => Some(StoreError::KEY_OUTSIDE_LEGAL_RANGE),
            _ if key.len() > KEY_LEN_MAX => Some(StoreError::KEY_TOO_LARGE),
            _ => None,
        };
        if let Some(refused) = refused {
            return self.fail(refused);
        }
        let state = self.state();
        let watch = match state.open() {
            Ok(transaction) => {
                Watch::new(Wakeful(transaction.watch(key)).map_err(|error| match error.code() {
                    // The client's code for a watch whose transaction was never committed.
                    1025 => Error::Store(StoreError::OPERATION_CANCELLED),
                    _ => Error::Store(store_error(error)),
                }))
            }
            // The invalid operation was kept from the client, which would also have reported the error through the watch.
            Err(error) if matches!(state.slot, Slot::Open(_)) => Watch::new(async { Err(error.into()) }),
            Err(error) => return Err(error.into()).into(),
        };
        Ok(watch).into()
    }

    fn commit(&self) -> Answer<'_, Option<Versionstamp>> {
        let mut state = self.state();
        if let Err(error) = state.open() {
            drop(state);
            return self.fail(error);
        }
        let Slot::Open(transaction) = std::mem::replace(&mut state.slot, Slot::Committing) else {
            unreachable!("an open transaction was just seen")
        };
        // The stamp must be requested before the commit, and is known after it.
        let versionstamp = state.writes.then(|| Wakeful(transaction.get_versionstamp()));
        let committed = Wakeful(transaction.commit());
        let generation = state.generation;
        Answer::Waiting(Box::pin(async move {
            match committed.await {
                Ok(committed) => self.finish(generation, Slot::Committed(committed)),
                Err(failed) => {
                    let error = store_error(*failed);
                    self.finish(generation, Slot::Failed(Arc::new(failed)));
                    return Err(error.into());
                }
            }
            let Some(versionstamp) = versionstamp else { return Ok(None) };
            match versionstamp.await {
                Ok(stamp) => {
                    let stamp = <[u8; 10]>::try_from(&stamp[..]).expect("the client's stamps have 10 bytes");
                    Ok(Some(Versionstamp(stamp)))
                }
                // The writes had no effect; for example, they only cleared an empty range.
                Err(error) if error.code() == 2021 => Ok(None),
                Err(error) => Err(Error::Store(store_error(error))),
            }
        }))
    }

    fn approximate_size(&self) -> Answer<'_, usize> {
        self.ask(|transaction| {
            let size = transaction.get_approximate_size();
            size.map_ok(|size| usize::try_from(size).expect("sizes are positive"))
        })
    }

    fn set_option(&self, option: TransactionOption) {
        self.state().set_option(option);
    }

    fn conflicting_ranges(&self) -> Answer<'_, Vec<KeyRange>> {
        // The client reports the ranges through a read beyond the layers' keys, on the transaction whose commit failed.
        let failed = match &self.state().slot {
            Slot::Failed(failed) => Arc::clone(failed),
            _ => return Ok(Vec::new()).into(),
        };
        Answer::Waiting(Box::pin(async move {
            let ranges = Wakeful(Box::pin(failed.conflicting_keys())).await;
            let ranges = ranges.map_err(|error| Error::Store(store_error(error)))?;
            Ok(ranges
                .iter()
                .map(|range| KeyRange::new(range.begin().to_vec(), range.end().to_vec()))
                .collect())
        }))
    }

    fn cancel(&self) {
        let mut state = self.state();
        let cancelled = match std::mem::replace(&mut state.slot, Slot::Committing) {
            Slot::Open(transaction) => Some(transaction.cancel()),
            Slot::Cancelled(cancelled) => cancelled,
            // A commit or back-off that is under way continues, but no longer changes this transaction.
            Slot::Committing | Slot::Committed(_) | Slot::Failed(_) | Slot::Unmade(_) => None,
        };
        let (generation, made) = (state.generation + 1, state.made);
        *state = State { generation, made, ..State::new(Slot::Cancelled(cancelled)) };
    }

    fn reset(&self) {
        let mut state = self.state();
        let slot = match std::mem::replace(&mut state.slot, Slot::Committing) {
            Slot::Open(mut transaction) => {
                transaction.reset();
                Slot::Open(transaction)
            }
            Slot::Committed(committed) => Slot::Open(committed.reset()),
            Slot::Cancelled(Some(cancelled)) => Slot::Open(cancelled.reset()),
            // A commit or back-off that is under way continues, but no longer changes this transaction.
            Slot::Committing | Slot::Failed(_) | Slot::Cancelled(None) | Slot::Unmade(_) => {
                unused(&self.client)
            }
        };
        *state = State { generation: state.generation + 1, ..State::new(slot) };
    }

    fn is_retryable(&self, error: &StoreError) -> bool {
        FdbError::from_code(error.code()).is_retryable()
    }

    fn recover(&self, error: Error, backoff: BoxFuture<'static, ()>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let code = match &error {
                Error::Store(code) if self.is_retryable(code) => code.code(),
                _ => return Err(error),
            };
            let (generation, paced) = {
                let mut state = self.state();
                match &state.slot {
                    Slot::Unmade(_) => return Err(error),
                    Slot::Cancelled(_) => return Err(StoreError::TRANSACTION_CANCELLED.into()),
                    _ if state.is_timed_out() => return Err(StoreError::TRANSACTION_TIMED_OUT.into()),
                    _ => {}
                }
                // The client knows the best pause, because the cluster requests one. But the client can pace only failures that it saw
                // itself, and failures of a body that did not begin a commit.
                let paced = match std::mem::replace(&mut state.slot, Slot::Committing) {
                    Slot::Open(transaction) => Some(transaction.on_error(FdbError::from_code(code)).boxed()),
                    Slot::Failed(failed) if failed.code() == code => {
                        Arc::into_inner(failed).map(|failed| failed.on_error().boxed())
                    }
                    _ => None,
                };
                (state.generation, paced)
            };
            let recovered = match paced {
                Some(paced) => match Wakeful(paced).await {
                    Ok(transaction) => Some(transaction),
                    // In this state the client treats the error as final, although it calls the error retryable.
                    Err(last) if last.code() == code => None,
                    Err(last) => return Err(Error::Store(store_error(last))),
                },
                None => None,
            };
            let is_kept_by_client = recovered.is_some();
            let slot = if let Some(transaction) = recovered {
                Slot::Open(transaction)
            } else {
                backoff.await;
                unused(&self.client)
            };
            let mut state = self.state();
            if matches!(state.slot, Slot::Cancelled(_)) {
                return Err(StoreError::TRANSACTION_CANCELLED.into());
            }
            // If the transaction was reset meanwhile, it is a new one by now.
            if state.generation == generation {
                if state.is_timed_out() {
                    return Err(StoreError::TRANSACTION_TIMED_OUT.into());
                }
                state.try_again(slot, is_kept_by_client);
            }
            Ok(())
        })
    }
}

impl FdbTransaction {
    /// Reads as many rows of `read` as the client returns at once, which may be fewer than the limits allow.
    fn part(&self, read: &RangeRead, isolation: Isolation) -> Answer<'_, Page> {
        let option = RangeOption {
            begin: KeySelector::first_greater_or_equal(&read.range.begin[..]),
            end: KeySelector::first_greater_or_equal(&read.range.end[..]),
            limit: Some(read.limit),
            target_bytes: read.target_bytes,
            // Use the given limits, and none of the client's own.
            mode: StreamingMode::Exact,
            reverse: read.reverse,
            ..RangeOption::default()
        };
        self.ask(|transaction| {
            let rows = transaction.get_range(&option, 1, isolation == Isolation::Snapshot);
            rows.map_ok(|values| Page {
                rows: values
                    .iter()
                    .map(|row| (Bytes::copy_from_slice(row.key()), Bytes::copy_from_slice(row.value())))
                    .collect(),
                more: values.more(),
            })
        })
    }

    /// Adds an explicit conflict range.
    fn add_conflict(&self, range: &KeyRange, kind: ConflictRangeType) {
        let mut state = self.state();
        let Ok(transaction) = state.open() else { return };
        if let Err(error) = transaction.add_conflict_range(&range.begin, &range.end, kind) {
            state.refuse(store_error(error));
        }
    }
}

/// Returns a transaction of `client` that has done nothing yet.
fn unused(client: &Client) -> Slot {
    match client.create_trx() {
        Ok(transaction) => Slot::Open(transaction),
        Err(error) => Slot::Unmade(store_error(error)),
    }
}

/// Converts an option into the client's form, if it has one. The client's transaction was created this much `later` than ours.
fn client_option(option: &TransactionOption, later: Duration) -> Option<ClientOption> {
    let number = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    Some(match *option {
        TransactionOption::Timeout(timeout) => {
            // The client treats zero as no limit.
            let left = timeout.saturating_sub(later).as_millis().max(1);
            ClientOption::Timeout(i32::try_from(left).unwrap_or(i32::MAX))
        }
        TransactionOption::SizeLimit(size) => ClientOption::SizeLimit(number(size)),
        TransactionOption::Priority(Priority::Batch) => ClientOption::PriorityBatch,
        TransactionOption::Priority(Priority::System) => ClientOption::PrioritySystemImmediate,
        // A new transaction has this priority anyway.
        TransactionOption::Priority(Priority::Default) => return None,
        TransactionOption::ReportConflicts => ClientOption::ReportConflictingKeys,
    })
}

/// Returns the client's type for `op`.
fn mutation_type(op: AtomicOp) -> MutationType {
    match op {
        AtomicOp::Add => MutationType::Add,
        AtomicOp::Max => MutationType::Max,
        AtomicOp::Min => MutationType::Min,
        AtomicOp::ByteMax => MutationType::ByteMax,
        AtomicOp::ByteMin => MutationType::ByteMin,
        AtomicOp::CompareAndClear => MutationType::CompareAndClear,
        AtomicOp::SetVersionstampedKey => MutationType::SetVersionstampedKey,
        AtomicOp::SetVersionstampedValue => MutationType::SetVersionstampedValue,
    }
}

/// Converts the client's error into an error of the crate.
fn store_error(error: FdbError) -> StoreError {
    StoreError::from_code(error.code())
}
