//! One attempt of a job: limits the time without progress, and parks the database after the last failure.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt;

use super::{
    TriggerJob,
    kind::{Ended, Failure, Kind, Turn},
    marks,
    plan::PlannedTask,
};
use crate::{
    base::{
        error::{Error, panic_text},
        event::Db,
    },
    roles::jobs::fence::Progress,
    state::{context::Context, keys::ParkedRow, named_cursor::OpenCursor},
};

pub(super) struct AttemptLimits {
    /// The number of the attempt, from 1 on.
    pub number: u32,
    /// Attempts after which the database is parked.
    pub attempts_max: u32,
    /// The longest time without progress.
    pub stall_limit: Duration,
    /// The parked row of the database, if it is parked.
    pub parked: Option<ParkedRow>,
}

/// Runs the job for `task`. Nothing of it runs any more when this has ended.
pub(super) async fn attempt<K: Kind>(
    context: Arc<Context>,
    kind: Arc<K>,
    cursor: OpenCursor,
    task: PlannedTask<K::Work>,
    terms: AttemptLimits,
) -> Ended {
    let progress = Progress::new(context.env());
    let turn = Turn { attempt: terms.number, is_retry: terms.parked.is_some(), progress: progress.clone() };
    let (db, is_gone, is_fresh) = match &task {
        PlannedTask::Gone(db) => (db.clone(), true, false),
        PlannedTask::Work(db, work) => (db.clone(), false, K::is_fresh(work)),
    };
    let work = async {
        match task {
            PlannedTask::Gone(db) => inform(&context, kind.job(), &cursor, db).await,
            PlannedTask::Work(db, work) => run(&context, &*kind, &cursor, (db, work, turn)).await,
        }
    };
    let (error, is_stuck) = match in_time(work, &progress, terms.stall_limit).await {
        Some(Ok(others)) => {
            if terms.parked.is_some() {
                cursor.unpark(&db).await?;
            }
            return Ok(others);
        }
        Some(Err(Failure::Job(error))) => (error, false),
        // No attempt can succeed.
        Some(Err(Failure::Store(error @ Error::Corrupt { .. }))) => (error.into(), false),
        Some(other) => return other,
        None => {
            context.stats.trigger_stuck.add(1);
            let reason = format!("it has made no progress for {:?}, and was cancelled", terms.stall_limit);
            (reason.into(), true)
        }
    };
    let is_last = is_stuck || terms.parked.is_some() || terms.number >= terms.attempts_max;
    if !is_last {
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

/// Marks a database, and runs the job for it.
async fn run<K: Kind>(
    context: &Arc<Context>,
    kind: &K,
    cursor: &OpenCursor,
    (db, work, turn): (Db, K::Work, Turn),
) -> Ended {
    let mark = marks::begin(context, cursor, &db, (&turn, K::is_fresh(&work))).await?;
    let (given, seen) = K::given(context, db, work, (mark.clone(), turn));
    kind.job().run(given).await.map_err(Failure::Job)?;
    let seen = seen.map_or(mark.position, |seen| *seen.lock());
    if seen > mark.position {
        mark.report(seen).await?;
    }
    Ok(Vec::new())
}

/// Calls [`TriggerJob::deleted`], then removes what the trigger has stored about the database.
async fn inform<W>(context: &Arc<Context>, job: &impl TriggerJob<W>, cursor: &OpenCursor, db: Db) -> Ended {
    if marks::lives(context, &db).await? {
        // The feed delivers it again.
        return Ok(Vec::new());
    }
    cursor.end_scan(&db).await?;
    job.deleted(db.clone()).await.map_err(Failure::Job)?;
    cursor.unmark(&db).await?;
    Ok(marks::find_gone(context, cursor, None, &db.name).await?)
}

/// Parks `db`; transactions of the attempt cannot commit any more.
async fn park(cursor: &OpenCursor, db: &Db, row: ParkedRow) -> Result<(), Failure> {
    if !row.is_gone {
        cursor.end_scan(db).await?;
    }
    Ok(cursor.park(db, &row).await?)
}

/// The result of `work`; a panic counts as a failure of the job. `None` if it made no progress for `limit`, and was dropped.
async fn in_time(work: impl Future<Output = Ended>, progress: &Progress, limit: Duration) -> Option<Ended> {
    let work = AssertUnwindSafe(work).catch_unwind();
    tokio::select! {
        ended = work => Some(ended.unwrap_or_else(|panic| {
            Err(Failure::Job(format!("it has panicked: {}", panic_text(&*panic)).into()))
        })),
        () = progress.stalled(limit) => None,
    }
}
