//! The administration of a bus: its state, nodes, feeds and consumers, as JSON, which the `notibus` command prints as tables. `/_notibus/`
//! is a page that shows the state.

use std::time::Duration;

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio_stream::StreamExt;

use super::{
    Api, Credentials, Failure, Inner,
    answer::{Answered, PathSegments, check_page, json as answer, parameters, routes},
    api::{Shared, caller},
    caller::Permission,
    metrics,
    page::{PageSize, cut_at},
    updates::size_of_row,
};
use crate::{
    base::{
        cursor::{Cursor, Start},
        encoding::Incarnation,
        error::{Error, Result as BusResult},
        event::DbInstance,
        filter::Filter,
        tasks::within,
    },
    bus::{Bus, readiness::Unready},
    roles::consumer::{ConsumerHandle, ConsumerSettings},
    state::{
        feed::{Feed, FeedRow},
        keys::ShardId,
        routing::SchemeId,
    },
};

/// The maximum and the default number of rows in a page.
const PAGE_ROWS: usize = 1_000;

/// How many deferred ids are read for a page.
const PAGE_IDS: usize = 1_000;

/// The maximum age of the figures of the bus in the metrics. Fetching new ones costs a few reads.
const FRESH_FOR: Duration = Duration::from_secs(5);

/// The time limit for counting the rows that the tail has not read.
const UNDELIVERED_MAX: Duration = Duration::from_secs(2);

/// The methods of a read-only route.
const READS: &str = "GET,HEAD";

/// The body of a request to create a consumer.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PostedConsumer {
    name: String,
    /// The feed that the consumer follows: `notifications`, or the instance of a database, for the changes to its documents.
    feed: Option<String>,
    /// A glob for the names of the databases that the consumer wants.
    names: Option<String>,
    /// Where the consumer starts: `now`, `0`, or after a sequence.
    start: Option<String>,
    /// How long the consumer may be without a member before it is deleted, in milliseconds.
    expiry_ms: Option<u64>,
}

/// The body of a request to act on a consumer. Each action takes some of these fields.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Action {
    /// Where to reset the consumer to: `now`, `0`, or after a sequence.
    to: Option<String>,
    /// Whether to reset or delete the consumer even while nodes are its members.
    force: bool,
    /// A glob for the ids to work on again.
    filter: Option<String>,
    /// Whether to work again only on ids that are deferred.
    deferred: bool,
    /// The id to give up on.
    id: Option<String>,
}

/// The body of a request to raise the incarnation by one. `from` is the current incarnation.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Raise {
    from: Option<u8>,
}

/// The body of a request to spread a feed over a different number of shards.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReshardRequest {
    shards: u32,
    /// The number of the scheme that routes ids to the shards; `None` keeps the current one.
    scheme: Option<u16>,
}

impl Api {
    /// Serves the state of the node and the bus: `/_notibus/health/live` and `/_notibus/health/ready` for everyone, `/_notibus/status` and
    /// `/_notibus/metrics` for admins and for callers with the role `_metrics`. The page `/_notibus/` shows what its viewer may request.
    pub fn status(&self) -> Router {
        // The page itself contains no data. It requests all data with the rights of its viewer.
        let open = [
            ("/health/live", READS, get(health)),
            ("/health/ready", READS, get(ready)),
            ("/health", READS, get(ready)),
            ("", READS, get(page)),
        ];
        let seen = [("/status", READS, get(status)), ("/metrics", READS, get(scrape))];
        self.counted(routes("/_notibus", open).with_state(self.inner.clone()))
            .merge(self.guarded(routes("/_notibus", seen), Permission::Metrics))
    }

    /// Serves `/`, which CouchDB's clients request to identify the server. Only for servers without a layer: a layer serves its own `/`.
    pub fn welcome(&self) -> Router {
        let only = async || Failure::method_not_allowed(READS);
        self.counted(Router::new().route("/", get(welcome).fallback(only)))
            .fallback(async || Failure::not_found("missing"))
    }

    /// Serves the administration: the routes of [`Api::status`] (so do not merge both), the recording of events, and `nodes`, `feeds` and
    /// `consumers` below `/_notibus`. Callers who may see the status may see these three, and admins may change them. Callers who may read
    /// `_db_updates` may read the rows of the notifications.
    pub fn administration(&self) -> Router {
        let seen = [
            ("/nodes", READS, get(nodes)),
            ("/feeds/{feed}/topology", READS, get(topology)),
            ("/incarnation", "GET,HEAD,POST", get(incarnation).post(raise)),
            ("/consumers", "GET,HEAD,POST", get(consumers).post(create)),
            ("/consumers/{consumer}", READS, get(show)),
        ];
        let changed = [
            ("/feeds/{feed}/reshard", "POST", post(reshard)),
            ("/consumers/{consumer}/deferred", READS, get(deferred)),
            ("/consumers/{consumer}/{action}", "POST", post(act)),
        ];
        let read = [("/feeds/notifications/rows", READS, get(rows))];
        self.guarded(routes("/_notibus", seen), Permission::Metrics)
            .merge(self.guarded(routes("/_notibus", changed), Permission::Admin))
            .merge(self.guarded(routes("/_notibus", read), Permission::Updates))
            .merge(self.status())
            .merge(self.events())
    }
}

/// Parses the body of a request that changes something. The body must look like `example`; an empty one gives the default. Fails if a web
/// page sent the request, or if the caller is not an admin.
fn posted<T: DeserializeOwned + Default>(parts: &Parts, body: &[u8], example: &str) -> Result<T, Failure> {
    check_page(parts)?;
    caller(&parts.extensions).check(Permission::Admin)?;
    parameters(parts, &[])?;
    if body.is_empty() {
        return Ok(T::default());
    }
    serde_json::from_slice(body)
        .map_err(|error| Failure::bad_request(format!("The body must look like {example}: {error}")))
}

/// Cuts a list off after about 64 KB, the limit for what a client may hold in memory while it does not read, but keeps at least the first
/// item. Returns whether items were cut off.
fn cut<T: Serialize>(items: &mut Vec<T>) -> bool {
    let size_of = |item: &T| serde_json::to_vec(item).map_or(0, |text| text.len());
    PageSize::new(items.len()).cut(items, size_of)
}

/// Answers with a page of the list `name`: the items whose `key` comes after the parameter `after`. The answer's `next` is the next
/// `after`.
fn paged<T: Serialize>(parts: &Parts, (name, key): (&str, &str), items: &[T]) -> Answered {
    let after = parameters(parts, &["after"])?.remove("after").unwrap_or_default();
    let key_of = |item: &Value| item[key].as_str().unwrap_or_default().to_owned();
    let values = items.iter().map(|item| serde_json::to_value(item).expect("it has only plain fields"));
    let mut items: Vec<_> = values.filter(|item| key_of(item) > after).collect();
    items.sort_by_cached_key(key_of);
    let next = if cut(&mut items) { items.last().map(key_of) } else { None };
    Ok(answer(StatusCode::OK, &json!({ name: items, "next": next })))
}

/// Answers the first request that CouchDB's clients send.
async fn welcome() -> Response {
    let version = env!("CARGO_PKG_VERSION");
    let vendor = json!({ "name": "Notibus" });
    answer(StatusCode::OK, &json!({ "couchdb": "Welcome", "version": version, "vendor": vendor }))
}

/// Answers a health check with 200, or with 503 and the part that does not work, a machine-readable cause and a human-readable reason.
fn healthy(unready: Option<Unready>) -> Response {
    let Some(unready) = unready else { return answer(StatusCode::OK, &json!({ "status": "ok" })) };
    let (part, cause, reason) = (unready.part(), unready.cause(), unready.to_string());
    let body = json!({ "status": "unavailable", "part": part, "cause": cause, "reason": reason });
    answer(StatusCode::SERVICE_UNAVAILABLE, &body)
}

/// Answers 200 unless only a restart of the process can help: the store takes no more writes, or the bus of the process no longer exists.
async fn health(State(inner): Shared) -> Response {
    match (inner.bus.permanent_failure(), inner.bus.trouble_of_history()) {
        (None, Some(older)) => {
            let (cause, reason) = (older.cause(), older.to_string());
            answer(StatusCode::OK, &json!({ "status": "ok", "cause": cause, "reason": reason }))
        }
        (failure, _) => healthy(failure),
    }
}

/// Answers 200 if an event that is recorded now would be delivered: the node can read what its work needs, a live notifier owns each
/// partition, no event has been seen waiting for long, the tail is at the end of the feed, and the node is not shutting down.
async fn ready(State(inner): Shared) -> Response {
    // This check comes first, because a node whose bus is gone is also closing, and must report why.
    if let Some(unready) = inner.bus.permanent_failure() {
        return healthy(Some(unready));
    }
    if inner.is_closing() {
        let reason = "The node is being shut down.";
        let body = json!({ "status": "unavailable", "part": "node", "cause": "closing", "reason": reason });
        return answer(StatusCode::SERVICE_UNAVAILABLE, &body);
    }
    healthy(Box::pin(inner.bus.readiness(&inner.dispatcher)).await.err())
}

/// Answers with the whole state of the bus, except for the parts that could not be read from the store. Long lists are cut off, and
/// `truncated` names them.
async fn status(State(inner): Shared) -> Answered {
    let Inner { bus, feed, dispatcher, .. } = &*inner;
    let tailed = dispatcher.position();
    let undelivered = within(inner.env(), UNDELIVERED_MAX, "counting rows", feed.pending(tailed));
    let (status, undelivered) = tokio::join!(bus.status(), undelivered);
    let status = status?;
    let mut body = serde_json::to_value(&status).expect("a status can be written as JSON");
    let tail_lag_ms = status.feed.map(|feed| dispatcher.lag(feed.now).as_millis() as u64);
    body["lag"] = json!({
        "is_drained": status.backlog.map(|backlog| backlog.rows == 0),
        "tailed_seq": tailed,
        "undelivered_rows": undelivered.ok(),
        "tail_lag_ms": tail_lag_ms,
    });
    let trouble = inner.options.authorize.credentials().and_then(Credentials::trouble);
    body["http"] = json!({
        "feeds": inner.feeds.count(), "subscribers": dispatcher.subscribers(), "credentials_trouble": trouble,
    });
    let mut truncated = Vec::new();
    for list in ["nodes", "consumers"] {
        if body[list].as_array_mut().is_some_and(cut) {
            truncated.push(list);
        }
    }
    body["truncated"] = truncated.into();
    Ok(answer(StatusCode::OK, &body))
}

/// Answers with the page that shows the state live.
async fn page() -> Response {
    let mut response = Response::new(Body::from(include_str!("live.html")));
    let policy = "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                  base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// Answers with the metrics for Prometheus.
async fn scrape(State(inner): Shared) -> Response {
    let snapshot = inner.bus.snapshot(FRESH_FOR).await;
    for (part, error) in &snapshot.unanswered {
        inner.feed.context.stats.health.complain(inner.env(), part, error);
    }
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], metrics::encode(&inner, &snapshot)).into_response()
}

/// Lists the nodes that have joined, and what they hold. A node is alive if its heartbeat changes between two requests.
async fn nodes(State(inner): Shared, parts: Parts) -> Answered {
    paged(&parts, ("nodes", "id"), &inner.bus.nodes().await?)
}

/// Shows the incarnation of the bus.
async fn incarnation(State(inner): Shared, parts: Parts) -> Answered {
    parameters(&parts, &[])?;
    let stored = Bus::stored_incarnation(inner.bus.store(), inner.feed.context.keys.prefix()).await?;
    Ok(answer(StatusCode::OK, &json!({ "incarnation": stored.0 })))
}

/// Raises the incarnation after an older state of the store was restored. With its next heartbeat, each node finds out that it must open
/// the bus again.
async fn raise(State(inner): Shared, parts: Parts, body: Bytes) -> Answered {
    let Raise { from } = posted(&parts, &body, "{\"from\":0}")?;
    let from = from.ok_or_else(|| Failure::bad_request("The body has no \"from\"."))?;
    let (db, prefix) = (inner.bus.store(), inner.feed.context.keys.prefix());
    let raised = Bus::raise_incarnation(db, prefix, Incarnation(from), false).await?;
    Ok(answer(StatusCode::OK, &json!({ "incarnation": raised.0 })))
}

/// Returns the database whose documents are in the feed; `None` for `notifications`, the default.
fn instance_of(feed: Option<&str>) -> Result<Option<DbInstance>, Failure> {
    match feed {
        None | Some("notifications") => Ok(None),
        Some(instance) => Ok(Some(instance.parse()?)),
    }
}

/// Answers with the history of a feed's shards; with `rows`, also with the number of rows in each shard.
async fn topology(State(inner): Shared, PathSegments(feed): PathSegments<String>, parts: Parts) -> Answered {
    let counts = match parameters(&parts, &["rows"])?.get("rows").map(String::as_str) {
        None | Some("false") => false,
        Some("true") => true,
        Some(_) => return Err(Failure::bad_request("The parameter rows is neither true nor false.")),
    };
    let entries = match instance_of(Some(&feed))? {
        None => entries(&inner.bus.feed(), counts).await,
        Some(instance) => entries(&inner.bus.changes().feed_of(instance), counts).await,
    };
    Ok(answer(StatusCode::OK, &json!({ "entries": entries.map_err(named)? })))
}

async fn entries<R: FeedRow>(feed: &Feed<R>, counts: bool) -> BusResult<Vec<Value>> {
    let mut entries = Vec::new();
    for entry in feed.topology().await? {
        let mut shown = serde_json::to_value(&entry).expect("it has only plain fields");
        if counts {
            let mut rows = Vec::with_capacity(entry.shards.len());
            for &shard in &entry.shards {
                rows.push(feed.shard_rows(shard).await?);
            }
            shown["rows"] = rows.into();
        }
        entries.push(shown);
    }
    Ok(entries)
}

/// Returns the answer to an error. It may name a missing feed, because only admins and callers who may see the status get here.
fn named(error: Error) -> Failure {
    match error {
        Error::NoFeed { .. } => Failure::not_found(error.to_string()),
        error => error.into(),
    }
}

/// Spreads a feed over a different number of shards.
async fn reshard(
    State(inner): Shared,
    PathSegments(feed): PathSegments<String>,
    parts: Parts,
    body: Bytes,
) -> Answered {
    let wanted: ReshardRequest = posted(&parts, &body, "{\"shards\":8}")?;
    let scheme = wanted.scheme.map(SchemeId);
    let entry = match instance_of(Some(&feed))? {
        None => inner.bus.feed().reshard(wanted.shards, scheme).await,
        Some(instance) => inner.bus.changes().feed_of(instance).reshard(wanted.shards, scheme).await,
    };
    Ok(answer(StatusCode::OK, &entry.map_err(named)?))
}

/// Answers with a page of the notifications as they are stored. `since` says where the page begins. With `timeout`, a request that finds no
/// row waits up to that many milliseconds for one.
async fn rows(State(inner): Shared, parts: Parts) -> Answered {
    let given = parameters(&parts, &["since", "limit", "timeout"])?;
    let number = |name: &str, most: u64| match given.get(name).map(|text| text.parse::<u64>()) {
        None => Ok(None),
        Some(Ok(number)) if (1..=most).contains(&number) => Ok(Some(number)),
        Some(_) => {
            Err(Failure::bad_request(format!("The parameter {name} is not a number from 1 to {most}.")))
        }
    };
    let limit = number("limit", PAGE_ROWS as u64)?.unwrap_or(PAGE_ROWS as u64) as usize;
    // The answer begins only once it is complete, so the wait is limited.
    let most = inner.options.timeout_max.min(WAIT_MAX);
    let timeout = number("timeout", u64::MAX)?.map(|timeout| Duration::from_millis(timeout).min(most));
    let feed = inner.bus.feed();
    let cursor: Cursor = match given.get("since").map_or(Ok(Cursor::BEGINNING.into()), |text| text.parse())? {
        Start::At(cursor) => cursor,
        Start::Now => feed.now().await?.into(),
    };
    let read = async || {
        let _turn = inner.reads.acquire().await.expect("the semaphore is never closed");
        Ok::<_, Failure>(feed.page(cursor, limit).await?)
    };
    let mut page = read().await?;
    if let Some(timeout) = timeout.filter(|_| page.rows.is_empty() && !page.more) {
        let _places = inner.enter(&caller(&parts.extensions), None, true)?;
        wait(&inner, page.next, timeout).await;
        page = read().await?;
    }
    // A client that does not read may hold no more in memory here than a client of a feed.
    if PageSize::new(limit).cut(&mut page.rows, |row| size_of_row(row)) {
        let last = page.rows.last().expect("one row is kept").sequence;
        (page.next, page.more) = (cut_at(cursor, page.next, last), true);
    }
    let rows: Vec<_> = page.rows.iter().map(|row| &**row).collect();
    Ok(answer(StatusCode::OK, &json!({ "rows": rows, "next": page.next, "more": page.more })))
}

/// The maximum time that a request waits for a row. An answer has to begin within a minute.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// Waits until there is a row after `cursor`, `timeout` has passed, or all feeds have to end.
async fn wait(inner: &Inner, cursor: Cursor, timeout: Duration) {
    let mut rows = inner.dispatcher.subscribe(Filter::all()).since(cursor).stream();
    tokio::select! {
        _ = rows.next() => {}
        () = inner.env().sleep(timeout) => {}
        () = inner.closed() => {}
    }
}

fn find(inner: &Inner, name: &str) -> Result<ConsumerHandle, Failure> {
    Ok(inner.bus.consumer(name)?)
}

/// Lists consumers.
async fn consumers(State(inner): Shared, parts: Parts) -> Answered {
    paged(&parts, ("consumers", "name"), &inner.bus.consumers().await?)
}

/// Creates a consumer: answers 201, or 200 if the consumer already exists.
async fn create(State(inner): Shared, parts: Parts, body: Bytes) -> Answered {
    let asked: PostedConsumer = posted(&parts, &body, "{\"name\":\"mailer\"}")?;
    let filter = asked.names.map_or(Ok(Filter::all()), |names| Filter::glob(&names))?;
    let settings = ConsumerSettings::default()
        .documents(instance_of(asked.feed.as_deref())?)
        .filter(filter)
        .start(asked.start.as_deref().map_or(Ok(Start::Now), start_of)?)
        .expiry(asked.expiry_ms.map(Duration::from_millis));
    let is_new = find(&inner, &asked.name)?.create(&settings).await?;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok(answer(status, &json!({ "ok": true, "created": is_new })))
}

/// Parses the posted start of a consumer.
fn start_of(text: &str) -> Result<Start, Failure> {
    let accepted = "say \"now\", \"0\" for all, or a sequence of 26 hexadecimal digits, to start after it";
    text.parse().map_err(|error: Error| Failure::bad_request(format!("{error}: {accepted}.")))
}

/// Answers with the state of a consumer, and a human-readable list of what needs attention.
async fn show(State(inner): Shared, PathSegments(name): PathSegments<String>, parts: Parts) -> Answered {
    parameters(&parts, &[])?;
    let consumer = find(&inner, &name)?;
    let (status, lag) = tokio::try_join!(consumer.status(), consumer.lag())?;
    let troubles = status.troubles(&lag);
    Ok(answer(StatusCode::OK, &json!({ "consumer": status, "lag": lag, "troubles": troubles })))
}

/// Resets, deletes, pauses or resumes a consumer, has it work on ids again, or gives up on a deferred id.
async fn act(
    State(inner): Shared,
    PathSegments((name, action)): PathSegments<(String, String)>,
    parts: Parts,
    body: Bytes,
) -> Answered {
    let example = match &*action {
        "reset" => "{\"to\":\"now\",\"force\":false}",
        "delete" => "{\"force\":false}",
        "pause" | "resume" => "{}",
        "again" => "{\"filter\":\"shop/*\",\"deferred\":true}",
        "discard" => "{\"id\":\"shop/orders\"}",
        _ => return Err(Failure::not_found("missing")),
    };
    let Action { to, force, filter, deferred, id } = posted(&parts, &body, example)?;
    let consumer = find(&inner, &name)?;
    match (&*action, to, filter, id) {
        ("reset", Some(to), None, None) if !deferred => consumer.reset(start_of(&to)?, force).await?,
        ("delete", None, None, None) if !deferred => consumer.delete(force).await?,
        ("pause", None, None, None) if !deferred && !force => consumer.pause().await?,
        ("resume", None, None, None) if !deferred && !force => consumer.resume().await?,
        ("again", None, filter, None) if !force => {
            let ids = consumer.again(filter.as_deref().unwrap_or("*"), deferred).await?;
            return Ok(answer(StatusCode::ACCEPTED, &json!({ "ok": true, "ids": ids })));
        }
        ("discard", None, None, Some(id)) if !deferred && !force => {
            if !consumer.discard(id.as_bytes()).await? {
                return Err(Failure::not_found(format!("{id:?} is not deferred")));
            }
        }
        _ => return Err(Failure::bad_request(format!("The body must look like {example}."))),
    }
    Ok(answer(StatusCode::OK, &json!({ "ok": true })))
}

/// Lists a page of deferred ids.
async fn deferred(State(inner): Shared, PathSegments(name): PathSegments<String>, parts: Parts) -> Answered {
    let given = parameters(&parts, &["shard", "after"])?;
    let shard = given.get("shard").map(|shard| shard.parse::<u64>()).transpose();
    let shard = shard.map_err(|_| Failure::bad_request("`shard` is not a number."))?;
    let after = match (shard, given.get("after")) {
        (Some(shard), Some(id)) => Some((ShardId(shard), id.as_str())),
        (None, None) => None,
        _ => return Err(Failure::bad_request("`shard` and `after` belong together.")),
    };
    let mut ids = find(&inner, &name)?.deferred(after, PAGE_IDS).await?;
    let is_full = ids.len() == PAGE_IDS;
    let has_more = cut(&mut ids) || is_full;
    let next = ids.last().filter(|_| has_more);
    let next = next.map(|last| json!({ "shard": last.shard.to_string(), "after": last.id }));
    Ok(answer(StatusCode::OK, &json!({ "deferred": ids, "next": next })))
}
