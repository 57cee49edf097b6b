//! [`Stream`]: sends a feed: rows as its [`Source`] has them, heartbeats in between, and an end.
//!
//! It is pulled by the connection. Nothing is read that the client has not room for, so a slow client costs one chunk; and a
//! connection that is closed drops it, with all that it holds.

use std::{fmt::Display, pin::pin, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::Response,
};
use futures_util::{FutureExt, stream};
use tokio::sync::watch;

use super::{
    admission::Place,
    answer_counts::AnswerCounts,
    query::{Mode, Query},
    socket::Lasting,
    wire_format::{WireFormat, Writer},
};
use crate::base::{encoding::Sequence, env::Env, error::Result};

/// What tells nginx whether it may keep what it passes on.
pub(super) const UNBUFFERED: &str = "x-accel-buffering";

/// How it goes on after a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// There may be more to read.
    More,
    /// Everything was read.
    UpToDate,
    /// Everything was read, and nothing will come.
    Over,
}

/// Where the rows of a feed come from.
pub(super) trait Source: Send + 'static {
    /// What a client gets as its position.
    type Position: Display + Send;

    /// Whether the end tells how many rows stand behind the position.
    const TELLS_PENDING: bool = true;

    /// Writes rows, at least one and at most `limit` if there are any, until the chunk is full; and moves the position behind
    /// them.
    ///
    /// # Cancel safety
    ///
    /// What was dropped is gone on with by the next call.
    fn read(&mut self, out: &mut Writer, limit: u64) -> impl Future<Output = Result<Progress>> + Send;

    /// Completes when there may be more to read after [`Progress::UpToDate`]. It is cancel safe.
    fn wait(&mut self) -> impl Future<Output = ()> + Send;

    /// Where a client goes on that was sent what was written.
    fn position(&self) -> Self::Position;

    /// How many rows stand behind the position, if that is told.
    fn pending(&mut self) -> impl Future<Output = Result<u64>> + Send {
        async { Ok(0) }
    }

    /// Where another shard has taken over, if that is why it is over.
    fn resharded_at(&self) -> Option<Sequence> {
        None
    }
}

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// What stands before the rows is sent.
    Begin,
    /// Rows are read and sent.
    Read,
    /// Rows are waited for.
    Wait,
    /// What stands after the rows is sent.
    End,
    /// Nothing.
    Done,
}

/// A feed that is being sent.
pub(super) struct Stream<S> {
    /// Where the rows come from.
    source: S,
    /// How it is sent.
    mode: Mode,
    /// How it looks.
    writer: Writer,
    /// How many rows may still be sent.
    limit: u64,
    /// After how long without rows it ends.
    timeout: Duration,
    /// After how long without anything a heartbeat is sent.
    heartbeat: Option<Duration>,
    /// Whether heartbeats of lines say how far it has come.
    tells_progress: bool,
    /// What is done next.
    phase: Phase,
    /// Whether rows were sent.
    has_rows: bool,
    /// When rows were sent last, or the feed began.
    rows_at: Duration,
    /// When anything was sent last.
    sent_at: Duration,
    /// Time.
    env: Env,
    /// What is counted.
    metrics: AnswerCounts,
    /// Turns true when all feeds have to end.
    closing: watch::Receiver<bool>,
    /// Its place among the feeds of its client.
    _place: Option<Place>,
}

/// What all feeds of a server share.
pub(super) struct FeedContext {
    /// Time.
    pub env: Env,
    /// What is counted.
    pub metrics: AnswerCounts,
    /// Turns true when all feeds have to end.
    pub closing: watch::Receiver<bool>,
    /// A place among the feeds of the client; a feed that does not wait needs none.
    pub place: Option<Place>,
}

impl<S: Source> Stream<S> {
    /// A feed of `source` as `query` asks for it.
    pub fn new(source: S, query: &Query, around: FeedContext) -> Self {
        let FeedContext { env, metrics, closing, place } = around;
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
            closing,
            _place: place,
        }
    }

    /// The answer that sends it.
    pub fn into_response(self) -> Response {
        let (form, lasts) = (self.writer.form(), self.mode != Mode::Normal);
        let body = Body::from_stream(stream::unfold(self, |mut feed| async move {
            let item = feed.next().await?;
            Some((item, feed))
        }));
        let mut response = respond(form, body);
        if lasts {
            response.extensions_mut().insert(Lasting);
            // nginx would keep rows until it has a buffer full of them.
            response.headers_mut().insert(UNBUFFERED, HeaderValue::from_static("no"));
        }
        response
    }

    /// What is sent next. A failure cuts the connection off, so that the client does not take it for the end.
    async fn next(&mut self) -> Option<Result<Bytes>> {
        loop {
            let chunk = match self.phase {
                Phase::Begin => {
                    self.phase = Phase::Read;
                    Ok(Bytes::from_static(self.writer.form().begin()))
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
                    self.metrics.bytes.inc_by(chunk.len() as u64);
                    return Some(Ok(chunk));
                }
                Err(error) => {
                    tracing::error!(%error, "a feed is cut off");
                    self.phase = Phase::Done;
                    self.metrics.failures.inc();
                    return Some(Err(error));
                }
            }
        }
    }

    /// Reads some rows. If they take longer than a heartbeat, it is sent instead.
    async fn read(&mut self) -> Result<Bytes> {
        if self.limit == 0 || (self.mode != Mode::Normal && *self.closing.borrow()) {
            self.phase = Phase::End;
            return Ok(Bytes::new());
        }
        // Before the source is at work.
        let heartbeat = self.heartbeat.map_or_else(Bytes::new, |_| self.beat());
        let progress = {
            let mut read = pin!(self.source.read(&mut self.writer, self.limit));
            // Mostly there is something, and no clock is needed.
            if let Some(done) = (&mut read).now_or_never() {
                done?
            } else {
                let rest =
                    self.heartbeat.map(|interval| (self.sent_at + interval).saturating_sub(self.env.now()));
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
            self.metrics.rows.inc_by(rows);
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
        let is_due = self.heartbeat.is_some_and(|interval| self.env.now() >= self.sent_at + interval);
        if bytes.is_empty() && is_due && self.phase == Phase::Read {
            return Ok(self.beat());
        }
        Ok(bytes)
    }

    /// What is sent so that the line does not fall silent. Where a client can tell, it says how far the feed has come, so that one
    /// whose rows are rare goes on from there and not from its last row, which may be too old one day.
    fn beat(&self) -> Bytes {
        let form = self.writer.form();
        match form {
            WireFormat::Events => {
                format!("event: heartbeat\ndata: \nid: {}\n\n", self.source.position()).into()
            }
            WireFormat::Lines if self.tells_progress => {
                format!("{{\"last_seq\":\"{}\"}}\n", self.source.position()).into()
            }
            WireFormat::Array | WireFormat::Lines => Bytes::from_static(form.heartbeat()),
        }
    }

    /// Waits for rows, for the time of a heartbeat, or for the end.
    async fn wait(&mut self) -> Bytes {
        let (from, interval) = match self.heartbeat {
            Some(interval) => (self.sent_at, interval),
            None => (self.rows_at, self.timeout),
        };
        let rest = (from + interval).saturating_sub(self.env.now());
        tokio::select! {
            biased;
            // The sender may be gone as well.
            () = async { drop(self.closing.wait_for(|is_closing| *is_closing).await) } => self.phase = Phase::End,
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

    /// What stands after the rows.
    async fn end(&mut self) -> Result<Bytes> {
        let form = self.writer.form();
        let resharded_at = self.source.resharded_at();
        if form == WireFormat::Events && resharded_at.is_none() {
            return Ok(Bytes::new());
        }
        let pending = if S::TELLS_PENDING { Some(self.source.pending().await?) } else { None };
        let resharded_at = resharded_at.as_ref().map(|at| at as &dyn Display);
        Ok(form.end(&self.source.position(), pending, resharded_at).into())
    }
}

/// An answer of this form.
pub(super) fn respond(form: WireFormat, body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(form.content_type()));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(form.cache_control()));
    response
}
