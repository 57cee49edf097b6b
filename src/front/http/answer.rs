//! Routes and answers in CouchDB's form: paths with and without a trailing slash, parameters, and JSON objects on one line.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Router,
    body::Body,
    extract::{FromRequestParts, Path, State},
    http::{HeaderValue, Method, StatusCode, header, request::Parts},
    response::Response,
    routing::MethodRouter,
};
use serde::{Serialize, de::DeserializeOwned};

use super::{Failure, Inner};

/// The state of the routes that need nothing but the bus.
pub(super) type Shared = State<Arc<Inner>>;

/// What a route returns.
pub(super) type Answered = Result<Response, Failure>;

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

/// Returns the parameters of a request, each of which has to be among `known`, and there once. Names that begin with `_` are allowed:
/// clients add them to bypass caches.
pub(super) fn parameters(
    parts: &Parts,
    known: &[&'static str],
) -> Result<BTreeMap<&'static str, String>, Failure> {
    let mut given = BTreeMap::new();
    for (key, value) in form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()) {
        if key.starts_with('_') {
            continue;
        }
        let Some(key) = known.iter().find(|known| **known == key) else {
            let reason = match known {
                [] => "There are no parameters here.".to_owned(),
                _ => format!("The parameter {key} is none of {}.", known.join(", ")),
            };
            return Err(Failure::bad_request(reason));
        };
        if given.insert(*key, value.into_owned()).is_some() {
            return Err(Failure::bad_request(format!("The parameter {key} is given twice.")));
        }
    }
    Ok(given)
}

/// Returns the parameters of a request that only reads, each of which has to be among `known`.
pub(super) fn reads(
    parts: &Parts,
    known: &[&'static str],
) -> Result<BTreeMap<&'static str, String>, Failure> {
    match parts.method {
        Method::GET | Method::HEAD => parameters(parts, known),
        _ => Err(Failure::method_not_allowed("GET,HEAD")),
    }
}

/// Fails if a web page sends the request: a browser sends what any page asks for.
pub(super) fn check_page(parts: &Parts) -> Result<(), Failure> {
    if parts.headers.contains_key(header::ORIGIN) {
        return Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", "Web pages may only read."));
    }
    Ok(())
}
