//! `/_notibus/events`: events of databases that are kept elsewhere, by layers that are not written in Rust.
//!
//! Such a layer knows names only. Which creation of a name is meant follows from what the bus knows of it: its row, and what
//! waits to be folded into it. Two requests that decide what one name stands for meet on a key that holds nothing, and one of
//! them is tried again; those that only say that a known database was updated disturb nobody.

use std::{collections::HashMap, sync::Arc};

use axum::{
    Router,
    extract::{Request, State},
    http::{Method, StatusCode, header},
    response::{IntoResponse, Response},
    routing::any,
};
use futures_util::{StreamExt, TryStreamExt, future::BoxFuture, stream};
use serde::Deserialize;

use super::{
    Api, Databases, Failure, Inner,
    api::{at, json},
};
use crate::{
    bus::Bus,
    changes::DocSource,
    error::Result,
    event::{Db, DbInstance, DbName, DdocId, EventKind},
    notification_feed::NotificationFeed,
    notifier::standing,
    producer::Producer,
    store::Transaction,
};

/// The most events of a request.
const EVENTS_MAX: usize = 10_000;

/// How many names are looked up at once.
const NAMES_AT_ONCE: usize = 64;

/// An event, as it is posted.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Posted {
    /// The database.
    db: String,
    /// What happened to it.
    #[serde(rename = "type")]
    kind: String,
    /// The document that was written, of which only a design document's id is told on.
    doc: Option<String>,
}

/// An event that can be recorded.
#[derive(Debug, Clone)]
struct Event {
    /// The database.
    name: DbName,
    /// What happened to it.
    kind: EventKind,
    /// The design document.
    ddoc: Option<DdocId>,
}

impl Posted {
    /// The event, if it is one.
    fn check(self) -> Result<Event, String> {
        let kinds = [EventKind::Created, EventKind::Deleted, EventKind::Updated, EventKind::DdocUpdated];
        let kind = kinds
            .into_iter()
            .find(|kind| kind.as_str() == self.kind)
            .ok_or_else(|| format!("its type is none of {}", kinds.map(EventKind::as_str).join(", ")))?;
        let name = DbName::new(&self.db).map_err(|error| error.to_string())?;
        let ddoc = self.doc.filter(|_| kind == EventKind::DdocUpdated);
        let ddoc = ddoc.map(|id| DdocId::new(&id)).transpose().map_err(|error| error.to_string())?;
        Ok(Event { name, kind, ddoc })
    }
}

impl Api {
    /// `/_notibus/events`, for databases that are known by the events that are posted. Layers in Rust record in their own
    /// transactions, and need no route.
    pub fn events(&self) -> Router {
        let router = at(Router::new(), "/_notibus/events", any(answer));
        self.guarded(router.with_state(Arc::clone(&self.inner)))
    }

    /// The databases as their events tell of them, for [`Api::changes`] where there is no layer in the process. It knows
    /// nothing of documents but what their changes say.
    pub fn recorded_databases(&self) -> Arc<dyn Databases> {
        Arc::new(Recorded(self.inner.feed.clone()))
    }
}

/// Answers.
async fn answer(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    let answer = async {
        let (parts, body) = request.into_parts();
        if parts.method != Method::POST {
            return Err(Failure::method_not_allowed("POST"));
        }
        // A browser sends what a page of anyone tells it to, also to a server that only this machine can reach.
        if parts.headers.contains_key(header::ORIGIN) {
            return Err(Failure::new(
                StatusCode::FORBIDDEN,
                "forbidden",
                "A web page may not record events.",
            ));
        }
        let body = inner.body(&parts.headers, body).await?;
        let events = read(&body)?;
        record(&inner.bus, &events).await?;
        Ok(json(StatusCode::CREATED, &serde_json::json!({ "ok": true, "recorded": events.len() })))
    };
    answer.await.unwrap_or_else(IntoResponse::into_response)
}

/// The events of a body.
fn read(body: &[u8]) -> Result<Vec<Event>, Failure> {
    let posted: Vec<Posted> = serde_json::from_slice(body).map_err(|error| {
        Failure::bad_request(format!(
            "The body has to be as [{{\"db\":\"a\",\"type\":\"updated\"}}]: {error}"
        ))
    })?;
    if posted.len() > EVENTS_MAX {
        let reason = format!("{} events are more than {EVENTS_MAX}; none was recorded.", posted.len());
        return Err(Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", reason));
    }
    let checked = posted.into_iter().enumerate().map(|(place, posted)| {
        posted.check().map_err(|reason| {
            Failure::bad_request(format!("Event {}: {reason}; none was recorded.", place + 1))
        })
    });
    checked.collect()
}

/// What a name stands for.
#[derive(Debug, Clone, Copy)]
struct Standing {
    /// The last creation of it.
    instance: DbInstance,
    /// Whether that is deleted.
    is_deleted: bool,
}

/// Records `events` in one transaction, once.
async fn record(bus: &Bus, events: &[Event]) -> Result<()> {
    let (feed, producer) = (bus.feed(), bus.producer());
    let context = &feed.context;
    context
        .db
        .run_once(async |tx| {
            let mut names: Vec<_> = events.iter().map(|event| event.name.clone()).collect();
            names.sort_unstable();
            names.dedup();
            let known = names.into_iter().map(|name| look_up(&feed, &tx, name));
            let mut known: HashMap<DbName, Option<Standing>> =
                stream::iter(known).buffer_unordered(NAMES_AT_ONCE).try_collect().await?;
            for event in events {
                let known = known.get_mut(&event.name).expect("all names were looked up");
                let before = known.map(|known| (known.instance, known.is_deleted));
                record_one(&tx, &producer, event, known, || DbInstance::random(context.env()));
                if known.map(|known| (known.instance, known.is_deleted)) != before {
                    tx.add_write_conflict(&context.keys.name(&event.name));
                }
            }
            Ok(())
        })
        .await
        .map(|_| ())
}

/// What `name` stands for. Two transactions that would change that meet here.
async fn look_up(
    feed: &NotificationFeed,
    tx: &Transaction,
    name: DbName,
) -> Result<(DbName, Option<Standing>)> {
    // Before any write to it, which would hide it.
    tx.add_read_conflict(&feed.context.keys.name(&name));
    let row = standing(&feed.context, tx, &name).await?;
    let known = row.map(|row| Standing { instance: row.instance, is_deleted: row.is_deleted() });
    Ok((name, known))
}

/// Records `event` of what its name stands for, and brings that up to date.
///
/// A creation is always a new one: if the name was in use, the database that had it must have been deleted, unseen. A database
/// of which nothing is known is older than the bus. What comes for one that is deleted is counted there, and does not bring it
/// back.
fn record_one(
    tx: &Transaction,
    producer: &Producer,
    event: &Event,
    known: &mut Option<Standing>,
    instance: impl Fn() -> DbInstance,
) {
    let db = |instance| Db::new(event.name.clone(), instance);
    if event.kind == EventKind::Created {
        if let Some(old) = known.filter(|known| !known.is_deleted) {
            producer.deleted(tx, &db(old.instance));
        }
        *known = Some(Standing { instance: instance(), is_deleted: false });
    }
    let known = known.get_or_insert_with(|| Standing { instance: instance(), is_deleted: false });
    let db = db(known.instance);
    match event.kind {
        EventKind::Created => producer.created(tx, &db),
        EventKind::Updated => producer.updated(tx, &db),
        EventKind::DdocUpdated => producer.ddoc_updated(tx, &db, event.ddoc.as_ref()),
        EventKind::Deleted => {
            known.is_deleted = true;
            producer.deleted(tx, &db);
        }
    }
}

/// The databases as their events tell of them.
struct Recorded(NotificationFeed);

impl Databases for Recorded {
    fn find<'a>(&'a self, tx: &'a Transaction, name: &'a DbName) -> BoxFuture<'a, Result<Option<Db>>> {
        Box::pin(async move {
            let row = standing(&self.0.context, tx, name).await?;
            Ok(row.filter(|row| !row.is_deleted()).map(|row| row.db()))
        })
    }
}

/// Nobody here knows more of documents than their changes say.
impl DocSource for Recorded {}
