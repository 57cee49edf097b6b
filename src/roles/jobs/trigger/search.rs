//! [`Search`]: finds databases that have gone without a delivery, a few at a time.

use std::sync::Arc;

use futures_util::future::BoxFuture;

use super::{
    FAILURE_PAUSE, LOOK_UPS_MAX, is_gone,
    plan::{Merge, Plan},
};
use crate::{
    base::{error::Result, event::Db},
    state::{context::Context, named_cursor::OpenCursor, notification_feed::NotificationFeed},
};

/// How many databases one step checks.
const STEP_MAX: usize = 1_000;

/// A search for gone databases: first among those of the plan, then among all marked ones.
#[derive(Default)]
pub(super) struct Search {
    /// Databases of the plan that are to be checked; `None` before the search begins.
    planned: Option<Vec<Db>>,
    /// The last marked database that was checked.
    last: Option<Db>,
    /// How much room of the plan the present step may take.
    reserved: usize,
    step: Option<BoxFuture<'static, Found>>,
}

/// The result of a step.
pub(super) struct Found {
    /// Databases that are gone.
    pub gone: Vec<Db>,
    /// The last database that was checked; `None` if there was none.
    last: Option<Db>,
}

impl Search {
    /// Begins the next step, unless one is under way, or the plan has no room for its results.
    pub fn begin<W: Merge>(
        &mut self,
        context: &Arc<Context>,
        cursor: &OpenCursor,
        plan: &Plan<W>,
        pending_max: usize,
    ) {
        if self.step.is_some() {
            return;
        }
        let planned = self.planned.get_or_insert_with(|| plan.living());
        let feed = NotificationFeed::new(Arc::clone(context), context.feed.clone());
        if !planned.is_empty() {
            let some = planned.split_off(planned.len().saturating_sub(STEP_MAX));
            let read = async move |_: usize| find_gone(&feed, some.clone()).await;
            self.step = Some(Box::pin(until_read(Arc::clone(context), 0, read)));
            return;
        }
        self.reserved = STEP_MAX.min(pending_max.saturating_sub(plan.len()));
        if self.reserved > 0 {
            let (cursor, last) = (cursor.clone(), self.last.clone());
            let read = async move |limit| find_gone(&feed, cursor.marked(last.as_ref(), limit).await?).await;
            self.step = Some(Box::pin(until_read(Arc::clone(context), self.reserved, read)));
        }
    }

    /// How much room of the plan is reserved for results.
    pub fn reserved(&self) -> usize {
        self.reserved
    }

    pub fn step(&mut self) -> Option<&mut BoxFuture<'static, Found>> {
        self.step.as_mut()
    }

    /// Receives the result of a step. Returns whether it was the last one.
    pub fn end(&mut self, found: &Found) -> bool {
        self.step = None;
        // Steps through the plan reserve no place: the databases that they check are in it.
        let was_marks = std::mem::take(&mut self.reserved) > 0;
        if was_marks {
            self.last.clone_from(&found.last);
        }
        was_marks && found.last.is_none()
    }
}

/// Repeats `read` until it succeeds.
async fn until_read(
    context: Arc<Context>,
    limit: usize,
    read: impl AsyncFn(usize) -> Result<Found>,
) -> Found {
    loop {
        match read(limit).await {
            Ok(found) => return found,
            Err(error) => {
                context.stats.health.complain(context.env(), "search for gone databases", &error);
                context.env().sleep(FAILURE_PAUSE).await;
            }
        }
    }
}

async fn find_gone(feed: &NotificationFeed, dbs: Vec<Db>) -> Result<Found> {
    let mut gone = Vec::new();
    for some in dbs.chunks(LOOK_UPS_MAX) {
        let names: Vec<_> = some.iter().map(|db| &db.name).collect();
        let rows = feed.newest_of_each(&names).await?;
        // A database whose row cannot be decoded may live, so it does not count as gone.
        let is_found_gone = |(db, row): &(&Db, &Result<_>)| {
            row.as_ref().is_ok_and(|row: &Option<_>| is_gone(db, row.as_ref()))
        };
        let found = some.iter().zip(&rows).filter(is_found_gone);
        gone.extend(found.map(|(db, _)| db.clone()));
    }
    Ok(Found { gone, last: dbs.last().cloned() })
}
