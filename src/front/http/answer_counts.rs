//! [`AnswerCounts`]: what the routers have done, as it is counted.

use prometheus_client::metrics::{counter::Counter, family::Family};

/// The names and values by which counts are distinguished.
pub(super) type Labels = Vec<(&'static str, String)>;

/// What the routers have done. Clones count together.
#[derive(Debug, Clone, Default)]
pub(super) struct AnswerCounts {
    /// Answers, by route, method and status.
    pub answers: Family<Labels, Counter>,
    /// Rows sent by feeds.
    pub rows: Counter,
    /// Bytes of feeds handed to connections.
    pub bytes: Counter,
    /// Feeds that were cut off by a failure.
    pub failures: Counter,
}

impl AnswerCounts {
    /// Counts an answer of `route`.
    pub fn answered(&self, route: &str, method: &str, status: u16) {
        let labels =
            vec![("route", route.to_owned()), ("method", method.to_owned()), ("status", status.to_string())];
        self.answers.get_or_create(&labels).inc();
    }
}
