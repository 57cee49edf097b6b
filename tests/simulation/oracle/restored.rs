//! The oracle for restores: the store is as it was when the copy was taken, and so is what the oracle knows about it. Everything outside
//! the store continues: new processes, and HTTP clients, some of which are at positions that the store never had.

use notibus::{
    cursor::{Cursor, Knowledge},
    event::{Incarnation, Sequence},
};

use super::Oracle;

/// How the store was replaced with a copy.
pub(crate) struct Restored {
    /// The version of the copy, and the version from which the store continues.
    pub versions: (u64, u64),
    /// Readers at or before this position continue.
    pub kept: Sequence,
    /// Readers past this position have seen rows that were lost.
    pub lost: Sequence,
    /// The incarnation of the rows that are written from now on.
    pub incarnation: Incarnation,
    /// Whether the store's versions are behind those in its rows (`Error::OlderThanRows`).
    pub is_older: bool,
}

/// What happens to the position that a reader had before a restore.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Fate {
    #[default]
    Kept,
    /// The position may be refused: nothing before it was lost, but the store need not know that.
    Either,
    /// The position must be refused.
    Lost,
}

impl Fate {
    /// Returns the fate of the position whose text is `since`.
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
    /// Whether the store's versions are behind those in its rows (`Error::OlderThanRows`).
    pub fn is_older(&self) -> bool {
        self.is_older
    }

    /// Records that the store is as it was when `copy` was made, and that all processes crashed.
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
        // Times are versions. They are shifted as if no time had passed since the copy.
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

    /// Records that the incarnation was raised after `version`, so that no nodes are left.
    pub fn raised(&mut self, version: u64) {
        self.is_older = false;
        for members in self.members.values_mut().filter(|members| !members.nodes.is_empty()) {
            members.nodes.clear();
            members.alive = version;
        }
    }
}
