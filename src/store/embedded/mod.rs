//! The embedded engine: FoundationDB's semantics in one process.
//!
//! All rows are in a persistent ordered map. A reader takes the map as it is, in constant time, and keeps it; a commit
//! makes a new one that shares what it did not change. Commits are decided one after the other by [`core::Core`]. In
//! memory each caller commits by itself, under the lock that also hands out snapshots; with a folder, one thread commits
//! whatever waits as a group ([`disk`]), and holds that lock neither while it writes nor while it syncs.

mod atomic;
mod committer;
mod conflicts;
mod core;
mod disk;
mod overlay;
#[cfg(feature = "simulation")]
mod power;
mod scan;
mod transaction;
mod watches;

use std::{
    collections::HashSet,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures_util::future::BoxFuture;

#[cfg(feature = "simulation")]
pub(crate) use self::power::{Power, Step};
use self::{
    committer::{Committer, Failed, Worker},
    core::{Core, Outcome, Request, Root},
    disk::{Disk, Opened},
    transaction::EmbeddedTransaction,
};
use super::backend::{Backend, TransactionBackend};
use crate::{
    env::Env,
    error::{Error, Result, StoreError},
};

/// An embedded store.
pub(super) struct Engine {
    /// The rows in memory.
    core: Arc<Mutex<Core>>,
    /// The clock.
    env: Env,
    /// The clock when the engine was made.
    started: Duration,
    /// Who commits.
    committing: Committing,
    /// Why it takes no more writes.
    failed: Arc<Failed>,
    /// Under which names it was used since it was opened.
    used: Mutex<HashSet<Vec<u8>>>,
}

/// Who commits.
enum Committing {
    /// Each caller by itself, in memory.
    Caller,
    /// The thread, if the store has a folder.
    Thread(Committer),
    /// Each caller by itself in a folder: a simulation has no threads.
    #[cfg(feature = "simulation")]
    Turns(Box<Mutex<Worker>>),
}

/// A shared engine, as a backend.
pub(crate) struct Embedded(Arc<Engine>);

/// A commit, done or under way.
enum Commit {
    /// It is decided.
    Done(Outcome),
    /// The thread will decide it.
    Waiting(BoxFuture<'static, Outcome>),
}

/// The version of a new store. FoundationDB's are never zero, and setting zero as a read version is an error.
const VERSION_FIRST: u64 = 1;

impl Engine {
    /// A store in memory.
    pub fn memory(env: Env) -> Embedded {
        let core = Arc::new(Mutex::new(Core::new(Root::new(), VERSION_FIRST)));
        let started = env.now();
        let failed = Arc::new(Failed::new());
        Embedded(Arc::new(Self {
            core,
            env,
            started,
            committing: Committing::Caller,
            failed,
            used: Mutex::default(),
        }))
    }

    /// The store in the folder `path`.
    pub fn open(path: &Path, env: Env) -> Result<Embedded> {
        let Opened { disk, root, version } = Disk::open(path)?;
        let core = Arc::new(Mutex::new(Core::new(root, version.max(VERSION_FIRST))));
        let started = env.now();
        let failed = Arc::new(Failed::new());
        let worker = Worker::new(disk, Arc::clone(&core), env.clone(), started, Arc::clone(&failed));
        let committer = Committer::start(worker)
            .map_err(|error| Error::Open { path: path.to_owned(), reason: error.to_string() })?;
        Ok(Embedded(Arc::new(Self {
            core,
            env,
            started,
            committing: Committing::Thread(committer),
            failed,
            used: Mutex::default(),
        })))
    }

    /// The store in the folder `path` of a simulated machine, without a thread.
    #[cfg(feature = "simulation")]
    pub fn simulated(path: &Path, env: Env, power: Arc<dyn Power>) -> Result<Embedded> {
        let Opened { disk, root, version } = Disk::open(path)?;
        let core = Arc::new(Mutex::new(Core::new(root, version.max(VERSION_FIRST))));
        let started = env.now();
        let failed = Arc::new(Failed::new());
        let disk = disk.with_power(power);
        let worker = Worker::new(disk, Arc::clone(&core), env.clone(), started, Arc::clone(&failed));
        Ok(Embedded(Arc::new(Self {
            core,
            env,
            started,
            committing: Committing::Turns(Box::new(Mutex::new(worker))),
            failed,
            used: Mutex::default(),
        })))
    }

    /// Time since the engine was made.
    fn now(&self) -> Duration {
        self.env.now().saturating_sub(self.started)
    }

    /// The rows in memory.
    fn core(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    /// Commits `request`. One that writes nothing waits for nobody, and not for the disk.
    fn commit(&self, request: Request) -> Commit {
        if request.is_read_only() {
            let now = self.now();
            self.core().finish_reading(request.watches, now);
            return Commit::Done(Ok(None));
        }
        let mut outcomes = match &self.committing {
            Committing::Thread(committer) => return Commit::Waiting(Box::pin(committer.commit(request))),
            Committing::Caller => {
                let mut core = self.core();
                let now = self.now();
                let root = core.take_root();
                let staged = core.stage(root, vec![request], now);
                core.publish(staged, now)
            }
            #[cfg(feature = "simulation")]
            Committing::Turns(worker) => worker.lock().expect("no commit has panicked").commit(vec![request]),
        };
        Commit::Done(outcomes.pop().expect("one request has one outcome"))
    }
}

/// The rows in memory. A commit that panicked may have left them half changed; nothing may read those.
fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().expect("no commit has panicked")
}

#[cfg(feature = "simulation")]
impl Embedded {
    /// Closes the folder in order. Nothing can be committed any more.
    pub fn close(&self) {
        if let Committing::Turns(worker) = &self.0.committing {
            worker.lock().expect("no commit has panicked").close();
        }
    }
}

impl Backend for Embedded {
    fn begin(&self) -> Box<dyn TransactionBackend> {
        Box::new(EmbeddedTransaction::new(Arc::clone(&self.0)))
    }

    fn is_first_use(&self, name: &[u8]) -> bool {
        // A folder is open in one process at a time.
        matches!(self.0.committing, Committing::Thread(_))
            && self.0.used.lock().expect("no holder panics").insert(name.to_vec())
    }

    fn failure(&self) -> Option<StoreError> {
        self.0.failed.get()
    }

    fn failed(&self) -> BoxFuture<'static, StoreError> {
        let failed = Arc::clone(&self.0.failed);
        Box::pin(async move { failed.happened().await })
    }
}

#[cfg(feature = "simulation")]
#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::atomic::{AtomicBool, Ordering},
    };

    use super::*;
    use crate::store::{AtomicOp, Database, Isolation};

    /// A disk that fails to sync, once it is told to.
    #[derive(Default)]
    struct BadDisk(AtomicBool);

    impl Power for BadDisk {
        fn step(&self, step: Step) -> io::Result<()> {
            if step == Step::Sync && self.0.load(Ordering::Relaxed) {
                return Err(io::Error::from_raw_os_error(5));
            }
            Ok(())
        }
    }

    /// A store in a folder with a row, whose disk fails from now on.
    async fn failing(path: &Path) -> Database {
        let disk = Arc::new(BadDisk::default());
        let env = Env::system();
        let backend = Engine::simulated(path, env.clone(), Arc::clone(&disk) as Arc<dyn Power>).unwrap();
        let db = Database::over(Arc::new(backend), env);
        set(&db, b"before").await.unwrap();
        disk.0.store(true, Ordering::Relaxed);
        db
    }

    /// Sets a row.
    async fn set(db: &Database, key: &[u8]) -> Result<()> {
        db.run(async |tx| {
            tx.set(key, b"x");
            Ok(())
        })
        .await
    }

    /// Once, a commit whose sync had failed was answered as one that had not happened, although it was on the disk: a caller
    /// that tried again did it twice, and `run_once` promised that it had not been done.
    #[tokio::test]
    async fn a_commit_whose_sync_has_failed_may_have_happened() {
        let folder = tempfile::tempdir().unwrap();
        let db = failing(folder.path()).await;
        let add = async |tx: crate::store::Transaction| {
            tx.atomic(AtomicOp::Add, b"count", &1_u64.to_le_bytes());
            Ok(())
        };
        let error = db.run_once(add).await.unwrap_err();
        assert!(error.is_maybe_committed(), "{error}");
        assert!(!error.is_retryable(), "{error}");
        let error = set(&db, b"after").await.unwrap_err();
        assert_eq!(error.code(), Some(StoreError::IO_ERROR.code()), "nothing was tried of this one");
        drop(db);
        let db = Database::open_dir(folder.path()).unwrap();
        let rows = db.run(async |tx| {
            Ok((tx.get(b"count", Isolation::Snapshot).await?, tx.get(b"after", Isolation::Snapshot).await?))
        });
        let (count, after) = rows.await.unwrap();
        assert!(count.is_some(), "this one was on the disk indeed");
        assert!(after.is_none());
    }

    /// Once, transactions that only read waited for the thread that commits, and failed for ever after the disk had.
    #[tokio::test]
    async fn reading_goes_on_after_the_disk_has_failed_and_everybody_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let db = failing(folder.path()).await;
        let failed = tokio::spawn(db.failed());
        assert!(db.failure().is_none());
        set(&db, b"lost").await.unwrap_err();
        let found = db.run(async |tx| tx.get(b"before", Isolation::Serializable).await).await.unwrap();
        assert_eq!(found.as_deref(), Some(&b"x"[..]));
        assert_eq!(db.failure().unwrap().code(), Some(StoreError::IO_ERROR.code()));
        assert_eq!(failed.await.unwrap().code(), Some(StoreError::IO_ERROR.code()));
    }

    /// Once, nothing that the store does ever waited, so that a producer in a loop kept all other tasks of its thread from
    /// running: nodes missed their beats and gave up their leases.
    #[tokio::test]
    async fn a_writer_in_a_loop_leaves_others_their_turn() {
        let db = Database::memory();
        let writer = db.clone();
        let writing = tokio::spawn(async move {
            loop {
                set(&writer, b"key").await.unwrap();
            }
        });
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        writing.abort();
    }
}
