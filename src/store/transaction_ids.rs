//! The ids by which [`Database::run_once`](super::Database::run_once) recognises its own commits.
//!
//! An id is a key: the prefix, 16 bytes drawn for the process, and a counter. The transaction of the id writes it, so
//! it exists if and only if the transaction was committed.
//!
//! | | |
//! |---|---|
//! | lifetime | from the commit until the run is over and 256 others are, too; of a crashed process until it is swept |
//! | key | prefix, process (16), counter (8, big-endian) |
//! | value | attempt (4, big-endian, counted from 1), versionstamp (10) |
//!
//! The counter makes clearing cheap: the finished ids of one process are one range, except for runs under way.
//!
//! # Invariants
//!
//! 1. Every counter below `next` was handed out once; `outstanding` has those whose runs are not over.
//! 2. No counter below `cleared` is outstanding, and a commit has cleared all their ids.
//! 3. Only ids of ended runs are cleared. A late commit of such a run conflicts with the clearing, because every
//!    attempt has its own id in its read-conflict set: it cannot leave its id behind.

use std::{collections::BTreeSet, ops::Range, sync::Arc};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};

use super::{Committed, KeyRange, key_after};
use crate::base::{
    encoding::{Reader, STAMP_LEN, Versionstamp, versionstamped},
    env::Env,
    error::{Error, Result},
};

/// The prefix of the keys of transaction ids, unless
/// [`Database::with_transaction_ids`](super::Database::with_transaction_ids) sets another.
pub(crate) const TRANSACTION_IDS_PREFIX: &[u8] = b"notibus-transactions";

/// How many runs of [`Database::run_once`](super::Database::run_once) have to end before another one clears their
/// ids.
pub(super) const FINISHED_IDS_MAX: u64 = 256;

/// The longest prefix, in bytes.
const PREFIX_LEN_MAX: usize = 256;

/// The bytes that distinguish the handles of one process from all others.
pub(super) type Process = [u8; 16];

/// The ids of one process. Clones of a database share them.
pub(super) struct TransactionIds {
    prefix: Bytes,
    state: Mutex<State>,
}

/// The changing part.
#[derive(Default)]
struct State {
    /// Drawn for the first run.
    process: Option<Process>,
    /// The counter of the next run.
    next: u64,
    /// The counters of runs that are not over.
    outstanding: BTreeSet<u64>,
    /// Below this counter all ids are cleared.
    cleared: u64,
    /// Whether a transaction that clears ids is under way.
    is_clearing: bool,
}

impl State {
    /// The counters of consecutive ended runs that are not known to be cleared.
    fn finished(&self) -> Range<u64> {
        self.cleared..self.outstanding.first().copied().unwrap_or(self.next)
    }
}

impl Default for TransactionIds {
    fn default() -> Self {
        Self { prefix: Bytes::from_static(TRANSACTION_IDS_PREFIX), state: Mutex::default() }
    }
}

impl TransactionIds {
    /// The ids of a new process under `prefix`.
    pub fn new(prefix: &[u8]) -> Result<Self> {
        let reason = match prefix {
            [] => "it is empty: ids and other keys could not be distinguished".to_owned(),
            [0xff, ..] => "it starts with 0xff, which the store keeps for itself".to_owned(),
            _ if prefix.len() > PREFIX_LEN_MAX => {
                format!("it has {} bytes, at most {PREFIX_LEN_MAX} are allowed", prefix.len())
            }
            _ => return Ok(Self { prefix: Bytes::copy_from_slice(prefix), state: Mutex::default() }),
        };
        Err(Error::invalid("prefix", reason))
    }

    /// The ids of another process under the same prefix.
    #[cfg(any(test, feature = "test-util"))]
    pub fn of_another_process(&self) -> Self {
        Self { prefix: self.prefix.clone(), state: Mutex::default() }
    }

    /// The id of a new run.
    pub fn begin(self: &Arc<Self>, env: &Env) -> TransactionId {
        let mut state = self.state();
        let process = *state.process.get_or_insert_with(|| draw(env));
        let counter = state.next;
        state.next += 1;
        state.outstanding.insert(counter);
        TransactionId { ids: Arc::clone(self), counter, key: self.key(process, counter) }
    }

    /// The work of clearing finished ids, if there is enough of it and no other clearing is under way.
    pub fn clearing(self: &Arc<Self>) -> Option<Clearing> {
        let mut state = self.state();
        let counters = state.finished();
        if state.is_clearing || counters.end - counters.start < FINISHED_IDS_MAX {
            return None;
        }
        state.is_clearing = true;
        let process = state.process.expect("an id was handed out");
        let range = self.counter_range(process, counters.start, counters.end);
        Some(Clearing { ids: Arc::clone(self), range, end: counters.end })
    }

    /// All ranges of finished ids that may not be cleared yet, around the outstanding ones, and the counter below
    /// which no finished id will be left.
    pub fn all_finished(&self) -> (Vec<KeyRange>, u64) {
        let state = self.state();
        let Some(process) = state.process else { return (Vec::new(), 0) };
        let mut ranges = Vec::new();
        let mut begin = state.cleared;
        for &end in state.outstanding.iter().chain([&state.next]) {
            if begin < end {
                ranges.push(self.counter_range(process, begin, end));
            }
            begin = end + 1;
        }
        (ranges, state.finished().end)
    }

    /// Records that no id is left below `end`.
    pub fn cleared(&self, end: u64) {
        let mut state = self.state();
        state.cleared = state.cleared.max(end);
    }

    /// The keys of all processes.
    pub fn range(&self) -> KeyRange {
        KeyRange::prefix(self.prefix.clone())
    }

    /// The keys of `process`.
    pub fn process_range(&self, process: Process) -> KeyRange {
        KeyRange::prefix([&self.prefix[..], &process].concat())
    }

    /// The keys of `process` up to and including that of `counter`.
    pub fn range_to(&self, process: Process, counter: u64) -> KeyRange {
        KeyRange { begin: self.key(process, 0), end: key_after(&self.key(process, counter)) }
    }

    /// The process and the counter of `key`.
    pub fn decode(&self, key: &[u8]) -> Result<(Process, u64)> {
        const WHAT: &str = "transaction id";
        let rest = key
            .strip_prefix(&self.prefix[..])
            .ok_or_else(|| Error::corrupt(WHAT, "its key is outside the prefix"))?;
        let mut reader = Reader::new(WHAT, rest);
        let decoded = (reader.bytes16()?, reader.u64()?);
        reader.finish()?;
        Ok(decoded)
    }

    /// The keys of `process` from counter `begin` up to but not including `end`.
    fn counter_range(&self, process: Process, begin: u64, end: u64) -> KeyRange {
        KeyRange { begin: self.key(process, begin), end: self.key(process, end) }
    }

    fn key(&self, process: Process, counter: u64) -> Bytes {
        [&self.prefix[..], &process, &counter.to_be_bytes()].concat().into()
    }

    /// The changing part.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// The bytes of a new process.
fn draw(env: &Env) -> Process {
    let mut process = [0; 16];
    process[..8].copy_from_slice(&env.random().to_be_bytes());
    process[8..].copy_from_slice(&env.random().to_be_bytes());
    process
}

/// The id of one run, which is over when this is dropped.
pub(super) struct TransactionId {
    ids: Arc<TransactionIds>,
    counter: u64,
    key: Bytes,
}

impl TransactionId {
    pub fn key(&self) -> &[u8] {
        &self.key
    }
}

impl Drop for TransactionId {
    fn drop(&mut self) {
        self.ids.state().outstanding.remove(&self.counter);
    }
}

/// Finished ids that a transaction clears. If dropped, another transaction clears them.
pub(super) struct Clearing {
    ids: Arc<TransactionIds>,
    pub range: KeyRange,
    /// The counter after the last one.
    end: u64,
}

impl Clearing {
    /// The transaction was committed.
    pub fn done(self) {
        self.ids.cleared(self.end);
    }
}

impl Drop for Clearing {
    fn drop(&mut self) {
        self.ids.state().is_clearing = false;
    }
}

/// The operand for the value of an id in attempt number `attempt`.
pub(super) fn mark(attempt: u32) -> Vec<u8> {
    versionstamped(&attempt.to_be_bytes(), &[])
}

/// The attempt that wrote the id with this value, and its commit.
pub(super) fn read_mark(value: &[u8]) -> Result<(u32, Committed)> {
    let mut reader = Reader::new("transaction id", value);
    let attempt = reader.u32()?;
    let stamp = reader.take(STAMP_LEN)?.try_into().expect("as many bytes were taken");
    reader.finish()?;
    Ok((attempt, Committed { versionstamp: Versionstamp(stamp) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// New ids, and the environment of their process.
    fn ids() -> (Arc<TransactionIds>, Env) {
        (Arc::new(TransactionIds::new(b"p").unwrap()), Env::system())
    }

    #[test]
    fn golden_bytes() {
        let (ids, _) = ids();
        let key = ids.key([7; 16], 0x0102);
        assert_eq!(key[..], [&b"p"[..], &[7; 16], &[0, 0, 0, 0, 0, 0, 1, 2]].concat());
        assert_eq!(ids.decode(&key).unwrap(), ([7; 16], 0x0102));
        assert_eq!(mark(258), [0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0]);
        let stamp = Versionstamp::new(5, 6);
        let value = [&258_u32.to_be_bytes()[..], &stamp.0].concat();
        assert_eq!(read_mark(&value).unwrap(), (258, Committed { versionstamp: stamp }));
    }

    #[test]
    fn other_lengths_are_corrupt() {
        let (ids, _) = ids();
        for len in [0, 1, 24, 26] {
            assert!(ids.decode(&vec![b'p'; len]).is_err(), "{len}");
        }
        for len in [0, 4, 13, 15] {
            assert!(read_mark(&vec![0; len]).is_err(), "{len}");
        }
        assert!(ids.decode(&[b'q'; 25]).is_err());
    }

    #[test]
    fn clearing_stops_at_the_first_run_that_is_not_over() {
        let (ids, env) = ids();
        let first: Vec<_> = (0..FINISHED_IDS_MAX).map(|_| ids.begin(&env)).collect();
        let slow = ids.begin(&env);
        for _ in 0..2 * FINISHED_IDS_MAX {
            ids.begin(&env);
        }
        assert!(ids.clearing().is_none(), "the oldest run is not over");
        let (begin, end) = (first[0].key.clone(), slow.key.clone());
        drop(first);
        let clearing = ids.clearing().unwrap();
        assert_eq!(clearing.range, KeyRange { begin, end });
        assert!(ids.clearing().is_none(), "one transaction is at it");
        drop(clearing);
        ids.clearing().expect("a transaction that failed leaves it to another one").done();
        assert!(ids.clearing().is_none(), "nothing is left before the slow run");
        drop(slow);
        assert!(ids.clearing().is_some());
    }

    #[test]
    fn all_that_is_finished_lies_around_what_is_not() {
        let (ids, env) = ids();
        assert!(ids.all_finished().0.is_empty());
        let mut runs: Vec<_> = (0..6).map(|_| ids.begin(&env)).collect();
        let at = |counter: usize| ids.key(ids.state().process.unwrap(), counter as u64);
        let keys: Vec<_> = (0..7).map(at).collect();
        for over in [5, 3, 2, 0] {
            drop(runs.remove(over));
        }
        let ranges = [(0, 1), (2, 4), (5, 6)].map(|(a, b)| KeyRange::new(keys[a].clone(), keys[b].clone()));
        assert_eq!(ids.all_finished(), (ranges.to_vec(), 1));
        ids.cleared(1);
        assert_eq!(ids.all_finished(), (ranges[1..].to_vec(), 1));
    }

    #[test]
    fn a_prefix_has_limits() {
        for bad in [&b""[..], b"\xff", &[b'p'; 257]] {
            assert!(matches!(TransactionIds::new(bad), Err(Error::Invalid { what: "prefix", .. })));
        }
        assert!(TransactionIds::new(&[b'p'; 256]).is_ok());
    }
}
