//! [`Walker`]: a subscriber of everything or of a pattern. It walks the ring with a cursor of its own, and the feed while
//! it is behind the ring.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures_util::future::BoxFuture;
use tokio_stream::{Stream, wrappers::WatchStream};

use super::{
    Shared,
    filter::Filter,
    ring::{Batch, Next},
    subscribe::{Delivery, Interruption},
};
use crate::{
    bugs::{Bug, is_on},
    encoding::{Incarnation, Sequence, Versionstamp},
    error::{Error, Result},
    feed::Cursor,
};

/// The first position at which something may be known.
fn after_zero() -> Sequence {
    Sequence::new(Incarnation(0), Versionstamp::default(), 1)
}

/// A subscriber of everything or of a pattern.
pub(super) struct Walker {
    /// The ring and the feed.
    shared: Arc<Shared>,
    /// What it wants.
    filter: Filter,
    /// Whether it would rather skip what it has missed than catch up.
    skips: bool,
    /// Every row up to here was walked.
    cursor: Sequence,
    /// Everything that happened up to here was told. It stays behind the cursor while there are more pages to walk: a
    /// database of a later page may have had events that a row before the cursor would have told, had it not been
    /// superseded.
    known: Sequence,
    /// While the feed is to be read on before the ring is walked again: a position that could be read when this began. A
    /// row up to there has not moved meanwhile, so its database was not met on an earlier page.
    behind: Option<Sequence>,
    /// The batch that it is walking, and the place in it.
    batch: Option<(Arc<Batch>, usize)>,
    /// Wakes at new batches.
    pushes: WatchStream<Option<u64>>,
    /// A read of the feed that is under way.
    catch_up: Option<BoxFuture<'static, Result<(Batch, Cursor)>>>,
    /// Where the feed is read on, if the last page was not the last one.
    reading: Option<Cursor>,
}

impl Walker {
    /// A walker that knows everything up to `cursor`.
    pub fn new(shared: Arc<Shared>, filter: Filter, skips: bool, cursor: Sequence) -> Self {
        let pushes = WatchStream::from_changes(shared.ring.pushes());
        // Who starts ahead of the tail may be ahead of the store as well: the feed refuses it then.
        let behind = (cursor > shared.ring.position()).then_some(cursor);
        Self {
            shared,
            filter,
            skips,
            cursor,
            known: cursor,
            behind,
            batch: None,
            pushes,
            catch_up: None,
            reading: None,
        }
    }

    /// The next row of the current batch that matches.
    fn walk(&mut self) -> Option<Delivery> {
        let (batch, place) = self.batch.as_mut()?;
        while let Some(row) = batch.rows.get(*place) {
            *place += 1;
            if row.sequence <= self.cursor {
                continue;
            }
            self.cursor = row.sequence;
            let since = match self.behind {
                // Who knows nothing is not told of replaced instances; but it may know this database from an earlier page.
                Some(began) if row.sequence > began => self.known.max(after_zero()),
                _ => self.known,
            };
            if self.filter.matches(row) && self.filter.wants(row.news_since(since).kinds()) {
                return Some(Delivery::new(Arc::clone(row), since));
            }
        }
        self.cursor = self.cursor.max(batch.to);
        if batch.is_complete {
            self.known = self.known.max(batch.to);
            self.behind = None;
        }
        self.batch = None;
        None
    }

    /// Begins to read the feed after the cursor.
    fn catch_up(&mut self) {
        // The tail has read up to its position before, so whatever is read now reaches as far.
        self.behind.get_or_insert(self.shared.ring.position());
        self.catch_up =
            Some(Box::pin(read(Arc::clone(&self.shared), self.reading.take().unwrap_or(self.cursor.into()))));
    }

    /// The next delivery, or why there is none. `None` once the dispatcher has ended and everything was walked.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Delivery, Interruption>>> {
        loop {
            if let Some(delivery) = self.walk() {
                return Poll::Ready(Some(Ok(delivery)));
            }
            if let Some(read) = &mut self.catch_up {
                let read = ready!(read.as_mut().poll(context));
                self.catch_up = None;
                match read {
                    Ok((batch, next)) => {
                        self.reading = (!batch.is_complete).then_some(next);
                        self.batch = Some((Arc::new(batch), 0));
                    }
                    Err(Error::Expired { horizon }) => {
                        self.cursor = Sequence::ZERO;
                        self.known = Sequence::ZERO;
                        return Poll::Ready(Some(Err(Interruption::Expired { horizon })));
                    }
                    Err(error) => return Poll::Ready(Some(Err(Interruption::Failed(error)))),
                }
                continue;
            }
            let next = self.shared.ring.after(self.cursor);
            match next {
                _ if self.behind.is_some() && !self.shared.ring.is_closed() => self.catch_up(),
                Next::Behind(_) | Next::UpToDate if self.shared.ring.is_closed() => {
                    return Poll::Ready(None);
                }
                Next::Batch(batch) => {
                    let cursor = self.cursor;
                    let place = batch.rows.partition_point(|row| row.sequence <= cursor);
                    self.batch = Some((batch, place));
                }
                Next::Behind(to) if is_on(Bug::LaggardSkips) => self.cursor = to,
                Next::Behind(to) if self.skips => {
                    let from = std::mem::replace(&mut self.cursor, to);
                    self.known = to;
                    return Poll::Ready(Some(Err(Interruption::Lagged { from, to })));
                }
                Next::Behind(_) => self.catch_up(),
                Next::UpToDate => {
                    // Whatever the wake-up says, the ring knows better; a stream that has ended wakes no more.
                    if ready!(Pin::new(&mut self.pushes).poll_next(context)).is_none() {
                        return Poll::Ready(None);
                    }
                }
            }
        }
    }
}

/// Reads the feed after `cursor`, when it is this subscriber's turn. Returns what was read, and where to go on.
async fn read(shared: Arc<Shared>, cursor: Cursor) -> Result<(Batch, Cursor)> {
    let _turn = shared.catch_ups.acquire().await.expect("the semaphore is never closed");
    let page = shared.feed.page(cursor, shared.page_rows_max).await?;
    let batch = Batch { rows: page.rows, from: cursor.position(), to: page.to, is_complete: !page.more };
    Ok((batch, page.next))
}
