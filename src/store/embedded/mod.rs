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
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures_util::future::BoxFuture;

#[cfg(feature = "simulation")]
pub(crate) use self::power::{Power, Step};
use self::{
    committer::Committer,
    core::{Core, Outcome, Request, Root},
    disk::{Disk, Opened},
    transaction::EmbeddedTransaction,
};
use super::backend::{Backend, TransactionBackend};
use crate::{
    env::Env,
    error::{Error, Result},
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
}

/// Who commits.
enum Committing {
    /// Each caller by itself, in memory.
    Caller,
    /// The thread, if the store has a folder.
    Thread(Committer),
    /// Each caller by itself in a folder: a simulation has no threads.
    #[cfg(feature = "simulation")]
    Turns(Box<Mutex<committer::Worker>>),
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
        Embedded(Arc::new(Self { core, env, started, committing: Committing::Caller }))
    }

    /// The store in the folder `path`.
    pub fn open(path: &Path, env: Env) -> Result<Embedded> {
        let Opened { disk, root, version } = Disk::open(path)?;
        let core = Arc::new(Mutex::new(Core::new(root, version.max(VERSION_FIRST))));
        let started = env.now();
        let committer = Committer::start(disk, Arc::clone(&core), env.clone(), started)
            .map_err(|error| Error::Open { path: path.to_owned(), reason: error.to_string() })?;
        Ok(Embedded(Arc::new(Self { core, env, started, committing: Committing::Thread(committer) })))
    }

    /// The store in the folder `path` of a simulated machine, without a thread.
    #[cfg(feature = "simulation")]
    pub fn simulated(path: &Path, env: Env, power: Arc<dyn Power>) -> Result<Embedded> {
        let Opened { disk, root, version } = Disk::open(path)?;
        let core = Arc::new(Mutex::new(Core::new(root, version.max(VERSION_FIRST))));
        let started = env.now();
        let worker = committer::Worker::new(disk.with_power(power), Arc::clone(&core), env.clone(), started);
        Ok(Embedded(Arc::new(Self {
            core,
            env,
            started,
            committing: Committing::Turns(Box::new(Mutex::new(worker))),
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

    /// Commits `request`.
    fn commit(&self, request: Request) -> Commit {
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
}
