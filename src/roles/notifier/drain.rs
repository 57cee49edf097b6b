//! Reads the unfolded events of a partition, grouped by name, and subtracts exactly what it read.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::algorithm::Observed;
use crate::{
    base::{
        encoding::{COUNTERS_LEN, Counters},
        error::{Error, Result},
        event::{Db, DbInstance, DbName, DdocId},
    },
    state::keys::{DrainKey, DrainRow, Keys, Partition},
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Row, Transaction, key_after},
};

/// The unfolded events of one name.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    rows: Vec<DrainRow>,
    /// The events in `rows`, by instance.
    pub observed: BTreeMap<DbInstance, Observed>,
    /// The changed design documents.
    pub ddocs: Vec<(Db, DdocId)>,
}

/// A bounded part of the unfolded events of a partition.
#[derive(Debug, Default)]
pub(super) struct Drain {
    pub names: Vec<(DbName, Waiting)>,
    /// The key from which to continue; `None` if all was read.
    pub next: Option<Bytes>,
    /// The keys of rows that cannot be decoded, and why. They stay in the store.
    pub broken: Vec<(Bytes, Error)>,
}

impl Drain {
    /// Reads the unfolded events of `partition` from the key `from` on, at most about `rows_max` rows or `bytes_max` bytes. These are
    /// snapshot reads, which do not conflict with producers.
    ///
    /// The rows of one name stay together, so that all its instances are folded together, unless the name alone has more rows than fit. In
    /// that case the part ends between instances, or between the design documents of one, but never between the counters of one, because an
    /// instance that is judged by only some of its counters might seem never to have been created. The next part begins where rows of the
    /// name (or the instance) may begin, not at its first row, because a producer may have added to an earlier slot since.
    pub async fn read(
        tx: &Transaction,
        keys: &Keys,
        partition: Partition,
        from: Option<&Bytes>,
        (rows_max, bytes_max): (usize, usize),
    ) -> Result<Self> {
        let whole = keys.drains(partition, partition);
        let begin = from.unwrap_or(&whole.begin).clone();
        let read = RangeRead::new(KeyRange { begin, end: whole.end }).limit(rows_max).target_bytes(bytes_max);
        let page = tx.get_range(&read, Isolation::Snapshot).await?;
        let mut next = page.rows.last().filter(|_| page.more).map(|(key, _)| key_after(key));
        let mut broken = Vec::new();
        let mut rows = decoded(keys, page.rows, &mut broken);
        if let (Some(last), Some(read_to)) = (rows.last(), next.clone()) {
            let whole_names = rows.partition_point(|row| row.db.name < last.db.name);
            let whole_instances = rows.partition_point(|row| row.db < last.db);
            if whole_names > 0 {
                next = Some(keys.drains_of(partition, &last.db.name).begin);
                rows.truncate(whole_names);
            } else if !last.is_counted() && whole_instances > 0 {
                next = Some(keys.drains_of_db(partition, &last.db).begin);
                rows.truncate(whole_instances);
            } else if !last.is_counted() {
                let end = keys.pending_ddocs(partition, &last.db).begin;
                if read_to < end {
                    next = Some(end.clone());
                    let rest = tx.all_rows(KeyRange { begin: read_to, end }, Isolation::Snapshot).await?;
                    rows.extend(decoded(keys, rest, &mut broken));
                }
            }
        }
        // The next fold reads rows after `next` again, and finds the broken ones among them again.
        broken.retain(|(key, _)| next.as_ref().is_none_or(|next| key < next));
        Ok(Self { names: by_name(rows), next, broken })
    }

    /// Reads all unfolded events of `name` with snapshot reads.
    #[cfg(feature = "http")]
    pub async fn of_name(tx: &Transaction, keys: &Keys, partition: Partition, name: &DbName) -> Result<Self> {
        let rows = tx.all_rows(keys.drains_of(partition, name), Isolation::Snapshot).await?;
        let mut broken = Vec::new();
        let rows = decoded(keys, rows, &mut broken);
        Ok(Self { names: by_name(rows), next: None, broken })
    }
}

/// Decodes rows of any partition. The keys of rows that cannot be decoded go to `broken`.
fn decoded(keys: &Keys, rows: Vec<Row>, broken: &mut Vec<(Bytes, Error)>) -> Vec<DrainRow> {
    let mut found = Vec::with_capacity(rows.len());
    for row in rows {
        let key = row.0.clone();
        match keys.drain_row(row) {
            Ok((_, row)) => found.push(row),
            Err(error) => broken.push((key, error)),
        }
    }
    found
}

/// Groups ordered rows by name.
fn by_name(rows: Vec<DrainRow>) -> Vec<(DbName, Waiting)> {
    let mut names: Vec<(DbName, Waiting)> = Vec::new();
    for row in rows {
        match names.last_mut() {
            Some((name, waiting)) if *name == row.db.name => waiting.push(row),
            _ => {
                let mut waiting = Waiting::default();
                let name = row.db.name.clone();
                waiting.push(row);
                names.push((name, waiting));
            }
        }
    }
    names
}

impl Waiting {
    fn push(&mut self, row: DrainRow) {
        let observed = self.observed.entry(row.db.instance).or_default();
        match &row.says {
            DrainKey::Counters(tally) => observed.tally += *tally,
            DrainKey::LastUpdate(stamp) => {
                observed.versionstamp = observed.versionstamp.max(Some(*stamp));
            }
            DrainKey::Ddoc(id) => {
                observed.has_ddocs = true;
                self.ddocs.push((row.db.clone(), id.clone()));
            }
        }
        self.rows.push(row);
    }

    /// Returns the changed design documents of `db`; a change without an id counts as `None`.
    pub fn ddocs_of(&self, db: &Db) -> impl Iterator<Item = Option<&DdocId>> {
        let observed = self.observed.get(&db.instance);
        let without_id = observed.is_some_and(|observed| observed.tally.has_ddocs_without_id());
        let with_id = self.ddocs.iter().filter(move |(of, _)| of == db).map(|(_, id)| Some(id));
        without_id.then_some(None).into_iter().chain(with_id)
    }

    /// Returns the sum of the events of all instances.
    pub fn total(&self) -> Counters {
        let mut total = Counters::ZERO;
        self.observed.values().for_each(|observed| total += observed.tally.counters);
        total
    }

    /// Returns the number of bytes in the rows.
    pub fn len(&self) -> usize {
        self.rows.iter().map(|row| row.key.len() + row.value.len()).sum()
    }

    /// Subtracts exactly what was read, without conflicts: events that producers add meanwhile stay.
    pub fn subtract(&self, tx: &Transaction) {
        for row in &self.rows {
            match &row.says {
                DrainKey::Counters(tally) => {
                    tx.atomic(AtomicOp::Add, &row.key, &tally.to_negative_bytes());
                    tx.atomic(AtomicOp::CompareAndClear, &row.key, &[0; COUNTERS_LEN]);
                }
                DrainKey::LastUpdate(_) | DrainKey::Ddoc(_) => {
                    tx.atomic(AtomicOp::CompareAndClear, &row.key, &row.value);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;

    /// Adds counters to `slots`, then reads from the key `from` on, at most `rows_max` rows at once.
    async fn read(store: &Store, slots: &[(&Db, u16)], from: Option<&Bytes>, rows_max: usize) -> Drain {
        let keys = Keys::new(b"test").unwrap();
        let write = async |tx: Transaction| {
            for (db, slot) in slots {
                tx.set(&keys.counters(Partition(0), db, *slot), &[0; COUNTERS_LEN]);
            }
            Ok(())
        };
        store.run(write).await.unwrap();
        Drain::read(&store.begin(), &keys, Partition(0), from, (rows_max, 1 << 20)).await.unwrap()
    }

    /// Regression: a database was created and deleted in its second slot. A fold saw that slot first, and left it for the next fold. Then
    /// the database's design document changed in its first slot, but the next fold began at the second one. Later, after the tombstone was
    /// deleted, a fold found the change on its own, and brought the database back.
    #[tokio::test]
    async fn what_is_left_is_read_from_where_it_may_begin() {
        let db = |name: &str, n| Db::new(name.parse().unwrap(), DbInstance([n; 16]));
        // The part that is read leaves out the second of two names, and then the second of two instances.
        for (whole, left) in [(db("a", 0), db("b", 1)), (db("b", 0), db("b", 1))] {
            let store = Store::memory();
            let drain = read(&store, &[(&whole, 0), (&left, 7), (&left, 8)], None, 2).await;
            assert_eq!(drain.names[0].1.rows.len(), 1, "the first one is whole");
            let drain = read(&store, &[(&left, 3)], drain.next.as_ref(), 10).await;
            assert_eq!(drain.names[0].1.rows.len(), 3, "all slots are read together");
        }
    }
}
