//! Writes all data of a bus to a stream: a header, tagged rows, a tagged trailer, and a hash of all preceding bytes.

use std::{
    collections::VecDeque,
    io::{Read, Write},
    sync::Arc,
};

use bytes::Bytes;
use xxhash_rust::xxh3::Xxh3Default;

use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        context::Context,
        history::History,
        keys::{EndOfIncarnation, Keys, Layout, ShardId},
        membership::Silence,
    },
    store::{Isolation, KeyRange, RangeRead, Row, Transaction},
};

/// Options of an export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportOptions {
    /// Whether to export while nodes and producers are running. Even then the export has the state of one moment, or fails. Later writes
    /// are not in it. Default: no.
    pub while_running: bool,
}

crate::base::macros::setters!(ExportOptions { while_running: bool });

/// A summary of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exported {
    /// The number of rows.
    pub rows: u64,
    /// The number of rows of each kind that occurs.
    pub held: Vec<(&'static str, u64)>,
}

impl Exported {
    /// The bytes at the beginning of an export.
    pub const BEGIN: &[u8] = b"notibus export\n";
    /// The kinds of data that an export leaves out.
    pub const LEFT_OUT: [&'static str; 4] = [
        "nodes, roles and leases",
        "doorbells, fold marks and pulses",
        "results of runs that are committed exactly once, including those of posted events",
        "everything outside the prefix, such as documents and the rows beside legacy ranges",
    ];

    /// Counts a row of the kind `what`.
    fn add(&mut self, what: &'static str) {
        self.rows += 1;
        match self.held.last_mut() {
            Some((last, count)) if *last == what => *count += 1,
            _ => self.held.push((what, 1)),
        }
    }
}

struct Source {
    /// The kind of the rows.
    what: &'static str,
    range: KeyRange,
    /// The prefix of the stored keys, which is left out.
    prefix: Bytes,
    /// The prefix that the exported keys have instead of `prefix`.
    instead: Vec<u8>,
}

/// Returns the sources of the bus's rows, which are exported without the prefix of the bus in their keys.
fn sources(keys: &Keys) -> Vec<Source> {
    let prefix = Bytes::copy_from_slice(keys.prefix());
    let own = |(what, range)| Source { what, range, prefix: prefix.clone(), instead: Vec::new() };
    keys.relocated().map(own).collect()
}

/// Returns the legacy range that `row` names, if it is a topology entry that names one. An entry that cannot be decoded is moved as it is.
fn legacy(keys: &Keys, row: &Row) -> Option<Source> {
    if !keys.all_topologies().contains(&row.0) {
        return None;
    }
    let (feed, entry) = keys.topology_row(row).ok()?;
    let Layout::Legacy(prefix) = entry.layout else { return None };
    let instead = keys.shard_rows(&feed, ShardId(0)).prefix()[keys.prefix().len()..].to_vec();
    let range = KeyRange::prefix(prefix.clone());
    (!prefix.is_empty()).then_some(Source { what: "rows of legacy ranges", range, prefix, instead })
}

fn moved(keys: &Keys, source: &Source, row: &Row) -> (Vec<u8>, Bytes) {
    let (key, value) = row;
    let mut value = value.clone();
    if keys.all_topologies().contains(key)
        && let Ok((_, mut entry)) = keys.topology_row(row)
        && let Layout::Legacy(prefix) = &mut entry.layout
    {
        prefix.clear();
        value = entry.to_bytes().into();
    }
    ([&source.instead, &key[source.prefix.len()..]].concat(), value)
}

/// Passes all rows of `sources`, and of the legacy ranges that they name, to `sink`, in order and in their exported form. Returns whether
/// all rows were read at one version, and the last version.
async fn scan(
    context: &Context,
    sources: Vec<Source>,
    mut sink: impl FnMut(&Source, &[u8], &[u8]) -> Result<()>,
) -> Result<(bool, u64)> {
    let store = &context.store;
    let mut version = store.run(async |tx| tx.read_version().await).await?;
    let mut is_one_version = true;
    let mut sources = VecDeque::from(sources);
    while let Some(source) = sources.pop_front() {
        let mut rest = Some(RangeRead::new(source.range.clone()));
        while let Some(read) = &rest {
            match store.read_at(version, async |tx| tx.get_range(read, Isolation::Snapshot).await).await? {
                None => {
                    is_one_version = false;
                    version = store.run(async |tx| tx.read_version().await).await?;
                }
                Some(page) => {
                    for row in &page.rows {
                        let (key, value) = moved(&context.keys, &source, row);
                        sink(&source, &key, &value)?;
                        sources.extend(legacy(&context.keys, row));
                    }
                    rest = read.clone().after(&page);
                }
            }
        }
    }
    Ok((is_one_version, version))
}

/// Returns a hash of the current rows of `sources`.
async fn hash_of(context: &Context, sources: Vec<Source>) -> Result<u64> {
    let mut hash = Xxh3Default::new();
    scan(context, sources, |_, key, value| {
        hash.update(key);
        hash.update(value);
        Ok(())
    })
    .await?;
    Ok(hash.digest())
}

/// Writes all data of the bus to `out`. See [`Bus::export`](crate::Bus::export).
pub(crate) async fn export(
    context: &Context,
    out: &mut impl Write,
    options: ExportOptions,
) -> Result<Exported> {
    let silence = if options.while_running {
        None
    } else {
        Some(Silence::of_bus(&context.store, &context.keys).await?)
    };
    context.store.run(async |tx| History::check_opened(context, &tx).await).await?;
    let all = || sources(&context.keys);
    let counting = &all()[0].range;
    let mut out = Hashed::new(out);
    out.put(&[Exported::BEGIN, &FORMAT.to_be_bytes(), &context.config.to_bytes()].concat())?;
    let mut exported = Exported { rows: 0, held: Vec::new() };
    let (mut hash, mut counters) = (Xxh3Default::new(), Xxh3Default::new());
    let (is_one_version, version) = scan(context, all(), |source, key, value| {
        exported.add(source.what);
        let is_counter = source.range == *counting;
        for hash in [Some(&mut hash), Some(&mut counters).filter(|_| is_counter)].into_iter().flatten() {
            hash.update(key);
            hash.update(value);
        }
        out.put(&[ROW])?;
        out.put_sized(key)?;
        out.put_sized(value)
    })
    .await?;
    // If the export took longer than a snapshot lives, a second read of all rows reveals writes in between. If the bus should be at rest, a
    // second read of the counters reveals a producer that is still recording.
    let is_whole = is_one_version || hash_of(context, all()).await? == hash.digest();
    let is_at_rest = silence.is_none()
        || hash_of(context, all().into_iter().take(1).collect()).await? == counters.digest();
    if !is_whole || !is_at_rest {
        let reason =
            "the bus changed during the export; stop its producers, notifiers and other roles, and try again";
        return Err(Error::invalid("export", reason));
    }
    if let Some(silence) = silence {
        context.store.run(async |tx| silence.check(&tx, &context.keys).await).await?;
    }
    out.put(&[END])?;
    out.put(&exported.rows.to_be_bytes())?;
    let last = Sequence::last_at(context.config.incarnation, version);
    let openings = async |tx: Transaction| {
        // If the incarnation was raised meanwhile, the file has rows of both.
        History::check_opened(context, &tx).await?;
        History::of(context).openings(&tx).await
    };
    let openings = context.store.run(openings).await?;
    out.put_sized(&EndOfIncarnation { last, openings }.to_bytes())?;
    let hash = out.hash.digest();
    out.put(&hash.to_be_bytes())?;
    out.inner.flush().map_err(io)?;
    Ok(exported)
}

pub(super) const FORMAT: u16 = 4;

pub(super) const END: u8 = 0;

pub(super) const ROW: u8 = 1;

/// Wraps a failure to read or write an export.
pub(super) fn io(error: std::io::Error) -> Error {
    if error.kind() == std::io::ErrorKind::UnexpectedEof {
        return Error::invalid("export", "it ends early: copy it again, or export the bus once more");
    }
    Error::Io { what: "export", source: Arc::new(error) }
}

/// Hashes all bytes that pass through a reader or writer.
pub(super) struct Hashed<T> {
    pub inner: T,
    pub hash: Xxh3Default,
}

impl<T> Hashed<T> {
    pub fn new(inner: T) -> Self {
        Self { inner, hash: Xxh3Default::new() }
    }
}

impl<W: Write> Hashed<W> {
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.inner.write_all(bytes).map_err(io)
    }

    /// Writes the length of `bytes`, then `bytes`.
    pub fn put_sized(&mut self, bytes: &[u8]) -> Result<()> {
        let len = u32::try_from(bytes.len()).expect("keys and values are far below 4 GiB");
        self.put(&len.to_be_bytes())?;
        self.put(bytes)
    }
}

impl<R: Read> Hashed<R> {
    /// Reads the next `len` bytes.
    pub fn take(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.inner.read_exact(&mut bytes).map_err(io)?;
        self.hash.update(&bytes);
        Ok(bytes)
    }

    /// Reads a length, which may be at most `max`, and then that many bytes.
    pub fn take_sized(&mut self, max: usize) -> Result<Vec<u8>> {
        let len = u32::from_be_bytes(self.take(4)?.try_into().expect("4 bytes were taken")) as usize;
        if len > max {
            return Err(Error::invalid("export", format!("it is damaged: a key or value of {len} bytes")));
        }
        self.take(len)
    }
}
