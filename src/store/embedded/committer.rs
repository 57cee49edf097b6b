//! The thread that commits in groups.
//!
//! It takes all commits that wait, decides them as one group, writes the group with one `fdatasync`, publishes it and
//! answers. A commit is therefore on disk before anyone, its own caller included, can see it.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use tokio::sync::{mpsc, oneshot, watch};

use super::{
    core::{Core, Outcome, Request, lock},
    folder::Folder,
};
use crate::base::{env::Env, error::StoreError};

/// The most commits that wait for the thread; further ones wait for room.
const QUEUE_LEN_MAX: usize = 4_096;

/// The most commits of one group.
const GROUP_LEN_MAX: usize = 4_096;

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
            // The thread has taken the request, and may have written it to the disk.
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
            tracing::error!("the commit thread has panicked");
        }
    }
}

/// The error of a store that takes no more writes.
#[derive(Debug)]
pub(super) struct Failed(watch::Sender<Option<StoreError>>);

impl Failed {
    pub fn new() -> Self {
        Self(watch::Sender::new(None))
    }

    /// The error, once there is one.
    pub fn get(&self) -> Option<StoreError> {
        self.0.borrow().clone()
    }

    fn set(&self, error: StoreError) {
        self.0.send_replace(Some(error));
    }

    /// Completes when the store takes no more writes; never if it is closed before.
    pub async fn happened(&self) -> StoreError {
        let mut failed = self.0.subscribe();
        let error = failed.wait_for(Option::is_some).await.expect("the sender is here");
        error.clone().expect("it was just there")
    }
}

/// The state of the thread.
pub(super) struct Worker {
    folder: Folder,
    core: Arc<Mutex<Core>>,
    env: Env,
    /// The clock when the engine was made.
    started: Duration,
    /// The error after which no commit succeeds.
    failed: Arc<Failed>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        if thread::panicking() {
            self.failed.set(StoreError::IO_ERROR.with_detail("the commit thread has panicked"));
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
            jobs.push(job);
            while jobs.len() < GROUP_LEN_MAX
                && let Ok(job) = waiting.try_recv()
            {
                jobs.push(job);
            }
            let (group, answers): (Vec<_>, Vec<_>) = jobs.drain(..).unzip();
            for (answer, outcome) in answers.into_iter().zip(self.commit(group)) {
                // A caller that was dropped does not wait for its answer.
                let _ = answer.send(outcome);
            }
        }
        self.close();
    }

    /// Notes that the store is closed in order, unless it has failed.
    pub fn close(&mut self) {
        if self.failed.get().is_none()
            && let Err(error) = self.folder.close(lock(&self.core).version())
        {
            tracing::warn!(%error, "the store was not closed in order; its next opening cannot detect lost commits");
        }
    }

    /// Time since the engine was made.
    fn now(&self) -> Duration {
        self.env.now().saturating_sub(self.started)
    }

    /// Decides, persists and publishes one group.
    pub fn commit(&mut self, group: Vec<Request>) -> Vec<Outcome> {
        if let Some(error) = self.failed.get() {
            return group.iter().map(|_| Err(error.clone())).collect();
        }
        let staged = {
            let mut core = lock(&self.core);
            let root = core.share_root();
            core.stage(root, group, self.now())
        };
        // A commit that changes no row has a version, too: readers may know it, so the next opening must know it as
        // well.
        if staged.is_commit()
            && let Err(error) = self.folder.persist(&staged)
        {
            // Whether the group is on disk is unknown until the store is opened again; no later commit may build on
            // it.
            tracing::error!(%error, "the store's disk failed; it takes no more commits");
            self.failed.set(StoreError::IO_ERROR.with_detail(&error));
            let unknown = StoreError::COMMIT_UNKNOWN_RESULT
                .with_detail(format!("it may or may not be on disk: {error}"))
                .of_failed_store();
            return staged.outcomes.into_iter().map(|outcome| outcome.and(Err(unknown.clone()))).collect();
        }
        lock(&self.core).publish(staged, self.now())
    }
}
