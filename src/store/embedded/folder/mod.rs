//! A store's folder: the rows on disk, and the files around them.
//!
//! All rows are in memory, so the disk is only written to until the folder is opened again: a [`journal`] that grows
//! by a record for each group of commits, and now and then a [`snapshot`] of all rows, which replaces the journals
//! before it.
//!
//! | file | content |
//! |---|---|
//! | `NOTIBUS_STORE` | the format; marks the folder as that of a store |
//! | `NOTIBUS_LOCK` | locked by the process that has the folder open |
//! | `NOTIBUS_CLOSED` | the version at which it was closed in order; gone while it is open |
//! | `snapshot-N` | all rows that are in the journals before journal N |
//! | `journal-N` | the commits since |
//! | `….new` | unfinished files of a process that ended; removed at the next opening |
//!
//! When the journals have grown to the length of the snapshot, the next journal begins. Then its snapshot is written
//! beside the commits, and older files are removed. So there may be several journals in a row.

mod damage;
mod files;
mod history;
mod inspect;
mod journal;
mod marker;
mod names;
mod record;
mod recover;
mod snapshot;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;

#[cfg(any(test, feature = "test-util"))]
pub(crate) use self::files::File;
pub(crate) use self::files::{Access, Files, Lock, SystemFiles};
pub(crate) use self::history::History;
pub(in crate::store) use self::inspect::{Inspection, copy_to, inspect};
use self::{
    damage::BadSectors,
    journal::Journal,
    marker::{CLOSED, FORMAT, LOCK, MARKER, Marker, Refusal, check_marker, write_text},
    names::Names,
    record::Kind,
    recover::Contents,
};
pub use self::{damage::Damage, inspect::FolderReport};
use super::{core::Staged, rows::Rows};
use crate::base::error::Result;

/// How often to try to lock a folder, and the pause between two tries.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

#[derive(Debug, Clone, Copy)]
pub(crate) struct FolderOptions {
    /// The least length of the journals before a snapshot is written, in bytes.
    pub journal_len_min: u64,
    /// Whether a thread writes snapshots. Otherwise commits wait for them.
    pub has_threads: bool,
}

impl Default for FolderOptions {
    fn default() -> Self {
        Self { journal_len_min: 16 << 20, has_threads: true }
    }
}

pub(super) struct Folder {
    files: Arc<dyn Files>,
    path: PathBuf,
    options: FolderOptions,
    journal: Journal,
    /// The versions that it has used.
    history: History,
    /// The length of the journals since the snapshot, without the last one.
    sealed_len: u64,
    snapshots: Arc<Mutex<Snapshots>>,
    writing: Option<thread::JoinHandle<()>>,
    /// Ends the writing of a snapshot, which nobody needs any more: a large one takes seconds.
    is_abandoned: Arc<AtomicBool>,
    /// Keeps other processes out. It is dropped last.
    _lock: Lock,
}

#[derive(Default)]
struct Snapshots {
    /// The length of the newest one.
    len: u64,
    /// Whether one is being written.
    is_writing: bool,
    /// The length of the journals at which the next one is due. Grows when one has failed.
    due_at: u64,
    /// Whether one was finished, and the journals before it were removed.
    is_finished: bool,
}

/// A folder that was opened, and its content.
pub(super) struct Opened {
    pub folder: Folder,
    /// All rows.
    pub root: Rows,
    /// The version to go on from.
    pub version: u64,
    /// The versions that it has used.
    pub history: History,
}

impl Folder {
    /// Opens the folder `path` of a disk, and creates it if it does not exist. Versions go on from `version`, or
    /// behind the used ones if they are later.
    pub fn open(files: Arc<dyn Files>, path: &Path, options: FolderOptions, version: u64) -> Result<Opened> {
        Self::try_open(files, path, options, version).map_err(|refusal| refusal.of(path))
    }

    fn try_open(
        files: Arc<dyn Files>,
        path: &Path,
        options: FolderOptions,
        version: u64,
    ) -> Result<Opened, Refusal> {
        let lock = prepare(&*files, path)?;
        let contents = recover::read(&*files, path, BadSectors::Fail)?;
        refuse_damage(&contents)?;
        let Contents { root, mut history, snapshot_len, sealed_len, last, leftovers, .. } = contents;
        let last = last.ok_or_else(|| Refusal::damaged("it has no journal; restore it from a copy"))?;
        let version = version.max(contents.version + 1);
        let open = || {
            let file = files.open(&path.join(journal::name(last.number)), Access::Write)?;
            let mut journal = Journal::resume(file, last.number, (last.begin, last.end))?;
            for name in leftovers {
                files.remove(&path.join(name))?;
            }
            journal.append(Kind::Opening, version, |_| {})?;
            history.opened(version);
            match files.remove(&path.join(CLOSED)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => files.sync_folder(path)?,
            }
            Ok(journal)
        };
        let journal = open()?;
        let snapshots = Arc::new(Mutex::new(Snapshots { len: snapshot_len, ..Snapshots::default() }));
        let path = path.to_owned();
        let folder = Self {
            files,
            path,
            options,
            journal,
            history: history.clone(),
            sealed_len,
            snapshots,
            writing: None,
            is_abandoned: Arc::default(),
            _lock: lock,
        };
        Ok(Opened { folder, root, version, history })
    }

    /// Notes that the store is closed in order at `version`.
    pub fn close(&mut self, version: u64) -> io::Result<()> {
        self.wait();
        write_text(&*self.files, &self.path, CLOSED, &version.to_string())
    }

    /// Writes the changes of a group, all or nothing, and waits until they are on disk. After an error no group may
    /// be written any more.
    pub fn persist(&mut self, staged: &Staged) -> io::Result<()> {
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
        appended.inspect_err(|_| self.abandon())?;
        self.history.reached(staged.version);
        if self.is_snapshot_due()
            && let Err(error) = self.begin_snapshot(&staged.root, staged.version)
        {
            // The group is on disk all the same, and later ones can be.
            tracing::warn!(%error, "no new journal could be begun; the present one goes on");
            self.snapshots().due_at = self.journals_len() + self.options.journal_len_min;
        }
        Ok(())
    }

    /// The state of the snapshots. No code that holds the lock panics.
    fn snapshots(&self) -> parking_lot::MutexGuard<'_, Snapshots> {
        self.snapshots.lock()
    }

    /// The length of the journals since the snapshot.
    fn journals_len(&self) -> u64 {
        self.sealed_len + self.journal.end
    }

    /// Whether the next snapshot should be written.
    fn is_snapshot_due(&mut self) -> bool {
        let mut snapshots = self.snapshots.lock();
        if std::mem::take(&mut snapshots.is_finished) {
            self.sealed_len = 0;
        }
        let due_at = self.options.journal_len_min.max(snapshots.len).max(snapshots.due_at);
        !snapshots.is_writing && self.sealed_len + self.journal.end >= due_at
    }

    /// Begins the next journal, and has the snapshot of `root` at `version` written, which replaces the earlier
    /// journals.
    fn begin_snapshot(&mut self, root: &Rows, version: u64) -> io::Result<()> {
        let number = self.journal.number + 1;
        let next = Journal::create(&*self.files, &self.path, number, version, self.journal.end);
        let next = match next {
            Ok(next) => next,
            Err(error) => {
                // It may have its name already. Then nothing may be added to the previous journal.
                let path = self.path.join(journal::name(number));
                match self.files.remove(&path) {
                    Err(missing) if missing.kind() == io::ErrorKind::NotFound => {}
                    removed => removed
                        .and_then(|()| self.files.sync_folder(&self.path))
                        .inspect_err(|_| self.journal.seal())?,
                }
                return Err(error);
            }
        };
        self.sealed_len += self.journal.end;
        self.journal = next;
        self.wait();
        self.snapshots().is_writing = true;
        let task = SnapshotTask {
            files: Arc::clone(&self.files),
            path: self.path.clone(),
            number,
            root: root.clone(),
            version,
            history: self.history.clone(),
            snapshots: Arc::clone(&self.snapshots),
            retry_at: self.journals_len() + self.options.journal_len_min,
            is_abandoned: Arc::clone(&self.is_abandoned),
        };
        if self.options.has_threads {
            let thread = thread::Builder::new().name("notibus-snapshot".to_owned());
            match thread.spawn(|| task.run()) {
                Ok(writing) => self.writing = Some(writing),
                Err(error) => {
                    tracing::warn!(%error, "no thread could be started for a snapshot; the journals go on");
                    let retry_at = self.journals_len() + self.options.journal_len_min;
                    let mut snapshots = self.snapshots();
                    (snapshots.is_writing, snapshots.due_at) = (false, retry_at);
                }
            }
        } else {
            task.run();
        }
        Ok(())
    }

    /// Ends the writing of a snapshot.
    fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
    }

    /// Waits for the snapshot that is being written.
    fn wait(&mut self) {
        if let Some(writing) = self.writing.take()
            && writing.join().is_err()
        {
            tracing::error!("the thread that writes snapshots has panicked");
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // One that was closed in order has no unfinished snapshot.
        self.abandon();
        self.wait();
    }
}

struct SnapshotTask {
    files: Arc<dyn Files>,
    path: PathBuf,
    number: u64,
    root: Rows,
    version: u64,
    /// The versions that were used up to there.
    history: History,
    snapshots: Arc<Mutex<Snapshots>>,
    /// The length of the journals at which to try again after a failure.
    retry_at: u64,
    /// See [`Folder`].
    is_abandoned: Arc<AtomicBool>,
}

impl SnapshotTask {
    /// Writes it, and removes older files.
    fn run(self) {
        let Self { files, path, number, root, version, history, snapshots, retry_at, is_abandoned } = self;
        let written = snapshot::write(&*files, &path, number, (&root, version), &history, &is_abandoned);
        let written = written.and_then(|len| {
            let names = Names::of(&*files, &path)?;
            let old = names.snapshots.iter().filter(|n| **n < number).map(|n| snapshot::name(*n));
            for name in old.chain(names.journals.iter().filter(|n| **n < number).map(|n| journal::name(*n))) {
                files.remove(&path.join(name))?;
            }
            Ok(len)
        });
        let mut snapshots = snapshots.lock();
        snapshots.is_writing = false;
        match written {
            Ok(len) => (snapshots.len, snapshots.due_at, snapshots.is_finished) = (len, 0, true),
            Err(error) => {
                tracing::warn!(%error, "a snapshot was not finished; the journals go on without it");
                snapshots.due_at = retry_at;
            }
        }
    }
}

/// Creates the folder if it does not exist; refuses a folder with anything but a store. Locks it.
fn prepare(files: &dyn Files, path: &Path) -> Result<Lock, Refusal> {
    if files.is_file(path) {
        return Err(Refusal::unusable("it is a file; name a folder"));
    }
    files.make_folder(path)?;
    check_marker(files, path, BadSectors::Fail)?.undamaged()?;
    let lock = lock(files, path)?;
    if check_marker(files, path, BadSectors::Fail)?.undamaged()? == Marker::Finished {
        return Ok(lock);
    }
    // The folder is new: after a power failure it must still exist. Parent folders that may not be read are not ours.
    for parent in path.ancestors().skip(1) {
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        match files.sync_folder(parent) {
            Err(error) if error.kind() != io::ErrorKind::PermissionDenied => return Err(error.into()),
            _ => {}
        }
    }
    let names = Names::of(files, path)?;
    if names.snapshots.is_empty() {
        let is_new = match &names.journals[..] {
            [] => true,
            [1] => recover::read(files, path, BadSectors::Fail)?.version == 0,
            _ => false,
        };
        if !is_new {
            return Err(Refusal::damaged("it has lost its snapshot, and maybe rows; restore it from a copy"));
        }
        inspect::make(files, path, (&Rows::default(), 0), &History::default())?;
    } else {
        write_text(files, path, MARKER, FORMAT)?;
    }
    Ok(lock)
}

fn lock(files: &dyn Files, path: &Path) -> Result<Lock, Refusal> {
    for tries in 1.. {
        match files.lock(&path.join(LOCK))? {
            Some(lock) => return Ok(lock),
            None if tries == LOCK_TRIES => break,
            // A process that checks whether it is open holds the lock for a moment.
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
