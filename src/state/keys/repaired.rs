//! Whether a row of any family can be decoded: one that could not is no longer reported once it was repaired.

use foundationdb_tuple::Element;

use super::{
    CursorRow, DeadLetterRow, FoldMark, GroupParkedRow, GroupRow, Idleness, Keys, NodeRow, OwedRow,
    ParkedRow, Trouble, checkpoint_position, family, feed::row_count, group, role_max, turn_shard,
};
use crate::{base::encoding::Sequence, store::Row};

impl Keys {
    /// Whether the bus can decode `row`. Rows of families that it never skips count as such that it cannot.
    pub fn is_decodable(&self, row: &Row) -> bool {
        let (key, value) = row;
        let Ok(tuple) = self.unpack::<Vec<Element<'_>>>("row", key) else { return false };
        // The family, and the number that tells its parts apart.
        let number = |place: usize| match tuple.get(place) {
            Some(Element::Int(number)) => u16::try_from(*number).ok(),
            _ => None,
        };
        match (number(0), number(2)) {
            (Some(family::COUNTERS), _) => self.drain_row(row.clone()).is_ok(),
            (Some(family::FOLD_MARK), _) => FoldMark::from_bytes(value).is_ok(),
            (Some(family::NEWEST | family::HORIZON), _) => Sequence::from_bytes(value).is_ok(),
            (Some(family::TOPOLOGY), _) => self.topology_row(row).is_ok(),
            (Some(family::DDOC), _) => self.ddoc_row(row).is_ok(),
            (Some(family::NODE), _) if self.node_of(key).is_ok() => NodeRow::from_bytes(value).is_ok(),
            (Some(family::NODE), _) => {
                role_max(value).is_ok() && (self.role_of_node(key).is_ok() || self.node_of_role(key).is_ok())
            }
            (Some(family::LEASE), _) => self.lease_row(key, value).is_ok(),
            (Some(family::CHECKPOINT), Some(part)) => match (part, number(4)) {
                (group::part::GROUP, _) => {
                    matches!(self.group_of(key), Ok(Some(_))) && GroupRow::from_bytes(value).is_ok()
                }
                (group::part::CHECKPOINT | group::part::LOWEST, _) => checkpoint_position(value).is_ok(),
                (group::part::DEAD_LETTER, _) => DeadLetterRow::from_bytes(value).is_ok(),
                (group::part::PARKED, _) => GroupParkedRow::from_bytes(value).is_ok(),
                (group::part::TURN, _) => turn_shard(value).is_ok(),
                (group::part::STATUS, Some(group::status::IDLE)) => Idleness::from_bytes(value).is_ok(),
                (group::part::STATUS, Some(group::status::TROUBLE)) => Trouble::from_bytes(value).is_ok(),
                _ => false,
            },
            (Some(family::AGE), _) => self.age_mark_of(row).is_ok(),
            (Some(family::CURSOR), _) => match number(3) {
                Some(super::parked::part::PARKED) => ParkedRow::from_bytes(value).is_ok(),
                Some(super::owed::PART) => OwedRow::from_bytes(value).is_ok(),
                _ => CursorRow::from_bytes(value).is_ok(),
            },
            (Some(family::ROW_COUNT), _) => row_count(Some(&value[..])).is_ok(),
            _ => false,
        }
    }
}
