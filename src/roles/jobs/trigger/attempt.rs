//! One attempt of a job: with a limit for how long it may show no progress, and what becomes of its database when it has failed.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt;

use super::{
    kind::{Ended, Failure, Kind, Turn},
    plan::Task,
};
use crate::{
    base::{
        error::{Error, panic_text},
        event::Db,
    },
    roles::jobs::fence::Progress,
    state::{context::Context, keys::ParkedRow, named_cursor::OpenCursor},
};

/// The terms of an attempt.
pub(super) struct AttemptLimits {
    /// Which attempt it is, from 1 on.
    pub number: u32,
    /// After how many the database is parked.
    pub attempts_max: u32,
    /// How long it may show no progress.
    pub stall_limit: Duration,
    /// What was parked, if it was.
    pub parked: Option<ParkedRow>,
}

/// Has the job do `task`. Of whatever it was at, nothing runs any more once this has ended.
pub(super) async fn attempt<K: Kind>(
    context: Arc<Context>,
    kind: Arc<K>,
    cursor: OpenCursor,
    task: Task<K::Work>,
    terms: AttemptLimits,
) -> Ended {
    let progress = Progress::new(context.env());
    let turn = Turn { attempt: terms.number, is_retry: terms.parked.is_some(), progress: progress.clone() };
    let (db, is_gone, is_fresh) = match &task {
        Task::Gone(db) => (db.clone(), true, false),
        Task::Work(db, work) => (db.clone(), false, K::is_fresh(work)),
    };
    let work = match task {
        Task::Gone(db) => kind.deleted(cursor.clone(), db),
        Task::Work(db, work) => kind.run(cursor.clone(), db, work, turn),
    };
    let (error, is_stuck) = match in_time(work, &progress, terms.stall_limit).await {
        Some(Ok(others)) => {
            if terms.parked.is_some() {
                cursor.unpark(&db).await?;
            }
            return Ok(others);
        }
        Some(Err(Failure::Job(error))) => (error, false),
        // No attempt will ever get over it.
        Some(Err(Failure::Store(error @ Error::Corrupt { .. }))) => (error.into(), false),
        Some(other) => return other,
        None => {
            context.stats.trigger_stuck.add(1);
            let reason = format!("it has shown no progress for {:?}, and was cancelled", terms.stall_limit);
            (reason.into(), true)
        }
    };
    if !is_stuck && terms.parked.is_none() && terms.number < terms.attempts_max {
        return Err(Failure::Job(error));
    }
    let row = ParkedRow {
        is_gone,
        is_fresh,
        is_asked: false,
        attempts: terms.number,
        retries: terms.parked.as_ref().map_or(0, |row| row.retries.saturating_add(1)),
        at_ms: context.env().wall_ms(),
        error: error.to_string(),
    };
    park(&cursor, &db, row).await?;
    Err(Failure::Parked { error, is_stuck })
}

/// Parks `db`, of which what the attempt has written is over.
async fn park(cursor: &OpenCursor, db: &Db, row: ParkedRow) -> Result<(), Failure> {
    if !row.is_gone {
        cursor.end_scan(db).await?;
    }
    Ok(cursor.park(db, &row).await?)
}

/// What `work` returns, a panic as a failure of the job; `None` if it has shown no progress for `limit`, and was dropped.
async fn in_time(work: impl Future<Output = Ended>, progress: &Progress, limit: Duration) -> Option<Ended> {
    let work = AssertUnwindSafe(work).catch_unwind();
    tokio::select! {
        ended = work => Some(ended.unwrap_or_else(|panic| {
            Err(Failure::Job(format!("it has panicked: {}", panic_text(&*panic)).into()))
        })),
        () = progress.stalled(limit) => None,
    }
}
