//! Routes and answers in CouchDB's form: paths with and without a trailing slash, and JSON objects on one line.

use axum::{
    Router,
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::Response,
    routing::MethodRouter,
};
use serde::Serialize;

/// Adds a route at `path`, with and without a trailing slash: CouchDB ignores that slash.
pub(super) fn at<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    path: &str,
    methods: MethodRouter<S>,
) -> Router<S> {
    router.route(&format!("{path}/"), methods.clone()).route(path, methods)
}

/// Makes an answer with this object.
pub(super) fn json(status: StatusCode, object: &impl Serialize) -> Response {
    let mut body = serde_json::to_vec(object).expect("an answer can be written as JSON");
    body.push(b'\n');
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("must-revalidate"));
    response
}

/// Answers that something is done.
pub(super) fn done() -> Response {
    json(StatusCode::OK, &serde_json::json!({ "ok": true }))
}
