//! Lists the parked ids of a group, has them tried again, and drops them.

use bytes::Bytes;
use serde::Serialize;

use super::Group;
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        exactly_once::exactly_once,
        keys::{GroupParkedRow, ShardId},
        membership::changed,
    },
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Transaction, key_after},
};

const PAGE_ROWS: usize = 500;

/// An id that a group has parked, because work on one of its rows failed too often.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ParkedId {
    /// The name of the database, or the id of the document.
    pub id: String,
    /// The shard of the row.
    pub shard: ShardId,
    /// The position in the feed of its newest waiting row.
    #[serde(rename = "seq")]
    pub sequence: Sequence,
    /// Every row of the id up to here is done.
    pub after: Sequence,
    /// How often it was tried; 0 if it is to be tried at once.
    pub attempts: u32,
    /// When it was tried last, in milliseconds since 1970.
    pub at_ms: u64,
    /// Why the last attempt failed, at most 1,000 bytes.
    pub error: String,
}

impl<R> Group<R> {
    /// The parked ids after `after`, at most `limit` (1 to 10,000), in order. Start with an empty one, and continue after the last.
    pub async fn parked(&self, after: &str, limit: usize) -> Result<Vec<ParkedId>> {
        if !(1..=10_000).contains(&limit) {
            return Err(Error::invalid("limit", format!("{limit} is not 1 to 10,000")));
        }
        let rows = self.parked_after(after.as_bytes(), limit).await?;
        let ids = rows.into_iter().map(|(id, row)| {
            let GroupParkedRow { shard, sequence, after, attempts, at_ms, error, .. } = row;
            let id = String::from_utf8_lossy(&id).into_owned();
            ParkedId { id, shard, sequence, after, attempts, at_ms, error }
        });
        Ok(ids.collect())
    }

    /// Makes the consumers try all parked ids again within a balance interval, without waiting for their back-off. Returns how many.
    pub async fn retry_parked(&self) -> Result<u64> {
        let (mut after, mut count) = (Bytes::new(), 0);
        loop {
            let rows = self.parked_after(&after, PAGE_ROWS).await?;
            let Some((last, _)) = rows.last() else { return Ok(count) };
            after = last.clone();
            let ask = async |tx: Transaction| self.ask(&tx, rows.iter().map(|(id, _)| id)).await;
            count += self.context.db.run(ask).await?;
        }
    }

    /// Marks these ids, if they are parked, to be tried at once. Returns how many.
    async fn ask(&self, tx: &Transaction, ids: impl Iterator<Item = &Bytes>) -> Result<u64> {
        let keys = &self.context.keys;
        let mut count = 0;
        for id in ids {
            let key = keys.group_parked(&self.id, id);
            if let Some(value) = tx.get(&key, Isolation::Serializable).await? {
                let row = GroupParkedRow { attempts: 0, ..GroupParkedRow::from_bytes(&value)? };
                tx.set(&key, &row.to_bytes());
                count += 1;
            }
        }
        tx.atomic(AtomicOp::Add, &keys.group_asked(&self.id), &1_u64.to_le_bytes());
        changed(tx, keys, &self.id.pool());
        Ok(count)
    }

    /// Drops the waiting row of `id`: the group skips the id's rows up to now. Returns whether it was parked.
    pub async fn delete_parked(&self, id: &str) -> Result<bool> {
        let key = self.context.keys.group_parked(&self.id, id.as_bytes());
        let delete = async |tx: Transaction| {
            let is_there = tx.get(&key, Isolation::Serializable).await?.is_some();
            tx.clear(&key);
            Ok(is_there)
        };
        Ok(exactly_once(&self.context.db, &self.context.keys, None, delete).await?.value)
    }

    async fn parked_after(&self, after: &[u8], limit: usize) -> Result<Vec<(Bytes, GroupParkedRow)>> {
        let keys = &self.context.keys;
        let mut range = keys.group_parked_ids(&self.id);
        if !after.is_empty() {
            range = KeyRange { begin: key_after(&keys.group_parked(&self.id, after)), end: range.end };
        }
        let read = async |tx: Transaction| {
            let mut found = Vec::new();
            let mut rest = Some(RangeRead::new(range.clone()).limit(limit));
            while let Some(read) = rest.filter(|_| found.len() < limit) {
                let page = tx.get_range(&read, Isolation::Snapshot).await?;
                for (key, value) in &page.rows {
                    found.push((keys.group_parked_id(key)?, GroupParkedRow::from_bytes(value)?));
                }
                rest = read.after(&page);
            }
            found.truncate(limit);
            Ok(found)
        };
        self.context.db.run(read).await
    }
}
