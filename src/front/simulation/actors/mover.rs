//! The operator who moves the bus to another store, after everybody else has stopped.

use std::{sync::Arc, time::Duration};

use crate::{
    base::{
        encoding::Incarnation,
        error::{Error, Result},
    },
    bus::{Bus, BusOptions, ExportOptions},
    front::simulation::{
        draw::{RelocationPlan, Way},
        event::Event,
        guarantee::Guarantee,
        issuer::Issuer,
        keyspace::BUS_PREFIX,
        relocation::{rows_of_bus, wipe},
        shared::Shared,
        witness::Witness,
    },
    state::keys::Keys,
    store::{Backend, Database},
};

/// How long the operator waits after a failure before the next attempt.
const PAUSE: Duration = Duration::from_millis(300);

/// The longest pause before somebody tries again to open a bus that is being imported.
const OPEN_PAUSE: Duration = Duration::from_millis(5);

/// The operator, in one life of the process.
pub(in crate::front::simulation) struct Mover {
    pub shared: Arc<Shared>,
    pub issuer: Issuer,
    pub plan: RelocationPlan,
    /// The store from which the bus moves.
    pub old: Database,
    /// The store to which it moves.
    pub new: Database,
    /// The same store without the network, to check that nothing was left in it.
    pub engine: Arc<dyn Backend>,
}

impl Mover {
    /// Moves the bus, and tries again until it has moved.
    pub async fn run(self) {
        let before = self.shared.oracle().incarnation();
        loop {
            let moved = match self.plan.way {
                Way::Export => self.carry(before).await,
                Way::Raise => self.raise(before).await,
            };
            match moved {
                Ok(()) => break,
                Err(error) => self.note(|| format!("could not move the bus: {error}")),
            }
            self.new.env().sleep(PAUSE).await;
        }
        self.shared.time.after(Duration::ZERO, Event::Moved);
    }

    /// Raises the incarnation in the copy of the whole store.
    async fn raise(&self, before: Incarnation) -> Result<()> {
        let raised = Bus::raise_incarnation(&self.new, BUS_PREFIX, before, false).await;
        self.judge_refusal(&raised);
        raised.map(|_| ())
    }

    /// Exports the bus, and imports it.
    async fn carry(&self, before: Incarnation) -> Result<()> {
        match Bus::stored_incarnation(&self.new, BUS_PREFIX).await {
            Ok(found) if found > before => return Ok(()),
            Ok(_) => {
                self.note(|| "somebody has opened a new bus at the new actor, which is removed".to_owned());
                wipe(&*self.engine);
            }
            Err(_) => {}
        }
        let (mut bytes, options) = (Vec::new(), ExportOptions::default());
        let bus = Bus::open_existing(&self.old, BUS_PREFIX).await?;
        let exported = bus.export(&mut bytes, options).await;
        self.judge_refusal(&exported);
        self.note(|| format!("has exported {exported:?}"));
        exported?;
        if self.plan.is_damaged && self.random(2) == 0 {
            self.import_damaged(bytes.clone()).await;
        }
        let (mut input, done) = (&bytes[..], parking_lot::Mutex::new(false));
        let import = async {
            let imported = Bus::import(&self.new, BUS_PREFIX, &mut input).await;
            *done.lock() = true;
            imported
        };
        let (imported, ()) = tokio::join!(import, async {
            while self.plan.is_hasty && !*done.lock() {
                self.open_early().await;
            }
        });
        match imported {
            // The bus may be there in spite of the error.
            Err(error) => match Bus::stored_incarnation(&self.new, BUS_PREFIX).await {
                Ok(found) if found > before => Ok(()),
                _ => Err(error),
            },
            Ok(()) => Ok(()),
        }
    }

    /// Imports an export that is cut off, or has another byte. That must fail, and leave nothing.
    async fn import_damaged(&self, mut bytes: Vec<u8>) {
        let at = self.random(bytes.len() as u64) as usize;
        if self.random(2) == 0 {
            bytes.truncate(at);
        } else {
            bytes[at] ^= 1 << self.random(8);
        }
        let (faults, before) = (self.shared.faults_count(), rows_of_bus(&*self.engine));
        let imported = Bus::import(&self.new, BUS_PREFIX, &mut &bytes[..]).await;
        self.note(|| format!("has imported a damaged export: {imported:?}"));
        match imported {
            Ok(()) => self.broken("a damaged export was imported".to_owned()),
            Err(
                Error::Invalid { .. } | Error::OtherFormat { .. } | Error::Corrupt { .. } | Error::Io { .. },
            ) => {
                self.shared.witness(Witness::DamagedExportRefused);
            }
            Err(_) => {}
        }
        let left = rows_of_bus(&*self.engine);
        // The mark shows that a fault has kept rows from being removed.
        let mark = Keys::new(BUS_PREFIX).expect("the prefix is short").import_mark();
        let is_marked = self.shared.faults_count() > faults && left.contains_key(&mark[..]);
        // A late commit of an earlier import may have left its mark, and this one may have failed before it began.
        if !left.is_empty() && left != before && !is_marked {
            self.broken(format!("an import has failed, and {} rows are left", left.len()));
        }
    }

    /// Tries to open the bus before it is there. The oracle judges whether one begins.
    async fn open_early(&self) {
        self.new.env().sleep(OPEN_PAUSE / (1 + self.random(1_000) as u32)).await;
        let mark = Keys::new(BUS_PREFIX).expect("the prefix is short").import_mark();
        if !rows_of_bus(&*self.engine).contains_key(&mark[..]) {
            return;
        }
        let options = BusOptions {
            prefix: BUS_PREFIX.to_vec(),
            partitions: self.shared.plan.partitions,
            ..BusOptions::default()
        };
        let opened = if self.random(2) == 0 {
            Bus::open(&self.new, options).await
        } else {
            Bus::open_existing(&self.new, BUS_PREFIX).await
        };
        if let Err(Error::ImportUnderWay { .. }) = opened {
            self.shared.witness(Witness::OpenRefusedDuringImport);
        }
    }

    /// No process works with the bus, so no call may be refused because of one.
    fn judge_refusal<T>(&self, result: &Result<T>) {
        if let Err(error @ (Error::BusInUse { .. } | Error::Invalid { .. })) = result {
            self.broken(format!("nobody works with the bus, and its move is refused: {error}"));
        }
    }

    fn broken(&self, reason: String) {
        self.shared.fail(Guarantee::Moved.broken(reason));
    }

    fn random(&self, end: u64) -> u64 {
        self.new.env().random() % end.max(1)
    }

    fn note(&self, line: impl FnOnce() -> String) {
        let Issuer { process, generation } = self.issuer;
        self.shared.note(|| format!("the operator, {process}.{generation}, {}", line()));
    }
}
