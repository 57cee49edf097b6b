//! `/_db_updates` says which databases were created, updated and deleted. [`Updates`] reads the rows of a feed: from the store until the
//! feed has caught up, then from the dispatcher's ring.
//!
//! The routers limit how many feeds read pages at once, so that a thousand new clients do not delay the subscribers. A feed reads its first
//! page before the answer begins, while the status can still say that the client was away for too long. Once it has caught up, a live feed
//! is a subscriber to the dispatcher like any other. It reads the ring by reference, and all feeds with the same format share the bytes of
//! a batch, chunk by chunk. Between two chunks a feed holds nothing of the batch. If the batch has left the ring when the client has room
//! again, the feed reads the rest from the store.

use std::sync::{Arc, Weak};

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{Method, request::Parts},
    routing::get,
};
use futures_util::FutureExt;
use tokio_stream::StreamExt;

use super::{
    Api, Failure, Inner,
    answer::{Answered, routes},
    api::Shared,
    caller::Permission,
    page::{Load, PageSize, cut_at},
    query::{Mode, Query, Topic},
    row::{Rendering, Rows, Wanted, render},
    stream::{METHODS, Progress, Source, answer, tag},
    wire_format::{WireFormat, Writer},
};
use crate::{
    base::{
        cursor::{Cursor, Start},
        encoding::Sequence,
        error::{Error, Result},
        notification::Notification,
    },
    roles::dispatcher::{BatchItem, BatchSubscription, DeliveryBatch, Filter, Item},
    state::notification_feed::NotificationPage,
    store::Isolation,
};

/// The maximum number of rows in one read.
const PAGE_ROWS: usize = 256;

/// A page, and the horizon when the page was read.
type Page = (NotificationPage, Sequence);

/// The next item of a subscription; `None` after its end.
type NextItem = Option<BatchItem>;

impl Api {
    /// Serves `/_db_updates` for admins and for callers with the role `_db_updates`.
    pub fn db_updates(&self) -> Router {
        self.guarded(routes("/_db_updates", [("", METHODS, get(feed).post(feed))]), Permission::Updates)
    }
}

/// Creates the feed that the request asks for.
async fn feed(State(inner): Shared, parts: Parts, body: Bytes) -> Answered {
    let text = parts.uri.query().unwrap_or_default();
    let query = Query::parse(text, &parts.headers, &inner.options, Topic::Databases)?;
    check_body(&parts.method, &body)?;
    let tag = match query.mode {
        Mode::Normal => Some(tag(&inner.feed, text).await?),
        _ => None,
    };
    answer(&inner, &parts, &query, tag, Updates::begin(&inner, &query)).await
}

/// Fails if a posted `body` has content: clients may post only an empty body or an empty object.
fn check_body(method: &Method, body: &[u8]) -> Result<(), Failure> {
    let text = body.trim_ascii();
    let is_empty = || serde_json::from_slice(text).is_ok_and(|map: serde_json::Map<_, _>| map.is_empty());
    if *method != Method::POST || text.is_empty() || is_empty() {
        return Ok(());
    }
    Err(Failure::bad_request("The body must be empty, or {}."))
}

/// Starts reading at most `limit` rows after `cursor`; if `descending`, the rows before it, newest first.
fn load(inner: &Arc<Inner>, cursor: Cursor, descending: bool, limit: usize) -> Load<Page> {
    let inner = Arc::clone(inner);
    Load::begin(async move {
        let _turn = inner.reads.acquire().await.expect("the semaphore is never closed");
        let feed = &inner.feed;
        if descending {
            return Ok((feed.page_before(cursor.position(), limit).await?, Sequence::MIN));
        }
        let read = async |tx| {
            let horizon = feed.raw();
            let horizon = horizon.horizon(&tx, Isolation::Snapshot);
            let (page, horizon) = tokio::join!(feed.page_in(&tx, cursor, limit), horizon);
            Ok((page?, horizon?))
        };
        feed.context.store.run(read).await
    })
}

/// How a live feed gets new rows.
struct Live {
    batches: BatchSubscription,
    /// The item that arrived while the feed was waiting.
    arrived: Option<NextItem>,
}

/// The rows that a feed is sending.
enum Current {
    /// Rows of a page, or of a batch whose bytes differ from those of other feeds.
    Own(Rows),
    /// The chunks of a batch that feeds share, beginning at this index.
    Shared(Weak<Rendering>, usize),
}

/// Reads the rows of `_db_updates`.
struct Updates {
    inner: Arc<Inner>,
    wanted: Wanted,
    /// Whether the newest rows come first.
    descending: bool,
    /// Where to continue reading in the store.
    next: Cursor,
    seq: Cursor,
    /// Whether the feed has read the store to its end.
    is_caught_up: bool,
    /// Whether the client also wants rows that come later.
    is_live: bool,
    page_size: PageSize,
    current: Option<Current>,
    /// The page that is being read.
    load: Option<Load<Page>>,
    /// The source of new rows, once the feed has caught up and is live.
    live: Option<Box<Live>>,
}

impl Updates {
    /// Creates a feed of the rows that `query` asks for, after `start`, without reading any.
    fn new(inner: &Arc<Inner>, query: &Query, start: Cursor) -> Self {
        Self {
            inner: Arc::clone(inner),
            wanted: Wanted::of(query),
            descending: query.descending,
            next: start,
            seq: if query.descending { Cursor::BEGINNING } else { start },
            is_caught_up: false,
            is_live: query.mode != Mode::Normal && !query.descending,
            page_size: PageSize::for_limit(PAGE_ROWS, query.limit),
            current: None,
            load: None,
            live: None,
        }
    }

    /// Creates the feed that `query` asks for. Unless the feed begins now, this reads the first page, and fails if that read fails.
    async fn begin(inner: &Arc<Inner>, query: &Query) -> Result<Self> {
        let start = match query.start {
            _ if query.descending => Sequence::MAX.into(),
            Start::Now => {
                let now = Cursor::from(inner.feed.now().await?);
                return Ok(Self { is_caught_up: true, ..Self::new(inner, query, now) });
            }
            Start::At(cursor) => cursor,
        };
        let mut updates = Self::new(inner, query, start);
        let page = load(inner, start, query.descending, updates.page_size.rows()).done().await?;
        updates.turn(page);
        Ok(updates)
    }

    /// Makes this page the next one to send.
    fn turn(&mut self, (page, horizon): Page) {
        let NotificationPage { mut rows, mut to, mut next, mut more } = page;
        if self.page_size.cut(&mut rows, |row| size_of_row(row)) {
            let last = rows.last().expect("one row is kept").sequence;
            (to, next, more) = (last, cut_at(self.next, next, last), true);
        }
        self.current = Some(Current::Own(if self.descending {
            Rows::backwards(rows, to, !more)
        } else {
            Rows::new(rows, self.next, next, horizon)
        }));
    }

    /// Writes rows of the current page or batch.
    fn write(&mut self, out: &mut Writer, limit: u64) {
        match self.current.take() {
            None => {}
            Some(Current::Own(mut rows)) => {
                rows.write(&self.wanted, out, limit);
                self.seq = rows.position().unwrap_or(self.seq);
                if rows.left() > 0 {
                    self.current = Some(Current::Own(rows));
                } else if self.live.is_none() {
                    (self.next, self.is_caught_up) = (rows.next, rows.is_complete);
                }
            }
            Some(Current::Shared(rendering, place)) => {
                if let Some(rendering) = rendering.upgrade() {
                    self.share(&rendering, place, out);
                } else {
                    (self.live, self.next, self.is_caught_up) = (None, self.seq, false);
                }
            }
        }
    }

    /// Sends the chunk at `place` of `rendering`, which feeds with this format share.
    fn share(&mut self, rendering: &Arc<Rendering>, place: usize, out: &mut Writer) {
        let (_, chunks) = &**rendering;
        let (chunk, rest) = (&chunks[place], place + 1);
        self.seq = chunk.position;
        out.share(chunk.bytes.clone(), chunk.rows);
        self.current = (rest < chunks.len()).then(|| Current::Shared(Arc::downgrade(rendering), rest));
    }

    /// Returns the subscription to new rows, starting it if necessary.
    fn live(&mut self) -> &mut Live {
        let Self { inner, wanted, next, live, .. } = self;
        live.get_or_insert_with(|| {
            // The feed compares names with a glob itself, so a slow glob does not hold up the dispatcher.
            let names = wanted.names.clone().filter(|_| wanted.glob_len().is_none());
            let filter = names.unwrap_or_else(Filter::all);
            let batches = inner.dispatcher.subscribe(filter).caught_up_at(*next).batches();
            Box::new(Live { batches, arrived: None })
        })
    }

    /// Reads the next batch of the subscription.
    fn take(&mut self, out: &mut Writer, limit: u64) -> Result<Progress> {
        let live = self.live();
        let arrived = match live.arrived.take() {
            None => live.batches.next().now_or_never(),
            arrived => arrived,
        };
        match arrived {
            None => return Ok(Progress::UpToDate),
            Some(Some(Item::Delivery(batch))) => self.turn_to(&batch, out, limit),
            // A new subscription would deliver everything from the beginning, and the client must know that.
            Some(Some(Item::Expired { horizon })) => return Err(Error::Expired { horizon }),
            // The position belongs to another history, so waiting does not help.
            Some(Some(Item::Failed(error @ Error::Invalid { .. }))) => return Err(error),
            Some(Some(Item::Failed(error))) => {
                let context = &self.inner.feed.context;
                // The subscription pauses before it reads again.
                context.stats.health.complain(context.env(), "catching up of a live feed", &error);
            }
            // Only a feed that began with nothing gets `CaughtUp`, and this subscription skips no rows.
            Some(Some(Item::CaughtUp { .. } | Item::Lagged { .. })) => {}
            // Without a dispatcher no rows arrive, so the feed ends and the client tries again.
            Some(None) => return Ok(Progress::Over),
        }
        Ok(Progress::More)
    }

    /// Makes `batch` the next one to send. If possible, it uses the bytes that all feeds with this format share.
    fn turn_to(&mut self, batch: &DeliveryBatch, out: &mut Writer, limit: u64) {
        // A longpoll sends only one batch, the first of its reading, which differs between feeds.
        let is_shareable = out.form() != WireFormat::Array && self.wanted.glob_len().is_none();
        let shared = if is_shareable { render(batch, out.form(), &self.wanted) } else { None };
        let rows = |rendering: &Rendering| rendering.1.iter().map(|chunk| chunk.rows).sum::<u64>();
        match shared {
            // This must happen now, while the batch is held: it may already have left the ring.
            Some(rendering) if rows(&rendering) <= limit => self.share(&rendering, 0, out),
            _ => self.current = Some(Current::Own(Rows::of(batch))),
        }
    }
}

impl Source for Updates {
    // CouchDB reports no count here either, and the cost of counting the rows of all databases would grow with their number.
    const TELLS_PENDING: bool = false;

    async fn read(&mut self, out: &mut Writer, limit: u64) -> Result<Progress> {
        loop {
            // Taking a batch may already have written its first chunk.
            if out.rows() == 0 {
                self.write(out, limit);
            }
            if out.rows() == 0 && self.current.is_some() {
                tokio::task::yield_now().await;
                continue;
            }
            if out.rows() > 0 {
                // An array ends with the rows that existed when it began. It must not keep growing while new rows arrive.
                let is_enough =
                    out.form() == WireFormat::Array && self.is_caught_up && self.current.is_none();
                return Ok(if is_enough { Progress::UpToDate } else { Progress::More });
            }
            if let Some(load) = &mut self.load {
                let page = load.done().await;
                self.load = None;
                self.turn(page?);
            } else if !self.is_caught_up {
                self.load = Some(load(&self.inner, self.next, self.descending, self.page_size.rows()));
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

    fn takes_turns(&self) -> bool {
        self.wanted.glob_len().is_some()
    }

    async fn wait(&mut self) {
        let live = self.live();
        live.arrived = Some(live.batches.next().await);
    }

    fn position(&mut self) -> Cursor {
        // While nothing matches, the position follows the subscription, so that it does not expire.
        if let (Some(live), None) = (&mut self.live, &self.current)
            && self.wanted.names.is_some()
            && live.arrived.is_none()
        {
            self.seq = live.batches.cursor();
        }
        self.seq
    }
}

/// Estimates the bytes of memory that `row` takes.
pub(super) fn size_of_row(row: &Notification) -> usize {
    size_of::<Notification>() + row.name.as_str().len()
}
