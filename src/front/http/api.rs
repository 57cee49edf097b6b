//! [`Api`]: what all routers share.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{MatchedPath, Request, State},
    http::{Extensions, HeaderValue, Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::MethodRouter,
};
use serde::Serialize;
use tokio::sync::{Semaphore, watch};

use super::{
    Access, Credentials, Failure, Peer, access::Caught, admission::Admission, body::Bodies, caller::Right,
    metrics::Metrics, name_locks::NameLocks, query::Mode, session::set_cookie, stream::FeedContext,
};
use crate::{
    base::{
        env::Env,
        error::{Error, Result},
    },
    bus::{Bus, observed::Watch},
    roles::{
        changes::LOOK_INTERVAL,
        dispatcher::{Dispatcher, Subscriptions},
    },
    state::notification_feed::NotificationFeed,
};

/// The most feeds that may read the store at once.
const READS_MAX: usize = 10_000;

/// How the routers answer.
#[derive(Debug, Clone)]
pub struct ApiOptions {
    /// Who may ask. Default: everyone who reaches the server. A layer with accounts of its own puts them in front.
    pub access: Access,
    /// The most of `timeout`, and what it is by default. Default: 60 s.
    pub timeout_max: Duration,
    /// The least of `heartbeat`, unless that is over the most. Default: 100 ms.
    pub heartbeat_min: Duration,
    /// The most of `heartbeat`. Default: 60 s.
    pub heartbeat_max: Duration,
    /// How many feeds each client may have open: a name with credentials, or else an address. Default: 10,000.
    pub feeds_per_client_max: usize,
    /// How many feeds read the store at once, 1 to 10,000; others wait for their turn. Default: 16.
    pub reads_max: usize,
    /// How many feeds ask the layer at once for documents or leaves (`include_docs`, `style=all_docs`), 1 to 10,000; others that
    /// do so wait for their turn. They hold none of [`ApiOptions::reads_max`] meanwhile, so slow documents delay only each other.
    /// Default: 16.
    pub doc_reads_max: usize,
    /// How long the documents of a page may take, before the feed is cut off. Default: 60 s.
    pub doc_reads_limit: Duration,
    /// Whether there is `_db_updates` at all. If not, it answers as CouchDB does without its database `_global_changes`. Default:
    /// yes.
    pub keeps_db_updates: bool,
    /// After how long a live feed of `_changes` looks at the store at the latest although no notification has told it to: of
    /// changes that were removed without a word, or edits of a database that the bus holds for replaced, none does. Those of one
    /// database share what was found. Default: 5 min.
    pub look_interval: Duration,
    /// For how long a proxy may keep the answer to a `longpoll` of `_db_updates` that names a sequence as `since`, so that it asks once
    /// for all who wait there and hold the same. An answer that is a little old is no wrong one: it goes on from its `last_seq`. Only
    /// with [`Access::Open`], where all may read the same. Default: not at all.
    pub longpoll_max_age: Option<Duration>,
    /// The longest body of a request, in bytes, also after inflating. Default: 1 MiB.
    pub body_len_max: usize,
    /// The most bytes of all bodies together that have come and are not worked off; another one gets 503. Default: 64 MiB.
    pub bodies_len_max: usize,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            access: Access::Open,
            timeout_max: Duration::from_mins(1),
            heartbeat_min: Duration::from_millis(100),
            heartbeat_max: Duration::from_mins(1),
            feeds_per_client_max: 10_000,
            reads_max: 16,
            doc_reads_max: 16,
            doc_reads_limit: Duration::from_mins(1),
            keeps_db_updates: true,
            look_interval: LOOK_INTERVAL,
            longpoll_max_age: None,
            body_len_max: 1 << 20,
            bodies_len_max: 64 << 20,
        }
    }
}

impl ApiOptions {
    /// Fails if an option is out of its limits.
    fn check(&self) -> Result<()> {
        let zero = |what| Err(Error::invalid(what, "it is zero"));
        match self {
            Self { heartbeat_max: Duration::ZERO, .. } => zero("heartbeat"),
            Self { look_interval: Duration::ZERO, .. } => zero("look interval"),
            Self { feeds_per_client_max: 0, .. } => zero("feeds per client"),
            Self { doc_reads_limit: Duration::ZERO, .. } => zero("limit of the reads of documents"),
            Self { reads_max, doc_reads_max, .. }
                if [reads_max, doc_reads_max].iter().any(|max| !(1..=READS_MAX).contains(*max)) =>
            {
                let reason = format!("{reads_max} and {doc_reads_max} at once are not 1 to {READS_MAX}");
                Err(Error::invalid("reads", reason))
            }
            Self { longpoll_max_age: Some(_), access: Access::Credentials(_), .. } => {
                let reason = "a proxy would show its answers to those who have no credentials";
                Err(Error::invalid("age of long-polls", reason))
            }
            Self { body_len_max, bodies_len_max, .. } if bodies_len_max < body_len_max => {
                Err(Error::invalid("length of bodies", "one would not fit"))
            }
            _ => Ok(()),
        }
    }
}

/// What all routers share. Clones are handles on the same.
///
/// Live feeds end with [`Api::shutdown`], and when the last handle and router are gone.
#[derive(Clone)]
pub struct Api {
    /// What they share.
    pub(super) inner: Arc<Inner>,
}

/// What all feeds share.
pub(super) struct Inner {
    pub bus: Bus,
    /// Tells of what comes.
    pub dispatcher: Subscriptions,
    pub feed: NotificationFeed,
    /// How it answers.
    pub options: ApiOptions,
    /// Limits how many feeds read the store at once.
    pub reads: Semaphore,
    /// Room for the bodies of requests.
    pub bodies: Bodies,
    /// Whose turn it is to decide what a name stands for.
    pub turns: NameLocks,
    /// Limits how many of them ask a layer for documents.
    pub doc_reads: Semaphore,
    /// The feeds of each client.
    pub admission: Arc<Admission>,
    /// What was done.
    pub metrics: Metrics,
    /// What is seen of the bus by looking more than once.
    pub watch: Watch,
    /// Counts the reshards that were asked for here, and wakes the feeds of single shards.
    pub reshards: watch::Sender<u64>,
    /// Turns true when all feeds have to end.
    closing: watch::Sender<bool>,
}

impl Inner {
    /// Time and randomness.
    pub fn env(&self) -> &Env {
        self.feed.context.env()
    }

    /// The context of a feed for the client of these extensions. Fails with 429 if the client has too many lasting feeds.
    pub fn surroundings(&self, mode: Mode, extensions: &Extensions) -> Result<FeedContext, Failure> {
        let place = match mode {
            Mode::Normal => None,
            _ => Some(self.admission.enter(extensions)?),
        };
        let (env, closing) = (self.env().clone(), self.closing.subscribe());
        Ok(FeedContext { env, metrics: self.metrics.clone(), closing, place })
    }

    /// Whether all feeds have to end.
    pub fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }
}

impl Api {
    /// What answers for `bus`. Live feeds are subscribers of `dispatcher`, whose ring
    /// ([`DispatcherOptions::ring_rows_max`](crate::DispatcherOptions::ring_rows_max)) says how far behind they may be without
    /// reading the store. They end with it.
    ///
    /// Fails with [`Error::Invalid`] if an option is out of its limits.
    pub fn start(bus: &Bus, dispatcher: &Dispatcher, options: ApiOptions) -> Result<Self> {
        options.check()?;
        let inner = Inner {
            bus: bus.clone(),
            dispatcher: dispatcher.subscriptions(),
            feed: bus.feed(),
            reads: Semaphore::new(options.reads_max),
            bodies: Bodies::new(options.bodies_len_max),
            turns: NameLocks::default(),
            doc_reads: Semaphore::new(options.doc_reads_max),
            admission: Admission::new(options.feeds_per_client_max),
            metrics: Metrics::default(),
            watch: Watch::default(),
            reshards: watch::Sender::new(0),
            closing: watch::Sender::new(false),
            options,
        };
        inner.feed.context.stats.health.close_at_end(inner.closing.clone());
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Ends all live feeds, each as clients expect it, and from now on answers with what there is.
    pub fn shutdown(&self) {
        self.inner.closing.send_replace(true);
    }

    /// `router` of a layer, for the admins of this API only ([`ApiOptions::access`]).
    pub fn protected(&self, router: Router) -> Router {
        self.guarded(router, Right::Admin)
    }

    /// `router` of a layer, for all who have credentials of this API. A layer that knows what they may do finds the [`Caller`](super::Caller) among
    /// the extensions of requests; there is none where everyone may ask.
    pub fn known(&self, router: Router) -> Router {
        self.guarded(router, Right::Known)
    }

    /// `router`, for those only who have this right.
    pub(super) fn guarded(&self, router: Router, right: Right) -> Router {
        let router = match &self.inner.options.access {
            Access::Open => router,
            Access::Credentials(credentials) => {
                let guard = Guard { credentials: credentials.clone(), env: self.inner.env().clone(), right };
                router.route_layer(middleware::from_fn_with_state(Arc::new(guard), admit))
            }
        };
        let router =
            router.route_layer(middleware::from_fn_with_state(Arc::clone(&self.inner), refuse_at_end));
        self.counted(router)
    }

    /// `router`, whose answers are counted.
    pub(super) fn counted(&self, router: Router) -> Router {
        router.route_layer(middleware::from_fn_with_state(Arc::clone(&self.inner), count))
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("options", &self.inner.options).finish_non_exhaustive()
    }
}

/// `router` that answers at `path`, also with a slash behind it: CouchDB does not see that slash.
pub(super) fn at<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    path: &str,
    methods: MethodRouter<S>,
) -> Router<S> {
    router.route(&format!("{path}/"), methods.clone()).route(path, methods)
}

/// Who is let through to some routes.
struct Guard {
    /// By what callers are known.
    credentials: Credentials,
    /// Time.
    env: Env,
    /// What they need.
    right: Right,
}

/// Lets a request through whose credentials have the right.
async fn admit(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    let Guard { credentials, env, right } = &*guard;
    let peer = request.extensions().get::<Peer>().copied();
    let asks_for_dialog = request.headers().contains_key("x-couchdb-www-authenticate");
    let caught = credentials.check(request.headers(), peer, env).await;
    let Caught { caller, session } =
        match caught.and_then(|caught| caught.caller.check(*right).map(|()| caught)) {
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
    let renewed = session.flatten().map(|value| set_cookie(&value, request.headers(), env.wall_ms()));
    request.extensions_mut().insert(caller);
    let mut response = next.run(request).await;
    if let Some(cookie) = renewed {
        response.headers_mut().append(header::SET_COOKIE, cookie);
    }
    response
}

/// Lets no request through once the bus is gone: whatever it would be answered would be of another bus, or of none.
async fn refuse_at_end(State(inner): State<Arc<Inner>>, request: Request, next: Next) -> Response {
    if inner.feed.context.stats.health.ended().is_none() {
        next.run(request).await
    } else {
        let reason = "The bus that this server has opened is there no more. Start the server again.";
        Failure::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", reason).into_response()
    }
}

/// Counts an answer.
async fn count(State(inner): State<Arc<Inner>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = match *request.method() {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        _ => "other",
    };
    let response = next.run(request).await;
    let route = route.as_ref().map_or("", MatchedPath::as_str);
    let route = route.strip_suffix('/').filter(|route| !route.is_empty()).unwrap_or(route);
    inner.metrics.answered(route, method, response.status().as_u16());
    response
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
