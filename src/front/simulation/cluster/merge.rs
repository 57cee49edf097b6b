//! [`Merge`]: informs the oracle of what the log of commits and the notes of the processes say, in one order.

use std::{
    collections::{BTreeMap, VecDeque},
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use parking_lot::Mutex;

use super::Cluster;
use crate::{
    base::error::{Error, Result},
    front::simulation::{
        commits::{ready, touch},
        findings::Findings,
        flight::{Flight, FlightState, Touched},
        issuer::Issuer,
        log::{self, LoggedCommit},
        notes,
        oracle::{HistoryEvent, Oracle},
        time::{Time, true_time},
    },
    store::{Backend, Database, Isolation, KeyRange, RangeRead},
};

/// A note: it comes after all commits up to its version.
type Note = (u64, HistoryEvent);

/// What a world on a cluster has done so far, for the oracle.
pub(super) struct Merge {
    pub oracle: Oracle,
    folder: PathBuf,
    /// The lives of processes, and how many bytes of the notes of each were read.
    lives: BTreeMap<Issuer, usize>,
    /// Notes that wait for the commits before them, by version; those of a process in their order.
    waiting: VecDeque<Note>,
    /// What the oracle calls the readers that the processes have numbered.
    readers: BTreeMap<u64, u64>,
    /// The end of the log, as far as it was read.
    read_to: Bytes,
    /// The rows that follow from the log.
    values: Arc<dyn Backend>,
}

impl Merge {
    /// Nothing yet.
    pub fn new(oracle: Oracle, folder: &Path, time: &Time) -> Self {
        Self {
            oracle,
            folder: folder.to_owned(),
            lives: BTreeMap::new(),
            waiting: VecDeque::new(),
            readers: BTreeMap::new(),
            read_to: Bytes::from_static(log::PREFIX),
            values: Database::memory_backend(true_time(time)),
        }
    }

    /// From now on the notes of `issuer` are read.
    pub fn begins(&mut self, issuer: Issuer) {
        self.lives.insert(issuer, 0);
    }

    /// `issuer` is dead, and the store was at `version` afterwards.
    pub fn crashed(&mut self, issuer: Issuer, version: u64) -> Result<()> {
        self.read_notes()?;
        self.lives.remove(&issuer);
        self.waiting.push_back((version, HistoryEvent::Crashed { by: issuer.into() }));
        Ok(())
    }

    /// Informs the oracle of everything that the cluster has by now.
    pub fn advance(&mut self, findings: &Findings, cluster: &Cluster<'_>) -> Result<()> {
        let (rows, version) = cluster.runtime.block_on(read_log(&cluster.db, &self.read_to))?;
        if let Some((last, _)) = rows.last() {
            self.read_to = [last, &b"\0"[..]].concat().into();
        }
        self.read_notes()?;
        self.waiting.make_contiguous().sort_by_key(|(version, _)| *version);
        for commit in log::read(rows)? {
            self.inform(findings, commit.stamp.version() - 1)?;
            self.commit(findings, commit);
        }
        self.inform(findings, version)
    }

    /// Reads what was noted since the last time.
    fn read_notes(&mut self) -> Result<()> {
        for (issuer, from) in &mut self.lives {
            let (noted, to) = notes::read(&self.folder, *issuer, *from)
                .map_err(|error| Error::invalid("notes", error.to_string()))?;
            self.waiting.extend(noted);
            *from = to;
        }
        Ok(())
    }

    /// Informs the oracle of the notes up to `version`.
    fn inform(&mut self, findings: &Findings, version: u64) -> Result<()> {
        while let Some((_, mut seen)) = self.waiting.pop_front_if(|(at, _)| *at <= version) {
            self.name(&mut seen);
            seen.apply(&mut self.oracle, findings, &mut BTreeMap::new())?;
        }
        Ok(())
    }

    /// Gives the readers in `seen` the names that the oracle has for them.
    fn name(&mut self, seen: &mut HistoryEvent) {
        let next = self.oracle.next_reader();
        match seen {
            HistoryEvent::Subscribed { id, .. } | HistoryEvent::Followed { id, .. } => {
                self.readers.insert(*id, next);
                *id = next;
            }
            HistoryEvent::SubscribedDurably { id, cursor, .. } => {
                let known = self.oracle.durable(cursor).unwrap_or(next);
                self.readers.insert(*id, known);
                *id = known;
            }
            HistoryEvent::Observed { group, generation, .. } => {
                *generation = self.oracle.generation(&group.0);
            }
            _ => {
                if let Some(id) = seen.reader_mut() {
                    *id = self.readers.get(id).copied().unwrap_or(*id);
                }
            }
        }
    }

    /// Has the oracle judge a commit.
    fn commit(&mut self, findings: &Findings, commit: LoggedCommit) {
        let LoggedCommit { issuer, stamp, mutations } = commit;
        let [before, tx] = [self.values.begin(), self.values.begin()];
        ready(before.read_version()).expect("the engine can always be read");
        let mut touched = Touched::new();
        for mutation in &mutations {
            touch(&*before, mutation, &mut touched);
            tx.mutate(mutation.clone());
        }
        ready(tx.commit()).expect("nobody else writes to it");
        let state = Mutex::new(FlightState::Under { is_awaited: false, waker: None });
        let (engine, inner) = (Arc::clone(&self.values), Arc::from(tx));
        let flight = Flight { engine, inner, mutations, issuer, is_late: false, is_sure: true, state };
        flight.judge((findings, &mut self.oracle), (&*before, &*self.values.begin()), touched, stamp);
    }

    /// The rows that follow from the log.
    pub fn values(&self) -> &Arc<dyn Backend> {
        &self.values
    }
}

/// The rows of the log from `from` on, and the version up to which these are all.
async fn read_log(db: &Database, from: &Bytes) -> Result<(Vec<(Bytes, Bytes)>, u64)> {
    let (mut rows, mut version) = (Vec::new(), 0);
    let end = KeyRange::prefix(log::PREFIX).end;
    let mut rest = Some(RangeRead::new(KeyRange::new(from.clone(), end)));
    while let Some(read) = rest {
        // One long transaction would be too old before its end.
        let tx = db.backend().begin();
        version = tx.read_version().await?;
        let page = tx.get_range(&read, Isolation::Snapshot).await?;
        rest = read.after(&page);
        rows.extend(page.rows);
    }
    Ok((rows, version))
}
