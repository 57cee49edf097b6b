//! [`Machine`]: the folder of a durable store, and the power that fails while commits are written to it.
//!
//! The store is the one that is used in production, with real files. When the power fails, they are copied as a disk would have
//! kept them: whatever was synced is there, and of what was written to the journal after that, a part. The store is opened on the
//! copy.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tempfile::TempDir;

use crate::{
    env::Env,
    error::{Error, Result},
    store::{Backend, Database, Embedded, Power, Step},
};

/// How the names of files end to which the store appends.
const JOURNAL: &str = "jnl";

/// How many bytes are read of a journal at once. No row of a world is so long, so as many zeros in a row are its end.
const CHUNK_LEN: usize = 16 * 1_024;

/// The folder of a durable store.
pub(super) struct Machine {
    /// What decides how far commits come.
    supply: Arc<Supply>,
    /// The store.
    store: Arc<Embedded>,
    /// The folder, which is removed with this.
    folder: TempDir,
    /// What its disk has made of that which was not synced when the power failed before.
    unsynced: Unsynced,
}

/// Bytes that were written and not synced when the power failed.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unsynced {
    /// How many of them were there all the same.
    pub kept: u64,
    /// How many were not.
    pub lost: u64,
}

/// The power of a machine.
struct Supply {
    /// The folder.
    folder: PathBuf,
    /// The changing part.
    state: Mutex<State>,
}

/// The changing part of a power supply.
#[derive(Default)]
struct State {
    /// Where it fails.
    fails_at: Option<Step>,
    /// Whether it has failed.
    has_failed: bool,
    /// Up to where each journal is synced.
    synced: BTreeMap<OsString, u64>,
}

impl Supply {
    /// The changing part. No code that holds the lock can leave it half changed by a panic.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note that everything that was written is on disk.
    fn synced(&self) -> io::Result<()> {
        let mut state = self.state();
        for name in journals(&self.folder)? {
            let from = state.synced.get(&name).copied().unwrap_or_default();
            let end = end_of(&self.folder.join(&name), from)?;
            state.synced.insert(name, end);
        }
        Ok(())
    }
}

impl Power for Supply {
    fn step(&self, step: Step) -> io::Result<()> {
        if step == Step::Answer {
            self.synced()?;
        }
        let mut state = self.state();
        state.has_failed |= state.fails_at == Some(step);
        if state.has_failed { Err(io::Error::other("the power has failed")) } else { Ok(()) }
    }
}

impl Machine {
    /// A machine with an empty store.
    pub fn new(env: Env) -> Result<Self> {
        let folder = TempDir::with_prefix("notibus-simulation").map_err(|error| failed(&error))?;
        Self::open(folder, env, Unsynced::default())
    }

    /// The machine with the store in `folder`.
    fn open(folder: TempDir, env: Env, unsynced: Unsynced) -> Result<Self> {
        let supply = Arc::new(Supply { folder: folder.path().to_owned(), state: Mutex::default() });
        let store = Database::folder_backend(folder.path(), env, Arc::<Supply>::clone(&supply))?;
        supply.synced().map_err(|error| failed(&error))?;
        Ok(Self { supply, store, folder, unsynced })
    }

    /// The store.
    pub fn store(&self) -> Arc<dyn Backend> {
        Arc::<Embedded>::clone(&self.store)
    }

    /// Lets the power fail when the next commit comes to `step`, or, with `None`, lets it stay.
    pub fn fail_at(&self, step: Option<Step>) {
        self.supply.state().fails_at = step;
    }

    /// Closes the store in order.
    pub fn close(&self) {
        self.store.close();
    }

    /// The machine after its power has come back. `random` decides what there is of that which was not synced.
    pub fn restarted(&self, random: &mut fastrand::Rng, env: Env) -> Result<Self> {
        let folder = TempDir::with_prefix("notibus-simulation").map_err(|error| failed(&error))?;
        let unsynced =
            self.copy(self.folder.path(), folder.path(), random).map_err(|error| failed(&error))?;
        Self::open(folder, env, unsynced)
    }

    /// What its disk has made of that which was not synced when the power failed before.
    pub fn unsynced(&self) -> Unsynced {
        self.unsynced
    }

    /// Copies `from` to `to`, as far as it is on disk.
    fn copy(&self, from: &Path, to: &Path, random: &mut fastrand::Rng) -> io::Result<Unsynced> {
        let mut unsynced = Unsynced::default();
        let mut entries = fs::read_dir(from)?.collect::<io::Result<Vec<_>>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let (source, target) = (entry.path(), to.join(entry.file_name()));
            if source.is_dir() {
                fs::create_dir(&target)?;
                let within = self.copy(&source, &target, random)?;
                unsynced.kept += within.kept;
                unsynced.lost += within.lost;
            } else if source.extension().is_some_and(|extension| extension == JOURNAL) {
                let synced = self.supply.state().synced.get(&entry.file_name()).copied().unwrap_or_default();
                let written = end_of(&source, synced)?;
                let kept = random.u64(synced..=written);
                unsynced.kept += kept - synced;
                unsynced.lost += written - kept;
                let mut bytes = Vec::new();
                let len = File::open(&source)?.take(kept).read_to_end(&mut bytes)?;
                fs::write(&target, &bytes[..len])?;
                // The space of a journal is there before its bytes are; what was not written is zero.
                if random.bool() {
                    File::options().write(true).open(&target)?.set_len(source.metadata()?.len())?;
                }
            } else {
                fs::copy(&source, &target)?;
            }
        }
        Ok(unsynced)
    }
}

/// The journals of the store in `folder`.
fn journals(folder: &Path) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == JOURNAL) {
            names.extend(path.file_name().map(ToOwned::to_owned));
        }
    }
    Ok(names)
}

/// Where the bytes of `journal` end, and the zeros that wait to be overwritten begin; not before `from`.
fn end_of(journal: &Path, from: u64) -> io::Result<u64> {
    let mut file = File::open(journal)?;
    file.seek(SeekFrom::Start(from))?;
    let (mut at, mut end) = (from, from);
    loop {
        let mut chunk = Vec::with_capacity(CHUNK_LEN);
        let len = Read::by_ref(&mut file).take(CHUNK_LEN as u64).read_to_end(&mut chunk)?;
        match chunk.iter().rposition(|byte| *byte != 0) {
            Some(last) => end = at + last as u64 + 1,
            None => return Ok(end),
        }
        at += len as u64;
    }
}

/// The files of a machine cannot be used.
fn failed(error: &io::Error) -> Error {
    Error::Open { path: std::env::temp_dir(), reason: error.to_string() }
}
