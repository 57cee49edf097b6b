//! Family 1, the rows that producers write and the notifier folds: the counters of a database and, on request, the versionstamp of its last
//! update and the ids of changed design documents.

use bytes::Bytes;
use foundationdb_tuple::Element;

use super::{Keys, Partition, family};
use crate::{
    base::{
        encoding::{Reader, Tally, Versionstamp, versionstamped},
        error::{Error, Result},
        event::{Db, DbInstance, DbName, DdocId},
    },
    store::{KeyRange, Row},
};

/// The element after the instance, which distinguishes the three families.
mod part {
    pub const COUNTERS: u16 = 0;
    pub const LAST_UPDATE: u16 = 1;
    pub const DDOC: u16 = 2;
}

/// The meaning of a row of the family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DrainKey {
    /// The number of recorded events.
    Counters(Tally),
    /// The last transaction that recorded an event.
    LastUpdate(Versionstamp),
    /// A changed design document.
    Ddoc(DdocId),
}

/// A row of the family, decoded.
#[derive(Debug, Clone)]
pub(crate) struct DrainRow {
    pub db: Db,
    pub says: DrainKey,
    pub key: Bytes,
    pub value: Bytes,
}

impl DrainRow {
    /// Whether all counters of the instance are before this row, so that only design documents may follow.
    pub fn is_counted(&self) -> bool {
        matches!(self.says, DrainKey::Ddoc(_))
    }
}

impl Keys {
    /// The key of the counters of `db` in `slot`.
    pub fn counters(&self, partition: Partition, db: &Db, slot: u16) -> Vec<u8> {
        let instance = &db.instance.0[..];
        self.pack(&(family::COUNTERS, partition.0, db.name.as_str(), instance, part::COUNTERS, slot))
    }

    /// The key of the last update of `db` in `slot`.
    pub fn last_update(&self, partition: Partition, db: &Db, slot: u16) -> Vec<u8> {
        let instance = &db.instance.0[..];
        self.pack(&(family::COUNTERS, partition.0, db.name.as_str(), instance, part::LAST_UPDATE, slot))
    }

    /// The key of an unfolded change to the design document `id` of `db`.
    pub fn pending_ddoc(&self, partition: Partition, db: &Db, id: &DdocId) -> Vec<u8> {
        let instance = &db.instance.0[..];
        self.pack(&(family::COUNTERS, partition.0, db.name.as_str(), instance, part::DDOC, id.as_str()))
    }

    /// All changes to design documents of `db` that wait to be folded.
    pub fn pending_ddocs(&self, partition: Partition, db: &Db) -> KeyRange {
        let instance = &db.instance.0[..];
        self.range(&(family::COUNTERS, partition.0, db.name.as_str(), instance, part::DDOC))
    }

    /// All rows of `name` that wait to be folded, whatever their instance.
    pub fn drains_of(&self, partition: Partition, name: &DbName) -> KeyRange {
        self.range(&(family::COUNTERS, partition.0, name.as_str()))
    }

    /// All rows of `db` that wait to be folded.
    pub fn drains_of_db(&self, partition: Partition, db: &Db) -> KeyRange {
        self.range(&(family::COUNTERS, partition.0, db.name.as_str(), &db.instance.0[..]))
    }

    /// All rows in the partitions from `first` to `last` that wait to be folded.
    pub fn drains(&self, first: Partition, last: Partition) -> KeyRange {
        let begin = self.range(&(family::COUNTERS, first.0)).begin;
        let end = self.range(&(family::COUNTERS, last.0)).end;
        KeyRange { begin, end }
    }

    /// Returns the last partition from `first` to `last` that begins at or before `key`, which is at least `first`; and whether `key`,
    /// which need not be a valid key, is in that partition.
    pub fn partition_at(&self, key: &[u8], first: Partition, last: Partition) -> (Partition, bool) {
        let range = |number| self.drains(Partition(number), Partition(number));
        let (mut low, mut high) = (first.0, last.0);
        while low < high {
            let middle = high - (high - low) / 2;
            if range(middle).begin <= key { low = middle } else { high = middle - 1 }
        }
        (Partition(low), range(low).contains(key))
    }

    /// Decodes a row and its partition.
    pub fn drain_row(&self, (key, value): Row) -> Result<(Partition, DrainRow)> {
        let corrupt = |reason: &str| Error::corrupt("counters", reason);
        let (number, partition, name, instance, part, last): (
            u16,
            u32,
            String,
            foundationdb_tuple::Bytes<'_>,
            u16,
            Element<'_>,
        ) = self.unpack("counters", &key)?;
        if number != family::COUNTERS {
            return Err(corrupt("its key belongs to another family"));
        }
        let instance = instance[..].try_into().map_err(|_| corrupt("the instance is not 16 bytes"))?;
        let says = match (part, &last) {
            (part::COUNTERS, Element::Int(_)) => DrainKey::Counters(Tally::from_bytes(&value)?),
            (part::LAST_UPDATE, Element::Int(_)) => {
                let mut reader = Reader::new("last update", &value);
                let stamp = reader.take(10)?.try_into().expect("10 bytes were taken");
                reader.finish()?;
                DrainKey::LastUpdate(Versionstamp(stamp))
            }
            (part::DDOC, Element::String(id)) => {
                DrainKey::Ddoc(DdocId::new(id).map_err(|error| corrupt(&error.to_string()))?)
            }
            _ => return Err(corrupt("its key ends with an unknown element")),
        };
        let db =
            Db::new(DbName::new(&name).map_err(|error| corrupt(&error.to_string()))?, DbInstance(instance));
        Ok((Partition(partition), DrainRow { db, says, key, value }))
    }
}

/// The operand that sets a value to the versionstamp of the transaction.
pub(crate) fn stamp_operand() -> Vec<u8> {
    versionstamped(&[], &[])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::encoding::Counters;

    fn db(name: &str, instance: u8) -> Db {
        Db::new(DbName::new(name).unwrap(), DbInstance([instance; 16]))
    }

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        let mut expected = vec![b'p', 0x15, 1, 0x15, 5, 0x02, b'd', b'b', 0, 0x01];
        expected.extend([7; 16]);
        expected.extend([0, 0x14, 0x15, 2]);
        assert_eq!(keys.counters(Partition(5), &db("db", 7), 2), expected);
        let start = expected.len() - 3;
        expected.truncate(start);
        assert_eq!(
            keys.pending_ddoc(Partition(5), &db("db", 7), &DdocId::new("i").unwrap()),
            [&expected[..], &[0x15, 2, 0x02, b'i', 0]].concat()
        );
    }

    #[test]
    fn a_partition_range_holds_its_rows_and_no_others() {
        let keys = Keys::new(b"p").unwrap();
        let range = keys.drains(Partition(4), Partition(5));
        for (partition, within) in [(3, false), (4, true), (5, true), (6, false), (255, false), (256, false)]
        {
            let key = keys.counters(Partition(partition), &db("db", 7), 0);
            assert_eq!(range.contains(&key), within, "{partition}");
        }
    }

    #[test]
    fn the_partition_of_any_key_is_found() {
        let keys = Keys::new(b"p").unwrap();
        let at = |key: &[u8]| keys.partition_at(key, Partition(0), Partition(700));
        for number in [0, 1, 5, 255, 256, 700] {
            let key = keys.counters(Partition(number), &db("db", 7), 0);
            assert_eq!(at(&key), (Partition(number), true));
            let broken = [&keys.drains(Partition(number), Partition(number)).begin[..], b"junk"].concat();
            assert_eq!(at(&broken), (Partition(number), true));
        }
        let between = [&keys.drains(Partition(5), Partition(5)).end[..], b"junk"].concat();
        assert_eq!(at(&between), (Partition(5), false));
        assert_eq!(keys.partition_at(&between, Partition(5), Partition(5)), (Partition(5), false));
    }

    proptest! {
        #[test]
        fn round_trips(name in "\\PC{1,20}|a\0b", instance in any::<[u8; 16]>(), partition: u32, slot: u16, id in "\\PC{1,9}") {
            let keys = Keys::new(b"").unwrap();
            let db = Db::new(DbName::new(&name).unwrap(), DbInstance(instance));
            let id = DdocId::new(&id).unwrap();
            let counters = Tally { counters: Counters { ddoc_updated: 3, ..Counters::ZERO }, with_id: 2 };
            for (key, value, says) in [
                (keys.counters(Partition(partition), &db, slot), counters.to_bytes().to_vec(), DrainKey::Counters(counters)),
                (keys.last_update(Partition(partition), &db, slot), vec![4; 10], DrainKey::LastUpdate(Versionstamp([4; 10]))),
                (keys.pending_ddoc(Partition(partition), &db, &id), vec![4; 10], DrainKey::Ddoc(id.clone())),
            ] {
                let (found, row) = keys.drain_row((key.into(), value.into())).unwrap();
                prop_assert_eq!(found, Partition(partition));
                prop_assert_eq!((&row.db, row.says), (&db, says));
            }
        }
    }
}
