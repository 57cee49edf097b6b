//! Moving a bus to another store: everything that it keeps, as a stream of bytes.
//!
//! Versionstamps start over in another store, so the incarnation is raised by one: what is written there sorts after all
//! that was written before, and the positions of readers stay valid (CouchDB RFC 003). What belongs to running processes
//! (doorbells, fold marks, nodes, leases) stays behind.
//!
//! # Format
//!
//! A header (magic bytes, format, the stored configuration), then records, then the end:
//!
//! | tag | record |
//! |---|---|
//! | 1 | a key after the prefix of the bus, and its value |
//! | 0 | how many records there were (8 bytes), and the XXH3 hash (8) of all bytes before the hash |
//!
//! Rows of a legacy range, which lie elsewhere, go along as the rows of shard 0 that they are read as.
//!
//! Keys and values are preceded by their lengths, 4 bytes each; all numbers are big-endian.

use std::{
    io::{Read, Write},
    sync::Arc,
};

use bytes::Bytes;
use xxhash_rust::xxh3::Xxh3Default;

use crate::{
    base::{
        encoding::Incarnation,
        error::{Error, Result},
    },
    state::{
        context::Context,
        keys::{Config, Keys, Layout, ShardId},
    },
    store::{Database, Isolation, KEY_LEN_MAX, KeyRange, RangeRead, Row, Transaction, VALUE_LEN_MAX},
};

/// What an export begins with.
const MAGIC: &[u8] = b"notibus export\n";

/// The format of an export.
const FORMAT: u16 = 1;

/// Tags of records; see the format.
const END: u8 = 0;
/// See [`END`].
const ROW: u8 = 1;

/// About how many bytes of keys and values are imported in one transaction.
const BATCH_LEN: usize = 500_000;

/// A failure of reading or writing an export.
fn io(error: std::io::Error) -> Error {
    Error::Io { what: "export", source: Arc::new(error) }
}

/// Keys that are moved.
struct Source {
    /// The keys.
    range: KeyRange,
    /// What they start with, which is left out.
    prefix: Bytes,
    /// What stands there instead.
    instead: Vec<u8>,
}

/// What is moved. The keys are those after the prefix of the bus.
async fn sources(context: &Context) -> Result<Vec<Source>> {
    let keys = &context.keys;
    let own = |range| Source { range, prefix: Bytes::copy_from_slice(keys.prefix()), instead: Vec::new() };
    let mut sources: Vec<_> = keys.relocated().map(own).collect();
    let mut rest = Some(RangeRead::new(keys.all_topologies()));
    while let Some(read) = rest {
        let page = context.db.run(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
        for row in &page.rows {
            let (feed, entry) = keys.topology_row(row)?;
            if let Layout::Legacy(prefix) = entry.layout
                && !prefix.is_empty()
            {
                let rows = keys.shard_rows(&feed, ShardId(0));
                let instead = rows.prefix()[keys.prefix().len()..].to_vec();
                sources.push(Source { range: KeyRange::prefix(prefix.clone()), prefix, instead });
            }
        }
        rest = read.after(&page);
    }
    Ok(sources)
}

/// The row as it is moved.
fn moved(keys: &Keys, source: &Source, row: &Row) -> Result<(Vec<u8>, Bytes)> {
    let (key, value) = row;
    let mut value = value.clone();
    if keys.all_topologies().contains(key) {
        let (_, mut entry) = keys.topology_row(row)?;
        if let Layout::Legacy(prefix) = &mut entry.layout {
            prefix.clear();
            value = entry.to_bytes().into();
        }
    }
    Ok(([&source.instead, &key[source.prefix.len()..]].concat(), value))
}

/// Hands all rows of `sources` to `sink`, in order, as they are moved. Returns whether all were read at one version.
async fn scan(
    context: &Context,
    sources: &[Source],
    mut sink: impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<bool> {
    let db = &context.db;
    let mut version = db.run(async |tx| tx.read_version().await).await?;
    let mut is_one_version = true;
    for source in sources {
        let mut rest = Some(RangeRead::new(source.range.clone()));
        while let Some(read) = &rest {
            match db.read_at(version, async |tx| tx.get_range(read, Isolation::Snapshot).await).await? {
                None => {
                    is_one_version = false;
                    version = db.run(async |tx| tx.read_version().await).await?;
                }
                Some(page) => {
                    for row in &page.rows {
                        let (key, value) = moved(&context.keys, source, row)?;
                        sink(&key, &value)?;
                    }
                    rest = read.clone().after(&page);
                }
            }
        }
    }
    Ok(is_one_version)
}

/// Writes everything that the bus keeps to `out`; returns how many rows. See [`Bus::export`](crate::Bus::export).
pub(crate) async fn export(context: &Context, out: &mut impl Write) -> Result<u64> {
    let sources = sources(context).await?;
    let mut out = Hashed { inner: out, hash: Xxh3Default::new() };
    out.put(&[MAGIC, &FORMAT.to_be_bytes(), &context.config.to_bytes()].concat())?;
    let (mut count, mut rows_hash) = (0_u64, Xxh3Default::new());
    let is_one_version = scan(context, &sources, |key, value| {
        count += 1;
        rows_hash.update(key);
        rows_hash.update(value);
        out.put(&[ROW])?;
        out.put_sized(key)?;
        out.put_sized(value)
    })
    .await?;
    if !is_one_version {
        // It took longer than a snapshot lives. Whatever was written meanwhile shows when all is read again.
        let mut again = Xxh3Default::new();
        scan(context, &sources, |key, value| {
            again.update(key);
            again.update(value);
            Ok(())
        })
        .await?;
        if again.digest() != rows_hash.digest() {
            let reason =
                "the bus was written meanwhile; stop its producers, notifiers and other roles, and try again";
            return Err(Error::invalid("export", reason));
        }
    }
    out.put(&[END])?;
    out.put(&count.to_be_bytes())?;
    let hash = out.hash.digest();
    out.put(&hash.to_be_bytes())?;
    out.inner.flush().map_err(io)?;
    Ok(count)
}

/// Brings what was exported into `db`, with the incarnation raised. See [`Bus::import`](crate::Bus::import).
pub(crate) async fn import(db: &Database, keys: &Keys, input: &mut impl Read) -> Result<Config> {
    let mut input = Hashed { inner: input, hash: Xxh3Default::new() };
    let config = header(&mut input)?;
    let import = Import::begin(db, keys).await?;
    let (mut count, mut batch, mut len) = (0_u64, Vec::new(), 0);
    loop {
        match input.take(1)?[0] {
            END => break,
            ROW => {}
            tag => return Err(Error::invalid("export", format!("record tag {tag} is unknown"))),
        }
        let key = [keys.prefix(), &input.take_sized(KEY_LEN_MAX)?].concat();
        let value = input.take_sized(VALUE_LEN_MAX)?;
        if !keys.relocated().any(|range| range.contains(&key)) {
            return Err(Error::invalid("export", "it is damaged: a key of no family that is moved"));
        }
        count += 1;
        len += key.len() + value.len();
        batch.push((key, value));
        if len >= BATCH_LEN {
            import.put(&batch).await?;
            batch.clear();
            len = 0;
        }
    }
    import.put(&batch).await?;
    let told = u64::from_be_bytes(input.take(8)?.try_into().expect("8 bytes were taken"));
    let hash = input.hash.digest();
    if told != count || input.take(8)? != hash.to_be_bytes() {
        return Err(Error::invalid("export", "it is damaged: its hash or its number of rows differs"));
    }
    import.finish(config).await?;
    Ok(config)
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
        let token = u128::from(db.env().random()) << 64 | u128::from(db.env().random());
        let import = Self { db, keys, token: token.to_be_bytes() };
        db.run(async |tx| {
            let is_left = tx.get(&keys.import_mark(), Isolation::Serializable).await?.is_some();
            let has_bus = tx.get(&keys.config(), Isolation::Serializable).await?.is_some();
            let rows =
                tx.get_range(&RangeRead::new(keys.all()).limit(1), Isolation::Serializable).await?.rows;
            if has_bus || !(is_left || rows.is_empty()) {
                let reason = "there is a bus, or something else, under it; import under another one";
                return Err(Error::invalid("prefix", reason));
            }
            tx.clear_range(&keys.all());
            tx.set(&keys.import_mark(), &import.token);
            Ok(())
        })
        .await?;
        Ok(import)
    }

    /// Fails if another import has begun meanwhile, and makes `tx` fail if one begins before its commit.
    async fn check(&self, tx: &Transaction) -> Result<()> {
        match tx.get(&self.keys.import_mark(), Isolation::Serializable).await? {
            Some(mark) if mark == self.token[..] => Ok(()),
            _ => Err(Error::invalid("export", "another import under the same prefix has ended this one")),
        }
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
}

/// Raises the incarnation of the bus under `keys`. See [`Bus::raise_incarnation`](crate::Bus::raise_incarnation).
pub(crate) async fn raise(db: &Database, keys: &Keys, from: Incarnation) -> Result<Incarnation> {
    db.run(async |tx| {
        let stored = tx.get(&keys.config(), Isolation::Serializable).await?;
        let stored = stored.ok_or_else(|| Error::invalid("prefix", "there is no bus under it"))?;
        let config = Config::from_bytes(&stored)?;
        let raised = Config { incarnation: from, ..config }.raised()?;
        if config.incarnation != from && config.incarnation != raised.incarnation {
            let reason = format!("it is {}, not {}", config.incarnation.0, from.0);
            return Err(Error::invalid("incarnation", reason));
        }
        tx.set(&keys.config(), &raised.to_bytes());
        Ok(raised.incarnation)
    })
    .await
}

/// Hashes what goes through it.
struct Hashed<T> {
    /// Where it comes from, or goes to.
    inner: T,
    /// The hash of all bytes so far.
    hash: Xxh3Default,
}

impl<W: Write> Hashed<W> {
    /// Writes `bytes`.
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.inner.write_all(bytes).map_err(io)
    }

    /// Writes the length of `bytes`, and `bytes`.
    fn put_sized(&mut self, bytes: &[u8]) -> Result<()> {
        let len = u32::try_from(bytes.len()).expect("keys and values are far below 4 GiB");
        self.put(&len.to_be_bytes())?;
        self.put(bytes)
    }
}

impl<R: Read> Hashed<R> {
    /// The next `len` bytes.
    fn take(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.inner.read_exact(&mut bytes).map_err(io)?;
        self.hash.update(&bytes);
        Ok(bytes)
    }

    /// The next bytes, whose length stands before them and is at most `max`.
    fn take_sized(&mut self, max: usize) -> Result<Vec<u8>> {
        let len = u32::from_be_bytes(self.take(4)?.try_into().expect("4 bytes were taken")) as usize;
        if len > max {
            return Err(Error::invalid("export", format!("it is damaged: a key or value of {len} bytes")));
        }
        self.take(len)
    }
}
