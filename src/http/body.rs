//! Bodies of requests: bounded in length and in time, and inflated where the client has compressed them.
//!
//! The length counts after inflating, too, so that a small body cannot become a large one. What this is not: compression of
//! answers, of which feeds would be held up.

use std::{io::Read, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{self, Body, Bytes},
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use flate2::read::MultiGzDecoder;
use http_body_util::LengthLimitError;

use super::{Api, Failure, Inner};

/// How long the body of a request may take to come.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

impl Inner {
    /// The body of a request with these headers, inflated. Fails with 413 if it is too long, with 408 if it does not come, with
    /// 415 if it is encoded in an unknown way, and with 400 if it breaks off or is not what its encoding says.
    pub async fn body(&self, headers: &HeaderMap, body: Body) -> Result<Bytes, Failure> {
        let is_packed = is_packed(headers)?;
        let read = body::to_bytes(body, self.options.body_len_max);
        let read = tokio::select! {
            read = read => read,
            () = self.env().sleep(BODY_TIMEOUT) => {
                let reason = "The body did not come in time.";
                return Err(Failure::new(StatusCode::REQUEST_TIMEOUT, "timeout", reason));
            }
        };
        let bytes = read.map_err(|error| {
            let source = std::error::Error::source(&error);
            if source.and_then(|source| source.downcast_ref::<LengthLimitError>()).is_some() {
                return too_large(self.options.body_len_max);
            }
            Failure::bad_request("The body has broken off.")
        })?;
        if is_packed { inflate(&bytes, self.options.body_len_max) } else { Ok(bytes) }
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
fn inflate(packed: &[u8], len_max: usize) -> Result<Bytes, Failure> {
    if packed.is_empty() {
        return Ok(Bytes::new());
    }
    let mut plain = Vec::new();
    let most = (len_max as u64).saturating_add(1);
    if MultiGzDecoder::new(packed).take(most).read_to_end(&mut plain).is_err() {
        return Err(Failure::bad_request("The body is not gzip, as its Content-Encoding says."));
    }
    if plain.len() > len_max { Err(too_large(len_max)) } else { Ok(plain.into()) }
}

/// 413.
fn too_large(len_max: usize) -> Failure {
    let reason = format!("The body has more than {len_max} bytes.");
    Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", reason)
}
