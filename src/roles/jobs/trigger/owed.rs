//! [`Owed`]: reads the names whose unfinished work the cursor has passed into the plan.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
};

use futures_util::future::{BoxFuture, try_join_all};

use super::{FAILURE_PAUSE, LOOK_UPS_MAX};
use crate::{
    base::{
        error::Result,
        event::{Db, DbName},
    },
    state::{context::Context, keys::OwedRow, named_cursor::OpenCursor, notification_feed::NotificationFeed},
};

/// How many names are read at once.
const PAGE_ROWS: usize = 500;

/// The owed work of a name.
pub(super) struct OwedDb {
    pub name: DbName,
    /// The living database, and whether it was created since the last work on it.
    pub living: Option<(Db, bool)>,
    /// Gone instances that were worked on, if no instance lives; if one does, its job finds them.
    pub gone: Vec<Db>,
}

/// The result of a read.
pub(super) enum Step {
    Names(Result<Vec<(DbName, OwedRow)>>),
    /// The owed work of some names, without those whose rows cannot be decoded.
    LookedUp(Result<Vec<OwedDb>>),
}

pub(super) struct Owed {
    /// Whether there are more names to read.
    is_reading: bool,
    /// The last name that was read.
    last: Option<DbName>,
    /// Names that are to be looked up.
    queue: VecDeque<(DbName, OwedRow)>,
    /// Names that are being looked up.
    looked_up: Vec<(DbName, OwedRow)>,
    /// The present read.
    step: Option<BoxFuture<'static, Step>>,
    /// Whether the last read has failed.
    has_failed: bool,
    /// Names that were removed from the list or listed again since the present read began.
    forgotten: BTreeSet<DbName>,
    /// Names of which the feed has delivered an end since their look-up began.
    outdated: BTreeSet<DbName>,
}

impl Owed {
    /// Begins with the first name.
    pub fn new() -> Self {
        let (last, queue, looked_up, step) = (None, VecDeque::new(), Vec::new(), None);
        let (forgotten, outdated) = (BTreeSet::new(), BTreeSet::new());
        Self { is_reading: true, last, queue, looked_up, step, has_failed: false, forgotten, outdated }
    }

    /// Whether there is nothing to read.
    pub fn is_idle(&self) -> bool {
        !self.is_reading && self.queue.is_empty() && self.step.is_none()
    }

    /// Begins with the first name again.
    pub fn read_again(&mut self) {
        (self.is_reading, self.last) = (true, None);
    }

    /// Begins the next read, if the plan has `places` free.
    pub fn begin(&mut self, context: &Arc<Context>, cursor: &OpenCursor, places: usize) {
        if self.step.is_some() || places == 0 {
            return;
        }
        let pause = self.has_failed.then(|| context.env().sleep(FAILURE_PAUSE));
        let (context, cursor) = (Arc::clone(context), cursor.clone());
        if !self.queue.is_empty() {
            let count = places.min(LOOK_UPS_MAX).min(self.queue.len());
            let some: Vec<_> = self.queue.drain(..count).collect();
            self.looked_up.clone_from(&some);
            self.step = Some(Box::pin(async move {
                if let Some(pause) = pause {
                    pause.await;
                }
                Step::LookedUp(look_up(context, &cursor, some).await)
            }));
        } else if self.is_reading {
            let last = self.last.clone();
            self.step = Some(Box::pin(async move {
                if let Some(pause) = pause {
                    pause.await;
                }
                Step::Names(cursor.named().owed(last.as_ref(), PAGE_ROWS).await)
            }));
        }
    }

    /// How much room of the plan is reserved for the names being looked up.
    pub fn reserved(&self) -> usize {
        self.looked_up.len()
    }

    /// The present read.
    pub fn step(&mut self) -> Option<&mut BoxFuture<'static, Step>> {
        self.step.as_mut()
    }

    /// Notes that `names` are removed from the list, or were listed again: results that were read before do not count.
    pub fn forget(&mut self, names: &[DbName]) {
        if names.is_empty() {
            return;
        }
        self.queue.retain(|(name, _)| !names.contains(name));
        if self.step.is_some() {
            self.forgotten.extend(names.iter().cloned());
        }
    }

    /// Notes that the feed has delivered the end of an instance of `name`. If the name is being looked up, the result may be older
    /// than that end, and nothing shows this once the job is informed. So the name is looked up again. A mere change causes no
    /// second look-up, so the look-ups come to an end.
    pub fn outdate(&mut self, name: &DbName) {
        if self.looked_up.iter().any(|(known, _)| known == name) {
            self.outdated.insert(name.clone());
        }
    }

    /// Receives the result of a read; returns owed work. Names for which `is_wanted` is true are looked up next. A read that has
    /// failed is repeated.
    pub fn end(&mut self, step: Step, mut is_wanted: impl FnMut(&DbName) -> bool) -> Result<Vec<OwedDb>> {
        self.step = None;
        let (looked_up, forgotten) =
            (std::mem::take(&mut self.looked_up), std::mem::take(&mut self.forgotten));
        let outdated = std::mem::take(&mut self.outdated);
        let counts = |name: &DbName| !forgotten.contains(name);
        self.has_failed = false;
        match step {
            Step::Names(Ok(page)) => {
                self.is_reading = page.len() == PAGE_ROWS;
                self.last = page.last().map(|(name, _)| name.clone());
                self.queue.extend(page.into_iter().filter(|(name, _)| counts(name) && is_wanted(name)));
                Ok(Vec::new())
            }
            Step::LookedUp(Ok(mut found)) => {
                found.retain(|owed| counts(&owed.name) && !outdated.contains(&owed.name));
                let again = |(name, _): &(DbName, OwedRow)| counts(name) && outdated.contains(name);
                self.queue.extend(looked_up.into_iter().filter(again));
                Ok(found)
            }
            Step::Names(Err(error)) | Step::LookedUp(Err(error)) => {
                self.has_failed = true;
                let counting = looked_up.into_iter().rev().filter(|(name, _)| counts(name));
                counting.for_each(|one| self.queue.push_front(one));
                Err(error)
            }
        }
    }
}

/// Reads the owed work of `names`.
async fn look_up(
    context: Arc<Context>,
    cursor: &OpenCursor,
    names: Vec<(DbName, OwedRow)>,
) -> Result<Vec<OwedDb>> {
    let feed = NotificationFeed::new(Arc::clone(&context), context.feed.clone());
    let only: Vec<_> = names.iter().map(|(name, _)| name).collect();
    let marked = try_join_all(only.iter().map(|name| cursor.marked_as(name)));
    let (rows, marked) = tokio::join!(feed.newest_of_each(&only), marked);
    let mut found = Vec::with_capacity(names.len());
    for (((name, owed), row), marked) in names.iter().zip(rows?).zip(marked?) {
        // If its row cannot be decoded, the name stays owed.
        let Ok(row) = row else { continue };
        let living = row.filter(|row| !row.is_deleted()).map(|row| row.db());
        let is_marked = living.as_ref().is_some_and(|db| marked.contains(db));
        let gone = if living.is_some() { Vec::new() } else { marked };
        let living = living.map(|db| (db, owed.is_fresh || !is_marked));
        found.push(OwedDb { name: name.clone(), living, gone });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name was listed, read and done; when it was removed from the list, what had been read of it before made the trigger believe
    /// that the store still listed it: the cursor passed what came for it since, which a crash then lost.
    #[test]
    fn what_was_read_of_a_name_before_it_was_removed_does_not_count() {
        let names: Vec<DbName> = ["a", "b", "c"].map(|name| DbName::new(name).unwrap()).into();
        let row = |name: &DbName| (name.clone(), OwedRow { is_fresh: false });
        let db = |name: &DbName| OwedDb { name: name.clone(), living: None, gone: Vec::new() };
        let mut owed = Owed::new();
        let reads = || -> Option<BoxFuture<'static, Step>> { Some(Box::pin(std::future::pending())) };
        owed.step = reads();
        owed.forget(&names[..1]);
        assert!(owed.end(Step::Names(Ok(names.iter().map(row).collect())), |_| true).unwrap().is_empty());
        owed.forget(&names[1..2]);
        assert_eq!(owed.queue.iter().map(|(name, _)| name).collect::<Vec<_>>(), [&names[2]]);
        owed.queue.clear();
        owed.step = reads();
        owed.looked_up = names.iter().map(row).collect();
        owed.forget(&names[..1]);
        let found = owed.end(Step::LookedUp(Ok(names.iter().map(db).collect())), |_| true).unwrap();
        assert_eq!(found.iter().map(|owed| &owed.name).collect::<Vec<_>>(), [&names[1], &names[2]]);
        owed.step = reads();
        owed.looked_up = names[..2].iter().map(row).collect();
        owed.forget(&names[..1]);
        let failed = Step::LookedUp(Err(crate::base::error::Error::invalid("read", "it fails")));
        owed.end(failed, |_| true).err().unwrap();
        assert_eq!(owed.queue.iter().map(|(name, _)| name).collect::<Vec<_>>(), [&names[1]]);
    }
}
