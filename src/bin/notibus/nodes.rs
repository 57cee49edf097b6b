//! `notibus nodes`: prints the nodes of a bus, and which of them live.

use std::time::Duration;

use serde_json::Value;

use crate::{
    failure::Failure,
    status::leases,
    table::{self, duration, items, text, time},
    target::{Intent, Target},
};

/// How to print the nodes of a bus.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where they are.
    #[command(flatten)]
    target: Target,
    /// How long to watch for heartbeats: longer than the longest expiry of a node (5 s by default), to find all dead ones.
    #[arg(long, env = "NOTIBUS_WATCH", default_value = "6s", value_parser = humantime::parse_duration)]
    watch: Duration,
}

/// Prints the nodes.
pub async fn run(args: Args, timeout: Duration) -> Result<(), Failure> {
    let opened = args.target.open(Intent::Reads, timeout).await?;
    let nodes = async || opened.list("/_notibus/nodes?", "nodes").await;
    let mut seen = nodes().await?;
    // A folder shows one moment. Its nodes are of the process that opened it last, which may have ended: its opening removed all others.
    let is_moment = args.target.is_folder()?;
    if !is_moment && !seen.is_empty() {
        tokio::time::sleep(args.watch).await;
        // Who answers has compared the two moments.
        seen = nodes().await?;
    }
    let header = ["NODE", "LIFE", "ROLES", "LEASES", "JOINED"];
    table::print(args.target.json, &seen, &header, |node| cells(node, is_moment), "no node has joined")
}

fn cells(node: &Value, is_moment: bool) -> Vec<String> {
    let silent = duration(&node["silent_ms"].as_u64().map(|ms| ms / 1_000 * 1_000).into());
    let life = match node["is_silent"].as_bool() {
        _ if is_moment => "of the last opening".to_owned(),
        Some(true) => format!("silent for {silent}"),
        _ => format!("alive, heard of {silent} ago"),
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
    fn the_life_of_a_node_is_said_in_words() {
        let life = |silent_ms: u64, is_silent: bool, is_moment: bool| {
            let node = json!({ "id": "0f", "silent_ms": silent_ms, "is_silent": is_silent, "roles": [], "leases": {} });
            cells(&node, is_moment)[1].clone()
        };
        assert_eq!(life(1_234, false, false), "alive, heard of 1s ago");
        assert_eq!(life(6_100, true, false), "silent for 6s");
        assert_eq!(life(0, false, true), "of the last opening");
    }
}
