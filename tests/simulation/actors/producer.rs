//! A producer: a layer that creates, updates and deletes databases, and records these events in the same transactions.

use std::collections::BTreeMap;

use notibus::{
    Result,
    event::{Counters, Db, DbName, DdocId},
    producer::Producer,
    store::{Isolation, Transaction},
};

use super::{context::ActorContext, documents::Documents};
use crate::app::{self, Line};

/// The maximum number of databases in a transaction of a crowded world.
const BURST_MAX: u64 = 400;

/// A change to a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DatabaseChange {
    Update(u64),
    /// A write to a design document, with or without its id.
    Ddoc(Option<u64>),
    Delete,
    /// This many deletions, each followed by a creation.
    Recreate(u64),
    Edit(u64),
}

/// Works until the faults end.
pub(super) async fn run(actor: ActorContext) {
    let producer = match actor.bus.producer_with(actor.shared.plan.producer.clone()) {
        Ok(producer) => producer,
        Err(error) => return actor.shared.fail(format!("no producer: {error}")),
    };
    let documents = Documents::new(&actor, &producer);
    let layer = Layer { actor: &actor, producer: &producer, documents: documents.as_ref() };
    while actor.is_chaos() {
        actor.pause(actor.shared.plan.think_max_ms).await;
        let work = draw(&actor);
        let done = if actor.random(4) == 0 {
            let number = actor.shared.draw(0..=u64::MAX);
            let body = async |tx: Transaction| {
                tx.set(&app::once(number), b"");
                layer.run(&work, &tx).await
            };
            actor.bus.run_exactly_once(None, body).await.map(|_| ())
        } else {
            actor.store.run(async |tx| layer.run(&work, &tx).await).await
        };
        if let Err(error) = done {
            actor.note(|| format!("could not produce: {error}"));
        }
    }
}

struct PlannedChanges {
    /// The change to each database. A database that does not exist is created instead.
    changes: BTreeMap<DbName, DatabaseChange>,
    /// Whether the events belong to deleted instances, and are recorded without checking.
    is_late: bool,
}

/// Draws the work of the next transaction.
fn draw(actor: &ActorContext) -> PlannedChanges {
    let names = &actor.shared.plan.names;
    let mut changes = BTreeMap::new();
    let is_burst = actor.shared.plan.sizes.is_crowded && actor.random(3) == 0;
    let most = if is_burst { BURST_MAX } else { 4 };
    for _ in 0..=actor.random(most - 1) {
        let name = names[actor.random(names.len() as u64) as usize].clone();
        let change = match actor.random(20) {
            0..7 if actor.shared.plan.churns_names => DatabaseChange::Recreate(1 + actor.random(2)),
            7..11 if actor.shared.plan.churns_names => DatabaseChange::Delete,
            0..11 => DatabaseChange::Update(1 + actor.random(3)),
            11..14 => DatabaseChange::Ddoc(Some(actor.random(3))),
            14 => DatabaseChange::Ddoc(None),
            15..18 => DatabaseChange::Delete,
            _ => DatabaseChange::Recreate(1),
        };
        let is_edit = matches!(change, DatabaseChange::Update(_) | DatabaseChange::Ddoc(_))
            && actor.shared.plan.documents.is_some();
        let change = if is_edit { DatabaseChange::Edit(1 + actor.random(3)) } else { change };
        changes.insert(name, change);
    }
    PlannedChanges { changes, is_late: actor.shared.plan.has_late_events && actor.random(10) == 0 }
}

/// The layer on top of the bus.
struct Layer<'a> {
    actor: &'a ActorContext,
    producer: &'a Producer,
    /// The documents in the layer's databases, if there are any.
    documents: Option<&'a Documents>,
}

impl Layer<'_> {
    async fn run(&self, work: &PlannedChanges, tx: &Transaction) -> Result<()> {
        let Self { actor, producer, .. } = self;
        let mut lines = Vec::new();
        for (name, change) in &work.changes {
            if work.is_late {
                let gone = actor.shared.oracle().gone_instance(name, actor.store.env().random());
                lines.extend(gone.map(|db| update(producer, tx, db, 1)));
                continue;
            }
            let stored = tx.get(&app::database(name), Isolation::Serializable).await?;
            let present = stored.as_ref().map(app::instance_of);
            let present = present.map(|instance| Db::new(name.clone(), instance));
            lines.extend(self.act(tx, name, present, *change).await?);
        }
        for (order, line) in lines.iter().enumerate() {
            line.write(tx, order as u16);
        }
        Ok(())
    }

    /// Applies `change` to the database `name`, whose current instance is `present`; creates the database if there is none.
    async fn act(
        &self,
        tx: &Transaction,
        name: &DbName,
        present: Option<Db>,
        change: DatabaseChange,
    ) -> Result<Vec<Line>> {
        let producer = self.producer;
        let Some(db) = present else { return Ok(vec![self.create(tx, name).await?]) };
        Ok(match change {
            DatabaseChange::Update(count) => vec![update(producer, tx, db, count)],
            DatabaseChange::Ddoc(id) => {
                let id = id.map(|id| DdocId::new(&format!("_design/{id}")).expect("it is short"));
                producer.ddoc_updated(tx, &db, id.as_ref());
                let counters = Counters { ddoc_updated: 1, ..Counters::ZERO };
                vec![Line { db, counters, ddocs: id.into_iter().collect() }]
            }
            DatabaseChange::Delete => vec![self.delete(tx, db).await?],
            DatabaseChange::Recreate(times) => {
                let (mut lines, mut present) = (Vec::new(), db);
                for _ in 0..times {
                    lines.push(self.delete(tx, present).await?);
                    let created = self.create(tx, name).await?;
                    present = created.db.clone();
                    lines.push(created);
                }
                lines
            }
            DatabaseChange::Edit(count) => match self.documents {
                Some(documents) => vec![documents.edit(tx, db, count).await?],
                None => Vec::new(),
            },
        })
    }

    async fn create(&self, tx: &Transaction, name: &DbName) -> Result<Line> {
        let instance = self.actor.instance();
        let db = Db::new(name.clone(), instance);
        tx.set(&app::database(name), &instance.0);
        if let Some(documents) = self.documents {
            documents.begin(tx, &db).await?;
        }
        self.producer.created(tx, &db);
        Ok(Line { db, counters: Counters { created: 1, ..Counters::ZERO }, ddocs: Vec::new() })
    }

    async fn delete(&self, tx: &Transaction, db: Db) -> Result<Line> {
        tx.clear(&app::database(&db.name));
        if let Some(documents) = self.documents {
            documents.remove(tx, &db).await?;
        }
        self.producer.deleted(tx, &db);
        Ok(Line { db, counters: Counters { deleted: 1, ..Counters::ZERO }, ddocs: Vec::new() })
    }
}

fn update(producer: &Producer, tx: &Transaction, db: Db, count: u64) -> Line {
    for _ in 0..count {
        producer.updated(tx, &db);
    }
    Line { db, counters: Counters { updated: count, ..Counters::ZERO }, ddocs: Vec::new() }
}
