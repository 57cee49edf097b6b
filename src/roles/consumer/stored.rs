//! [`ConsumerHandle`]: a consumer by its name, and what is stored for it.

use std::{fmt, sync::Arc};

use bytes::Bytes;

use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        env::Env,
        error::{Error, Result},
    },
    state::{
        context::Context,
        keys::{ConsumerName, ConsumerRow, DeferredRow, ShardId, watermark},
        membership::changed,
    },
    store::{Isolation, RangeRead, Transaction},
};

/// A consumer as a whole, whether or not it exists. Clones are cheap.
#[derive(Clone)]
pub struct ConsumerHandle {
    pub(super) context: Arc<Context>,
    pub(super) name: ConsumerName,
}

impl fmt::Debug for ConsumerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ConsumerHandle").field(&self.name).finish()
    }
}

/// A deferred id as it is stored: the key, the shard, the id, and the value.
pub(super) type StoredId = (Bytes, ShardId, Bytes, DeferredRow);

impl ConsumerHandle {
    pub(crate) fn new(context: &Arc<Context>, name: &str) -> Result<Self> {
        Ok(Self { context: Arc::clone(context), name: ConsumerName::new(name)? })
    }

    /// The name of the consumer.
    pub fn name(&self) -> &ConsumerName {
        &self.name
    }

    pub(super) fn env(&self) -> &Env {
        self.context.env()
    }

    pub(super) fn missing(&self) -> Error {
        Error::NoConsumer { consumer: self.name.to_string() }
    }

    pub(super) async fn row(&self, tx: &Transaction, isolation: Isolation) -> Result<Option<ConsumerRow>> {
        read(tx, &self.context.keys.consumer(&self.name), isolation, ConsumerRow::from_bytes).await
    }

    /// Reads the row of the consumer, which must exist.
    pub(super) async fn existing(&self, tx: &Transaction, isolation: Isolation) -> Result<ConsumerRow> {
        self.row(tx, isolation).await?.ok_or_else(|| self.missing())
    }

    /// Reads the checkpoint in `shard`; `None` if the consumer does not read the shard, or does not read it yet.
    pub(super) async fn checkpoint_of(
        &self,
        tx: &Transaction,
        shard: ShardId,
        isolation: Isolation,
    ) -> Result<Option<Cursor>> {
        let key = self.context.keys.consumer_checkpoint(&self.name, shard);
        read(tx, &key, isolation, Cursor::from_bytes).await
    }

    /// Reads a snapshot of all checkpoints, by shard, because they move all the time, and go back only if the consumer's row changes.
    pub(super) async fn checkpoints(&self, tx: &Transaction) -> Result<Vec<(ShardId, Cursor)>> {
        let keys = &self.context.keys;
        let rows = tx.all_rows(keys.consumer_checkpoints(&self.name), Isolation::Snapshot).await?;
        let decode = |(key, value): &(Bytes, Bytes)| {
            let checkpoint = Cursor::from_bytes(value).map_err(|error| error.at(key))?;
            Ok((keys.consumer_checkpoint_of(key)?.1, checkpoint))
        };
        rows.iter().map(decode).collect()
    }

    /// Removes everything that is stored for the consumer.
    pub(super) fn remove_in(&self, tx: &Transaction) {
        for range in self.context.keys.whole_consumer(&self.name) {
            tx.clear_range(&range);
        }
        changed(tx, &self.context.keys, &self.name.pool());
    }

    /// Reads the low watermark, before which no shard needs to begin.
    pub(super) async fn low_watermark(&self, tx: &Transaction, isolation: Isolation) -> Result<Sequence> {
        let key = self.context.keys.low_watermark(&self.name);
        Ok(read(tx, &key, isolation, watermark).await?.unwrap_or(Sequence::MIN))
    }

    /// Reads the row of a deferred id at `key`.
    pub(super) async fn deferred_at(
        &self,
        tx: &Transaction,
        key: &[u8],
        isolation: Isolation,
    ) -> Result<Option<DeferredRow>> {
        read(tx, key, isolation, DeferredRow::from_bytes).await
    }

    /// Reads a page of deferred ids in a snapshot read, and returns where to continue.
    pub(super) async fn deferred_page(
        &self,
        tx: &Transaction,
        read: &RangeRead,
    ) -> Result<(Vec<StoredId>, Option<RangeRead>)> {
        let page = tx.get_range(read, Isolation::Snapshot).await?;
        let rest = read.clone().after(&page);
        let decode = |(key, value): (Bytes, Bytes)| {
            let row = DeferredRow::from_bytes(&value).map_err(|error| error.at(&key))?;
            let (shard, id) = self.context.keys.deferred_id(&key)?;
            Ok((key, shard, id, row))
        };
        Ok((page.rows.into_iter().map(decode).collect::<Result<_>>()?, rest))
    }
}

/// Reads and decodes the value of `key`.
async fn read<T>(
    tx: &Transaction,
    key: &[u8],
    isolation: Isolation,
    decode: fn(&[u8]) -> Result<T>,
) -> Result<Option<T>> {
    let stored = tx.get(key, isolation).await?;
    stored.map(|value| decode(&value).map_err(|error| error.at(key))).transpose()
}
