//! [`DocChanges`] reads the changes of a database for a feed. [`Counts`] counts the changes after a position.
//!
//! Notifications wake a waiting feed. Every edit records an event for its database in the same transaction, so a notification follows, and
//! the dispatcher of the process makes sure that no feed misses it. A waiting feed therefore needs a notifier on some node, as
//! `_db_updates` does. A few things cause no notification: changes removed without an event, edits of a database that the bus considers
//! replaced, and a shard that another node has closed. The process-wide poll finds these.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io::Write as _,
    sync::Arc,
};

use axum::body::Bytes;
use parking_lot::Mutex;
use tokio_stream::StreamExt;

use super::wanted::Wanted;
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        event::{Db, DbInstance},
        tasks::within,
    },
    front::http::{
        DocView,
        databases::Catalogue,
        page::{Load, PageSize, cut_at},
        query::{Mode, Query},
        stream::{Progress, Source},
        wire_format::{Writer, write_string},
    },
    roles::{
        changes::{Change, ChangeRow, Changes, ChangesPage, ChangesQuery},
        dispatcher::{Filter, Subscription},
    },
    state::{
        feed::{Counted, Feed, KnownMarks, Mark},
        feed_watcher::Listener,
        keys::ShardId,
    },
};

/// The maximum number of rows in one read.
const PAGE_ROWS: usize = 256;

/// The maximum number of rows in one read with documents, whose size is unknown.
const PAGE_DOCS: usize = 32;

/// The state that the routes of the changes share.
pub(super) struct Served {
    pub catalogue: Catalogue,
    pub changes: Changes,
    pub counts: Counts,
}

/// For each row of a page, whether the layer keeps the row; empty if it keeps all.
type Kept = Vec<bool>;

/// Which documents the feed shows, and how.
pub(super) struct Shown {
    pub wanted: Wanted,
    /// How the layer shows the documents, in the cases that the routers cannot handle.
    pub lens: Option<Arc<dyn DocView>>,
}

/// Starts reading what `query` asks for.
fn load(
    served: &Arc<Served>,
    db: &Db,
    query: &ChangesQuery,
    lens: Option<Arc<dyn DocView>>,
) -> Load<(ChangesPage, Kept)> {
    let (served, db, query) = (Arc::clone(served), db.clone(), query.clone());
    Load::begin(async move {
        let inner = &served.catalogue.inner;
        if !query.include_docs && !query.all_leaves && lens.is_none() {
            let _turn = inner.reads.acquire().await.expect("the semaphore is never closed");
            return Ok((served.changes.rows(&db, &query, &*served.catalogue.databases).await?, Kept::new()));
        }
        // A slow layer must not delay feeds that need nothing from it.
        let _turn = inner.doc_reads.acquire().await.expect("the semaphore is never closed");
        let documents = read(&served, &db, &query, lens);
        within(inner.env(), inner.options.doc_reads_limit, "the documents of a page", documents).await
    })
}

/// Reads what `query` asks for, and asks the layer which rows to keep.
async fn read(
    served: &Served,
    db: &Db,
    query: &ChangesQuery,
    lens: Option<Arc<dyn DocView>>,
) -> Result<(ChangesPage, Kept)> {
    let Some(lens) = lens else {
        return Ok((served.changes.rows(db, query, &*served.catalogue.databases).await?, Kept::new()));
    };
    let page = served.changes.rows(db, query, &*lens).await?;
    let mut kept = Kept::with_capacity(page.rows.len());
    for row in &page.rows {
        kept.push(lens.keeps(&row.change.doc, row.body.as_ref()).await?);
    }
    Ok((page, kept))
}

pub(super) struct DocChanges {
    served: Arc<Served>,
    db: Db,
    /// The parameters of the next read.
    query: ChangesQuery,
    page_size: PageSize,
    shown: Shown,
    /// Whether rows include their documents.
    with_docs: bool,
    /// Where a feed in reverse order ends.
    until: Sequence,
    /// The rows that were read but not yet sent, each with a flag that says whether the layer keeps it.
    rows: VecDeque<(ChangeRow, bool)>,
    /// Whether the feed has read everything.
    is_at_end: bool,
    /// The position at which another shard took over.
    resharded_at: Option<Sequence>,
    /// Whether no more rows will come, because the database or the dispatcher is gone.
    is_over: bool,
    /// The position of the client.
    seq: Cursor,
    /// How many rows the feed has sent or skipped.
    seen: u64,
    /// What wakes a live feed: the notifications of the database, and the poll for changes that cause none.
    live: Option<(Subscription, Listener)>,
    /// The page that is being read.
    load: Option<Load<(ChangesPage, Kept)>>,
}

impl DocChanges {
    /// Creates a feed of the changes after `since` that `query` asks for, in `db` or one of its shards. Fails if a read from `since` fails.
    pub async fn begin(
        served: &Arc<Served>,
        db: Db,
        shard: Option<ShardId>,
        query: &Query,
        shown: Shown,
        since: Cursor,
    ) -> Result<Self> {
        let is_live = query.mode != Mode::Normal && !query.descending;
        let filter = Filter::name(db.name.as_str()).expect("it is the name of a database");
        let feed = served.changes.feed(&db);
        // The subscription comes before the first read, so that the feed misses nothing in between.
        let live = is_live.then(|| {
            let updates = served.catalogue.inner.dispatcher.subscribe(filter).stream();
            (updates, Listener::to_documents(&feed.context, &feed.id))
        });
        let (with_docs, is_chosen) = (query.include_docs, shown.lens.is_some());
        let most = if with_docs || is_chosen { PAGE_DOCS } else { PAGE_ROWS };
        let limit = match shown.wanted {
            Wanted::All if !is_chosen => usize::try_from(query.limit).unwrap_or(most).clamp(1, most),
            _ => most,
        };
        let query = ChangesQuery {
            from: if query.descending { Sequence::MAX.into() } else { since },
            limit,
            descending: query.descending,
            all_leaves: query.all_leaves,
            include_docs: with_docs || is_chosen,
            shard,
        };
        check(served, &db, shard, since).await?;
        // The read is only started here, so that the headers are sent at once, however long the first page takes.
        let load = Some(load(served, &db, &query, shown.lens.clone()));
        Ok(Self {
            served: Arc::clone(served),
            db,
            query,
            page_size: PageSize::new(limit),
            shown,
            with_docs,
            until: since.position(),
            rows: VecDeque::new(),
            is_at_end: false,
            resharded_at: None,
            is_over: false,
            seq: since,
            seen: 0,
            live,
            load,
        })
    }

    /// Makes this page the next one to send.
    fn turn(&mut self, (page, keeps): (ChangesPage, Kept)) {
        let ChangesPage { mut rows, mut next, mut more, mut resharded } = page;
        if self.page_size.cut(&mut rows, size_of_row) {
            let last = rows.last().expect("one row is kept").change.sequence;
            next = if self.query.descending { last.into() } else { cut_at(self.query.from, next, last) };
            (more, resharded) = (true, None);
        }
        self.query.limit = self.page_size.rows();
        let keeps = keeps.into_iter().chain(std::iter::repeat(true));
        self.rows = rows.into_iter().zip(keeps).collect();
        self.is_at_end = !more;
        if self.query.descending {
            let wanted = self.rows.partition_point(|(row, _)| row.change.sequence > self.until);
            self.is_at_end |= wanted < self.rows.len();
            self.rows.truncate(wanted);
        }
        self.query.from = next;
        self.resharded_at = resharded.map(|resharded| resharded.at);
    }

    /// Writes rows that were already read.
    fn write(&mut self, out: &mut Writer, limit: u64) {
        while out.rows() < limit
            && !out.is_full()
            && let Some((row, is_kept)) = self.rows.pop_front()
        {
            self.seen += 1;
            self.seq = row.change.sequence.into();
            if is_kept && self.shown.wanted.has(&row.change.doc.id) {
                let seq = self.seq;
                out.row(&seq, |bytes| write_row(bytes, &row, &seq, self.with_docs));
            }
        }
    }

    /// Returns whether all existing rows were written.
    fn is_done(&self) -> bool {
        self.rows.is_empty() && self.is_at_end
    }
}

impl Source for DocChanges {
    async fn read(&mut self, out: &mut Writer, limit: u64) -> Result<Progress> {
        loop {
            self.write(out, limit);
            if self.is_done() {
                let is_over = self.live.is_none() || self.resharded_at.is_some() || self.is_over;
                return Ok(if is_over { Progress::Over } else { Progress::UpToDate });
            }
            if out.rows() > 0 {
                return Ok(Progress::More);
            }
            let Self { served, db, query, shown, .. } = self;
            let begin = || load(served, db, query, shown.lens.clone());
            let page = self.load.get_or_insert_with(begin).done().await;
            self.load = None;
            match page {
                Ok(page) => self.turn(page),
                // The database was deleted, so no more rows will come.
                Err(Error::NoFeed { .. }) => (self.is_over, self.is_at_end) = (true, true),
                Err(error) => return Err(error),
            }
        }
    }

    async fn wait(&mut self) {
        let (shard, read) = (self.query.shard, self.query.from.position());
        let Some((updates, listener)) = &mut self.live else { return std::future::pending().await };
        let found = listener.changed(|heads| match shard {
            Some(shard) => heads.may_have_rows(shard, read),
            None => heads.any_may_have_rows(read),
        });
        // The feed reads the store after each wake-up, and trusts only what it reads. Without a dispatcher no notifications arrive, so the
        // feed sends the existing rows and ends, and the client tries again.
        tokio::select! {
            update = updates.next() => self.is_over |= update.is_none(),
            () = found => {}
        }
        self.is_at_end = false;
    }

    fn position(&mut self) -> Cursor {
        self.seq
    }

    async fn pending(&mut self) -> Result<u64> {
        if self.is_done() {
            return Ok(0);
        }
        let feed = self.served.changes.feed(&self.db);
        let (counts, of) = (&self.served.counts, (self.db.instance, self.query.shard));
        if self.query.descending {
            return Ok(counts.pending(&feed, of, self.until).await?.saturating_sub(self.seen));
        }
        counts.pending(&feed, of, self.seq.position()).await
    }

    fn resharded_at(&self) -> Option<Sequence> {
        self.resharded_at.filter(|_| self.is_done())
    }
}

/// Fails if a read of the changes from `since` fails. Once the answer has begun, the HTTP status can no longer report the failure.
async fn check(served: &Arc<Served>, db: &Db, shard: Option<ShardId>, since: Cursor) -> Result<()> {
    let feed = served.changes.feed(db);
    let _turn = served.catalogue.inner.reads.acquire().await.expect("the semaphore is never closed");
    match shard {
        Some(shard) => feed.shard_page(shard, since, 1).await.map(|_| ()),
        None => feed.topology_at(since).await.map(|_| ()),
    }
}

/// Estimates the bytes of memory that `row` takes.
fn size_of_row(row: &ChangeRow) -> usize {
    let body = row.body.as_ref().map_or(0, Bytes::len);
    size_of::<Change>() + row.change.doc.id.as_str().len() + size_of_val(&row.leaves[..]) + body
}

/// Writes a row as a JSON object on one line.
fn write_row(bytes: &mut Vec<u8>, row: &ChangeRow, seq: &Cursor, with_doc: bool) {
    let doc = &row.change.doc;
    write!(bytes, "{{\"seq\":\"{seq}\",\"id\":").expect("a vector takes all bytes");
    write_string(bytes, doc.id.as_str());
    bytes.extend_from_slice(b",\"changes\":[");
    for (place, leaf) in row.leaves.iter().enumerate() {
        let comma = if place > 0 { "," } else { "" };
        write!(bytes, "{comma}{{\"rev\":\"{}\"}}", leaf.revision).expect("a vector takes all bytes");
    }
    bytes.push(b']');
    if doc.is_deleted {
        bytes.extend_from_slice(b",\"deleted\":true");
    }
    if with_doc {
        bytes.extend_from_slice(b",\"doc\":");
        // Line breaks are white space in JSON, but they would end the row for clients that read line by line.
        let body = row.body.as_deref().unwrap_or(b"null");
        bytes.extend(body.iter().map(|&byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { byte }));
    }
    bytes.push(b'}');
}

/// The maximum number of feeds whose counts are remembered.
const FEEDS_MAX: usize = 1_000;

/// The maximum number of positions per feed whose counts are remembered.
const POSITIONS_MAX: usize = 64;

/// Which rows are counted: those of a database, or of one of its shards.
type Of = (DbInstance, Option<ShardId>);

/// The counts of one feed.
#[derive(Debug)]
struct Memory {
    /// The sequence of the newest row when the rows were counted.
    newest: Sequence,
    /// How many rows come after each position.
    behind: BTreeMap<Sequence, u64>,
}

/// Counts the rows after a position, and remembers the count for the next page.
///
/// The store counts the rows of a database as they are written. So the number of rows after a position is the number of all rows minus the
/// number before it. A client that reads in pages asks for this number with every page. The counts are remembered until a row is appended,
/// so that each page costs only its own rows, not all the rows before it.
#[derive(Debug, Default)]
pub(super) struct Counts(Mutex<HashMap<Of, Memory>>);

impl Counts {
    /// Returns how many rows of `feed`, or of its `shard`, come after `position`. Fails as reads do.
    pub async fn pending(&self, feed: &Feed<Change>, of @ (_, shard): Of, position: Sequence) -> Result<u64> {
        let Counted { behind, newest } = feed.behind(shard, position, self.known(of, position)).await?;
        self.remember(of, newest, (position, behind));
        Ok(behind)
    }

    /// Returns the known counts at the nearest positions before and after `position`.
    fn known(&self, of: Of, position: Sequence) -> Option<KnownMarks> {
        let counts = self.0.lock();
        let memory = counts.get(&of)?;
        let mark = |(at, behind): (&Sequence, &u64)| Mark { at: *at, behind: *behind };
        let below = memory.behind.range(..=position).next_back().map(mark);
        let above = memory.behind.range(position..).next().map(mark);
        Some(KnownMarks { newest: memory.newest, below, above })
    }

    fn remember(&self, of: Of, newest: Sequence, (position, behind): (Sequence, u64)) {
        let mut counts = self.0.lock();
        if counts.len() >= FEEDS_MAX && !counts.contains_key(&of) {
            counts.clear();
        }
        let nothing = || Memory { newest, behind: BTreeMap::new() };
        let memory = counts.entry(of).or_insert_with(nothing);
        if memory.newest != newest {
            *memory = nothing();
        }
        if memory.behind.len() >= POSITIONS_MAX {
            // The first position helps every reader that begins there, so the second is removed.
            let second = memory.behind.keys().nth(1).copied();
            second.and_then(|second| memory.behind.remove(&second));
        }
        memory.behind.insert(position, behind);
    }
}
