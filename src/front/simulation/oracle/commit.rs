//! [`ObservedCommit`]: a commit, as the oracle sees it.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::stored_item::StoredItem;
use crate::{
    base::encoding::Versionstamp,
    front::simulation::{app::AppKey, guarantee::Broken, issuer::Issuer},
    store::Mutation,
};

pub(in crate::front::simulation) type Verdict = Result<(), Broken>;

/// The change of a key by a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::front::simulation) struct Change {
    pub before: Option<Bytes>,
    pub after: Option<Bytes>,
}

/// A commit, as the oracle sees it.
pub(in crate::front::simulation) struct ObservedCommit<'a> {
    pub issuer: Issuer,
    pub stamp: Versionstamp,
    /// Whether its process had already learned that it has failed.
    pub is_late: bool,
    pub touched: BTreeMap<Bytes, Change>,
    /// Any value before it.
    pub before: &'a dyn Fn(&[u8]) -> Option<Bytes>,
}

impl ObservedCommit<'_> {
    /// Whether it records events.
    pub fn records(&self) -> bool {
        self.touched.keys().any(|key| StoredItem::of(key) == StoredItem::App(AppKey::History))
    }
}

/// Whether a transaction with these writes is a fold.
pub(in crate::front::simulation) fn is_fold(mutations: &[Mutation]) -> bool {
    let keys = mutations.iter().filter_map(|mutation| match mutation {
        Mutation::Set(key, _) => Some(StoredItem::of(key)),
        _ => None,
    });
    let items: Vec<_> = keys.collect();
    let is = |test: fn(&StoredItem) -> bool| items.iter().any(test);
    is(|item| matches!(item, StoredItem::FoldMark(_))) && !is(|item| matches!(item, StoredItem::Lease(..)))
}

/// The keys that a commit touched, decoded.
pub(in crate::front::simulation) type StoredChanges<'a> = [(StoredItem, &'a Change)];
