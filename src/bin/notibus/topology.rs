//! `notibus topology`: shows and changes the shards of a feed.

use std::{
    fmt::Write as _,
    io::{self, Write as _},
    str::FromStr,
};

use notibus::{
    Bus, DbInstance, Sequence,
    feed::{Feed, FeedRow, SchemeId, ShardId, TopologyEntry},
};
use serde::Serialize;

use crate::{
    Failure,
    deadline::{Deadline, Moves},
    store::Store,
};

/// What to do with a topology.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Print the history of a feed's shards, oldest first. It changes nothing.
    Show {
        /// The feed.
        #[command(flatten)]
        feed: FeedArgs,
        /// Count the rows of each shard, too, which reads the whole feed.
        #[arg(long)]
        rows: bool,
    },
    /// Change the number of shards, and print the new entry. Old rows stay; new rows go to the new shards.
    Reshard {
        /// The feed.
        #[command(flatten)]
        feed: FeedArgs,
        /// The number of shards, 1 to 10,000.
        #[arg(long)]
        shards: u32,
        /// The scheme that routes ids to them: "id", "partition-key", or the number of a scheme. Default: as before.
        #[arg(long, value_parser = parse_scheme)]
        scheme: Option<SchemeId>,
    },
}

/// The feed.
#[derive(Debug, clap::Args)]
pub struct FeedArgs {
    /// The store: "memory", "dir:PATH" or "fdb:FILE".
    #[arg(long)]
    store: Store,
    /// The prefix of the bus's keys.
    #[arg(long, default_value = "notibus")]
    prefix: String,
    /// The feed: "notifications", or the instance of a database, 32 hexadecimal digits, for the changes of its documents.
    #[arg(long, default_value = "notifications")]
    feed: FeedName,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The name of a feed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedName {
    /// The notification feed.
    Notifications,
    /// The changes of the documents of a database.
    Documents(DbInstance),
}

impl FromStr for FeedName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "notifications" {
            return Ok(Self::Notifications);
        }
        text.parse()
            .map(Self::Documents)
            .map_err(|_| "it is neither \"notifications\" nor 32 hexadecimal digits".to_owned())
    }
}

/// Reads `--scheme`.
fn parse_scheme(text: &str) -> Result<SchemeId, String> {
    match text {
        "id" => Ok(SchemeId::ID),
        "partition-key" => Ok(SchemeId::PARTITION_KEY),
        number => number
            .parse()
            .map(SchemeId)
            .map_err(|_| "it is none of \"id\", \"partition-key\" and a number up to 65535".to_owned()),
    }
}

/// An entry of a topology in the output.
#[derive(Debug, Serialize)]
struct Entry {
    /// The first sequence for which it holds.
    first: Sequence,
    /// Whether new rows go to its shards.
    open: bool,
    /// The stored number of the hashing scheme; null for a legacy range, which is not sharded.
    scheme: Option<SchemeId>,
    shard_count: usize,
    /// Their ids, as ranges of the first and the last.
    shards: Vec<[ShardId; 2]>,
    /// Number of rows of each shard, in the order of the ids, if counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<Vec<u64>>,
}

/// A topology in the output.
#[derive(Debug, Serialize)]
struct Topology {
    /// Its entries, oldest first.
    entries: Vec<Entry>,
}

/// Runs `command`.
pub async fn run(command: Command, deadline: Deadline) -> Result<(), Failure> {
    let what = match command {
        Command::Show { .. } => "reading the topology",
        Command::Reshard { .. } => "changing the topology, which may have happened",
    };
    let moves = Moves::default();
    deadline.of_moving(what, &moves, work(command, &moves)).await
}

/// Runs `command` without a deadline.
async fn work(command: Command, moves: &Moves) -> Result<(), Failure> {
    let (Command::Show { feed, .. } | Command::Reshard { feed, .. }) = &command;
    let db = match &command {
        Command::Show { .. } => feed.store.open_to_read().await?.now(),
        Command::Reshard { .. } => {
            // Opening a folder would create one.
            feed.store.check_exists()?;
            feed.store.open().await?
        }
    };
    let bus = Bus::open_existing(&db, feed.prefix.as_bytes()).await?;
    match feed.feed {
        FeedName::Notifications => run_on(&bus.feed(), &command, moves).await,
        FeedName::Documents(instance) => run_on(&bus.changes().feed_of(instance), &command, moves).await,
    }
}

/// Runs `command` on `feed`.
async fn run_on<R: FeedRow>(feed: &Feed<R>, command: &Command, moves: &Moves) -> Result<(), Failure> {
    match command {
        Command::Show { feed: args, rows } => {
            let mut entries = Vec::new();
            for entry in feed.topology().await? {
                let rows = if *rows { Some(count(feed, &entry, moves).await?) } else { None };
                entries.push(Entry::new(&entry, rows));
            }
            let text = entries.iter().map(Entry::readable).collect::<Vec<_>>().join("\n");
            print(args.json, &Topology { entries }, &text)
        }
        Command::Reshard { feed: args, shards, scheme } => {
            let entry = Entry::new(&feed.reshard(*shards, *scheme).await?, None);
            print(args.json, &entry, &entry.readable())
        }
    }
}

/// Counts the rows of each shard of `entry`.
async fn count<R: FeedRow>(
    feed: &Feed<R>,
    entry: &TopologyEntry,
    moves: &Moves,
) -> notibus::Result<Vec<u64>> {
    let mut rows = Vec::with_capacity(entry.shards.len());
    for &shard in &entry.shards {
        rows.push(feed.shard_rows(shard).await?);
        moves.step();
    }
    Ok(rows)
}

/// Prints `value` as JSON, or `text`.
fn print(json: bool, value: &impl Serialize, text: &str) -> Result<(), Failure> {
    let json = json.then(|| serde_json::to_string(value).expect("it has only plain fields"));
    let text = json.as_deref().unwrap_or(text);
    writeln!(io::stdout(), "{text}").map_err(crate::out::failed)
}

/// Ids in order, as ranges of the first and the last.
fn ranges(shards: &[ShardId]) -> Vec<[ShardId; 2]> {
    shards.chunk_by(|a, b| a.0 + 1 == b.0).map(|run| [run[0], run[run.len() - 1]]).collect()
}

impl Entry {
    /// Makes the entry, with the rows of its shards if they were counted.
    fn new(entry: &TopologyEntry, rows: Option<Vec<u64>>) -> Self {
        let TopologyEntry { first, scheme, is_closed, shards } = entry;
        let (shard_count, ranges) = (shards.len(), ranges(shards));
        Self { first: *first, open: !is_closed, scheme: *scheme, shard_count, shards: ranges, rows }
    }

    /// Formats the entry as a line for people.
    fn readable(&self) -> String {
        let scheme = match self.scheme {
            None => "unsharded".to_owned(),
            Some(SchemeId::ID) => "id".to_owned(),
            Some(SchemeId::PARTITION_KEY) => "partition-key".to_owned(),
            Some(SchemeId(number)) => number.to_string(),
        };
        let shards = self
            .shards
            .iter()
            .map(|[first, last]| if first == last { first.to_string() } else { format!("{first}-{last}") });
        let shards = shards.collect::<Vec<_>>().join(",");
        let state = if self.open { "open" } else { "closed" };
        let noun = if self.shard_count == 1 { "shard" } else { "shards" };
        let mut line =
            format!("{}  {state:6}  {scheme:13}  {} {noun}: {shards}", self.first, self.shard_count);
        if let Some(rows) = &self.rows {
            let (least, most) = (rows.iter().min().unwrap_or(&0), rows.iter().max().unwrap_or(&0));
            let total: u64 = rows.iter().sum();
            write!(line, "  {total} rows, {least} to {most} a shard").expect("a string takes everything");
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feeds_and_schemes_are_parsed() {
        assert_eq!("notifications".parse(), Ok(FeedName::Notifications));
        let instance = DbInstance([7; 16]);
        assert_eq!(instance.to_string().parse(), Ok(FeedName::Documents(instance)));
        assert!("docs".parse::<FeedName>().is_err());
        assert_eq!(parse_scheme("partition-key"), Ok(SchemeId::PARTITION_KEY));
        assert_eq!(parse_scheme("1024"), Ok(SchemeId::FIRST_CUSTOM));
        assert!(parse_scheme("65536").is_err() && parse_scheme("").is_err());
    }

    #[test]
    fn shards_are_shown_as_ranges() {
        let range = |first, last| [ShardId(first), ShardId(last)];
        assert_eq!(ranges(&[1, 2, 3, 7, 9, 10].map(ShardId)), [range(1, 3), range(7, 7), range(9, 10)]);
        assert!(ranges(&[]).is_empty());
    }
}
