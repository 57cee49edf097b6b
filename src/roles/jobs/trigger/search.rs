//! [`Search`]: which databases are gone without a trigger's having been told, found out some at a time.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;

use super::{
    is_gone,
    plan::{Plan, Work},
};
use crate::{
    base::{error::Result, event::Db},
    state::{context::Context, named_cursor::OpenCursor, notification_feed::NotificationFeed},
};

/// How many databases are looked up by one transaction.
const LOOK_UPS_MAX: usize = 64;

/// How many databases a step looks at.
const STEP_MAX: usize = 1_000;

/// How long it waits after the store could not be read.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// A search for databases that are gone: first among those of the plan, then among all that are marked.
#[derive(Default)]
pub(super) struct Search {
    /// Those of the plan that are still to be looked up; `None` before it has begun.
    planned: Option<Vec<Db>>,
    /// The last one of the marks that were looked at.
    last: Option<Db>,
    /// How many places in the plan the step that is under way may take.
    reserved: usize,
    /// The step that is under way.
    step: Option<BoxFuture<'static, Found>>,
}

/// What a step has found.
pub(super) struct Found {
    /// Databases that are gone.
    pub gone: Vec<Db>,
    /// The last of the databases that it has looked at; `None` if there were none.
    last: Option<Db>,
}

impl Search {
    /// Begins the next step, unless one is under way, or there is no room in the plan for what it may find.
    pub fn begin<W: Work>(
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

    /// How many places in the plan are kept for what it may find.
    pub fn reserved(&self) -> usize {
        self.reserved
    }

    /// The step that is under way.
    pub fn step(&mut self) -> Option<&mut BoxFuture<'static, Found>> {
        self.step.as_mut()
    }

    /// Takes in that the step has `found` something; whether that was the last one.
    pub fn end(&mut self, found: &Found) -> bool {
        self.step = None;
        // The steps through the plan take no place in it: what they look at is in it.
        let was_marks = std::mem::take(&mut self.reserved) > 0;
        if was_marks {
            self.last.clone_from(&found.last);
        }
        was_marks && found.last.is_none()
    }
}

/// What `read` returns, however often it takes.
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

/// Which of `dbs` are gone.
async fn find_gone(feed: &NotificationFeed, dbs: Vec<Db>) -> Result<Found> {
    let mut gone = Vec::new();
    for some in dbs.chunks(LOOK_UPS_MAX) {
        let names: Vec<_> = some.iter().map(|db| &db.name).collect();
        let rows = feed.newest_of_each(&names).await?;
        // Of a database whose row cannot be decoded nothing is known: it is not gone.
        let is_found_gone = |(db, row): &(&Db, &Result<_>)| {
            row.as_ref().is_ok_and(|row: &Option<_>| is_gone(db, row.as_ref()))
        };
        let found = some.iter().zip(&rows).filter(is_found_gone);
        gone.extend(found.map(|(db, _)| db.clone()));
    }
    Ok(Found { gone, last: dbs.last().cloned() })
}
