//! The documents of databases: a layer that edits them, and their tails.

use std::{collections::BTreeSet, sync::Weak, time::Duration};

use notibus::{
    Error, Result,
    changes::{Changes, DocId, DocSummary, Revision},
    cursor::Cursor,
    dispatcher::Dispatcher,
    event::{Counters, Db, DdocId, Sequence},
    producer::Producer,
    store::{Isolation, Transaction},
};
use tokio::task::JoinSet;

use super::context::ActorContext;
use crate::{
    app::{self, Document, Line},
    draw::DocumentPlan,
    shared::Phase,
    witness::Witness,
};

/// The interval at which tails poll for new and deleted databases.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// The documents in the databases of a layer.
pub(super) struct Documents {
    actor: ActorContext,
    changes: Changes,
    plan: DocumentPlan,
}

impl Documents {
    /// Returns the documents of the layer of `actor`, if its databases have documents.
    pub fn new(actor: &ActorContext, producer: &Producer) -> Option<Self> {
        let plan = actor.shared.plan.documents.clone()?;
        Some(Self { actor: actor.clone(), changes: actor.bus.changes_with(producer.clone()), plan })
    }

    /// Begins the feed of `db`, which is created in `tx`.
    pub async fn begin(&self, tx: &Transaction, db: &Db) -> Result<()> {
        self.changes.create(tx, db, &self.plan.options).await
    }

    /// Removes the feed of `db`, which is deleted in `tx`. Sometimes a writer of the feed is kept and used afterwards, which must fail.
    pub async fn remove(&self, tx: &Transaction, db: &Db) -> Result<()> {
        // The feed cannot be read in the transaction that created it.
        let kept = match self.actor.random(8) {
            0 => self.changes.writer(tx, db).await.ok(),
            _ => None,
        };
        tx.clear_range(&app::documents(db.instance));
        self.changes.remove(tx, db);
        if let Some(writer) = kept {
            let (_, doc) = self.next(tx, db, self.draw_id()).await?;
            let recorded = writer.record(&doc, None);
            self.actor.note(|| format!("has kept a writer of {db:?}: {recorded:?}"));
        }
        Ok(())
    }

    /// Edits some documents of `db`, and returns the events of these edits.
    pub async fn edit(&self, tx: &Transaction, db: Db, count: u64) -> Result<Line> {
        let (mut counters, mut ddocs) = (Counters::ZERO, Vec::new());
        let writer = self.changes.writer(tx, &db).await?;
        // The ids must be distinct: a transaction cannot read what it has recorded.
        let ids: BTreeSet<_> = (0..count).map(|_| self.draw_id()).collect();
        for id in ids {
            let (previous, doc) = self.next(tx, &db, id).await?;
            // A document that is recorded twice in a transaction has one row.
            let times = if self.actor.random(8) == 0 { 2 } else { 1 };
            for _ in 0..times {
                let pending = writer.record(&doc, previous)?;
                Document::write(tx, db.instance, &doc, previous, pending);
                if doc.id.is_design() {
                    counters.ddoc_updated += 1;
                    ddocs.extend(DdocId::new(doc.id.as_str()));
                } else {
                    counters.updated += 1;
                }
            }
        }
        Ok(Line { db, counters, ddocs })
    }

    /// Returns the next edit of the document `id`, and the edit that the bus is given as the previous one.
    async fn next(&self, tx: &Transaction, db: &Db, id: DocId) -> Result<(Option<Sequence>, DocSummary)> {
        let stored = tx.get(&app::document(db.instance, &id), Isolation::Serializable).await?;
        let stored = stored.map(|bytes| Document::from_bytes(id.as_str(), &bytes));
        let mut previous = stored.as_ref().map(|stored| stored.edited);
        if self.plan.misuses && self.actor.random(6) == 0 {
            let random = self.actor.store.env().random();
            previous = match random % 2 {
                0 => None,
                _ => self.actor.shared.oracle().some_edit(db.instance, id.as_str(), random / 2),
            };
        }
        let position = stored.map_or(0, |stored| stored.doc.revision.position) + 1;
        let revision = Revision { position, hash: self.actor.instance().0 };
        let (branches, is_deleted) = (1 + self.actor.random(3) as u32, self.actor.random(5) == 0);
        Ok((previous, DocSummary { id, revision, branches, is_deleted }))
    }

    fn draw_id(&self) -> DocId {
        let number = self.actor.random(self.plan.ids);
        let id = match self.actor.random(8) {
            0 => format!("_design/{}", number % 3),
            _ => format!("{}:{number}", ["p", "q"][(number % 2) as usize]),
        };
        DocId::new(&id).expect("it is short")
    }
}

/// Changes the number of shards for the documents of a database.
pub(super) async fn reshard(actor: &ActorContext) -> Result<()> {
    let db = actor.shared.oracle().some_database(actor.store.env().random());
    let Some(db) = db else { return Ok(()) };
    let shards = 1 + actor.random(4) as u32;
    actor.note(|| format!("reshards the documents of {db:?} to {shards}"));
    actor.bus.changes().feed(&db).reshard(shards, None).await.map(|_| ())
}

/// Tails the documents of all databases until the dispatcher ends.
pub(super) async fn read(actor: ActorContext, dispatcher: Weak<Dispatcher>) {
    let changes = actor.bus.changes();
    let mut known = BTreeSet::new();
    let mut tails = JoinSet::new();
    while actor.phase() != Phase::End {
        let living = actor.shared.oracle().living();
        for db in living {
            if known.insert(db.instance) {
                tails.spawn(tail(actor.clone(), changes.clone(), Weak::clone(&dispatcher), db));
            }
        }
        actor.store.env().sleep(POLL_INTERVAL).await;
    }
}

/// Tails the documents of `db` until its feed is gone.
async fn tail(actor: ActorContext, changes: Changes, dispatcher: Weak<Dispatcher>, db: Db) {
    let now = if actor.random(2) == 0 { None } else { Some(changes.feed(&db).now().await) };
    let Ok(now) = now.transpose() else { return };
    let (cursor, start) = now.map_or((Cursor::BEGINNING, Sequence::MIN), |now| (now.into(), now));
    let limit = 1 + actor.random(4) as usize;
    let Some(mut tail) = dispatcher.upgrade().map(|dispatcher| changes.tail(&dispatcher, &db, cursor)) else {
        return;
    };
    tail = tail.with_limit(limit);
    let id = actor.shared.oracle().doc_tailed(actor.issuer, db.instance, start);
    actor.note(|| format!("has tail {id} of {db:?}, from {start} on"));
    loop {
        match tail.next().await {
            Ok(page) => actor.shared.oracle().doc_tail_read(&actor.shared, id, &page.rows),
            Err(error @ (Error::NoFeed { .. } | Error::Expired { .. } | Error::Invalid { .. })) => {
                actor.shared.witness(Witness::DocumentTailEnded);
                return actor.shared.oracle().doc_tail_ended(&actor.shared, id, &error.to_string());
            }
            Err(error) => {
                actor.note(|| format!("tail {id} could not read: {error}"));
                actor.pause(200).await;
            }
        }
    }
}
