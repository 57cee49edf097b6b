//! [`AnswerCounts`] counts what the routers do.

use prometheus_client::metrics::{counter::Counter, family::Family};

/// The labels of a count: pairs of a name and a value.
pub(super) type Labels = Vec<(&'static str, String)>;

/// Counts what the routers do. Clones share their counts.
#[derive(Debug, Clone, Default)]
pub(super) struct AnswerCounts {
    pub answers: Family<Labels, Counter>,
    /// The rows that feeds sent.
    pub rows: Counter,
    /// The bytes that feeds gave to connections.
    pub bytes: Counter,
    /// The feeds that a failure cut off.
    pub failures: Counter,
}

impl AnswerCounts {
    pub fn answered(&self, route: &str, method: &str, status: u16) {
        let labels =
            vec![("route", route.to_owned()), ("method", method.to_owned()), ("status", status.to_string())];
        self.answers.get_or_create(&labels).inc();
    }
}
