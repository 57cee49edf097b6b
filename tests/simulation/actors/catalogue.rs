//! A catalogue of all databases, kept up to date by a series of parallel jobs.

use std::{collections::BTreeMap, sync::Arc};

use notibus::{
    Error, Result,
    consumer::{ParallelBatch, ParallelJob, ParallelJobOptions},
    cursor::Cursor,
    event::{DbName, Notification, Sequence},
};
use parking_lot::Mutex;

use super::context::ActorContext;
use crate::{
    oracle::{Interest, Which},
    shared::Phase,
    witness::Witness,
};

/// The newest row of each database. Tombstones are kept, because an older batch can be delivered again.
type Rows = Arc<Mutex<BTreeMap<DbName, Arc<Notification>>>>;

pub(super) struct Catalogue {
    actor: ActorContext,
    rows: Rows,
    /// Where the next job begins.
    cursor: Cursor,
}

impl Catalogue {
    pub fn new(actor: &ActorContext) -> Self {
        Self { actor: actor.clone(), rows: Rows::default(), cursor: Cursor::BEGINNING }
    }

    /// Runs jobs in sequence until the end. In some worlds the pauses between them are longer than the retention of tombstones.
    pub async fn run(mut self) {
        let pause_ms = [100, 1_000, 4_000][self.actor.random(3) as usize];
        while self.actor.phase() != Phase::End {
            tokio::select! {
                biased;
                () = self.actor.until_the_end() => break,
                () = self.actor.pause(pause_ms) => {}
            }
            if let Err(error) = self.update().await {
                self.actor.note(|| format!("a job of a catalogue has failed: {error}"));
            }
        }
        if self.actor.shared.phase() == Phase::End {
            self.judge_at_rest().await;
        }
    }

    /// Works on everything that is new. Returns `false` if the job expired; then the next job starts from nothing.
    async fn update(&mut self) -> Result<bool> {
        let Self { actor, rows, cursor } = self;
        let options = ParallelJobOptions::default().batch_rows_max(1 + actor.random(3) as usize);
        let job = ParallelJob::new(actor.bus.feed(), *cursor).with_options(options);
        let known = Arc::clone(rows);
        let work = move |batch: ParallelBatch<Notification>| {
            let mut known = known.lock();
            for row in batch.rows {
                let newest = known.entry(row.name.clone()).or_insert_with(|| Arc::clone(&row));
                if newest.sequence < row.sequence {
                    *newest = row;
                }
            }
            std::future::ready(Ok(()))
        };
        match job.run(work).await {
            Ok(to) => {
                *cursor = to;
                Ok(true)
            }
            Err(Error::Expired { .. }) => {
                actor.shared.witness(Witness::CatalogueExpired);
                rows.lock().clear();
                *cursor = Cursor::BEGINNING;
                Ok(false)
            }
            Err(error) => {
                // If this job started from nothing, so does the next one, which does not report what was deleted in between.
                if *cursor == Cursor::BEGINNING {
                    rows.lock().clear();
                }
                Err(error)
            }
        }
    }

    /// Brings the catalogue up to date once everything is at rest. It must then show exactly the databases that exist.
    async fn judge_at_rest(&mut self) {
        let shared = Arc::clone(&self.actor.shared);
        loop {
            match self.update().await {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => {
                    return shared.fail(format!("a catalogue cannot be brought up to date: {error}"));
                }
            }
        }
        let rows = self.rows.lock();
        let living = rows.values().filter(|row| !row.is_deleted());
        let judged = shared.oracle().judge_mirror(&Interest::of(Which::All), living, Sequence::MAX);
        if let Err(broken) = judged {
            shared.fail(broken.about("a catalogue".to_owned()));
        }
    }
}
