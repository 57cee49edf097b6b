//! `notibus status` prints the status of a bus on one screen, and `notibus nodes` prints its nodes, and which of them are alive.

use std::{fmt::Write as _, io::IsTerminal, time::Duration};

use serde_json::Value;

use crate::{
    consumers::{feed_of, state},
    target::{Intent, Opened, Target},
    terminal::{self, Failure, Table, duration, items, text, time},
};

/// Printed for parts that could not be read from the store.
const UNKNOWN: &str = "unknown";

/// How to print the status.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The bus.
    #[command(flatten)]
    target: Target,
    /// Print the status again at this interval, until interrupted.
    #[arg(long, num_args = 0..=1, default_missing_value = "2s", value_parser = parse_pause)]
    watch: Option<Duration>,
}

/// Parses a pause. It must not be zero, or the screen would be printed as fast as the store answers.
fn parse_pause(text: &str) -> Result<Duration, String> {
    let pause = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if pause.is_zero() { Err("the pause must not be zero".to_owned()) } else { Ok(pause) }
}

/// Prints the status.
pub async fn run(args: Args, timeout: Duration) -> Result<(), Failure> {
    let mut opened = args.target.open(Intent::Reads, timeout).await?;
    loop {
        let status = read(&opened).await?;
        let is_screen = args.watch.is_some() && !args.target.json && std::io::stdout().is_terminal();
        let clear = if is_screen { "\x1b[H\x1b[2J" } else { "" };
        let text = if args.target.json { status.to_string() } else { screen(&status) };
        terminal::line(&format!("{clear}{}", text.trim_end()))?;
        let Some(pause) = args.watch else { return Ok(()) };
        tokio::time::sleep(pause).await;
        if !opened.is_node() {
            // If another process has the folder open, this one reads a copy, so the folder must be opened again.
            drop(opened);
            opened = args.target.open(Intent::Reads, timeout).await?;
        }
    }
}

/// Reads the status, and for a running node also whether it is ready, or why not.
async fn read(opened: &Opened) -> Result<Value, Failure> {
    let mut status = opened.get("/_notibus/status").await?;
    if opened.is_node() {
        status["ready"] = match opened.get("/_notibus/health/ready").await {
            Ok(_) => true.into(),
            Err(Failure::Failed(reason)) => reason.into(),
            Err(failure) => return Err(failure),
        };
    }
    Ok(status)
}

/// Formats the status as human-readable text.
fn screen(status: &Value) -> String {
    let mut out = String::new();
    let ready = match &status["ready"] {
        Value::Null => String::new(),
        Value::Bool(_) => "  ready".to_owned(),
        reason => format!("  NOT READY: {}", text(reason)),
    };
    let failure = status["failure"].as_str().map_or_else(String::new, |why| format!("  STORE FAILED: {why}"));
    let lines = [
        format!("notibus {}{ready}{failure}", text(&status["version"])),
        format!("feed     {}", feed(&status["feed"], &status["incarnation"])),
        format!("backlog  {}", backlog(&status["backlog"])),
        format!("skipped  {} rows that cannot be decoded", count(&status["skipped_rows"])),
    ];
    out.push_str(&lines.join("\n"));
    for missing in items(&status["unanswered"]) {
        let (part, reason) = (text(&missing["part"]), text(&missing["reason"]));
        write!(out, "\nMISSING  {part}: {reason}").expect("a string takes everything");
    }
    for list in items(&status["truncated"]) {
        let list = text(list);
        write!(out, "\nMISSING  more {list}: `notibus {list} --help` says how to print all")
            .expect("a string takes everything");
    }
    if let Some(trouble) = status["http"]["credentials_trouble"].as_str() {
        write!(out, "\nTROUBLE  the file of credentials is no good: {trouble}")
            .expect("a string takes everything");
    }
    out.push_str("\n\n");
    let empty = |part: &str, none: &str| if status[part].is_null() { UNKNOWN } else { none }.to_owned();
    let mut nodes = Table::new(&["NODE", "ROLES", "LEASES", "JOINED", "STATE"]);
    for node in items(&status["nodes"]) {
        let roles: Vec<_> = items(&node["roles"]).iter().map(text).collect();
        let state = if node["is_silent"] == true { "silent" } else { "" };
        let joined = time(&node["started_ms"]);
        nodes.row([text(&node["id"]), roles.join(","), leases(node), joined, state.to_owned()]);
    }
    out.push_str(&nodes.text(&empty("nodes", "no node has joined: nothing is delivered")));
    out.push('\n');
    let mut consumers = Table::new(&["CONSUMER", "FEED", "MEMBERS", "BEHIND", "OLDEST", "STATE"]);
    for consumer in items(&status["consumers"]) {
        let lag = items(&consumer["lag"]);
        let rows: u64 = lag.iter().filter_map(|shard| shard["rows"].as_u64()).sum();
        let more = if lag.iter().any(|shard| shard["is_exact"] == false) { "+" } else { "" };
        let oldest = lag.iter().filter_map(|shard| shard["age_ms"].as_u64()).max();
        consumers.row([
            text(&consumer["name"]),
            feed_of(consumer),
            count(&consumer["members"]).to_string(),
            if consumer["lag"].is_null() { UNKNOWN.to_owned() } else { format!("{rows}{more}") },
            // A human reader needs only seconds.
            duration(&oldest.map(|ms| ms / 1_000 * 1_000).into()),
            state(consumer),
        ]);
    }
    out.push_str(&consumers.text(&empty("consumers", "no consumer")));
    out
}

/// Formats the leases of a node for a cell.
fn leases(node: &Value) -> String {
    let leases = node["leases"].as_object().into_iter().flatten();
    leases.map(|(pool, held)| format!("{pool} {held}")).collect::<Vec<_>>().join(", ")
}

/// Returns the number of elements in an array.
fn count(value: &Value) -> usize {
    items(value).len()
}

/// Formats the feed as one line.
fn feed(feed: &Value, incarnation: &Value) -> String {
    if feed.is_null() {
        return UNKNOWN.to_owned();
    }
    let topology = items(&feed["topology"]);
    let shards = topology.last().map_or(0, |entry| count(&entry["shards"]));
    let last = feed["last_seq"].as_str().unwrap_or("none");
    let horizon = feed["horizon"].as_str().unwrap_or("none");
    format!(
        "last row {last}; {shards} shards, {} topology entries; horizon {horizon}; incarnation {incarnation}",
        topology.len()
    )
}

/// Formats the backlog as one line.
fn backlog(backlog: &Value) -> String {
    if backlog.is_null() {
        return UNKNOWN.to_owned();
    }
    let rows = &backlog["rows"];
    if rows == 0 {
        return "nothing waits to be folded".to_owned();
    }
    let more = if backlog["is_exact"] == false { " or more" } else { "" };
    format!("{rows}{more} rows wait to be folded, in {} partitions", count(&backlog["partitions"]))
}

/// How to print the nodes of a bus.
#[derive(Debug, clap::Args)]
pub struct NodesArgs {
    /// Where the bus is.
    #[command(flatten)]
    target: Target,
    /// How long to watch for heartbeats. To find all dead nodes, watch for longer than any node's expiry (5 s by default).
    #[arg(long, env = "NOTIBUS_WATCH", default_value = "6s", value_parser = humantime::parse_duration)]
    watch: Duration,
}

/// Prints the nodes.
pub async fn nodes(args: NodesArgs, timeout: Duration) -> Result<(), Failure> {
    let opened = args.target.open(Intent::Reads, timeout).await?;
    let list = async || opened.list("/_notibus/nodes?", "nodes").await;
    let mut seen = list().await?;
    // A folder shows the state of one moment: the nodes of the process that last opened it, which removed all others, and may have ended.
    let is_moment = args.target.is_folder()?;
    if !is_moment && !seen.is_empty() {
        tokio::time::sleep(args.watch).await;
        // The node, or the routes in this process, compared the heartbeats of the two requests.
        seen = list().await?;
    }
    let header = ["NODE", "LIFE", "ROLES", "LEASES", "JOINED"];
    terminal::print(
        args.target.json,
        &seen,
        &header,
        |node| node_cells(node, is_moment),
        "no node has joined",
    )
}

fn node_cells(node: &Value, is_moment: bool) -> Vec<String> {
    let silent = duration(&node["silent_ms"].as_u64().map(|ms| ms / 1_000 * 1_000).into());
    let life = match node["is_silent"].as_bool() {
        _ if is_moment => "of the last opening".to_owned(),
        Some(true) => format!("silent for {silent}"),
        _ => format!("alive, heard from {silent} ago"),
    };
    let roles: Vec<_> = items(&node["roles"]).iter().map(text).collect();
    let roles = if roles.is_empty() { "-".to_owned() } else { roles.join(",") };
    vec![text(&node["id"]), life, roles, leases(node), time(&node["started_ms"])]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_screen_has_tables_with_headers_and_says_what_is_empty() {
        let empty = json!({ "version": "1", "backlog": { "rows": 0 }, "nodes": [], "consumers": [] });
        let empty = screen(&empty);
        assert!(
            empty.contains("nothing waits")
                && empty.contains("no node has joined")
                && empty.contains("no consumer"),
            "{empty}"
        );
        let full = screen(&json!({
            "version": "1", "ready": "Behind: the fold has failed for 4 s.",
            "backlog": { "rows": 10_000, "is_exact": false, "partitions": [{ "partition": 3, "rows": 10_000 }] },
            "nodes": [{ "id": "00ff", "roles": ["notifier"], "leases": { "partition": 64 }, "started_ms": 0, "is_silent": true }],
            "consumers": [{
                "name": "mailer", "members": ["00ff"], "has_deferred": true,
                "lag": [{ "rows": 2, "is_exact": true, "age_ms": 61_000 }, { "rows": 1, "is_exact": true }],
            }],
        }));
        for line in [
            "notibus 1  NOT READY: Behind: the fold has failed for 4 s.",
            "backlog  10000 or more rows wait to be folded, in 1 partitions",
            "NODE  ROLES     LEASES        JOINED                STATE",
            "00ff  notifier  partition 64  1970-01-01T00:00:00Z  silent",
            "CONSUMER  FEED           MEMBERS  BEHIND  OLDEST  STATE",
            "mailer    notifications  1        3       1m 1s   ids deferred",
        ] {
            assert!(full.lines().any(|it| it == line), "{line}\n{full}");
        }
        let missing = json!([{ "part": "nodes", "reason": "gave up" }]);
        let partial = screen(&json!({ "version": "1", "backlog": { "rows": 0 }, "unanswered": missing }));
        assert!(partial.contains("\nMISSING  nodes: gave up\n\nunknown\n\nunknown"), "{partial}");
    }

    #[test]
    fn the_life_of_a_node_is_said_in_words() {
        let life = |silent_ms: u64, is_silent: bool, is_moment: bool| {
            let node = json!({ "id": "0f", "silent_ms": silent_ms, "is_silent": is_silent, "roles": [], "leases": {} });
            node_cells(&node, is_moment)[1].clone()
        };
        assert_eq!(life(1_234, false, false), "alive, heard from 1s ago");
        assert_eq!(life(6_100, true, false), "silent for 6s");
        assert_eq!(life(0, false, true), "of the last opening");
    }
}
