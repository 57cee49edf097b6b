//! What clients of `_db_updates` and `_changes` must still be sent, and what they were sent.
//!
//! A client of `_db_updates` must be sent what a subscriber receives, but with a row for each type, and only `deleted` for a deleted
//! database. The client keeps only the text of a position, from a row, a heartbeat or the end of a feed, and outlives its process.

use std::collections::BTreeSet;

use notibus::{
    cursor::Cursor,
    event::{DbName, EventKind, Kinds, Sequence},
};

use super::{
    Oracle,
    account::{Account, Wants},
    commit::Verdict,
    given::Start,
    models::documents::DocTailId,
    restored::Fate,
};
use crate::{findings::Findings, guarantee::Guarantee, kernel::ProcessId, witness::Witness};

pub(crate) type WebClientId = u64;

/// A client of `_db_updates`.
#[derive(Debug, Clone)]
pub(crate) struct WebClient {
    /// The process that serves the client, and the client's number there.
    slot: (ProcessId, u32),
    kinds: Kinds,
    pub(super) account: Account,
    /// The position from which the client resumes.
    pub(super) since: String,
    /// What a restore did to the client's position, until the client gets an answer.
    pub(super) fate: Fate,
    /// Everything up to here was certainly sent to the client.
    surely: Start,
    /// The rows that were sent in answer to the current request.
    sent: BTreeSet<(Sequence, DbName, EventKind)>,
}

impl Oracle {
    /// Returns the client at `slot`: a process, and a number there. The client may have begun in an earlier life of the process; otherwise
    /// it begins now, and wants `kinds` after `start`.
    pub fn web_client(
        &mut self,
        slot: (ProcessId, u32),
        kinds: Kinds,
        start: Option<Sequence>,
    ) -> WebClientId {
        let known = self.web_client_at(slot);
        let id = known.unwrap_or(self.next_reader + 1);
        if known.is_some() {
            return id;
        }
        self.next_reader += 1;
        let (since, start) = match start {
            Some(start) => (start.to_string(), Start::At(start)),
            None => ("0".to_owned(), Start::Nothing),
        };
        let wants: Wants = self.names.iter().map(|name| (name.clone(), kinds)).collect();
        let account = Account::new(&self.ledger, &wants, start);
        let (surely, fate, sent) = (start, Fate::Kept, BTreeSet::new());
        let client = WebClient { slot, kinds, account, since, fate, surely, sent };
        self.web_clients.insert(self.next_reader, client);
        self.next_reader
    }

    fn web_client_at(&self, slot: (ProcessId, u32)) -> Option<WebClientId> {
        self.web_clients.iter().find(|(_, client)| client.slot == slot).map(|(&id, _)| id)
    }

    /// Begins a request of a client, and returns its position and its types.
    pub fn web_asks(&mut self, id: WebClientId) -> (String, String) {
        let Some(client) = self.web_clients.get_mut(&id) else { return Default::default() };
        client.sent.clear();
        // A client that resumes from a position claims to know the databases that existed at that position.
        if is_plain(&client.since)
            && let Some(known) = position_of(&client.since)
        {
            client.account.stand(&self.ledger, known);
        }
        let types: Vec<_> = client.kinds.iter().map(EventKind::as_str).collect();
        (client.since.clone(), types.join(","))
    }

    /// Judges a row that was sent to a client: the name, the type and the position.
    pub fn web_row(
        &mut self,
        findings: &Findings,
        id: WebClientId,
        (name, kind, seq): (&str, &str, &str),
    ) -> Verdict {
        let name = DbName::new(name).map_err(|error| error.to_string())?;
        let kind = EventKind::ALL.into_iter().find(|of| of.as_str() == kind).ok_or("it is of no type")?;
        let position = position_of(seq).ok_or_else(|| format!("{seq} is no position"))?;
        // The last row sent for a database has the position of the database's row; the rows sent before it have the position just before.
        let found = [position, after(position)].into_iter().enumerate().find_map(|(place, at)| {
            let row = self.past.get(&at).filter(|row| row.name == name)?;
            Some((place > 0, at, row.instance))
        });
        let (is_within, at, instance) =
            found.ok_or_else(|| format!("{seq} is where no row of {name:?} is"))?;
        let was = match kind {
            EventKind::Deleted => {
                self.recorded.iter().any(|(db, counters)| db.name == name && counters.deleted > 0)
            }
            kind => self.ledger.was(&name, instance, kind, at),
        };
        let Some(client) = self.web_clients.get_mut(&id) else { return Ok(()) };
        if !was || !client.kinds.contains(kind) {
            return Guarantee::Truthful.fails(format!("{kind:?} of {name:?} never was, or is not wanted"));
        }
        if client.sent.last().is_some_and(|(last, ..)| *last > at) {
            return Guarantee::Ordered.fails(format!("the row at {at} comes after a later one"));
        }
        if !client.sent.insert((at, name.clone(), kind)) {
            return Guarantee::Unique.fails(format!("{kind:?} of {name:?} at {at} comes twice"));
        }
        if is_within {
            findings.witness(Witness::WebRowsOfOneDatabase);
        }
        let paid = client.account.deliver(&self.ledger, &name, at, kind.into());
        paid.map_err(|reason| Guarantee::Atomic.broken(reason))?;
        self.web_stand(id, seq)
    }

    /// Judges a position that was sent to a client.
    pub fn web_stands(&mut self, id: WebClientId, seq: &str) -> Verdict {
        self.web_stand(id, seq)
    }

    /// Judges and records that a client is at `seq`, with or without a row.
    fn web_stand(&mut self, id: WebClientId, seq: &str) -> Verdict {
        let position = position_of(seq).ok_or_else(|| format!("{seq} is no position"))?;
        if let Some(client) = self.web_clients.get_mut(&id)
            && std::mem::take(&mut client.fate) == Fate::Lost
        {
            let reason = format!("it goes on to {seq} from {}, which was lost", client.since);
            return Guarantee::ExpiredNotSilent.fails(reason);
        }
        // Until a reading is finished, a row that has moved to a later position may still bring earlier events.
        if is_plain(seq)
            && position >= self.horizon
            && let Some(owed) = self.web_is_owed(id, position)
        {
            return Guarantee::Bookmarkable.fails(format!("it stands at {seq}, and is owed {owed}"));
        }
        let Some(client) = self.web_clients.get_mut(&id) else { return Ok(()) };
        seq.clone_into(&mut client.since);
        if is_plain(seq) {
            client.surely = client.surely.max(Start::At(position));
        }
        Ok(())
    }

    /// Judges whether a client's position was rightly refused as too old.
    pub fn web_expired(&mut self, findings: &Findings, id: WebClientId, horizon: Sequence) -> Verdict {
        let real = self.horizon;
        let Some(client) = self.web_clients.get_mut(&id) else { return Ok(()) };
        let surely = std::mem::replace(&mut client.surely, Start::Nothing);
        "0".clone_into(&mut client.since);
        client.account.expire();
        if std::mem::take(&mut client.fate) != Fate::Kept {
            findings.witness(Witness::LostPositionRefused);
            return Ok(());
        }
        match surely {
            Start::At(surely) if surely >= horizon => Guarantee::ExpiredForReason
                .fails(format!("it has expired by {horizon}, and knew everything up to {surely}")),
            _ if horizon > real => Guarantee::ExpiredForReason
                .fails(format!("it has expired by {horizon}, and the horizon is at {real}")),
            _ => Ok(()),
        }
    }

    /// Describes something that happened up to `to` and that a client must still be sent.
    fn web_is_owed(&self, id: WebClientId, to: Sequence) -> Option<String> {
        let client = self.web_clients.get(&id)?;
        // For a deleted database only `deleted` is sent.
        let is_sent = |name: &DbName, kind: EventKind| {
            kind == EventKind::Deleted || self.ledger.existed_at(name, Sequence::MAX)
        };
        client.account.is_owed_of(&self.ledger, to, is_sent)
    }

    pub(super) fn web_clients_owe(&self) -> Option<String> {
        self.web_clients.iter().find_map(|(id, client)| {
            let owed = self.web_is_owed(*id, Sequence::MAX)?;
            Some(format!("client {id} of _db_updates of process {} is owed {owed}", client.slot.0))
        })
    }

    /// Records that a client of `_changes` makes another request, so that rows after its position may be sent again.
    pub fn doc_tail_goes_on(&mut self, id: DocTailId) {
        if let Some(tail) = self.doc_tails.get_mut(&id) {
            tail.at = Sequence::MIN;
        }
    }

    /// Judges a row that was sent to a client of `_changes`: the position, the document's id and revision, and whether it is deleted.
    pub fn web_change(
        &mut self,
        id: DocTailId,
        seq: &str,
        (doc, rev, is_deleted): (&str, &str, bool),
    ) -> Verdict {
        let at = position_of(seq).ok_or_else(|| format!("{seq} is no position"))?;
        let Some(tail) = self.doc_tails.get_mut(&id) else { return Ok(()) };
        // The database may be gone by now, and another one may have taken its name.
        let Some(feed) = self.documents.get(&tail.instance) else { return Ok(()) };
        let is_row = feed.was(at, doc, rev, is_deleted);
        if !is_row || at <= tail.at {
            return Guarantee::Truthful
                .fails(format!("tail {id} was sent {doc} {rev} at {at}, after {}: {is_row}", tail.at));
        }
        tail.take(at);
        Ok(())
    }
}

/// Whether `seq` says only that everything up to it is known, and nothing about an unfinished reading.
fn is_plain(seq: &str) -> bool {
    seq != "0" && !seq.contains('-')
}

/// Returns the position in `seq`, up to which everything was sent.
fn position_of(seq: &str) -> Option<Sequence> {
    Some(seq.parse::<Cursor>().ok()?.position())
}

/// Returns the position directly after `at`.
fn after(at: Sequence) -> Sequence {
    let mut bytes = at.as_bytes().to_vec();
    for byte in bytes.iter_mut().rev() {
        *byte = byte.wrapping_add(1);
        if *byte > 0 {
            break;
        }
    }
    Sequence::from_bytes(&bytes).expect("it has the length of a sequence")
}
