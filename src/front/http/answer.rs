//! Routes and answers in CouchDB's form: paths with and without a trailing slash, and JSON objects on one line.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{FromRequestParts, Path, State},
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::Response,
    routing::MethodRouter,
};
use serde::{Serialize, de::DeserializeOwned};

use super::{Failure, Inner};
use crate::base::tasks::within;

/// The state of the routes that need nothing but the bus.
pub(super) type Shared = State<Arc<Inner>>;

/// What a route returns.
pub(super) type Answered = Result<Response, Failure>;

/// How long a request waits for the store at most, until its answer begins. So every client gets one within a minute, whatever happens
/// to the store.
const ANSWER_MAX: Duration = Duration::from_secs(50);

/// The result of `work` for an answer; fails with 503 if the store does not answer in time. A transaction in progress may be
/// committed all the same.
pub(super) async fn in_time<T, E: Into<Failure>>(
    inner: &Inner,
    what: &'static str,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, Failure> {
    let work = async { work.await.map_err(Into::into) };
    within(inner.env(), ANSWER_MAX, what, work).await
}

/// Extracts the placeholders of a path. Its refusals have the same form as all others.
pub(super) struct PathSegments<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathSegments<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let segments = Path::from_request_parts(parts, state).await;
        segments.map(|Path(segments)| Self(segments)).map_err(|error| Failure::bad_request(error.body_text()))
    }
}

/// Adds a route at `path`, with and without a trailing slash: CouchDB ignores that slash.
pub(super) fn at<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    path: &str,
    methods: MethodRouter<S>,
) -> Router<S> {
    router.route(&format!("{path}/"), methods.clone()).route(path, methods)
}

/// Makes a router of these routes, whose paths begin with `start`, as [`at`] adds them.
pub(super) fn routes<S: Clone + Send + Sync + 'static, const N: usize>(
    start: &str,
    routes: [(&str, MethodRouter<S>); N],
) -> Router<S> {
    let add = |router, (path, methods)| at(router, &format!("{start}{path}"), methods);
    routes.into_iter().fold(Router::new(), add)
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
