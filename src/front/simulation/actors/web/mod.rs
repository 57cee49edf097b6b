//! Clients over HTTP: of `_db_updates` and of `_changes`, in every form, quick and slow, which are cut off and
//! resume.
//!
//! Router and protocol are those of production. Only the socket is not: it is a [`pipe`] within the process.

mod pipe;
mod reply;

use std::{collections::BTreeSet, convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
};
use futures_util::{FutureExt, future::BoxFuture};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::task::JoinSet;
use tower_service::Service;

use self::reply::{FeedFormat, Piece, Reply};
use super::context::ActorContext;
use crate::{
    base::{
        encoding::{Sequence, Versionstamp},
        error::Result,
        event::{Db, DbName, EventKind, Kinds},
    },
    front::{
        http::{Api, ApiOptions, Databases},
        simulation::{
            app,
            draw::WebPlan,
            guarantee::{Broken, Guarantee},
            oracle::WebClientId,
            shared::Phase,
            witness::Witness,
        },
    },
    roles::{changes::DocSource, dispatcher::Dispatcher},
    store::{Isolation, Transaction},
};

/// The longest time without bytes from a feed with heartbeats, while no fault strikes.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// How long a connection may take to end after its client is gone.
const END_MAX: Duration = Duration::from_secs(30);

struct Layer;

impl DocSource for Layer {}

impl Databases for Layer {
    fn find<'a>(&'a self, tx: &'a Transaction, name: &'a DbName) -> BoxFuture<'a, Result<Option<Db>>> {
        async move {
            let stored = tx.get(&app::database(name), Isolation::Serializable).await?;
            let instance = stored.as_ref().map(app::instance_of).transpose()?;
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
    /// Starts the drawn clients.
    pub fn start(actor: &ActorContext, dispatcher: &Arc<Dispatcher>, plan: WebPlan) -> Result<Self> {
        let api = Api::start(&actor.bus, dispatcher, ApiOptions::default())?;
        let mut router = api.db_updates();
        if actor.shared.plan.documents.is_some() {
            router = router.merge(api.changes(&actor.bus.changes(), Arc::new(Layer)));
        }
        let mut clients = JoinSet::new();
        for number in 0..plan.clients {
            let client = Client { actor: actor.clone(), router: router.clone(), plan };
            clients.spawn(client.follow_updates(number));
        }
        if actor.shared.plan.documents.is_some() {
            let client = Client { actor: actor.clone(), router, plan };
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

/// The parameters of a request for a feed.
struct Asked {
    query: String,
    form: FeedFormat,
    /// Whether heartbeats were asked for.
    has_heartbeat: bool,
}

/// The result of a request.
#[derive(Debug, PartialEq, Eq)]
enum Answered {
    /// It has ended, or was cut off.
    Over,
    /// It was refused with this status and body.
    Refused(u16, String),
}

#[derive(Clone)]
struct Client {
    actor: ActorContext,
    router: Router,
    plan: WebPlan,
}

impl Client {
    /// Follows `_db_updates` until the end. After a crash of its process it resumes.
    async fn follow_updates(self, number: u32) {
        let actor = &self.actor;
        let kinds = draw_kinds(actor);
        let start = match actor.random(3) {
            0 => actor.shared.oracle().some_position(actor.db.env().random()),
            _ => None,
        };
        let slot = (actor.issuer.process, number);
        actor.shared.oracle().web_client(slot, kinds, start);
        while actor.phase() != Phase::End {
            let asked = self.draw();
            if self.plan.hops
                && actor.random(3) == 0
                && actor.shared.oracle().web_hops(slot, actor.random(u64::MAX))
            {
                actor.shared.witness(Witness::WebClientHopped);
            }
            let (id, since, types) = actor.shared.oracle().web_asks(slot);
            let target = format!("/_db_updates?since={since}&types={types}{}", asked.query);
            let answered = self.ask(&target, &asked, |piece| self.take_updates(id, piece)).await;
            if let Answered::Refused(status, body) = answered {
                self.refused(id, status, &body);
                // A client that keeps asking from an expired position is refused each time.
                for _ in 0..if self.plan.asks_badly && status == 410 { actor.random(6) } else { 0 } {
                    self.ask_to_be_refused(&target, &asked).await;
                }
                actor.pause(300).await;
            }
            actor.shared.oracle().web_rests(id);
            if self.plan.asks_badly && actor.random(10) == 0 {
                self.ask_badly().await;
            }
            actor.pause(if actor.random(4) == 0 { 1_000 } else { 20 }).await;
        }
    }

    /// Takes a piece of `_db_updates`.
    fn take_updates(&self, id: WebClientId, piece: &Piece) -> std::result::Result<(), Broken> {
        let shared = &self.actor.shared;
        match piece {
            Piece::Row(text) => {
                let row = parse(text)?;
                let [name, kind, seq] = [&row["db_name"], &row["type"], &row["seq"]].map(|it| it.as_str());
                let (Some(name), Some(kind), Some(seq)) = (name, kind, seq) else {
                    return Guarantee::Framed.fails(format!("{text} is no row"));
                };
                let quoted = serde_json::to_string(name).expect("text is JSON");
                if *text != format!("{{\"db_name\":{quoted},\"type\":\"{kind}\",\"seq\":\"{seq}\"}}") {
                    return Guarantee::Framed.fails(format!("{text} has not the form of a row"));
                }
                shared.oracle().web_row(shared, id, (name, kind, seq))
            }
            Piece::Seq(seq) => shared.oracle().web_stands(id, seq),
            Piece::Head(_) | Piece::Refusal(_) | Piece::End => Ok(()),
        }
    }

    /// Judges the refusal of a request for `_db_updates`.
    fn refused(&self, id: WebClientId, status: u16, body: &str) {
        let shared = &self.actor.shared;
        let horizon = serde_json::from_str::<serde_json::Value>(body)
            .ok()
            .and_then(|body| body["horizon"].as_str()?.parse::<Sequence>().ok());
        let judged = match (status, horizon) {
            (410, Some(horizon)) => {
                shared.witness(Witness::WebClientExpired);
                shared.oracle().web_expired(id, horizon)
            }
            // The store could not be reached.
            (503, _) => Ok(()),
            _ => Guarantee::Truthful.fails(format!("it was refused with {status}: {body}")),
        };
        if let Err(broken) = judged {
            shared.fail(broken.about(format!("client {id} of _db_updates")));
        }
    }

    /// Asks from positions that no store has given out.
    async fn ask_badly(&self) {
        let ahead = Sequence::new(self.actor.bus.incarnation(), Versionstamp::new(1 << 60, 0), 0);
        let since = [ahead.to_string(), "7-g1AAAA".to_owned(), format!("{ahead}-{ahead}")];
        let since = &since[self.actor.random(3) as usize];
        let asked = self.draw();
        if self.ask_to_be_refused(&format!("/_db_updates?since={since}{}", asked.query), &asked).await {
            self.actor.shared.witness(Witness::WebPositionRefused);
        }
    }

    /// Requests `target` at a position from which no reader can continue. Returns whether the request was refused.
    async fn ask_to_be_refused(&self, target: &str, asked: &Asked) -> bool {
        let refuse = |piece: &Piece| match piece {
            Piece::Row(row) => Guarantee::Truthful.fails(format!("the row {row} came of {target}")),
            _ => Ok(()),
        };
        match self.ask(target, asked, refuse).await {
            Answered::Refused(400 | 410 | 503, _) => true,
            Answered::Over if self.plan.cuts => false,
            answered => {
                let reason = format!("{target} was answered by {answered:?}");
                self.actor.shared.fail(Guarantee::Truthful.broken(reason));
                false
            }
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
            self.actor.db.env().sleep(Duration::from_millis(500)).await;
        }
    }

    /// Follows `_changes` of `db` until it is gone.
    async fn follow_changes(self, db: Db) {
        let actor = &self.actor;
        let id = actor.shared.oracle().doc_tailed(actor.issuer, db.instance, Sequence::MIN);
        let since = parking_lot::Mutex::new("0".to_owned());
        while actor.phase() != Phase::End {
            let asked = self.draw();
            let from = since.lock().clone();
            let target =
                format!("/{}/_changes?since={from}{}", db.name.as_str().replace('/', "%2F"), asked.query);
            actor.shared.oracle().doc_tail_goes_on(id);
            let take = |piece: &Piece| {
                let seq = match piece {
                    Piece::Row(text) => {
                        let row = parse(text)?;
                        let [seq, doc] = [&row["seq"], &row["id"]].map(|it| it.as_str());
                        let rev = row["changes"][0]["rev"].as_str();
                        let (Some(seq), Some(doc), Some(rev)) = (seq, doc, rev) else {
                            return Guarantee::Framed.fails(format!("{text} is no row"));
                        };
                        let is_deleted = row["deleted"].as_bool() == Some(true);
                        actor.shared.oracle().web_change(id, seq, (doc, rev, is_deleted))?;
                        seq.to_owned()
                    }
                    Piece::Seq(seq) => seq.clone(),
                    Piece::Head(_) | Piece::Refusal(_) | Piece::End => return Ok(()),
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
    fn draw(&self) -> Asked {
        let actor = &self.actor;
        let (name, form) = [
            ("normal", FeedFormat::Array),
            ("longpoll", FeedFormat::Array),
            ("continuous", FeedFormat::Lines),
            ("eventsource", FeedFormat::Events),
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
        Asked { query, form, has_heartbeat }
    }

    /// Requests `target`, and passes the pieces of the answer to `take`.
    async fn ask(
        &self,
        target: &str,
        asked: &Asked,
        take: impl Fn(&Piece) -> std::result::Result<(), Broken>,
    ) -> Answered {
        let Self { actor, router, plan } = self;
        actor.note(|| format!("asks for {target}"));
        let (mut client, server) = pipe::connect(plan.room);
        let mut connection = JoinSet::new();
        connection.spawn(serve(server, router.clone()));
        let request = format!("GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        let mut reply = Reply::new(asked.form, asked.has_heartbeat);
        let (mut status, mut answered) = (0, Answered::Over);
        let mut is_calm = actor.shared.phase() == Phase::Rest;
        drop(client.send(request.as_bytes()).await);
        loop {
            let most = 1 + actor.random(plan.room as u64) as usize;
            let came = tokio::select! {
                came = client.take(most) => came,
                () = actor.db.env().sleep(SILENCE_MAX) => {
                    if is_calm && asked.has_heartbeat && actor.shared.phase() == Phase::Rest {
                        actor.shared.fail(Guarantee::Live.broken(format!("nothing has come of {target} for {SILENCE_MAX:?}")));
                    }
                    is_calm = actor.shared.phase() == Phase::Rest;
                    continue;
                }
            };
            if came.is_empty() {
                actor.note(|| format!("{target} has ended"));
                break;
            }
            let taken =
                reply.take(&came).map_err(|reason| Guarantee::Framed.broken(reason)).and_then(|pieces| {
                    for piece in pieces {
                        actor.note(|| format!("receives {piece:?}"));
                        match &piece {
                            Piece::Head(of) => status = *of,
                            Piece::Refusal(body) => answered = Answered::Refused(status, body.clone()),
                            _ => {}
                        }
                        take(&piece)?;
                    }
                    Ok(())
                });
            if let Err(broken) = taken {
                actor.shared.fail(broken.about(format!("of {target}")));
                break;
            }
            if plan.cuts && actor.is_chaos() && actor.random(30) == 0 {
                actor.shared.witness(Witness::WebConnectionCut);
                break;
            }
            if plan.is_slow && actor.is_chaos() && actor.random(3) == 0 {
                actor.pause(400).await;
            }
        }
        drop(client);
        tokio::select! {
            _ = connection.join_next() => {}
            () = actor.db.env().sleep(END_MAX) => {
                actor.shared.fail(Guarantee::Live.broken(format!("{target} goes on after its client is gone")));
            }
        }
        answered
    }
}

/// Serves a connection.
async fn serve(end: pipe::End, router: Router) {
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let mut router = router.clone();
        async move {
            Ok::<_, Infallible>(
                router.call(request.map(Body::new)).await.unwrap_or_else(|never| match never {}),
            )
        }
    });
    drop(http1::Builder::new().serve_connection(TokioIo::new(end), service).await);
}

fn parse(text: &str) -> std::result::Result<serde_json::Value, Broken> {
    serde_json::from_slice(&Bytes::copy_from_slice(text.as_bytes()))
        .map_err(|error| Guarantee::Framed.broken(format!("{error}: {text}")))
}

/// Draws the kinds of events that a client wants. One that wants updates also gets those of design documents, as
/// updates.
fn draw_kinds(actor: &ActorContext) -> Kinds {
    use EventKind::{Created, DdocUpdated, Deleted, Updated};
    match actor.random(5) {
        0 => Deleted.into(),
        1 => Kinds::from_iter([Created, Deleted]),
        2 => Kinds::from_iter([Updated, DdocUpdated]),
        _ => Kinds::ALL,
    }
}
