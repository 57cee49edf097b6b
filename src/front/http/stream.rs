//! [`answer`] answers with a feed: the rows of its [`Source`], heartbeats in between, and an end.
//!
//! The connection pulls the [`Stream`]. The stream reads only while the client can take more, so a slow client costs one chunk. Closing the
//! connection drops the stream with everything that it holds.

use std::{fmt::Display, pin::pin, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, Method, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use futures_util::{FutureExt, stream};
use xxhash_rust::xxh3::xxh3_128;

use super::{
    Caller, Failure, Inner,
    answer::Answered,
    api::caller,
    caller::FeedPermit,
    query::{Mode, Query},
    wire_format::{WireFormat, Writer},
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
    },
    state::feed::{Feed, FeedRow},
    store::Isolation,
};

/// The methods that feeds allow.
pub(super) const METHODS: &str = "GET,HEAD,POST";

/// The state of a feed after a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    More,
    /// The feed has read everything.
    UpToDate,
    /// The feed has read everything, and no more rows will come.
    Over,
}

/// Reads the rows of a feed.
pub(super) trait Source: Send + 'static {
    /// Whether the end of the feed reports how many rows come after the position.
    const TELLS_PENDING: bool = true;

    /// Writes rows until the chunk is full: at most about `limit`, and at least one if there are any. Moves the position past them.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the next call continues the read.
    fn read(&mut self, out: &mut Writer, limit: u64) -> impl Future<Output = Result<Progress>> + Send;

    /// Whether reads use so much CPU time that the task should yield before each.
    fn takes_turns(&self) -> bool {
        false
    }

    /// Completes when there may be more to read after [`Progress::UpToDate`]. Cancel safe.
    fn wait(&mut self) -> impl Future<Output = ()> + Send;

    /// Returns the position of a client that has received all rows that were written.
    fn position(&mut self) -> Cursor;

    /// Returns how many rows come after the position, if the feed counts them.
    fn pending(&mut self) -> impl Future<Output = Result<u64>> + Send {
        async { Ok(0) }
    }

    /// Returns where another shard took over, if that ended the feed.
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
struct Stream<S> {
    source: S,
    mode: Mode,
    writer: Writer,
    /// How many rows the stream may still send.
    limit: u64,
    /// How long the feed may go without rows before it ends.
    timeout: Duration,
    /// How long the feed may go without data before it sends a heartbeat.
    heartbeat: Option<Duration>,
    /// Whether heartbeats of a continuous feed report how far the feed has come.
    tells_progress: bool,
    phase: Phase,
    /// Whether the stream has sent rows.
    has_rows: bool,
    /// When the stream sent its last rows, or when it began.
    rows_at: Duration,
    /// When the stream last sent data.
    sent_at: Duration,
    inner: Arc<Inner>,
    caller: Caller,
    /// The feed's shares of its caller's limits.
    _places: Vec<FeedPermit>,
}

/// Answers with the feed that `query` asks for, or with 304 if the client already has the answer with this `tag`. `begin` makes the source
/// of the feed. Fails with 429 if the caller has too many long-lived feeds.
pub(super) async fn answer<S: Source>(
    inner: &Arc<Inner>,
    parts: &Parts,
    query: &Query,
    tag: Option<HeaderValue>,
    begin: impl Future<Output = Result<S>>,
) -> Answered {
    if let Some(tag) = tag.as_ref().filter(|tag| is_known(parts, tag)) {
        let headers = [
            (header::CACHE_CONTROL, HeaderValue::from_static("must-revalidate")),
            (header::ETAG, tag.clone()),
        ];
        return Ok((StatusCode::NOT_MODIFIED, headers).into_response());
    }
    let caller = caller(&parts.extensions);
    let lasts = query.mode != Mode::Normal;
    let places = inner.enter(&caller, query.names.as_ref(), lasts)?;
    let (source, now) = (begin.await?, inner.env().now());
    let feed = Stream {
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
        inner: Arc::clone(inner),
        caller,
        _places: places,
    };
    let form = feed.writer.form();
    let body = Body::from_stream(stream::unfold(feed, |mut feed| async move {
        let item = feed.next().await?;
        Some((item, feed))
    }));
    let mut response = respond(form, body);
    let headers = response.headers_mut();
    if lasts {
        // Otherwise nginx would hold back rows until they fill a buffer.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    }
    if let Some(tag) = tag {
        headers.insert(header::ETAG, tag);
    }
    Ok(response)
}

/// Creates an answer from `body`, with the headers for this format.
pub(super) fn respond(form: WireFormat, body: Body) -> Response {
    let mut response = Response::new(body);
    let (kind, cached) = match form {
        WireFormat::Array | WireFormat::Lines => ("application/json", "must-revalidate"),
        WireFormat::Events => ("text/event-stream", "no-cache"),
    };
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(cached));
    response
}

/// Returns the entity tag of the answer to the query `text`. The tag depends on the horizon, and on the position of the feed's last row,
/// which changes with every change. The tag is weak because one position can have several texts.
pub(super) async fn tag<R: FeedRow>(feed: &Feed<R>, text: &str) -> Result<HeaderValue, Failure> {
    let raw = feed.raw();
    let state = async |tx| {
        let horizon = raw.horizon(&tx, Isolation::Snapshot);
        let (last, horizon) = tokio::join!(raw.last_row(&tx), horizon);
        Ok((last?, horizon?))
    };
    let (last, horizon) = feed.context.store.run(state).await?;
    let hash = xxh3_128(format!("{last:?} {horizon} {text}").as_bytes());
    Ok(HeaderValue::from_str(&format!("W/\"{hash:032x}\"")).expect("hexadecimal digits are visible"))
}

/// Returns whether the client already has the answer with this tag.
fn is_known(parts: &Parts, tag: &HeaderValue) -> bool {
    // Clients may treat the tag as strong, and omit the prefix that makes it weak.
    let bare = |tag: &str| tag.strip_prefix("W/").unwrap_or(tag).to_owned();
    let tag = bare(tag.to_str().unwrap_or_default());
    let known = parts.headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let mut known = known.flat_map(|value| value.split(',').map(str::trim));
    parts.method != Method::POST && known.any(|known| known == "*" || bare(known) == tag)
}

impl<S: Source> Stream<S> {
    /// Returns the next bytes to send. A failure cuts off the connection, so that the client does not mistake it for the end of the feed.
    async fn next(&mut self) -> Option<Result<Bytes>> {
        loop {
            let chunk = match self.phase {
                Phase::Begin => {
                    self.phase = Phase::Read;
                    Ok(match self.writer.form() {
                        // This heartbeat lets a client that is cut off before its first row resume where it began.
                        WireFormat::Events => self.beat(),
                        WireFormat::Array => Bytes::from_static(b"{\"results\":[\n"),
                        WireFormat::Lines => Bytes::new(),
                    })
                }
                Phase::Read => {
                    if self.source.takes_turns() {
                        tokio::task::yield_now().await;
                    }
                    self.read().await
                }
                Phase::Wait => Ok(self.wait().await),
                Phase::End => {
                    self.phase = Phase::Done;
                    self.end().await
                }
                Phase::Done => return None,
            };
            let stats = &self.inner.feed.context.stats;
            match chunk {
                Ok(chunk) if chunk.is_empty() => {}
                Ok(chunk) => {
                    self.sent_at = self.inner.env().now();
                    stats.http_feed_bytes.add(chunk.len() as u64);
                    return Some(Ok(chunk));
                }
                Err(error) => {
                    stats.health.complain(self.inner.env(), "HTTP feed, which is cut off", &error);
                    stats.http_feed_failures.add(1);
                    self.phase = Phase::Done;
                    return Some(Err(error));
                }
            }
        }
    }

    /// Reads some rows. If the read takes longer than the heartbeat interval, sends a heartbeat instead.
    async fn read(&mut self) -> Result<Bytes> {
        if self.caller.is_gone() {
            return Err(Error::invalid("caller", "its credentials are no longer valid"));
        }
        if self.limit == 0 || (self.mode != Mode::Normal && self.inner.is_closing()) {
            self.phase = Phase::End;
            return Ok(Bytes::new());
        }
        // The read below borrows the source, so the heartbeat is made first.
        let heartbeat = if self.heartbeat.is_some() { self.beat() } else { Bytes::new() };
        let progress = {
            let mut read = pin!(self.source.read(&mut self.writer, self.limit));
            // Usually rows are ready at once, and no timer is needed.
            if let Some(done) = (&mut read).now_or_never() {
                done?
            } else {
                let rest = self.heartbeat.map(|interval| self.inner.env().left_of(interval, self.sent_at));
                let beat = async {
                    match rest {
                        Some(rest) => self.inner.env().sleep(rest).await,
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
            self.inner.feed.context.stats.http_feed_rows.add(rows);
            self.has_rows = true;
            self.rows_at = self.inner.env().now();
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
            self.heartbeat.is_some_and(|interval| self.inner.env().left_of(interval, self.sent_at).is_zero());
        if bytes.is_empty() && is_due && self.phase == Phase::Read {
            return Ok(self.beat());
        }
        Ok(bytes)
    }

    /// Creates a heartbeat, which keeps the connection from falling silent. If the format allows it, the heartbeat reports how far the feed
    /// has come, so a client that rarely gets rows continues from there, and not from its last row, whose position may have expired.
    fn beat(&mut self) -> Bytes {
        match self.writer.form() {
            WireFormat::Events => {
                format!("event: heartbeat\ndata: \nid: \"{}\"\n\n", self.source.position()).into()
            }
            WireFormat::Lines if self.tells_progress => {
                format!("{{\"last_seq\":\"{}\"}}\n", self.source.position()).into()
            }
            WireFormat::Array | WireFormat::Lines => Bytes::from_static(b"\n"),
        }
    }

    /// Waits for rows, for the next heartbeat, or for the end of the feed.
    async fn wait(&mut self) -> Bytes {
        let rest = match self.heartbeat {
            Some(interval) => self.inner.env().left_of(interval, self.sent_at),
            None => self.inner.env().left_of(self.timeout, self.rows_at),
        };
        tokio::select! {
            biased;
            () = self.inner.closed() => self.phase = Phase::End,
            () = self.caller.gone() => self.phase = Phase::End,
            () = self.inner.env().sleep(rest) => {
                if self.heartbeat.is_some() {
                    return self.beat();
                }
                self.phase = Phase::End;
            }
            () = self.source.wait() => self.phase = Phase::Read,
        }
        Bytes::new()
    }

    /// Creates the bytes after the rows.
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
