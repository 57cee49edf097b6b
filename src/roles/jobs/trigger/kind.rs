//! [`Kind`]: the kinds of triggers, and how their tasks end.

use std::{error::Error as StdError, sync::Arc};

use parking_lot::Mutex;

use super::{TriggerJob, plan::Merge};
use crate::{
    base::{cursor::Cursor, error::Error, event::Db},
    roles::{dispatcher::Delivery, jobs::fence::Progress},
    state::{context::Context, named_cursor::ScanMark},
};

/// Why a task has not finished.
pub(in crate::roles::jobs) enum Failure {
    Job(Box<dyn StdError + Send + Sync>),
    /// The state that is kept with the cursor could not be read or written. This is no attempt of the job.
    Store(Error),
    /// The task did not begin: the job has to be informed first that these instances of the name are gone.
    Replaced(Vec<Db>),
    /// The task did not begin: the database is parked, and is tried again in its turn; or this was its turn, and it is not parked
    /// any more.
    OutOfTurn,
    /// The job has failed for the last time, and the database was parked.
    Parked {
        /// Why the job has failed.
        error: Box<dyn StdError + Send + Sync>,
        /// Whether the reason is that it made no progress.
        is_stuck: bool,
    },
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}

/// The result of a task: instances of the name that it has found to be gone, and of which the job was not informed.
pub(in crate::roles::jobs) type Ended = Result<Vec<Db>, Failure>;

pub(in crate::roles::jobs) struct Turn {
    /// Its number, from 1 on.
    pub attempt: u32,
    /// Whether the database was parked.
    pub is_retry: bool,
    /// Notes the progress of the job.
    pub progress: Progress,
}

/// The position up to which the changes of a database count as seen once the job has succeeded.
pub(in crate::roles::jobs) type SeenCursor = Arc<Mutex<Cursor>>;

pub(in crate::roles::jobs) trait Kind: Send + Sync + 'static {
    type Work: Merge;
    type Given: Send + 'static;
    type Job: TriggerJob<Self::Given>;

    /// Whether it needs the changed design documents.
    const DDOCS: bool;

    fn job(&self) -> &Self::Job;

    /// The work for `delivery`, which is of a living database.
    fn work(delivery: &Delivery) -> Self::Work;

    /// All work that a database can need. `is_fresh` says that it was created since the last work on it.
    fn all_work(is_fresh: bool) -> Self::Work;

    /// Whether the database was created since the last work on it.
    fn is_fresh(work: &Self::Work) -> bool;

    /// The argument for work on `db` that has begun, and the position that counts as seen afterwards; `None` if this kind keeps
    /// no position.
    fn given(
        context: &Arc<Context>,
        db: Db,
        work: Self::Work,
        begun: (ScanMark, Turn),
    ) -> (Self::Given, Option<SeenCursor>);
}
