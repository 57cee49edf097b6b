//! Wraps every route: checks the rights of callers, refuses requests after the end of the bus, and counts answers.

use std::sync::Arc;

use axum::{
    Router,
    extract::{MatchedPath, Request, State},
    http::{HeaderValue, Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use tracing::Instrument;

use super::{Access, Api, Credentials, Failure, Inner, access::Caught, caller::Permission, failure::Secret};
use crate::base::env::Env;

impl Api {
    /// Protects a layer's `router`: only admins of this API may use it ([`ApiOptions::access`](super::ApiOptions::access)).
    pub fn protected(&self, router: Router) -> Router {
        self.guarded(router, Permission::Admin)
    }

    /// Protects a layer's `router`: all callers with credentials of this API may use it. A layer that decides what they may do
    /// finds the [`Caller`](super::Caller) among the extensions of requests; there is none where everyone may send requests.
    pub fn known(&self, router: Router) -> Router {
        self.guarded(router, Permission::Known)
    }

    /// Protects `router`: only callers with this permission may use it.
    pub(super) fn guarded(&self, router: Router, permission: Permission) -> Router {
        let router = match &self.inner.options.access {
            Access::Open => router,
            Access::Credentials(credentials) => {
                let guard =
                    Guard { credentials: credentials.clone(), env: self.inner.env().clone(), permission };
                router.route_layer(middleware::from_fn_with_state(Arc::new(guard), admit))
            }
        };
        let router =
            router.route_layer(middleware::from_fn_with_state(Arc::clone(&self.inner), refuse_at_end));
        self.counted(router)
    }

    /// Makes `router` count its answers.
    pub(super) fn counted(&self, router: Router) -> Router {
        router.route_layer(middleware::from_fn_with_state(Arc::clone(&self.inner), count))
    }
}

/// Protects some routes.
struct Guard {
    credentials: Credentials,
    env: Env,
    /// The permission that callers need.
    permission: Permission,
}

/// Lets a request pass if its credentials have the permission.
async fn admit(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    let Guard { credentials, env, permission } = &*guard;
    // Clients of CouchDB also send `Cookie` here, to be spared the dialog.
    let asks_for_dialog = request.headers().get("x-couchdb-www-authenticate").is_some_and(|scheme| {
        scheme.as_bytes().get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"basic"))
    });
    let caught = credentials.check(request.headers(), env.wall_ms());
    let Caught { caller, session } =
        match caught.and_then(|caught| caught.caller.check(*permission).map(|()| caught)) {
            Ok(caught) => caught,
            Err(failure) => {
                let mut response = failure.into_response();
                if asks_for_dialog && response.status() == StatusCode::UNAUTHORIZED {
                    let scheme = HeaderValue::from_static("Basic realm=\"notibus\", charset=\"UTF-8\"");
                    response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
                }
                return response;
            }
        };
    let renewed = session.flatten().map(|cookie| cookie.header(request.headers(), env.wall_ms()));
    request.extensions_mut().insert(caller);
    let mut response = next.run(request).await;
    if let Some(cookie) = renewed {
        response.headers_mut().append(header::SET_COOKIE, cookie);
    }
    response
}

/// Refuses all requests once the bus is gone: their answers would come from another bus, or from none.
async fn refuse_at_end(State(inner): State<Arc<Inner>>, request: Request, next: Next) -> Response {
    if inner.feed.context.stats.health.ended().is_none() {
        next.run(request).await
    } else {
        let reason = "The bus that this server has opened is there no more. Start the server again.";
        Failure::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", reason).into_response()
    }
}

async fn count(State(inner): State<Arc<Inner>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = match *request.method() {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        _ => "other",
    };
    let route = route.as_ref().map_or("", MatchedPath::as_str);
    let route = route.strip_suffix('/').filter(|route| !route.is_empty()).unwrap_or(route);
    let span = tracing::debug_span!("request", method, route);
    let response = next.run(request).instrument(span).await;
    inner.metrics.answered(route, method, response.status().as_u16());
    if let Some(Secret(error)) = response.extensions().get() {
        let health = &inner.feed.context.stats.health;
        if let Some(unsaid) = health.remark(inner.env(), &format!("failed request: {error}")) {
            tracing::error!(route, method, error, unsaid, "a request has failed");
        }
    }
    response
}
