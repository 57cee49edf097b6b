//! [`Server`] is a listener with limits that shuts down in good order.
//!
//! For a client that does not read, the server holds one chunk and the buffers of the connection and its socket. It drops the
//! client after the client has taken nothing for a while. It also drops a client that sends nothing. A client that has closed only
//! its own side gets its answer (`socket`). A client that has vanished takes nothing: a feed sends a heartbeat, or its end, at
//! least once a minute. On Linux the system itself closes a connection if the client acknowledges nothing for the same time; other
//! systems need some minutes.

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderMap, HeaderValue, StatusCode, Version, header},
    response::{IntoResponse, Response},
};
use futures_util::FutureExt;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::{GracefulShutdown, Watcher},
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::{JoinHandle, JoinSet},
};
use tower_service::Service;

use super::{
    Cors, Failure, Hosts, Peer,
    admission::network,
    hosts::{self, ForeignPage},
    refusals::Refusals,
    socket::{Answering, REQUEST_ID, Socket},
    tally::{FeedPermit, Tally},
};
use crate::base::{
    env::{Env, bounded_timer},
    error::{Error, Result},
};

/// The most characters of an id that a client gives its request, as in CouchDB.
const REQUEST_ID_MAX: usize = 36;

/// The value of the header `Server`.
const SERVER: &str = concat!("Notibus/", env!("CARGO_PKG_VERSION"));

/// How many connections may wait to be accepted; the system may allow fewer. A client that finds the queue full tries again after 1
/// s, 3 s and 7 s, even if there is room earlier.
const BACKLOG: i32 = 4_096;

/// How long the listener pauses when it cannot accept connections, for example without file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The limits of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerOptions {
    /// How many connections there may be; the next one gets 503. Each needs a file descriptor. Default: 16,384.
    pub connections_max: usize,
    /// How many connections one address may have (for IPv6: one network of 64 bits); the next one gets 503. Proxies
    /// ([`ServerOptions::proxies`]) may have any number. Default: 8,192.
    pub connections_per_address_max: usize,
    /// The most bytes of a request's line and headers, at least 8,192. Default: 32 KiB.
    pub header_len_max: usize,
    /// The most headers of a request. Default: 100.
    pub headers_max: usize,
    /// How long a client may take to send the headers of a request, including the first one. Default: 30 s.
    pub header_timeout: Duration,
    /// How long a client may take nothing of what the server sends, before the server drops it. Default: 30 s.
    pub write_timeout: Duration,
    /// The size of a socket's send buffer in bytes. Default: 128 KiB.
    pub send_buffer_len: usize,
    /// How long a shutdown waits for answers in progress. Default: 10 s.
    pub drain_timeout: Duration,
    /// By which names clients may address the server. Default: by the names of this machine.
    pub hosts: Hosts,
    /// Which pages of other origins may use the server through a browser. Default: none.
    pub cors: Option<Cors>,
    /// The addresses of proxies in front. The server believes only these proxies about their clients: for limits and the log, the
    /// client is the last address in `X-Forwarded-For` that is not a proxy. Default: none.
    pub proxies: Vec<IpAddr>,
    /// Whether the server may listen on an address that other machines can reach. Set this if the API has credentials
    /// ([`ApiOptions::access`](super::ApiOptions::access)) and a layer's own routes check accounts, or if a server in front checks
    /// them. Clients then need [`Hosts::Any`], or the names that they use. Default: no.
    pub is_public: bool,
}

crate::base::macros::setters!(ServerOptions { connections_max: usize, connections_per_address_max: usize, header_len_max: usize, headers_max: usize, header_timeout: Duration, write_timeout: Duration, send_buffer_len: usize, drain_timeout: Duration, hosts: Hosts, cors: Option<Cors>, proxies: Vec<IpAddr>, is_public: bool });

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            connections_max: 16_384,
            connections_per_address_max: 8_192,
            header_len_max: 32 << 10,
            headers_max: 100,
            header_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            send_buffer_len: 128 << 10,
            drain_timeout: Duration::from_secs(10),
            hosts: Hosts::default(),
            cors: None,
            proxies: Vec::new(),
            is_public: false,
        }
    }
}

impl ServerOptions {
    /// Checks these options for a server at `address`, as [`Server::start`] does. Use it to learn of a mistake before you start
    /// anything else.
    ///
    /// Fails with [`Error::Invalid`]: of `address`, if other machines can reach it and `is_public` is not set; of `host`, if a name
    /// could never match, such as one with a port; and if another option is out of its limits.
    pub fn check(&self, address: SocketAddr) -> Result<()> {
        if !self.is_public && !address.ip().to_canonical().is_loopback() {
            let reason = format!(
                "other machines can reach {address}: give the API credentials (`ApiOptions::access`) or put accounts in front, \
                 and set `ServerOptions::is_public`"
            );
            return Err(Error::invalid("address", reason));
        }
        self.hosts.check_names()?;
        self.cors.as_ref().map_or(Ok(()), Cors::check)?;
        if self.header_len_max < 8_192 {
            let reason = format!("{} is less than 8,192", self.header_len_max);
            return Err(Error::invalid("header length", reason));
        }
        if self.connections_max == 0 || self.connections_per_address_max == 0 || self.headers_max == 0 {
            return Err(Error::invalid("connections or headers", "there are none"));
        }
        if self.header_timeout.is_zero() || self.write_timeout.is_zero() {
            return Err(Error::invalid("timeout", "it is zero"));
        }
        Ok(())
    }

    /// Returns whether this is the address of a known proxy.
    fn is_proxy(&self, address: IpAddr) -> bool {
        self.proxies.iter().any(|proxy| proxy.to_canonical() == address.to_canonical())
    }
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
    /// Serves `router` to the clients that connect to `listener`. Call it within a tokio runtime.
    ///
    /// Fails with [`Error::Invalid`] as [`ServerOptions::check`] does, for example if other machines can reach the address without
    /// `is_public`. Fails with [`Error::Io`] if `listener` is no longer a listener.
    pub fn start(listener: TcpListener, router: Router, options: ServerOptions, env: &Env) -> Result<Self> {
        let io = |error| Error::Io { what: "listener", source: Arc::new(error) };
        let local_addr = listener.local_addr().map_err(io)?;
        options.check(local_addr)?;
        // The caller made the listener, with a short queue.
        socket2::SockRef::from(&listener).listen(BACKLOG).map_err(io)?;
        let (stop, stopped) = watch::channel(false);
        let acceptor = Acceptor {
            connections: Arc::new(Semaphore::new(options.connections_max.min(Semaphore::MAX_PERMITS))),
            addresses: Tally::new(),
            http: protocol(&options),
            options: Arc::new(options),
            router,
            refusals: Refusals::default(),
            env: env.clone(),
        };
        let task = tokio::spawn(acceptor.run(listener, stopped));
        Ok(Self { local_addr, stop, task })
    }

    /// Returns the address that the server listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Accepts no more connections, waits for the answers in progress, and closes. Live feeds are answers in progress: end them
    /// first ([`Api::shutdown`](super::Api::shutdown)).
    pub async fn shutdown(mut self) {
        self.stop.send_replace(true);
        if let Err(error) = (&mut self.task).await {
            tracing::error!(%error, "the listener has panicked");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Sets how connections speak HTTP. Their timers use the time of the operating system, which a simulation cannot replay.
fn protocol(options: &ServerOptions) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(bounded_timer(options.header_timeout))
        .max_buf_size(options.header_len_max)
        .max_headers(options.headers_max);
    http
}

/// Accepts connections, and starts a task for each.
struct Acceptor {
    connections: Arc<Semaphore>,
    addresses: Arc<Tally<IpAddr>>,
    http: http1::Builder,
    options: Arc<ServerOptions>,
    router: Router,
    refusals: Refusals,
    env: Env,
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
                    Ok((socket, peer)) => self.accept(socket, peer.ip(), graceful.watcher(), &mut tasks),
                    Err(error) => {
                        self.refusals.not_accepted(&error, self.env.now());
                        self.env.sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        drop(listener);
        tokio::select! {
            () = graceful.shutdown() => {}
            () = self.env.sleep(self.options.drain_timeout) => {
                tracing::warn!(connections = tasks.len(), "answers that do not end are cut off");
            }
        }
        tasks.shutdown().await;
    }

    /// Serves a connection in its own task, if there is room.
    fn accept(&self, socket: TcpStream, peer: IpAddr, watcher: Watcher, tasks: &mut JoinSet<()>) {
        let room = Arc::clone(&self.connections).try_acquire_owned().ok();
        // A proxy has the connections of many clients.
        let most =
            if self.options.is_proxy(peer) { usize::MAX } else { self.options.connections_per_address_max };
        let place = self.addresses.enter(network(peer), most).ok();
        let is_full = room.is_none();
        let (Some(room), Some(place)) = (room, place) else {
            self.refusals.no_room(peer, is_full, self.env.now());
            // The answer fits into the empty buffer of the socket. If it does not, the client sees a closed connection.
            drop(socket.try_write(too_many(is_full).as_bytes()));
            return;
        };
        if let Err(error) = prepare(&socket, &self.options) {
            tracing::debug!(%error, "a connection was closed at once");
        }
        let answering = Answering::default();
        let socket = Socket::new(socket, self.options.write_timeout, answering.clone(), &self.env);
        let served = Served {
            peer,
            answering,
            router: self.router.clone(),
            options: Arc::clone(&self.options),
            refusals: self.refusals.clone(),
            env: self.env.clone(),
        };
        tasks.spawn(serve(socket, served, self.http.clone(), watcher, (room, place)));
    }
}

/// Sets the options of a connection's socket.
fn prepare(socket: &TcpStream, options: &ServerOptions) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let system = socket2::SockRef::from(socket);
    system.set_send_buffer_size(options.send_buffer_len)?;
    // The buffer has room for many heartbeats, so only the system knows that the client acknowledges none of them.
    #[cfg(target_os = "linux")]
    system.set_tcp_user_timeout(Some(bounded_timer(options.write_timeout)))?;
    Ok(())
}

/// The state that serves the requests of one connection.
struct Served {
    /// The address at the other end of the connection.
    peer: IpAddr,
    /// Whether a request is being answered.
    answering: Answering,
    router: Router,
    options: Arc<ServerOptions>,
    refusals: Refusals,
    env: Env,
}

impl Served {
    fn answer(
        &self,
        request: hyper::Request<hyper::body::Incoming>,
    ) -> impl Future<Output = Response> + use<> {
        let cors =
            self.options.cors.as_ref().and_then(|cors| cors.asked(request.method(), request.headers()));
        let allowed = self.check(&request, cors.is_some());
        if let Err(failure) = &allowed {
            self.refusals.add(failure, request.headers(), self.env.now());
        }
        let allowed = allowed.and_then(|()| check_codings(request.headers()));
        let answering = self.answering.begin();
        let mut request: Request = request.map(|body| Body::new(self.answering.receive(body)));
        let peer = self.peer_of(request.headers());
        request.extensions_mut().insert(Peer(peer));
        // The metrics show the counts of this listener.
        request.extensions_mut().insert(self.refusals.clone());
        if !self.may_log_in(request.headers(), cors.is_some()) {
            request.extensions_mut().insert(ForeignPage);
        }
        let mut router = self.router.clone();
        let id = request_id(request.headers()).unwrap_or_else(|| format!("{:010x}", self.env.random() >> 24));
        let has_cors = self.options.cors.is_some();
        async move {
            let mut response = match (allowed, &cors) {
                (Err(failure), _) => failure.into_response(),
                (Ok(()), Some(cors)) if cors.is_preflight => StatusCode::NO_CONTENT.into_response(),
                (Ok(()), _) => router.call(request).await.unwrap_or_else(|never| match never {}),
            };
            if let Some(cors) = cors {
                cors.allow(response.headers_mut());
            }
            let headers = response.headers_mut();
            if has_cors {
                // Also where there is no page: a shared cache must not keep such an answer for pages.
                headers.append(header::VARY, HeaderValue::from_static("Origin"));
            }
            headers.entry(header::SERVER).or_insert(HeaderValue::from_static(SERVER));
            headers.insert(REQUEST_ID, HeaderValue::from_str(&id).expect("digits are visible"));
            answering.with(response)
        }
    }

    /// Returns the address of the client that sent a request with these headers.
    fn peer_of(&self, headers: &HeaderMap) -> IpAddr {
        if !self.options.is_proxy(self.peer) {
            return self.peer;
        }
        let lines = headers.get_all("x-forwarded-for").iter().filter_map(|line| line.to_str().ok());
        let hops: Vec<_> = lines.flat_map(|line| line.split(',')).collect();
        // Anybody may have written the addresses further to the left.
        let known = hops.iter().rev().map_while(|hop| hop.trim().parse::<IpAddr>().ok());
        let client = known.map(|hop| hop.to_canonical()).find(|hop| !self.options.is_proxy(*hop));
        client.unwrap_or_else(|| self.peer.to_canonical())
    }

    /// Returns whether a log-in with these headers comes from a page of this server, from an allowed page whose browser may keep
    /// the cookie, or from no page.
    fn may_log_in(&self, headers: &HeaderMap, is_allowed_page: bool) -> bool {
        // A proxy may have changed `Host`, but the browser knows which origin it asks.
        headers.get("sec-fetch-site").is_some_and(|site| site == "same-origin")
            || hosts::is_from_here(headers)
            || is_allowed_page && self.options.cors.as_ref().is_some_and(|cors| cors.credentials)
    }

    /// Fails with 400 or 403 if this server does not answer such a request. An allowed page may come from elsewhere.
    fn check(
        &self,
        request: &hyper::Request<hyper::body::Incoming>,
        is_allowed_page: bool,
    ) -> Result<(), Failure> {
        let headers = request.headers();
        let hosts = headers.get_all(header::HOST).iter().count();
        if hosts > 1
            || (hosts == 0 && request.version() >= Version::HTTP_11 && request.uri().authority().is_none())
        {
            return Err(Failure::bad_request("Invalid host header"));
        }
        if !self.options.is_public && is_forwarded(headers) {
            let reason = "This server answers its own machine only, and no client behind a proxy, because it has no credentials. Configure credentials.";
            return Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", reason));
        }
        self.options.hosts.check(request.uri(), headers, is_allowed_page)
    }
}

/// Returns the id that the client has given its request, if CouchDB would take it.
fn request_id(headers: &HeaderMap) -> Option<String> {
    let is_known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    ((1..=REQUEST_ID_MAX).contains(&id.len()) && id.bytes().all(is_known)).then(|| id.to_owned())
}

/// Fails with 501 if the body is coded for the transfer in a way that the protocol does not undo. It undoes only `chunked`, and would
/// take `gzip, chunked` for that.
fn check_codings(headers: &HeaderMap) -> Result<(), Failure> {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let is_known = |coding: &HeaderValue| coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked");
    if codings.next().is_none_or(is_known) && codings.next().is_none() {
        return Ok(());
    }
    let reason = "The only Transfer-Encoding is chunked. Compress a body by Content-Encoding: gzip.";
    Err(Failure::new(StatusCode::NOT_IMPLEMENTED, "not_implemented", reason))
}

/// Returns whether a proxy has forwarded the request.
fn is_forwarded(headers: &HeaderMap) -> bool {
    let names = ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via"];
    names.into_iter().any(|name| headers.contains_key(name))
}

async fn serve(
    socket: Socket<TcpStream>,
    served: Served,
    http: http1::Builder,
    watcher: Watcher,
    _room: (OwnedSemaphorePermit, FeedPermit<IpAddr>),
) {
    let service = service_fn(move |request| served.answer(request).map(Ok::<_, Infallible>));
    let connection = http.serve_connection(TokioIo::new(socket), service);
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "a connection has ended early");
    }
}

/// Returns the answer to a connection beyond a limit: that of the server if `is_full`, or else that of its address.
fn too_many(is_full: bool) -> String {
    let reason =
        if is_full { "The server has no room left." } else { "Your address has too many connections open." };
    let body = format!("{{\"error\":\"too_many_connections\",\"reason\":\"{reason}\"}}\n");
    format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n\
         Retry-After: 1\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Logs the panic of a connection's task.
fn report(ended: &Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection has panicked");
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Regression: the system counts milliseconds in 32 bits. It refused a longer `write_timeout`, and then small packets were delayed
    /// besides; one below a millisecond became zero, which stands for the system's own default of a quarter of an hour.
    #[tokio::test]
    async fn sockets_bear_any_write_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        for (write_timeout, expected) in [
            (Duration::MAX, Duration::from_hours(24 * 24)),
            (Duration::from_nanos(1), Duration::from_millis(1)),
            (Duration::from_secs(30), Duration::from_secs(30)),
        ] {
            let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            prepare(&socket, &ServerOptions { write_timeout, ..ServerOptions::default() }).unwrap();
            let found = socket2::SockRef::from(&socket).tcp_user_timeout().unwrap();
            assert_eq!((found, socket.nodelay().unwrap()), (Some(expected), true), "{write_timeout:?}");
        }
    }
}
