//! The `notibus` command. It parses the arguments and calls the module of the subcommand.

mod confirm;
mod credential;
mod deadline;
mod environment;
mod failure;
mod folder;
mod groups;
mod incarnation;
mod nodes;
mod out;
mod pages;
mod record;
mod relocate;
mod replay;
mod serve;
mod signals;
mod status;
mod store;
mod table;
mod tail;
mod target;
mod topology;
mod triggers;

use std::{
    io::IsTerminal,
    pin::pin,
    process::ExitCode,
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::Duration,
};

use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};
use tokio::runtime::Runtime;
use tracing_subscriber::EnvFilter;

use self::{deadline::Deadline, failure::Failure};

/// All rows are in memory in separate allocations, and with millions of them the system's allocator is slow. A
/// program that embeds the library chooses its own allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const AFTER_HELP: &str = "\
Exit codes:
  0  all is as it should be; also if nobody reads the output any more
  1  the work failed, or its outcome is not what it should be
  2  an argument or the input is bad, or the store is damaged: to try again does not help
  3  the disk of the store is full or has failed: it takes no more writes, or cannot be opened

Every option can also be given by the environment: --some-option as NOTIBUS_SOME_OPTION, as each --help shows. The command line wins.
NOTIBUS_AUTH says who asks a node (--url): \"name:password\", or a token. RUST_LOG says what is logged on standard error, as \"info\" or
\"notibus=debug\"; without it, warnings are, and more with -v.";

/// A transactional notification bus for database-level events.
#[derive(Debug, Parser)]
#[command(name = "notibus", version, about, after_help = AFTER_HELP)]
struct Cli {
    /// How long a command waits for a store that does not answer, and the most time that `serve` takes to stop. The command then
    /// says what it gave up.
    #[arg(long, global = true, default_value = "10s", value_parser = humantime::parse_duration)]
    deadline: Duration,
    /// Log more on standard error: -v what happens, -vv what is done for it, -vvv everything. `RUST_LOG` wins over it.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
    /// The subcommand.
    #[command(subcommand)]
    command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
enum Command {
    /// Make a line for the credentials file or variable of `serve`.
    #[command(subcommand)]
    Credential(credential::Command),
    /// List and manage groups of durable consumers.
    Groups(groups::Args),
    /// Write a bus to a file, to be imported into another store. Nothing may write to the bus any more.
    Export(relocate::ExportArgs),
    /// Import the bus of a file into a store. Positions of readers stay valid.
    Import(relocate::ImportArgs),
    /// Show or raise the incarnation of a bus whose whole store was moved.
    #[command(subcommand)]
    Incarnation(incarnation::Command),
    /// Copy the folder of a store, also while another process commits to it.
    Backup(folder::BackupArgs),
    /// Search the folder of a store for damage, and print where it is. Nothing is changed.
    Check(folder::CheckArgs),
    /// Print a script that completes commands and options in a shell.
    #[command(hide = true)]
    Completions(pages::CompletionsArgs),
    /// Write manual pages, one for each command.
    #[command(hide = true)]
    Man(pages::ManArgs),
    /// Print the nodes of a bus, and which of them live.
    Nodes(nodes::Args),
    /// Record events of databases, for layers that do not record in their own transactions, and for trials.
    Record(record::Args),
    /// Replay a history of database events through the whole bus, and check the result.
    Replay(replay::Args),
    /// Run a node with all roles, and serve `_db_updates`, `_changes` and the administration over HTTP.
    Serve(serve::Args),
    /// Print the status of a bus on one screen: its feed, backlog, nodes and groups.
    Status(status::Args),
    /// Print the rows of the feed of notifications, one for each database, in their order.
    Tail(tail::Args),
    /// Show or change the shards of a feed.
    #[command(subcommand)]
    Topology(topology::Command),
    /// List and manage triggers, and the databases for which their jobs have failed.
    Triggers(triggers::Args),
}

/// How long a command may go on after its store has failed. Most end by themselves, and say what they have done; `serve` answers the
/// requests that it has.
const LAST_WORDS_MAX: Duration = Duration::from_millis(300);

/// How long the threads of the process may take to end. The client of a cluster may hang.
const END_MAX: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let matches = environment::command(Cli::command(), std::env::args_os()).get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let level = ["warn", "info", "debug", "trace"][usize::from(cli.verbose.min(3))];
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level)))
        .with_writer(out::log)
        // They would be printed, and a line that cannot be printed there is a panic.
        .log_internal_errors(false)
        // Programs that read the log, such as fail2ban, expect no colours.
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let runtime = match Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => return report(&Failure::Failed(format!("no runtime: {error}"))).into(),
    };
    let outcome = runtime.block_on(watched(run(cli.command, Deadline(cli.deadline))));
    // The reason is printed before anything can hang.
    let code = outcome.map_or_else(|failure| report(&failure), |()| 0);
    end(runtime, code);
    code.into()
}

/// Prints the reason of `failure`, and returns the exit code.
fn report(failure: &Failure) -> u8 {
    let (reason, code) = match failure {
        Failure::Failed(reason) => (reason, 1),
        Failure::BadInput(reason) => (reason, 2),
        Failure::StoreFailed(reason) => (reason, 3),
        Failure::Closed => return 0,
    };
    out::last_notice(&format!("notibus: {reason}"));
    code
}

/// The outcome of `work`. If it fails, or does not end, because the store takes no more writes, that is the failure, whatever error
/// the work has met first: the commit that met the failing disk only says that it may have happened.
async fn watched(work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let mut work = pin!(work);
    let outcome = tokio::select! {
        biased;
        outcome = &mut work => outcome,
        error = store::failed() => match tokio::time::timeout(LAST_WORDS_MAX, work).await {
            Ok(outcome) => outcome,
            Err(_) => return Err(Failure::of_store(&error, None)),
        },
    };
    match (outcome, store::failure()) {
        (Err(failure), Some(error)) => Err(Failure::of_store(&error, Some(&failure))),
        (outcome, _) => outcome,
    }
}

/// Ends the threads of the process; if that takes too long, the process without them.
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
        signals::end_at_once(code.into());
    }
}

async fn run(command: Command, deadline: Deadline) -> Result<(), Failure> {
    match command {
        Command::Credential(command) => credential::run(&command),
        Command::Backup(args) => folder::backup(&args),
        Command::Check(args) => folder::check(&args),
        Command::Groups(args) => groups::run(args, deadline).await,
        Command::Export(args) => relocate::export(args, deadline).await,
        Command::Import(args) => relocate::import(args, deadline).await,
        Command::Completions(args) => pages::completions(&args, Cli::command()),
        Command::Man(args) => pages::man(&args, Cli::command()),
        Command::Incarnation(command) => incarnation::run(command, deadline).await,
        Command::Nodes(args) => nodes::run(args, deadline).await,
        Command::Record(args) => record::run(args, deadline).await,
        Command::Replay(args) => Box::pin(replay::run(args, deadline)).await,
        Command::Serve(args) => serve::run(args, deadline).await,
        Command::Status(args) => status::run(args, deadline).await,
        Command::Tail(args) => tail::run(args, deadline).await,
        Command::Topology(command) => topology::run(command, deadline).await,
        Command::Triggers(args) => triggers::run(args, deadline).await,
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use clap::{Command, CommandFactory};

    use super::{
        Cli,
        environment::{EITHER, command, variable},
    };

    fn options(command: &Command) -> Vec<(String, Option<OsString>)> {
        let own = command
            .get_arguments()
            .filter_map(|arg| Some((arg.get_long()?.to_owned(), arg.get_env()?.to_owned().into())));
        own.chain(command.get_subcommands().flat_map(options)).collect()
    }

    #[test]
    fn every_option_has_a_variable_and_none_has_that_of_the_credentials() {
        let command = command(Cli::command(), []);
        command.clone().debug_assert();
        let named = options(&command);
        for (option, env) in &named {
            let env = env.clone().unwrap_or_default();
            let expected = if option == "credentials" {
                "NOTIBUS_CREDENTIALS_FILE".to_owned()
            } else {
                variable(option)
            };
            assert_eq!(env.to_str(), Some(&*expected));
        }
        for option in ["store", "url", "json", "deadline", "cors-origin", "yes", "watch", "listen"] {
            assert!(named.iter().any(|(name, _)| name == option), "{option}");
        }
        let count = |command: &Command| count(command);
        assert_eq!(named.len(), count(&command), "each one");
    }

    /// How many options there are, besides `--help` and `--version`.
    fn count(command: &Command) -> usize {
        let own = command.get_arguments().filter(|arg| arg.get_long().is_some());
        own.count() + command.get_subcommands().map(count).sum::<usize>()
    }

    #[test]
    fn the_line_says_what_to_ask() {
        let of = |line: &[&str]| {
            let named = options(&command(Cli::command(), line.iter().map(OsString::from)));
            named.iter().filter(|(name, _)| EITHER.contains(&&**name)).count()
        };
        assert!(of(&["status"]) > 2);
        assert_eq!(of(&["status", "--url=http://localhost"]), 0);
    }
}
