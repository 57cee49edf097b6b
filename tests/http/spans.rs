//! Spans show the work of the bus: one for each fold, page, batch and request.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use notibus::{
    EventKind,
    http::{ApiOptions, ServerOptions},
};
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

use crate::{client::get, common::db, fixture::HttpFixture};

/// The names and the values of the fields of a span.
type FieldTexts = Vec<(&'static str, String)>;

/// Collects the names of the library's spans, and the fields of the first span with each name.
#[derive(Debug, Clone, Default)]
struct Spans(Arc<Mutex<BTreeMap<&'static str, FieldTexts>>>, Arc<AtomicU64>);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.push((field.name(), format!("{value:?}")));
    }
}

struct Fields<'a>(&'a mut FieldTexts);

impl Subscriber for Spans {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target().starts_with("notibus")
    }

    fn new_span(&self, span: &span::Attributes<'_>) -> span::Id {
        let mut fields = Vec::new();
        span.record(&mut Fields(&mut fields));
        self.0.lock().unwrap().entry(span.metadata().name()).or_insert(fields);
        span::Id::from_u64(self.1.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// The tasks of the library run on the thread of the test, which has the tracing subscriber.
#[tokio::test]
async fn folds_pages_batches_and_requests_are_spans() {
    let spans = Spans::default();
    let _guard = tracing::subscriber::set_default(spans.clone());
    // With only one tracing subscriber, a span that a thread without a subscriber reaches first is disabled for good. With two, tracing
    // asks both each time.
    let _second = tracing::Dispatch::new(spans.clone());
    let fixture =
        HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |api, _, _| api.db_updates());
    let fixture = fixture.await;
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert_eq!(get(fixture.at(), "/_db_updates").await.rows().len(), 1);

    let seen = spans.0.lock().unwrap().clone();
    let request = [("method", "\"GET\""), ("route", "\"/_db_updates\"")];
    assert_eq!(seen["request"], request.map(|(name, value)| (name, value.to_owned())));
    let names = |span: &str| seen[span].iter().map(|(name, _)| *name).collect::<Vec<_>>();
    assert_eq!(names("fold"), ["partition", "fold"]);
    assert_eq!(names("page"), ["since", "limit"]);
    assert_eq!(names("batch"), ["rows", "to"]);
    assert_eq!(seen.len(), 4, "docs/operations.md lists each one: {:?}", seen.keys());
}
