//! Reading a folder: the newest snapshot, and the journals since.
//!
//! The remains of a group that was not answered before a power failure are skipped, whatever they look like. Missing or broken bytes that
//! were once on disk are damage, which is reported with its file and offset; everything whole around it is still read.

use std::io;

use super::{
    files::{Access, Files, read_text},
    history::History,
    journal::{journal_seed, snapshot_seed},
    layout::{BadSectors, CLOSED, Damage, Names, is_bad_sector, journal_name, snapshot_name, unsealed},
    record::{self, Kind, Record, Records},
};
use crate::{
    base::{encoding::Reader, error::Result},
    store::embedded::rows::Rows,
};

/// The maximum number of attempts to open the files of a folder while another process changes their names.
const OPENINGS_MAX: usize = 100;

pub(super) struct Contents {
    /// All undamaged rows.
    pub root: Rows,
    /// The version of the newest commit, or of the newest opening.
    pub version: u64,
    /// The versions that the folder has used.
    pub history: History,
    /// What is damaged.
    pub damages: Vec<Damage>,
    /// The number of the snapshot.
    pub snapshot: u64,
    /// The length of the snapshot.
    pub snapshot_len: u64,
    /// The total length of all journals except for the last one.
    pub sealed_len: u64,
    /// The last journal, if there is one.
    pub last: Option<Last>,
    /// Files that are no longer needed.
    pub leftovers: Vec<String>,
}

/// The journal that new commits are written to.
pub(super) struct Last {
    pub number: u64,
    /// The offset of its last whole record.
    pub begin: u64,
    /// Where its last whole record ends.
    pub end: u64,
    /// How many bytes follow its last whole record.
    pub torn_len: u64,
}

/// Reads the folder. All files are opened before any of them is read, so that another process that has the folder open can meanwhile add to
/// the last journal and remove other files.
pub(super) fn read(files: &dyn Files, bad_sectors: BadSectors) -> io::Result<Contents> {
    for _ in 0..OPENINGS_MAX {
        let names = Names::of(files)?;
        let first = names.snapshots.last().or(names.journals.first()).copied().unwrap_or(1);
        let mut reading =
            Reading { files, bad_sectors, contents: Contents::nothing(), ended: None, has_moved: false };
        let snapshot = match names.snapshots.last() {
            Some(&number) => reading.open(&snapshot_name(number), snapshot_seed(number))?,
            None => None,
        };
        let mut journals = Vec::new();
        for &number in names.journals.iter().filter(|number| **number >= first) {
            journals.push((number, reading.open(&journal_name(number), journal_seed(number))?));
        }
        if reading.has_moved {
            // Another process just removed a file that a newer snapshot replaced.
            continue;
        }
        match (names.snapshots.last(), snapshot) {
            (None, _) => reading.damage(snapshot_name(first), 0, "there is no snapshot"),
            (Some(&number), Some(records)) => reading.snapshot(number, records)?,
            (Some(_), None) => {}
        }
        reading.journals(first, journals)?;
        reading.closed()?;
        let mut contents = reading.contents;
        contents.snapshot = first;
        contents.leftovers = names.unfinished;
        let old = |numbers: &[u64], name: fn(u64) -> String| {
            numbers.iter().filter(|n| **n < first).map(|n| name(*n)).collect::<Vec<_>>()
        };
        contents.leftovers.extend(old(&names.journals, journal_name));
        contents.leftovers.extend(old(&names.snapshots, snapshot_name));
        return Ok(contents);
    }
    Err(io::Error::other("its files change faster than they can be opened"))
}

impl Contents {
    fn nothing() -> Self {
        Self {
            root: Rows::default(),
            version: 0,
            history: History::default(),
            damages: Vec::new(),
            snapshot: 0,
            snapshot_len: 0,
            sealed_len: 0,
            last: None,
            leftovers: Vec::new(),
        }
    }
}

/// A folder that is being read.
struct Reading<'a> {
    files: &'a dyn Files,
    bad_sectors: BadSectors,
    /// What has been found so far.
    contents: Contents,
    /// The name and the end of the last journal that was read.
    ended: Option<(String, u64)>,
    /// Whether a file that was listed was gone before it could be opened.
    has_moved: bool,
}

impl Reading<'_> {
    fn damage(&mut self, file: String, offset: u64, what: impl Into<String>) {
        self.contents.damages.push(Damage { file, offset, what: what.into() });
    }

    /// Opens the file `name` to read its records. Returns `None` if the disk cannot even open it, which is damage, or if the file is gone.
    fn open(&mut self, name: &str, seed: u64) -> io::Result<Option<Records>> {
        let opened = self.files.open(name, Access::Read);
        match opened.and_then(|file| Records::new(file, seed, self.bad_sectors)) {
            Err(error) if self.bad_sectors == BadSectors::Pass && is_bad_sector(&error) => {
                self.damage(name.to_owned(), 0, format!("it cannot be opened ({error})"));
                Ok(None)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.has_moved = true;
                Ok(None)
            }
            records => records.map(Some),
        }
    }

    /// Reports the bytes of a file that the disk could not read.
    fn unreadable(&mut self, name: &str, records: &Records) {
        for (begin, end) in records.unreadable() {
            self.damage(name.to_owned(), begin, format!("the disk cannot read it, up to byte {end}"));
        }
    }

    /// Reads the records of a file that are whole, in order. Broken bytes between them are damage. Returns where the last of them ends.
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

    fn snapshot(&mut self, number: u64, mut records: Records) -> io::Result<()> {
        let name = snapshot_name(number);
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
                    let found = contents.root.iter().count();
                    if count != found as u64 {
                        let what = format!("{count} rows were written, but {found} were found");
                        reading.damage(snapshot_name(number), at, what);
                    }
                }
                _ => reading.damage(snapshot_name(number), at, "this is not part of a snapshot"),
            }
            Ok(())
        })?;
        self.unreadable(&name, &records);
        if !is_finished || end < records.len() {
            self.damage(name, end, "it does not end here");
        }
        self.contents.snapshot_len = end;
        Ok(())
    }

    /// Reads the journals, starting with number `first`. A journal that is missing, or that could not be opened, is damage.
    fn journals(&mut self, first: u64, journals: Vec<(u64, Option<Records>)>) -> io::Result<()> {
        let (mut next, last) = (first, journals.last().map(|(number, _)| *number));
        if last.is_none() {
            self.damage(journal_name(first), 0, "it is missing");
        }
        for (number, records) in journals {
            if number > next {
                let more =
                    if number == next + 1 { String::new() } else { format!(", up to number {}", number - 1) };
                self.damage(journal_name(next), 0, format!("it is missing{more}"));
                self.ended = None;
            }
            next = number + 1;
            match records {
                Some(records) => self.journal(number, records, last == Some(number))?,
                None => self.ended = None,
            }
        }
        Ok(())
    }

    fn journal(&mut self, number: u64, mut records: Records, is_last: bool) -> io::Result<()> {
        let name = journal_name(number);
        let mut begin = 0;
        let end = self.records(&name, &mut records, |reading, record, at| {
            begin = at;
            let version = reading.contents.version;
            match record.kind {
                Kind::Journal if at == 0 => reading.follows(number, record)?,
                Kind::Opening | Kind::Commit if record.version <= version => {
                    let what = format!("version {} comes after {version}", record.version);
                    reading.damage(journal_name(number), at, what);
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
                _ => reading.damage(journal_name(number), at, "this is not part of a journal"),
            }
            Ok(())
        })?;
        self.unreadable(&name, &records);
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

    /// Checks that the previous journal was read up to the length that the first record of this journal gives for it.
    fn follows(&mut self, number: u64, record: &Record) -> Result<()> {
        let previous_len = Reader::new("beginning of a journal", &record.payload).u64()?;
        let Some((name, end)) = self.ended.take() else {
            if record.version != self.contents.version {
                let what = format!(
                    "it continues from version {}, but the snapshot is at {}",
                    record.version, self.contents.version
                );
                self.damage(journal_name(number), 0, what);
            }
            return Ok(());
        };
        if end != previous_len {
            self.damage(name, end, format!("it was whole up to byte {previous_len}"));
        }
        Ok(())
    }

    /// Compares what was read with the note of a clean close, if there is one. Only the note reveals that a journal has lost its end, which
    /// otherwise looks as it would after a power failure.
    fn closed(&mut self) -> io::Result<()> {
        let noted = match read_text(self.files, CLOSED) {
            Err(error) if self.bad_sectors == BadSectors::Pass && is_bad_sector(&error) => {
                self.damage(CLOSED.to_owned(), 0, format!("it cannot be read ({error})"));
                return Ok(());
            }
            noted => noted?,
        };
        let Some(noted) = noted else { return Ok(()) };
        let version = self.contents.version;
        match unsealed(&noted).and_then(|noted| noted.parse::<u64>().ok()) {
            // An opening that failed in between can leave both a later version and the note.
            Some(noted) if noted <= version => {}
            Some(noted) => {
                let (name, end) = self.ended.take().unwrap_or((CLOSED.to_owned(), 0));
                self.damage(name, end, format!("it ends with version {version}, but was closed at {noted}"));
            }
            None => {
                self.damage(CLOSED.to_owned(), 0, format!("{noted:?} is not a version with its checksum"));
            }
        }
        Ok(())
    }
}

/// Applies the rows of a payload to `root`.
fn apply(root: &mut Rows, payload: &[u8]) -> Result<()> {
    for (key, value) in record::rows(payload)? {
        root.change(key, |_| value);
    }
    Ok(())
}
