//! Bodies of requests: bounded in length and in time, and inflated where the client has compressed them.
//!
//! The length counts after inflating, too, so that a small body cannot become a large one; inflating is no work for the tasks that
//! answer, and few bodies are inflated at once. All bodies together are bounded as well: clients that begin to send and stop hold
//! what they have sent until their time is over. What this is not: compression of answers, of which feeds would be held up.

use std::{io::Read, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use flate2::bufread::GzDecoder;
use http_body_util::BodyExt;

use super::{Api, Failure, Inner, bodies::Held};

/// How long the body of a request may take to come.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The most parts of a compressed body. Each costs some microseconds, also an empty one.
const PARTS_MAX: usize = 1_000;

impl Inner {
    /// The body of a request with these headers, inflated. Fails with 413 if it is too long, with 408 if it does not come, with
    /// 415 if it is encoded in an unknown way, and with 400 if it breaks off or is not what its encoding says.
    pub async fn body(&self, headers: &HeaderMap, body: Body) -> Result<Bytes, Failure> {
        let is_packed = is_packed(headers)?;
        let held = tokio::select! {
            read = self.read(body) => read?,
            () = self.env().sleep(BODY_TIMEOUT) => {
                let reason = "The body did not come in time.";
                return Err(Failure::new(StatusCode::REQUEST_TIMEOUT, "timeout", reason));
            }
        };
        let held = if is_packed { self.inflate(held).await? } else { held };
        Ok(Bytes::from_owner(held))
    }

    /// What is sent. Fails with 413 if it is too long, with 503 if there is no room, and with 400 if it breaks off.
    async fn read(&self, mut body: Body) -> Result<Held, Failure> {
        let mut held = Held { bytes: Vec::new(), room: None };
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| Failure::bad_request("The body has broken off."))?;
            let Ok(data) = frame.into_data() else { continue };
            if held.bytes.len() + data.len() > self.options.body_len_max {
                return Err(too_large(self.options.body_len_max));
            }
            held.grow(&self.bodies, data.len())?;
            held.bytes.extend_from_slice(&data);
        }
        Ok(held)
    }

    /// What was compressed.
    async fn inflate(&self, packed: Held) -> Result<Held, Failure> {
        let len_max = self.options.body_len_max;
        let turn = Arc::clone(&self.bodies.inflating);
        let turn = turn.acquire_owned().await.expect("the semaphore is never closed");
        let inflate = move || {
            // It lives as long as the work, also if the client hangs up.
            let _turn = turn;
            inflate(&packed.bytes, len_max)
        };
        let broken = |_| Failure::bad_request("The body cannot be inflated.");
        let bytes = tokio::task::spawn_blocking(inflate).await.map_err(broken)??;
        let mut held = Held { bytes: Vec::new(), room: None };
        held.grow(&self.bodies, bytes.len())?;
        Ok(Held { bytes, ..held })
    }
}

impl Api {
    /// `router`, which gets the bodies of requests inflated that clients have compressed (`Content-Encoding: gzip`), as IBM's
    /// clients do with all of them. They have at most [`ApiOptions::body_len_max`](super::ApiOptions::body_len_max) bytes,
    /// inflated or not.
    ///
    /// The routers of the library do so by themselves. This is for the other routes of a layer.
    pub fn inflated(&self, router: Router) -> Router {
        router.layer(middleware::from_fn_with_state(Arc::clone(&self.inner), unpack))
    }
}

/// Gives a request on with its body inflated.
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

/// Whether a body with these headers is compressed. Fails if it is in a way that nobody here knows.
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

/// What was compressed, if it has at most `len_max` bytes. No more than that is inflated.
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

/// 413.
fn too_large(len_max: usize) -> Failure {
    let reason = format!("The body has more than {len_max} bytes.");
    Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", reason)
}
