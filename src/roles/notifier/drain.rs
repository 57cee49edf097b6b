//! Reading what waits in a partition, grouped by name, and subtracting what was read.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::algorithm::Observed;
use crate::{
    base::{
        bugs::{Bug, is_on},
        encoding::{COUNTERS_LEN, Counters},
        error::{Error, Result},
        event::{Db, DbInstance, DbName, DdocId},
    },
    state::keys::{DrainKey, DrainRow, Keys, Partition},
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Row, Transaction, key_after},
};

/// What waits for one name.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// Its rows, to be subtracted.
    rows: Vec<DrainRow>,
    /// What they say, by instance.
    pub observed: BTreeMap<DbInstance, Observed>,
    /// The design documents that were changed.
    pub ddocs: Vec<(Db, DdocId)>,
}

/// A bounded part of what waits in a partition.
#[derive(Debug, Default)]
pub(super) struct Drain {
    pub names: Vec<(DbName, Waiting)>,
    /// From where to go on; `None` if this was all.
    pub next: Option<Bytes>,
    /// The keys of rows that cannot be decoded, and why. They are left where they are.
    pub broken: Vec<(Bytes, Error)>,
}

impl Drain {
    /// Reads what waits in `partition` from the key `from` on, at most about `rows_max` rows of `bytes_max` bytes, by snapshot:
    /// producers that go on meanwhile are not in the way.
    ///
    /// The rows of one name are not torn apart, so that all its instances are folded together, unless the name alone has
    /// more rows than fit. Then it is torn between instances, or between the design documents of one, but never between
    /// the counters of one: an instance that is judged by a part of its counters may look as if it had never been created.
    /// To go on means to begin where rows of the name (or the instance) may begin, not at the first one that was there: meanwhile
    /// a producer may have added to a slot before it.
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
        let mut rows = decoded(keys, page.rows, &mut broken)?;
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
                    rows.extend(decoded(keys, rest, &mut broken)?);
                }
            }
        }
        // Those of rows that are read again by the next fold are found again by it.
        broken.retain(|(key, _)| next.as_ref().is_none_or(|next| key < next));
        Ok(Self { names: by_name(rows), next, broken })
    }

    /// All that waits for `name`, read by snapshot.
    #[cfg(feature = "http")]
    pub async fn of_name(tx: &Transaction, keys: &Keys, partition: Partition, name: &DbName) -> Result<Self> {
        let rows = tx.all_rows(keys.drains_of(partition, name), Isolation::Snapshot).await?;
        let mut broken = Vec::new();
        let rows = decoded(keys, rows, &mut broken)?;
        Ok(Self { names: by_name(rows), next: None, broken })
    }
}

/// The rows in their terms, whichever partition they are of; the keys of those that have none go to `broken`.
fn decoded(keys: &Keys, rows: Vec<Row>, broken: &mut Vec<(Bytes, Error)>) -> Result<Vec<DrainRow>> {
    let mut found = Vec::with_capacity(rows.len());
    for row in rows {
        let key = row.0.clone();
        match keys.drain_row(row) {
            Ok((_, row)) => found.push(row),
            Err(error) if is_on(Bug::BrokenCountersStop) => return Err(error),
            Err(error) => broken.push((key, error)),
        }
    }
    Ok(found)
}

/// The rows, which are in order, by name.
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
    /// Adds a row.
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

    /// The design documents of `db` that were changed; a change without an id as one.
    pub fn ddocs_of(&self, db: &Db) -> impl Iterator<Item = Option<&DdocId>> {
        let observed = self.observed.get(&db.instance);
        let without_id = observed.is_some_and(|observed| observed.tally.has_ddocs_without_id());
        let with_id = self.ddocs.iter().filter(move |(of, _)| of == db).map(|(_, id)| Some(id));
        without_id.then_some(None).into_iter().chain(with_id)
    }

    /// The events of all its instances.
    pub fn total(&self) -> Counters {
        let mut total = Counters::ZERO;
        self.observed.values().for_each(|observed| total += observed.tally.counters);
        total
    }

    /// Bytes of its rows.
    pub fn len(&self) -> usize {
        self.rows.iter().map(|row| row.key.len() + row.value.len()).sum()
    }

    /// Subtracts exactly what was read. What producers add meanwhile stays, and none of them is made to retry.
    pub fn subtract(&self, tx: &Transaction) {
        for row in &self.rows {
            match &row.says {
                DrainKey::Counters(_) if is_on(Bug::CountersCleared) => tx.clear(&row.key),
                DrainKey::Counters(tally) => {
                    tx.atomic(AtomicOp::Add, &row.key, &tally.to_negative_bytes());
                    if !is_on(Bug::CompareAndClearLeftOut) {
                        tx.atomic(AtomicOp::CompareAndClear, &row.key, &[0; COUNTERS_LEN]);
                    }
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
    use crate::store::Database;

    /// Counters are put into `slots`, and what waits from `from` on is read, at most `rows_max` rows at once.
    async fn read(store: &Database, slots: &[(&Db, u16)], from: Option<&Bytes>, rows_max: usize) -> Drain {
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

    /// A database was created and deleted in its second slot, the first one of it that a fold saw and left for the next one. Then its
    /// design document changed in its first slot. The next fold began at the second one; the change that was found alone
    /// later, after the tombstone was dropped, brought the database back.
    #[tokio::test]
    async fn what_is_left_is_read_from_where_it_may_begin() {
        let db = |name: &str, n| Db::new(name.parse().unwrap(), DbInstance([n; 16]));
        // Of two names the second is left; then of two instances.
        for (whole, left) in [(db("a", 0), db("b", 1)), (db("b", 0), db("b", 1))] {
            let store = Database::memory();
            let drain = read(&store, &[(&whole, 0), (&left, 7), (&left, 8)], None, 2).await;
            assert_eq!(drain.names[0].1.rows.len(), 1, "it is not torn");
            let drain = read(&store, &[(&left, 3)], drain.next.as_ref(), 10).await;
            assert_eq!(drain.names[0].1.rows.len(), 3, "all slots are read together");
        }
    }
}
