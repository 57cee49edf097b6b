//! Reading a folder: the newest snapshot, and the journals since.
//!
//! What a power failure has left of a group that was not answered is passed over, whatever its shape. What is missing or broken of
//! that which was on disk is damage, and is told with its place; everything whole around it is read all the same.

use std::{fmt, io, path::Path};

use super::{
    CLOSED,
    files::{Access, File, Files, UNFINISHED, read_text},
    history::History,
    journal,
    record::{self, Kind, Record, Records},
    snapshot,
};
use crate::{
    base::{encoding::Reader, error::Result},
    store::embedded::core::Root,
};

/// Something that was on disk once, and is not as it was.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Damage {
    /// The name of the file in the folder.
    pub file: String,
    /// Where in the file, in bytes.
    pub offset: u64,
    /// What is wrong there.
    pub what: String,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}: {}", self.file, self.offset, self.what)
    }
}

/// What is in a folder.
pub(super) struct Contents {
    /// All rows that are whole.
    pub root: Root,
    /// The version of the newest commit, or of the newest opening.
    pub version: u64,
    /// Which versions it has used.
    pub history: History,
    /// What is damaged.
    pub damages: Vec<Damage>,
    /// The length of the snapshot.
    pub snapshot_len: u64,
    /// The length of all journals but the last one.
    pub sealed_len: u64,
    /// The last journal, if there is one.
    pub last: Option<Last>,
    /// Files that are of no use any more.
    pub leftovers: Vec<String>,
}

/// The journal that is written to.
pub(super) struct Last {
    pub number: u64,
    /// Where the last of its whole records begins.
    pub begin: u64,
    /// Where its whole records end.
    pub end: u64,
    /// How many bytes are behind that.
    pub torn_len: u64,
}

/// Which files a folder has.
#[derive(Default)]
pub(super) struct Names {
    /// The numbers of its journals, in order.
    pub journals: Vec<u64>,
    /// The numbers of its snapshots, in order.
    pub snapshots: Vec<u64>,
    /// Files that were never finished.
    unfinished: Vec<String>,
}

impl Names {
    /// Those of `folder`.
    pub fn of(files: &dyn Files, folder: &Path) -> io::Result<Self> {
        let mut found = Self::default();
        for name in files.list(folder)? {
            let number =
                |prefix| name.strip_prefix(prefix).and_then(|digits: &str| digits.parse::<u64>().ok());
            if let Some(number) = number("journal-") {
                found.journals.push(number);
            } else if let Some(number) = number("snapshot-") {
                found.snapshots.push(number);
            } else if name.ends_with(UNFINISHED) {
                found.unfinished.push(name);
            }
        }
        found.journals.sort_unstable();
        found.snapshots.sort_unstable();
        Ok(found)
    }
}

/// Reads `folder`, and changes nothing.
pub(super) fn read(files: &dyn Files, folder: &Path) -> io::Result<Contents> {
    let names = Names::of(files, folder)?;
    let mut reading = Reading { files, folder, contents: Contents::nothing(), ended: None };
    let newest = names.snapshots.last().copied();
    let first = newest.or(names.journals.first().copied()).unwrap_or(1);
    match newest {
        Some(number) => reading.snapshot(number)?,
        None => reading.damage(snapshot::name(first), 0, "there is no snapshot"),
    }
    let last = names.journals.last().copied().unwrap_or(first).max(first);
    for number in first..=last {
        if names.journals.contains(&number) {
            reading.journal(number, number == last)?;
        } else {
            reading.damage(journal::name(number), 0, "it is missing");
            reading.ended = None;
        }
    }
    reading.closed()?;
    let mut contents = reading.contents;
    contents.leftovers = names.unfinished;
    contents.leftovers.extend(names.journals.iter().filter(|n| **n < first).map(|n| journal::name(*n)));
    contents.leftovers.extend(names.snapshots.iter().filter(|n| **n < first).map(|n| snapshot::name(*n)));
    Ok(contents)
}

impl Contents {
    /// Nothing.
    fn nothing() -> Self {
        Self {
            root: Root::new(),
            version: 0,
            history: History::default(),
            damages: Vec::new(),
            snapshot_len: 0,
            sealed_len: 0,
            last: None,
            leftovers: Vec::new(),
        }
    }
}

/// A folder that is being read.
struct Reading<'a> {
    /// Its disk.
    files: &'a dyn Files,
    folder: &'a Path,
    /// What was found so far.
    contents: Contents,
    /// The name and the end of the journal that was read last.
    ended: Option<(String, u64)>,
}

impl Reading<'_> {
    /// Something is damaged.
    fn damage(&mut self, file: String, offset: u64, what: impl Into<String>) {
        self.contents.damages.push(Damage { file, offset, what: what.into() });
    }

    /// Opens a file.
    fn open(&self, name: &str) -> io::Result<Box<dyn File>> {
        self.files.open(&self.folder.join(name), Access::Read)
    }

    /// Takes the whole records of a file, in order. What is broken between them is damaged. Returns where they end.
    fn records(
        &mut self,
        name: &str,
        records: &mut Records,
        mut take: impl FnMut(&mut Self, &Record, u64) -> Result<()>,
    ) -> io::Result<u64> {
        let mut at = 0;
        loop {
            let record = records.read(at)?;
            let behind = match &record {
                Some(record) if record.kind != Kind::Synced => {
                    if let Err(error) = take(self, record, at) {
                        self.damage(name.to_owned(), at, error.to_string());
                    }
                    at = record.end;
                    continue;
                }
                Some(synced) => synced.end,
                None => at + 1,
            };
            let Some(next) = records.find(behind)? else { return Ok(at) };
            self.damage(name.to_owned(), at, format!("it is broken; from byte {next} on it is whole again"));
            at = next;
        }
    }

    /// Reads snapshot `number`.
    fn snapshot(&mut self, number: u64) -> io::Result<()> {
        let name = snapshot::name(number);
        let mut records = Records::new(self.open(&name)?, snapshot::seed(number))?;
        let mut is_finished = false;
        let end = self.records(&name, &mut records, |reading, record, at| {
            let contents = &mut reading.contents;
            match record.kind {
                Kind::Snapshot if at == 0 => {
                    contents.version = record.version;
                    contents.history = History::from_bytes(&record.payload)?;
                }
                Kind::Rows => apply(&mut contents.root, &record.payload)?,
                Kind::End => {
                    let count = Reader::new("end of a snapshot", &record.payload).u64()?;
                    is_finished = true;
                    if count != contents.root.len() as u64 {
                        let what = format!("{count} rows were written, {} are there", contents.root.len());
                        reading.damage(snapshot::name(number), at, what);
                    }
                }
                _ => reading.damage(snapshot::name(number), at, "this is no part of a snapshot"),
            }
            Ok(())
        })?;
        if !is_finished || end < records.len() {
            self.damage(name, end, "it does not end here");
        }
        self.contents.snapshot_len = end;
        Ok(())
    }

    /// Reads journal `number`.
    fn journal(&mut self, number: u64, is_last: bool) -> io::Result<()> {
        let name = journal::name(number);
        let mut records = Records::new(self.open(&name)?, journal::seed(number))?;
        let mut begin = 0;
        let end = self.records(&name, &mut records, |reading, record, at| {
            begin = at;
            let version = reading.contents.version;
            match record.kind {
                Kind::Journal if at == 0 => reading.follows(number, record)?,
                Kind::Opening | Kind::Commit if record.version <= version => {
                    let what = format!("version {} comes after {version}", record.version);
                    reading.damage(journal::name(number), at, what);
                }
                Kind::Opening => {
                    reading.contents.history.opened(record.version);
                    reading.contents.version = record.version;
                }
                Kind::Commit => {
                    apply(&mut reading.contents.root, &record.payload)?;
                    reading.contents.history.reached(record.version);
                    reading.contents.version = record.version;
                }
                _ => reading.damage(journal::name(number), at, "this is no part of a journal"),
            }
            Ok(())
        })?;
        if end == 0 {
            self.damage(name.clone(), 0, "its beginning is broken");
        }
        if is_last {
            self.contents.last = Some(Last { number, begin, end, torn_len: records.len() - end });
        } else {
            self.contents.sealed_len += end;
        }
        self.ended = Some((name, end));
        Ok(())
    }

    /// Compares what a journal says of the one before with what was read of that.
    fn follows(&mut self, number: u64, record: &Record) -> Result<()> {
        let previous_len = Reader::new("beginning of a journal", &record.payload).u64()?;
        let Some((name, end)) = self.ended.take() else {
            if record.version != self.contents.version {
                let what = format!(
                    "it goes on from version {}, the snapshot is of {}",
                    record.version, self.contents.version
                );
                self.damage(journal::name(number), 0, what);
            }
            return Ok(());
        };
        if end != previous_len {
            self.damage(name, end, format!("it was whole up to byte {previous_len}"));
        }
        Ok(())
    }

    /// Compares what was found with what was noted when the store was closed in order, if it was: a journal that ends early looks
    /// like one that a power failure has cut.
    fn closed(&mut self) -> io::Result<()> {
        let Some(noted) = read_text(self.files, &self.folder.join(CLOSED))? else { return Ok(()) };
        let version = self.contents.version;
        match noted.trim_end().parse::<u64>() {
            // An opening that has failed meanwhile has left a later version, and the note.
            Ok(noted) if noted <= version => {}
            Ok(noted) => {
                let (name, end) = self.ended.take().unwrap_or((CLOSED.to_owned(), 0));
                self.damage(name, end, format!("it ends with version {version}, but was closed at {noted}"));
            }
            Err(_) => self.damage(CLOSED.to_owned(), 0, format!("{noted:?} is no version")),
        }
        Ok(())
    }
}

/// Changes the rows of a payload in `root`.
fn apply(root: &mut Root, payload: &[u8]) -> Result<()> {
    for (key, value) in record::rows(payload)? {
        match value {
            Some(value) => root.insert(key, value),
            None => root.remove(&key),
        };
    }
    Ok(())
}
