//! `notibus triggers`: lists and manages triggers, and the databases that they have parked.

use std::{
    io::Write,
    time::{Duration, UNIX_EPOCH},
};

use clap::Subcommand;
use notibus::{
    Bus, Cursor, DbName,
    jobs::{ParkedDb, StoredTrigger},
};
use serde::Serialize;

use crate::{Failure, deadline::Deadline, store::Store};

/// What to do with triggers.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    command: Command,
}

/// What can be done with triggers.
#[derive(Debug, Subcommand)]
enum Command {
    /// Print all triggers, and how many databases each has parked; or the parked databases of one, and why.
    List {
        /// The trigger.
        trigger: Option<String>,
        /// Where the bus is.
        #[command(flatten)]
        at: At,
    },
    /// Try parked databases again: within about 10 s if the trigger runs, else when it is started.
    Retry {
        /// The trigger.
        trigger: String,
        /// Only this database.
        #[arg(long)]
        db: Option<DbName>,
        /// Where the bus is.
        #[command(flatten)]
        at: At,
    },
    /// Delete all stored state of a trigger: at its next start it begins with all databases.
    Reset {
        /// The trigger. A running one ends.
        trigger: String,
        /// Where the bus is.
        #[command(flatten)]
        at: At,
    },
}

/// Where the triggers are.
#[derive(Debug, clap::Args)]
struct At {
    /// The store: "memory", "dir:PATH" or "fdb:FILE".
    #[arg(long)]
    store: Store,
    /// The prefix of the bus's keys.
    #[arg(long, default_value = "notibus")]
    prefix: String,
    /// Print a JSON object per line.
    #[arg(long)]
    json: bool,
}

/// A trigger in the list.
#[derive(Debug, Serialize)]
struct Line {
    trigger: String,
    /// The position of its cursor.
    position: Option<Cursor>,
    /// Number of parked databases.
    parked: usize,
}

impl At {
    /// Opens the bus to read it.
    async fn read(&self) -> Result<Bus, Failure> {
        let db = self.store.open_to_read().await?.now();
        Ok(Bus::open_existing(&db, self.prefix.as_bytes()).await?)
    }

    /// Opens the bus to change it.
    async fn open(&self) -> Result<Bus, Failure> {
        self.store.check_exists()?;
        let db = self.store.open().await?;
        Ok(Bus::open_existing(&db, self.prefix.as_bytes()).await?)
    }

    /// Finds the existing trigger `name` of `bus`.
    async fn find(bus: &Bus, name: &str) -> Result<StoredTrigger, Failure> {
        let trigger = bus.trigger(name)?;
        match trigger.position().await? {
            Some(_) => Ok(trigger),
            None => Err(Failure::BadInput(format!("there is no trigger {name}; `triggers list` lists them"))),
        }
    }

    /// Prints `row` as a JSON object, or formatted by `readable`.
    fn print<T: Serialize>(&self, row: &T, readable: impl Fn(&T) -> String) -> Result<(), Failure> {
        let mut out = std::io::stdout().lock();
        let printed = if self.json {
            serde_json::to_writer(&mut out, row)
                .map_err(std::io::Error::from)
                .and_then(|()| out.write_all(b"\n"))
        } else {
            writeln!(out, "{}", readable(row))
        };
        printed.map_err(crate::out::failed)
    }
}

/// Runs the command.
pub async fn run(args: Args, deadline: Deadline) -> Result<(), Failure> {
    deadline.of("the work on triggers, some of which may be done", work(args)).await
}

/// Runs the command without a deadline.
async fn work(args: Args) -> Result<(), Failure> {
    match args.command {
        Command::List { trigger: None, at } => {
            let bus = at.read().await?;
            for name in bus.triggers().await? {
                let trigger = bus.trigger(&name)?;
                let (mut parked, mut last) = (0, None);
                while let Some(page) = next(&trigger, &mut last).await? {
                    parked += page.len();
                }
                let line = Line { position: trigger.position().await?, trigger: name, parked };
                at.print(&line, |line| {
                    let at = line.position.map_or_else(|| "nothing".to_owned(), |cursor| cursor.to_string());
                    format!("{}  at {at}; {} databases parked", line.trigger, line.parked)
                })?;
            }
            Ok(())
        }
        Command::List { trigger: Some(name), at } => {
            let trigger = At::find(&at.read().await?, &name).await?;
            let mut last = None;
            while let Some(page) = next(&trigger, &mut last).await? {
                for parked in &page {
                    at.print(parked, readable)?;
                }
            }
            Ok(())
        }
        Command::Retry { trigger, db, at } => {
            let count = At::find(&at.open().await?, &trigger).await?.retry(db.as_ref()).await?;
            match db {
                Some(db) if count == 0 => {
                    Err(Failure::BadInput(format!("database {db} is not parked by trigger {trigger}")))
                }
                _ => Ok(()),
            }
        }
        Command::Reset { trigger, at } => Ok(At::find(&at.open().await?, &trigger).await?.reset().await?),
    }
}

/// The next parked databases after `last`; `None` at the end.
async fn next(
    trigger: &StoredTrigger,
    last: &mut Option<notibus::Db>,
) -> Result<Option<Vec<ParkedDb>>, Failure> {
    let page = trigger.parked(last.as_ref(), 1_000).await?;
    *last = page.last().map(ParkedDb::db);
    Ok((!page.is_empty()).then_some(page))
}

/// Formats a parked database for people.
fn readable(parked: &ParkedDb) -> String {
    let when = UNIX_EPOCH.checked_add(Duration::from_millis(parked.at_ms));
    let when =
        when.map_or_else(|| "?".to_owned(), |time| humantime::format_rfc3339_seconds(time).to_string());
    let what = if parked.is_gone { "its deletion" } else { "its work" };
    let asked = if parked.is_asked { "; will be tried again soon" } else { "" };
    let ParkedDb { name, instance, attempts, error, .. } = parked;
    format!("{name} ({instance})  {what}: {attempts} attempts, last {when}{asked}: {error}")
}
