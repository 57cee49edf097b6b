//! Reading a folder without changing it, even while another process has it open; and copying its content.

use std::{io, path::Path, sync::atomic::AtomicBool};

use super::{
    files::{Access, Files},
    history::History,
    journal::{Journal, write_snapshot},
    layout::{
        BadSectors, Damage, FORMAT, FORMAT_UNFINISHED, MARKER, Marker, Names, Refusal, check_marker,
        journal_name, write_text,
    },
    recover::{self, Contents},
};
use crate::{base::error::Result, store::embedded::rows::Rows};

/// The state of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FolderReport {
    /// How many rows there are.
    pub rows: usize,
    /// The version of the newest commit, or of the newest opening.
    pub version: u64,
    /// The damage that was found. If there is any, rows may be missing or outdated.
    pub damages: Vec<Damage>,
    /// How many bytes after the last commit belong to unanswered commits; the next opening cuts them off.
    pub torn_len: u64,
    /// Whether a process has the folder open. In that case there may be more rows by now.
    pub is_open: bool,
}

/// The content of a folder.
pub(in crate::store) struct Inspection {
    /// All undamaged rows.
    pub root: Rows,
    /// The versions that the folder has used.
    pub history: History,
    pub report: FolderReport,
}

/// Reads the folder `path` through `files`.
pub(in crate::store) fn inspect(files: &dyn Files, path: &Path) -> Result<Inspection> {
    try_inspect(files).map_err(|refusal| refusal.of(path))
}

/// The maximum number of attempts to read a folder while processes open and close it.
const READS_MAX: usize = 3;

fn try_inspect(files: &dyn Files) -> Result<Inspection, Refusal> {
    // Damage to the marker does not make the other files unreadable.
    let of_marker = match check_marker(files, BadSectors::Pass)? {
        Marker::Missing => return Err(Refusal::unusable("there is no store in it")),
        Marker::Damaged(damage) => Some(damage),
        Marker::Unfinished | Marker::Finished => None,
    };
    let mut reads = 0;
    let (contents, is_open) = loop {
        reads += 1;
        let before = state(files)?;
        let contents = recover::read(files, BadSectors::Pass)?;
        // Opening the folder cuts off the end of the last journal, which looks like damage to a reader at that moment. A process that keeps
        // the folder open does not do this.
        if contents.damages.is_empty() || reads == READS_MAX || state(files)? == before {
            break (contents, before.is_open);
        }
    };
    let Contents { root, version, history, damages, last, .. } = contents;
    let torn_len = last.map_or(0, |last| last.torn_len);
    let damages = of_marker.into_iter().chain(damages).collect();
    let report = FolderReport { rows: root.iter().count(), version, damages, torn_len, is_open };
    Ok(Inspection { root, history, report })
}

/// The state that changes when a process opens or closes the folder.
#[derive(PartialEq, Eq)]
struct State {
    is_open: bool,
    /// The last journal and its length, unless a process has the folder open and may add to it.
    last: Option<(u64, u64)>,
}

fn state(files: &dyn Files) -> io::Result<State> {
    let is_open = files.is_locked()?;
    let last = Names::of(files)?.journals.last().copied().filter(|_| !is_open);
    // A journal that cannot be opened is reported when it is read.
    let len = |number| Some((number, files.open(&journal_name(number), Access::Read).ok()?.len().ok()?));
    Ok(State { is_open, last: last.and_then(len) })
}

/// Writes a store with the content of `inspection` into the folder `path`, which must be empty, through `files`.
pub(in crate::store) fn copy_to(files: &dyn Files, path: &Path, inspection: &Inspection) -> Result<()> {
    try_copy(files, inspection).map_err(|refusal| refusal.of(path))
}

fn try_copy(files: &dyn Files, inspection: &Inspection) -> Result<(), Refusal> {
    if check_marker(files, BadSectors::Fail)? != Marker::Missing {
        return Err(Refusal::unusable("there is a store in it; name an empty folder"));
    }
    let _held = files.lock()?.ok_or_else(|| Refusal::in_use("another process is making a store in it"))?;
    Ok(make(files, (&inspection.root, inspection.report.version), &inspection.history)?)
}

/// Creates the files of a store with `root` at `version`.
pub(super) fn make(files: &dyn Files, (root, version): (&Rows, u64), history: &History) -> io::Result<()> {
    write_text(files, MARKER, FORMAT_UNFINISHED)?;
    let journal = Journal::create(files, 1, version, 0)?;
    write_snapshot(files, journal.number, (root, version), history, &AtomicBool::new(false))?;
    write_text(files, MARKER, FORMAT)
}
