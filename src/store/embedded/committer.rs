//! The thread that commits in groups.
//!
//! The thread takes all waiting commits, decides them as one group, writes the group with one `fdatasync`, publishes it and answers. A
//! commit is therefore on disk before anyone, its own caller included, can see it.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use tokio::sync::{mpsc, oneshot, watch};

use super::{
    core::{self, Core, Outcome, Request, lock},
    folder::{Folder, Unwritten},
};
use crate::base::{env::Env, error::StoreError};

/// The maximum number of commits that wait for the thread; further ones wait for room in the queue.
const QUEUE_LEN_MAX: usize = 4_096;

/// The maximum number of commits in one group.
const GROUP_LEN_MAX: usize = 4_096;

/// A group with this many bytes takes no more commits. So a group stays smaller than the sum of this and the largest transaction.
const GROUP_BYTES_MAX: usize = 4 << 20;

/// A commit that waits for the thread.
type Job = (Request, oneshot::Sender<Outcome>);

/// The queue to the commit thread.
pub(super) struct Committer {
    /// The waiting commits; `None` once the engine closes.
    queue: Option<mpsc::Sender<Job>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Committer {
    /// Starts the thread.
    pub fn start(worker: Worker) -> std::io::Result<Self> {
        let (queue, waiting) = mpsc::channel(QUEUE_LEN_MAX);
        let thread =
            thread::Builder::new().name("notibus-commit".to_owned()).spawn(|| worker.run(waiting))?;
        Ok(Self { queue: Some(queue), thread: Some(thread) })
    }

    /// Commits `request` with the next group.
    pub fn commit(&self, request: Request) -> impl Future<Output = Outcome> + Send + use<> {
        let queue = self.queue.clone().expect("the queue is open as long as the engine");
        async move {
            let (answer, outcome) = oneshot::channel();
            let detail = "the commit thread has ended";
            queue.send((request, answer)).await.map_err(|_| StoreError::IO_ERROR.with_detail(detail))?;
            // The thread took the request, and may have written it to the disk.
            outcome
                .await
                .map_err(|_| StoreError::COMMIT_UNKNOWN_RESULT.with_detail(detail).of_failed_store())?
        }
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the commit thread panicked");
        }
    }
}

/// Why the store takes no writes, either permanently or at the moment.
#[derive(Debug)]
pub(super) struct Failed {
    last: watch::Sender<Option<StoreError>>,
    /// The error of the last commit, if there was no room for it.
    shortage: parking_lot::Mutex<Option<StoreError>>,
}

impl Failed {
    pub fn new() -> Self {
        Self { last: watch::Sender::new(None), shortage: parking_lot::Mutex::default() }
    }

    /// Returns the error after which no commit succeeds, once there is one.
    pub fn get(&self) -> Option<StoreError> {
        self.last.borrow().clone()
    }

    /// Returns the error of the last commit, if there was no room for it.
    pub fn shortage(&self) -> Option<StoreError> {
        self.shortage.lock().clone()
    }

    fn set(&self, error: StoreError) {
        self.last.send_replace(Some(error));
    }

    /// Completes with the error once the store takes no more writes; never if the store is closed before that.
    pub async fn happened(&self) -> StoreError {
        let mut failed = self.last.subscribe();
        let error = failed.wait_for(Option::is_some).await.expect("the sender is here");
        error.clone().expect("it was just there")
    }
}

/// The worker that writes groups of commits. The commit thread owns it; in a simulation, which has no threads, the callers share it.
pub(super) struct Worker {
    folder: Folder,
    core: Arc<Mutex<Core>>,
    env: Env,
    /// When the engine was created, on the clock of `env`.
    started: Duration,
    /// The error after which no commit succeeds.
    failed: Arc<Failed>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        if thread::panicking() {
            self.failed.set(StoreError::IO_ERROR.with_detail("the commit thread panicked"));
        }
    }
}

impl Worker {
    pub fn new(
        folder: Folder,
        core: Arc<Mutex<Core>>,
        env: Env,
        started: Duration,
        failed: Arc<Failed>,
    ) -> Self {
        Self { folder, core, env, started, failed }
    }

    /// Commits groups until the engine closes.
    fn run(mut self, mut waiting: mpsc::Receiver<Job>) {
        let mut jobs = Vec::new();
        while let Some(job) = waiting.blocking_recv() {
            let mut bytes = job.0.size;
            jobs.push(job);
            while jobs.len() < GROUP_LEN_MAX
                && bytes < GROUP_BYTES_MAX
                && let Ok(job) = waiting.try_recv()
            {
                bytes += job.0.size;
                jobs.push(job);
            }
            let (group, answers): (Vec<_>, Vec<_>) = jobs.drain(..).unzip();
            for (answer, outcome) in answers.into_iter().zip(self.commit(group)) {
                // A caller that was dropped no longer waits for its answer.
                let _ = answer.send(outcome);
            }
        }
        self.close();
    }

    /// Records that the store was closed cleanly, unless it has failed.
    pub fn close(&mut self) {
        if self.failed.get().is_none()
            && let Err(error) = self.folder.close(lock(&self.core).version())
        {
            tracing::warn!(%error, "the store was not closed cleanly; its next opening cannot detect lost commits");
        }
    }

    /// Returns the time since the engine was created.
    fn now(&self) -> Duration {
        self.env.now().saturating_sub(self.started)
    }

    /// Decides, persists and publishes one group.
    pub fn commit(&mut self, group: Vec<Request>) -> Vec<Outcome> {
        if let Some(error) = self.failed.get() {
            return group.iter().map(|_| Err(error.clone())).collect();
        }
        let newest = || {
            let core = lock(&self.core);
            (core.share_root(), core.version())
        };
        if let Err(unwritten) = self.folder.make_room(newest) {
            let error = self.unwritten(unwritten, "the commit was not tried");
            return group.into_iter().map(|request| request.fail(&error)).collect();
        }
        let staged = core::stage(&self.core, group, self.now());
        // A commit that changes no row has a version, too. Readers may know that version, so the next opening must know it as well.
        if staged.is_commit()
            && let Err(unwritten) = self.folder.persist(&staged)
        {
            let is_unknown = matches!(unwritten, Unwritten::Failed(_));
            let error = self.unwritten(unwritten, "it may or may not be on disk");
            let unknown = StoreError::COMMIT_UNKNOWN_RESULT.with_detail(&error).of_failed_store();
            return staged.fail(&if is_unknown { unknown } else { error });
        }
        self.failed.shortage.lock().take();
        lock(&self.core).publish(staged, self.now())
    }

    /// Returns the error for a group that was not written, and records it.
    fn unwritten(&self, unwritten: Unwritten, state: &str) -> StoreError {
        match unwritten {
            Unwritten::NoRoom(error) => {
                let error = StoreError::NO_ROOM.with_detail(&error);
                if self.failed.shortage.lock().replace(error.clone()).is_none() {
                    tracing::error!(%error, "the store's disk is full; commits fail until there is room");
                }
                error
            }
            // Whether the group is on disk is unknown until the store is opened again; no later commit may build on it.
            Unwritten::Failed(error) => {
                tracing::error!(%error, "the store's disk failed; it takes no more commits");
                self.failed.set(StoreError::IO_ERROR.with_detail(&error));
                StoreError::IO_ERROR.with_detail(format!("{state}: {error}"))
            }
        }
    }
}
