//! [`Producer`]: records events inside the transaction that causes them.
//!
//! Recording is synchronous and blind: it reads nothing, waits for nothing and conflicts with nothing. It costs one `ADD`
//! per database and transaction, one more mutation per design-document id, and one more with
//! [`ProducerOptions::record_versionstamps`]. The event exists if and only if the transaction commits.

mod doorbell;
#[cfg(feature = "foundationdb")]
mod foundationdb;
mod pending_events;
mod target;

use std::sync::Arc;

pub(crate) use doorbell::{RINGER, ringer};
pub use target::{EventTarget, Receipt};

use crate::{
    base::{
        encoding::{ADDED_MAX, Counters, Tally},
        error::{Error, Result},
        event::{Db, DdocId, EventKind},
    },
    state::{
        context::Context,
        keys::{Partition, stamp_operand},
    },
};

/// Options for recording events. Producers of one bus may have different options.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProducerOptions {
    /// The number of keys over which the counters of one database are spread, 1 to 256. A transaction picks one at random. Raise the number
    /// if one database is so hot that the storage process of its single counter key is the bottleneck. Default: 1.
    pub slots: u16,
    /// Whether the rows carry the versionstamp of the newest transaction that recorded an event. This costs one more mutation per database
    /// and transaction. Default: false.
    pub record_versionstamps: bool,
}

crate::base::macros::setters!(ProducerOptions { slots: u16, record_versionstamps: bool });

impl Default for ProducerOptions {
    fn default() -> Self {
        Self { slots: 1, record_versionstamps: false }
    }
}

impl ProducerOptions {
    /// The maximum number of slots per database.
    pub const SLOTS_MAX: u16 = 256;
}

/// Records events. Clones are cheap.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, Db, DbInstance, store::Store};
///
/// let store = Store::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let producer = bus.producer();
/// let db = Db::new("orders".parse()?, DbInstance::new());
/// store
///     .run(async |tx| {
///         tx.set(b"documents/1", b"{}");
///         producer.created(&tx, &db);
///         producer.updated(&tx, &db);
///         Ok(())
///     })
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Producer {
    context: Arc<Context>,
    options: ProducerOptions,
}

impl Producer {
    pub(crate) fn new(context: Arc<Context>, options: ProducerOptions) -> Result<Self> {
        if !(1..=ProducerOptions::SLOTS_MAX).contains(&options.slots) {
            return Err(Error::invalid(
                "slots",
                format!("{} is not 1 to {}", options.slots, ProducerOptions::SLOTS_MAX),
            ));
        }
        Ok(Self { context, options })
    }

    /// Records that `db` was created in this transaction.
    pub fn created<T: EventTarget>(&self, transaction: &T, db: &Db) -> T::Receipt {
        self.add(transaction, db, &EventKind::Created.once().into())
    }

    /// Records that `db` was deleted in this transaction.
    pub fn deleted<T: EventTarget>(&self, transaction: &T, db: &Db) -> T::Receipt {
        self.add(transaction, db, &EventKind::Deleted.once().into())
    }

    /// Records that something other than a design document changed in `db` in this transaction.
    ///
    /// `db` names the instance that [`Producer::created`] was called with: keep it with the database, and read it in the transaction that
    /// records the event. An event is *stale* if its instance was replaced by another, or was never created while another one exists. A
    /// stale event is counted ([`StatsSnapshot::stale_events`](crate::node::StatsSnapshot)) and logged, but not delivered. If the bus knows
    /// no instance of the name, it adopts this one, because databases can be older than the bus.
    pub fn updated<T: EventTarget>(&self, transaction: &T, db: &Db) -> T::Receipt {
        self.add(transaction, db, &EventKind::Updated.once().into())
    }

    /// Records that a design document of `db` was written or deleted in this transaction. With its id, readers of
    /// [`NotificationFeed::ddocs`](crate::feed::NotificationFeed::ddocs) learn which one it was. Without an id it may be any design
    /// document, and readers of every design document get the event.
    pub fn ddoc_updated<T: EventTarget>(&self, transaction: &T, db: &Db, id: Option<&DdocId>) -> T::Receipt {
        let tally = Tally { counters: EventKind::DdocUpdated.once(), with_id: id.is_some().into() };
        if let Some(id) = id {
            let partition = Partition::of(db.name.as_str(), self.context.config.partitions);
            let key = self.context.keys.pending_ddoc(partition, db, id);
            transaction.set_versionstamped_value(&key, &stamp_operand());
        }
        self.add(transaction, db, &tally)
    }

    /// Records `counters` of `db` with one `ADD`, however many events they count. Meant for imports, and for callers that collect the
    /// events of a transaction themselves. Updates of design documents are recorded without ids.
    ///
    /// Fails with [`Error::Invalid`] if a kind has more than 2^32 − 1 events; in that case nothing is recorded.
    pub fn record_all<T: EventTarget>(
        &self,
        transaction: &T,
        db: &Db,
        counters: &Counters,
    ) -> Result<T::Receipt> {
        if let Some(lane) = counters.lanes().into_iter().find(|&lane| lane > ADDED_MAX) {
            let reason =
                format!("{lane} events of a kind are more than the {ADDED_MAX} that can be recorded at once");
            return Err(Error::invalid("counters", reason));
        }
        Ok(self.add(transaction, db, &Tally::from(*counters)))
    }

    fn add<T: EventTarget>(&self, transaction: &T, db: &Db, tally: &Tally) -> T::Receipt {
        let Context { keys, config, .. } = &*self.context;
        let partition = Partition::of(db.name.as_str(), config.partitions);
        let slot = (transaction.spread() % u64::from(self.options.slots)) as u16;
        transaction.add(keys.counters(partition, db, slot), tally);
        if self.options.record_versionstamps {
            transaction.set_versionstamped_value(&keys.last_update(partition, db, slot), &stamp_operand());
        }
        transaction.receive(Receipt::new(Arc::clone(&self.context), partition))
    }
}
