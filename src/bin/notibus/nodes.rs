//! `notibus nodes`: prints the nodes of a bus, and which of them live.

use std::time::Duration;

use serde_json::Value;

use crate::{
    failure::Failure,
    status::leases,
    table::{self, items, text, time},
    target::{Intent, Target},
};

/// How to print the nodes of a bus.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where they are.
    #[command(flatten)]
    target: Target,
    /// How long to watch for heartbeats: at least two intervals. A node that is not heard of in that time may be dead.
    #[arg(long, env = "NOTIBUS_WATCH", default_value = "6s", value_parser = humantime::parse_duration)]
    watch: Duration,
}

/// Prints the nodes.
pub async fn run(args: Args, timeout: Duration) -> Result<(), Failure> {
    // An opened folder shows one moment, so it is opened again to see which nodes live.
    let nodes = async || {
        let opened = args.target.open(Intent::Reads, timeout).await?;
        Ok::<_, Failure>(opened.get("/_notibus/nodes").await?["nodes"].take())
    };
    let before = nodes().await?;
    if !items(&before).is_empty() {
        tokio::time::sleep(args.watch).await;
    }
    let seen = compare(&before, nodes().await?);
    let header = ["NODE", "LIFE", "ROLES", "LEASES", "JOINED"];
    table::print(args.target.json, &seen, &header, |node| cells(node, args.watch), "no node has joined")
}

/// The nodes of `after`, each with its `beats` since `before`, null if it was not there then or has joined again, and whether it `lives`.
fn compare(before: &Value, after: Value) -> Vec<Value> {
    let known = |node: &Value| {
        let same = |it: &&Value| it["id"] == node["id"] && it["started_ms"] == node["started_ms"];
        items(before)
            .iter()
            .find(same)
            .and_then(|it| node["beat"].as_u64()?.checked_sub(it["beat"].as_u64()?))
    };
    let Value::Array(mut nodes) = after else { return Vec::new() };
    for node in &mut nodes {
        let beats = known(node);
        node["beats"] = beats.into();
        node["lives"] = (beats != Some(0)).into();
    }
    nodes
}

fn cells(node: &Value, watched: Duration) -> Vec<String> {
    let watched = humantime::format_duration(watched);
    let life = match node["beats"].as_u64() {
        Some(0) => format!("silent for {watched}"),
        Some(beats) => format!("alive, {beats} beats in {watched}"),
        None => format!("alive, joined within {watched}"),
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
    fn a_node_lives_if_its_beat_has_changed() {
        let at = |beat: u64, started_ms: u64| json!([{ "id": "0f", "started_ms": started_ms, "beat": beat, "roles": ["http"], "leases": {} }]);
        let seen = |before: Value, after: Value| {
            let seen = compare(&before, after);
            (seen[0]["lives"].clone(), cells(&seen[0], Duration::from_secs(6))[1].clone())
        };
        assert_eq!(seen(at(1, 7), at(2, 7)), (true.into(), "alive, 1 beats in 6s".to_owned()));
        assert_eq!(seen(at(2, 7), at(2, 7)), (false.into(), "silent for 6s".to_owned()));
        assert_eq!(seen(at(2, 7), at(2, 8)), (true.into(), "alive, joined within 6s".to_owned()));
        assert_eq!(seen(json!([]), at(1, 7)).0, true);
    }
}
