//! [`Metrics`]: what the routers have done; and all counts of the process as Prometheus reads them.

use prometheus_client::{
    encoding::text,
    metrics::{
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::ConstGauge,
    },
    registry::Registry,
};

use tokio::runtime::Handle;

use super::{Inner, refusals::Refusals};
use crate::base::event::EventKind;

/// The names and values by which counts are told apart.
type Labels = Vec<(&'static str, String)>;

/// What the routers have done. Clones count together.
#[derive(Debug, Clone, Default)]
pub(super) struct Metrics {
    /// Answers, by route, method and status.
    answers: Family<Labels, Counter>,
    /// Rows sent by feeds.
    pub rows: Counter,
    /// Bytes of feeds handed to connections.
    pub bytes: Counter,
    /// Feeds that were cut off by a failure.
    pub failures: Counter,
}

impl Metrics {
    /// Counts an answer of `route`.
    pub fn answered(&self, route: &str, method: &str, status: u16) {
        let labels =
            vec![("route", route.to_owned()), ("method", method.to_owned()), ("status", status.to_string())];
        self.answers.get_or_create(&labels).inc();
    }
}

/// All counts of the process, and of the listener that was asked, if it is ours.
pub(super) fn encode(inner: &Inner, refusals: Option<&Refusals>) -> String {
    let mut registry = Registry::with_prefix("notibus");
    let stats = inner.bus.stats();
    for (name, what, count) in stats.each() {
        registry.register(name, what.trim().trim_end_matches('.'), ConstCounter::new(count));
    }
    let folded = Family::<Labels, Counter>::default();
    for (kind, count) in [EventKind::Created, EventKind::Deleted, EventKind::Updated, EventKind::DdocUpdated]
        .into_iter()
        .zip(stats.folded.lanes())
    {
        folded.get_or_create(&vec![("kind", kind.as_str().to_owned())]).inc_by(count);
    }
    registry.register("events_folded", "Events folded into notifications, by kind", folded);

    let Metrics { answers, rows, bytes, failures } = inner.metrics.clone();
    registry.register("http_answers", "Answers, by route, method and status", answers);
    registry.register("http_feed_rows", "Rows sent by feeds", rows);
    registry.register("http_feed_bytes", "Bytes of feeds handed to connections", bytes);
    registry.register("http_feed_failures", "Feeds that were cut off by a failure", failures);
    if let Some(Refusals { counts, .. }) = refusals {
        let what =
            "Requests refused for the name in Host or the page in Origin, and connections for lack of room";
        registry.register("http_refused", what, counts.clone());
    }
    let gauge = |count: usize| ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
    registry.register("http_feeds", "Feeds that are open", gauge(inner.admission.feeds()));
    // Outside of a runtime nobody asks.
    let tasks = Handle::try_current().map_or(0, |runtime| runtime.metrics().num_alive_tasks());
    registry.register("tasks", "Tasks that live in the runtime", gauge(tasks));
    registry.register("subscribers", "Subscriptions in the process", gauge(inner.dispatcher.subscribers()));

    let mut out = String::new();
    text::encode(&mut out, &registry).expect("a string takes all text");
    out
}
