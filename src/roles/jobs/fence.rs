//! [`Fence`]: makes the transactions of cancelled work fail, and notes progress.

use std::{fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;

use crate::{
    base::{env::Env, error::Result},
    state::named_cursor::ScanMark,
    store::Transaction,
};

/// Makes the transactions of cancelled work fail. Clones belong to the same work.
///
/// Work is cancelled when its database is deleted, its trigger ends, or it has made no progress for too long. Then its future is
/// dropped, with all that it has started; but a commit that is on its way to the store may still happen after the job was
/// informed that the database is gone, and has cleaned up. A transaction that was checked cannot: it reads the mark of this work,
/// which is written again before the job is informed, and before any process begins the work again.
#[derive(Clone)]
pub struct Fence {
    /// Distinguishes this work from all other work on the database.
    mark: ScanMark,
    progress: Progress,
}

impl Fence {
    pub(super) fn new(mark: ScanMark, progress: Progress) -> Self {
        Self { mark, progress }
    }

    /// Makes `tx` fail if the work is cancelled before the commit. It reads one key, and counts as progress.
    ///
    /// Fails with [`Error::Cancelled`](crate::Error::Cancelled) if it was cancelled already.
    pub async fn check_in(&self, tx: &Transaction) -> Result<()> {
        self.mark.check_in(tx).await?;
        self.note_progress();
        Ok(())
    }

    /// Notes progress ([`TriggerOptions::stall_limit`](crate::jobs::TriggerOptions::stall_limit)).
    pub fn note_progress(&self) {
        self.progress.note();
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fence")
    }
}

/// When some work last made progress.
#[derive(Clone)]
pub(super) struct Progress {
    env: Env,
    at: Arc<Mutex<Duration>>,
}

impl Progress {
    pub fn new(env: &Env) -> Self {
        Self { env: env.clone(), at: Arc::new(Mutex::new(env.now())) }
    }

    pub fn note(&self) {
        *self.at.lock() = self.env.now();
    }

    /// Completes once there was no progress for `limit`.
    pub async fn stalled(&self, limit: Duration) {
        loop {
            let at = *self.at.lock();
            let rest = self.env.left_of(limit, at);
            if rest.is_zero() {
                return;
            }
            self.env.sleep(rest).await;
        }
    }
}
