//! [`SimulatedDisk`]: a disk in memory that fails, fills up and loses its power. Shared by the tests of folders, the simulation, and the
//! fuzzer of folders.
//!
//! It can do everything that a disk may do with unsynced writes. Each page of a file may be as it was at the last sync, or as any later
//! write left it. The file may have its old length or a longer one. Of the name changes since the folder was synced, the first few may have
//! taken effect: none, all, or any number in between.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{
    collections::BTreeMap,
    fmt, io,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use notibus::{
    Result,
    store::{
        Env, FolderReport, Store,
        testing::{Access, DiskStore, File, Files, FolderTuning, Lock, check_on, open_on},
    },
};

/// An operation of a store on its disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskOperation {
    /// A file is opened.
    Open(String),
    /// These bytes of a file are read. The range may extend beyond the end of the file.
    Read(String, Range<u64>),
    /// This many bytes are written to a file.
    Write(String, usize),
    /// A file is truncated.
    Cut(String),
    /// A file is synced.
    Sync(String),
    /// A file gets this name.
    Rename(String),
    /// A file is removed.
    Remove(String),
    /// The names of the folder are synced.
    SyncFolder,
}

/// A fault in an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFault {
    /// The operation fails with this code of the operating system, and has no effect.
    Fails(i32),
    /// The operation takes effect, and fails with this code.
    FailsAfter(i32),
    /// A write takes at most this many bytes, and returns how many it took.
    Short(usize),
}

impl DiskFault {
    /// An input or output error: `EIO`.
    pub const IO: i32 = 5;
    /// Too many open files: `EMFILE`.
    pub const TOO_MANY_FILES: i32 = 24;
    /// No space left: `ENOSPC`.
    pub const FULL: i32 = 28;
}

/// The fate of unsynced pages after a power failure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unsynced {
    /// How many written pages survived.
    pub kept: u64,
    /// The number of written pages that were lost, or of which only an older version survived.
    pub lost: u64,
}

/// A disk in memory with one folder. Clones share it.
#[derive(Clone)]
pub struct SimulatedDisk {
    state: Arc<Mutex<State>>,
    /// The size of a page, in bytes.
    page_len: usize,
}

/// Decides about each operation.
type Plan = Box<dyn FnMut(&DiskOperation) -> Option<DiskFault> + Send>;

#[derive(Default)]
struct State {
    /// The files, by numbers that are never reused.
    files: Vec<Content>,
    /// The number of the file under each name.
    names: BTreeMap<String, usize>,
    /// `names` as it would be after a power failure that loses all `renames`.
    synced_names: BTreeMap<String, usize>,
    /// The changes of names that are not yet certain to be on disk, in order.
    renames: Vec<Naming>,
    is_locked: bool,
    /// The maximum total size of all files, in bytes; `None` for no limit.
    size: Option<usize>,
    plan: Option<Plan>,
}

#[derive(Clone)]
enum Naming {
    /// This file has this name, and no other one.
    Named(String, usize),
    /// Nothing has this name.
    Removed(String),
}

#[derive(Clone, Default)]
struct Content {
    /// The bytes as they are read now.
    bytes: Vec<u8>,
    /// The bytes as they were at the last sync.
    synced: Vec<u8>,
    /// The writes since the last sync, in order.
    writes: Vec<(usize, Vec<u8>)>,
}

impl State {
    /// Returns the total size of all files that have a name, in bytes.
    fn used(&self) -> usize {
        self.names.values().map(|file| self.files[*file].bytes.len()).sum()
    }
}

impl Naming {
    fn apply(&self, names: &mut BTreeMap<String, usize>) {
        match self {
            Self::Named(name, file) => {
                names.retain(|_, other| other != file);
                names.insert(name.clone(), *file);
            }
            Self::Removed(name) => _ = names.remove(name),
        }
    }
}

impl Content {
    fn write(&mut self, at: usize, bytes: &[u8]) {
        put(&mut self.bytes, at, bytes);
        self.writes.push((at, bytes.to_vec()));
    }

    /// Makes all writes durable.
    fn sync(&mut self) {
        self.synced.clone_from(&self.bytes);
        self.writes.clear();
    }

    /// Returns the content after a power failure; `choose` draws a number below its argument.
    fn torn(
        &self,
        page_len: usize,
        choose: &mut dyn FnMut(usize) -> usize,
        unsynced: &mut Unsynced,
    ) -> Vec<u8> {
        let mut torn = self.synced.clone();
        let len = self.writes.iter().map(|(at, bytes)| at + bytes.len()).max().unwrap_or(0).max(torn.len());
        // A page that was never written contains zeros.
        torn.resize(len, 0);
        for page in 0..len.div_ceil(page_len) {
            let range = page * page_len..((page + 1) * page_len).min(len);
            let touches = |at: usize, bytes: &[u8]| at < range.end && at + bytes.len() > range.start;
            let writes: Vec<_> = self.writes.iter().filter(|(at, bytes)| touches(*at, bytes)).collect();
            if writes.is_empty() {
                continue;
            }
            let kept = choose(writes.len() + 1);
            if kept == writes.len() {
                unsynced.kept += 1;
            } else {
                unsynced.lost += 1;
            }
            for (at, bytes) in &writes[..kept] {
                let (from, to) = (range.start.max(*at), range.end.min(at + bytes.len()));
                torn[from..to].copy_from_slice(&bytes[from - at..to - at]);
            }
        }
        // The length is any between the synced one and the present one, at the end of a page.
        let pages = len.div_ceil(page_len) - self.synced.len().div_ceil(page_len);
        let shorter = choose(pages + 2);
        let shortened = match shorter {
            0 => len,
            pages_less if pages_less <= pages => (len.div_ceil(page_len) - pages_less) * page_len,
            _ => self.synced.len(),
        };
        torn.truncate(shortened.max(self.synced.len()));
        torn
    }
}

fn put(target: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = at + bytes.len();
    if target.len() < end {
        target.resize(end, 0);
    }
    target[at..end].copy_from_slice(bytes);
}

impl SimulatedDisk {
    /// Makes an empty disk, which writes each page of `page_len` bytes as a whole.
    ///
    /// # Panics
    ///
    /// If `page_len` is zero.
    pub fn new(page_len: usize) -> Self {
        assert!(page_len > 0, "a page has bytes");
        Self { state: Arc::default(), page_len }
    }

    /// Opens the store on this disk.
    ///
    /// Fails as [`Store::open_dir`] does.
    pub fn open(&self) -> Result<Store> {
        Ok(self.open_with(Env::system(), FolderTuning::default())?.database)
    }

    /// Opens the store on this disk. It writes a snapshot, within the commit, each time its journals have this many bytes and are as long
    /// as the snapshot.
    ///
    /// Fails as [`Store::open_dir`] does.
    pub fn open_small(&self, journal_len_min: u64) -> Result<Store> {
        Ok(self.open_in(Env::system(), journal_len_min)?.database)
    }

    /// Like [`SimulatedDisk::open_small`], but in a process with this `env`.
    pub fn open_in(&self, env: Env, journal_len_min: u64) -> Result<DiskStore> {
        let options = FolderTuning { journal_len_min, has_threads: false, ..FolderTuning::default() };
        self.open_with(env, options)
    }

    /// Like [`SimulatedDisk::open_small`], but snapshots are written concurrently with commits.
    ///
    /// Fails as [`Store::open_dir`] does.
    pub fn open_with_threads(&self, journal_len_min: u64) -> Result<Store> {
        let no_room_wait = Duration::from_millis(200);
        let options = FolderTuning { journal_len_min, no_room_wait, has_threads: true };
        Ok(self.open_with(Env::system(), options)?.database)
    }

    fn open_with(&self, env: Env, tuning: FolderTuning) -> Result<DiskStore> {
        open_on(Arc::new(self.clone()), env, tuning)
    }

    /// Looks for damage, as [`Store::check_dir`] does.
    pub fn check(&self) -> Result<FolderReport> {
        check_on(self)
    }

    /// Lets `plan` decide about each operation; `None` lets the operation happen.
    pub fn plan(&self, plan: impl FnMut(&DiskOperation) -> Option<DiskFault> + Send + 'static) {
        self.state().plan = Some(Box::new(plan));
    }

    /// Removes the plan: no operation fails.
    pub fn mend(&self) {
        self.state().plan = None;
    }

    /// Sets the maximum total size of all files, in bytes; `None` for no limit. A write that needs more fails with [`DiskFault::FULL`].
    pub fn resize(&self, size: Option<usize>) {
        self.state().size = size;
    }

    /// Returns the total size of all files, in bytes.
    pub fn used(&self) -> usize {
        self.state().used()
    }

    /// Returns a copy of the disk without locks and plan: what another process finds after this one was killed, or a copy of an open
    /// folder.
    #[must_use]
    pub fn copied(&self) -> Self {
        let state = self.state();
        let copy = State {
            files: state.files.clone(),
            names: state.names.clone(),
            synced_names: state.synced_names.clone(),
            renames: state.renames.clone(),
            is_locked: false,
            size: state.size,
            plan: None,
        };
        Self { state: Arc::new(Mutex::new(copy)), page_len: self.page_len }
    }

    /// Returns the disk after a power failure. Each call of `choose` draws a number below its argument; the possible draws cover everything
    /// that can happen.
    #[must_use]
    pub fn after_power_failure(&self, mut choose: impl FnMut(usize) -> usize) -> (Self, Unsynced) {
        let state = self.state();
        let mut names = state.synced_names.clone();
        let kept = if state.renames.is_empty() { 0 } else { choose(state.renames.len() + 1) };
        state.renames[..kept].iter().for_each(|naming| naming.apply(&mut names));
        let mut unsynced = Unsynced::default();
        let mut files = vec![Content::default(); state.files.len()];
        for file in names.values() {
            let content = state.files[*file].torn(self.page_len, &mut choose, &mut unsynced);
            files[*file] = Content { bytes: content.clone(), synced: content, writes: Vec::new() };
        }
        let size = state.size;
        let left = State { files, synced_names: names.clone(), names, size, ..State::default() };
        (Self { state: Arc::new(Mutex::new(left)), page_len: self.page_len }, unsynced)
    }

    /// Returns the names of all files, in order.
    pub fn names(&self) -> Vec<String> {
        self.state().names.keys().cloned().collect()
    }

    /// Returns the content of a file; empty if the file does not exist.
    pub fn read(&self, name: &str) -> Vec<u8> {
        let state = self.state();
        state.names.get(name).map(|file| state.files[*file].bytes.clone()).unwrap_or_default()
    }

    /// Writes `bytes` as a synced file.
    pub fn write(&self, name: &str, bytes: &[u8]) {
        let mut state = self.state();
        let content = Content { bytes: bytes.to_vec(), synced: bytes.to_vec(), writes: Vec::new() };
        let file = state.files.len();
        state.files.push(content);
        let naming = Naming::Named(name.to_owned(), file);
        naming.apply(&mut state.names);
        naming.apply(&mut state.synced_names);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code that holds the lock panics")
    }

    /// Runs `happen`, which does `operation`, unless the plan decides otherwise.
    fn operate<T>(
        &self,
        operation: &DiskOperation,
        happen: impl FnOnce(&mut State, Option<usize>) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut state = self.state();
        let mut plan = state.plan.take();
        // The plan may panic, to kill the thread of the operation.
        drop(state);
        let fault = plan.as_mut().and_then(|plan| plan(operation));
        state = self.state();
        if state.plan.is_none() {
            state.plan = plan;
        }
        match fault {
            Some(DiskFault::Fails(code)) => Err(io::Error::from_raw_os_error(code)),
            Some(DiskFault::FailsAfter(code)) => {
                happen(&mut state, None)?;
                Err(io::Error::from_raw_os_error(code))
            }
            Some(DiskFault::Short(len)) => happen(&mut state, Some(len)),
            None => happen(&mut state, None),
        }
    }
}

impl fmt::Debug for SimulatedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedDisk").field("names", &self.names()).finish_non_exhaustive()
    }
}

fn not_found() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Files for SimulatedDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.names())
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Box<dyn File>> {
        let operation = DiskOperation::Open(name.to_owned());
        let file = self.operate(&operation, |state, _| match state.names.get(name).copied() {
            Some(file) if access != Access::Create => Ok(file),
            None if access != Access::Create => Err(not_found()),
            _ => {
                let file = state.files.len();
                state.files.push(Content::default());
                let naming = Naming::Named(name.to_owned(), file);
                naming.apply(&mut state.names);
                state.renames.push(naming);
                Ok(file)
            }
        })?;
        Ok(Box::new(SimulatedFile { disk: self.clone(), name: name.to_owned(), file }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.operate(&DiskOperation::Rename(to.to_owned()), |state, _| {
            let file = *state.names.get(from).ok_or_else(not_found)?;
            let naming = Naming::Named(to.to_owned(), file);
            naming.apply(&mut state.names);
            state.renames.push(naming);
            Ok(())
        })
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.operate(&DiskOperation::Remove(name.to_owned()), |state, _| {
            state.names.remove(name).ok_or_else(not_found)?;
            state.renames.push(Naming::Removed(name.to_owned()));
            Ok(())
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.operate(&DiskOperation::SyncFolder, |state, _| {
            state.synced_names = state.names.clone();
            state.renames.clear();
            Ok(())
        })
    }

    fn sync_parents(&self) -> io::Result<()> {
        Ok(())
    }

    fn lock(&self) -> io::Result<Option<Lock>> {
        let mut state = self.state();
        if std::mem::replace(&mut state.is_locked, true) {
            return Ok(None);
        }
        Ok(Some(Box::new(SimulatedLock { disk: self.clone() })))
    }

    fn is_locked(&self) -> io::Result<bool> {
        Ok(self.state().is_locked)
    }

    fn is_in_place(&self) -> io::Result<bool> {
        Ok(true)
    }
}

/// The lock on the folder.
struct SimulatedLock {
    disk: SimulatedDisk,
}

impl Drop for SimulatedLock {
    fn drop(&mut self) {
        self.disk.state().is_locked = false;
    }
}

struct SimulatedFile {
    disk: SimulatedDisk,
    /// The name of the file when it was opened.
    name: String,
    file: usize,
}

impl File for SimulatedFile {
    fn len(&mut self) -> io::Result<u64> {
        Ok(self.disk.state().files[self.file].bytes.len() as u64)
    }

    fn read_at(&mut self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let operation = DiskOperation::Read(self.name.clone(), at..at + buffer.len() as u64);
        self.disk.operate(&operation, |state, most| {
            let rest = state.files[self.file].bytes.get(at as usize..).unwrap_or_default();
            let len = rest.len().min(buffer.len()).min(most.unwrap_or(usize::MAX));
            buffer[..len].copy_from_slice(&rest[..len]);
            Ok(len)
        })
    }

    fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<usize> {
        let operation = DiskOperation::Write(self.name.clone(), bytes.len());
        self.disk.operate(&operation, |state, most| {
            let len = bytes.len().min(most.unwrap_or(usize::MAX));
            let grown = (at as usize + len).saturating_sub(state.files[self.file].bytes.len());
            if state.size.is_some_and(|size| state.used() + grown > size) {
                return Err(io::Error::from_raw_os_error(DiskFault::FULL));
            }
            state.files[self.file].write(at as usize, &bytes[..len]);
            Ok(len)
        })
    }

    fn cut(&mut self, len: u64) -> io::Result<()> {
        self.disk.operate(&DiskOperation::Cut(self.name.clone()), |state, _| {
            let content = &mut state.files[self.file];
            content.bytes.truncate(len as usize);
            content.sync();
            Ok(())
        })
    }

    fn sync(&mut self) -> io::Result<()> {
        self.disk.operate(&DiskOperation::Sync(self.name.clone()), |state, _| {
            state.files[self.file].sync();
            Ok(())
        })
    }

    fn has_name(&mut self) -> io::Result<bool> {
        Ok(self.disk.state().names.values().any(|file| *file == self.file))
    }
}

/// Opens a folder in which the first byte of `input` selects the file that has the other bytes. No input may make this panic.
pub fn open_with_file(input: &[u8]) {
    let (choice, bytes) = input.split_first().unwrap_or((&0, &[]));
    let disk = SimulatedDisk::new(64);
    drop(disk.open_small(1_000).expect("an empty disk can be used"));
    let disk = disk.copied();
    let names = disk.names();
    disk.write(&names[usize::from(*choice) % names.len()], bytes);
    drop(disk.open_small(1_000));
}
