//! Reading a folder without changing it, even while another process has it open; and copying its content.

use std::{io, path::Path, sync::atomic::AtomicBool};

use super::{
    damage::{BadSectors, Damage},
    files::Files,
    history::History,
    journal::Journal,
    marker::{FORMAT, FORMAT_UNFINISHED, LOCK, MARKER, Marker, Refusal, check_marker, explain, write_text},
    recover::{self, Contents},
    snapshot,
};
use crate::{base::error::Result, store::embedded::rows::Rows};

/// How often a folder is read again because another process changes it.
const READS_MAX: usize = 100;

/// The state of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FolderReport {
    /// How many rows there are.
    pub rows: usize,
    /// The version of the newest commit, or of the newest opening.
    pub version: u64,
    /// What is damaged. If anything is, rows may be missing, and old rows may be there.
    pub damages: Vec<Damage>,
    /// How many bytes behind the last commit belong to unanswered commits; the next opening cuts them off.
    pub torn_len: u64,
    /// Whether a process has it open. Then there may be more rows by now.
    pub is_open: bool,
}

/// The content of a folder.
pub(in crate::store) struct Inspection {
    /// All undamaged rows.
    pub root: Rows,
    /// The versions that it has used.
    pub history: History,
    pub report: FolderReport,
}

/// Reads the folder `path`.
pub(in crate::store) fn inspect(files: &dyn Files, path: &Path) -> Result<Inspection> {
    try_inspect(files, path).map_err(|refusal| refusal.of(path))
}

fn try_inspect(files: &dyn Files, path: &Path) -> Result<Inspection, Refusal> {
    if files.is_file(path) {
        return Err(Refusal::unusable("it is a file; name a folder"));
    }
    // The files beside a damaged marker are as readable as ever.
    let of_marker = match check_marker(files, path, BadSectors::Pass)? {
        Marker::Missing => return Err(Refusal::unusable("there is no store in it")),
        Marker::Damaged(damage) => Some(damage),
        Marker::Unfinished | Marker::Finished => None,
    };
    let (mut reads, mut doubt) = (0, None);
    let (contents, is_open) = loop {
        reads += 1;
        // A journal may grow, and a snapshot replace others, during the read.
        let is_open = files.is_locked(&path.join(LOCK))?;
        let read = match recover::read(files, path, BadSectors::Pass) {
            Ok(contents) if contents.damages.is_empty() => break (contents, is_open),
            read => read,
        };
        // Another process may have opened and closed it meanwhile: damage counts only if two reads find it.
        let found = Some(match &read {
            Ok(contents) => Ok(contents.damages.clone()),
            Err(error) => Err(explain(error)),
        });
        if reads == READS_MAX || (!is_open && doubt == found) {
            break (read?, is_open);
        }
        doubt = found;
    };
    let Contents { root, version, history, damages, last, .. } = contents;
    let torn_len = last.map_or(0, |last| last.torn_len);
    let damages = of_marker.into_iter().chain(damages).collect();
    let report = FolderReport { rows: root.iter().count(), version, damages, torn_len, is_open };
    Ok(Inspection { root, history, report })
}

/// Writes a store with the content of `inspection` into the folder `path`, which must be empty or missing.
pub(in crate::store) fn copy_to(files: &dyn Files, path: &Path, inspection: &Inspection) -> Result<()> {
    try_copy(files, path, inspection).map_err(|refusal| refusal.of(path))
}

fn try_copy(files: &dyn Files, path: &Path, inspection: &Inspection) -> Result<(), Refusal> {
    if files.is_file(path) {
        return Err(Refusal::unusable("it is a file; name a folder"));
    }
    files.make_folder(path)?;
    if check_marker(files, path, BadSectors::Fail)? != Marker::Missing {
        return Err(Refusal::unusable("there is a store in it; name an empty folder"));
    }
    let held = files.lock(&path.join(LOCK))?;
    let _held = held.ok_or_else(|| Refusal::in_use("another process makes a store in it"))?;
    Ok(make(files, path, (&inspection.root, inspection.report.version), &inspection.history)?)
}

/// Creates the files of a store with `root` at `version`.
pub(super) fn make(
    files: &dyn Files,
    path: &Path,
    (root, version): (&Rows, u64),
    history: &History,
) -> io::Result<()> {
    write_text(files, path, MARKER, FORMAT_UNFINISHED)?;
    let journal = Journal::create(files, path, 1, version, 0)?;
    snapshot::write(files, path, journal.number, (root, version), history, &AtomicBool::new(false))?;
    write_text(files, path, MARKER, FORMAT)
}
