//! An oracle that only notes what it is informed of: on a cluster, a process does not see the commits of the others, and another one
//! judges.

use std::sync::Arc;

use super::{Oracle, given::Start, history::HistoryEvent};
use crate::{
    base::error::Result,
    front::simulation::{issuer::Issuer, notes::Notes},
};

impl Oracle {
    /// Notes from now on what `issuer` informs it of, and judges nothing of that. In its earlier lives the process has noted what is in
    /// `before`: it still has its durable subscribers.
    pub fn note_in(&mut self, notes: Notes, issuer: Issuer, before: Vec<HistoryEvent>) -> Result<Arc<Notes>> {
        for seen in before {
            match seen {
                HistoryEvent::SubscribedDurably { id, by, cursor, interest, manner }
                    if self.durable(&cursor).is_none() =>
                {
                    self.next_reader = id - 1;
                    self.add_subscriber(by.into(), interest.read()?, manner, Start::Nothing);
                    self.subscribers.get_mut(&id).expect("it was just added").cursor = Some(cursor);
                }
                HistoryEvent::Replaced { id, interest, .. } => {
                    if let Some(subscriber) = self.subscribers.get_mut(&id) {
                        subscriber.interest = interest.read()?;
                    }
                }
                _ => {}
            }
        }
        // Nobody else numbers readers so.
        self.next_reader = (issuer.process as u64 + 1) << 40 | issuer.generation << 24;
        let notes = Arc::new(notes);
        self.notes = Some(Arc::clone(&notes));
        Ok(notes)
    }

    /// Whether another one judges.
    pub(super) fn is_noting(&self) -> bool {
        self.notes.is_some()
    }

    /// The number of the next reader.
    pub fn next_reader(&self) -> u64 {
        self.next_reader + 1
    }
}
