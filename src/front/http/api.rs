//! [`Api`] holds what all routers share, and wraps every route: it checks the rights of callers, limits requests, and counts answers.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

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
    Authorize, Caller, Failure, Server, ServerOptions, allow_all,
    answer::Secret,
    authorize::Permission,
    body::{Bodies, receive},
    metrics::AnswerCounts,
    query::Mode,
    stream::FeedContext,
};
use crate::{
    base::{
        env::Env,
        error::{Error, Result},
        health::EndsWithBus,
        tasks::within,
    },
    bus::{Bus, running::Running},
    roles::dispatcher::Dispatcher,
    state::{keys::Role, notification_feed::NotificationFeed},
};

/// How long a request waits for the store at most, until its answer begins. So every client gets one within a minute, whatever happens
/// to the store.
const ANSWER_MAX: Duration = Duration::from_secs(50);

/// How the routers answer.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ApiOptions {
    /// Who may send requests, and what they may do. Default: [`allow_all`].
    pub authorize: Arc<dyn Authorize>,
    /// The longest `timeout`, which is also its default. Default: 60 s.
    pub timeout_max: Duration,
    /// The shortest `heartbeat`, unless `heartbeat_max` is shorter. Default: 100 ms.
    pub heartbeat_min: Duration,
    /// The longest `heartbeat`. Default: 60 s.
    pub heartbeat_max: Duration,
    /// How many lasting feeds each name may have open; all callers without a name count as one. Default: 10,000.
    pub feeds_per_name_max: usize,
    /// How many feeds may read the store at once, 1 to 10,000, and how many may request documents or leaves (`include_docs`,
    /// `style=all_docs`) from the layer at once; others wait for their turn. So slow documents delay only feeds with documents.
    /// Default: 16.
    pub reads_max: usize,
    /// How long the documents of a page may take before the feed is cut off. Default: 60 s.
    pub doc_reads_limit: Duration,
    /// The most bytes of a request's body, before and after inflating. Default: 1 MiB.
    pub body_len_max: usize,
    /// The most bytes of all bodies together that the server holds; a body beyond that gets 503. The ids of documents that feeds
    /// keep (`_doc_ids`) have as many bytes beside them. Default: 64 MiB.
    pub bodies_len_max: usize,
}

crate::base::macros::setters!(ApiOptions { authorize: Arc<dyn Authorize>, timeout_max: Duration, heartbeat_min: Duration, heartbeat_max: Duration, feeds_per_name_max: usize, reads_max: usize, doc_reads_limit: Duration, body_len_max: usize, bodies_len_max: usize });

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            authorize: allow_all(),
            timeout_max: Duration::from_mins(1),
            heartbeat_min: Duration::from_millis(100),
            heartbeat_max: Duration::from_mins(1),
            feeds_per_name_max: 10_000,
            reads_max: 16,
            doc_reads_limit: Duration::from_mins(1),
            body_len_max: 1 << 20,
            bodies_len_max: 64 << 20,
        }
    }
}

impl ApiOptions {
    /// The most that [`ApiOptions::reads_max`](field@Self::reads_max) may be.
    pub const READS_MAX: usize = 10_000;

    /// Fails if an option is out of its limits.
    fn check(&self) -> Result<()> {
        let invalid = |what, reason| Err(Error::invalid(what, reason));
        if self.heartbeat_max.is_zero() || self.doc_reads_limit.is_zero() || self.feeds_per_name_max == 0 {
            return invalid("heartbeat, limit of the reads of documents, or feeds per name", "it is zero");
        }
        if !(1..=Self::READS_MAX).contains(&self.reads_max) {
            return invalid("reads", "there are 1 to 10,000 at once");
        }
        if self.bodies_len_max < self.body_len_max {
            return invalid("length of bodies", "one would not fit");
        }
        Ok(())
    }
}

/// The state that all routers share. Clones share it, too.
///
/// Live feeds end with [`Api::shutdown`], or when the last handle and the last router are dropped.
#[derive(Clone)]
pub struct Api {
    pub(super) inner: Arc<Inner>,
}

/// The state that all feeds share.
pub(super) struct Inner {
    pub bus: Bus,
    pub dispatcher: Dispatcher,
    pub feed: NotificationFeed,
    pub options: ApiOptions,
    pub reads: Semaphore,
    /// Limits how many feeds ask a layer for documents at once.
    pub doc_reads: Semaphore,
    pub bodies: Bodies,
    /// How many lasting feeds each name has open.
    open: Mutex<HashMap<Arc<str>, Arc<AtomicUsize>>>,
    pub metrics: AnswerCounts,
    /// Becomes true when all feeds have to end.
    pub closing: watch::Sender<bool>,
}

/// A feed's place among the lasting feeds of its caller. Dropping it gives the place back.
#[derive(Debug)]
pub(super) struct FeedPermit {
    /// Of the caller.
    open: Arc<AtomicUsize>,
}

impl Drop for FeedPermit {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Inner {
    pub fn env(&self) -> &Env {
        self.feed.context.env()
    }

    /// Builds the context of a feed for the caller of a request with these extensions. Fails with 429 if the caller has too many
    /// lasting feeds.
    pub fn feed_context(&self, mode: Mode, extensions: &Extensions) -> Result<FeedContext, Failure> {
        let caller = caller(extensions);
        let place = match mode {
            Mode::Normal => None,
            _ => Some(self.enter(&caller)?),
        };
        let (env, closing) = (self.env().clone(), self.closing.subscribe());
        let (metrics, stats) = (self.metrics.clone(), Arc::clone(&self.feed.context.stats));
        Ok(FeedContext { env, metrics, stats, closing, caller, place })
    }

    /// Takes a place for a lasting feed of `caller`. Fails with 429 if there is none left.
    pub fn enter(&self, caller: &Caller) -> Result<FeedPermit, Failure> {
        let mut names = self.open.lock();
        names.retain(|_, open| open.load(Ordering::Relaxed) > 0);
        let open = Arc::clone(names.entry(caller.name().into()).or_default());
        let feeds = open.load(Ordering::Relaxed);
        if feeds >= self.options.feeds_per_name_max {
            let reason = format!("You have {feeds} feeds open, and may have no more.");
            return Err(Failure::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", reason));
        }
        open.fetch_add(1, Ordering::Relaxed);
        Ok(FeedPermit { open })
    }

    /// Returns how many lasting feeds there are.
    pub fn feeds(&self) -> usize {
        self.open.lock().values().map(|open| open.load(Ordering::Relaxed)).sum()
    }

    pub fn is_closing(&self) -> bool {
        *self.closing.borrow()
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
    /// Makes the routers' shared state for `bus`. Live feeds are subscribers of `dispatcher` and end with it. The length of its
    /// ring ([`DispatcherOptions::ring_rows_max`](crate::DispatcherOptions::ring_rows_max)) limits how far a feed may be behind
    /// without reading the store.
    ///
    /// Fails with [`Error::Invalid`](crate::Error::Invalid) if an option is out of its limits.
    pub fn start(bus: &Bus, dispatcher: &Dispatcher, options: ApiOptions) -> Result<Self> {
        options.check()?;
        let inner = Inner {
            bus: bus.clone(),
            dispatcher: dispatcher.subscriptions(),
            feed: bus.feed(),
            reads: Semaphore::new(options.reads_max),
            doc_reads: Semaphore::new(options.reads_max),
            bodies: Bodies::new(options.bodies_len_max),
            open: Mutex::default(),
            metrics: AnswerCounts::default(),
            closing: watch::Sender::new(false),
            options,
        };
        let inner = Arc::new(inner);
        inner.feed.context.stats.health.end_with_bus(&inner);
        Ok(Self { inner })
    }

    /// Ends all live feeds, each in the way that clients expect. Later requests get the rows that exist, and do not wait for more.
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

    /// Protects a layer's `router`: only admins of this API may use it ([`ApiOptions::authorize`]).
    pub fn protected(&self, router: Router) -> Router {
        self.admitting(router, Permission::Admin)
    }

    /// Protects a layer's `router`: all callers that this API knows may use it. A layer that decides what they may do finds the
    /// [`Caller`] among the extensions of requests.
    pub fn known(&self, router: Router) -> Router {
        self.admitting(router, Permission::Known)
    }

    /// Protects `router` of the library: only callers with this permission may use it. Handlers get whole bodies, and have a limit of
    /// time.
    pub(super) fn guarded(&self, router: Router<Arc<Inner>>, permission: Permission) -> Router {
        let router = router.with_state(Arc::clone(&self.inner));
        self.limited(router, permission)
    }

    /// Like [`Api::guarded`], of a router that has its state.
    pub(super) fn limited(&self, router: Router, permission: Permission) -> Router {
        let inner = || Arc::clone(&self.inner);
        let router = router
            // `receive` has a limit.
            .route_layer(DefaultBodyLimit::disable())
            .route_layer(middleware::from_fn_with_state(inner(), in_time))
            .route_layer(middleware::from_fn_with_state(inner(), receive));
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

/// Lets a request pass if its caller has the permission, and the bus still exists: otherwise its answer would come from another bus.
async fn admit(
    State((inner, permission)): State<(Arc<Inner>, Permission)>,
    request: Request,
    next: Next,
) -> Response {
    if inner.feed.context.stats.health.ended().is_some() {
        let reason = "The bus that this server has opened no longer exists. Start the server again.";
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
            // Clients of CouchDB also send `Cookie` here, to be spared the dialog of browsers.
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

/// Answers 503 if the store does not answer in time. A transaction in progress may be committed all the same.
async fn in_time(State(inner): State<Arc<Inner>>, request: Request, next: Next) -> Response {
    let answered = async { Ok::<_, Failure>(next.run(request).await) };
    within(inner.env(), ANSWER_MAX, "an answer", answered).await.unwrap_or_else(IntoResponse::into_response)
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

impl Running {
    /// Makes the routers' shared state for the bus. When the roles shut down, the feeds end first.
    ///
    /// Fails with [`Error::Invalid`](crate::Error::Invalid) if an option is out of its limits.
    pub fn api(&self, options: ApiOptions) -> Result<Api> {
        let api = Api::start(self.bus(), self.dispatcher(), options)?;
        let ending = api.clone();
        self.end_first(Box::new(move || {
            ending.shutdown();
            std::future::ready(()).boxed()
        }));
        Ok(api)
    }

    /// Serves `router` to everyone who connects to `listener`, until the roles end. Returns the address. The node lists HTTP among
    /// its roles.
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
