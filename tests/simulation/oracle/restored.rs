//! The oracle on restores: the store is as it was when the copy was taken, and so is what the oracle knows of it. What is outside of the
//! store goes on: the processes, which are other ones, and clients over HTTP, some of which stand where the store has never been.

use notibus::{
    cursor::{Cursor, Knowledge},
    event::{Incarnation, Sequence},
};

use super::Oracle;

/// How a copy was put in the place of the store.
pub(crate) struct Restored {
    /// The version of the copy, and the one with which the store goes on.
    pub versions: (u64, u64),
    /// Readers up to here go on.
    pub kept: Sequence,
    /// Readers behind this know what is lost.
    pub lost: Sequence,
    /// The incarnation of the rows that are written from now on.
    pub incarnation: Incarnation,
    /// Whether the store stands before its own rows.
    pub is_older: bool,
}

/// What becomes of the position that a reader had before a restore.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Fate {
    #[default]
    Kept,
    /// It may be refused: nothing that was lost is before it, which the store need not know.
    Either,
    /// It has to be refused.
    Lost,
}

impl Fate {
    /// The fate of the position that is written as `since`.
    fn of(since: &str, restored: &Restored) -> Self {
        let Ok(cursor) = since.parse::<Cursor>() else { return Self::Kept };
        let known = match cursor.knowledge() {
            Knowledge::Nothing => None,
            Knowledge::UpTo(known) => Some(known),
        };
        let at = known.max(cursor.began()).max(cursor.readable()).unwrap_or_default().max(cursor.position());
        if at > restored.lost {
            Self::Lost
        } else if at > restored.kept {
            Self::Either
        } else {
            Self::Kept
        }
    }
}

impl Oracle {
    /// Whether the store stands before its own rows.
    pub fn is_older(&self) -> bool {
        self.is_older
    }

    /// The store is as it was when `copy` was made, and all processes have crashed.
    pub fn restored(&mut self, copy: Self, restored: &Restored) {
        let now = std::mem::replace(self, copy);
        self.web_clients = now.web_clients;
        (self.nodes, self.next_reader) = (now.nodes, now.next_reader);
        (self.commits, self.consumer_changes) = (now.commits, now.consumer_changes + 1);
        self.subscribers.clear();
        self.followers.clear();
        self.doc_tails.clear();
        self.operations.clear();
        self.runs.values_mut().for_each(|run| run.is_over = true);
        for client in self.web_clients.values_mut() {
            client.fate = Fate::of(&client.since, restored);
        }
        // Times are versions. None has passed between the copy and now.
        let (from, to) = restored.versions;
        let times =
            self.beats.values_mut().chain(self.members.values_mut().map(|members| &mut members.alive));
        for time in times.chain(self.consumers.values_mut().map(|model| &mut model.created)) {
            *time = (*time + to).saturating_sub(from);
        }
        (self.incarnation, self.is_older) = (restored.incarnation, restored.is_older);
        if restored.incarnation > Incarnation(0) {
            self.end = restored.kept;
        }
    }

    /// The incarnation was raised, after `version`: no node is left.
    pub fn raised(&mut self, version: u64) {
        self.is_older = false;
        for members in self.members.values_mut().filter(|members| !members.nodes.is_empty()) {
            members.nodes.clear();
            members.alive = version;
        }
    }
}
