//! Monitoring: each metric in the dashboard and the alerts appears in a real answer of `/_notibus/metrics`. Also, the live page.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    collections::BTreeSet,
    io::Write,
    process::{Command, Output, Stdio},
};

use common::{LIMIT, db, narrow_bus, record, row_with};
use notibus::{
    StartOptions,
    changes::ChangesOptions,
    consumer::ConsumerSettings,
    http::{ApiOptions, ServerOptions},
    node::NodeHandle,
    store::Store,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// Starts a node with everything that is measured. Returns the node and its address.
async fn served(store: &Store) -> (NodeHandle, std::net::SocketAddr) {
    let bus = narrow_bus(store).await;
    let running = bus.start(StartOptions::default()).await.unwrap();
    let api = running.api(ApiOptions::default()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = running.serve(listener, api.routes(), ServerOptions::default()).await.unwrap();
    (running, address)
}

/// Returns the whole answer to a request.
async fn get(address: std::net::SocketAddr, path: &str) -> String {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(LIMIT, socket.read_to_string(&mut answer)).await.unwrap().unwrap();
    answer
}

fn named(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("notibus_")).collect()
}

/// Returns the metrics that have values in `answer`.
fn measured(answer: &str) -> BTreeSet<&str> {
    answer
        .lines()
        .filter_map(|line| line.split(['{', ' ']).next())
        .filter(|name| name.starts_with("notibus_"))
        .collect()
}

#[tokio::test]
async fn dashboards_and_alerts_name_metrics_that_are_there() {
    let store = Store::memory();
    let (running, address) = served(&store).await;
    let bus = running.bus().clone();
    bus.consumer("mailer").unwrap().create(&ConsumerSettings::default()).await.unwrap();
    let (changes, docs) = (bus.changes(), db("docs", 2));
    store.run(async |tx| changes.create(&tx, &docs, &ChangesOptions::default()).await).await.unwrap();
    let of_documents = ConsumerSettings::default().documents(Some(docs.instance));
    bus.consumer("index").unwrap().create(&of_documents).await.unwrap();
    record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
    // The first reading of the consumers is cached for a few seconds, so the row must exist before it.
    row_with(&bus, &db("a", 1), [1, 0, 0, 0]).await;
    // The HTTP metrics have values only after the first answer.
    get(address, "/_db_updates").await;
    let answer = get(address, "/_notibus/metrics").await;
    let measured = measured(&answer);
    let files = [include_str!("../ops/grafana.json"), include_str!("../ops/alerts.yml")];
    for file in files {
        let names = named(file);
        assert!(names.len() > 10, "{names:?}");
        let missing: Vec<_> = names.iter().filter(|name| !measured.contains(*name)).collect();
        assert!(missing.is_empty(), "{missing:?} are not in\n{answer}");
    }
    // The live page uses the base names of histograms. Regression: it used one that no longer exists, and showed "NaN".
    let page = get(address, "/_notibus/").await;
    let is_there = |name: &&str| measured.contains(*name) || measured.contains(&format!("{name}_count")[..]);
    assert!(named(&page).iter().all(is_there), "{:?}", named(&page));
    let dashboard: serde_json::Value = serde_json::from_str(files[0]).unwrap();
    assert!(dashboard["panels"].as_array().unwrap().len() > 10);
    for line in [
        "notibus_nodes{state=\"living\"} 1",
        "notibus_leases{pool=\"partition\"} 1",
        "notibus_partitions 1",
        "notibus_store_failed 0",
        "notibus_store_commits_total ",
        "notibus_store_retries_total ",
        "notibus_rows_tailed_total ",
        "notibus_leases_wanted{pool=\"partition\"} 1",
        "notibus_leases_wanted{pool=\"consumers\"} 5",
        "notibus_backlog_rows{partitions=\"0\"} ",
        "notibus_backlog_oldest_seconds{partitions=\"0\"} ",
        "notibus_tail_lag_seconds 0.0",
        "notibus_consumer_lag_rows{consumer=\"mailer\"} 1",
        "notibus_consumer_deferred_ids{consumer=\"mailer\"} 0",
        "notibus_consumer_members{consumer=\"mailer\"} 0",
        "notibus_consumer_shards_unowned{consumer=\"mailer\"} 4",
        "notibus_document_consumers{trouble=\"deferred\"} 0",
        "notibus_document_consumers{trouble=\"failing\"} 0",
        "notibus_document_consumers{trouble=\"unowned\"} 1",
    ] {
        assert!(answer.lines().any(|it| it.starts_with(line)), "{line}\n{answer}");
    }
    running.shutdown().await.unwrap();
}

/// Runs a checker with `input`. If it is not installed, prints that, and returns `None`.
fn checked(program: &str, arguments: &[&str], input: &str) -> Option<Output> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut child) = command.current_dir(env!("CARGO_MANIFEST_DIR")).spawn() else {
        eprintln!("SKIPPED, not passed: {arguments:?}, because there is no {program}");
        return None;
    };
    // A checker that has seen enough does not read the rest.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    Some(child.wait_with_output().unwrap())
}

/// Returns everything that a checker printed, on both outputs.
fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text)).concat()
}

/// Prometheus accepts the alerts, and finds no fault in the metrics of a working node.
#[tokio::test]
async fn prometheus_accepts_alerts_and_metrics() {
    if let Some(output) = checked("promtool", &["check", "rules", "ops/alerts.yml"], "") {
        assert!(output.status.success(), "{}", said(&output));
    }
    let store = Store::memory();
    let (running, address) = served(&store).await;
    let bus = running.bus().clone();
    bus.consumer("mailer").unwrap().create(&ConsumerSettings::default()).await.unwrap();
    record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
    let answer = get(address, "/_notibus/metrics").await;
    running.shutdown().await.unwrap();
    let (_, metrics) = answer.split_once("\r\n\r\n").unwrap();
    if let Some(output) = checked("promtool", &["check", "metrics"], metrics) {
        let said = said(&output);
        // `promtool` knows only the older format, in which a counter's help line has the name with `_total`.
        let has_help = |line: &str| {
            let counter = line.strip_suffix("_total no help text");
            counter.is_some_and(|name| metrics.contains(&format!("# HELP {name} ")))
        };
        let wrong: Vec<_> = said.lines().filter(|line| !has_help(line)).collect();
        assert!(wrong.is_empty() && said.lines().count() > 10, "{said}\n{metrics}");
    }
}

/// systemd accepts the unit. It requires a program at the unit's path, so the unit gets the path of one that exists.
#[test]
fn systemd_accepts_the_unit() {
    let unit = include_str!("../ops/notibus.service");
    let folder = tempfile::tempdir().unwrap();
    let (file, program) = (folder.path().join("notibus.service"), std::env::current_exe().unwrap());
    std::fs::write(&file, unit.replace("/usr/local/bin/notibus", program.to_str().unwrap())).unwrap();
    if let Some(output) = checked("systemd-analyze", &["verify", file.to_str().unwrap()], "") {
        assert!(output.status.success() && said(&output).is_empty(), "{}", said(&output));
    }
}

/// Every alert has a line in the page that says what to do.
#[test]
fn each_alert_is_in_the_table_of_symptoms() {
    let alerts = include_str!("../ops/alerts.yml");
    let page = include_str!("../docs/operations.md");
    let names: Vec<_> = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(names.len() > 10);
    let missing: Vec<_> = names.iter().filter(|name| !page.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// The page loads nothing from elsewhere, and contains nothing that its reader may not see: it is the same for everyone.
#[tokio::test]
async fn the_live_page_is_one_file_that_asks_nobody_else() {
    let store = Store::memory();
    let (running, address) = served(&store).await;
    for path in ["/_notibus", "/_notibus/"] {
        let answer = get(address, path).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        let (head, page) = answer.split_once("\r\n\r\n").unwrap();
        assert!(
            head.to_lowercase().contains("content-security-policy: default-src 'none'; connect-src 'self'"),
            "{head}"
        );
        assert!(page.len() < 40 << 10 && page.starts_with("<!doctype html>"), "{} bytes", page.len());
        assert!(
            !page.contains("://") && !page.contains("innerHTML"),
            "it asks somebody else, or trusts what it shows"
        );
    }
    running.shutdown().await.unwrap();
}
