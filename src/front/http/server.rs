//! [`Server`] serves a router on hyper: it limits connections, headers and silent clients, checks the host name and the origin of each
//! request, and shuts down in an orderly way.
//!
//! For a client that does not read, the server holds one chunk and the buffers of the connection and its socket. A client that closes its
//! sending side counts as gone, as in hyper: the answer in progress ends, and everything that it holds is released. On Linux the system
//! closes a connection whose client has acknowledged or read nothing for a while. Elsewhere, and for TLS and limits by address, use a proxy
//! in front.
//!
//! Any page can make a browser send requests to any address, even to a server that only the browser's own machine can reach. The browser
//! marks requests from a foreign page with `Sec-Fetch-Site` or `Origin`. But the owner of a page's host name can point that name to
//! 127.0.0.1. Then the page seems to come from the server itself, and may read its answers (DNS rebinding). The requests from such a page
//! still have its own host name in `Host`.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, Version, header, uri::Authority},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::{GracefulShutdown, Watcher},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{JoinHandle, JoinSet},
};
use tower_http::{
    cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer, ExposeHeaders},
    sensitive_headers::SetSensitiveRequestHeadersLayer,
    set_header::SetResponseHeaderLayer,
};

use super::Failure;
use crate::base::{
    env::{Env, bounded_timer},
    error::{Error, Result},
    log_throttle::LogThrottle,
};

/// The header with the id of a request, as in CouchDB.
const REQUEST_ID: &str = "x-couch-request-id";

/// The headers that pages of other origins may read from an answer.
const EXPOSED: [&str; 7] =
    ["content-type", "cache-control", "accept-ranges", "etag", "server", REQUEST_ID, "retry-after"];

/// The maximum size in bytes of a request's line and headers, and of the part of an answer that a connection buffers.
const HEADER_LEN_MAX: usize = 32 << 10;

/// How many connections may wait to be accepted; the system may allow fewer. If the queue is full, a client tries again only after 1 s, 3 s
/// and 7 s, even if there is room earlier.
const BACKLOG: i32 = 4_096;

/// How long the listener pauses when it cannot accept connections, for example because no file descriptor is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The answer to a connection beyond the limit.
const FULL: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n\
    Retry-After: 1\r\nContent-Length: 73\r\n\r\n\
    {\"error\":\"too_many_connections\",\"reason\":\"The server has no room left.\"}\n";

/// The limits of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerOptions {
    /// The maximum number of connections; the next one gets 503. Each needs a file descriptor. Default: 16,384.
    pub connections_max: usize,
    /// How long a client may take to send the headers of a request, including the first one. Default: 30 s.
    pub header_timeout: Duration,
    /// How long a client may receive none of the sent data before the system drops the connection (Linux only). Default: 30 s.
    pub write_timeout: Duration,
    /// The size of a socket's send buffer in bytes. Default: 128 KiB.
    pub send_buffer_len: usize,
    /// How long a shutdown waits for answers in progress. Default: 3 s.
    pub drain_timeout: Duration,
    /// The names or addresses, without ports, that clients may use for the server, besides `localhost` and loopback addresses; `None`
    /// allows all. Default: none.
    pub hosts: Option<Vec<String>>,
    /// The origins, such as `https://app.example`, whose pages may use the server through a browser; `*` stands for all, which an
    /// open server refuses. Default: none.
    pub cors_origins: Vec<String>,
    /// Whether browsers may send credentials from those pages. This is not allowed with `*`. Default: no.
    pub cors_credentials: bool,
    /// Whether the server may listen on an address that other machines can reach. Set this if the API has credentials
    /// ([`ApiOptions::authorize`](super::ApiOptions::authorize)) and a layer's own routes check accounts, or if a server in front checks
    /// them. Then also set `hosts` to `None`, or to the names that clients use. Default: no.
    pub is_public: bool,
}

crate::base::macros::setters!(ServerOptions { connections_max: usize, header_timeout: Duration, write_timeout: Duration, send_buffer_len: usize, drain_timeout: Duration, hosts: Option<Vec<String>>, cors_origins: Vec<String>, cors_credentials: bool, is_public: bool });

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            connections_max: 16_384,
            header_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            send_buffer_len: 128 << 10,
            drain_timeout: Duration::from_secs(3),
            hosts: Some(Vec::new()),
            cors_origins: Vec::new(),
            cors_credentials: false,
            is_public: false,
        }
    }
}

impl ServerOptions {
    /// Checks these options for a server at `address`, as [`Server::start`] does. Call this early to find mistakes.
    ///
    /// Fails with [`Error::Invalid`] for `address`, if other machines can reach it and `is_public` is not set; for `host`, if a name could
    /// never match, such as one with a port; for `origin`, if an origin could never match, or would let every web page in; and if another
    /// option is outside its limits.
    pub fn check(&self, address: SocketAddr) -> Result<()> {
        if !self.is_public && !address.ip().to_canonical().is_loopback() {
            let reason = format!(
                "other machines can reach {address}: give the API credentials (`ApiOptions::authorize`) or put accounts in front, \
                 and set `ServerOptions::is_public`"
            );
            return Err(Error::invalid("address", reason));
        }
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let is_name =
            |name: &&String| parse_ip(name).is_some() || !name.is_empty() && name.bytes().all(is_part);
        if let Some(bad) = self.hosts.iter().flatten().find(|name| !is_name(name)) {
            let reason =
                format!("{bad:?} is not a bare name or address: leave out scheme, port, path and wildcard");
            return Err(Error::invalid("host", reason));
        }
        let is_origin = |origin: &str| {
            let place = origin.split_once("://").map_or("", |(_, place)| place);
            !place.is_empty()
                && !place.contains(['/', '*'])
                && origin.bytes().all(|byte| byte.is_ascii_graphic())
        };
        for origin in &self.cors_origins {
            let reason = if origin == "*" && self.cors_credentials {
                "* cannot be combined with credentials: name the origins".to_owned()
            } else if origin == "*" && !self.is_public {
                "* would make every web page that a browser here shows an admin: name the origins".to_owned()
            } else if origin != "*" && !is_origin(origin) {
                format!("{origin:?} is neither * nor an origin such as https://app.example, without a path")
            } else {
                continue;
            };
            return Err(Error::invalid("origin", reason));
        }
        if self.connections_max == 0 || self.header_timeout.is_zero() || self.write_timeout.is_zero() {
            return Err(Error::invalid("connections or timeout", "it is zero"));
        }
        Ok(())
    }

    /// Creates the layer that tells browsers what pages of other origins may do.
    fn cors(&self) -> CorsLayer {
        let origins = self.cors_origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok());
        let is_for_all = self.cors_origins.iter().any(|origin| origin == "*");
        let methods = [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::DELETE];
        CorsLayer::new()
            .allow_origin(if is_for_all { AllowOrigin::any() } else { AllowOrigin::list(origins) })
            .allow_credentials(self.cors_credentials)
            .allow_methods(AllowMethods::list(methods))
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers(ExposeHeaders::list(EXPOSED.map(header::HeaderName::from_static)))
            .max_age(Duration::from_mins(10))
    }

    /// Fails with 400, 403 or 501 if this server must not answer `request`.
    fn admit(&self, request: &mut Request) -> Result<(), Failure> {
        let headers = request.headers();
        let hosts: Vec<_> = headers.get_all(header::HOST).iter().collect();
        // No client sends an authority with `@`, and what precedes the `@` is not a host.
        let is_right = |authority: &Authority| {
            !authority.as_str().contains('@')
                && self.hosts.as_ref().is_none_or(|names| is_local(authority.host(), names))
        };
        let asked = hosts.iter().map(|host| host.to_str().ok()?.parse().ok());
        let mut asked = asked.chain(request.uri().authority().cloned().map(Some));
        let is_nameless =
            request.version() >= Version::HTTP_11 && hosts.is_empty() && request.uri().authority().is_none();
        if hosts.len() > 1
            || is_nameless
            || !asked.all(|host: Option<Authority>| host.as_ref().is_some_and(is_right))
        {
            return Err(Failure::bad_request("Invalid host header"));
        }
        let forbidden = |reason| Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", reason));
        if !self.is_public && FORWARDED.iter().any(|name| headers.contains_key(*name)) {
            return forbidden(
                "This server answers its own machine only, and no client behind a proxy, because it has no credentials. Configure credentials.",
            );
        }
        check_codings(headers)?;
        if !is_from_elsewhere(headers) {
            return Ok(());
        }
        let origin = headers.get(header::ORIGIN).map_or(&b""[..], HeaderValue::as_bytes);
        let names = |named: &String| origin.eq_ignore_ascii_case(named.as_bytes());
        // A page of another origin may link to this server: the browser shows the answer, but the page cannot read it.
        let is_link = *request.method() == Method::GET
            && origin.is_empty()
            && headers.get("sec-fetch-mode").is_some_and(|mode| mode == "navigate");
        if self.cors_origins.iter().any(names) {
            request.extensions_mut().insert(NamedPage);
        } else if !is_link && !self.cors_origins.iter().any(|named| named == "*") {
            return forbidden("A web page from elsewhere may not use this server.");
        }
        Ok(())
    }
}

/// The headers that proxies add.
const FORWARDED: [&str; 6] =
    ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via"];

/// A request extension that marks a request from a page of another origin, if the options name that origin.
#[derive(Debug, Clone, Copy)]
pub(super) struct NamedPage;

/// Returns whether a request with these headers comes from a page of another origin.
pub(super) fn is_from_elsewhere(headers: &HeaderMap) -> bool {
    // The browser knows which origin it sends the request to, even if a proxy changed `Host`. Pages omit `Origin` from some requests.
    if let Some(site) = headers.get("sec-fetch-site") {
        return site != "same-origin" && site != "none";
    }
    let is_same = |origin: &HeaderValue| {
        let place = origin.to_str().ok().and_then(|origin| Some(origin.split_once("://")?.1));
        place
            .zip(headers.get(header::HOST))
            .is_some_and(|(place, host)| host.as_bytes().eq_ignore_ascii_case(place.as_bytes()))
    };
    !headers.get_all(header::ORIGIN).iter().all(is_same)
}

/// Fails with 501 if the body has a transfer coding that hyper does not decode. Hyper decodes only `chunked`, and would treat `gzip,
/// chunked` as `chunked`.
fn check_codings(headers: &HeaderMap) -> Result<(), Failure> {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let is_known = |coding: &HeaderValue| coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked");
    if codings.next().is_none_or(is_known) && codings.next().is_none() {
        return Ok(());
    }
    let reason = "The only Transfer-Encoding is chunked. Compress a body with Content-Encoding: gzip.";
    Err(Failure::new(StatusCode::NOT_IMPLEMENTED, "not_implemented", reason))
}

/// Returns whether `host` means this machine, or is one of `names`.
fn is_local(host: &str, names: &[String]) -> bool {
    let asked = parse_ip(host);
    asked.is_some_and(|asked| asked.is_loopback())
        || host.eq_ignore_ascii_case("localhost")
        || names
            .iter()
            .any(|name| name.eq_ignore_ascii_case(host) || asked.is_some() && parse_ip(name) == asked)
}

/// Parses `host` as an address. IPv6 addresses may have brackets.
fn parse_ip(host: &str) -> Option<IpAddr> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    bare.unwrap_or(host).parse().ok()
}

/// Checks a request, passes it on, and gives the answer the id of the request.
async fn admit(
    State((options, env)): State<(Arc<ServerOptions>, Env)>,
    mut request: Request,
    next: Next,
) -> Response {
    let known = request.headers().get(REQUEST_ID).filter(|id| (1..=36).contains(&id.len())).cloned();
    let id = known.unwrap_or_else(|| {
        HeaderValue::from_str(&format!("{:010x}", env.random() >> 24)).expect("digits are visible")
    });
    let mut response = match options.admit(&mut request) {
        Ok(()) => next.run(request).await,
        Err(failure) => {
            tracing::debug!(?failure, "a request was refused");
            let mut response = failure.into_response();
            // The following bytes may be the body of the request, or another request.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            response
        }
    };
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// A running server. Dropping it closes all connections; [`Server::shutdown`] lets answers finish.
#[derive(Debug)]
#[must_use = "dropping it closes all connections"]
pub struct Server {
    local_addr: SocketAddr,
    /// Becomes true when the server should accept no more connections.
    stop: watch::Sender<bool>,
    /// Accepts connections, and owns their tasks.
    task: JoinHandle<()>,
}

impl Server {
    /// Serves `router` to the clients that connect to `listener`. Call this within a tokio runtime.
    ///
    /// Fails with [`Error::Invalid`] as [`ServerOptions::check`] does, for example if other machines can reach the address without
    /// `is_public`. Fails with [`Error::Io`] if `listener` is no longer a listener.
    pub fn start(listener: TcpListener, router: Router, options: ServerOptions, env: &Env) -> Result<Self> {
        let io = |error| Error::Io { what: "listener", source: Arc::new(error) };
        let local_addr = listener.local_addr().map_err(io)?;
        options.check(local_addr)?;
        // The caller created the listener, perhaps with a short queue.
        socket2::SockRef::from(&listener).listen(BACKLOG).map_err(io)?;
        let mut http = http1::Builder::new();
        // These timers use the time of the operating system, which a simulation cannot replay.
        http.timer(TokioTimer::new())
            .header_read_timeout(bounded_timer(options.header_timeout))
            .max_buf_size(HEADER_LEN_MAX);
        let options = Arc::new(options);
        let admit = middleware::from_fn_with_state((Arc::clone(&options), env.clone()), admit);
        let server = HeaderValue::from_static(concat!("Notibus/", env!("CARGO_PKG_VERSION")));
        let router = router.layer(admit);
        let router = if options.cors_origins.is_empty() { router } else { router.layer(options.cors()) };
        let router = router
            .layer(SetResponseHeaderLayer::if_not_present(header::SERVER, server))
            .layer(SetSensitiveRequestHeadersLayer::new([header::AUTHORIZATION, header::COOKIE]));
        let (stop, stopped) = watch::channel(false);
        let acceptor = Acceptor { http, options, router, env: env.clone(), log: LogThrottle::default() };
        let task = tokio::spawn(acceptor.run(listener, stopped));
        Ok(Self { local_addr, stop, task })
    }

    /// Returns the address that the server listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Stops accepting connections, waits for the answers in progress, and closes. Live feeds are answers in progress: end them first
    /// ([`Api::shutdown`](super::Api::shutdown)).
    pub async fn shutdown(mut self) {
        self.stop.send_replace(true);
        if let Err(error) = (&mut self.task).await {
            tracing::error!(%error, "the listener panicked");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Accepts connections, and starts a task for each.
struct Acceptor {
    http: http1::Builder,
    options: Arc<ServerOptions>,
    router: Router,
    env: Env,
    log: LogThrottle,
}

impl Acceptor {
    /// Accepts connections until `stopped` becomes true, and then ends all of them.
    async fn run(self, listener: TcpListener, mut stopped: watch::Receiver<bool>) {
        let graceful = GracefulShutdown::new();
        let mut tasks = JoinSet::new();
        loop {
            tokio::select! {
                biased;
                () = async { drop(stopped.wait_for(|stopped| *stopped).await) } => break,
                Some(ended) = tasks.join_next() => report(&ended),
                accepted = listener.accept() => match accepted {
                    // The answer usually fits into the socket's buffer, which is empty. Otherwise the client sees only a closed connection.
                    Ok((socket, _)) if tasks.len() >= self.options.connections_max => drop(socket.try_write(FULL)),
                    Ok((socket, _)) => self.serve(socket, graceful.watcher(), &mut tasks),
                    Err(error) => {
                        if let Some(unsaid) = self.log.is_due(self.env.now(), "accept".to_owned()) {
                            tracing::warn!(%error, unsaid, "cannot accept connections");
                        }
                        self.env.sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        drop(listener);
        tokio::select! {
            () = graceful.shutdown() => {}
            () = self.env.sleep(self.options.drain_timeout) => {
                tracing::warn!(connections = tasks.len(), "cutting off answers that have not ended");
            }
        }
        tasks.shutdown().await;
    }

    /// Serves a connection in its own task.
    fn serve(&self, socket: TcpStream, watcher: Watcher, tasks: &mut JoinSet<()>) {
        if let Err(error) = prepare(&socket, &self.options) {
            tracing::debug!(%error, "a connection was closed at once");
            return;
        }
        let service = TowerToHyperService::new(self.router.clone());
        let connection = self.http.serve_connection(TokioIo::new(socket), service);
        let connection = watcher.watch(connection);
        tasks.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection ended early");
            }
        });
    }
}

/// Sets the options of a connection's socket.
fn prepare(socket: &TcpStream, options: &ServerOptions) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let system = socket2::SockRef::from(socket);
    system.set_send_buffer_size(options.send_buffer_len)?;
    // The buffer has room for many heartbeats, so only the system knows that the client is not receiving them.
    #[cfg(target_os = "linux")]
    system.set_tcp_user_timeout(Some(bounded_timer(options.write_timeout)))?;
    Ok(())
}

/// Logs the panic of a connection's task.
fn report(ended: &Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection panicked");
    }
}
