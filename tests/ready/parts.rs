//! What `ready` says while one part of a bus is dead: the notifier, the tail of the dispatcher, or the store.
//!
//! The same steps for every store: `main` runs them on folders, and `tests/foundationdb` on a cluster.

use std::time::{Duration, Instant};

use axum::{body::Body, http::Request};
use notibus::{
    Bus, BusOptions, Db, DbInstance, NodeOptions, NotifierOptions, StartOptions,
    http::{Api, ApiOptions},
    node::NodeHandle,
    store::{
        Store, StoreError,
        testing::{Faults, Operation},
    },
};
use serde_json::Value;
use tower::ServiceExt;

/// How long it may take until `ready` names the store or the dispatcher.
pub(crate) const SOON: Duration = Duration::from_secs(5);

/// How much later than its expiry a notifier may be named: `ready` is asked only at intervals, and the machine may be busy.
const LATE: Duration = Duration::from_secs(1);

/// The interval at which `ready` is asked.
const PAUSE: Duration = Duration::from_millis(100);

/// Requests `path`. Returns the status and the body of the answer.
pub(crate) async fn get(api: &Api, path: &str) -> (u16, String) {
    let answer = api.routes().oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap();
    let status = answer.status().as_u16();
    let body = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

/// A node of a bus that is asked whether it is ready.
pub(crate) struct Claim {
    running: NodeHandle,
    api: Api,
}

impl Claim {
    /// Starts the node on the bus of `store` under `prefix`.
    pub(crate) async fn start(store: &Store, prefix: &[u8], roles: StartOptions) -> Self {
        let bus = Bus::open(store, BusOptions::default().prefix(prefix.to_vec())).await.unwrap();
        let running = bus.start(roles).await.unwrap();
        let api = running.api(ApiOptions::default()).unwrap();
        Self { running, api }
    }

    /// Returns the answer of `ready`.
    pub(crate) async fn ready(&self) -> Value {
        ready(&self.api).await
    }

    /// Waits until the node is ready.
    pub(crate) async fn until_ready(&self) {
        let began = Instant::now();
        loop {
            let answer = self.ready().await;
            if answer["status"] == "ok" {
                return;
            }
            assert!(began.elapsed() < Duration::from_mins(1), "{answer}");
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Polls until the node is not ready, which must be within `limit`, and because of `part`.
    pub(crate) async fn names(&self, part: &str, limit: Duration) {
        let began = Instant::now();
        loop {
            let answer = self.ready().await;
            if answer["status"] != "ok" {
                println!("after {:?}: {answer}", began.elapsed());
                assert_eq!(answer["part"], part, "{answer}");
                assert!(began.elapsed() <= limit, "{:?}: {answer}", began.elapsed());
                return;
            }
            assert!(began.elapsed() <= limit, "it is ready after {:?}", began.elapsed());
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Records an event.
    pub(crate) async fn record(&self, name: &str) {
        let (bus, db) = (self.running.bus(), Db::new(name.parse().unwrap(), DbInstance([1; 16])));
        let record = async |tx| {
            bus.producer().updated(&tx, &db);
            Ok(())
        };
        bus.store().run(record).await.unwrap();
    }

    pub(crate) async fn end(self) {
        self.running.shutdown().await.unwrap();
    }
}

/// The only notifier is on another node, which dies, and is replaced later.
pub(crate) async fn a_dead_notifier_is_named(store: &Store, prefix: &[u8]) {
    let asked = Claim::start(store, prefix, StartOptions::default().notifier(None)).await;
    let other = Bus::open(store, BusOptions::default().prefix(prefix.to_vec())).await.unwrap();
    let start = async || {
        let node = other.node(NodeOptions::default()).await.unwrap();
        node.notifier(NotifierOptions::default()).await.unwrap()
    };
    let notifier = start().await;
    asked.until_ready().await;
    drop(notifier);
    asked.record("waits").await;
    asked.names("notifier", NodeOptions::default().expiry + LATE).await;
    let notifier = start().await;
    asked.until_ready().await;
    notifier.shutdown().await.unwrap();
    asked.end().await;
}

/// Fails exactly the reads with which the process and its tail look for new rows.
pub(crate) fn fail_tail(faults: &Faults, prefix: &[u8]) {
    let (pulses, rows) = ([prefix, b"\x15\x0f"].concat(), [prefix, b"\x15\x04"].concat());
    faults.plan_reads(move |read| {
        let is_of_tail = match read {
            Operation::Get { key, .. } => key.starts_with(&pulses),
            Operation::GetRange { range, .. } => {
                range.begin.starts_with(&rows) || range.end.starts_with(&pulses)
            }
            _ => false,
        };
        is_of_tail.then_some(StoreError::TRANSACTION_TIMED_OUT)
    });
}

/// Exactly the reads of the tail fail.
pub(crate) async fn a_dead_tail_is_named(store: &Store, prefix: &[u8]) {
    let faults = Faults::new(store);
    let asked = Claim::start(&faults.store(), prefix, StartOptions::default()).await;
    asked.record("delivered").await;
    asked.until_ready().await;
    fail_tail(&faults, prefix);
    // Nothing is recorded: a dead tail must be noticed even while it is idle.
    asked.names("dispatcher", SOON).await;
    faults.heal();
    asked.until_ready().await;
    asked.record("again").await;
    asked.until_ready().await;
    asked.end().await;
}

/// Returns the answer of the health check of `api`.
pub(crate) async fn ready(api: &Api) -> Value {
    let (status, body) = get(api, "/_notibus/health/ready").await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status == 200, body["status"] == "ok", "{body}");
    body
}
