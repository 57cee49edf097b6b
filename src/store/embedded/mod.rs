//! The embedded engine: FoundationDB's semantics in one process.
//!
//! All rows are in a persistent ordered map. A reader takes the map as it is, in constant time, and keeps it; a commit
//! makes a new one that shares what it did not change. Commits are decided one after the other by [`core::Core`]. In
//! memory each caller commits by itself, under the lock that also hands out snapshots; with a folder, one thread commits
//! whatever waits as a group ([`folder`]), and holds that lock neither while it writes nor while it syncs.

mod atomic;
mod committer;
mod conflicts;
mod core;
mod folder;
mod overlay;
mod scan;
#[cfg(test)]
mod tests;
mod transaction;
mod watches;

use std::{
    collections::HashSet,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures_util::future::BoxFuture;

pub(crate) use self::folder::{Access, File, Files, FolderOptions, History, Lock};
pub use self::folder::{Damage, FolderReport};
pub(super) use self::folder::{Look, SystemFiles, copy_to, look};
use self::{
    committer::{Committer, Failed, Worker},
    core::{Core, Outcome, Request, Root},
    folder::{Folder, Opened},
    transaction::EmbeddedTransaction,
};
use super::backend::{Backend, TransactionBackend};
use crate::base::{
    env::Env,
    error::{Error, Result, StoreError},
};

/// An embedded store.
pub(crate) struct Engine {
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
    /// Which versions it had used before it was opened.
    history: History,
    /// Under which names it was used since it was opened.
    used: Mutex<HashSet<Vec<u8>>>,
}

/// Who commits.
enum Committing {
    /// Each caller by itself, in memory.
    Caller,
    /// The thread, if the store has a folder.
    Thread(Committer),
    /// Nobody: the store was opened to be read.
    Nobody,
    /// Each caller by itself in a folder: a simulation has no threads.
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

/// Where versions go on from: the wall clock, in microseconds, so that what a store has given out before is told from what it gives
/// out now. FoundationDB's are never zero, and setting zero as a read version is an error.
fn version_now(env: &Env) -> u64 {
    env.wall_ms().saturating_mul(1_000).max(1)
}

impl Engine {
    /// A store in memory.
    pub fn memory(env: Env) -> Embedded {
        let core = Arc::new(Mutex::new(Core::new(Root::new(), version_now(&env))));
        Embedded(Arc::new(Self::new(core, env, History::default(), |_, _| Committing::Caller)))
    }

    /// What `look` has found in a folder, to be read.
    pub fn reading(look: Look, env: Env) -> Embedded {
        let Look { root, history, report } = look;
        let core = Arc::new(Mutex::new(Core::new(root, report.version.max(1))));
        Embedded(Arc::new(Self::new(core, env, history, |_, _| Committing::Nobody)))
    }

    /// The store in the folder `path`.
    pub fn open(path: &Path, env: Env) -> Result<Embedded> {
        // The program may go to another folder.
        let path = std::path::absolute(path)
            .map_err(|error| Error::Open { path: path.to_owned(), reason: error.to_string() })?;
        Self::open_on(Arc::new(SystemFiles), &path, env, FolderOptions::default())
    }

    /// The store in the folder `path` of a disk.
    pub fn open_on(files: Arc<dyn Files>, path: &Path, env: Env, options: FolderOptions) -> Result<Embedded> {
        let Opened { folder, root, version, history } =
            Folder::open(files, path, options, version_now(&env))?;
        let core = Arc::new(Mutex::new(Core::new(root, version)));
        let mut started = Ok(());
        let engine = Self::new(Arc::clone(&core), env.clone(), history, |started_at, failed| {
            let worker = Worker::new(folder, core, env, started_at, failed);
            if !options.has_threads {
                return Committing::Turns(Box::new(Mutex::new(worker)));
            }
            match Committer::start(worker) {
                Ok(committer) => Committing::Thread(committer),
                Err(error) => {
                    started = Err(error);
                    Committing::Caller
                }
            }
        });
        started.map_err(|error| Error::Open { path: path.to_owned(), reason: error.to_string() })?;
        Ok(Embedded(Arc::new(engine)))
    }

    /// An engine of `core`, of which `committing` says who commits.
    fn new(
        core: Arc<Mutex<Core>>,
        env: Env,
        history: History,
        committing: impl FnOnce(Duration, Arc<Failed>) -> Committing,
    ) -> Self {
        let started = env.now();
        let failed = Arc::new(Failed::new());
        let committing = committing(started, Arc::clone(&failed));
        Self { core, env, started, committing, failed, history, used: Mutex::default() }
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
            Committing::Nobody => {
                let error = StoreError::DATABASE_LOCKED.with_detail("the folder was opened to be read");
                return Commit::Done(Err(error.of_failed_store()));
            }
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
    /// Which versions it had used before it was opened.
    pub fn history(&self) -> &History {
        &self.0.history
    }

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

    fn may_have_used(&self, version: u64) -> bool {
        self.0.history.contains(version) || self.0.core().has_used(version)
    }

    fn failure(&self) -> Option<StoreError> {
        self.0.failed.get()
    }

    fn failed(&self) -> BoxFuture<'static, StoreError> {
        let failed = Arc::clone(&self.0.failed);
        Box::pin(async move { failed.happened().await })
    }
}
