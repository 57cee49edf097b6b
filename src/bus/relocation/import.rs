//! Bringing an export into a store.
//!
//! From the first transaction to the last, a mark under the prefix says that an import is under way, and whose: nobody opens a bus
//! there meanwhile, and of two imports the one that began last goes on. An import that fails removes all that it has written.
//! One whose process dies leaves the mark, and what it has written, to the next import, or to [`discard`].

use std::io::Read;

use super::stream::{END, FORMAT, Hashed, MAGIC, ROW};
use crate::{
    base::error::{Error, Result},
    state::{
        keys::{Config, Keys, NodeId},
        membership::Silence,
    },
    store::{Database, Isolation, KEY_LEN_MAX, RangeRead, Transaction, VALUE_LEN_MAX},
};

/// About how many bytes of keys and values are imported in one transaction.
const BATCH_LEN: usize = 500_000;

/// Fails with [`Error::ImportUnderWay`] if a bus is being imported under the prefix, and makes `tx` fail if that begins before its
/// commit.
pub(crate) async fn check_no_import(tx: &Transaction, keys: &Keys) -> Result<()> {
    match tx.get(&keys.import_mark(), Isolation::Serializable).await? {
        None => Ok(()),
        Some(_) => Err(Error::ImportUnderWay { prefix: keys.prefix().escape_ascii().to_string() }),
    }
}

/// Removes what an import whose process has died has left under the prefix. Returns whether there was anything. See
/// [`Bus::discard_import`](crate::Bus::discard_import).
pub(crate) async fn discard(db: &Database, keys: &Keys) -> Result<bool> {
    let discard = async |tx: Transaction| {
        let is_left = tx.get(&keys.import_mark(), Isolation::Serializable).await?.is_some();
        if is_left {
            tx.clear_range(&keys.all());
        }
        Ok(is_left)
    };
    Ok(db.run_once(discard).await?.value)
}

/// Brings what was exported into `db`, with the incarnation raised. See [`Bus::import`](crate::Bus::import).
pub(crate) async fn import(db: &Database, keys: &Keys, input: &mut impl Read) -> Result<()> {
    let mut input = Hashed::new(input);
    let config = header(&mut input)?;
    let import = Import::begin(db, keys).await?;
    let imported = import.run(config, &mut input).await;
    if imported.is_err()
        && let Err(error) = import.forget().await
    {
        tracing::warn!(%error, "what a failed import has written is left to the next import");
    }
    imported
}

/// The configuration that the header tells, with the incarnation raised.
fn header(input: &mut Hashed<&mut impl Read>) -> Result<Config> {
    if input.take(MAGIC.len())? != MAGIC {
        return Err(Error::invalid("export", "it does not begin as an export does"));
    }
    let format = u16::from_be_bytes(input.take(2)?.try_into().expect("2 bytes were taken"));
    if format != FORMAT {
        return Err(Error::invalid(
            "export",
            format!("format {format} is unknown, this program knows {FORMAT}"),
        ));
    }
    let config = Config::from_bytes(&input.take(Config::LEN)?)?;
    config.raised()
}

/// An import that is under way.
struct Import<'a> {
    /// Where to.
    db: &'a Database,
    /// The keys of the bus to be.
    keys: &'a Keys,
    /// Stands in the store as long as no other import has begun under the same prefix.
    token: [u8; 16],
}

impl<'a> Import<'a> {
    /// Fails unless there is room for a bus; forgets what an import that did not come to its end has left.
    async fn begin(db: &'a Database, keys: &'a Keys) -> Result<Self> {
        let import = Self { db, keys, token: NodeId::random(db.env()).0 };
        // Without a bus they should not be there. Whoever runs them would take what comes for its own.
        let silence = Silence::of_bus(db, keys).await?;
        db.run(async |tx| {
            let is_left = tx.get(&keys.import_mark(), Isolation::Serializable).await?.is_some();
            let has_bus = tx.get(&keys.config(), Isolation::Serializable).await?.is_some();
            let rows =
                tx.get_range(&RangeRead::new(keys.all()).limit(1), Isolation::Serializable).await?.rows;
            if has_bus || !(is_left || rows.is_empty()) {
                let reason = "there is a bus, or something else, under it; import under another one";
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

    /// Brings in what `input` holds after the header.
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
                return Err(Error::invalid("export", "it is damaged: a key of no family that is moved"));
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
        let hash = input.hash.digest();
        if stated != count || input.take(8)? != hash.to_be_bytes() {
            return Err(Error::invalid("export", "it is damaged: its hash or its number of rows differs"));
        }
        self.finish(config).await
    }

    /// Whether no other import has begun meanwhile; makes `tx` fail if one begins before its commit.
    async fn is_mine(&self, tx: &Transaction) -> Result<bool> {
        let mark = tx.get(&self.keys.import_mark(), Isolation::Serializable).await?;
        Ok(mark.is_some_and(|mark| mark == self.token[..]))
    }

    /// Fails if another import has begun meanwhile, or a bus was opened by a program that knows nothing of the mark; and makes
    /// `tx` fail if either happens before its commit.
    async fn check(&self, tx: &Transaction) -> Result<()> {
        if !self.is_mine(tx).await? {
            return Err(Error::invalid("export", "another import under the same prefix has ended this one"));
        }
        if tx.get(&self.keys.config(), Isolation::Serializable).await?.is_some() {
            return Err(Error::invalid("prefix", "a bus was opened under it meanwhile"));
        }
        Ok(())
    }

    /// Writes some rows.
    async fn put(&self, batch: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        self.db
            .run(async |tx| {
                self.check(&tx).await?;
                for (key, value) in batch {
                    tx.set(key, value);
                }
                Ok(())
            })
            .await
    }

    /// Makes a bus of what was written.
    async fn finish(&self, config: Config) -> Result<()> {
        let finish = async |tx: Transaction| {
            self.check(&tx).await?;
            tx.set(&self.keys.config(), &config.to_bytes());
            tx.clear(&self.keys.import_mark());
            Ok(())
        };
        // The mark is gone then, so it cannot simply be tried again after an unknown result.
        self.db.run_once(finish).await.map(|_| ())
    }

    /// Removes what was written, if nobody else has begun under the prefix, and it is no bus.
    async fn forget(&self) -> Result<()> {
        let forget = async |tx: Transaction| {
            if self.is_mine(&tx).await? {
                tx.clear(&self.keys.import_mark());
                // A bus that was opened in the middle by an older program is not this one's to remove.
                if tx.get(&self.keys.config(), Isolation::Serializable).await?.is_none() {
                    tx.clear_range(&self.keys.all());
                }
            }
            Ok(())
        };
        self.db.run(forget).await
    }
}
