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
//! | 2 | a key of a legacy range, whole, and its value |
//! | 0 | how many records there were (8 bytes), and the XXH3 hash (8) of all bytes before the hash |
//!
//! Keys and values are preceded by their lengths, 4 bytes each; all numbers are big-endian.

use std::{
    io::{Read, Write},
    sync::Arc,
};

use xxhash_rust::xxh3::Xxh3Default;

use crate::{
    context::Context,
    encoding::Incarnation,
    error::{Error, Result},
    keys::{Config, Keys, Layout},
    store::{Database, Isolation, KEY_LEN_MAX, KeyRange, RangeRead, Row, Transaction, VALUE_LEN_MAX},
};

/// What an export begins with.
const MAGIC: &[u8] = b"notibus export\n";

/// The format of an export.
const FORMAT: u16 = 1;

/// Tags of records; see the format.
const END: u8 = 0;
/// See [`END`].
const OWN: u8 = 1;
/// See [`END`].
const LEGACY: u8 = 2;

/// About how many bytes of keys and values are imported in one transaction.
const BATCH_LEN: usize = 500_000;

/// A failure of reading or writing an export.
fn io(error: std::io::Error) -> Error {
    Error::Io { what: "export", source: Arc::new(error) }
}

/// The keys that are moved, each range with its tag.
async fn ranges(context: &Context) -> Result<Vec<(u8, KeyRange)>> {
    let keys = &context.keys;
    let mut ranges: Vec<_> = keys.relocated().map(|range| (OWN, range)).collect();
    let mut rest = Some(RangeRead::new(keys.all_topologies()));
    while let Some(read) = rest {
        let page = context.db.run(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
        for row in &page.rows {
            if let Layout::Legacy(prefix) = keys.topology_row(row)?.1.layout {
                ranges.push((LEGACY, KeyRange::prefix(prefix)));
            }
        }
        rest = read.after(&page);
    }
    Ok(ranges)
}

/// Hands all rows of `ranges` to `sink`, in order. Returns whether all were read at one version.
async fn scan(
    db: &Database,
    ranges: &[(u8, KeyRange)],
    mut sink: impl FnMut(u8, &Row) -> Result<()>,
) -> Result<bool> {
    let mut version = db.run(async |tx| tx.read_version().await).await?;
    let mut is_one_version = true;
    for (tag, range) in ranges {
        let mut rest = Some(RangeRead::new(range.clone()));
        while let Some(read) = &rest {
            match db.read_at(version, async |tx| tx.get_range(read, Isolation::Snapshot).await).await? {
                None => {
                    is_one_version = false;
                    version = db.run(async |tx| tx.read_version().await).await?;
                }
                Some(page) => {
                    page.rows.iter().try_for_each(|row| sink(*tag, row))?;
                    rest = read.clone().after(&page);
                }
            }
        }
    }
    Ok(is_one_version)
}

/// Writes everything that the bus keeps to `out`; returns how many rows. See [`Bus::export`](crate::Bus::export).
pub(crate) async fn export(context: &Context, out: &mut impl Write) -> Result<u64> {
    let ranges = ranges(context).await?;
    let mut out = Hashed { inner: out, hash: Xxh3Default::new() };
    out.put(&[MAGIC, &FORMAT.to_be_bytes(), &context.config.to_bytes()].concat())?;
    let (mut count, mut rows_hash) = (0_u64, Xxh3Default::new());
    let prefix_len = context.keys.prefix().len();
    let is_one_version = scan(&context.db, &ranges, |tag, (key, value)| {
        count += 1;
        let skip = if tag == OWN { prefix_len } else { 0 };
        rows_hash.update(key);
        rows_hash.update(value);
        out.put(&[tag])?;
        out.put_sized(&key[skip..])?;
        out.put_sized(value)
    })
    .await?;
    if !is_one_version {
        // It took longer than a snapshot lives. Whatever was written meanwhile shows when all is read again.
        let mut again = Xxh3Default::new();
        scan(&context.db, &ranges, |_, (key, value)| {
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
    db.run(async |tx| begin_import(&tx, keys).await).await?;
    let (mut count, mut batch, mut len) = (0_u64, Vec::new(), 0);
    loop {
        let tag = input.take(1)?[0];
        if tag == END {
            break;
        }
        let key = match tag {
            OWN => [keys.prefix(), &input.take_sized(KEY_LEN_MAX)?].concat(),
            LEGACY => input.take_sized(KEY_LEN_MAX)?,
            tag => return Err(Error::invalid("export", format!("record tag {tag} is unknown"))),
        };
        let value = input.take_sized(VALUE_LEN_MAX)?;
        count += 1;
        len += key.len() + value.len();
        batch.push((key, value));
        if len >= BATCH_LEN {
            put(db, keys, &batch).await?;
            batch.clear();
            len = 0;
        }
    }
    put(db, keys, &batch).await?;
    let told = u64::from_be_bytes(input.take(8)?.try_into().expect("8 bytes were taken"));
    let hash = input.hash.digest();
    if told != count || input.take(8)? != hash.to_be_bytes() {
        return Err(Error::invalid("export", "it is damaged: its hash or its number of rows differs"));
    }
    db.run(async |tx| {
        // After an unknown result it may be there already.
        tx.set(&keys.config(), &config.to_bytes());
        tx.clear(&keys.import_mark());
        Ok(())
    })
    .await?;
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

/// Fails unless there is room for a bus; forgets what an import that did not come to its end has left.
async fn begin_import(tx: &Transaction, keys: &Keys) -> Result<()> {
    let (config, mark) = (keys.config(), keys.import_mark());
    let is_left = tx.get(&mark, Isolation::Serializable).await?.is_some();
    let has_bus = tx.get(&config, Isolation::Serializable).await?.is_some();
    let is_empty =
        tx.get_range(&RangeRead::new(keys.all()).limit(1), Isolation::Serializable).await?.rows.is_empty();
    if has_bus || !(is_left || is_empty) {
        return Err(Error::invalid(
            "prefix",
            "there is a bus, or something else, under it; import under another one",
        ));
    }
    tx.clear_range(&keys.all());
    tx.set(&mark, b"");
    Ok(())
}

/// Writes some rows, if the import is still under way.
async fn put(db: &Database, keys: &Keys, batch: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
    db.run(async |tx| {
        if tx.get(&keys.import_mark(), Isolation::Serializable).await?.is_none() {
            return Err(Error::invalid("export", "another import under the same prefix has ended this one"));
        }
        for (key, value) in batch {
            tx.set(key, value);
        }
        Ok(())
    })
    .await
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
