//! [`Stream`] sends a feed: the rows of its [`Source`], heartbeats between them, and an end.
//!
//! The connection pulls the stream. The stream reads nothing unless the client has room for it, so a slow client costs one chunk. A
//! closed connection drops the stream with everything that it holds.

use std::{
    collections::HashMap,
    fmt::Display,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use futures_util::{FutureExt, stream};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::{
    Caller, Failure,
    answer_counts::AnswerCounts,
    query::{Mode, Query},
    wire_format::{WireFormat, Writer},
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        env::Env,
        error::{Error, Result},
    },
    state::stats::Stats,
};

/// How many lasting feeds each name has open.
#[derive(Debug, Default)]
pub(super) struct OpenFeeds(Mutex<HashMap<Arc<str>, Arc<AtomicUsize>>>);

/// A feed's place among the lasting feeds of its caller. Dropping it gives the place back.
#[derive(Debug)]
pub(super) struct FeedPermit(Arc<AtomicUsize>);

impl OpenFeeds {
    /// Takes a place for a feed of `name`, which may have `most`. Fails with 429 if there is none left.
    pub fn enter(&self, name: &str, most: usize) -> Result<FeedPermit, Failure> {
        let mut names = self.0.lock();
        names.retain(|_, open| open.load(Ordering::Relaxed) > 0);
        let open = Arc::clone(names.entry(name.into()).or_default());
        let feeds = open.load(Ordering::Relaxed);
        if feeds >= most {
            let reason = format!("You have {feeds} feeds open, and may have no more.");
            return Err(Failure::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", reason));
        }
        open.fetch_add(1, Ordering::Relaxed);
        Ok(FeedPermit(open))
    }

    /// Returns how many lasting feeds there are.
    pub fn count(&self) -> usize {
        self.0.lock().values().map(|open| open.load(Ordering::Relaxed)).sum()
    }
}

impl Drop for FeedPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The state of a feed after a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    More,
    /// The feed has read everything.
    UpToDate,
    /// The feed has read everything, and no more will come.
    Over,
}

/// Reads the rows of a feed.
pub(super) trait Source: Send + 'static {
    /// Whether the end of the feed says how many rows come after the position.
    const TELLS_PENDING: bool = true;

    /// Writes rows until the chunk is full: about `limit` at most, and at least one if there are any. Moves the position past them.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the next call continues the read.
    fn read(&mut self, out: &mut Writer, limit: u64) -> impl Future<Output = Result<Progress>> + Send;

    /// Completes when there may be more to read after [`Progress::UpToDate`]. This is cancel safe.
    fn wait(&mut self) -> impl Future<Output = ()> + Send;

    /// Returns the position of a client that has received all rows that were written.
    fn position(&mut self) -> Cursor;

    /// Returns how many rows come after the position, if the feed counts them.
    fn pending(&mut self) -> impl Future<Output = Result<u64>> + Send {
        async { Ok(0) }
    }

    /// Returns where another shard has taken over, if the feed is over for that reason.
    fn resharded_at(&self) -> Option<Sequence> {
        None
    }
}

/// The next step of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Sends the bytes before the rows.
    Begin,
    /// Reads and sends rows.
    Read,
    Wait,
    /// Sends the bytes after the rows.
    End,
    /// The stream is over.
    Done,
}

/// A feed that is being sent.
pub(super) struct Stream<S> {
    source: S,
    mode: Mode,
    writer: Writer,
    /// How many rows the stream may still send.
    limit: u64,
    /// The feed ends after this time without rows.
    timeout: Duration,
    /// The feed sends a heartbeat after this time without data.
    heartbeat: Option<Duration>,
    /// Whether heartbeats of a continuous feed say how far the feed has come.
    tells_progress: bool,
    phase: Phase,
    /// Whether the stream has sent rows.
    has_rows: bool,
    /// When the stream sent its last rows, or when it began.
    rows_at: Duration,
    /// When the stream last sent data.
    sent_at: Duration,
    env: Env,
    metrics: AnswerCounts,
    stats: Arc<Stats>,
    /// Becomes true when all feeds have to end.
    closing: watch::Receiver<bool>,
    caller: Caller,
    _place: Option<FeedPermit>,
}

/// The state of the server that a feed needs.
pub(super) struct FeedContext {
    pub env: Env,
    pub metrics: AnswerCounts,
    pub stats: Arc<Stats>,
    /// Becomes true when all feeds have to end.
    pub closing: watch::Receiver<bool>,
    pub caller: Caller,
    /// The feed's place among the feeds of its caller. A feed that does not wait needs none.
    pub place: Option<FeedPermit>,
}

impl<S: Source> Stream<S> {
    /// Makes the feed of `source` that `query` asks for.
    pub fn new(source: S, query: &Query, context: FeedContext) -> Self {
        let FeedContext { env, metrics, stats, closing, caller, place } = context;
        let now = env.now();
        Self {
            source,
            mode: query.mode,
            writer: Writer::new(query.mode.into()),
            limit: query.limit,
            timeout: query.timeout,
            heartbeat: query.heartbeat,
            tells_progress: query.progress,
            phase: Phase::Begin,
            has_rows: false,
            rows_at: now,
            sent_at: now,
            env,
            metrics,
            stats,
            closing,
            caller,
            _place: place,
        }
    }

    /// Makes the answer that sends the feed.
    pub fn into_response(self) -> Response {
        let (form, lasts) = (self.writer.form(), self.mode != Mode::Normal);
        let body = Body::from_stream(stream::unfold(self, |mut feed| async move {
            let item = feed.next().await?;
            Some((item, feed))
        }));
        let mut response = respond(form, body);
        if lasts {
            // Otherwise nginx would hold rows back until they fill a buffer.
            response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
        }
        response
    }

    /// Returns the next bytes to send. A failure cuts the connection off, so that the client does not take it for the end of the
    /// feed.
    async fn next(&mut self) -> Option<Result<Bytes>> {
        loop {
            let chunk = match self.phase {
                Phase::Begin => {
                    self.phase = Phase::Read;
                    Ok(match self.writer.form() {
                        // A client that is cut off before its first row resumes where it began.
                        WireFormat::Events => self.beat(),
                        form => Bytes::from_static(form.begin()),
                    })
                }
                Phase::Read => self.read().await,
                Phase::Wait => Ok(self.wait().await),
                Phase::End => {
                    self.phase = Phase::Done;
                    self.end().await
                }
                Phase::Done => return None,
            };
            match chunk {
                Ok(chunk) if chunk.is_empty() => {}
                Ok(chunk) => {
                    self.sent_at = self.env.now();
                    self.metrics.sent(0, chunk.len() as u64);
                    return Some(Ok(chunk));
                }
                Err(error) => {
                    self.stats.health.complain(&self.env, "feed of HTTP, which is cut off", &error);
                    self.phase = Phase::Done;
                    self.metrics.failed();
                    return Some(Err(error));
                }
            }
        }
    }

    /// Reads some rows. If the read takes longer than the interval of heartbeats, it sends a heartbeat instead.
    async fn read(&mut self) -> Result<Bytes> {
        if self.caller.is_gone() {
            return Err(Error::invalid("caller", "its credentials are valid no more"));
        }
        if self.limit == 0 || (self.mode != Mode::Normal && *self.closing.borrow()) {
            self.phase = Phase::End;
            return Ok(Bytes::new());
        }
        // The read below borrows the source, so the heartbeat is made before it.
        let heartbeat = if self.heartbeat.is_some() { self.beat() } else { Bytes::new() };
        let progress = {
            let mut read = pin!(self.source.read(&mut self.writer, self.limit));
            // Mostly rows are ready at once, and no timer is needed.
            if let Some(done) = (&mut read).now_or_never() {
                done?
            } else {
                let rest = self.heartbeat.map(|interval| self.env.left_of(interval, self.sent_at));
                let beat = async {
                    match rest {
                        Some(rest) => self.env.sleep(rest).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    biased;
                    done = read => done?,
                    () = beat => return Ok(heartbeat),
                }
            }
        };
        let (bytes, rows) = self.writer.take();
        if rows > 0 {
            self.limit -= rows.min(self.limit);
            self.metrics.sent(rows, 0);
            self.has_rows = true;
            self.rows_at = self.env.now();
        }
        let is_enough = match self.mode {
            Mode::Normal => true,
            Mode::Longpoll => self.has_rows,
            Mode::Continuous | Mode::EventSource => false,
        };
        match progress {
            Progress::More => {}
            Progress::UpToDate if is_enough || self.limit == 0 => self.phase = Phase::End,
            Progress::UpToDate => self.phase = Phase::Wait,
            Progress::Over => self.phase = Phase::End,
        }
        let is_due =
            self.heartbeat.is_some_and(|interval| self.env.left_of(interval, self.sent_at).is_zero());
        if bytes.is_empty() && is_due && self.phase == Phase::Read {
            return Ok(self.beat());
        }
        Ok(bytes)
    }

    /// Makes a heartbeat, which keeps the connection from falling silent. If the format allows it, the heartbeat says how far the
    /// feed has come. So a client with rare rows continues from there, and not from its last row, which may be too old one day.
    fn beat(&mut self) -> Bytes {
        let form = self.writer.form();
        match form {
            WireFormat::Events => {
                format!("event: heartbeat\ndata: \nid: \"{}\"\n\n", self.source.position()).into()
            }
            WireFormat::Lines if self.tells_progress => {
                format!("{{\"last_seq\":\"{}\"}}\n", self.source.position()).into()
            }
            WireFormat::Array | WireFormat::Lines => Bytes::from_static(form.heartbeat()),
        }
    }

    /// Waits for rows, for the next heartbeat, or for the end of the feed.
    async fn wait(&mut self) -> Bytes {
        let rest = match self.heartbeat {
            Some(interval) => self.env.left_of(interval, self.sent_at),
            None => self.env.left_of(self.timeout, self.rows_at),
        };
        tokio::select! {
            biased;
            // The sender may also have been dropped.
            () = async { drop(self.closing.wait_for(|is_closing| *is_closing).await) } => self.phase = Phase::End,
            () = self.caller.gone() => self.phase = Phase::End,
            () = self.env.sleep(rest) => {
                if self.heartbeat.is_some() {
                    return self.beat();
                }
                self.phase = Phase::End;
            }
            () = self.source.wait() => self.phase = Phase::Read,
        }
        Bytes::new()
    }

    /// Makes the bytes after the rows.
    async fn end(&mut self) -> Result<Bytes> {
        let form = self.writer.form();
        let resharded_at = self.source.resharded_at();
        if form == WireFormat::Events && resharded_at.is_none() {
            return Ok(self.beat());
        }
        let pending = if S::TELLS_PENDING { Some(self.source.pending().await?) } else { None };
        let resharded_at = resharded_at.as_ref().map(|at| at as &dyn Display);
        Ok(form.end(&self.source.position(), pending, resharded_at).into())
    }
}

/// Makes an answer in this format.
pub(super) fn respond(form: WireFormat, body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(form.content_type()));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(form.cache_control()));
    response
}
