//! `notibus serve`: one node with all roles, and the bus over HTTP.

use std::{
    env,
    io::Write,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use notibus::{
    Bus, BusOptions, DispatcherOptions, Error, JanitorOptions, NodeOptions, NotifierOptions, Role,
    http::{Access, Api, ApiOptions, Credentials, Hosts, Server, ServerOptions},
    store::Database,
};
use tokio::net::TcpListener;

use crate::{Failure, store::Store};

/// Where credentials can be given instead of a file.
const VARIABLE: &str = "NOTIBUS_CREDENTIALS";

/// How many rows of `_db_updates` the dispatcher keeps in memory, if nothing else is asked for.
const ROWS_KEPT_MAX: usize = 16_384;

/// How to serve.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store: "memory", "dir:PATH" or "fdb:FILE".
    #[arg(long)]
    store: Store,
    /// Where to listen. On another address than a loopback one it needs credentials.
    #[arg(long, default_value = "127.0.0.1:5985")]
    listen: SocketAddr,
    /// A file with a line for each who may ask, as `notibus credential` prints them. Without it, they are taken from the
    /// environment variable `NOTIBUS_CREDENTIALS`.
    #[arg(long)]
    credentials: Option<PathBuf>,
    /// What the keys of the bus start with. The bus is created if there is none.
    #[arg(long, default_value = "notibus")]
    prefix: String,
    /// A name, without a port, by which clients may ask for it, besides `localhost` and loopback addresses; can be given more than once. Other
    /// names are refused then, as they are without credentials anyway, and so are web pages of another origin.
    #[arg(long)]
    host: Vec<String>,
    /// Do not keep `_db_updates` at all.
    #[arg(long)]
    no_db_updates: bool,
    /// How many connections there are at once.
    #[arg(long, default_value_t = ServerOptions::default().connections_max)]
    connections_max: usize,
    /// How many feeds each client may have open.
    #[arg(long, default_value_t = ApiOptions::default().feeds_per_client_max)]
    feeds_per_client_max: usize,
    /// How many rows of `_db_updates` are kept in memory for live feeds, some 1 KB each; those further behind read the store.
    #[arg(long, default_value_t = ROWS_KEPT_MAX)]
    rows_kept_max: usize,
    /// The most of the parameter `timeout`, and what it is by default.
    #[arg(long, default_value = "60s", value_parser = humantime::parse_duration)]
    timeout_max: Duration,
    /// The most of the parameter `heartbeat`.
    #[arg(long, default_value = "60s", value_parser = humantime::parse_duration)]
    heartbeat_max: Duration,
    /// After how long a client is dropped that takes nothing of what it is sent.
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    write_timeout: Duration,
}

/// Serves until it is interrupted.
pub async fn run(args: Args) -> Result<(), Failure> {
    let access = access(args.credentials.as_deref())?;
    let is_open = matches!(access, Access::Open);
    let limits = ServerOptions {
        connections_max: args.connections_max,
        write_timeout: args.write_timeout,
        hosts: if is_open || !args.host.is_empty() { Hosts::Local(args.host) } else { Hosts::Any },
        is_public: !is_open,
        ..ServerOptions::default()
    };
    check(&limits, args.listen)?;
    if is_open {
        eprintln!("notibus: no credentials are configured: everyone on this machine is the admin");
    }
    let options = ApiOptions {
        access,
        timeout_max: args.timeout_max,
        heartbeat_max: args.heartbeat_max,
        feeds_per_client_max: args.feeds_per_client_max,
        keeps_db_updates: !args.no_db_updates,
        ..ApiOptions::default()
    };
    if let Err(error) = rlimit::increase_nofile_limit(u64::MAX) {
        tracing::warn!(%error, "the limit of open files is as it was");
    }
    let listener = TcpListener::bind(args.listen)
        .await
        .map_err(|error| Failure::BadInput(format!("cannot listen on {}: {error}", args.listen)))?;
    let db = args.store.open().await?;
    let ring = DispatcherOptions { ring_rows_max: args.rows_kept_max, ..DispatcherOptions::default() };
    serve(&db, args.prefix.as_bytes(), listener, ring, options, limits).await
}

/// Serves the bus of `db` until the process is told to stop.
async fn serve(
    db: &Database,
    prefix: &[u8],
    listener: TcpListener,
    ring: DispatcherOptions,
    options: ApiOptions,
    limits: ServerOptions,
) -> Result<(), Failure> {
    // Before anything is told to be ready.
    let stopped = stopped()?;
    let bus = open(db, prefix).await?;
    let node = bus.node(NodeOptions::default()).await?;
    let _notifier = node.notifier(NotifierOptions::default()).await?;
    let _janitor = node.janitor(JanitorOptions::default()).await?;
    let dispatcher = Arc::new(node.dispatcher(ring).await?);
    let _announced = node.announce(Role::HTTP).await?;

    let api = Api::start(&bus, &dispatcher, options)?;
    let router = api
        .db_updates()
        .merge(api.changes(&bus.changes(), api.recorded_databases()))
        .merge(api.catalogue(api.recorded_databases()))
        .merge(api.sessions())
        .merge(api.events())
        .merge(api.status())
        .merge(api.welcome());
    let server = Server::start(listener, router, limits, db.env())?;
    let mut out = std::io::stdout();
    // Whoever started it may not listen any more.
    drop(writeln!(out, "notibus: listening on http://{}", server.local_addr()).and_then(|()| out.flush()));

    stopped.await;
    api.shutdown();
    server.shutdown().await;
    drop(api);
    if let Some(dispatcher) = Arc::into_inner(dispatcher) {
        dispatcher.shutdown().await;
    }
    Ok(node.shutdown().await?)
}

/// Opens the bus, or creates it.
async fn open(db: &Database, prefix: &[u8]) -> Result<Bus, Failure> {
    match Bus::open_existing(db, prefix).await {
        Err(Error::Invalid { what: "prefix", .. }) => {
            let options = BusOptions { prefix: prefix.to_vec(), ..BusOptions::default() };
            Ok(Bus::open(db, options).await?)
        }
        opened => Ok(opened?),
    }
}

/// Fails if the server would not start so, before anything is opened.
fn check(limits: &ServerOptions, listen: SocketAddr) -> Result<(), Failure> {
    limits.check(listen).map_err(|error| match error {
        Error::Invalid { what: "address", .. } => Failure::BadInput(format!(
            "{listen} can be reached from other machines, so credentials are needed: give a file by --credentials, or set \
             {VARIABLE}; `notibus credential` makes them"
        )),
        Error::Invalid { what: "host", reason } => Failure::BadInput(format!("--host: {reason}")),
        error => Failure::BadInput(error.to_string()),
    })
}

/// Who may ask: everyone, if nobody says so.
fn access(file: Option<&Path>) -> Result<Access, Failure> {
    let (text, place) = match file {
        Some(file) => {
            let text = std::fs::read_to_string(file)
                .map_err(|error| Failure::BadInput(format!("{}: {error}", file.display())))?;
            (Some(text), file.display().to_string())
        }
        None => match env::var(VARIABLE) {
            Err(env::VarError::NotPresent) => (None, VARIABLE.to_owned()),
            // Whoever set it wants nobody else to be let in.
            set => (
                Some(set.map_err(|error| Failure::BadInput(format!("{VARIABLE}: {error}")))?),
                VARIABLE.to_owned(),
            ),
        },
    };
    match text {
        Some(text) => {
            let credentials: Credentials =
                text.parse().map_err(|error| Failure::BadInput(format!("{place}: {error}")))?;
            Ok(Access::Credentials(credentials))
        }
        None => Ok(Access::Open),
    }
}

/// Completes when the process is told to stop.
fn stopped() -> Result<impl Future<Output = ()>, Failure> {
    #[cfg(unix)]
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
        .map_err(|error| Failure::Failed(format!("signals: {error}")))?;
    Ok(async move {
        #[cfg(unix)]
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
        #[cfg(not(unix))]
        drop(tokio::signal::ctrl_c().await);
    })
}
