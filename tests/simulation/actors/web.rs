//! HTTP clients of `_db_updates` and of `_changes`, in every form, fast and slow, which resume after their connections are cut.
//!
//! The router and the feeds are the real ones, but requests do not go through a socket. `tests/http` judges the bytes of the protocol.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes, HttpBody},
    http::Request,
};
use futures_util::{FutureExt, future::BoxFuture};
use notibus::{
    Result,
    changes::DocSource,
    dispatcher::Dispatcher,
    event::{Db, DbName, EventKind, Kinds, Sequence},
    http::{Api, ApiOptions, Databases},
    store::{Isolation, Transaction},
};
use serde_json::Value;
use tokio::task::JoinSet;
use tower::ServiceExt;

use super::context::ActorContext;
use crate::{
    app,
    draw::WebPlan,
    guarantee::{Broken, Guarantee},
    oracle::WebClientId,
    shared::Phase,
    witness::Witness,
};

/// The longest time without bytes from a feed with heartbeats, while no fault strikes.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// The verdict on a piece of an answer.
type Taken = std::result::Result<(), Broken>;

struct Layer;

impl DocSource for Layer {}

impl Databases for Layer {
    fn find<'a>(&'a self, tx: &'a Transaction, name: &'a DbName) -> BoxFuture<'a, Result<Option<Db>>> {
        async move {
            let stored = tx.get(&app::database(name), Isolation::Serializable).await?;
            let instance = stored.as_ref().map(app::instance_of);
            Ok(instance.map(|instance| Db::new(name.clone(), instance)))
        }
        .boxed()
    }
}

/// The routers of a process, and their clients.
pub(super) struct Web {
    api: Api,
    clients: JoinSet<()>,
}

impl Web {
    /// Starts the clients that were drawn.
    pub fn start(actor: &ActorContext, dispatcher: &Arc<Dispatcher>, plan: WebPlan) -> Result<Self> {
        let api = Api::start(&actor.bus, dispatcher, ApiOptions::default())?;
        let has_documents = actor.shared.plan.documents.is_some();
        let mut router = api.db_updates();
        if has_documents {
            router = router.merge(api.changes(&actor.bus.changes(), Arc::new(Layer)));
        }
        let client = Client { actor: actor.clone(), router, plan };
        let mut clients = JoinSet::new();
        for number in 0..plan.clients {
            clients.spawn(client.clone().follow_updates(number));
        }
        if has_documents {
            clients.spawn(client.follow_all_changes());
        }
        Ok(Self { api, clients })
    }

    /// Ends all feeds and clients.
    pub async fn end(mut self) {
        self.api.shutdown();
        self.clients.shutdown().await;
    }
}

/// The form in which a feed is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// One JSON object with all rows (`normal`, `longpoll`).
    Array,
    /// One JSON object per line (`continuous`).
    Lines,
    /// Server-sent events (`eventsource`).
    Events,
}

/// A part of a feed.
#[derive(Debug)]
enum Piece {
    Row(Value),
    /// The position of the feed: in a heartbeat, or at the end of the feed.
    Seq(String),
}

/// The parameters of a request for a feed.
struct Claim {
    query: String,
    form: Format,
    /// Whether the request asks for heartbeats.
    has_heartbeat: bool,
}

/// The result of a request.
#[derive(Debug, PartialEq, Eq)]
enum Answered {
    /// The feed ended, or was cut off.
    Over,
    /// The request was refused with this status and body.
    Refused(u16, String),
}

#[derive(Clone)]
struct Client {
    actor: ActorContext,
    router: Router,
    plan: WebPlan,
}

impl Client {
    /// Follows `_db_updates` until the end. After a crash of its process the client resumes.
    async fn follow_updates(self, number: u32) {
        let actor = &self.actor;
        let kinds = draw_kinds(actor);
        let start = match actor.random(3) {
            0 => actor.shared.oracle().some_position(actor.bits()),
            _ => None,
        };
        let id = actor.shared.oracle().web_client((actor.issuer.process, number), kinds, start);
        while actor.phase() != Phase::End {
            let asked = self.draw();
            let (since, types) = actor.shared.oracle().web_asks(id);
            let target = format!("/_db_updates?since={since}&types={types}{}", asked.query);
            let answered = self.ask(&target, &asked, |piece| self.take_updates(id, piece)).await;
            if let Answered::Refused(status, body) = answered {
                self.refused(id, status, &body);
                actor.pause(300).await;
            }
            actor.pause(if actor.random(4) == 0 { 1_000 } else { 20 }).await;
        }
    }

    /// Takes a piece of `_db_updates`.
    fn take_updates(&self, id: WebClientId, piece: &Piece) -> Taken {
        let shared = &self.actor.shared;
        match piece {
            Piece::Row(row) => {
                let [name, kind, seq] = [&row["db_name"], &row["type"], &row["seq"]].map(Value::as_str);
                let (Some(name), Some(kind), Some(seq)) = (name, kind, seq) else {
                    return Guarantee::Framed.fails(format!("{row} is no row"));
                };
                shared.oracle().web_row(shared, id, (name, kind, seq))
            }
            Piece::Seq(seq) => shared.oracle().web_stands(id, seq),
        }
    }

    /// Judges the refusal of a request for `_db_updates`.
    fn refused(&self, id: WebClientId, status: u16, body: &str) {
        let shared = &self.actor.shared;
        let horizon = serde_json::from_str::<Value>(body)
            .ok()
            .and_then(|body| body["horizon"].as_str()?.parse::<Sequence>().ok());
        let judged = match (status, horizon) {
            (410, Some(horizon)) => {
                shared.witness(Witness::WebClientExpired);
                shared.oracle().web_expired(shared, id, horizon)
            }
            // The store was unreachable.
            (503, _) => Ok(()),
            _ => Guarantee::Truthful.fails(format!("it was refused with {status}: {body}")),
        };
        if let Err(broken) = judged {
            shared.fail(broken.about(format!("client {id} of _db_updates")));
        }
    }

    /// Follows `_changes` of all databases until the end.
    async fn follow_all_changes(self) {
        let (mut known, mut clients) = (BTreeSet::new(), JoinSet::new());
        while self.actor.phase() != Phase::End {
            let living = self.actor.shared.oracle().living();
            for db in living {
                if known.insert(db.instance) {
                    clients.spawn(self.clone().follow_changes(db));
                }
            }
            self.actor.store.env().sleep(Duration::from_millis(500)).await;
        }
    }

    /// Follows `_changes` of `db` until the database is gone.
    async fn follow_changes(self, db: Db) {
        let actor = &self.actor;
        let id = actor.shared.oracle().doc_tailed(actor.issuer, db.instance, Sequence::MIN);
        let since = parking_lot::Mutex::new("0".to_owned());
        while actor.phase() != Phase::End {
            let asked = self.draw();
            let from = since.lock().clone();
            let name = db.name.as_str().replace('/', "%2F");
            let target = format!("/{name}/_changes?since={from}{}", asked.query);
            actor.shared.oracle().doc_tail_goes_on(id);
            let take = |piece: &Piece| {
                let seq = match piece {
                    Piece::Row(row) => {
                        let [seq, doc] = [&row["seq"], &row["id"]].map(Value::as_str);
                        let rev = row["changes"][0]["rev"].as_str();
                        let (Some(seq), Some(doc), Some(rev)) = (seq, doc, rev) else {
                            return Guarantee::Framed.fails(format!("{row} is no row"));
                        };
                        let is_deleted = row["deleted"].as_bool() == Some(true);
                        actor.shared.oracle().web_change(id, seq, (doc, rev, is_deleted))?;
                        seq.to_owned()
                    }
                    Piece::Seq(seq) => seq.clone(),
                };
                *since.lock() = seq;
                Ok(())
            };
            match self.ask(&target, &asked, take).await {
                Answered::Over | Answered::Refused(503, _) => {}
                Answered::Refused(status, body) => {
                    let reason = format!("{status}: {body}");
                    return actor.shared.oracle().doc_tail_ended(&actor.shared, id, &reason);
                }
            }
            if !actor.shared.oracle().living().contains(&db) {
                return;
            }
            actor.pause(100).await;
        }
    }

    /// Draws the parameters of a request.
    fn draw(&self) -> Claim {
        let actor = &self.actor;
        let (name, form) = [
            ("normal", Format::Array),
            ("longpoll", Format::Array),
            ("continuous", Format::Lines),
            ("eventsource", Format::Events),
        ][actor.random(4) as usize];
        let limit = match actor.random(2) {
            0 => format!("&limit={}", 1 + actor.random(4)),
            _ => String::new(),
        };
        let has_heartbeat = actor.random(2) == 0;
        let rest = if has_heartbeat {
            format!("&heartbeat={}", 100 + actor.random(2_000))
        } else {
            format!("&timeout={}", actor.random(3_000))
        };
        let query = format!("&feed={name}{limit}{rest}");
        Claim { query, form, has_heartbeat }
    }

    /// Requests `target`, and passes each piece of the answer to `take`.
    async fn ask(&self, target: &str, asked: &Claim, take: impl Fn(&Piece) -> Taken) -> Answered {
        let Self { actor, router, plan } = self;
        actor.note(|| format!("asks for {target}"));
        let request = Request::get(target).header("host", "localhost").body(Body::empty());
        let answer = router.clone().oneshot(request.expect("it is sound")).await;
        let answer = answer.unwrap_or_else(|never| match never {});
        let status = answer.status().as_u16();
        let (mut body, mut text) = (answer.into_body(), Vec::new());
        while let Some(bytes) = self.next(&mut body, (target, asked)).await {
            text.extend_from_slice(&bytes);
            if status != 200 {
                continue;
            }
            let is_cut = plan.cuts && actor.is_chaos() && actor.random(30) == 0;
            let taken = pieces(asked.form, &mut text, false).and_then(|mut pieces| {
                if is_cut {
                    // The cut can be anywhere in the pieces received, even between two rows of a database.
                    pieces.truncate(actor.random(pieces.len() as u64 + 1) as usize);
                }
                self.take(&pieces, &take)
            });
            if let Err(broken) = taken {
                actor.shared.fail(broken.about(format!("of {target}")));
                return Answered::Over;
            }
            if is_cut {
                actor.shared.witness(Witness::WebConnectionCut);
                return Answered::Over;
            }
            if plan.is_slow && actor.is_chaos() && actor.random(3) == 0 {
                actor.pause(400).await;
            }
        }
        actor.note(|| format!("{target} has ended"));
        if status != 200 {
            return Answered::Refused(status, String::from_utf8_lossy(&text).into_owned());
        }
        if let Err(broken) = pieces(asked.form, &mut text, true).and_then(|pieces| self.take(&pieces, &take))
        {
            actor.shared.fail(broken.about(format!("of {target}")));
        }
        Answered::Over
    }

    fn take(&self, pieces: &[Piece], take: impl Fn(&Piece) -> Taken) -> Taken {
        pieces.iter().try_for_each(|piece| {
            self.actor.note(|| format!("receives {piece:?}"));
            take(piece)
        })
    }

    /// Returns the next bytes of the answer to `target`; `None` at its end. After the faults, an answer with heartbeats must never be
    /// silent for long.
    async fn next(&self, body: &mut Body, (target, asked): (&str, &Claim)) -> Option<Bytes> {
        let shared = &self.actor.shared;
        loop {
            let was_calm = shared.phase() == Phase::Rest;
            let frame = std::future::poll_fn(|context| std::pin::Pin::new(&mut *body).poll_frame(context));
            tokio::select! {
                frame = frame => {
                    // The server cuts off a feed whose store fails.
                    let frame = frame?.ok()?;
                    if let Ok(bytes) = frame.into_data() {
                        return Some(bytes);
                    }
                }
                () = self.actor.store.env().sleep(SILENCE_MAX) => {
                    if was_calm && asked.has_heartbeat && shared.phase() == Phase::Rest {
                        let reason = format!("nothing has come of {target} for {SILENCE_MAX:?}");
                        shared.fail(Guarantee::Live.broken(reason));
                    }
                }
            }
        }
    }
}

/// Removes the complete pieces from `text`, and returns them.
fn pieces(form: Format, text: &mut Vec<u8>, is_end: bool) -> std::result::Result<Vec<Piece>, Broken> {
    let mark: &[u8] = match form {
        Format::Array if !is_end => return Ok(Vec::new()),
        Format::Array => b"",
        Format::Lines => b"\n",
        Format::Events => b"\n\n",
    };
    if form == Format::Array {
        // An answer that was cut off is not complete JSON.
        let Ok(all) = serde_json::from_slice::<Value>(text) else { return Ok(Vec::new()) };
        let (Some(rows), Some(last)) = (all["results"].as_array(), all["last_seq"].as_str()) else {
            return Guarantee::Framed.fails(format!("{all} is no feed"));
        };
        let rows = rows.iter().cloned().map(Piece::Row);
        return Ok(rows.chain([Piece::Seq(last.to_owned())]).collect());
    }
    let mut found = Vec::new();
    while let Some(at) = text.windows(mark.len()).position(|window| window == mark) {
        let part: Vec<_> = text.drain(..at + mark.len()).collect();
        let part = String::from_utf8_lossy(&part[..at]);
        let field = |name: &str| part.lines().find_map(|line| line.strip_prefix(name));
        let (data, id) = match form {
            Format::Events => (field("data: ").unwrap_or_default(), field("id: ")),
            _ => (&*part, None),
        };
        if data.is_empty() {
            let seq = id.and_then(|id| serde_json::from_str(id).ok());
            found.extend(seq.map(Piece::Seq));
            continue;
        }
        let row: Value = serde_json::from_str(data)
            .map_err(|error| Guarantee::Framed.broken(format!("{error}: {data:?}")))?;
        found.push(match row["last_seq"].as_str() {
            Some(last) => Piece::Seq(last.to_owned()),
            None => Piece::Row(row),
        });
    }
    Ok(found)
}

/// Draws the kinds of events that a client wants. A client that wants updates also gets those of design documents, as updates.
fn draw_kinds(actor: &ActorContext) -> Kinds {
    use EventKind::{Created, DdocUpdated, Deleted, Updated};
    match actor.random(5) {
        0 => Deleted.into(),
        1 => Kinds::from_iter([Created, Deleted]),
        2 => Kinds::from_iter([Updated, DdocUpdated]),
        _ => Kinds::ALL,
    }
}
