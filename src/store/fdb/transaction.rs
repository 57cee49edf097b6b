//! A transaction of a cluster.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::foundationdb::{
    Database as Client, FdbError, KeySelector, RangeOption, Transaction, TransactionCancelled,
    TransactionCommitError, TransactionCommitted,
    options::{ConflictRangeType, MutationType, StreamingMode, TransactionOption as ClientOption},
};
use bytes::Bytes;
use futures_util::{FutureExt, TryFutureExt, future::BoxFuture};

use super::store_error;
use crate::{
    encoding::Versionstamp,
    error::{Error, Result, StoreError},
    store::{
        AtomicOp, Isolation, KEY_LEN_MAX, KeyRange, Page, Priority, RangeRead, TransactionOption, Watch,
        backend::{Answer, TransactionBackend},
        mutation::Mutation,
    },
};

/// A transaction of a cluster.
pub(super) struct FdbTransaction {
    /// The connection, for the next transaction after one that was lost in its commit.
    client: Arc<Client>,
    /// Everything that changes.
    state: Mutex<State>,
}

/// The changing part of a transaction.
struct State {
    /// The client's transaction.
    slot: Slot,
    /// Whether it writes anything, so that it will have a versionstamp.
    writes: bool,
    /// The first thing asked of it that the client library must not see; it fails everything that follows.
    bad: Option<StoreError>,
    /// How it is treated.
    options: Vec<TransactionOption>,
}

/// The client's transaction, by what can be done with it.
enum Slot {
    /// It can read and write.
    Open(Transaction),
    /// Its commit is under way, or was dropped.
    Committing,
    /// It is committed.
    Committed(TransactionCommitted),
    /// Its commit has failed.
    Failed(TransactionCommitError),
    /// It was cancelled.
    Cancelled(TransactionCancelled),
    /// It could not be made.
    Unmade(StoreError),
}

impl State {
    /// A new transaction of `client`.
    fn new(client: &Client) -> Self {
        let slot = match client.create_trx() {
            Ok(transaction) => Slot::Open(transaction),
            Err(error) => Slot::Unmade(store_error(error)),
        };
        Self::with_slot(slot)
    }

    /// A transaction that has done nothing yet.
    fn with_slot(slot: Slot) -> Self {
        Self { slot, writes: false, bad: None, options: Vec::new() }
    }

    /// The transaction, if it can read and write.
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

    /// Treats the transaction so. A bad option fails what follows.
    fn set_option(&mut self, option: TransactionOption) {
        let Ok(transaction) = self.open() else { return };
        let set = client_option(&option).map_or(Ok(()), |option| transaction.set_option(option));
        match set {
            Ok(()) => self.options.push(option),
            Err(error) => self.refuse(store_error(error)),
        }
    }

    /// Makes it a new transaction, on `slot`, with the options of the old one, but for those of which `is_kept` says that
    /// the client has kept them.
    fn begin_again(&mut self, slot: Slot, is_kept: impl Fn(&TransactionOption) -> bool) {
        let options = std::mem::take(&mut self.options);
        *self = Self::with_slot(slot);
        for option in options {
            if is_kept(&option) {
                self.options.push(option);
            } else {
                self.set_option(option);
            }
        }
    }

    /// Remembers why everything that follows fails.
    fn refuse(&mut self, error: StoreError) {
        self.bad.get_or_insert(error);
    }
}

impl FdbTransaction {
    /// A new transaction of `client`.
    pub fn new(client: Arc<Client>) -> Self {
        let state = Mutex::new(State::new(&client));
        Self { client, state }
    }

    /// The changing part. No holder of the lock can panic with it half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer of an operation that `question` starts on the open transaction.
    fn ask<T, F>(&self, question: impl FnOnce(&Transaction) -> F) -> Answer<'_, T>
    where
        F: Future<Output = Result<T, FdbError>> + Send + 'static,
    {
        let begun = self.state().open().map(question);
        match begun {
            Ok(answer) => Answer::Waiting(answer.map_err(|error| Error::Store(store_error(error))).boxed()),
            Err(error) => self.fail(error),
        }
    }

    /// Fails with `error`, unless something has gone wrong before, of which only the client may know.
    fn fail<T>(&self, error: StoreError) -> Answer<'_, T> {
        let state = self.state();
        let error = state.open().err().unwrap_or(error);
        let Slot::Open(transaction) = &state.slot else { return Err(error.into()).into() };
        let earlier = transaction.get_approximate_size();
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
        self.ask(|transaction| {
            let value = transaction.get(key, isolation == Isolation::Snapshot);
            value.map_ok(|value| value.map(|value| Bytes::copy_from_slice(&value)))
        })
    }

    fn get_range(&self, read: &RangeRead, isolation: Isolation) -> Answer<'_, Page> {
        if read.range.is_empty() || read.limit == 0 {
            // To the client a limit of zero is none. It knows more reasons to fail than are known here, so it is asked all
            // the same.
            let place = read.range.begin.clone().max(read.range.end.clone());
            let nothing = KeyRange { begin: place.clone(), end: place };
            return self.part(&RangeRead { limit: 1, range: nothing, ..read.clone() }, isolation);
        }
        let (limit, read_len) = (read.limit, read.target_bytes.max(1));
        let mut rest = read.clone();
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
            // The C API takes an inverted range for a bug of the binding, and aborts.
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
        // The client would tell of these only through the watch.
        let refused = match key {
            _ if key >= &b"\xff"[..] => Some(StoreError::KEY_OUTSIDE_LEGAL_RANGE),
            _ if key.len() > KEY_LEN_MAX => Some(StoreError::KEY_TOO_LARGE),
            _ => None,
        };
        let begun = match refused {
            None => self.state().open().map(|transaction| transaction.watch(key)),
            Some(refused) => Err(refused),
        };
        match begun {
            Ok(changed) => Ok(Watch::new(changed.map_err(|error| match error.code() {
                // The client's code for a watch whose transaction was never committed.
                1025 => Error::Store(StoreError::OPERATION_CANCELLED),
                _ => Error::Store(store_error(error)),
            })))
            .into(),
            Err(error) => self.fail(error),
        }
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
        // It must be asked for before the commit, and is known after it.
        let versionstamp = state.writes.then(|| transaction.get_versionstamp());
        let committed = transaction.commit();
        Answer::Waiting(Box::pin(async move {
            match committed.await {
                Ok(committed) => self.state().slot = Slot::Committed(committed),
                Err(failed) => {
                    let error = store_error(*failed);
                    self.state().slot = Slot::Failed(failed);
                    return Err(error.into());
                }
            }
            let Some(versionstamp) = versionstamp else { return Ok(None) };
            match versionstamp.await {
                Ok(stamp) => {
                    let stamp = <[u8; 10]>::try_from(&stamp[..]).expect("the client's stamps have 10 bytes");
                    Ok(Some(Versionstamp(stamp)))
                }
                // What it wrote came to nothing, such as clearing an empty range.
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
        // The client tells by reading a range beyond the layers' keys, on the transaction whose commit has failed.
        let mut state = self.state();
        let Slot::Failed(failed) = std::mem::replace(&mut state.slot, Slot::Committing) else {
            return Ok(Vec::new()).into();
        };
        Answer::Waiting(Box::pin(async move {
            let ranges = failed.conflicting_keys().await;
            self.state().slot = Slot::Failed(failed);
            let ranges = ranges.map_err(|error| Error::Store(store_error(error)))?;
            Ok(ranges
                .iter()
                .map(|range| KeyRange::new(range.begin().to_vec(), range.end().to_vec()))
                .collect())
        }))
    }

    fn cancel(&self) {
        let mut state = self.state();
        if matches!(state.slot, Slot::Open(_))
            && let Slot::Open(transaction) = std::mem::replace(&mut state.slot, Slot::Committing)
        {
            state.slot = Slot::Cancelled(transaction.cancel());
        }
    }

    fn reset(&self) {
        let mut state = self.state();
        let slot = match std::mem::replace(&mut state.slot, Slot::Committing) {
            Slot::Open(mut transaction) => {
                transaction.reset();
                Slot::Open(transaction)
            }
            Slot::Committed(committed) => Slot::Open(committed.reset()),
            Slot::Failed(failed) => Slot::Open(failed.reset()),
            Slot::Cancelled(cancelled) => Slot::Open(cancelled.reset()),
            Slot::Committing | Slot::Unmade(_) => State::new(&self.client).slot,
        };
        *state = State::with_slot(slot);
    }

    fn recover(&self, error: Error, backoff: BoxFuture<'static, ()>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let Error::Store(code) = &error else { return Err(error) };
            // The client decides what can be tried again, and how long to wait: it knows what the cluster has asked for.
            let slot = std::mem::replace(&mut self.state().slot, Slot::Committing);
            let recovered = match slot {
                Slot::Failed(failed) if failed.is_retryable() || failed.code() == code.code() => {
                    failed.on_error().await
                }
                Slot::Open(transaction) => transaction.on_error(FdbError::from_code(code.code())).await,
                Slot::Unmade(unmade) => {
                    self.state().slot = Slot::Unmade(unmade);
                    return Err(error);
                }
                Slot::Cancelled(cancelled) => {
                    self.state().slot = Slot::Cancelled(cancelled);
                    return Err(StoreError::TRANSACTION_CANCELLED.into());
                }
                // The body has committed by itself, or dropped its commit, or its commit has failed for good. The client
                // sees nothing in these that could be tried again.
                Slot::Committing | Slot::Committed(_) | Slot::Failed(_) if !error.is_retryable() => {
                    return Err(error);
                }
                Slot::Committing | Slot::Committed(_) | Slot::Failed(_) => {
                    backoff.await;
                    let slot = State::new(&self.client).slot;
                    self.state().begin_again(slot, |_| false);
                    return Ok(());
                }
            };
            match recovered {
                Ok(transaction) => {
                    self.state().begin_again(Slot::Open(transaction), is_kept_by_client);
                    Ok(())
                }
                Err(last) if last.code() == code.code() => Err(error),
                Err(last) => Err(Error::Store(store_error(last))),
            }
        })
    }
}

impl FdbTransaction {
    /// Reads as many rows of `read` as the client gives at once: it may end earlier than the limits, for reasons of its own.
    fn part(&self, read: &RangeRead, isolation: Isolation) -> Answer<'_, Page> {
        let option = RangeOption {
            begin: KeySelector::first_greater_or_equal(&read.range.begin[..]),
            end: KeySelector::first_greater_or_equal(&read.range.end[..]),
            limit: Some(read.limit),
            target_bytes: read.target_bytes,
            // The limits that were given, and none of the client's own.
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

/// Whether the client keeps an option when a transaction is tried again. It counts retries and time across all tries.
fn is_kept_by_client(option: &TransactionOption) -> bool {
    matches!(option, TransactionOption::Timeout(_) | TransactionOption::RetryLimit(_))
}

/// The client's form of an option, if it takes one.
fn client_option(option: &TransactionOption) -> Option<ClientOption> {
    let number = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    Some(match *option {
        TransactionOption::Timeout(timeout) => {
            // To the client zero is no limit.
            ClientOption::Timeout(i32::try_from(timeout.as_millis().max(1)).unwrap_or(i32::MAX))
        }
        TransactionOption::RetryLimit(retries) => ClientOption::RetryLimit(number(retries as usize)),
        TransactionOption::SizeLimit(size) => ClientOption::SizeLimit(number(size)),
        TransactionOption::Priority(Priority::Batch) => ClientOption::PriorityBatch,
        TransactionOption::Priority(Priority::System) => ClientOption::PrioritySystemImmediate,
        // A new transaction has it.
        TransactionOption::Priority(Priority::Default) => return None,
        TransactionOption::Tag(ref tag) => ClientOption::Tag(tag.clone()),
        TransactionOption::ReportConflicts => ClientOption::ReportConflictingKeys,
    })
}

/// The client's number of an operation.
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
