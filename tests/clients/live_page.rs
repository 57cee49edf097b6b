//! The live page in a real browser: it shows events as they are recorded, and turns red when no notifier is running.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use libtest_mimic::Trial;
use notibus::{
    Bus, BusOptions, NodeOptions, NotifierOptions, StartOptions,
    consumer::ConsumerSettings,
    http::{ApiOptions, ServerOptions},
    store::Store,
};

use crate::{SCRIPT_LIMIT, browser, end_of};

/// Makes the trial, which needs Node to drive the browser, but no packages.
pub fn trial() -> Trial {
    let browser = browser();
    let has_node = Command::new("node").arg("--version").stdout(Stdio::null()).status().is_ok();
    if browser.is_none() || !has_node {
        println!(
            "SKIPPED, not passed: the live page needs node and chromium-headless-shell (or NOTIBUS_BROWSER)"
        );
    }
    let is_ignored = browser.is_none() || !has_node;
    let trial = Trial::test("live_page.js", move || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(watch(&browser.unwrap_or_default()));
        Ok(())
    });
    trial.with_ignored_flag(is_ignored)
}

/// Serves a page. The notifier dies once the page has shown everything, and another one starts once the page has turned red.
async fn watch(browser: &Path) {
    let bus = Bus::open(&Store::memory(), BusOptions::default()).await.unwrap();
    let running = bus.start(StartOptions::default().notifier(None)).await.unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let router = running.api(ApiOptions::default()).unwrap().routes();
    let address = running.serve(listener, router, ServerOptions::default()).await.unwrap();
    bus.consumer("mailer").unwrap().create(&ConsumerSettings::default()).await.unwrap();
    let folds = async || {
        // The death of a node must be noticed soon.
        let expiry = Duration::from_secs(2);
        let options = NodeOptions::default().expiry(expiry).heartbeat(expiry / 8);
        let node = bus.node(options).await.unwrap();
        (node.notifier(NotifierOptions::default()).await.unwrap(), node)
    };
    let mut notifier = Some(folds().await);

    let mut script = Command::new("node")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/live_page.js"))
        .arg(format!("http://{address}"))
        .env("NOTIBUS_BROWSER", browser)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(script.stdout.take().unwrap()).lines();
    loop {
        let (line, rest) = tokio::task::spawn_blocking(move || (lines.next(), lines)).await.unwrap();
        lines = rest;
        match line.transpose().unwrap().as_deref() {
            // Like a killed process, the notifier leaves without notice.
            Some("seen") => drop(notifier.take()),
            Some("red") => notifier = Some(folds().await),
            Some(other) => println!("{other}"),
            None => break,
        }
    }
    let status = end_of(&mut script, SCRIPT_LIMIT);
    assert!(status.is_some_and(|status| status.success()), "the script ended with {status:?}");
    drop(notifier);
    running.shutdown().await.unwrap();
}
