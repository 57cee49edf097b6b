//! [`Updates`]: the rows of `_db_updates` as a feed reads them: from the store until it has caught up, then from the dispatcher's
//! ring. And [`Backwards`]: the same, newest first.
//!
//! Pages are read under the limit of the routers, so that a thousand clients that begin to read keep no subscriber waiting; and the
//! first one is read before the answer begins, which can still say that the client was away for too long. From there on a live
//! feed is a subscriber of the dispatcher like any other: it walks the ring by reference, and the bytes of a batch are made once
//! for all feeds that look alike.

use std::{sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;

use super::{
    Inner,
    page::{PageSize, cut_at},
    position::Position,
    row::{Items, Rows, items_of, look, write_row},
    stream::{Progress, Source},
    wire_format::{WireFormat, Writer},
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        event::Kinds,
        notification::Notification,
    },
    roles::dispatcher::{BatchSubscription, DeliveryBatch, Filter, Interruption},
    state::notification_feed::NotificationPage,
    store::Isolation,
};

/// The most rows that are read from the store at once.
const PAGE_ROWS: usize = 256;

/// How long a live feed pauses when the dispatcher could not read for it.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// A page, and up to where rows may have been dropped.
type Page = (NotificationPage, Sequence);

/// What a subscription gives next; `None` after its end.
type Item = Option<Result<DeliveryBatch, Interruption>>;

/// A read of the store in a task of its own: it goes on also while the client is slow, and gives back its turn.
struct Load(JoinHandle<Result<Page>>);

impl Load {
    /// Begins to read at most `limit` rows after `cursor`.
    fn begin(inner: &Arc<Inner>, cursor: Cursor, limit: usize) -> Self {
        let inner = Arc::clone(inner);
        Self(tokio::spawn(async move {
            let _turn = inner.reads.acquire().await.expect("the semaphore is never closed");
            let feed = &inner.feed;
            let read = async |tx| {
                let horizon = feed.raw();
                let horizon = horizon.horizon(&tx, Isolation::Snapshot);
                let (page, horizon) = tokio::join!(feed.page_in(&tx, cursor, limit), horizon);
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

/// What a client wants of the rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scope {
    /// Which kinds of events.
    pub kinds: Kinds,
    /// How many rows at most.
    pub limit: u64,
    /// Whether what follows is wanted, too.
    pub is_live: bool,
}

/// Where a live feed gets what comes.
struct Live {
    /// The dispatcher's batches.
    batches: BatchSubscription,
    /// What has come while the feed waited.
    arrived: Option<Item>,
    /// When it goes on after a failure.
    retry_at: Option<Duration>,
}

/// The rows of `_db_updates`, oldest first.
pub(super) struct Updates {
    /// What all feeds share.
    inner: Arc<Inner>,
    /// Which kinds of events are wanted.
    kinds: Kinds,
    /// Where to read on in the store.
    next: Position,
    /// Where the client stands.
    seq: Position,
    /// Whether the store was read to its end.
    is_caught_up: bool,
    /// Whether what follows is wanted.
    is_live: bool,
    /// How many rows are read at once.
    page_size: PageSize,
    /// What is being sent.
    current: Option<Rows>,
    /// What is being read.
    load: Option<Load>,
    /// What comes, once the feed has caught up and is live.
    live: Option<Box<Live>>,
}

impl Updates {
    /// The rows after `start`, of which nothing was read.
    fn new(inner: &Arc<Inner>, scope: Scope, start: Position) -> Self {
        Self {
            inner: Arc::clone(inner),
            kinds: scope.kinds,
            next: start,
            seq: start,
            is_caught_up: false,
            is_live: scope.is_live,
            page_size: PageSize::for_limit(PAGE_ROWS, scope.limit),
            current: None,
            load: None,
            live: None,
        }
    }

    /// The rows from now on.
    pub async fn from_now(inner: &Arc<Inner>, scope: Scope) -> Result<Self> {
        let now = Cursor::from(inner.feed.now().await?).into();
        Ok(Self { is_caught_up: true, ..Self::new(inner, scope, now) })
    }

    /// The rows after `start`. Fails as a read from there does.
    pub async fn after(inner: &Arc<Inner>, scope: Scope, start: Position) -> Result<Self> {
        let mut updates = Self::new(inner, scope, start);
        let page = Load::begin(inner, start.cursor, updates.page_size.rows()).done().await?;
        updates.turn(page);
        Ok(updates)
    }

    /// Sends this page next.
    fn turn(&mut self, (page, horizon): Page) {
        let NotificationPage { mut rows, mut next, .. } = page;
        let kept = self.page_size.keep(rows.iter().map(|row| size_of_row(row)));
        if kept < rows.len() {
            rows.truncate(kept);
            rows.shrink_to_fit();
            next = cut_at(self.next.cursor, next, rows[kept - 1].sequence);
        }
        self.current = Some(Rows::new(rows, self.next, next, horizon));
    }

    /// Writes rows that are in hand.
    fn write(&mut self, out: &mut Writer, limit: u64) {
        let Some(current) = &mut self.current else { return };
        current.write(self.kinds, out, limit);
        self.seq = current.position().unwrap_or(self.seq);
        if current.left() > 0 {
            return;
        }
        if self.live.is_none() {
            (self.next, self.is_caught_up) = (current.next(), current.is_complete());
        }
        self.current = None;
    }

    /// What comes after what was read.
    fn live(&mut self) -> &mut Live {
        let (dispatcher, cursor) = (&self.inner.dispatcher, self.next.cursor);
        self.live.get_or_insert_with(|| {
            let batches = dispatcher.subscribe(Filter::all()).caught_up_at(cursor).batches();
            Box::new(Live { batches, arrived: None, retry_at: None })
        })
    }

    /// Takes what has come. Returns how it goes on.
    fn take(&mut self, out: &mut Writer, limit: u64) -> Result<Progress> {
        let live = self.live();
        let arrived = match live.arrived.take() {
            None if live.retry_at.is_none() => live.batches.next().now_or_never(),
            arrived => arrived,
        };
        match arrived {
            None => return Ok(Progress::UpToDate),
            Some(Some(Ok(batch))) => self.turn_to(&batch, out, limit),
            // Asked again, it would get everything from nothing on, which the client has to know.
            Some(Some(Err(Interruption::Expired { horizon }))) => return Err(Error::Expired { horizon }),
            // Its position is of another history: no time will mend that.
            Some(Some(Err(Interruption::Failed(error @ Error::Invalid { .. })))) => return Err(error),
            Some(Some(Err(Interruption::Failed(error)))) => {
                let context = &self.inner.feed.context;
                context.stats.health.complain(context.env(), "catching up of a live feed", &error);
                let retry_at = self.inner.env().now() + FAILURE_PAUSE;
                self.live().retry_at = Some(retry_at);
            }
            // It did not begin with nothing, and does not skip.
            Some(Some(Err(Interruption::Synced { .. } | Interruption::Lagged { .. }))) => {}
            // Without a dispatcher it would wait in vain: the client asks again.
            Some(None) => return Ok(Progress::Over),
        }
        Ok(Progress::More)
    }

    /// Sends this batch next, as it looks to everybody if it does.
    fn turn_to(&mut self, batch: &DeliveryBatch, out: &mut Writer, limit: u64) {
        let is_shareable = out.form() != WireFormat::Array && out.rows() == 0;
        let shared = if is_shareable { look(batch, out.form(), self.kinds) } else { None };
        match shared.as_deref() {
            Some((_, Some(look))) if look.rows <= limit => {
                self.seq = look.position;
                out.share(look.bytes.clone(), look.rows);
            }
            _ => self.current = Some(Rows::of(batch)),
        }
    }
}

impl Source for Updates {
    type Position = Position;

    // CouchDB tells none here, and to count the rows of all databases would cost the more the more there are.
    const TELLS_PENDING: bool = false;

    async fn read(&mut self, out: &mut Writer, limit: u64) -> Result<Progress> {
        loop {
            self.write(out, limit);
            if out.rows() > 0 {
                // An array ends with what there was; it must not go on for as long as there is more.
                let is_enough =
                    out.form() == WireFormat::Array && self.is_caught_up && self.current.is_none();
                return Ok(if is_enough { Progress::UpToDate } else { Progress::More });
            }
            if let Some(load) = &mut self.load {
                let page = load.done().await;
                self.load = None;
                self.turn(page?);
            } else if !self.is_caught_up {
                self.load = Some(Load::begin(&self.inner, self.next.cursor, self.page_size.rows()));
            } else if !self.is_live {
                return Ok(Progress::Over);
            } else {
                match self.take(out, limit)? {
                    Progress::More => {}
                    progress => return Ok(progress),
                }
            }
        }
    }

    async fn wait(&mut self) {
        let inner = Arc::clone(&self.inner);
        let live = self.live();
        if let Some(retry_at) = live.retry_at {
            inner.env().sleep(retry_at.saturating_sub(inner.env().now())).await;
            live.retry_at = None;
        }
        live.arrived = Some(live.batches.next().await);
    }

    fn position(&self) -> Position {
        self.seq
    }
}

/// The rows of `_db_updates`, newest first, all of them.
pub(super) struct Backwards {
    /// What all feeds share.
    inner: Arc<Inner>,
    /// Which kinds of events are wanted.
    kinds: Kinds,
    /// Rows before it are read.
    before: Sequence,
    /// How many rows are read at once.
    page_size: PageSize,
    /// What was read and not sent, next one last.
    rows: Vec<Arc<Notification>>,
    /// What of the next one is not sent, next one last.
    items: Option<Items>,
    /// Whether there may be more to read.
    more: bool,
    /// The last row that was sent.
    last: Position,
}

impl Backwards {
    /// All rows, as far as the limit goes.
    pub fn new(inner: &Arc<Inner>, scope: Scope) -> Self {
        Self {
            inner: Arc::clone(inner),
            kinds: scope.kinds,
            before: Sequence::MAX,
            page_size: PageSize::for_limit(PAGE_ROWS, scope.limit),
            rows: Vec::new(),
            items: None,
            more: true,
            last: Cursor::NOTHING.into(),
        }
    }
}

impl Source for Backwards {
    type Position = Position;

    const TELLS_PENDING: bool = false;

    async fn read(&mut self, out: &mut Writer, limit: u64) -> Result<Progress> {
        if self.rows.is_empty() && self.more {
            let mut page = self.inner.feed.page_before(self.before, self.page_size.rows()).await?;
            let kept = self.page_size.keep(page.rows.iter().map(|row| size_of_row(row)));
            if kept < page.rows.len() {
                page.rows.truncate(kept);
                (page.to, page.more) = (page.rows[kept - 1].sequence, true);
            }
            (self.before, self.more) = (page.to, page.more);
            self.rows = page.rows;
            self.rows.reverse();
        }
        while let Some(row) = self.rows.last() {
            let items = self.items.get_or_insert_with(|| items_of(row, &Cursor::NOTHING, self.kinds, None));
            while let Some(item) = items.last() {
                if out.rows() >= limit || out.is_full() {
                    return Ok(Progress::More);
                }
                self.last = Cursor::from(row.sequence).into();
                write_row(out, row, item.kind(), &self.last);
                items.pop();
            }
            self.items = None;
            self.rows.pop();
        }
        Ok(if self.more { Progress::More } else { Progress::Over })
    }

    async fn wait(&mut self) {
        std::future::pending::<()>().await;
    }

    fn position(&self) -> Position {
        self.last
    }
}

/// About how many bytes of memory `row` takes.
fn size_of_row(row: &Notification) -> usize {
    size_of::<Notification>() + row.name.as_str().len()
}
