//! `notibus status`: prints the status of a bus on one screen.

use std::{
    fmt::Write as _,
    io::IsTerminal,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::Value;

use crate::{
    Failure,
    deadline::Deadline,
    out,
    signals::stopped,
    target::{Opened, Target},
};

/// How to print the status.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The bus.
    #[command(flatten)]
    target: Target,
    /// The prefix of the bus's keys.
    #[arg(long, default_value = "notibus")]
    prefix: String,
    /// Print it again after each such time, until interrupted.
    #[arg(long, num_args = 0..=1, default_missing_value = "2s", value_parser = humantime::parse_duration)]
    watch: Option<Duration>,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

/// Prints the status.
pub async fn run(args: Args, deadline: Deadline) -> Result<(), Failure> {
    let mut stopped = stopped()?;
    let mut opened = args.target.open(&args.prefix, false, deadline).await?;
    loop {
        let status = deadline.of("reading the status", read(&opened, args.target.is_node())).await?;
        let is_screen = args.watch.is_some() && !args.json && std::io::stdout().is_terminal();
        let clear = if is_screen { "\x1b[H\x1b[2J" } else { "" };
        let text = if args.json { status.to_string() } else { screen(&status) };
        out::line(&format!("{clear}{}", text.trim_end()))?;
        let Some(pause) = args.watch else { return Ok(()) };
        tokio::select! {
            () = stopped.wait() => return Ok(()),
            () = tokio::time::sleep(pause) => {}
        }
        if !args.target.is_node() {
            // A folder that another process has open is read as a copy, so it has to be opened again.
            drop(opened);
            opened = args.target.open(&args.prefix, false, deadline).await?;
        }
    }
}

/// Reads the status; of a running node also whether it is ready, and why not.
async fn read(opened: &Opened, is_node: bool) -> Result<Value, Failure> {
    let mut status = opened.ask("/_notibus/status", None).await?;
    if is_node {
        status["ready"] = match opened.ask("/_notibus/health/ready", None).await {
            Ok(_) => true.into(),
            Err(Failure::Failed(reason)) => reason.into(),
            Err(failure) => return Err(failure),
        };
    }
    Ok(status)
}

/// Formats the status for people.
fn screen(status: &Value) -> String {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
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
    out.push_str("\n\n");
    let nodes = items(&status["nodes"]).iter().map(|node| {
        let roles: Vec<_> = items(&node["roles"]).iter().map(text).collect();
        let leases = node["leases"].as_object().into_iter().flatten();
        let leases: Vec<_> = leases.map(|(pool, held)| format!("{pool} {held}")).collect();
        let joined = node["started_ms"].as_u64().map_or_else(String::new, time);
        vec![text(&node["id"]), roles.join(","), leases.join(", "), joined]
    });
    table(
        &mut out,
        &["NODE", "ROLES", "LEASES", "JOINED"],
        nodes.collect(),
        "no node has joined: nothing is delivered",
    );
    out.push('\n');
    let groups = items(&status["groups"]).iter().map(|group| {
        let feed = group["instance"]
            .as_str()
            .map_or_else(|| "notifications".to_owned(), |of| format!("documents of {of}"));
        let lag = items(&group["lag"]);
        let rows: u64 = lag.iter().filter_map(|shard| shard["rows"].as_u64()).sum();
        let more = if lag.iter().any(|shard| shard["is_exact"] == false) { "+" } else { "" };
        let oldest = lag.iter().filter_map(|shard| shard["age_ms"].as_u64()).max();
        let is_stuck = items(&group["shards"]).iter().any(|shard| shard["trouble"]["is_stuck"] == true);
        let trouble = match (is_stuck, &group["has_dead_letters"]) {
            (true, _) => "STUCK",
            (false, Value::Bool(true)) => "dead letters",
            _ => "",
        };
        let oldest = oldest.map_or_else(
            || "-".to_owned(),
            |ms| format!("{}", humantime::format_duration(Duration::from_secs(ms / 1_000))),
        );
        vec![
            text(&group["name"]),
            feed,
            count(&group["members"]).to_string(),
            format!("{rows}{more}"),
            oldest,
            trouble.to_owned(),
        ]
    });
    table(&mut out, &["GROUP", "FEED", "MEMBERS", "BEHIND", "OLDEST", ""], groups.collect(), "no group");
    out
}

/// The elements of an array; none of any other value.
fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Number of elements of an array.
fn count(value: &Value) -> usize {
    items(value).len()
}

/// Formats the feed on a line.
fn feed(feed: &Value, incarnation: &Value) -> String {
    let topology = items(&feed["topology"]);
    let shards = topology.last().map_or(0, |entry| count(&entry["shards"]));
    let last = feed["last_seq"].as_str().unwrap_or("none");
    let horizon = feed["horizon"].as_str().unwrap_or("none");
    format!(
        "last row {last}; {shards} shards, {} topology entries; horizon {horizon}; incarnation {incarnation}",
        topology.len()
    )
}

/// Formats the backlog on a line.
fn backlog(backlog: &Value) -> String {
    let rows = &backlog["rows"];
    if rows == 0 {
        return "nothing waits to be folded".to_owned();
    }
    let more = if backlog["is_exact"] == false { " or more" } else { "" };
    format!("{rows}{more} rows wait to be folded, in {} partitions", count(&backlog["partitions"]))
}

/// A wall-clock time.
fn time(ms: u64) -> String {
    UNIX_EPOCH.checked_add(Duration::from_millis(ms)).map_or_else(
        || "?".to_owned(),
        |time: SystemTime| humantime::format_rfc3339_seconds(time).to_string(),
    )
}

/// Appends a table, or `empty` if it has no rows.
fn table(out: &mut String, headers: &[&str], rows: Vec<Vec<String>>, empty: &str) {
    if rows.is_empty() {
        let _ = writeln!(out, "{empty}");
        return;
    }
    let headers = headers.iter().map(|&header| header.to_owned()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(headers).chain(rows).collect();
    let widths: Vec<_> = (0..lines[0].len())
        .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
        .collect();
    for line in lines {
        let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        let _ = writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_screen_has_tables_with_headers_and_says_what_is_empty() {
        let empty = screen(&json!({ "version": "1", "backlog": { "rows": 0 } }));
        assert!(
            empty.contains("nothing waits")
                && empty.contains("no node has joined")
                && empty.contains("no group"),
            "{empty}"
        );
        let full = screen(&json!({
            "version": "1", "ready": "Behind: the fold has failed for 4 s.",
            "backlog": { "rows": 10_000, "is_exact": false, "partitions": [{ "partition": 3, "rows": 10_000 }] },
            "nodes": [{ "id": "00ff", "roles": ["notifier"], "leases": { "partition": 64 }, "started_ms": 0 }],
            "groups": [{
                "name": "mailer", "members": ["00ff"], "has_dead_letters": true,
                "lag": [{ "rows": 2, "is_exact": true, "age_ms": 61_000 }, { "rows": 1, "is_exact": true }],
            }],
        }));
        for line in [
            "notibus 1  NOT READY: Behind: the fold has failed for 4 s.",
            "backlog  10000 or more rows wait to be folded, in 1 partitions",
            "NODE  ROLES     LEASES        JOINED",
            "00ff  notifier  partition 64  1970-01-01T00:00:00Z",
            "GROUP   FEED           MEMBERS  BEHIND  OLDEST",
            "mailer  notifications  1        3       1m 1s   dead letters",
        ] {
            assert!(full.lines().any(|it| it == line), "{line}\n{full}");
        }
    }
}
