//! [`Trace`]: the story of a world, line by line; and [`Listener`], which adds the log lines of the library.

use std::{
    cell::RefCell,
    fmt::{self, Write},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tracing::{
    Event, Level, Metadata,
    field::{Field, Visit},
    span,
};

/// The lines, if the trace is kept.
#[derive(Default)]
pub struct Trace(Mutex<Option<String>>);

impl Trace {
    /// Makes a trace, which keeps its lines if `is_kept`.
    pub fn new(is_kept: bool) -> Self {
        Self(Mutex::new(is_kept.then(String::new)))
    }

    /// Adds a line for the time `now`.
    pub fn add(&self, now: Duration, line: impl FnOnce() -> String) {
        let mut text = self.0.lock();
        if let Some(text) = &mut *text {
            let line = line();
            writeln!(text, "[{:>11.6}] {line}", now.as_secs_f64()).expect("writing to a string cannot fail");
        }
    }

    /// Takes the lines, if they were kept.
    pub fn take(&self) -> Option<String> {
        self.0.lock().take()
    }
}

/// Receives a line of the library's log: its level, its message and its other fields.
type Hear = dyn Fn(Level, &str, &str) + Send + Sync;

/// Receives the log of the library: a subscriber of `tracing` for one thread.
pub struct Listener {
    /// Called with each log event.
    hear: Arc<Hear>,
}

impl Listener {
    /// Makes a listener that calls `hear`.
    pub fn new(hear: impl Fn(Level, &str, &str) + Send + Sync + 'static) -> Self {
        Self { hear: Arc::new(hear) }
    }
}

impl tracing::Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::DEBUG && metadata.target().starts_with("notibus")
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        thread_local! {
            /// Reused for all events, so that listening costs little.
            static TEXT: RefCell<(String, String)> = RefCell::default();
        }
        TEXT.with_borrow_mut(|(message, fields)| {
            message.clear();
            fields.clear();
            event.record(&mut Fields { message, fields });
            (self.hear)(*event.metadata().level(), message, fields);
        });
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Writes the fields of an event as text.
struct Fields<'a> {
    message: &'a mut String,
    fields: &'a mut String,
}

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let written = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
        written.expect("writing to a string cannot fail");
    }
}
