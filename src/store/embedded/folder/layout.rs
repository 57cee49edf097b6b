//! What a folder holds: its files by their names, the marker with its format, and the note that it was closed cleanly; and what can be
//! wrong with it: [`Damage`], and the reasons not to open it.

use std::{fmt, io, path::Path, sync::Arc};

use xxhash_rust::xxh3::xxh3_64;

#[cfg(unix)]
use super::files::SystemFolder;
use super::files::{Files, UNFINISHED, read_text, replace, write_all};
use crate::base::error::{Error, OpenCause, Result};

/// The file by which a store's folder is recognised.
pub(super) const MARKER: &str = "NOTIBUS_STORE";

/// The file with the version at which a store was closed cleanly. It does not exist while the store is open.
pub(super) const CLOSED: &str = "NOTIBUS_CLOSED";

/// The text of the marker: the format of the folder.
pub(super) const FORMAT: &str = "3";

/// The text of the marker until the folder has its first files. An empty marker means the same.
pub(super) const FORMAT_UNFINISHED: &str = "3 unfinished";

/// Returns the name of journal `number`.
pub(super) fn journal_name(number: u64) -> String {
    format!("journal-{number:016}")
}

/// Returns the name of snapshot `number`, which has the rows of all journals before journal `number`.
pub(super) fn snapshot_name(number: u64) -> String {
    format!("snapshot-{number:016}")
}

/// The files of a folder.
#[derive(Default)]
pub(super) struct Names {
    /// The numbers of its journals, in order.
    pub journals: Vec<u64>,
    /// The numbers of its snapshots, in order.
    pub snapshots: Vec<u64>,
    /// Files that were never finished.
    pub unfinished: Vec<String>,
}

impl Names {
    /// Lists the files of the store. The folder may have other files: only those with names that the store uses are its own.
    pub fn of(files: &dyn Files) -> io::Result<Self> {
        let mut found = Self::default();
        for name in files.list()? {
            let number = |named: fn(u64) -> String| {
                let digits = name.rsplit('-').next().and_then(|digits| digits.parse::<u64>().ok());
                digits.filter(|number| *number <= NUMBER_MAX && named(*number) == name)
            };
            if let Some(number) = number(journal_name) {
                found.journals.push(number);
            } else if let Some(number) = number(snapshot_name) {
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

/// The greatest number that a file's name can have, with 16 digits.
const NUMBER_MAX: u64 = 9_999_999_999_999_999;

/// A place in a file where bytes have changed since they were written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Damage {
    /// The name of the file in the folder.
    pub file: String,
    /// The offset in the file, in bytes.
    pub offset: u64,
    /// What is wrong there.
    pub what: String,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}: {}", self.file, self.offset, self.what)
    }
}

/// What to do with bytes that the disk cannot read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BadSectors {
    Fail,
    /// Continue after those bytes, as after other damage.
    Pass,
}

/// Whether `error` shows that a read failed because of the medium: `EIO`.
pub(super) fn is_bad_sector(error: &io::Error) -> bool {
    error.raw_os_error() == Some(5)
}

/// The state of a folder's marker.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Marker {
    /// The folder is empty.
    Missing,
    /// The folder is being created.
    Unfinished,
    /// The folder holds a store.
    Finished,
    /// The marker is damaged. The rest of the folder can still be read.
    Damaged(Damage),
}

/// Why a folder cannot be opened.
#[derive(Debug)]
pub(super) struct Refusal {
    cause: OpenCause,
    reason: String,
}

impl Refusal {
    /// The folder cannot be used for a store.
    pub fn unusable(reason: impl Into<String>) -> Self {
        Self { cause: OpenCause::Unusable, reason: reason.into() }
    }

    pub fn damaged(reason: impl Into<String>) -> Self {
        Self { cause: OpenCause::Damaged, reason: format!("damaged: {}", reason.into()) }
    }

    pub fn in_use(reason: impl Into<String>) -> Self {
        Self { cause: OpenCause::InUse, reason: reason.into() }
    }

    /// Converts the refusal into the error for the folder `path`.
    pub fn of(self, path: &Path) -> Error {
        Error::Open { path: path.to_owned(), cause: self.cause, reason: self.reason }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self { cause: OpenCause::from(&error), reason: explain(&error) }
    }
}

impl Marker {
    /// Fails if the marker is damaged.
    pub fn undamaged(self) -> Result<Self, Refusal> {
        match self {
            Self::Damaged(damage) => Err(Refusal::damaged(format!("{damage}; restore it from a copy"))),
            marker => Ok(marker),
        }
    }
}

/// Opens the folder `path`. If `is_made`, creates the folder if it does not exist.
#[cfg(unix)]
pub(in crate::store) fn open_folder(path: &Path, is_made: bool) -> Result<Arc<dyn Files>> {
    if path.exists() && !path.is_dir() {
        return Err(Refusal::unusable("it is a file; name a folder").of(path));
    }
    let folder = if is_made { SystemFolder::make(path) } else { SystemFolder::open(path) };
    Ok(Arc::new(folder.map_err(|error| Refusal::from(error).of(path))?))
}

/// Always fails, because systems other than Unix cannot reach files through a handle to their folder.
#[cfg(not(unix))]
pub(in crate::store) fn open_folder(path: &Path, _: bool) -> Result<Arc<dyn Files>> {
    Err(Refusal::unusable("stores in folders need a Unix system").of(path))
}

/// Reads the marker of a folder.
pub(super) fn check_marker(files: &dyn Files, bad_sectors: BadSectors) -> Result<Marker, Refusal> {
    let damaged = |what: String| Ok(Marker::Damaged(Damage { file: MARKER.to_owned(), offset: 0, what }));
    let text = match read_text(files, MARKER) {
        Err(error) if bad_sectors == BadSectors::Pass && is_bad_sector(&error) => {
            return damaged(format!("it cannot be read ({error})"));
        }
        text => text?,
    };
    let Some(text) = text else {
        let Names { journals, snapshots, .. } = Names::of(files)?;
        if !journals.is_empty() || !snapshots.is_empty() {
            return damaged("it is missing".to_owned());
        }
        let unfinished = format!("{MARKER}{UNFINISHED}");
        if files.list()?.iter().any(|name| *name != unfinished) {
            return Err(Refusal::unusable("it holds files but no store; name an empty folder"));
        }
        return Ok(Marker::Missing);
    };
    match unsealed(&text) {
        Some(FORMAT) => Ok(Marker::Finished),
        Some(FORMAT_UNFINISHED) => Ok(Marker::Unfinished),
        None if text.is_empty() => Ok(Marker::Unfinished),
        None => damaged(format!("{text:?} is not a format with its checksum")),
        Some(found) => Err(Refusal::unusable(format!(
            "its format is {found:?}, but this program knows {FORMAT:?}; export it with the program that wrote it"
        ))),
    }
}

/// Returns the content of a small file with this text: one line with the text and its checksum.
fn sealed(text: &str) -> String {
    format!("{text} {:016x}\n", xxh3_64(text.as_bytes()))
}

/// Returns the text of a small file from its content; `None` if the file is damaged.
pub(super) fn unsealed(content: &str) -> Option<&str> {
    let (text, _) = content.rsplit_once(' ')?;
    (sealed(text) == content).then_some(text)
}

/// Writes a small file of the folder. After a power failure the file is either complete or as it was before.
pub(super) fn write_text(files: &dyn Files, name: &str, text: &str) -> io::Result<()> {
    replace(files, name, |file| write_all(file, 0, sealed(text).as_bytes())).map(drop)
}

/// Explains a disk error to the user who is opening a folder.
pub(super) fn explain(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => format!(
            "this user may not read and write its files; grant it permission, or run as their owner ({error})"
        ),
        io::ErrorKind::ReadOnlyFilesystem => format!("it is on a read-only file system ({error})"),
        io::ErrorKind::StorageFull => format!("its disk is full; make room ({error})"),
        // Other errors of the operating system, such as too many open files or a failing disk, are not damage.
        _ => format!("it cannot be read or written ({error})"),
    }
}
