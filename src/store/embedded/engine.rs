//! [`Engine`]: the rows of an embedded store, and the path by which commits reach them.

use std::{
    collections::{HashSet, VecDeque},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, Weak},
    time::Duration,
};

use futures_util::future::BoxFuture;

use super::{
    committer::{Committer, Failed, Worker},
    core::{self, Core, Outcome, Request},
    folder::{Files, Folder, FolderTuning, History, Inspection, Opened, open_folder},
    rows::Rows,
};
use crate::{
    base::{
        env::Env,
        error::{Error, OpenCause, Result, StoreError},
    },
    store::{FolderOptions, TRANSACTION_LIFETIME},
};

pub(in crate::store) struct Engine {
    core: Arc<Mutex<Core>>,
    env: Env,
    /// When the engine was created, on the clock of `env`.
    started: Duration,
    committing: Committing,
    /// The error after which the store takes no more writes.
    failed: Arc<Failed>,
    /// The versions that the store used before it was opened.
    history: History,
    /// The names under which the store has been used since it was opened.
    used: Mutex<HashSet<Vec<u8>>>,
    holding: Mutex<Holding>,
}

/// The transactions that may hold a snapshot.
#[derive(Default)]
struct Holding {
    /// The transactions, each with the time of its snapshot; roughly in order, oldest first.
    transactions: VecDeque<(Duration, Weak<dyn Holds>)>,
    /// How many transactions were left after the last sweep of ended ones; the next sweep comes when there are twice as many.
    swept: usize,
}

/// Fewer transactions than this are not worth sweeping.
const HOLDING_MIN: usize = 256;

/// A transaction that gives back what it holds once it is too old.
pub(super) trait Holds: Send + Sync {
    /// Gives back what the transaction holds.
    fn give_back(&self);
}

enum Committing {
    /// Each caller commits its own transaction, in memory.
    Caller,
    /// A thread commits, because the store has a folder.
    Thread(Committer),
    /// No commit is possible, because the store was opened for reading.
    Nobody,
    /// Each caller commits its own transaction to a folder, because a simulation has no threads.
    Turns(Box<Mutex<Worker>>),
}

/// A commit, done or under way.
pub(super) enum Commit {
    Done(Outcome),
    /// The commit thread will decide the request.
    Waiting(BoxFuture<'static, Outcome>),
}

/// Returns the version to continue from: the wall clock in microseconds, so that this opening and earlier ones use different versions.
/// FoundationDB's versions are never zero, and setting zero as a read version is an error.
fn version_now(env: &Env) -> u64 {
    env.wall_ms().saturating_mul(1_000).max(1)
}

/// Returns the error for a store that could not be opened because of an error of the operating system.
fn failed(path: &Path, error: &std::io::Error) -> Error {
    Error::Open { path: path.to_owned(), cause: OpenCause::from(error), reason: error.to_string() }
}

impl Engine {
    /// Creates a store in memory.
    pub fn memory(env: Env) -> Self {
        let core = Arc::new(Mutex::new(Core::new(Rows::default(), version_now(&env))));
        Self::new(core, env, History::default(), |_, _| Committing::Caller)
    }

    /// Opens the content of a folder, as `inspect` found it, for reading.
    pub fn reading(inspection: Inspection, env: Env) -> Self {
        let Inspection { root, history, report } = inspection;
        let core = Arc::new(Mutex::new(Core::new(root, report.version.max(1))));
        Self::new(core, env, history, |_, _| Committing::Nobody)
    }

    /// Opens the store in the folder `path`.
    pub fn open(path: &Path, env: Env, options: &FolderOptions) -> Result<Self> {
        let tuning = FolderTuning { no_room_wait: options.no_room_wait, ..FolderTuning::default() };
        Self::open_on(open_folder(path, true)?, path, env, tuning)
    }

    /// Opens the store in the folder `path` of a disk, through `files`.
    pub fn open_on(files: Arc<dyn Files>, path: &Path, env: Env, options: FolderTuning) -> Result<Self> {
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
        started.map_err(|error| failed(path, &error))?;
        Ok(engine)
    }

    fn new(
        core: Arc<Mutex<Core>>,
        env: Env,
        history: History,
        committing: impl FnOnce(Duration, Arc<Failed>) -> Committing,
    ) -> Self {
        let started = env.now();
        let failed = Arc::new(Failed::new());
        let committing = committing(started, Arc::clone(&failed));
        let (used, holding) = Default::default();
        Self { core, env, started, committing, failed, history, used, holding }
    }

    /// Registers a transaction that holds a snapshot taken at `taken`. Makes transactions that are too old by now give back their
    /// snapshots, because each snapshot may hold a version of all rows, even if its transaction is never used again.
    pub(super) fn holds(&self, taken: Duration, transaction: Weak<dyn Holds>) {
        let now = self.now();
        let mut old = Vec::new();
        {
            let mut holding = self.holding.lock().expect("no holder panics");
            let Holding { transactions, swept } = &mut *holding;
            while let Some((_, transaction)) =
                transactions.pop_front_if(|(taken, _)| now.saturating_sub(*taken) > TRANSACTION_LIFETIME)
            {
                old.push(transaction);
            }
            if transactions.len() >= HOLDING_MIN.max(2 * *swept) {
                transactions.retain(|(_, transaction)| transaction.strong_count() > 0);
                *swept = transactions.len();
            }
            transactions.push_back((taken, transaction));
        }
        old.iter().filter_map(Weak::upgrade).for_each(|transaction| transaction.give_back());
    }

    /// Returns the time since the engine was created.
    pub fn now(&self) -> Duration {
        self.env.now().saturating_sub(self.started)
    }

    /// Forgets the watches on `key` that were dropped.
    pub(super) fn disarm(&self, key: &[u8]) {
        // After a panic no watch can fire any longer, and a drop must not panic.
        if let Ok(mut core) = self.core.lock() {
            core.watches.disarm(key);
        }
    }

    pub(super) fn core(&self) -> MutexGuard<'_, Core> {
        core::lock(&self.core)
    }

    /// Commits `request`. A request without writes waits neither for other commits nor for the disk.
    pub(super) fn commit(&self, request: Request) -> Commit {
        if request.is_read_only() {
            let now = self.now();
            self.core().finish_reading(request.watches, now);
            return Commit::Done(Ok(None));
        }
        let mut outcomes = match &self.committing {
            Committing::Thread(committer) => return Commit::Waiting(Box::pin(committer.commit(request))),
            Committing::Caller => {
                let mut core = self.core();
                core.commit(vec![request], self.now())
            }
            Committing::Nobody => {
                let error = StoreError::DATABASE_LOCKED.with_detail("the folder was opened for reading");
                return Commit::Done(Err(error.of_failed_store()));
            }
            Committing::Turns(worker) => worker.lock().expect("no commit has panicked").commit(vec![request]),
        };
        Commit::Done(outcomes.pop().expect("one request has one outcome"))
    }

    /// Whether `name` was not marked as used since the store was opened. False if other processes may have the store open, too.
    pub fn is_unused(&self, name: &[u8]) -> bool {
        // Only one process at a time can have a folder open.
        matches!(self.committing, Committing::Thread(_) | Committing::Turns(_))
            && !self.used.lock().expect("no holder panics").contains(name)
    }

    /// Marks `name` as used.
    pub fn mark_used(&self, name: &[u8]) {
        self.used.lock().expect("no holder panics").insert(name.to_vec());
    }

    /// Whether the store has given out `version`, in this opening or an earlier one.
    pub fn may_have_used(&self, version: u64) -> bool {
        let (first, last) = self.core().used();
        self.history.contains(version) || (first..=last).contains(&version)
    }

    /// Returns the version that a commit would get now.
    pub fn clock_version(&self) -> u64 {
        self.core().next_version(self.now())
    }

    /// Returns the versions that the store has given out, as one interval for each opening, oldest first.
    pub fn openings(&self) -> Vec<(u64, u64)> {
        let (mut openings, now) = (self.history.openings().to_vec(), self.core().used());
        // The history of a folder already contains the beginning of this opening.
        openings.retain(|(first, _)| *first < now.0);
        openings.push(now);
        openings
    }

    pub(super) fn failed(&self) -> &Arc<Failed> {
        &self.failed
    }

    /// The versions that the store used before it was opened.
    #[cfg(feature = "test-util")]
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Closes the folder cleanly. No commit succeeds afterwards.
    #[cfg(feature = "test-util")]
    pub fn close(&self) {
        if let Committing::Turns(worker) = &self.committing {
            worker.lock().expect("no commit has panicked").close();
        }
    }
}
