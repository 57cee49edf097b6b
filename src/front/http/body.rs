//! Reads the bodies of requests, limits their length and time, and inflates those that clients have compressed.
//!
//! The limit of the length also holds after inflating, so that a small body cannot become a large one. Inflating runs on threads of
//! its own, not on the tasks that answer, and only for few bodies at once. All bodies together have a limit as well: a client may
//! begin to send and stop, and the server holds the part that came until the time limit ends. This module does not compress
//! answers, because compression would hold up feeds.

use std::{io::Read, sync::Arc, time::Duration};

use axum::{
    BoxError, Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use flate2::bufread::GzDecoder;
use http_body_util::{BodyExt, LengthLimitError, Limited};

use super::{
    Api, Failure, Inner,
    bodies::{Coming, Held},
};

const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The most bytes of a body that anybody may send. A connection has more for headers.
const STRANGERS_LEN_MAX: usize = 4 << 10;

/// The most gzip members of a compressed body. Each costs some microseconds, even an empty one.
const PARTS_MAX: usize = 1_000;

impl Inner {
    /// Reads and inflates the body of a request with these headers. Fails with 413 if it is too long, with 408 if it does not come
    /// in time, with 415 if its encoding is unknown, and with 400 if it breaks off or does not match its encoding.
    pub async fn body(&self, headers: &HeaderMap, body: Body) -> Result<Bytes, Failure> {
        let is_packed = is_packed(headers)?;
        let declared = headers.get(header::CONTENT_LENGTH).and_then(|len| len.to_str().ok()?.parse().ok());
        // A client that waits for `100 Continue` need not send what is refused.
        if declared.is_some_and(|len: u64| len > self.options.body_len_max as u64) {
            return Err(too_large(self.options.body_len_max));
        }
        let held = self.in_time(self.read(body)).await?;
        let held = if is_packed { self.inflate(held).await? } else { held };
        Ok(Bytes::from_owner(held))
    }

    /// Reads and inflates the body of a request that anybody may send, such as a log-in. It fails as [`Inner::body`] does, but takes
    /// nothing of the room that all bodies share: otherwise strangers who begin to send and stop would fill that room.
    pub async fn strangers_body(&self, headers: &HeaderMap, body: Body) -> Result<Vec<u8>, Failure> {
        let is_packed = is_packed(headers)?;
        let failed = |error: BoxError| match error.downcast_ref::<LengthLimitError>() {
            Some(_) => too_large(STRANGERS_LEN_MAX),
            None => Failure::bad_request("The body has broken off."),
        };
        let read = async { Limited::new(body, STRANGERS_LEN_MAX).collect().await.map_err(failed) };
        let bytes = self.in_time(read).await?.to_bytes();
        if is_packed { inflate(&bytes, STRANGERS_LEN_MAX) } else { Ok(bytes.to_vec()) }
    }

    /// Awaits a body. Fails with 408 if it does not come in time.
    async fn in_time<T>(&self, read: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        tokio::select! {
            read = read => read,
            () = self.env().sleep(BODY_TIMEOUT) => {
                let reason = "The body did not come in time.";
                Err(Failure::new(StatusCode::REQUEST_TIMEOUT, "timeout", reason))
            }
        }
    }

    /// Reads a body. Fails with 413 if it is too long, with 503 if there is no room, and with 400 if it breaks off.
    async fn read(&self, mut body: Body) -> Result<Held, Failure> {
        let mut coming = Coming::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| Failure::bad_request("The body has broken off."))?;
            let Ok(data) = frame.into_data() else { continue };
            if coming.len() + data.len() > self.options.body_len_max {
                return Err(too_large(self.options.body_len_max));
            }
            coming.add(&self.bodies, &data)?;
        }
        Ok(coming.whole())
    }

    /// Inflates a body on another thread.
    async fn inflate(&self, packed: Held) -> Result<Held, Failure> {
        let len_max = self.options.body_len_max;
        let turn = Arc::clone(&self.bodies.inflating);
        let turn = turn.acquire_owned().await.expect("the semaphore is never closed");
        let inflate = move || {
            // The permit lives as long as the work, even if the client hangs up.
            let _turn = turn;
            inflate(packed.as_ref(), len_max)
        };
        let broken = |_| Failure::bad_request("The body cannot be inflated.");
        let bytes = tokio::task::spawn_blocking(inflate).await.map_err(broken)??;
        Held::new(&self.bodies, bytes)
    }
}

impl Api {
    /// Adds a layer to `router` that inflates the bodies that clients have compressed (`Content-Encoding: gzip`). IBM's clients
    /// compress all bodies. A body has at most [`ApiOptions::body_len_max`](super::ApiOptions::body_len_max) bytes, before and
    /// after inflating.
    ///
    /// The routers of the library inflate bodies by themselves. Use this for the other routes of a layer.
    pub fn inflated(&self, router: Router) -> Router {
        router.layer(middleware::from_fn_with_state(Arc::clone(&self.inner), unpack))
    }
}

/// Inflates the body of a request, and passes the request on.
async fn unpack(State(inner): State<Arc<Inner>>, request: Request, next: Next) -> Response {
    if !request.headers().contains_key(header::CONTENT_ENCODING) {
        return next.run(request).await;
    }
    let (mut parts, body) = request.into_parts();
    match inner.body(&parts.headers, body).await {
        Ok(body) => {
            parts.headers.remove(header::CONTENT_ENCODING);
            parts.headers.insert(header::CONTENT_LENGTH, body.len().into());
            next.run(Request::from_parts(parts, body.into())).await
        }
        Err(failure) => failure.into_response(),
    }
}

/// Returns whether a body with these headers is compressed. Fails if the encoding is unknown.
fn is_packed(headers: &HeaderMap) -> Result<bool, Failure> {
    let mut encodings = headers.get_all(header::CONTENT_ENCODING).iter();
    let encoding = encodings.next().map(|value| value.to_str().unwrap_or_default().trim());
    let unknown = || {
        let reason = "The Content-Encoding of a body has to be gzip or identity.";
        Failure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "bad_content_encoding", reason)
    };
    match encoding {
        Some(_) if encodings.next().is_some() => Err(unknown()),
        None => Ok(false),
        Some(encoding) if encoding.eq_ignore_ascii_case("identity") => Ok(false),
        Some(encoding) if ["gzip", "x-gzip"].iter().any(|gzip| encoding.eq_ignore_ascii_case(gzip)) => {
            Ok(true)
        }
        Some(_) => Err(unknown()),
    }
}

/// Inflates a body to at most `len_max` bytes. It stops as soon as there are more.
fn inflate(mut packed: &[u8], len_max: usize) -> Result<Vec<u8>, Failure> {
    let mut plain = Vec::new();
    for _ in 0..PARTS_MAX {
        if packed.is_empty() {
            return Ok(plain);
        }
        let mut part = GzDecoder::new(packed);
        let most = (len_max - plain.len()) as u64 + 1;
        if part.by_ref().take(most).read_to_end(&mut plain).is_err() {
            return Err(Failure::bad_request("The body is not gzip, as its Content-Encoding says."));
        }
        if plain.len() > len_max {
            return Err(too_large(len_max));
        }
        packed = part.into_inner();
    }
    Err(Failure::bad_request(format!("The body has more than {PARTS_MAX} parts of gzip.")))
}

fn too_large(len_max: usize) -> Failure {
    let reason = format!("The body has more than {len_max} bytes.");
    Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", reason)
}
