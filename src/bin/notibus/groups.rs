//! `notibus groups`: lists and manages groups of durable consumers.

use std::{
    io::Write,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use clap::Subcommand;
use notibus::{
    Bus, DbInstance, NodeOptions, Sequence,
    cursor::Start,
    group::{Group, GroupStatus, ParkedId, ShardLag, ShardStatus},
};
use serde::Serialize;

use crate::{
    Failure,
    deadline::{Deadline, Moves},
    store::Store,
    topology::FeedName,
};

/// What to do with groups.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    command: Command,
}

/// What can be done with groups.
#[derive(Debug, Subcommand)]
enum Command {
    /// Print the groups of all feeds: their members, and the state of each shard.
    List(At),
    /// Create a group, so that consumers can be started. Does nothing if it exists.
    #[cfg(feature = "http")]
    Create {
        /// Its name.
        group: String,
        /// The feed that it follows: "notifications", or the instance of a database, 32 hexadecimal digits, for the changes of its
        /// documents.
        #[arg(long, default_value = "notifications")]
        feed: String,
        /// Where it starts: "now", "0" for all, or behind a sequence of 26 hexadecimal digits.
        #[arg(long, default_value = "now")]
        start: String,
        /// Delete it after this time without a living member. Default: never.
        #[arg(long, value_parser = humantime::parse_duration)]
        expiry: Option<Duration>,
        /// Where the bus is.
        #[command(flatten)]
        target: crate::target::Target,
        /// The prefix of the bus's keys.
        #[arg(long, default_value = "notibus")]
        prefix: String,
    },
    /// Print how far a group is behind in each shard.
    Lag(Of),
    /// Move a group to another position. Fails while members live, which takes up to 10 s to find out.
    Reset {
        /// The group.
        #[command(flatten)]
        of: Of,
        /// The position: "now", "0" for all, or behind a sequence of 26 hexadecimal digits.
        #[arg(long)]
        to: String,
        /// Reset even if members live: they start again from there.
        #[arg(long)]
        force: bool,
    },
    /// Delete a group, with its dead letters. Fails while members live, which takes up to 10 s to find out.
    Delete {
        /// The group.
        #[command(flatten)]
        of: Of,
        /// Delete even if members live: they receive nothing any more.
        #[arg(long)]
        force: bool,
    },
    /// Deliver rows again that a group has worked on already. Needs living consumers if they are more than a few hundred.
    Replay {
        /// The group.
        #[command(flatten)]
        of: Of,
        /// A glob on the names of databases, or on the ids of documents, as "tenant-7/*".
        #[arg(long)]
        filter: String,
    },
    /// List or delete rows that a group could not work on. A program can replay them.
    #[command(subcommand)]
    DeadLetters(DeadLetters),
    /// Manage databases, or documents, for which a group's work has failed too often, and which wait while their shards go on.
    #[command(subcommand)]
    Parked(Parked),
}

/// What can be done with dead letters.
#[derive(Debug, Subcommand)]
enum DeadLetters {
    /// Print them.
    List(Of),
    /// Delete one, or all.
    Delete {
        /// The group.
        #[command(flatten)]
        of: Of,
        /// The dead letter of the row at this sequence of 26 hexadecimal digits.
        #[arg(long, conflicts_with = "all", required_unless_present = "all")]
        seq: Option<Sequence>,
        /// All of them.
        #[arg(long)]
        all: bool,
    },
}

/// What can be done with parked ids.
#[derive(Debug, Subcommand)]
enum Parked {
    /// Print them.
    List(Of),
    /// Try all of them again soon, whatever their pauses.
    Retry(Of),
    /// Drop the waiting row of one: its rows up to now are not worked on.
    Delete {
        /// The group.
        #[command(flatten)]
        of: Of,
        /// The name of the database, or the id of the document.
        #[arg(long)]
        id: String,
    },
}

/// Where the groups are.
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

#[derive(Debug, clap::Args)]
struct Of {
    group: String,
    /// The feed that it follows: "notifications", or the instance of a database, 32 hexadecimal digits, for the changes of its
    /// documents.
    #[arg(long, default_value = "notifications")]
    feed: FeedName,
    /// Where the bus is.
    #[command(flatten)]
    at: At,
}

/// Parses a start.
fn start(text: &str) -> notibus::Result<Start> {
    text.parse()
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

    /// Prints `rows`, each as a JSON object or formatted by `readable`.
    fn print<T: Serialize>(&self, rows: &[T], readable: impl Fn(&T) -> String) -> Result<(), Failure> {
        let mut out = std::io::stdout().lock();
        let fail = crate::out::failed;
        for row in rows {
            if self.json {
                serde_json::to_writer(&mut out, row)
                    .map_err(std::io::Error::from)
                    .and_then(|()| out.write_all(b"\n"))
                    .map_err(fail)?;
            } else {
                writeln!(out, "{}", readable(row)).map_err(fail)?;
            }
        }
        Ok(())
    }
}

impl Of {
    /// Opens the bus to read it, and finds the group.
    async fn read(&self) -> Result<Group<()>, Failure> {
        Ok(self.at.read().await?.any_group(self.instance(), &self.group)?)
    }

    /// Opens the bus to change it, and finds the group.
    async fn open(&self) -> Result<Group<()>, Failure> {
        Ok(self.at.open().await?.any_group(self.instance(), &self.group)?)
    }

    /// The instance of the database whose documents the group follows, if any.
    fn instance(&self) -> Option<DbInstance> {
        match self.feed {
            FeedName::Notifications => None,
            FeedName::Documents(instance) => Some(instance),
        }
    }
}

/// Runs the command.
pub async fn run(args: Args, deadline: Deadline) -> Result<(), Failure> {
    let (what, waits) = match args.command {
        Command::Reset { .. } => ("resetting the group, which may have happened", true),
        Command::Delete { .. } => ("deleting the group, which may have happened", true),
        Command::DeadLetters(DeadLetters::Delete { .. }) => {
            ("deleting dead letters, some may be gone", false)
        }
        Command::Replay { .. } => ("replaying; only a few hundred rows can wait for consumers", false),
        _ => ("reading groups", false),
    };
    // To find out whether members live takes time.
    let deadline = if waits { deadline.and(NodeOptions::default().expiry) } else { deadline };
    let moves = Moves::default();
    deadline.of_moving(what, &moves, work(args, &moves, deadline)).await
}

/// Runs the command without a deadline.
#[cfg_attr(not(feature = "http"), expect(unused_variables, reason = "only a node is waited for"))]
async fn work(args: Args, moves: &Moves, deadline: Deadline) -> Result<(), Failure> {
    match args.command {
        Command::List(at) => at.print(&at.read().await?.groups().await?, readable),
        #[cfg(feature = "http")]
        Command::Create { group, feed, start, expiry, target, prefix } => {
            let mut posted = serde_json::json!({ "name": group, "feed": feed, "start": start });
            if let Some(expiry) = expiry {
                posted["idle_expiry_ms"] = u64::try_from(expiry.as_millis()).unwrap_or(u64::MAX).into();
            }
            let opened = target.open(&prefix, true, deadline).await?;
            let answer = opened.ask("/_notibus/groups", Some(posted.to_string().into_bytes())).await?;
            let is_new = answer["created"] == true;
            crate::out::line(&format!("{group} {}", if is_new { "is created" } else { "exists already" }))
        }
        Command::Lag(of) => of.at.print(&of.read().await?.lag().await?, lag),
        Command::Reset { of, to, force } => {
            let to = start(&to)?;
            Ok(of.open().await?.reset(to, force).await?)
        }
        Command::Delete { of, force } => Ok(of.open().await?.delete(force).await?),
        Command::Replay { of, filter } => {
            let glob = globset::GlobBuilder::new(&filter).literal_separator(false).build();
            let glob = glob.map_err(|error| Failure::BadInput(error.to_string()))?.compile_matcher();
            let wants = |id: &str| {
                moves.step();
                glob.is_match(id)
            };
            let count = of.open().await?.replay_ids(wants).await?;
            crate::out::line(&format!("{count} rows wait for another delivery"))
        }
        Command::Parked(command) => parked(command, moves).await,
        Command::DeadLetters(DeadLetters::List(of)) => {
            let group = of.read().await?;
            group.status().await?;
            let mut after = Sequence::MIN;
            loop {
                let letters = group.dead_letters(after, 1_000).await?;
                moves.step();
                of.at.print(&letters, |letter| {
                    let (when, shard) = (time(letter.at_ms), letter.shard);
                    let (sequence, attempts, error) = (letter.sequence, letter.attempts, &letter.error);
                    format!("{sequence}  shard {shard}; {attempts} attempts, last {when}: {error}")
                })?;
                match letters.last() {
                    Some(last) => after = last.sequence,
                    None => return Ok(()),
                }
            }
        }
        Command::DeadLetters(DeadLetters::Delete { of, seq, .. }) => {
            let group = of.open().await?;
            group.status().await?;
            match seq {
                None => Ok(group.delete_dead_letters().await?),
                Some(sequence) if group.delete_dead_letter(sequence).await? => Ok(()),
                Some(sequence) => Err(Failure::BadInput(format!("there is no dead letter of {sequence}"))),
            }
        }
    }
}

/// Runs a command on parked ids.
async fn parked(command: Parked, moves: &Moves) -> Result<(), Failure> {
    match command {
        Parked::List(of) => {
            let group = of.read().await?;
            group.status().await?;
            let mut after = String::new();
            loop {
                let ids = group.parked(&after, 1_000).await?;
                moves.step();
                of.at.print(&ids, |parked| {
                    let ParkedId { id, sequence, shard, attempts, at_ms, error, .. } = parked;
                    let when = time(*at_ms);
                    format!("{id:?}  {sequence}, shard {shard}; {attempts} attempts, last {when}: {error}")
                })?;
                match ids.last() {
                    Some(last) => after.clone_from(&last.id),
                    None => return Ok(()),
                }
            }
        }
        Parked::Retry(of) => {
            let group = of.open().await?;
            group.status().await?;
            let count = group.retry_parked().await?;
            println!("{count} are tried again");
            Ok(())
        }
        Parked::Delete { of, id } => {
            let group = of.open().await?;
            group.status().await?;
            if group.delete_parked(&id).await? {
                return Ok(());
            }
            Err(Failure::BadInput(format!("{id:?} is not parked")))
        }
    }
}

/// A wall-clock time for people.
fn time(ms: u64) -> String {
    UNIX_EPOCH.checked_add(Duration::from_millis(ms)).map_or_else(
        || "?".to_owned(),
        |time: SystemTime| humantime::format_rfc3339_seconds(time).to_string(),
    )
}

/// Formats a group for people: a line of its own, and one per shard.
fn readable(group: &GroupStatus) -> String {
    let feed = group.instance.map_or_else(|| "notifications".to_owned(), |of| format!("documents of {of}"));
    let members = match group.members.len() {
        0 => "no member: its rows wait".to_owned(),
        1 => "1 member".to_owned(),
        count => format!("{count} members"),
    };
    let expiry = group.idle_expiry_ms.map_or_else(String::new, |ms| {
        let [expiry, idle] =
            [ms, group.idle_ms].map(|ms| humantime::format_duration(Duration::from_millis(ms)));
        format!("; expires after {expiry}, idle for {idle}")
    });
    let letters = if group.has_dead_letters { "; has dead letters" } else { "" };
    let parked = if group.has_parked { "; has parked ids" } else { "" };
    let (name, start, generation) = (&group.name, group.start, group.generation);
    let mut text =
        format!("{name}  {feed}; {members}; generation {generation}, from {start}{expiry}{letters}{parked}");
    for shard in &group.shards {
        text.push_str("\n  ");
        text.push_str(&shard_line(shard));
    }
    text
}

/// Formats a shard for people.
fn shard_line(status: &ShardStatus) -> String {
    let ShardStatus { shard, owner, checkpoint, progress_ms, trouble, .. } = status;
    let owner = owner.map_or_else(|| "no owner".to_owned(), |owner| format!("owner {owner}"));
    let progress = progress_ms.map_or_else(String::new, |ms| format!(", saved {}", time(ms)));
    let trouble = trouble.as_ref().map_or_else(String::new, |trouble| {
        let state = match (trouble.is_current, trouble.is_stuck) {
            (true, true) => "STUCK",
            (true, false) => "failing",
            (false, _) => "last trouble, over",
        };
        format!("; {state}: {} attempts, {}: {}", trouble.attempts, time(trouble.at_ms), trouble.error)
    });
    format!("shard {shard}: {owner}; at {checkpoint}{progress}{trouble}")
}

/// Formats the lag of a shard for people.
fn lag(lag: &ShardLag) -> String {
    let ShardLag { shard, owner, rows, is_exact, age_ms, checkpoint, .. } = lag;
    let owner = owner.map_or_else(|| "no owner".to_owned(), |owner| format!("owner {owner}"));
    let more = if *is_exact { "" } else { " or more" };
    let age = age_ms.map_or_else(String::new, |ms| {
        format!(", the oldest {} ago", humantime::format_duration(Duration::from_millis(ms)))
    });
    let waits = if checkpoint.is_none() { "; waits for the shards that it replaces" } else { "" };
    format!("shard {shard}: {rows}{more} rows behind{age}; {owner}{waits}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_are_parsed() {
        assert_eq!(start("now").unwrap(), Start::Now);
        assert_eq!(start("0").unwrap(), notibus::Cursor::NOTHING.into());
        let sequence = "01000000000000000700020003";
        assert_eq!(start(sequence).unwrap(), Start::At(sequence.parse().unwrap()));
        assert!(start("then").is_err());
    }
}
