//! Families 2, 3 and 9: the doorbell and the fold mark of a partition, with the rule that assigns names to partitions; and the sequence of
//! the last notification about a change to a design document.
//!
//! A row without an id stands for changes to design documents whose ids were not recorded. Such a change may concern any document, so a
//! change with an id does not replace the row.

use xxhash_rust::xxh3::xxh3_64;

use super::{Keys, family};
use crate::{
    base::{
        encoding::{Reader, Sequence},
        error::{Error, Result},
        event::{Db, DdocId},
    },
    store::{KeyRange, Row},
};

/// A fixed slice of the counters: the notifier's unit of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Partition(pub u32);

impl Partition {
    /// Returns the partition of the database `name` out of `count`. The hash (XXH3, 64 bits) is part of the stored format.
    pub fn of(name: &str, count: u32) -> Self {
        Self((xxh3_64(name.as_bytes()) % u64::from(count)) as u32)
    }
}

/// The fold mark of a partition: the progress of its owner. Every fold changes the mark, so a notifier can find out whether a fold with an
/// unknown result was committed, and a former owner cannot commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FoldMark {
    /// The epoch of the lease under which the fold was made.
    pub epoch: u64,
    /// The number of folds in that epoch.
    pub fold: u64,
}

impl FoldMark {
    /// The stored form: both numbers, 8 bytes each.
    pub fn to_bytes(self) -> Vec<u8> {
        [self.epoch.to_be_bytes(), self.fold.to_be_bytes()].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("fold mark", bytes);
        let mark = Self { epoch: reader.u64()?, fold: reader.u64()? };
        reader.finish()?;
        Ok(mark)
    }
}

impl Keys {
    /// The key of the doorbell of `partition`.
    pub fn doorbell(&self, partition: Partition) -> Vec<u8> {
        self.pack(&(family::DOORBELL, partition.0))
    }

    /// The fold marks of all partitions.
    pub fn all_fold_marks(&self) -> KeyRange {
        self.range(&(family::FOLD_MARK,))
    }

    /// The key of the fold mark of `partition`.
    pub fn fold_mark(&self, partition: Partition) -> Vec<u8> {
        self.pack(&(family::FOLD_MARK, partition.0))
    }
}

impl Keys {
    /// The key of the design document `id` of `db`; without an id, the key for changes whose ids were not recorded. No id is empty.
    pub fn ddoc(&self, db: &Db, id: Option<&DdocId>) -> Vec<u8> {
        let id = id.map_or("", DdocId::as_str);
        self.pack(&(family::DDOC, db.name.as_str(), &db.instance.0[..], id))
    }

    /// The rows of all changed design documents of `db`.
    pub fn ddocs(&self, db: &Db) -> KeyRange {
        self.range(&(family::DDOC, db.name.as_str(), &db.instance.0[..]))
    }

    /// Decodes the id in a stored row, if it has one, and the sequence of the last notification about a change to that document.
    pub fn ddoc_row(&self, (key, value): &Row) -> Result<(Option<DdocId>, Sequence)> {
        let (number, _, _, id): (u16, String, foundationdb_tuple::Bytes<'_>, String) =
            self.unpack("ddoc", key)?;
        if number != family::DDOC {
            return Err(Error::corrupt("ddoc", "its key belongs to another family"));
        }
        let id = (!id.is_empty()).then(|| DdocId::new(&id)).transpose();
        let id = id.map_err(|error| Error::corrupt("ddoc", error.to_string()))?;
        Ok((id, Sequence::from_bytes(value)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::event::{DbInstance, DbName};

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        assert_eq!(keys.doorbell(Partition(300)), [b'p', 0x15, 2, 0x16, 1, 44]);
        assert_eq!(keys.fold_mark(Partition(0)), [b'p', 0x15, 3, 0x14]);
        let mark = FoldMark { epoch: 1, fold: 2 };
        assert_eq!(mark.to_bytes(), [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2]);
        assert_eq!(FoldMark::from_bytes(&mark.to_bytes()).unwrap(), mark);
        assert!(FoldMark::from_bytes(&[0; 15]).is_err());
    }

    #[test]
    fn the_partition_of_a_name_never_changes() {
        let partitions = ["a", "shop/orders", "_replicator", "ü"].map(|name| Partition::of(name, 64).0);
        assert_eq!(partitions, GOLDEN);
        assert_eq!(Partition::of("anything", 1), Partition(0));
    }

    /// The partitions of these names in existing buses.
    const GOLDEN: [u32; 4] = [31, 18, 51, 46];

    #[test]
    fn golden_bytes_of_design_documents() {
        let db = Db::new(DbName::new("db").unwrap(), DbInstance([7; 16]));
        let keys = Keys::new(b"p").unwrap();
        let id = DdocId::new("i").unwrap();
        for (id, bytes) in [(Some(id), &b"\x02i\0"[..]), (None, b"\x02\0")] {
            let key = keys.ddoc(&db, id.as_ref());
            let expected = [&[b'p', 0x15, 9, 0x02, b'd', b'b', 0, 0x01][..], &[7; 16], &[0], bytes].concat();
            assert_eq!(key, expected);
            assert!(keys.ddocs(&db).contains(&key));
            let row = (key.into(), bytes::Bytes::copy_from_slice(Sequence::MIN.as_bytes()));
            assert_eq!(keys.ddoc_row(&row).unwrap(), (id, Sequence::MIN));
        }
    }
}
