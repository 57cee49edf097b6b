//! The durable side: rows mirrored to a folder, and the thread that commits in groups.
//!
//! The thread takes all commits that wait, decides them as one group, writes the group with one `fdatasync`, publishes it
//! and answers. A commit is therefore on disk before anyone, its own caller included, can see it.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use bytes::Bytes;
use fjall::{KeyspaceCreateOptions, PersistMode};
use tokio::sync::{mpsc, oneshot};

use super::{
    core::{Core, Outcome, Request, Root, Staged},
    lock,
};
use crate::{
    encoding::Reader,
    env::Env,
    error::{Error, Result, StoreError},
};

/// Commits that can wait for the thread; further ones wait for a place.
const QUEUE_LEN_MAX: usize = 4_096;

/// The most commits of one group.
const GROUP_LEN_MAX: usize = 4_096;

/// The file that tells a store's folder from others.
const MARKER: &str = "NOTIBUS_STORE";

/// What the marker says: the format of the folder.
const FORMAT: &str = "1\n";

/// What the marker says until the folder has a version. An empty marker, left by a crash, says the same.
const FORMAT_UNFINISHED: &str = "1 unfinished\n";

/// The row of the store's own data: its version. It sorts before all others. A finished folder without it has lost rows.
const META_KEY: &[u8] = &[0];

/// Precedes each key in the folder, where an empty key cannot be stored.
const ROW_TAG: u8 = 1;

/// A commit on its way to the thread.
type Job = (Request, oneshot::Sender<Outcome>);

/// The rows of a folder.
pub(super) struct Disk {
    /// The folder's database.
    database: fjall::Database,
    /// Its only keyspace.
    rows: fjall::Keyspace,
}

/// What was found in a folder.
pub(super) struct Opened {
    /// For the thread that commits.
    pub disk: Disk,
    /// All rows.
    pub root: Root,
    /// The version of the newest commit.
    pub version: u64,
}

impl Disk {
    /// Opens the folder, and makes it if it does not exist.
    pub fn open(path: &Path) -> Result<Opened> {
        let fail = |reason: String| Error::Open { path: path.to_owned(), reason };
        let is_unfinished = prepare(path).map_err(&fail)?;
        let database = fjall::Database::builder(path).open().map_err(|error| fail(explain(&error)))?;
        let rows = database
            .keyspace("rows", KeyspaceCreateOptions::default)
            .map_err(|error| fail(explain(&error)))?;

        let mut root = Root::new();
        let mut version = None;
        for row in rows.iter() {
            let (key, value) = row.into_inner().map_err(|error| fail(explain(&error)))?;
            match key.split_first() {
                Some((&ROW_TAG, key)) => {
                    root.insert(Bytes::copy_from_slice(key), Bytes::copy_from_slice(&value));
                }
                _ if &key[..] == META_KEY => {
                    let mut reader = Reader::new("store version", &value);
                    version = Some(reader.u64().map_err(|error| fail(error.to_string()))?);
                    reader.finish().map_err(|error| fail(error.to_string()))?;
                }
                _ => {
                    return Err(fail(format!("damaged: it has a row under the unknown key {key:?}")));
                }
            }
        }
        if version.is_none() && !(is_unfinished && root.is_empty()) {
            let reason = "damaged: it has lost its version, and maybe rows; restore it from a copy";
            return Err(fail(reason.to_owned()));
        }
        let opened = Opened { disk: Self { database, rows }, root, version: version.unwrap_or(0) };
        if is_unfinished {
            let finished = opened.disk.write_version(opened.version);
            finished.map_err(|error| fail(explain(&error)))?;
            mark(path, FORMAT).map_err(&fail)?;
        }
        Ok(opened)
    }

    /// Writes the version alone, and waits until it is on disk.
    fn write_version(&self, version: u64) -> Result<(), fjall::Error> {
        self.rows.insert(META_KEY, version.to_be_bytes())?;
        self.database.persist(PersistMode::SyncAll)
    }

    /// Writes what a group has changed, all or nothing, and waits until it is on disk.
    fn persist(&self, staged: &Staged) -> Result<(), fjall::Error> {
        let mut batch = self.database.batch().durability(Some(PersistMode::SyncData));
        let mut keys: Vec<&Bytes> = staged.keys().collect();
        keys.sort_unstable();
        keys.dedup();
        for key in keys {
            let mut stored_key = Vec::with_capacity(key.len() + 1);
            stored_key.push(ROW_TAG);
            stored_key.extend_from_slice(key);
            match staged.root.get(key) {
                Some(value) => batch.insert(&self.rows, stored_key, &value[..]),
                None => batch.remove(&self.rows, stored_key),
            }
        }
        batch.insert(&self.rows, META_KEY, staged.version.to_be_bytes());
        batch.commit()
    }
}

/// Makes the folder if it does not exist; refuses one that holds anything but a store. True if it has yet to get a
/// version.
fn prepare(path: &Path) -> Result<bool, String> {
    let io = |error: std::io::Error| error.to_string();
    if path.exists() && !path.is_dir() {
        return Err("it is a file; name a folder".to_owned());
    }
    fs::create_dir_all(path).map_err(io)?;
    match fs::read_to_string(path.join(MARKER)) {
        Ok(format) if format == FORMAT => Ok(false),
        Ok(format) if format.is_empty() || format == FORMAT_UNFINISHED => Ok(true),
        Ok(format) => {
            Err(format!("its format is {:?}, this program knows {:?}", format.trim(), FORMAT.trim()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            if fs::read_dir(path).map_err(io)?.next().is_some() {
                return Err("it holds files but no store; name an empty folder".to_owned());
            }
            mark(path, FORMAT_UNFINISHED).map(|()| true)
        }
        Err(error) => Err(io(error)),
    }
}

/// Writes the marker. It and the folder must outlive a crash before the first commit does.
fn mark(path: &Path, format: &str) -> Result<(), String> {
    let marker = path.join(MARKER);
    fs::write(&marker, format)
        .and_then(|()| fs::File::open(&marker)?.sync_all())
        .and_then(|()| fs::File::open(path)?.sync_all())
        .map_err(|error| error.to_string())
}

/// What an error of the folder's database means to whoever opens it.
fn explain(error: &fjall::Error) -> String {
    match error {
        fjall::Error::Locked => "it is open in another process, or by another handle of this one".to_owned(),
        error => {
            format!("it cannot be read and is probably damaged; restore it from a copy ({error})")
        }
    }
}

/// The way to the thread that commits, and its end.
pub(super) struct Committer {
    /// Where commits wait; `None` once the engine closes.
    queue: Option<mpsc::Sender<Job>>,
    /// The thread.
    thread: Option<thread::JoinHandle<()>>,
}

impl Committer {
    /// Starts the thread.
    pub fn start(disk: Disk, core: Arc<Mutex<Core>>, env: Env, started: Duration) -> std::io::Result<Self> {
        let (queue, waiting) = mpsc::channel(QUEUE_LEN_MAX);
        let worker = Worker { disk, core, env, started, failed: None };
        let thread =
            thread::Builder::new().name("notibus-commit".to_owned()).spawn(|| worker.run(waiting))?;
        Ok(Self { queue: Some(queue), thread: Some(thread) })
    }

    /// Commits `request` with the next group.
    pub fn commit(&self, request: Request) -> impl Future<Output = Outcome> + Send + use<> {
        let queue = self.queue.clone().expect("the queue is open as long as the engine");
        async move {
            let (answer, outcome) = oneshot::channel();
            let gone = || StoreError::IO_ERROR.with_detail("the commit thread has ended");
            queue.send((request, answer)).await.map_err(|_| gone())?;
            outcome.await.map_err(|_| gone())?
        }
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the commit thread has panicked");
        }
    }
}

/// What the thread works with.
struct Worker {
    /// The rows on disk.
    disk: Disk,
    /// The rows in memory.
    core: Arc<Mutex<Core>>,
    /// The clock.
    env: Env,
    /// The clock when the engine was made.
    started: Duration,
    /// Why nothing can be committed any more.
    failed: Option<StoreError>,
}

impl Worker {
    /// Commits groups until the engine closes.
    fn run(mut self, mut waiting: mpsc::Receiver<Job>) {
        let mut jobs = Vec::new();
        while let Some(job) = waiting.blocking_recv() {
            jobs.push(job);
            while jobs.len() < GROUP_LEN_MAX
                && let Ok(job) = waiting.try_recv()
            {
                jobs.push(job);
            }
            let (group, answers): (Vec<_>, Vec<_>) = jobs.drain(..).unzip();
            for (answer, outcome) in answers.into_iter().zip(self.commit(group)) {
                // A caller that is gone does not wait for its answer.
                let _ = answer.send(outcome);
            }
        }
    }

    /// Time since the engine was made.
    fn now(&self) -> Duration {
        self.env.now().saturating_sub(self.started)
    }

    /// Decides, persists and publishes one group.
    fn commit(&mut self, group: Vec<Request>) -> Vec<Outcome> {
        if let Some(error) = &self.failed {
            return group.iter().map(|_| Err(error.clone())).collect();
        }
        let staged = {
            let mut core = lock(&self.core);
            let root = core.share_root();
            core.stage(root, group, self.now())
        };
        if staged.keys().next().is_some()
            && let Err(error) = self.disk.persist(&staged)
        {
            // Whether the group is on disk is open until the store is opened again; nothing may build on it.
            tracing::error!(%error, "the store's disk failed; it takes no more commits");
            self.failed = Some(StoreError::IO_ERROR.with_detail(&error));
            let unknown =
                StoreError::IO_ERROR.with_detail(format!("the commit may or may not be on disk: {error}"));
            return staged.outcomes.iter().map(|_| Err(unknown.clone())).collect();
        }
        lock(&self.core).publish(staged, self.now())
    }
}
