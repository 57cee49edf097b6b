//! [`Kind`]: what a trigger is for, and how its tasks end.

use std::{error::Error as StdError, sync::Arc};

use futures_util::future::BoxFuture;

use super::plan::Work;
use crate::{
    base::{error::Error, event::Db},
    roles::{dispatcher::Delivery, jobs::fence::Progress},
    state::named_cursor::OpenCursor,
};

/// Why a task has not done its part.
pub(in crate::roles::jobs) enum Failure {
    /// The job has failed.
    Job(Box<dyn StdError + Send + Sync>),
    /// What is kept with the cursor could not be read or written, which is no attempt of the job.
    Store(Error),
    /// It was not begun: the job has to be told first that these instances of the name are gone.
    Replaced(Vec<Db>),
    /// It was not begun: the database is parked, and is tried again in its turn.
    WasParked,
    /// The job has failed for the last time, and the database was parked.
    Parked {
        /// Why the job has failed.
        error: Box<dyn StdError + Send + Sync>,
        /// Whether because it has shown no progress.
        is_stuck: bool,
    },
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}

/// How a task ends: other instances of the name that it has found to be gone, of which the job was not told.
pub(in crate::roles::jobs) type Ended = Result<Vec<Db>, Failure>;

/// An attempt of a job.
pub(in crate::roles::jobs) struct Turn {
    /// Which one, from 1 on.
    pub attempt: u32,
    /// Whether the database was parked.
    pub is_retry: bool,
    /// Takes the signs that it goes on.
    pub progress: Progress,
}

/// What a trigger is for.
pub(in crate::roles::jobs) trait Kind: Send + Sync + 'static {
    /// What is to be done for a database.
    type Work: Work;

    /// Whether it wants to know which design documents have changed.
    const DDOCS: bool;

    /// What `delivery`, of a living database, asks for.
    fn work(&self, delivery: &Delivery) -> Self::Work;

    /// All that there can be to do for a database, which was created since it was worked on last if it `is_fresh`.
    fn all_work(is_fresh: bool) -> Self::Work;

    /// Whether the database was created since it was worked on last.
    fn is_fresh(work: &Self::Work) -> bool;

    /// Does it.
    fn run(
        self: Arc<Self>,
        cursor: OpenCursor,
        db: Db,
        work: Self::Work,
        turn: Turn,
    ) -> BoxFuture<'static, Ended>;

    /// Tells that a database is gone.
    fn deleted(self: Arc<Self>, cursor: OpenCursor, db: Db) -> BoxFuture<'static, Ended>;
}
