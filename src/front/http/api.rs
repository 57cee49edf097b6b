//! [`Api`] holds what all routers share, and wraps every route: it checks the rights of callers, limits requests, and counts answers.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{DefaultBodyLimit, MatchedPath, Request, State},
    http::{Extensions, HeaderValue, Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::{
    net::TcpListener,
    sync::{Semaphore, watch},
};
use tracing::Instrument;

use super::{
    ApiOptions, Caller, Failure, Server, ServerOptions,
    answer::Secret,
    body::Bodies,
    caller::{FeedPermit, OpenFeeds, Permission},
};
use crate::{
    base::{env::Env, error::Result, filter::Filter, health::EndsWithBus, tasks::within},
    bus::{Bus, running::NodeHandle},
    roles::dispatcher::Dispatcher,
    state::{keys::Role, notification_feed::NotificationFeed},
};

/// The maximum total length of the globs in a caller's requests, in bytes. For the longest name, a glob that was chosen to be slow costs up to
/// 10 µs per byte of the glob.
const GLOBS_LEN_MAX: usize = 8_192;

/// The maximum wait for the store before an answer begins, so that every client gets an answer within a minute, whatever the store does.
const ANSWER_MAX: Duration = Duration::from_secs(50);

/// How many feeds may read the store at once; also how many may request documents or leaves (`include_docs`, `style=all_docs`) from the
/// layer at once. Others wait their turn. The two are counted separately, so slow documents delay only feeds with documents.
const READS_MAX: usize = 16;

/// The state that all routers share. Clones share it, too.
///
/// Live feeds end with [`Api::shutdown`], or when the last handle and the last router are dropped.
#[derive(Clone)]
pub struct Api {
    pub(super) inner: Arc<Inner>,
}

/// The parameter of routes that need only the shared state.
pub(super) type Shared = State<Arc<Inner>>;

/// The state that all routes share.
pub(super) struct Inner {
    pub bus: Bus,
    pub dispatcher: Dispatcher,
    pub feed: NotificationFeed,
    pub options: ApiOptions,
    pub reads: Semaphore,
    pub doc_reads: Semaphore,
    pub bodies: Bodies,
    pub feeds: OpenFeeds,
    /// The lengths of the feeds' globs.
    pub globs: OpenFeeds,
    /// The number of answers by route, method and status.
    pub answers: Mutex<BTreeMap<(String, &'static str, u16), u64>>,
    /// Becomes true when all feeds have to end.
    pub closing: watch::Sender<bool>,
}

impl Inner {
    pub fn env(&self) -> &Env {
        self.feed.context.env()
    }

    /// Reserves what a feed of `caller` with these `names` takes: one of the caller's long-lived feeds, if the feed `lasts`, and the length
    /// of its glob, if it has one. Fails with 429 if too little is left.
    pub fn enter(
        &self,
        caller: &Caller,
        names: Option<&Filter>,
        lasts: bool,
    ) -> Result<Vec<FeedPermit>, Failure> {
        let (name, feeds_max) = (caller.name(), self.options.feeds_per_name_max);
        let feed = lasts.then(|| self.feeds.enter(name, 1, feeds_max, "feeds"));
        let glob_len = names.and_then(Filter::glob_len);
        let glob = glob_len.map(|len| self.globs.enter(name, len, GLOBS_LEN_MAX, "bytes of globs"));
        feed.into_iter().chain(glob).collect()
    }

    pub fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }

    /// Completes when all feeds have to end.
    pub async fn closed(&self) {
        drop(self.closing.subscribe().wait_for(|is_closing| *is_closing).await);
    }
}

/// Returns the caller of an admitted request with these extensions.
pub(super) fn caller(extensions: &Extensions) -> Caller {
    extensions.get::<Caller>().expect("every admitted request has one").clone()
}

impl EndsWithBus for Inner {
    /// Ends all live feeds.
    fn end_with_bus(&self) {
        self.closing.send_replace(true);
    }
}

impl Api {
    /// Creates the routers' shared state for `bus`. Live feeds are subscribers of `dispatcher` and end with it. The length of the
    /// dispatcher's ring ([`DispatcherOptions::ring_rows_max`](crate::DispatcherOptions::ring_rows_max)) limits how far a feed may fall
    /// behind before it has to read the store.
    ///
    /// Fails with [`Error::Invalid`](crate::Error::Invalid) if an option is outside its limits.
    pub fn start(bus: &Bus, dispatcher: &Dispatcher, options: ApiOptions) -> Result<Self> {
        options.check()?;
        let inner = Inner {
            bus: bus.clone(),
            dispatcher: dispatcher.subscriptions(),
            feed: bus.feed(),
            reads: Semaphore::new(READS_MAX),
            doc_reads: Semaphore::new(READS_MAX),
            bodies: Bodies::new(bus.store().env(), options.body_len_max, options.bodies_len_max),
            feeds: OpenFeeds::default(),
            globs: OpenFeeds::default(),
            answers: Mutex::default(),
            closing: watch::Sender::new(false),
            options,
        };
        let inner = Arc::new(inner);
        inner.feed.context.stats.health.end_with_bus(&inner);
        Ok(Self { inner })
    }

    /// Ends all live feeds, each in the way that its clients expect. Later requests get the rows that exist, and do not wait for more.
    pub fn shutdown(&self) {
        self.inner.closing.send_replace(true);
    }

    /// Returns all routes of the bus, for a server without a layer: `_db_updates`, `_changes` of the recorded databases, sessions,
    /// events, administration, and `/`.
    pub fn routes(&self) -> Router {
        let bus = &self.inner.bus;
        self.db_updates()
            .merge(self.changes(&bus.changes(), self.recorded_databases()))
            .merge(self.catalogue(self.recorded_databases()))
            .merge(self.sessions())
            .merge(self.administration())
            .merge(self.welcome())
    }

    /// Protects a layer's `router`: only admins of this API may use it ([`ApiOptions::authorize`](field@ApiOptions::authorize)).
    pub fn protected(&self, router: Router) -> Router {
        self.admitting(router, Permission::Admin)
    }

    /// Protects a layer's `router`: all callers that this API knows may use it. A layer that decides what they may do finds the [`Caller`]
    /// in the extensions of requests.
    pub fn known(&self, router: Router) -> Router {
        self.admitting(router, Permission::Known)
    }

    /// Adds a layer to `router` that inflates compressed bodies (`Content-Encoding: gzip`). IBM's clients compress all bodies. A body may
    /// have at most [`ApiOptions::body_len_max`](super::ApiOptions::body_len_max) bytes, before and after inflating.
    ///
    /// The routers of the library inflate bodies themselves. Use this for a layer's own routes.
    pub fn inflated(&self, router: Router) -> Router {
        let unpack = async |State(inner): Shared, request: Request, next: Next| -> Response {
            if !request.headers().contains_key(header::CONTENT_ENCODING) {
                return next.run(request).await;
            }
            receive(State((inner, Permission::Record)), request, next).await
        };
        router.layer(middleware::from_fn_with_state(Arc::clone(&self.inner), unpack))
    }

    /// Protects a `router` of the library: only callers with this permission may use it. Handlers get whole bodies, and have a time limit.
    pub(super) fn guarded(&self, router: Router<Arc<Inner>>, permission: Permission) -> Router {
        let router = router.with_state(Arc::clone(&self.inner));
        self.limited(router, permission)
    }

    /// Does the same as [`Api::guarded`], for a router that already has its state.
    pub(super) fn limited(&self, router: Router, permission: Permission) -> Router {
        let inner = || Arc::clone(&self.inner);
        let router = router
            // `receive` has its own limit.
            .route_layer(DefaultBodyLimit::disable())
            .route_layer(middleware::from_fn_with_state(inner(), in_time))
            .route_layer(middleware::from_fn_with_state((inner(), permission), receive));
        self.admitting(router, permission)
    }

    fn admitting(&self, router: Router, permission: Permission) -> Router {
        let state = (Arc::clone(&self.inner), permission);
        self.counted(router.route_layer(middleware::from_fn_with_state(state, admit)))
    }

    /// Makes `router` count its answers.
    pub(super) fn counted(&self, router: Router) -> Router {
        router.route_layer(middleware::from_fn_with_state(Arc::clone(&self.inner), count))
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("options", &self.inner.options).finish_non_exhaustive()
    }
}

/// Passes a request on if its caller has the permission and the bus still exists. Without the second check, another bus might answer.
async fn admit(
    State((inner, permission)): State<(Arc<Inner>, Permission)>,
    request: Request,
    next: Next,
) -> Response {
    if inner.feed.context.stats.health.ended().is_some() {
        let reason = "The bus that this server opened no longer exists. Start the server again.";
        return Failure::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", reason).into_response();
    }
    let (mut parts, body) = request.into_parts();
    let caller = inner.options.authorize.authorize(&parts).await;
    match caller.and_then(|caller| caller.check(permission).map(|()| caller)) {
        Ok(caller) => {
            parts.extensions.insert(caller);
            next.run(Request::from_parts(parts, body)).await
        }
        Err(failure) => {
            let mut response = failure.into_response();
            // CouchDB clients may also send `Cookie` in this header, to avoid the login dialog of browsers.
            let asked = parts.headers.get("x-couchdb-www-authenticate").map(HeaderValue::as_bytes);
            let asks_for_dialog = asked
                .and_then(|scheme| scheme.get(..5))
                .is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"basic"));
            if asks_for_dialog && response.status() == StatusCode::UNAUTHORIZED {
                let scheme = HeaderValue::from_static("Basic realm=\"notibus\", charset=\"UTF-8\"");
                response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
            }
            response
        }
    }
}

/// Receives the whole body of a request, and passes the request on.
async fn receive(
    State((inner, permission)): State<(Arc<Inner>, Permission)>,
    request: Request,
    next: Next,
) -> Response {
    let (mut parts, body) = request.into_parts();
    match inner.bodies.receive(&parts.headers, body, permission).await {
        Ok(body) => {
            parts.headers.remove(header::CONTENT_ENCODING);
            parts.headers.insert(header::CONTENT_LENGTH, body.len().into());
            next.run(Request::from_parts(parts, body.into())).await
        }
        Err(failure) => failure.into_response(),
    }
}

/// Answers 503 if the store does not answer in time. A transaction in progress may still be committed.
async fn in_time(State(inner): Shared, request: Request, next: Next) -> Response {
    let answered = async { Ok::<_, Failure>(next.run(request).await) };
    within(inner.env(), ANSWER_MAX, "an answer", answered).await.unwrap_or_else(IntoResponse::into_response)
}

async fn count(State(inner): Shared, request: Request, next: Next) -> Response {
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
    *inner.answers.lock().entry((route.to_owned(), method, response.status().as_u16())).or_default() += 1;
    if let Some(Secret(error)) = response.extensions().get() {
        let health = &inner.feed.context.stats.health;
        if let Some(unsaid) = health.remark(inner.env(), &format!("failed request: {error}")) {
            tracing::error!(route, method, error, unsaid, "a request failed");
        }
    }
    response
}

impl NodeHandle {
    /// Creates the routers' shared state for the bus. When the roles shut down, the feeds end first.
    ///
    /// Fails with [`Error::Invalid`](crate::Error::Invalid) if an option is outside its limits.
    pub fn api(&self, options: ApiOptions) -> Result<Api> {
        let api = Api::start(self.bus(), self.dispatcher(), options)?;
        let ending = api.clone();
        self.end_first(Box::new(move || {
            ending.shutdown();
            std::future::ready(()).boxed()
        }));
        Ok(api)
    }

    /// Serves `router` to all clients that connect to `listener`, until the roles end. Returns the address. The node lists HTTP among its
    /// roles.
    ///
    /// Fails as [`Server::start`] does.
    pub async fn serve(
        &self,
        listener: TcpListener,
        router: Router,
        options: ServerOptions,
    ) -> Result<SocketAddr> {
        let server = Server::start(listener, router, options, self.bus().store().env())?;
        let address = server.local_addr();
        // The node lists the role once, however many servers it has.
        let announced = self.node().announce(Role::HTTP).await.ok();
        self.end_first(Box::new(move || {
            async move {
                server.shutdown().await;
                drop(announced);
            }
            .boxed()
        }));
        Ok(address)
    }
}
