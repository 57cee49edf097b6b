//! The arguments of `notibus replay`.

use std::{path::PathBuf, time::Duration};

use crate::store::Store;

/// How to replay a history.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The history: tab-separated rows of unix seconds, transaction, op (create, delete, update or ddoc), database and
    /// document; plain or gzip; "-" for standard input. Consecutive rows with one transaction number form one transaction.
    pub file: PathBuf,
    /// The store: "memory", "dir:PATH" or "fdb:FILE".
    #[arg(long, default_value = "memory")]
    pub store: Store,
    /// The prefix of the bus's keys. No other notifiers may work on this bus.
    #[arg(long, default_value = "notibus")]
    pub prefix: String,
    /// Replay into a bus that no replay has made. Its databases with names of the history are deleted and created again.
    #[arg(long)]
    pub into_existing: bool,
    /// Shards of the feed, if the bus is new.
    #[arg(long, default_value_t = 4)]
    pub shards: u32,
    /// Partitions of the counters.
    #[arg(long, default_value_t = 64)]
    pub partitions: u32,
    /// Slots over which the counters of a database are spread.
    #[arg(long, default_value_t = 1)]
    pub slots: u16,
    /// Notifiers that share the partitions, each as a node of its own.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub notifiers: u32,
    /// Concurrent transactions. Those that share a database keep their order.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub writers: u16,
    /// The longest pause between two folds of a partition.
    #[arg(long, default_value = "25ms", value_parser = humantime::parse_duration)]
    pub fold_interval_max: Duration,
    /// Events to record per second, or "max".
    #[arg(long, default_value = "max", value_parser = parse_rate)]
    pub rate: Rate,
    /// Reshard the feed after each such number of events: to twice as many shards (64 at most, and to half as
    /// many from there on), and back.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub reshard_every: Option<u64>,
    /// Print one JSON object on standard output, and nothing else there.
    #[arg(long)]
    pub json: bool,
    /// Write the final feed to this file, one JSON object per line.
    #[arg(long)]
    pub dump_feed: Option<PathBuf>,
}

/// How fast to record.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rate {
    /// As fast as the store takes it.
    Max,
    PerSecond(f64),
}

fn parse_rate(text: &str) -> Result<Rate, String> {
    match text.parse::<f64>() {
        _ if text == "max" => Ok(Rate::Max),
        Ok(rate) if (0.001..=1e9).contains(&rate) => Ok(Rate::PerSecond(rate)),
        _ => Err("it is neither \"max\" nor a number from 0.001 to 1,000,000,000".to_owned()),
    }
}
