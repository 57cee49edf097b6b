//! A producer: a layer that creates, updates and deletes databases, and records it in the same transactions.

use std::collections::BTreeMap;

use super::{documents::Documents, place::Place};
use crate::{
    base::{
        encoding::Counters,
        error::Result,
        event::{Db, DbInstance, DbName, DdocId},
    },
    front::simulation::{
        app::{self, Line},
        keyspace::BROKEN,
        witness::Witness,
    },
    roles::producer::Producer,
    state::{
        feed::Topology,
        keys::{Lanes, Partition},
    },
    store::{AtomicOp, Isolation, Transaction},
};

/// The most databases of a transaction in a crowded world.
const BURST_MAX: u64 = 400;

/// A change of a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    Update(u64),
    /// A write of a design document, with its id or without.
    Ddoc(Option<u64>),
    Delete,
    /// So many deletions, each with a new creation.
    Recreate(u64),
    Edit(u64),
}

/// Works until the faults end.
pub(super) async fn run(place: Place) {
    let producer = match place.bus.producer_with(place.shared.plan.producer.clone()) {
        Ok(producer) => producer,
        Err(error) => return place.shared.fail(format!("no producer: {error}")),
    };
    let documents = Documents::new(&place, &producer);
    let layer = Layer { place: &place, producer: &producer, documents: documents.as_ref() };
    while place.is_chaos() {
        place.pause(place.shared.plan.think_max_ms).await;
        if place.shared.plan.breaks_rows
            && place.random(20) == 0
            && let Err(error) = break_rows(&place).await
        {
            place.note(|| format!("could not break rows: {error}"));
        }
        if place.shared.plan.breaks_rows
            && let Some(documents) = &documents
            && place.random(20) == 0
            && let Err(error) = documents.break_row().await
        {
            place.note(|| format!("could not break a row of documents: {error}"));
        }
        let work = draw(&place);
        let done = if place.random(4) == 0 {
            let number = place.shared.draw(0..=u64::MAX);
            let body = async |tx: Transaction| {
                tx.set(&app::once(number), b"");
                layer.run(&work, &tx).await
            };
            place.db.run_once(body).await.map(|_| ())
        } else {
            place.db.run(async |tx| layer.run(&work, &tx).await).await
        };
        if let Err(error) = done {
            place.note(|| format!("could not produce: {error}"));
        }
    }
}

/// Writes rows that nobody can decode: to the counters of a partition, and to an open shard of the feed, as a later version may append one.
async fn break_rows(place: &Place) -> Result<()> {
    let feed = place.bus.feed();
    let partition = Partition(place.random(place.shared.plan.partitions.into()) as u32);
    let counters = [&feed.context.keys.drains(partition, partition).begin[..], BROKEN].concat();
    let number = place.random(1_000) as usize;
    place.note(|| format!("breaks rows of partition {}", partition.0));
    let write = async |tx: Transaction| {
        let topology = Topology::read(&tx, feed.raw(), Isolation::Serializable).await?;
        let spaces: Vec<_> = feed.raw().spaces(topology.current()).collect();
        let row = spaces[number % spaces.len()].append(feed.context.config.incarnation, 0xfff0);
        tx.set(&counters, BROKEN);
        tx.atomic(AtomicOp::SetVersionstampedKey, &row, BROKEN);
        // Each append moves the pulse, or barriers would wait for a row that no tail knows.
        tx.atomic(AtomicOp::Add, &feed.context.keys.pulse(feed.raw().id), &Lanes::ALL.to_operand());
        Ok(())
    };
    place.db.run(write).await?;
    place.shared.witness(Witness::RowBroken);
    Ok(())
}

struct Work {
    /// The changes, by database, if it exists.
    deeds: BTreeMap<DbName, Deed>,
    /// Whether the events are of instances that are gone, without a check.
    is_late: bool,
}

/// Draws the work of the next transaction.
fn draw(place: &Place) -> Work {
    let names = &place.shared.plan.names;
    let mut deeds = BTreeMap::new();
    let is_burst = place.shared.plan.sizes.is_crowded && place.random(3) == 0;
    let most = if is_burst { BURST_MAX } else { 4 };
    for _ in 0..=place.random(most - 1) {
        let name = names[place.random(names.len() as u64) as usize].clone();
        let deed = match place.random(20) {
            0..7 if place.shared.plan.churns_names => Deed::Recreate(1 + place.random(2)),
            7..11 if place.shared.plan.churns_names => Deed::Delete,
            0..11 => Deed::Update(1 + place.random(3)),
            11..14 => Deed::Ddoc(Some(place.random(3))),
            14 => Deed::Ddoc(None),
            15..18 => Deed::Delete,
            _ => Deed::Recreate(1),
        };
        let is_edit =
            matches!(deed, Deed::Update(_) | Deed::Ddoc(_)) && place.shared.plan.documents.is_some();
        let deed = if is_edit { Deed::Edit(1 + place.random(3)) } else { deed };
        deeds.insert(name, deed);
    }
    Work { deeds, is_late: place.shared.plan.has_late_events && place.random(10) == 0 }
}

/// The layer on top of the bus.
struct Layer<'a> {
    place: &'a Place,
    producer: &'a Producer,
    /// The documents of its databases, if they have any.
    documents: Option<&'a Documents>,
}

impl Layer<'_> {
    async fn run(&self, work: &Work, tx: &Transaction) -> Result<()> {
        let Self { place, producer, .. } = self;
        let mut lines = Vec::new();
        for (name, deed) in &work.deeds {
            if work.is_late {
                let gone = place.shared.oracle().gone_instance(name, place.db.env().random());
                lines.extend(gone.map(|db| update(producer, tx, db, 1)));
                continue;
            }
            let stored = tx.get(&app::database(name), Isolation::Serializable).await?;
            let present = stored.as_ref().map(app::instance_of).transpose()?;
            let present = present.map(|instance| Db::new(name.clone(), instance));
            lines.extend(self.act(tx, name, present, *deed).await?);
        }
        for (order, line) in lines.iter().enumerate() {
            line.write(tx, order as u16);
        }
        Ok(())
    }

    /// Applies `deed` to the database `name`, whose present instance is `present`, or creates it.
    async fn act(
        &self,
        tx: &Transaction,
        name: &DbName,
        present: Option<Db>,
        deed: Deed,
    ) -> Result<Vec<Line>> {
        let producer = self.producer;
        let Some(db) = present else { return Ok(vec![self.create(tx, name).await?]) };
        Ok(match deed {
            Deed::Update(count) => vec![update(producer, tx, db, count)],
            Deed::Ddoc(id) => {
                let id = id.map(|id| DdocId::new(&format!("_design/{id}")).expect("it is short"));
                producer.ddoc_updated(tx, &db, id.as_ref());
                let counters = Counters { ddoc_updated: 1, ..Counters::ZERO };
                vec![Line { db, counters, ddocs: id.into_iter().collect() }]
            }
            Deed::Delete => vec![self.delete(tx, db).await?],
            Deed::Recreate(times) => {
                let (mut lines, mut present) = (Vec::new(), db);
                for _ in 0..times {
                    lines.push(self.delete(tx, present).await?);
                    let created = self.create(tx, name).await?;
                    present = created.db.clone();
                    lines.push(created);
                }
                lines
            }
            Deed::Edit(count) => match self.documents {
                Some(documents) => vec![documents.edit(tx, db, count).await?],
                None => Vec::new(),
            },
        })
    }

    async fn create(&self, tx: &Transaction, name: &DbName) -> Result<Line> {
        let instance = DbInstance::random(self.place.db.env());
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
