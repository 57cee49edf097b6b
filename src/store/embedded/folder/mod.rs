//! A store's folder: the rows on disk, and the files around them.
//!
//! All rows are in memory, so until the folder is opened again the disk is only written to: a [`journal`] that grows by a record for each
//! group of commits, and now and then a snapshot of all rows, which replaces the journals before it.
//!
//! | file | content |
//! |---|---|
//! | `NOTIBUS_STORE` | the format; marks the folder as that of a store |
//! | `NOTIBUS_CLOSED` | the version at which the store was closed cleanly; gone while it is open |
//! | `snapshot-N` | all rows that are in the journals before journal N |
//! | `journal-N` | the commits since |
//! | `….new` | unfinished files of a process that ended; removed at the next opening |
//!
//! A process that has the folder open locks the folder itself, and reaches the files through a handle to it. If the folder is moved or
//! replaced, or its journal is removed, that process fails, and never writes into what took its place.
//!
//! When the journals have grown to the length of the snapshot, the next journal begins. Then its snapshot is written while commits
//! continue, and older files are removed. So there may be several journals in a row.
//!
//! # Room
//!
//! If the journals are twice as long as the snapshot, commits wait for the next one, so the folder takes at most four times the size of its
//! rows, plus a constant. If there is no room for a snapshot or a commit, commits fail with `no_room` and have no effect, and each later
//! commit makes another attempt. When the store is opened, an overdue snapshot is written first, or skipped if there is no room for it.

mod files;
mod history;
mod inspect;
mod journal;
mod layout;
mod record;
mod recover;

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

pub use self::files::{Access, File, Files, Lock};
pub(super) use self::history::History;
pub(in crate::store) use self::inspect::{Inspection, copy_to, inspect};
pub(super) use self::journal::Unwritten;
pub(in crate::store) use self::layout::open_folder;
pub use self::{inspect::FolderReport, layout::Damage};
use self::{
    journal::{Journal, write_snapshot},
    layout::{
        BadSectors, CLOSED, FORMAT, MARKER, Marker, Names, Refusal, check_marker, journal_name,
        snapshot_name, write_text,
    },
    record::Kind,
    recover::Contents,
};
use super::{core::Staged, rows::Rows};
use crate::{base::error::Result, store::FolderOptions};

/// How many times to try to lock a folder, and the pause between two attempts.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The pause between two attempts at an overdue snapshot.
const SNAPSHOT_PAUSE: Duration = Duration::from_millis(100);

/// When a store writes its snapshots.
#[derive(Debug, Clone, Copy)]
pub struct FolderTuning {
    /// The minimum length of the journals before a snapshot is written, in bytes.
    pub journal_len_min: u64,
    /// How long commits wait for an overdue snapshot for which there is no room.
    pub no_room_wait: Duration,
    /// Whether a thread writes snapshots. Otherwise commits wait for them.
    pub has_threads: bool,
}

impl Default for FolderTuning {
    fn default() -> Self {
        let FolderOptions { no_room_wait } = FolderOptions::default();
        Self { journal_len_min: 16 << 20, no_room_wait, has_threads: true }
    }
}

pub(super) struct Folder {
    files: Arc<dyn Files>,
    options: FolderTuning,
    journal: Journal,
    /// The version of this opening, until the opening is in the journal.
    unopened: Option<u64>,
    /// The versions that the folder has used.
    history: History,
    /// The total length of the journals since the snapshot, except for the last one.
    sealed_len: u64,
    snapshots: Arc<Mutex<Snapshots>>,
    writing: Option<thread::JoinHandle<()>>,
    /// When commits began to wait for an overdue snapshot that keeps failing.
    waiting_since: Option<Instant>,
    /// Set to stop writing a snapshot that is no longer needed, because writing a large one takes seconds.
    is_abandoned: Arc<AtomicBool>,
    marker: Box<dyn File>,
    /// Keeps other processes out, and is dropped last.
    _lock: Lock,
}

struct Snapshots {
    /// The file of the newest snapshot.
    file: Box<dyn File>,
    /// The length of the newest snapshot.
    len: u64,
    /// Whether a snapshot is being written.
    is_writing: bool,
    /// The length of the journals at which the next snapshot is due. Grows when a snapshot fails.
    due_at: u64,
    /// Whether a snapshot was finished, and the journals before it were removed.
    is_finished: bool,
    /// Why the last snapshot was not finished.
    error: Option<String>,
    /// Whether the failure was logged since the last finished snapshot.
    is_said: bool,
}

/// A folder that was opened, and its content.
pub(super) struct Opened {
    pub folder: Folder,
    /// All rows.
    pub root: Rows,
    /// The version to continue from.
    pub version: u64,
    /// The versions that the folder has used.
    pub history: History,
}

impl Snapshots {
    /// Creates the state after an opening.
    fn new(file: Box<dyn File>, len: u64) -> Self {
        Self { file, len, is_writing: false, due_at: 0, is_finished: false, error: None, is_said: false }
    }
}

impl Folder {
    /// Opens the store in the folder `path` through `files`, and creates it if the folder is empty. Versions continue from `version`, or
    /// after the used versions if those are later.
    pub fn open(files: Arc<dyn Files>, path: &Path, options: FolderTuning, version: u64) -> Result<Opened> {
        Self::try_open(files, options, version).map_err(|refusal| refusal.of(path))
    }

    fn try_open(files: Arc<dyn Files>, options: FolderTuning, version: u64) -> Result<Opened, Refusal> {
        let lock = prepare(&*files)?;
        let contents = recover::read(&*files, BadSectors::Fail)?;
        refuse_damage(&contents)?;
        let Contents { root, mut history, snapshot_len, sealed_len, last, leftovers, .. } = contents;
        let last = last.ok_or_else(|| Refusal::damaged("it has no journal; restore it from a copy"))?;
        let version = version.max(contents.version + 1);
        let file = files.open(&journal_name(last.number), Access::Write)?;
        let journal = Journal::resume(file, last.number, (last.begin, last.end))?;
        for name in leftovers {
            files.remove(&name)?;
        }
        history.opened(version);
        let marker = files.open(MARKER, Access::Read)?;
        let snapshot = files.open(&snapshot_name(contents.snapshot), Access::Read)?;
        let mut folder = Self {
            files,
            options,
            journal,
            unopened: Some(version),
            history: history.clone(),
            sealed_len,
            snapshots: Arc::new(Mutex::new(Snapshots::new(snapshot, snapshot_len))),
            writing: None,
            waiting_since: None,
            is_abandoned: Arc::default(),
            marker,
            _lock: lock,
        };
        match folder.note_opening() {
            // The opening is noted with the first commit instead.
            Err(Unwritten::NoRoom(error)) => tracing::warn!(%error, "there is no room for commits"),
            Err(Unwritten::Failed(error)) => return Err(error.into()),
            Ok(()) if folder.is_overdue() => {
                if let Err(error) = folder.begin_snapshot(&root, version, false) {
                    tracing::warn!(%error, "could not begin a new journal; the current one continues");
                }
            }
            Ok(()) => {}
        }
        match folder.files.remove(CLOSED) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => folder.files.sync()?,
        }
        Ok(Opened { folder, root, version, history })
    }

    /// Notes the opening in the journal, unless that was already done.
    fn note_opening(&mut self) -> Result<(), Unwritten> {
        if let Some(version) = self.unopened {
            self.journal.append(Kind::Opening, version, |_| {})?;
            self.unopened = None;
        }
        Ok(())
    }

    /// Records that the store was closed cleanly at `version`.
    pub fn close(&mut self, version: u64) -> io::Result<()> {
        self.wait();
        self.check_files()?;
        // The journal does not end with the version of an opening that there was no room to note.
        if self.unopened.is_some() {
            return Ok(());
        }
        write_text(&*self.files, CLOSED, &version.to_string())
    }

    /// Fails unless the next opening will find what was written: the path still leads to the folder, and its files still have their names.
    fn check_files(&mut self) -> io::Result<()> {
        let is_whole =
            self.marker.has_name()? && self.snapshots().file.has_name()? && self.journal.has_name()?;
        if is_whole && self.files.is_in_place()? {
            return Ok(());
        }
        Err(io::Error::other(
            "the folder was moved or replaced, or one of its files was removed, while it was in use",
        ))
    }

    /// Waits until there is room for another group. Each call tries at least once to write an overdue snapshot, with the rows and the
    /// version that `newest` returns.
    pub fn make_room(&mut self, newest: impl Fn() -> (Rows, u64)) -> Result<(), Unwritten> {
        self.note_opening()?;
        while self.is_overdue() {
            if self.snapshots().is_writing {
                self.wait();
                continue;
            }
            let (root, version) = newest();
            let begun = self.begin_snapshot(&root, version, false);
            let error = begun.err().or_else(|| self.snapshots().error.take().map(io::Error::other));
            let Some(error) = error else { continue };
            let since = *self.waiting_since.get_or_insert_with(Instant::now);
            if !self.options.has_threads || since.elapsed() >= self.options.no_room_wait {
                return Err(Unwritten::NoRoom(error));
            }
            thread::sleep(SNAPSHOT_PAUSE);
        }
        self.waiting_since = None;
        Ok(())
    }

    /// Writes the changes of a group, all or nothing, and waits until they are on disk. After [`Unwritten::Failed`] no further group may be
    /// written.
    pub fn persist(&mut self, staged: &Staged) -> Result<(), Unwritten> {
        let mut keys: Vec<_> = staged.keys().collect();
        keys.sort_unstable();
        keys.dedup();
        let appended = self.journal.append(Kind::Commit, staged.version, |out| {
            let count = u32::try_from(keys.len())
                .expect("a group is in memory, and each of its rows takes many bytes");
            out.extend_from_slice(&count.to_be_bytes());
            for key in keys {
                record::append_row(out, key, staged.root.get(key));
            }
        });
        let appended = appended.and_then(|()| Ok(self.check_files()?));
        if let Err(Unwritten::Failed(_)) = &appended {
            self.abandon();
        }
        appended?;
        self.history.reached(staged.version);
        if self.is_snapshot_due()
            && let Err(error) = self.begin_snapshot(&staged.root, staged.version, self.options.has_threads)
        {
            // The group is on disk nevertheless, and later groups can still be written.
            tracing::warn!(%error, "could not begin a new journal; the current one continues");
            self.snapshots().due_at = self.retry_at();
        }
        Ok(())
    }

    /// Locks the state of the snapshots. No code that holds the lock panics.
    fn snapshots(&self) -> parking_lot::MutexGuard<'_, Snapshots> {
        self.snapshots.lock()
    }

    /// Returns the length of the journals since the snapshot.
    fn journals_len(&mut self) -> u64 {
        if std::mem::take(&mut self.snapshots.lock().is_finished) {
            self.sealed_len = 0;
        }
        self.sealed_len + self.journal.end
    }

    /// Returns the length of the journals at which a snapshot is due.
    fn due_at(&self) -> u64 {
        self.options.journal_len_min.max(self.snapshots().len)
    }

    /// Returns the length of the journals at which to try again after a failure.
    fn retry_at(&mut self) -> u64 {
        self.journals_len() + self.due_at() / 4
    }

    /// Whether the next snapshot should be written.
    fn is_snapshot_due(&mut self) -> bool {
        let (len, due_at) = (self.journals_len(), self.due_at());
        let snapshots = self.snapshots.lock();
        !snapshots.is_writing && len >= due_at.max(snapshots.due_at)
    }

    /// Whether commits have to wait for the next snapshot.
    fn is_overdue(&mut self) -> bool {
        self.journals_len() >= 2 * self.due_at()
    }

    /// Begins the next journal, and writes the snapshot of `root` at `version`, which replaces the earlier journals: in a thread if
    /// `in_thread`, otherwise before this returns.
    fn begin_snapshot(&mut self, root: &Rows, version: u64, in_thread: bool) -> io::Result<()> {
        self.wait();
        // A journal without records was begun for a snapshot that failed, and is used for this one.
        if self.journal.has_records {
            self.begin_journal(version)?;
        }
        let mut snapshots = self.snapshots();
        (snapshots.is_writing, snapshots.error) = (true, None);
        drop(snapshots);
        let task = SnapshotTask {
            files: Arc::clone(&self.files),
            number: self.journal.number,
            root: root.clone(),
            version,
            history: self.history.clone(),
            retry_at: self.retry_at(),
            snapshots: Arc::clone(&self.snapshots),
            is_abandoned: Arc::clone(&self.is_abandoned),
        };
        if !in_thread {
            task.run();
            return Ok(());
        }
        let thread = thread::Builder::new().name("notibus-snapshot".to_owned());
        match thread.spawn(|| task.run()) {
            Ok(writing) => self.writing = Some(writing),
            Err(error) => {
                tracing::warn!(%error, "could not start a thread for a snapshot; the journals keep growing");
                let retry_at = self.retry_at();
                let mut snapshots = self.snapshots();
                (snapshots.is_writing, snapshots.due_at) = (false, retry_at);
            }
        }
        Ok(())
    }

    /// Begins the next journal, after `version`.
    fn begin_journal(&mut self, version: u64) -> io::Result<()> {
        let number = self.journal.number + 1;
        let next = match Journal::create(&*self.files, number, version, self.journal.end) {
            Ok(next) => next,
            Err(error) => {
                // The new journal may already have its name. In that case nothing may be added to the previous journal.
                match self.files.remove(&journal_name(number)) {
                    Err(missing) if missing.kind() == io::ErrorKind::NotFound => {}
                    removed => {
                        let removed = removed.and_then(|()| self.files.sync());
                        removed.inspect_err(|_| self.journal.seal())?;
                    }
                }
                return Err(error);
            }
        };
        self.sealed_len = self.journals_len();
        self.journal = next;
        Ok(())
    }

    /// Stops the snapshot that is being written, if any.
    fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
    }

    /// Waits for the snapshot that is being written, if any.
    fn wait(&mut self) {
        if let Some(writing) = self.writing.take()
            && writing.join().is_err()
        {
            tracing::error!("the thread that writes snapshots panicked");
            self.snapshots().is_writing = false;
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // End the snapshot that is being written: a folder that was closed cleanly has no unfinished one.
        self.abandon();
        self.wait();
    }
}

struct SnapshotTask {
    files: Arc<dyn Files>,
    number: u64,
    root: Rows,
    version: u64,
    /// The versions that the folder has used up to `version`.
    history: History,
    snapshots: Arc<Mutex<Snapshots>>,
    /// The length of the journals at which to try again after a failure.
    retry_at: u64,
    /// See [`Folder`].
    is_abandoned: Arc<AtomicBool>,
}

impl SnapshotTask {
    /// Writes the snapshot, and removes older files.
    fn run(self) {
        let Self { files, number, root, version, history, snapshots, retry_at, is_abandoned } = self;
        let written = write_snapshot(&*files, number, (&root, version), &history, &is_abandoned);
        let written = written.and_then(|(file, len)| {
            snapshots.lock().file = file;
            let names = Names::of(&*files)?;
            let old = names.snapshots.iter().filter(|n| **n < number).map(|n| snapshot_name(*n));
            for name in old.chain(names.journals.iter().filter(|n| **n < number).map(|n| journal_name(*n))) {
                files.remove(&name)?;
            }
            Ok(len)
        });
        let mut snapshots = snapshots.lock();
        snapshots.is_writing = false;
        match written {
            Ok(len) => {
                (snapshots.len, snapshots.due_at, snapshots.is_finished) = (len, 0, true);
                snapshots.is_said = false;
            }
            Err(error) => {
                if !std::mem::replace(&mut snapshots.is_said, true) {
                    tracing::warn!(%error, "could not write a snapshot; it will be tried again");
                }
                (snapshots.due_at, snapshots.error) = (retry_at, Some(error.to_string()));
            }
        }
    }
}

/// Locks the folder. Creates a store in an empty folder, and refuses a folder with anything but a store.
fn prepare(files: &dyn Files) -> Result<Lock, Refusal> {
    check_marker(files, BadSectors::Fail)?.undamaged()?;
    let lock = lock(files)?;
    if check_marker(files, BadSectors::Fail)?.undamaged()? == Marker::Finished {
        return Ok(lock);
    }
    // The folder is new, and must still exist after a power failure.
    files.sync_parents()?;
    let names = Names::of(files)?;
    if names.snapshots.is_empty() {
        let is_new = match &names.journals[..] {
            [] => true,
            [1] => recover::read(files, BadSectors::Fail)?.version == 0,
            _ => false,
        };
        if !is_new {
            return Err(Refusal::damaged("it has lost its snapshot, and maybe rows; restore it from a copy"));
        }
        inspect::make(files, (&Rows::default(), 0), &History::default())?;
    } else {
        write_text(files, MARKER, FORMAT)?;
    }
    Ok(lock)
}

fn lock(files: &dyn Files) -> Result<Lock, Refusal> {
    for tries in 1.. {
        match files.lock()? {
            Some(lock) => return Ok(lock),
            None if tries == LOCK_TRIES => break,
            // A process that checks whether the folder is open holds the lock for a moment.
            None => thread::sleep(LOCK_PAUSE),
        }
    }
    Err(Refusal::in_use("it is open in another process, or by another handle of this one"))
}

fn refuse_damage(contents: &Contents) -> Result<(), Refusal> {
    match &contents.damages[..] {
        [] => Ok(()),
        [first, rest @ ..] => {
            let more =
                if rest.is_empty() { String::new() } else { format!(", and at {} other places", rest.len()) };
            Err(Refusal::damaged(format!("{first}{more}; restore it from a copy")))
        }
    }
}
