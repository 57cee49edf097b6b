//! [`Updates`]: the rows of `_db_updates` as a feed reads them: from the store until it has caught up, then from the hub.

use std::sync::Arc;

use tokio::{sync::watch, task::JoinHandle};

use super::{
    Inner,
    form::{Form, Writer},
    hub::Next,
    row::{Batch, Reading, kind_of, write_row},
    seq::Seq,
    stream::{Progress, Source},
};
use crate::{
    encoding::Sequence,
    error::{Error, Result},
    event::Kinds,
    feed::Cursor,
    notification::Notification,
    notification_feed::NotificationPage,
    store::Isolation,
};

/// How many rows are read from the store at once: what a client holds that does not read.
const PAGE_ROWS: usize = 512;

/// A page, and up to where rows may have been dropped.
type Page = (NotificationPage, Sequence);

/// A read of the store in a task of its own: it goes on also while the client is slow, and gives back its turn.
struct Load(JoinHandle<Result<Page>>);

impl Load {
    /// Begins to read after `cursor`.
    fn begin(inner: &Arc<Inner>, cursor: Cursor) -> Self {
        let inner = Arc::clone(inner);
        Self(tokio::spawn(async move {
            let _turn = inner.reads.acquire().await.expect("the semaphore is never closed");
            let feed = &inner.feed;
            let read = async |tx| {
                let horizon = feed.raw();
                let horizon = horizon.horizon(&tx, Isolation::Snapshot);
                let (page, horizon) = tokio::join!(feed.page_in(&tx, cursor, PAGE_ROWS), horizon);
                Ok((page?, horizon?))
            };
            feed.context.db.run(read).await
        }))
    }

    /// What was read. It is cancel safe.
    async fn done(&mut self) -> Result<Page> {
        (&mut self.0).await.unwrap_or_else(|error| Err(Error::corrupt("page", error.to_string())))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A batch that is being sent.
struct Current {
    /// The batch.
    batch: Arc<Batch>,
    /// The next row.
    place: usize,
    /// What the reader knew.
    since: Sequence,
    /// Where to go on after it.
    next: Cursor,
    /// Whether it is all that there was to read.
    is_complete: bool,
}

/// The rows of `_db_updates`, oldest first.
pub(super) struct Updates {
    /// What all feeds share.
    inner: Arc<Inner>,
    /// Which kinds of events are wanted.
    kinds: Kinds,
    /// Where to read on.
    cursor: Cursor,
    /// Where the client stands.
    seq: Seq,
    /// Whether the store was read to its end at the cursor, so that the hub has what follows.
    is_caught_up: bool,
    /// Whether what follows is wanted.
    is_live: bool,
    /// What is being sent.
    current: Option<Current>,
    /// What is being read.
    load: Option<Load>,
    /// Wakes when the hub has something.
    changes: watch::Receiver<u64>,
}

impl Updates {
    /// The rows from now on.
    pub async fn from_now(inner: &Arc<Inner>, kinds: Kinds, is_live: bool) -> Result<Self> {
        let now = inner.feed.now().await?;
        let changes = inner.hub.changes();
        let (cursor, seq) = (now.into(), Seq::plain(now));
        let inner = Arc::clone(inner);
        let (current, load) = (None, None);
        Ok(Self { inner, kinds, cursor, seq, is_caught_up: true, is_live, current, load, changes })
    }

    /// The rows after `seq`. Fails as a read from there does.
    pub async fn after(inner: &Arc<Inner>, kinds: Kinds, seq: Seq, is_live: bool) -> Result<Self> {
        let cursor = seq.cursor();
        let page = Load::begin(inner, cursor).done().await?;
        let changes = inner.hub.changes();
        let (inner, current, load) = (Arc::clone(inner), None, None);
        let mut updates =
            Self { inner, kinds, cursor, seq, is_caught_up: false, is_live, current, load, changes };
        updates.turn(page);
        Ok(updates)
    }

    /// Sends this page next.
    fn turn(&mut self, (page, horizon): Page) {
        let since = self.cursor.since();
        let began = self.cursor.began().unwrap_or(page.next.began().unwrap_or(page.to));
        let reading = Reading { since, began, horizon, is_complete: !page.more };
        let batch = Arc::new(Batch::new(page.rows, page.to, reading));
        self.current = Some(Current { batch, place: 0, since, next: page.next, is_complete: !page.more });
    }

    /// Writes rows of the current batch.
    fn write(&mut self, out: &mut Writer, limit: u64) {
        let Some(current) = &mut self.current else { return };
        current.place = current.batch.write(current.place, current.since, self.kinds, out, limit);
        let (place, rows) = (current.place, current.batch.len());
        if place < rows {
            self.seq = current.batch.seq(place - 1);
            return;
        }
        self.cursor = current.next;
        self.is_caught_up = current.is_complete;
        let batch = Arc::clone(&current.batch);
        self.seq = if current.is_complete { self.behind(&batch) } else { Seq::of(&current.next) };
        self.current = None;
    }

    /// Where a client stands that was told of a whole batch: at its last row, not at the end of what was read, so that the
    /// position stays while nothing happens.
    fn behind(&self, batch: &Batch) -> Seq {
        Seq::plain(batch.last().max(self.seq.cursor().position()))
    }

    /// Takes the next batch of the hub. Returns whether there was nothing to take.
    fn take(&mut self, out: &mut Writer, limit: u64) -> bool {
        self.changes.borrow_and_update();
        let position = self.cursor.position();
        let batch = match self.inner.hub.after(position) {
            Next::Batch(batch) => batch,
            Next::UpToDate => return true,
            Next::Behind => {
                self.is_caught_up = false;
                return false;
            }
        };
        let (place, next) = (batch.place_after(position), Cursor::from(batch.to));
        let is_whole = place == 0 && batch.since >= position && out.form() != Form::Array && out.rows() == 0;
        if is_whole {
            let look = batch.look(out.form(), self.kinds);
            if look.rows <= limit {
                self.cursor = next;
                self.seq = self.behind(&batch);
                out.share(look.bytes.clone(), look.rows);
                return false;
            }
        }
        let since = batch.since.max(position);
        self.current = Some(Current { batch, place, since, next, is_complete: true });
        false
    }
}

impl Source for Updates {
    async fn read(&mut self, out: &mut Writer, limit: u64) -> Result<Progress> {
        loop {
            self.write(out, limit);
            if out.rows() > 0 {
                let is_at_end = self.is_caught_up && self.current.is_none();
                // An array ends with what there was; it must not go on for as long as there is more.
                let is_enough = out.form() == Form::Array
                    || matches!(self.inner.hub.after(self.cursor.position()), Next::UpToDate);
                return Ok(if is_at_end && is_enough { Progress::UpToDate } else { Progress::More });
            }
            if let Some(load) = &mut self.load {
                let page = load.done().await;
                self.load = None;
                self.turn(page?);
            } else if !self.is_caught_up {
                self.load = Some(Load::begin(&self.inner, self.cursor));
            } else if !self.is_live {
                return Ok(Progress::Over);
            } else if self.take(out, limit) {
                return Ok(Progress::UpToDate);
            }
        }
    }

    async fn wait(&mut self) {
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    fn position(&self) -> Seq {
        self.seq
    }

    async fn pending(&mut self) -> Result<u64> {
        match &self.current {
            None if self.is_caught_up => Ok(0),
            Some(current) if current.is_complete => Ok((current.batch.len() - current.place) as u64),
            _ => self.inner.feed.pending(self.seq.cursor()).await,
        }
    }
}

/// The rows of `_db_updates`, newest first, down to where the client stands.
pub(super) struct Backwards {
    /// What all feeds share.
    inner: Arc<Inner>,
    /// Which kinds of events are wanted.
    kinds: Kinds,
    /// Where the client stands.
    since: Seq,
    /// Rows before it are read.
    before: Sequence,
    /// What was read and not sent, next one last.
    rows: Vec<Arc<Notification>>,
    /// Whether there may be more to read.
    more: bool,
    /// How many rows were looked at.
    seen: u64,
    /// The last row that was sent.
    last: Seq,
}

impl Backwards {
    /// The rows after `since`. Fails as a read from there does.
    pub async fn new(inner: &Arc<Inner>, kinds: Kinds, since: Option<Seq>) -> Result<Self> {
        let since = match since {
            Some(since) => {
                inner.feed.page(since.cursor(), 1).await?;
                since
            }
            None => Seq::plain(inner.feed.now().await?),
        };
        let inner = Arc::clone(inner);
        let (before, rows) = (Sequence::MAX, Vec::new());
        Ok(Self { inner, kinds, since, before, rows, more: true, seen: 0, last: since })
    }
}

impl Source for Backwards {
    async fn read(&mut self, out: &mut Writer, limit: u64) -> Result<Progress> {
        if self.rows.is_empty() && self.more {
            let page = self.inner.feed.page_before(self.before, PAGE_ROWS).await?;
            let until = self.since.cursor().position();
            self.before = page.to;
            self.more = page.more && page.to > until;
            self.rows = page.rows.into_iter().filter(|row| row.sequence > until).rev().collect();
        }
        let since = self.since.cursor().since();
        while out.rows() < limit
            && let Some(row) = self.rows.pop()
        {
            self.seen += 1;
            if let Some(kind) = kind_of(&row, since, self.kinds) {
                self.last = Seq::plain(row.sequence);
                write_row(out, &row, kind, &self.last);
            }
        }
        Ok(if self.rows.is_empty() && !self.more { Progress::Over } else { Progress::More })
    }

    async fn wait(&mut self) {
        std::future::pending::<()>().await;
    }

    fn position(&self) -> Seq {
        self.last
    }

    async fn pending(&mut self) -> Result<u64> {
        if self.rows.is_empty() && !self.more {
            return Ok(0);
        }
        Ok(self.inner.feed.pending(self.since.cursor()).await?.saturating_sub(self.seen))
    }
}
