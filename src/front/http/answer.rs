//! Routes and answers as CouchDB has them: paths with and without a slash at their end, and JSON objects on a line.

use axum::{
    Router,
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::Response,
    routing::MethodRouter,
};
use serde::Serialize;

/// `router` that answers at `path`, also with a slash behind it: CouchDB does not see that slash.
pub(super) fn at<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    path: &str,
    methods: MethodRouter<S>,
) -> Router<S> {
    router.route(&format!("{path}/"), methods.clone()).route(path, methods)
}

/// An answer with this object.
pub(super) fn json(status: StatusCode, object: &impl Serialize) -> Response {
    let mut body = serde_json::to_vec(object).expect("what is told can be written as JSON");
    body.push(b'\n');
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("must-revalidate"));
    response
}
