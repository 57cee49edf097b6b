//! `/_notibus/events` records events of databases that a layer stores elsewhere. The route is for layers that are not written in Rust.
//!
//! Such a layer knows only names. The bus finds out which instance of a name an event belongs to: it reads the row of the name and the
//! events that are not yet folded into it. Two requests that create or delete the same name conflict on a key that holds no value, and the
//! store retries one of them. Requests that only update a known database do not conflict with each other.

use std::{
    cell::Cell,
    collections::{BTreeSet, HashMap},
    fmt,
};

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderValue, StatusCode, request::Parts},
    routing::post,
};
use futures_util::{StreamExt, TryStreamExt, stream};
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, SeqAccess, Visitor},
};
use serde_json::json;
use xxhash_rust::xxh3::xxh3_128;

use super::{
    Api, Failure, Inner,
    answer::{Answered, check_page, json as json_answer, routes},
    api::{Shared, caller},
    caller::Permission,
};
use crate::{
    base::{
        error::Result,
        event::{Db, DbInstance, DbName, DdocId, EventKind},
    },
    roles::{notifier::row_if_folded, producer::Producer},
    state::{exactly_once::CommittedOnce, notification_feed::NotificationFeed},
    store::Transaction,
};

/// The maximum length of an `Idempotency-Key`, in bytes.
const KEY_LEN_MAX: usize = 255;

/// The maximum number of events in a request.
const EVENTS_MAX: usize = 10_000;

/// How many names are looked up at once.
const NAMES_AT_ONCE: usize = 64;

/// An event, as a client posts it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Event {
    #[serde(rename = "db")]
    name: DbName,
    #[serde(rename = "type")]
    kind: EventKind,
    /// The document that was written. The bus records only the ids of design documents.
    doc: Option<DdocId>,
    /// The instance that the event belongs to, if the client knows it: 32 hexadecimal digits.
    instance: Option<DbInstance>,
}

impl Api {
    /// Serves `/_notibus/events`, for layers that are not written in Rust. The bus knows their databases only from the posted events.
    /// Layers in Rust record events in their own transactions instead.
    pub fn events(&self) -> Router {
        self.guarded(routes("/_notibus/events", [("", "POST", post(answer))]), Permission::Record)
    }
}

async fn answer(State(inner): Shared, parts: Parts, body: Bytes) -> Answered {
    check_page(&parts)?;
    let once = Once::of(&parts, &body)?;
    let events = read(&body)?;
    let digest = once.as_ref().map(|once| once.events);
    let recorded = record(&inner, &events, once).await?;
    if recorded.value != digest {
        let reason = "This Idempotency-Key was used for other events; nothing was recorded.";
        return Err(Failure::new(StatusCode::UNPROCESSABLE_ENTITY, "idempotency_key_reused", reason));
    }
    let mut response = json_answer(StatusCode::CREATED, &json!({ "ok": true, "recorded": events.len() }));
    if recorded.is_repeat {
        response.headers_mut().insert("idempotency-replayed", HeaderValue::from_static("true"));
    }
    Ok(response)
}

/// Reads posted events. Fails with 400, and names the first bad event, or with 413 if there are too many.
fn read(body: &[u8]) -> Result<Vec<Event>, Failure> {
    let (mut json, place) = (serde_json::Deserializer::from_slice(body), Cell::new(0));
    let read = json.deserialize_seq(EventsVisitor(&place)).and_then(|events| json.end().map(|()| events));
    let (events, count) = read.map_err(|error| {
        Failure::bad_request(match place.get() {
            1.. if error.is_data() => format!("Event {}: {error}; none was recorded.", place.get()),
            _ => format!("The body must look like [{{\"db\":\"a\",\"type\":\"updated\"}}]: {error}"),
        })
    })?;
    if count > EVENTS_MAX {
        let reason = format!("{count} events are more than {EVENTS_MAX}; none was recorded.");
        return Err(Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", reason));
    }
    Ok(events)
}

/// Reads the first events of an array, and counts all. Sets the cell to the place of the event that it is reading, from 1.
///
/// Values that are no events are not kept: as JSON they can take many times the memory of their bytes.
struct EventsVisitor<'a>(&'a Cell<usize>);

impl<'de> Visitor<'de> for EventsVisitor<'_> {
    type Value = (Vec<Event>, usize);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<Self::Value, A::Error> {
        let mut events = Vec::new();
        let mut next = || {
            self.0.set(self.0.get() + 1);
            array.next_element()
        };
        while let Some(event) = next()? {
            events.push(event);
            if events.len() == EVENTS_MAX {
                break;
            }
        }
        self.0.set(0);
        let mut count = events.len();
        while count >= EVENTS_MAX && array.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok((events, count))
    }
}

/// Reads `body` as the body of a request, for tests.
#[cfg(feature = "test-util")]
pub(crate) fn decode_events(body: &[u8]) {
    drop(read(body));
}

/// Identifies a request, so that a repetition is recognized.
struct Once {
    /// A digest of the key and of the caller's name.
    key: [u8; 16],
    /// A digest of the body, which is stored as the result of the run.
    events: [u8; 16],
}

impl Once {
    /// Reads the key in the headers of a request with this body, if there is one. Fails with 400 if the key is too short or too long, or if
    /// there are several.
    fn of(parts: &Parts, body: &[u8]) -> Result<Option<Self>, Failure> {
        let mut keys = parts.headers.get_all("idempotency-key").iter();
        let Some(key) = keys.next() else { return Ok(None) };
        if key.is_empty() || key.len() > KEY_LEN_MAX || keys.next().is_some() {
            let reason = format!("A request may have one Idempotency-Key, of 1 to {KEY_LEN_MAX} characters.");
            return Err(Failure::bad_request(reason));
        }
        let caller = caller(&parts.extensions);
        let key = xxh3_128(&[caller.name().as_bytes(), &[0], key.as_bytes()].concat()).to_be_bytes();
        Ok(Some(Self { key, events: xxh3_128(body).to_be_bytes() }))
    }
}

/// The database that a name refers to.
#[derive(Debug, Clone, Copy)]
struct KnownInstance {
    /// The newest instance of the name.
    instance: DbInstance,
    is_deleted: bool,
}

/// Records `events` in one transaction, exactly once. If there is a key, a repeated request records nothing.
async fn record(
    inner: &Inner,
    events: &[Event],
    once: Option<Once>,
) -> Result<CommittedOnce<Option<[u8; 16]>>> {
    let (feed, producer) = (inner.bus.feed(), inner.bus.producer());
    let context = &feed.context;
    let names: BTreeSet<&DbName> = events.iter().map(|event| &event.name).collect();
    let key = once.as_ref().map(|once| [b"http/", &once.key[..]].concat());
    let digest = once.map(|once| once.events);
    inner
        .bus
        .run_exactly_once(key.as_deref(), async |tx| {
            let names: Vec<DbName> = names.iter().copied().cloned().collect();
            let known = names.into_iter().map(|name| look_up(&feed, &tx, name));
            let mut known: HashMap<DbName, Option<KnownInstance>> =
                stream::iter(known).buffer_unordered(NAMES_AT_ONCE).try_collect().await?;
            for event in events {
                let known = known.get_mut(&event.name).expect("all names were looked up");
                let before = known.map(|known| (known.instance, known.is_deleted));
                record_one(&tx, &producer, event, known, || DbInstance::random(context.env()));
                if known.map(|known| (known.instance, known.is_deleted)) != before {
                    tx.add_write_conflict(&context.keys.name(&event.name));
                }
            }
            Ok(digest)
        })
        .await
}

/// Returns the database that `name` refers to. The read conflict makes two transactions conflict if both change what the name refers to.
async fn look_up(
    feed: &NotificationFeed,
    tx: &Transaction,
    name: DbName,
) -> Result<(DbName, Option<KnownInstance>)> {
    // This must come before any write to the key, which would hide the conflict.
    tx.add_read_conflict(&feed.context.keys.name(&name));
    let row = row_if_folded(&feed.context, tx, &name).await?;
    let known = row.map(|row| KnownInstance { instance: row.instance, is_deleted: row.is_deleted() });
    Ok((name, known))
}

/// Records `event` for the database that its name refers to, and updates `known`.
///
/// Each `created` event makes a new database, unless the event names the known instance. If the name was in use, its old database must have
/// been deleted without an event, so this records the deletion, too. A database about which nothing is known is taken to be older than the
/// bus. An event of a deleted database is counted, but does not bring the database back. An event of a replaced instance is recorded for
/// that instance, where it has no effect.
fn record_one(
    tx: &Transaction,
    producer: &Producer,
    event: &Event,
    known: &mut Option<KnownInstance>,
    random: impl Fn() -> DbInstance,
) {
    let db = |instance| Db::new(event.name.clone(), instance);
    let instance = || event.instance.unwrap_or_else(&random);
    let is_known = event.instance.is_some_and(|meant| known.is_some_and(|known| known.instance == meant));
    if event.kind == EventKind::Created {
        if is_known {
            // The event was posted before.
            return;
        }
        if let Some(old) = known.filter(|known| !known.is_deleted) {
            producer.deleted(tx, &db(old.instance));
        }
        *known = Some(KnownInstance { instance: instance(), is_deleted: false });
    }
    let present = known.get_or_insert_with(|| KnownInstance { instance: instance(), is_deleted: false });
    let meant = event.instance.unwrap_or(present.instance);
    let db = db(meant);
    match event.kind {
        EventKind::Created => producer.created(tx, &db),
        EventKind::Updated => producer.updated(tx, &db),
        EventKind::DdocUpdated => producer.ddoc_updated(tx, &db, event.doc.as_ref()),
        EventKind::Deleted => {
            present.is_deleted |= meant == present.instance;
            producer.deleted(tx, &db);
        }
    }
}
