//! Reading what waits in a partition, grouped by name, and subtracting what was read.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::algorithm::Observed;
use crate::{
    encoding::{COUNTERS_LEN, Counters},
    error::Result,
    event::{Db, DbInstance, DbName, DdocId},
    keys::{DrainKey, DrainRow, Keys, Partition},
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Transaction, key_after},
};

/// The most bytes of keys and values that a fold reads. A fold writes the key of a row of counters twice and the name
/// twice more, and the store counts a written key three times: a byte read comes to at most 12 bytes of the transaction,
/// which may have 10 MB.
const READ_BYTES_MAX: usize = 500_000;

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
    /// By name.
    pub names: Vec<(DbName, Waiting)>,
    /// From where to go on; `None` if this was all.
    pub next: Option<Bytes>,
}

impl Drain {
    /// Reads what waits in `partition` from the key `from` on, at most about `rows_max` rows, by snapshot: producers that
    /// go on meanwhile are not in the way.
    ///
    /// The rows of one name are not torn apart, so that all its instances are folded together; only a name that alone has
    /// more rows than fit is.
    pub async fn read(
        tx: &Transaction,
        keys: &Keys,
        partition: Partition,
        from: Option<&Bytes>,
        rows_max: usize,
    ) -> Result<Self> {
        let whole = keys.drains(partition, partition);
        let begin = from.unwrap_or(&whole.begin).clone();
        let read =
            RangeRead::new(KeyRange { begin, end: whole.end }).limit(rows_max).target_bytes(READ_BYTES_MAX);
        let page = tx.get_range(&read, Isolation::Snapshot).await?;
        let mut next = page.more.then(|| page.rows.last().map(|(key, _)| key_after(key))).flatten();

        let mut names: Vec<(DbName, Waiting)> = Vec::new();
        for row in page.rows {
            let (_, row) = keys.drain_row(row)?;
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
        if next.is_some() && names.len() > 1 {
            let torn = names.pop().and_then(|(_, waiting)| waiting.rows.into_iter().next());
            next = torn.map(|first| first.key);
        }
        Ok(Self { names, next })
    }

    /// The events of all names.
    pub fn total(&self) -> Counters {
        let mut total = Counters::ZERO;
        for observed in self.names.iter().flat_map(|(_, waiting)| waiting.observed.values()) {
            total += observed.counters;
        }
        total
    }
}

impl Waiting {
    /// Adds a row.
    fn push(&mut self, row: DrainRow) {
        let observed = self.observed.entry(row.db.instance).or_default();
        match &row.says {
            DrainKey::Counters(counters) => observed.counters += *counters,
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

    /// Subtracts exactly what was read. What producers add meanwhile stays, and none of them is made to retry.
    pub fn subtract(&self, tx: &Transaction) {
        for row in &self.rows {
            match &row.says {
                DrainKey::Counters(counters) => {
                    tx.atomic(AtomicOp::Add, &row.key, &counters.to_negative_bytes());
                    tx.atomic(AtomicOp::CompareAndClear, &row.key, &[0; COUNTERS_LEN]);
                }
                DrainKey::LastUpdate(_) | DrainKey::Ddoc(_) => {
                    tx.atomic(AtomicOp::CompareAndClear, &row.key, &row.value);
                }
            }
        }
    }
}
