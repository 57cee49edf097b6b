//! The log of all commits of a world on a cluster, which each transaction writes for itself.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

use super::{
    flight,
    issuer::Issuer,
    link::Link,
    oracle::{By, Hex},
    witness::Fault,
};
use crate::{
    base::{
        encoding::{STAMP_LEN, Versionstamp},
        error::{Error, Result, StoreError},
    },
    store::{
        AtomicOp, Mutation,
        testing::{Commit, Operation},
    },
};

pub(super) const PREFIX: &[u8] = b"log of commits";

/// The most bytes of a row.
const ROW_LEN_MAX: usize = 90_000;

/// The operations, by their numbers in the log.
const OPERATIONS: [AtomicOp; 8] = [
    AtomicOp::Add,
    AtomicOp::Max,
    AtomicOp::Min,
    AtomicOp::ByteMax,
    AtomicOp::ByteMin,
    AtomicOp::CompareAndClear,
    AtomicOp::SetVersionstampedKey,
    AtomicOp::SetVersionstampedValue,
];

/// A mutation in the log.
#[derive(Serialize, Deserialize)]
enum Logged {
    Set(Hex, Hex),
    Clear(Hex),
    ClearRange(Hex, Hex),
    Atomic(usize, Hex, Hex),
}

impl From<&Mutation> for Logged {
    fn from(mutation: &Mutation) -> Self {
        let hex = |bytes: &Bytes| Hex(bytes.clone());
        match mutation {
            Mutation::Set(key, value) => Self::Set(hex(key), hex(value)),
            Mutation::Clear(key) => Self::Clear(hex(key)),
            Mutation::ClearRange(begin, end) => Self::ClearRange(hex(begin), hex(end)),
            Mutation::Atomic(op, key, operand) => {
                let number = OPERATIONS.iter().position(|known| known == op).expect("all are there");
                Self::Atomic(number, hex(key), hex(operand))
            }
        }
    }
}

impl Logged {
    /// What the commit at `stamp` has done.
    fn at(self, stamp: Versionstamp) -> Mutation {
        match self {
            Self::Set(key, value) => Mutation::Set(key.0, value.0),
            Self::Clear(key) => Mutation::Clear(key.0),
            Self::ClearRange(begin, end) => Mutation::ClearRange(begin.0, end.0),
            Self::Atomic(number, key, operand) => match OPERATIONS[number] {
                AtomicOp::SetVersionstampedKey => Mutation::Set(flight::stamped(&key.0, stamp), operand.0),
                AtomicOp::SetVersionstampedValue => Mutation::Set(key.0, flight::stamped(&operand.0, stamp)),
                op => Mutation::Atomic(op, key.0, operand.0),
            },
        }
    }
}

/// A commit, as the log has it.
pub(super) struct LoggedCommit {
    pub issuer: Issuer,
    pub stamp: Versionstamp,
    /// Its mutations, with the stamp in its place.
    pub mutations: Vec<Mutation>,
}

/// Commits, with a row of the log.
pub(super) fn record(
    link: &Arc<Link>,
    commit: Commit<'_>,
) -> BoxFuture<'static, Result<Option<Versionstamp>>> {
    let mutations: Vec<_> = commit.attempt.operations.iter().filter_map(Operation::mutation).collect();
    let logged: Vec<_> = mutations.iter().map(Logged::from).collect();
    let bytes = serde_json::to_vec(&(By::from(link.issuer), logged)).expect("it is plain data");
    for (number, part) in bytes.chunks(ROW_LEN_MAX).enumerate() {
        let mut key = [PREFIX, &[0; STAMP_LEN], &(number as u16).to_be_bytes()].concat();
        key.extend_from_slice(&(PREFIX.len() as u32).to_le_bytes());
        let part = Bytes::copy_from_slice(part);
        commit.inner.mutate(Mutation::Atomic(AtomicOp::SetVersionstampedKey, key.into(), part));
    }
    let shared = &link.shared;
    shared.may_crash(link.issuer);
    let before = [
        (Fault::Conflict, StoreError::NOT_COMMITTED),
        (Fault::UnknownLost, StoreError::COMMIT_UNKNOWN_RESULT),
        (Fault::Refused, StoreError::DATABASE_LOCKED),
    ];
    if let Some((_, error)) = before.into_iter().find(|(fault, _)| shared.strikes(*fault)) {
        return Box::pin(async move { Err(error.into()) });
    }
    let (link, committing) = (Arc::clone(link), commit.happen());
    Box::pin(async move {
        let stamp = committing.await?;
        if let (Some(notes), Some(stamp)) = (&link.notes, stamp) {
            notes.knows(stamp.version());
        }
        link.shared.may_crash_before_answer(link.issuer, false);
        if link.shared.strikes(Fault::UnknownCommitted) {
            return Err(StoreError::COMMIT_UNKNOWN_RESULT.into());
        }
        Ok(stamp)
    })
}

/// The commits in these rows of the log, in their order.
pub(super) fn read(rows: Vec<(Bytes, Bytes)>) -> Result<Vec<LoggedCommit>> {
    let mut commits: BTreeMap<[u8; STAMP_LEN], Vec<u8>> = BTreeMap::new();
    for (key, part) in rows {
        let stamp = key[PREFIX.len()..][..STAMP_LEN].try_into().expect("so long are the keys of the log");
        commits.entry(stamp).or_default().extend_from_slice(&part);
    }
    let commits = commits.into_iter().map(|(stamp, bytes)| {
        let wrong = |error: serde_json::Error| Error::invalid("log of commits", error.to_string());
        let (by, logged): (By, Vec<Logged>) = serde_json::from_slice(&bytes).map_err(wrong)?;
        let stamp = Versionstamp(stamp);
        let mutations = logged.into_iter().map(|mutation| mutation.at(stamp)).collect();
        Ok(LoggedCommit { issuer: by.into(), stamp, mutations })
    });
    commits.collect()
}
