//! `notibus topology`: shows and changes the shards of a feed.

use std::time::Duration;

use notibus::{DbInstance, feed::SchemeId};
use serde_json::{Value, json};

use crate::{
    target::{Intent, Target},
    terminal::{self, Failure, items, text},
};

/// What to do with a topology.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Print the history of a feed's shards, oldest first. Nothing is changed.
    Show {
        /// The feed.
        #[command(flatten)]
        feed: FeedArgs,
        /// Also count the rows of each shard, which reads the whole feed.
        #[arg(long)]
        rows: bool,
    },
    /// Change the number of shards, and print the new entry. Old rows stay where they are; new rows go to the new shards.
    Reshard {
        /// The feed.
        #[command(flatten)]
        feed: FeedArgs,
        /// The number of shards, 1 to 1,000.
        #[arg(long)]
        shards: u32,
        /// The scheme that routes ids to the shards: "id", "partition-key", or the number of a scheme. Default: the current scheme.
        #[arg(long, value_parser = parse_scheme)]
        scheme: Option<SchemeId>,
    },
}

/// The feed.
#[derive(Debug, clap::Args)]
pub struct FeedArgs {
    /// Where the bus is.
    #[command(flatten)]
    target: Target,
    /// The feed: "notifications", or the instance of a database (32 hexadecimal digits), for the changes to its documents.
    #[arg(long, env = "NOTIBUS_FEED", default_value = "notifications", value_parser = parse_feed)]
    feed: String,
}

/// Checks the name of a feed.
pub fn parse_feed(text: &str) -> Result<String, String> {
    if text == "notifications" || text.parse::<DbInstance>().is_ok() {
        return Ok(text.to_owned());
    }
    Err("it is neither \"notifications\" nor 32 hexadecimal digits".to_owned())
}

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

/// Runs `command`.
pub async fn run(command: Command, timeout: Duration) -> Result<(), Failure> {
    let (target, entries) = match &command {
        Command::Show { feed, rows } => {
            let opened = feed.target.open(Intent::Reads, timeout).await?;
            let path = format!("/_notibus/feeds/{}/topology?rows={rows}", feed.feed);
            (&feed.target, opened.get(&path).await?["entries"].take())
        }
        Command::Reshard { feed, shards, scheme } => {
            let opened = feed.target.open(Intent::Writes, timeout).await?;
            let body = json!({ "shards": shards, "scheme": scheme.map(|SchemeId(number)| number) });
            let path = format!("/_notibus/feeds/{}/reshard", feed.feed);
            let entry = opened.post("resharding", &path, &body).await?;
            (&feed.target, json!([entry]))
        }
    };
    let header = ["FIRST", "STATE", "SCHEME", "COUNT", "SHARDS", "ROWS", "LEAST", "MOST"];
    let counted = matches!(command, Command::Show { rows: true, .. });
    let header = if counted { &header[..] } else { &header[..5] };
    let cells = |entry: &Value| {
        let mut cells = cells(entry);
        cells.truncate(header.len());
        cells
    };
    terminal::print(target.json, items(&entries), header, cells, "no entry")
}

/// Formats sorted ids as ranges, one for each run of consecutive ids.
fn ranges(shards: &[u64]) -> String {
    let runs = shards.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [only] => only.to_string(),
        _ => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    runs.collect::<Vec<_>>().join(",")
}

fn cells(entry: &Value) -> Vec<String> {
    let scheme = match entry["scheme"].as_u64().map(|number| SchemeId(number as u16)) {
        None => "unsharded".to_owned(),
        Some(SchemeId::ID) => "id".to_owned(),
        Some(SchemeId::PARTITION_KEY) => "partition-key".to_owned(),
        Some(SchemeId(number)) => number.to_string(),
    };
    let numbers = |name: &str| items(&entry[name]).iter().filter_map(Value::as_u64).collect::<Vec<_>>();
    let (shards, rows) = (numbers("shards"), numbers("rows"));
    let state = if entry["open"] == true { "open" } else { "closed" };
    let counts =
        [rows.iter().sum(), rows.iter().min().copied().unwrap_or(0), rows.iter().max().copied().unwrap_or(0)];
    let mut cells =
        vec![text(&entry["first"]), state.to_owned(), scheme, shards.len().to_string(), ranges(&shards)];
    cells.extend(counts.map(|count| count.to_string()));
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feeds_and_schemes_are_parsed() {
        for feed in ["notifications", &DbInstance([7; 16]).to_string()] {
            assert_eq!(parse_feed(feed).as_deref(), Ok(feed));
        }
        assert!(parse_feed("docs").is_err());
        assert_eq!(parse_scheme("partition-key"), Ok(SchemeId::PARTITION_KEY));
        assert_eq!(parse_scheme("1024"), Ok(SchemeId::FIRST_CUSTOM));
        assert!(parse_scheme("65536").is_err() && parse_scheme("").is_err());
    }

    #[test]
    fn shards_are_shown_as_ranges() {
        assert_eq!(ranges(&[1, 2, 3, 7, 9, 10]), "1-3,7,9-10");
        assert_eq!(ranges(&[]), "");
    }
}
