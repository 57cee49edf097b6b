//! `notibus nodes`: prints the nodes of a bus, and which of them live.

use std::{
    collections::BTreeMap,
    io::Write,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use notibus::{
    Bus,
    node::{NodeId, NodeStatus},
    store::Database,
};
use serde::Serialize;

use crate::{Failure, deadline::Deadline, signals::stopped, store::Store};

/// How to print the nodes of a bus.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store: "memory", "dir:PATH" or "fdb:FILE".
    #[arg(long)]
    store: Store,
    /// The prefix of the bus's keys.
    #[arg(long, default_value = "notibus")]
    prefix: String,
    /// How long to watch for heartbeats: at least two intervals. A node without a heartbeat in that time may be dead.
    #[arg(long, default_value = "6s", value_parser = humantime::parse_duration)]
    watch: Duration,
    /// Print a JSON object per node.
    #[arg(long)]
    json: bool,
}

/// A node as it is printed.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct WatchedNode<'a> {
    #[serde(flatten)]
    status: &'a NodeStatus,
    /// Its heartbeats while it was watched; `None` if it joined, or joined again, meanwhile.
    beats: Option<u64>,
    /// Whether it has shown a heartbeat while it was watched.
    lives: bool,
}

/// Prints the nodes.
pub async fn run(args: Args, deadline: Deadline) -> Result<(), Failure> {
    // A folder that another process has open is read as a copy, so it has to be opened twice to see who lives.
    let nodes = async |db: &Database| {
        let nodes = async { Bus::open_existing(db, args.prefix.as_bytes()).await?.nodes().await };
        deadline.of("reading the nodes", nodes).await
    };
    let before = nodes(&args.store.open_to_read().await?.now()).await?;
    if !before.is_empty() {
        let mut stopped = stopped()?;
        tokio::select! {
            () = tokio::time::sleep(args.watch) => {}
            () = stopped.wait() => return Ok(()),
        }
    }
    let after = nodes(&args.store.open_to_read().await?.db).await?;
    let mut out = std::io::stdout().lock();
    let fail = crate::out::failed;
    if after.is_empty() && !args.json {
        writeln!(out, "no node has joined").map_err(fail)?;
    }
    for seen in compare(&before, &after) {
        if args.json {
            serde_json::to_writer(&mut out, &seen)
                .map_err(std::io::Error::from)
                .and_then(|()| out.write_all(b"\n"))
                .map_err(fail)?;
        } else {
            writeln!(out, "{}", seen.readable(args.watch)).map_err(fail)?;
        }
    }
    Ok(())
}

/// The nodes of `after`, compared with `before`.
fn compare<'a>(before: &[NodeStatus], after: &'a [NodeStatus]) -> Vec<WatchedNode<'a>> {
    let before: BTreeMap<NodeId, _> =
        before.iter().map(|status| (status.id, (status.started_ms, status.beat))).collect();
    let seen = after.iter().map(|status| {
        let beats = before
            .get(&status.id)
            .filter(|(started_ms, _)| *started_ms == status.started_ms)
            .and_then(|(_, beat)| status.beat.checked_sub(*beat));
        WatchedNode { status, beats, lives: beats != Some(0) }
    });
    seen.collect()
}

impl WatchedNode<'_> {
    /// Formats the node for people.
    fn readable(&self, watched: Duration) -> String {
        let NodeStatus { id, roles, leases, started_ms, .. } = self.status;
        let watched = humantime::format_duration(watched);
        let life = match self.beats {
            Some(0) => format!("silent for {watched}"),
            Some(beats) => format!("alive, {beats} beats in {watched}"),
            None => format!("alive, joined within {watched}"),
        };
        let roles: Vec<_> = roles.iter().map(notibus::node::Role::as_str).collect();
        let roles = if roles.is_empty() { "no role".to_owned() } else { roles.join(", ") };
        let held: Vec<_> = leases.iter().map(|(pool, count)| format!("; {pool} leases: {count}")).collect();
        let held = held.concat();
        let joined = UNIX_EPOCH.checked_add(Duration::from_millis(*started_ms)).map_or_else(
            || "?".to_owned(),
            |time: SystemTime| humantime::format_rfc3339_seconds(time).to_string(),
        );
        format!("{id}  {life}; {roles}{held}; joined {joined}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_node_lives_if_its_beat_has_changed() {
        let db = Database::memory();
        let bus = Bus::open(&db, notibus::BusOptions::default()).await.unwrap();
        let node = bus.node(notibus::NodeOptions::default()).await.unwrap();
        let first = bus.nodes().await.unwrap();
        let _role = node.announce(notibus::node::Role::HTTP).await.unwrap();
        let second = bus.nodes().await.unwrap();
        let seen = |before: &[NodeStatus], after: &[NodeStatus]| {
            let seen = compare(before, after);
            (seen[0].beats, seen[0].lives, seen[0].readable(Duration::from_secs(6)))
        };
        let (beats, lives, line) = seen(&first, &second);
        assert!(
            (beats, lives) == (Some(1), true) && line.contains("alive, 1 beats in 6s; http; joined 20"),
            "{line}"
        );
        let (beats, lives, line) = seen(&second, &second);
        assert!((beats, lives) == (Some(0), false) && line.contains("silent for 6s"), "{line}");
        let (beats, lives, line) = seen(&[], &first);
        assert!((beats, lives) == (None, true) && line.contains("joined within 6s; no role"), "{line}");
    }
}
