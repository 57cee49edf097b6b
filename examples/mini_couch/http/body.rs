//! Bodies of requests: JSON, compressed or not.

use std::io::Read;

use axum::{
    Json,
    body::to_bytes,
    extract::Request,
    http::{StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use flate2::read::GzDecoder;
use serde_json::{Value, json};

use super::super::problem::Problem;

/// The most bytes of a body.
pub const BODY_LEN_MAX: usize = 16 << 20;

/// A body as JSON.
pub fn parse(body: &[u8]) -> Result<Value, Problem> {
    serde_json::from_slice(body).map_err(|_| Problem::BadRequest("invalid UTF-8 JSON".to_owned()))
}

/// Some clients compress what they send.
pub async fn inflate(request: Request, next: Next) -> Response {
    if request.headers().get(header::CONTENT_ENCODING).is_none_or(|value| value != "gzip") {
        return next.run(request).await;
    }
    let (mut parts, body) = request.into_parts();
    let too_large = || (StatusCode::PAYLOAD_TOO_LARGE, Json(json!({ "error": "too_large" }))).into_response();
    let Ok(packed) = to_bytes(body, BODY_LEN_MAX).await else { return too_large() };
    let mut plain = Vec::new();
    let mut reader = GzDecoder::new(packed.as_ref()).take(BODY_LEN_MAX as u64 + 1);
    if reader.read_to_end(&mut plain).is_err() {
        return Problem::BadRequest("the body is not gzip".to_owned()).into_response();
    }
    if plain.len() > BODY_LEN_MAX {
        return too_large();
    }
    parts.headers.remove(header::CONTENT_ENCODING);
    parts.headers.remove(header::CONTENT_LENGTH);
    next.run(Request::from_parts(parts, plain.into())).await
}
