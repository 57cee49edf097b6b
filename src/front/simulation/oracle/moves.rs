//! The oracle on moves of the bus: everything that is promised comes along, and nothing else.

use bytes::Bytes;

use super::{
    Oracle,
    commit::{ObservedCommit, Verdict},
    stored_item::StoredItem,
};
use crate::{
    base::encoding::Incarnation,
    front::simulation::{
        draw::Way,
        findings::Findings,
        guarantee::Guarantee,
        issuer::ProcessId,
        keyspace::{Rows, show_key},
        witness::Witness,
    },
};

/// The rows of a store after the bus has moved away from one with the rows `before`, with those that the layer moves.
pub(super) fn moved(before: &Rows, way: Way) -> Rows {
    let mut after = Rows::new();
    for (key, value) in before {
        let value = match StoredItem::of(key) {
            // Its last byte is the incarnation.
            StoredItem::Config => match value.split_last() {
                Some((last, rest)) => Bytes::from([rest, &[last + 1]].concat()),
                None => continue,
            },
            // They are of processes that have stopped.
            StoredItem::Node(_)
            | StoredItem::Role(_)
            | StoredItem::Member(..)
            | StoredItem::Lease(..)
            | StoredItem::FoldMark(_) => {
                continue;
            }
            // They mean nothing in another store.
            StoredItem::Doorbell(_)
            | StoredItem::Pulse(_)
            | StoredItem::MembershipVersion
            | StoredItem::RoleVersion
            | StoredItem::PoolVersion(_)
            | StoredItem::TransactionId
                if way == Way::Export =>
            {
                continue;
            }
            _ => value.clone(),
        };
        after.insert(key.clone(), value);
    }
    after
}

/// Judges whether `found` is in the new store what `before` in the old one demands, but for the rows of the layer.
pub(in crate::front::simulation) fn judge_moved(before: &Rows, found: &Rows, way: Way) -> Verdict {
    let expected = moved(before, way);
    let is_of_bus = |key: &&Bytes| {
        !matches!(
            StoredItem::of(key),
            // Their values change when nodes are removed.
            StoredItem::App(_)
                | StoredItem::TransactionId
                | StoredItem::MembershipVersion
                | StoredItem::RoleVersion
                | StoredItem::PoolVersion(_)
        )
    };
    for key in expected.keys().chain(found.keys()).filter(is_of_bus) {
        let (expected, found) = (expected.get(key), found.get(key));
        if expected != found {
            let key = show_key(key);
            return Guarantee::Moved
                .fails(format!("{key} is {found:?} after the move, and should be {expected:?}"));
        }
    }
    Ok(())
}

/// Whether `key` is of work that is put off.
pub(in crate::front::simulation) fn unfinished(key: &[u8]) -> bool {
    matches!(
        StoredItem::of(key),
        StoredItem::GroupParked(..)
            | StoredItem::Parked(..)
            | StoredItem::Owed(..)
            | StoredItem::DeadLetter(..)
    )
}

impl Oracle {
    /// How often the bus has moved.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// From now on the commits of this process are those of the operator who moves the bus.
    pub fn expect_move(&mut self, mover: ProcessId) {
        self.mover = Some(mover);
    }

    /// The bus has moved. No process of before works any more.
    pub fn moved(&mut self) {
        self.incarnation.0 += 1;
        self.owners.clear();
        self.beats.clear();
        self.dead.clear();
        self.lost_watches.clear();
        self.members.clear();
        // Versions of the old store say nothing of the new one.
        for group in self.groups.values_mut() {
            group.created = 0;
        }
        // They may not have cleared the ids of their transactions.
        self.has_crashed = true;
    }

    /// Judges a commit of the operator who moves the bus: while it is imported, nobody else may open it.
    pub(super) fn judge_move(&self, findings: &Findings, seen: &ObservedCommit<'_>) {
        let (mark, config) = (self.keys.import_mark(), self.keys.config());
        let before = (seen.before)(&mark);
        let after = match seen.touched.get(&mark[..]) {
            Some(change) => change.after.clone(),
            None => before.clone(),
        };
        if after.is_some() && seen.touched.get(&config[..]).is_some_and(|change| change.after.is_some()) {
            findings.fail(Guarantee::Moved.broken("a bus was opened while it was imported".to_owned()));
        }
        if before.is_some() && after.is_some() && before != after {
            findings.witness(Witness::ImportBegunAgain);
        }
    }
}
