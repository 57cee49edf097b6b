//! [`ObservedCommit`]: a commit, as the oracle sees it.

use std::collections::BTreeMap;

use bytes::Bytes;
use notibus::{event::Versionstamp, store::testing::Operation};

use super::stored_item::StoredItem;
use crate::{guarantee::Broken, kernel::Issuer};

pub(crate) type Verdict = Result<(), Broken>;

/// What a commit changed at a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Change {
    pub before: Option<Bytes>,
    pub after: Option<Bytes>,
}

/// A commit, as the oracle sees it.
pub(crate) struct ObservedCommit<'a> {
    pub issuer: Issuer,
    pub stamp: Versionstamp,
    /// Whether the issuer had already learned that the commit failed.
    pub is_late: bool,
    pub touched: BTreeMap<Bytes, Change>,
    /// Reads any value as it was before the commit.
    pub before: &'a dyn Fn(&[u8]) -> Option<Bytes>,
}

/// Whether a transaction with these writes is a fold.
pub(crate) fn is_fold(mutations: &[Operation]) -> bool {
    let keys = mutations.iter().filter_map(|mutation| match mutation {
        Operation::Set { key, .. } => Some(StoredItem::of(key)),
        _ => None,
    });
    let items: Vec<_> = keys.collect();
    let is = |test: fn(&StoredItem) -> bool| items.iter().any(test);
    is(|item| matches!(item, StoredItem::FoldMark(_))) && !is(|item| matches!(item, StoredItem::Lease(..)))
}

/// The keys that a commit touched, decoded.
pub(crate) type StoredChanges<'a> = [(StoredItem, &'a Change)];
