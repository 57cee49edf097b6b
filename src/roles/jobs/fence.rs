//! [`Fence`]: makes the transactions of work that was cancelled fail, and takes the signs that it goes on.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use crate::{
    base::{env::Env, error::Result},
    state::named_cursor::ScanMark,
    store::Transaction,
};

/// Makes the transactions of work that was cancelled fail. Clones are of the same work.
///
/// Work is cancelled when its database is deleted, its trigger ends, or it has shown no progress for too long. Its future is
/// dropped then, with all that it has started; but a commit that is on its way to the store may still happen, after the job was told
/// that the database is gone and has cleaned up. A transaction that was checked cannot: it reads the mark of this work, which is
/// written again before anybody is informed, and before the work is begun again, by whatever process.
#[derive(Clone)]
pub struct Fence {
    /// Tells this work from all other on the database.
    mark: ScanMark,
    /// When it last gave a sign that it goes on.
    progress: Progress,
}

impl Fence {
    /// The fence of the work of this mark.
    pub(super) fn new(mark: ScanMark, progress: Progress) -> Self {
        Self { mark, progress }
    }

    /// Makes `tx` fail if the work was cancelled, also between now and the commit. It reads one key, and is a sign of progress.
    ///
    /// Fails with [`Error::Cancelled`](crate::Error::Cancelled) if it was cancelled already.
    pub async fn check_in(&self, tx: &Transaction) -> Result<()> {
        self.mark.check_in(tx).await?;
        self.note_progress();
        Ok(())
    }

    /// Says that the work goes on ([`TriggerOptions::stall_limit`](crate::jobs::TriggerOptions::stall_limit)).
    pub fn note_progress(&self) {
        self.progress.note();
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fence")
    }
}

/// When some work last gave a sign that it goes on.
#[derive(Clone)]
pub(super) struct Progress {
    /// Time.
    env: Env,
    /// The time of the last sign.
    at: Arc<Mutex<Duration>>,
}

impl Progress {
    /// Work that begins now.
    pub fn new(env: &Env) -> Self {
        Self { env: env.clone(), at: Arc::new(Mutex::new(env.now())) }
    }

    /// Notes a sign.
    pub fn note(&self) {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = self.env.now();
    }

    /// Completes once there was none for `limit`.
    pub async fn stalled(&self, limit: Duration) {
        loop {
            let at = *self.at.lock().unwrap_or_else(PoisonError::into_inner);
            let rest = at.saturating_add(limit).saturating_sub(self.env.now());
            if rest.is_zero() {
                return;
            }
            self.env.sleep(rest).await;
        }
    }
}
