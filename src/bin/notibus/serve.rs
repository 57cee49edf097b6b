//! `notibus serve` runs one node with all roles, and serves the bus over HTTP. `notibus credential` makes the credentials of its callers.

use std::{
    env,
    io::{self, Write},
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use clap::builder::BoolishValueParser;
use futures_util::StreamExt;
use notibus::{
    Bus, BusOptions, DispatcherOptions, Error, NodeHandle, StartOptions,
    http::{ApiOptions, Credentials, Grant, ServerOptions},
    store::Store,
};
use tokio::net::TcpListener;

use crate::{
    store::StoreAddress,
    terminal::{self, Failure},
};

/// The environment variable that may have the credentials instead of a file.
const VARIABLE: &str = "NOTIBUS_CREDENTIALS";

/// The default for the maximum number of rows of `_db_updates` that the dispatcher keeps in memory.
const ROWS_KEPT_MAX: usize = 16_384;

/// The number of open files reserved for the store and the process itself, which is twice as many as they need.
const FILES_RESERVED: u64 = 40;

/// How to serve.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store: "dir:FOLDER", "fdb:FILE", or "memory", which ends with the process.
    #[arg(long, env = "NOTIBUS_STORE")]
    store: StoreAddress,
    /// The address to listen on. An address other than loopback needs credentials.
    #[arg(long, env = "NOTIBUS_LISTEN", default_value = "127.0.0.1:5985")]
    listen: SocketAddr,
    /// A file of credentials, one per line, as `notibus credential` prints them. The file is read again when it changes. Without it, the
    /// environment variable `NOTIBUS_CREDENTIALS` may have the credentials.
    #[arg(long, env = "NOTIBUS_CREDENTIALS_FILE")]
    credentials: Option<PathBuf>,
    /// The prefix of the bus's keys. The bus is created if it does not exist.
    #[arg(long, env = "NOTIBUS_PREFIX", default_value = "notibus")]
    prefix: String,
    /// A host name, without a port, that clients may use besides `localhost` and loopback addresses; can be given more than once. Other
    /// host names are then refused, as they always are without credentials, and so are web pages of another origin.
    #[arg(long, env = "NOTIBUS_HOST")]
    host: Vec<String>,
    /// An origin whose pages may use the API from a browser, such as `https://app.example`, or `*` for all, which needs credentials;
    /// can be given more than once.
    #[arg(long, env = "NOTIBUS_CORS_ORIGIN")]
    cors_origin: Vec<String>,
    /// Let browsers send credentials from the pages of `--cors-origin`; not with `*`.
    #[arg(long, env = "NOTIBUS_CORS_CREDENTIALS", requires = "cors_origin", value_parser = BoolishValueParser::new())]
    cors_credentials: bool,
    /// The maximum number of concurrent connections.
    #[arg(long, env = "NOTIBUS_CONNECTIONS_MAX", default_value_t = ServerOptions::default().connections_max)]
    connections_max: usize,
    /// The maximum number of open feeds per name.
    #[arg(long, env = "NOTIBUS_FEEDS_PER_NAME_MAX", default_value_t = ApiOptions::default().feeds_per_name_max)]
    feeds_per_name_max: usize,
    /// The maximum number of rows of `_db_updates` kept in memory for live feeds, about 1 KB each; feeds further behind read the store.
    #[arg(long, env = "NOTIBUS_ROWS_KEPT_MAX", default_value_t = ROWS_KEPT_MAX)]
    rows_kept_max: usize,
    /// The maximum and default value of the parameter `timeout`.
    #[arg(long, env = "NOTIBUS_TIMEOUT_MAX", default_value = "60s", value_parser = humantime::parse_duration)]
    timeout_max: Duration,
    /// The maximum value of the parameter `heartbeat`.
    #[arg(long, env = "NOTIBUS_HEARTBEAT_MAX", default_value = "60s", value_parser = humantime::parse_duration)]
    heartbeat_max: Duration,
    /// Drop a client that has received none of the sent data for this long (on Linux; elsewhere a proxy has to do this).
    #[arg(long, env = "NOTIBUS_WRITE_TIMEOUT", default_value = "30s", value_parser = humantime::parse_duration)]
    write_timeout: Duration,
}

/// Serves until the process is interrupted.
pub async fn run(args: Args, timeout: Duration) -> Result<(), Failure> {
    let credentials = credentials(args.credentials.as_ref())?;
    let is_open = credentials.is_none();
    let limits = ServerOptions::default()
        .connections_max(connections_max(args.connections_max)?)
        .write_timeout(args.write_timeout)
        .hosts((is_open || !args.host.is_empty()).then_some(args.host))
        .cors_origins(args.cors_origin)
        .cors_credentials(args.cors_credentials)
        .is_public(!is_open);
    check(&limits, args.listen)?;
    if is_open {
        terminal::notice("notibus: no credentials are configured: everyone on this machine is the admin");
    }
    let mut options = ApiOptions::default()
        .timeout_max(args.timeout_max)
        .heartbeat_max(args.heartbeat_max)
        .feeds_per_name_max(args.feeds_per_name_max);
    if let Some(credentials) = &credentials {
        options = options.authorize(Arc::new(credentials.clone()));
    }
    let bus = BusOptions::default().prefix(args.prefix.into_bytes());
    let dispatcher = DispatcherOptions::default().ring_rows_max(args.rows_kept_max);
    let roles = StartOptions::default().dispatcher(dispatcher).shutdown_timeout(timeout);
    // Check all options before anything is opened or created.
    bus.check().and_then(|()| options.check()).and_then(|()| roles.check())?;
    let listener =
        TcpListener::bind(args.listen).await.map_err(|error| cannot_listen(args.listen, &error))?;
    let listener = listener.into_std().map_err(|error| cannot_listen(args.listen, &error))?;
    let db = args.store.open(timeout).await?;
    let place = (args.listen, listener);
    let ended = serve(&db, &bus, place, &roles, (&options, &limits));
    match (credentials, args.credentials) {
        (Some(credentials), Some(file)) => tokio::select! {
            ended = ended => ended,
            never = credentials.follow(&file) => match never {},
        },
        _ => ended.await,
    }
}

/// Runs a node until it is interrupted. If the incarnation of its bus is raised, the node opens the bus again, and continues.
async fn serve(
    store: &Store,
    bus: &BusOptions,
    (address, listener): (SocketAddr, std::net::TcpListener),
    roles: &StartOptions,
    (options, limits): (&ApiOptions, &ServerOptions),
) -> Result<(), Failure> {
    let mut is_announced = false;
    // Signals count from here on, even while the bus is being opened.
    let is_asked = AtomicBool::new(false);
    let mut signals = NodeHandle::signals()?.inspect(|()| is_asked.store(true, Ordering::Relaxed));
    loop {
        let start = async { Ok::<_, Failure>(open(store, bus).await?.start(roles.clone()).await?) };
        let running = tokio::select! {
            biased;
            Some(()) = signals.next() => return Ok(()),
            running = start => running?,
        };
        let routes = running.api(options.clone())?.routes();
        // Clients that connect while the bus is being reopened wait in the queue of the original listener.
        let listening = listener.try_clone().and_then(TcpListener::from_std);
        let listening = listening.map_err(|error| cannot_listen(address, &error))?;
        let address = running.serve(listening, routes, limits.clone()).await?;
        if !std::mem::replace(&mut is_announced, true) {
            let mut out = io::stdout();
            // The program that started this process may no longer read its output.
            drop(writeln!(out, "notibus: listening on http://{address}").and_then(|()| out.flush()));
        }
        let (bus, is_raised) = (running.bus().clone(), AtomicBool::new(false));
        let end = async {
            bus.raised().await;
            is_raised.store(true, Ordering::Relaxed);
        };
        let ended = running.shutdown_on(&mut signals, end).await;
        if is_asked.load(Ordering::Relaxed) || !is_raised.into_inner() {
            return Ok(ended?);
        }
        tracing::warn!("the incarnation of the bus was raised: this node joins again");
    }
}

/// Opens the bus, or creates it.
async fn open(store: &Store, bus: &BusOptions) -> Result<Bus, Failure> {
    match Bus::open_existing(store, &bus.prefix).await {
        Err(Error::Invalid { what: "prefix", .. }) => Ok(Bus::open(store, bus.clone()).await?),
        opened => Ok(opened?),
    }
}

/// Returns why the server cannot listen on `address`. Trying again may help if the address is in use, or if its network is not up yet.
fn cannot_listen(address: SocketAddr, error: &io::Error) -> Failure {
    let reason = format!("cannot listen on {address}: {error}; --listen names another address");
    match error.kind() {
        io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable => Failure::Failed(reason),
        _ => Failure::BadInput(reason),
    }
}

/// Fails before anything is opened if the server would refuse these options.
fn check(limits: &ServerOptions, listen: SocketAddr) -> Result<(), Failure> {
    limits.check(listen).map_err(|error| match error {
        Error::Invalid { what: "address", .. } => Failure::BadInput(format!(
            "{listen} can be reached from other machines, so credentials are needed: give a file with --credentials, or set \
             {VARIABLE}; `notibus credential` makes them"
        )),
        Error::Invalid { what: "host", reason } => Failure::BadInput(format!("--host: {reason}")),
        Error::Invalid { what: "origin", reason } => Failure::BadInput(format!("--cors-origin: {reason}")),
        error => Failure::BadInput(error.to_string()),
    })
}

/// Returns the configured credentials; `None` if there are none, so that everyone may send requests.
fn credentials(file: Option<&PathBuf>) -> Result<Option<Credentials>, Failure> {
    let bad = |place: &str, error: &dyn std::fmt::Display| Failure::BadInput(format!("{place}: {error}"));
    if let Some(file) = file {
        return Credentials::read(file).map(Some).map_err(|error| bad("--credentials", &error));
    }
    match env::var(VARIABLE) {
        Err(env::VarError::NotPresent) => Ok(None),
        // The variable is set but cannot be read. Without credentials the server would let everyone in.
        Err(error) => Err(bad(VARIABLE, &error)),
        Ok(text) => text.parse().map(Some).map_err(|error: Error| bad(VARIABLE, &error)),
    }
}

/// Reduces `wanted` connections to what the limit of open files allows, so that the store always has enough files.
fn connections_max(wanted: usize) -> Result<usize, Failure> {
    if let Err(error) = rlimit::increase_nofile_limit(u64::MAX) {
        tracing::warn!(%error, "could not raise the limit of open files");
    }
    let Ok((limit, _)) = rlimit::Resource::NOFILE.get() else { return Ok(wanted) };
    let most = usize::try_from(limit.saturating_sub(FILES_RESERVED)).unwrap_or(usize::MAX);
    if most == 0 {
        return Err(Failure::BadInput(format!(
            "the limit of open files is {limit}, and the store needs {FILES_RESERVED}: raise it (ulimit -n)"
        )));
    }
    if most < wanted {
        terminal::notice(&format!(
            "notibus: at most {most} connections at once: the limit of open files is {limit}, and {FILES_RESERVED} are kept for the \
             store; raise it (ulimit -n) for more"
        ));
    }
    Ok(most.min(wanted))
}

/// Whose secret to make. The line goes to standard output, and the secret to standard error. The secret is shown only once.
#[derive(Debug, clap::Args)]
pub struct CredentialArgs {
    /// The name of the caller.
    name: String,
    /// The caller's roles, separated by commas: `_admin`, `_db_updates`, `_events`, `_metrics`, or roles of a layer. Without roles and
    /// `--reads` the caller may do everything.
    #[arg(long, value_delimiter = ',')]
    roles: Vec<String>,
    /// The databases whose changes the caller may read, separated by commas: names, or prefixes followed by `*`.
    #[arg(long, value_delimiter = ',')]
    reads: Vec<String>,
}

/// Creates a secret, and prints its line and the secret.
pub fn credential(args: CredentialArgs) -> Result<(), Failure> {
    let grant = Grant { roles: args.roles, reads: args.reads };
    grant.check()?;
    let space = if grant == Grant::default() { "" } else { " " };
    let secret = Credentials::new_secret()?;
    terminal::line(&format!("{}{space}{grant}", Credentials::line(&args.name, &secret)?))?;
    terminal::notice(&secret);
    Ok(())
}
