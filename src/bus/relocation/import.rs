//! Imports an export into a store.
//!
//! From the first transaction to the last, a mark with a token under the prefix says that an import is under way. While the mark exists, no
//! bus can be opened there, and of two imports only the later one continues. A failed import removes everything that it wrote. If its
//! process dies, the next import removes the mark and the rows, and begins again.

use std::io::Read;

use super::export::{END, Exported, FORMAT, Hashed, ROW};
use crate::{
    base::error::{Error, Result},
    state::{
        exactly_once::exactly_once,
        keys::{Config, EndOfIncarnation, Keys, NodeId},
        membership::Silence,
    },
    store::{Isolation, KEY_LEN_MAX, RangeRead, Store, Transaction, VALUE_LEN_MAX},
};

/// The approximate number of bytes of keys and values that one transaction imports.
const BATCH_LEN: usize = 500_000;

/// Fails with [`Error::ImportUnderWay`] if a bus is being imported under the prefix. `tx` fails if an import begins before the
/// commit.
pub(crate) async fn check_no_import(tx: &Transaction, keys: &Keys) -> Result<()> {
    match tx.get(&keys.import_mark(), Isolation::Serializable).await? {
        None => Ok(()),
        Some(_) => Err(Error::ImportUnderWay { prefix: keys.prefix().escape_ascii().to_string() }),
    }
}

/// Imports an export into `store`, and raises the incarnation. See [`Bus::import`](crate::Bus::import).
pub(crate) async fn import(store: &Store, keys: &Keys, input: &mut impl Read) -> Result<()> {
    let mut input = Hashed::new(input);
    let config = header(&mut input)?;
    let import = Import::begin(store, keys).await?;
    let imported = import.run(config, &mut input).await;
    if imported.is_err()
        && let Err(error) = import.forget().await
    {
        tracing::warn!(%error, "could not remove what a failed import wrote; the next import will remove it");
    }
    imported
}

/// Reads the configuration from the header.
fn header(input: &mut Hashed<&mut impl Read>) -> Result<Config> {
    if input.take(Exported::BEGIN.len())? != Exported::BEGIN {
        return Err(Error::invalid(
            "export",
            "it does not begin with the header of an export; check the file",
        ));
    }
    let format = u16::from_be_bytes(input.take(2)?.try_into().expect("2 bytes were taken"));
    if format != FORMAT {
        return Err(Error::OtherFormat { what: "the export", found: format, known: FORMAT });
    }
    let config = Config::from_bytes(&input.take(Config::LEN)?)?;
    config.raised()?;
    Ok(config)
}

struct Import<'a> {
    store: &'a Store,
    /// The keys of the new bus.
    keys: &'a Keys,
    /// Identifies the import. The token is in the store unless another import has begun under the same prefix.
    token: [u8; 16],
}

impl<'a> Import<'a> {
    /// Begins an import. Fails unless the prefix is free; removes what an unfinished import left behind.
    async fn begin(store: &'a Store, keys: &'a Keys) -> Result<Self> {
        let import = Self { store, keys, token: NodeId::random(store.env()).0 };
        // Without a bus there should be no nodes. Any live ones would mistake the imported bus for their own.
        let silence = Silence::of_bus(store, keys).await?;
        store
            .run(async |tx| {
                let is_left = tx.get(&keys.import_mark(), Isolation::Serializable).await?.is_some();
                let has_bus = tx.get(&keys.config(), Isolation::Serializable).await?.is_some();
                let rows =
                    tx.get_range(&RangeRead::new(keys.all()).limit(1), Isolation::Serializable).await?.rows;
                if has_bus || !(is_left || rows.is_empty()) {
                    let reason = "there is a bus or other data under it; import under another prefix";
                    return Err(Error::invalid("prefix", reason));
                }
                silence.check(&tx, keys).await?;
                tx.clear_range(&keys.all());
                tx.set(&keys.import_mark(), &import.token);
                Ok(())
            })
            .await?;
        Ok(import)
    }

    /// Imports the records after the header.
    async fn run(&self, config: Config, input: &mut Hashed<&mut impl Read>) -> Result<()> {
        let keys = self.keys;
        let (mut count, mut batch, mut len) = (0_u64, Vec::new(), 0);
        loop {
            match input.take(1)?[0] {
                END => break,
                ROW => {}
                tag => return Err(Error::invalid("export", format!("record tag {tag} is unknown"))),
            }
            let key = [keys.prefix(), &input.take_sized(KEY_LEN_MAX)?].concat();
            let value = input.take_sized(VALUE_LEN_MAX)?;
            if !keys.relocated().any(|(_, range)| range.contains(&key)) {
                return Err(Error::invalid("export", "it is damaged: a key belongs to no exported family"));
            }
            count += 1;
            len += key.len() + value.len();
            batch.push((key, value));
            if len >= BATCH_LEN {
                self.put(&batch).await?;
                batch.clear();
                len = 0;
            }
        }
        self.put(&batch).await?;
        let stated = u64::from_be_bytes(input.take(8)?.try_into().expect("8 bytes were taken"));
        let end = EndOfIncarnation::from_bytes(&input.take_sized(VALUE_LEN_MAX)?)?;
        let hash = input.hash.digest();
        if stated != count || input.take(8)? != hash.to_be_bytes() {
            return Err(Error::invalid("export", "it is damaged: its hash or its number of rows differs"));
        }
        if input.take(1).is_ok() {
            return Err(Error::invalid("export", "it is damaged: there is something after its end"));
        }
        self.finish(config, end).await
    }

    /// Whether no other import has begun. `tx` fails if one begins before the commit.
    async fn is_mine(&self, tx: &Transaction) -> Result<bool> {
        let mark = tx.get(&self.keys.import_mark(), Isolation::Serializable).await?;
        Ok(mark.is_some_and(|mark| mark == self.token[..]))
    }

    /// Fails if another import has begun. `tx` fails if one begins before the commit.
    async fn check(&self, tx: &Transaction) -> Result<()> {
        if !self.is_mine(tx).await? {
            return Err(Error::invalid(
                "export",
                "another import has begun under the same prefix and replaced this one",
            ));
        }
        Ok(())
    }

    async fn put(&self, batch: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        self.store
            .run(async |tx| {
                self.check(&tx).await?;
                for (key, value) in batch {
                    tx.set(key, value);
                }
                Ok(())
            })
            .await
    }

    /// Ends the old incarnation of `config` where the export ended, and writes the raised configuration, which turns the data into a bus.
    async fn finish(&self, config: Config, end: EndOfIncarnation) -> Result<()> {
        let raised = config.raised()?;
        let finish = async |tx: Transaction| {
            self.check(&tx).await?;
            tx.set(&self.keys.end_of_incarnation(config.incarnation), &end.to_bytes());
            tx.set(&self.keys.config(), &raised.to_bytes());
            tx.clear(&self.keys.import_mark());
            Ok(())
        };
        // Exactly once, because a retry after an unknown commit would find the mark gone, and fail.
        exactly_once(self.store, self.keys, None, finish).await.map(|_| ())
    }

    /// Removes what was written, unless another import has begun under the prefix, or the data has already become a bus.
    async fn forget(&self) -> Result<()> {
        let forget = async |tx: Transaction| {
            if self.is_mine(&tx).await? {
                tx.clear_range(&self.keys.all());
            }
            Ok(())
        };
        self.store.run(forget).await
    }
}
