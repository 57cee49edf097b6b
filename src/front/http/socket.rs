//! [`Socket`] stands between a connection's socket and the HTTP protocol.
//!
//! It adds three things to the protocol. First, it fails if a client reads nothing for too long. Second, while an answer is in
//! progress, it hides the end of the client's data from the protocol for a while. A client that has closed only its own side (`nc
//! -N`) still reads, and looks like one that has hung up until the server sends something. An end in the middle of a body is not
//! hidden, because the rest cannot come any more. Third, when the protocol refuses a
//! request that it cannot parse, with an empty body, the socket sends a body that says what is wrong.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::{Body, Bytes, HttpBody},
    response::Response,
};
use futures_util::{future::BoxFuture, task::AtomicWaker};
use hyper::body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::base::env::Env;

/// How long a client that has closed its side may wait for an answer that ends by itself.
const HALF_CLOSED_MAX: Duration = Duration::from_secs(10);

/// How long such a client gets a lasting feed: enough for the rows that there are. CouchDB also ends such feeds, when it checks the
/// connection.
const HALF_CLOSED_LIVE_MAX: Duration = Duration::from_millis(500);

/// The header that every answer to a request has. Answers of the protocol itself do not have it.
pub(super) const REQUEST_ID: &str = "x-couch-request-id";

/// No request is being answered.
const IDLE: u8 = 0;
/// An answer that ends by itself is in progress.
const BUSY: u8 = 1;
/// A lasting feed is being sent.
const LIVE: u8 = 2;

/// Marks, in the extensions of an answer, that it lasts until its client leaves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lasting;

/// Whether a request of a connection is being answered. Clones share the value.
#[derive(Debug, Clone, Default)]
pub(super) struct Answering(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// One of [`IDLE`], [`BUSY`] and [`LIVE`].
    phase: AtomicU8,
    /// Whether the answer waits for more of the request's body.
    needs_more: AtomicBool,
    /// The connection, if its socket hides the end of the client's data.
    hides_end: AtomicWaker,
}

/// An answer in progress. Dropping it ends the answer.
pub(super) struct Answer(Answering);

impl Answering {
    /// Marks the connection as busy.
    pub fn begin(&self) -> Answer {
        self.set(BUSY);
        Answer(self.clone())
    }

    /// Watches whether the answer waits for more of the request's `body`.
    pub fn receive<B>(&self, body: B) -> Received<B> {
        Received { body, answering: self.clone() }
    }

    fn phase(&self) -> u8 {
        self.0.phase.load(Ordering::Relaxed)
    }

    /// Notes whether the answer waits for more of the request's body.
    fn need_more(&self, needs_more: bool) {
        self.0.needs_more.store(needs_more, Ordering::Relaxed);
        if needs_more {
            self.0.hides_end.wake();
        }
    }

    fn set(&self, phase: u8) {
        self.0.phase.store(phase, Ordering::Relaxed);
    }
}

/// The body of a request, on its way.
pub(super) struct Received<B> {
    body: B,
    answering: Answering,
}

impl<B: HttpBody + Unpin> HttpBody for Received<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let poll = Pin::new(&mut self.body).poll_frame(context);
        self.answering.need_more(poll.is_pending());
        poll
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B> Drop for Received<B> {
    fn drop(&mut self) {
        self.answering.need_more(false);
    }
}

impl Answer {
    /// Ties the answer to the body of `response`: it ends when the body is dropped.
    pub fn with(self, mut response: Response) -> Response {
        if response.extensions_mut().remove::<Lasting>().is_some() {
            self.0.set(LIVE);
        }
        response.map(|body| Body::new(Sent { body, _answer: self }))
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.0.set(IDLE);
    }
}

struct Sent {
    body: Body,
    /// It is dropped with the body.
    _answer: Answer,
}

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The socket of a connection, around its `stream`.
pub(super) struct Socket<S> {
    stream: S,
    /// How long a client may take nothing.
    limit: Duration,
    answering: Answering,
    env: Env,
    /// Completes after `limit`, while written data waits for the client.
    stuck: Option<BoxFuture<'static, ()>>,
    /// How long a client that has closed its side may wait, and a timer for that.
    ended: Option<(Duration, BoxFuture<'static, ()>)>,
    /// The rest of the answer that replaces an empty refusal.
    refusal: Vec<u8>,
}

impl<S: AsyncWrite + Unpin> Socket<S> {
    /// Makes a socket that fails if the client takes nothing for `limit`.
    pub fn new(stream: S, limit: Duration, answering: Answering, env: &Env) -> Self {
        let (stuck, ended, refusal) = (None, None, Vec::new());
        Self { stream, limit, answering, env: env.clone(), stuck, ended, refusal }
    }

    /// Checks the result of an attempt to write, and fails if the client has taken nothing for `limit`.
    fn written<T>(&mut self, context: &mut Context<'_>, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.stuck = None;
            return poll;
        }
        let stuck = self.stuck.get_or_insert_with(|| self.env.sleep(self.limit));
        ready!(stuck.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }

    /// Replaces `head` if it is an empty refusal of the protocol. Returns whether it did.
    fn replace(&mut self, head: &[u8]) -> bool {
        if !head.starts_with(b"HTTP/1.1 4") || self.answering.phase() != IDLE {
            return false;
        }
        let text = String::from_utf8_lossy(head).to_ascii_lowercase();
        let (lines, _) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        // An answer with an empty body is over before its head is written.
        if !lines.contains("\r\ncontent-length: 0") || lines.contains(REQUEST_ID) {
            return false;
        }
        let status = String::from_utf8_lossy(&head[9..]);
        let status = status.split("\r\n").next().unwrap_or("400 Bad Request").to_owned();
        let (error, reason) = match &status[..3] {
            "431" => ("too_large", "The headers of the request are too many or too long."),
            "414" => ("too_large", "The address of the request is too long."),
            "408" => ("timeout", "The headers of the request did not come in time."),
            _ => ("bad_request", "This is no request of HTTP."),
        };
        let body = format!("{{\"error\":\"{error}\",\"reason\":\"{reason}\"}}\n");
        self.refusal = format!(
            "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nCache-Control: must-revalidate\r\n\
             Connection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes();
        true
    }

    /// Sends the answer that replaces an empty refusal.
    fn poll_refusal(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.refusal.is_empty() {
            let poll = Pin::new(&mut self.stream).poll_write(context, &self.refusal);
            let written = ready!(self.written(context, poll))?;
            self.refusal.drain(..written);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Socket<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        if this.ended.is_none() {
            ready!(Pin::new(&mut this.stream).poll_read(context, buffer))?;
            if buffer.filled().len() > before || buffer.remaining() == 0 {
                // The answer does not know these bytes yet, and they may be the rest of the body.
                this.answering.need_more(false);
                return Poll::Ready(Ok(()));
            }
        }
        this.answering.0.hides_end.register(context.waker());
        if this.answering.0.needs_more.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(()));
        }
        let most = match this.answering.phase() {
            BUSY => HALF_CLOSED_MAX,
            LIVE => HALF_CLOSED_LIVE_MAX,
            _ => return Poll::Ready(Ok(())),
        };
        // The request may have come with the end, so its answer begins only now. After the shorter time it is known what lasts.
        let first = || (HALF_CLOSED_LIVE_MAX, this.env.sleep(HALF_CLOSED_LIVE_MAX));
        let (allowed, timer) = this.ended.get_or_insert_with(first);
        ready!(timer.as_mut().poll(context));
        if *allowed < most {
            (*allowed, *timer) = (most, this.env.sleep(most.saturating_sub(*allowed)));
            ready!(timer.as_mut().poll(context));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Socket<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.replace(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        ready!(self.poll_refusal(context))?;
        let poll = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.written(context, poll)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if slices.first().is_some_and(|first| self.replace(first)) {
            return Poll::Ready(Ok(slices.iter().map(|slice| slice.len()).sum()));
        }
        ready!(self.poll_refusal(context))?;
        let poll = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.written(context, poll)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_refusal(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_refusal(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// A client may pause as often as it likes, because only the time since it last took something counts. If pauses added up, the
    /// server would drop a reader that works for a while after each row.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_pauses_and_goes_on_is_kept_and_one_that_does_not_is_dropped() {
        let (mut client, stream) = tokio::io::duplex(64);
        let limit = Duration::from_secs(30);
        let mut socket = Socket::new(stream, limit, Answering::default(), &Env::system());
        let sent = tokio::spawn(async move { socket.write_all(&[b'x'; 64 * 6]).await });
        for _ in 0..5 {
            tokio::time::sleep(limit * 2 / 3).await;
            client.read_exact(&mut [0; 64]).await.unwrap();
        }
        sent.await.unwrap().unwrap();

        let (_client, stream) = tokio::io::duplex(64);
        let mut socket = Socket::new(stream, limit, Answering::default(), &Env::system());
        let error = socket.write_all(&[b'x'; 65]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    /// Regression: the protocol learned of the end in the middle of a body only after the 10 s that a client may wait for its answer.
    #[tokio::test(start_paused = true)]
    async fn an_end_in_the_middle_of_a_body_is_an_error_at_once() {
        let answers = |answering: Answering| {
            hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                let answer = answering.begin();
                let body = answering.receive(request.into_body());
                async move {
                    let whole = http_body_util::BodyExt::collect(body).await.is_ok();
                    let status = if whole { 200 } else { 400 };
                    let response = Response::builder().status(status).body(Body::empty()).unwrap();
                    Ok::<_, std::convert::Infallible>(answer.with(response))
                }
            })
        };
        for (body, status) in [("12345", "200"), ("1234", "400"), ("", "400")] {
            let (mut client, stream) = tokio::io::duplex(1_000);
            let answering = Answering::default();
            let socket = Socket::new(stream, Duration::from_mins(1), answering.clone(), &Env::system());
            let served = hyper::server::conn::http1::Builder::new()
                .serve_connection(hyper_util::rt::TokioIo::new(socket), answers(answering));
            let served = tokio::spawn(served);
            let began = tokio::time::Instant::now();
            let head = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n";
            client.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
            client.shutdown().await.unwrap();
            let mut answer = [0; 12];
            client.read_exact(&mut answer).await.unwrap();
            assert_eq!(answer, *format!("HTTP/1.1 {status}").as_bytes(), "{body:?}");
            assert_eq!(began.elapsed(), Duration::ZERO, "{body:?}");
            drop(client);
            drop(served.await);
        }
    }
}
