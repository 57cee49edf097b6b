//! The `notibus` command. It parses the arguments and calls the module of the subcommand.

mod backup;
mod consumers;
mod record;
mod serve;
mod status;
mod store;
mod tail;
mod target;
mod terminal;
mod topology;

use std::{
    io::IsTerminal,
    process::ExitCode,
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::Duration,
};

use clap::{ArgAction, Parser, Subcommand};
use tokio::runtime::Runtime;
use tracing::Level;
use tracing_subscriber::{filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use self::terminal::Failure;

/// All rows are in memory, each in its own allocation, and the system's allocator is slow with millions of them. A program that embeds the
/// library chooses its own allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const AFTER_HELP: &str = "\
Exit codes:
  0  success; also if the reader of the output has gone away, as `head` does
  1  the work failed, or may succeed later
  2  an argument or the input is wrong, or the store is damaged: trying again does not help
  3  the disk of the store failed, or too many files are open

Options can also be set in the environment where --help shows a variable. The command line takes precedence.
NOTIBUS_AUTH has the credentials for --url: a secret, or \"name:secret\". RUST_LOG says what is logged on standard error, such as \"info\"
or \"notibus=debug\".";

/// A transactional notification bus for database-level events.
#[derive(Debug, Parser)]
#[command(name = "notibus", version, about, after_help = AFTER_HELP)]
struct Cli {
    /// How long to wait for an answer from the store or the node; for `serve`, the maximum time that shutting down may take.
    #[arg(
        long,
        global = true,
        env = "NOTIBUS_TIMEOUT",
        default_value = "10s",
        value_parser = humantime::parse_duration
    )]
    timeout: Duration,
    /// Log more on standard error: -v, -vv or -vvv. `RUST_LOG` takes precedence.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
    /// The subcommand.
    #[command(subcommand)]
    command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
enum Command {
    /// Run a node with all roles, and serve `_db_updates`, `_changes` and the administration over HTTP.
    Serve(serve::Args),
    /// Print the status of a bus on one screen: its feed, backlog, nodes and consumers.
    Status(status::Args),
    /// Print the nodes of a bus, and which of them are alive.
    Nodes(status::NodesArgs),
    /// List and manage consumers: durable work on a feed.
    Consumers(consumers::Args),
    /// Show or change the shards of a feed.
    #[command(subcommand)]
    Topology(topology::Command),
    /// Print the rows of the notification feed, one for each database, in order.
    Tail(tail::Args),
    /// Record events of databases, for layers that do not record them in their own transactions, and for trying things out.
    Record(record::Args),
    /// Write a bus to a file, to be imported into another store. First stop everything that writes to the bus, for good.
    Export(backup::ExportArgs),
    /// Import the bus in a file into a store. Positions of readers stay valid.
    Import(backup::ImportArgs),
    /// Check the folder of a store for damage, and print where the damage is. Nothing is changed.
    Check(backup::CheckArgs),
    /// Copy the folder of a store, even while another process commits to it.
    Backup(backup::BackupArgs),
    /// Show or raise the incarnation of a bus whose whole store was moved.
    #[command(subcommand)]
    Incarnation(backup::Incarnation),
    /// Make a random secret, and its line for the credentials file or the environment variable of `serve`.
    Credential(serve::CredentialArgs),
}

/// How long the threads of the process may take to end. The client library of a cluster may hang.
const END_MAX: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = [Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE][usize::from(cli.verbose.min(3))];
    let targets = std::env::var("RUST_LOG").ok().and_then(|targets| targets.parse().ok());
    let targets = targets.unwrap_or_else(|| Targets::new().with_default(level));
    let lines = fmt::layer()
        .with_writer(std::io::stderr)
        // The layer would print its internal errors on standard error, and panic if that failed.
        .log_internal_errors(false)
        // Programs that read the log do not expect colours.
        .with_ansi(std::io::stderr().is_terminal());
    tracing_subscriber::registry().with(targets).with(lines).init();
    let runtime = match Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => return report(&Failure::Failed(format!("no runtime: {error}"))).into(),
    };
    let outcome = runtime.block_on(run(cli.command, cli.timeout)).map_err(store::explained);
    // The reason is printed before anything can hang.
    let code = outcome.map_or_else(|failure| report(&failure), |()| 0);
    end(runtime, code);
    code.into()
}

/// Prints the reason for `failure`, and returns the exit code.
fn report(failure: &Failure) -> u8 {
    let (reason, code) = match failure {
        Failure::Failed(reason) => (reason, 1),
        Failure::BadInput(reason) => (reason, 2),
        Failure::StoreFailed(reason) => (reason, 3),
        Failure::Closed => return 0,
    };
    terminal::notice(&format!("notibus: {reason}"));
    code
}

/// Ends the threads of the process. If that takes too long, ends the process without waiting for them.
fn end(runtime: Runtime, code: u8) {
    store::close();
    let (ended, end) = channel();
    let ending = thread::Builder::new().spawn(move || {
        drop(runtime);
        #[cfg(feature = "foundationdb")]
        notibus::store::stop_network();
        let _ = ended.send(());
    });
    if ending.is_ok() && end.recv_timeout(END_MAX) == Err(RecvTimeoutError::Timeout) {
        end_at_once(code.into());
    }
}

/// Ends the process without running exit handlers: the client library of a cluster crashes if it is torn down while its network thread
/// runs, and stopping that thread may be what hangs.
#[cfg(unix)]
#[expect(unsafe_code, reason = "the standard library has no exit without handlers")]
fn end_at_once(code: i32) -> ! {
    // SAFETY: `_exit` does not return, touches no memory, and may be called by any thread at any time.
    unsafe { libc::_exit(code) }
}

#[cfg(not(unix))]
fn end_at_once(code: i32) -> ! {
    std::process::exit(code)
}

async fn run(command: Command, timeout: Duration) -> Result<(), Failure> {
    match command {
        Command::Serve(args) => serve::run(args, timeout).await,
        Command::Status(args) => status::run(args, timeout).await,
        Command::Nodes(args) => status::nodes(args, timeout).await,
        Command::Consumers(args) => consumers::run(args, timeout).await,
        Command::Topology(command) => topology::run(command, timeout).await,
        Command::Tail(args) => tail::run(args, timeout).await,
        Command::Record(args) => record::run(args, timeout).await,
        Command::Export(args) => backup::export(args, timeout).await,
        Command::Import(args) => backup::import(args, timeout).await,
        Command::Check(args) => backup::check(&args),
        Command::Backup(args) => backup::backup(&args),
        Command::Incarnation(command) => backup::incarnation(command, timeout).await,
        Command::Credential(args) => serve::credential(args),
    }
}
