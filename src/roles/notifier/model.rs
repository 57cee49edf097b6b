//! A model of one reader and one name, small enough to explore every order of steps: producers record events, folds take all or only some
//! of the events, tombstones are deleted, and the reader stops within a page, resumes from its stored cursor, gets another filter, and
//! expires.
//!
//! The model uses the real functions: [`fold`] makes the rows; [`Cursor`] and [`Notification::news_since`] decide what is news and whether
//! the reader has expired. The model itself computes what must be delivered to the reader: the newest fact of each kind of the newest
//! instance, and a deletion by name once the reader may know that the name existed.

use std::{
    collections::BTreeMap,
    fmt::{self, Debug},
};

use stateright::{Checker, Model, Property};

use super::algorithm::{Observed, fold};
use crate::base::{
    cursor::Cursor,
    encoding::{Counters, Incarnation, Sequence, Versionstamp},
    event::{DbInstance, DbName, EventKind, Kinds},
    notification::Notification,
};

const KINDS: [EventKind; 3] = [EventKind::Created, EventKind::Deleted, EventKind::Updated];

/// A deliberate mistake that the model must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// A reader that stops within its first scan begins again from `nothing`.
    ScanForgotten,
    /// A reader does not check whether rows that it has not seen may have been deleted.
    HorizonIgnored,
}

/// The size of the model, and its mistake, if any.
struct Reading {
    events: u8,
    folds: u8,
    /// How many times the reader may stop within a page, or get another filter.
    stops: u8,
    mistake: Option<Mistake>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    /// How many events may still be recorded.
    events: u8,
    folds: u8,
    stops: u8,
    /// How many instances were created.
    instances: u8,
    /// Whether the last instance is alive.
    lives: bool,
    /// Unfolded events, by instance and kind.
    waiting: BTreeMap<u8, [u8; 3]>,
    /// The version of the last commit.
    version: u64,
    /// The version of the row, and its stored bytes.
    row: Option<(u64, Vec<u8>)>,
    /// The version up to which rows may have been deleted.
    horizon: u64,
    /// The stored bytes of the cursor.
    cursor: Vec<u8>,
    /// For each row that the name has had: its version, its instance, and whether the database existed then.
    seen: Vec<(u64, u8, bool)>,
    /// The versions at which a visible instance was deleted.
    deletions: Vec<u64>,
    /// The version of the newest event of each kind of the newest instance; 0 if there is none, or its tombstone was deleted.
    newest: [u64; 3],
    /// The version of the newest row that was delivered with each kind.
    delivered: [u64; 3],
    /// The version up to which the reader knows that the name existed; 0 if the reader may not know that.
    known: u64,
}

fn at(version: u64) -> Sequence {
    Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
}

impl State {
    fn row(&self) -> Option<Notification> {
        let (version, bytes) = self.row.as_ref()?;
        Some(Notification::from_bytes(at(*version), bytes).expect("it was written so"))
    }

    fn cursor(&self) -> Cursor {
        Cursor::from_bytes(&self.cursor).expect("it was written so")
    }

    /// Whether the name existed at `version`.
    fn existed_at(&self, version: u64) -> bool {
        self.seen.iter().rev().find(|(at, ..)| *at <= version).is_some_and(|(.., lives)| *lives)
    }

    /// Returns the first deletion up to `to` that the reader must still get.
    fn owed_deletion(&self, to: u64) -> Option<u64> {
        let after = self.known.max(self.delivered[1]);
        self.deletions.iter().copied().find(|at| self.known > 0 && *at > after && *at <= to)
    }

    fn record(&mut self, instance: u8, kind: usize) {
        self.events -= 1;
        self.waiting.entry(instance).or_default()[kind] += 1;
    }

    /// Folds the waiting events of `instances`.
    fn fold(&mut self, instances: &[u8]) {
        let observed = instances.iter().map(|instance| {
            let [created, deleted, updated] = self.waiting[instance].map(u64::from);
            let counters = Counters { created, deleted, updated, ddoc_updated: 0 };
            (DbInstance([*instance; 16]), Observed { tally: counters.into(), ..Observed::default() })
        });
        let name = DbName::new("db").expect("it is short");
        let folded = fold(&name, self.row(), observed.collect(), 0);
        let taken: BTreeMap<_, _> = instances
            .iter()
            .map(|instance| (*instance, self.waiting.remove(instance).unwrap_or_default()))
            .collect();
        self.folds -= 1;
        self.version += 1;
        let Some(row) = folded.row else { return };
        let instance = row.instance.0[0];
        let kinds = taken.get(&instance).copied().unwrap_or_default();
        let before = self.seen.last().copied();
        if let Some((_, of, lived)) = before.filter(|(_, of, _)| *of != instance) {
            self.newest = [0; 3];
            if lived && of != instance {
                self.deletions.push(self.version);
            }
        }
        for (newest, count) in self.newest.iter_mut().zip(kinds) {
            if count > 0 {
                *newest = self.version;
            }
        }
        if kinds[1] > 0 && self.deletions.last() != Some(&self.version) {
            self.deletions.push(self.version);
        }
        let was_gone = before.is_some_and(|(_, of, lived)| of == instance && !lived);
        self.seen.push((self.version, instance, kinds[1] == 0 && !was_gone));
        self.row = Some((self.version, row.to_bytes()));
    }

    /// Delivers the row at `version` to a reader whose reading began at `cursor`. Fails if a deletion is missing.
    fn deliver(&mut self, row: &Notification, version: u64, cursor: Cursor) -> Result<(), String> {
        let news: Kinds = row.news_since(cursor).iter().map(|(_, kind)| kind).collect();
        if let Some(due) = self.owed_deletion(version).filter(|_| !news.contains(EventKind::Deleted)) {
            return Err(format!("a row at {version} comes without the deletion of {due}"));
        }
        for (delivered, kind) in self.delivered.iter_mut().zip(KINDS) {
            if news.contains(kind) {
                *delivered = version;
            }
        }
        self.known = if self.existed_at(version) { version } else { 0 };
        Ok(())
    }

    /// Fails if the reader has reached the end but has not received everything.
    fn judge_end(&mut self) -> Result<(), String> {
        if let Some(due) = self.owed_deletion(self.version) {
            return Err(format!("the deletion of {due} was never delivered"));
        }
        for ((delivered, newest), kind) in self.delivered.iter().zip(self.newest).zip(KINDS) {
            if *delivered < newest {
                return Err(format!("{kind:?} of {newest} was never delivered"));
            }
        }
        if self.existed_at(self.version) {
            self.known = self.known.max(1);
        }
        Ok(())
    }
}

/// Where a page ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Before,
    /// Right after the row, before the end of the feed.
    Behind,
    Complete,
}

impl Reading {
    /// Lets the reader read a page. Fails if a delivery is missing; returns `None` if no page can end at `end`.
    fn read(&self, state: &State, end: End) -> Option<Result<State, String>> {
        let mut next = state.clone();
        let cursor = state.cursor();
        let is_expired = cursor.check(at(state.horizon)).is_err();
        if is_expired && self.mistake != Some(Mistake::HorizonIgnored) {
            next.cursor = Cursor::BEGINNING.to_bytes();
            (next.delivered, next.known) = ([0; 3], 0);
            return Some(Ok(next)).filter(|_| end == End::Complete);
        }
        let begun = cursor.begin(at(state.version));
        let row = state.row.as_ref().map(|(version, _)| *version).filter(|at_| at(*at_) > begun.position());
        if end == End::Complete {
            next.cursor = Cursor::from(at(state.version)).to_bytes();
        } else {
            if state.stops == 0 {
                return None;
            }
            next.stops -= 1;
            let version = row?;
            let stands = if end == End::Behind { at(version) } else { at(version).before() };
            if stands <= begun.position() && begun.position() != Sequence::MIN {
                return None;
            }
            next.cursor = match self.mistake {
                Some(Mistake::ScanForgotten) if begun.knew_nothing() => Cursor::BEGINNING,
                _ => begun.at(stands),
            }
            .to_bytes();
        }
        let mut judged = Ok(());
        if let Some(version) = row.filter(|_| end != End::Before) {
            judged = next.deliver(&state.row().expect("it is there"), version, begun);
        }
        if end == End::Complete {
            judged = judged.and_then(|()| next.judge_end());
        }
        Some(judged.map(|()| next))
    }
}

impl Reading {
    fn start(&self) -> State {
        State {
            events: self.events,
            folds: self.folds,
            stops: self.stops,
            instances: 0,
            lives: false,
            waiting: BTreeMap::new(),
            version: 1,
            row: None,
            horizon: 0,
            cursor: Cursor::BEGINNING.to_bytes(),
            seen: Vec::new(),
            deletions: Vec::new(),
            newest: [0; 3],
            delivered: [0; 3],
            known: 0,
        }
    }

    /// Returns the possible steps in `state`, each with a name and the next state. The state of a step that must never happen is an error.
    fn steps(&self, state: &State) -> Vec<(String, Result<State, String>)> {
        let mut steps = Vec::new();
        if state.events > 0 {
            let mut next = state.clone();
            let (name, kind) = if state.lives { ("is deleted", 1) } else { ("is created", 0) };
            next.instances += u8::from(!state.lives);
            next.lives = !state.lives;
            let instance = next.instances;
            next.record(instance, kind);
            steps.push((format!("{instance} {name}"), Ok(next)));
            if state.lives {
                let mut next = state.clone();
                next.record(state.instances, 2);
                steps.push((format!("{} is updated", state.instances), Ok(next)));
            }
        }
        if state.folds > 0 && !state.waiting.is_empty() {
            let all: Vec<_> = state.waiting.keys().copied().collect();
            let mut next = state.clone();
            next.fold(&all);
            steps.push(("all waiting events are folded".to_owned(), Ok(next)));
            // A name whose tombstone was deleted has no waiting events.
            if all.len() > 1 && state.horizon == 0 {
                for instance in all {
                    let mut next = state.clone();
                    next.fold(&[instance]);
                    steps.push((format!("events of {instance} are folded"), Ok(next)));
                }
            }
        }
        if let Some(row) = state.row().filter(|row| row.is_deleted() && state.waiting.is_empty()) {
            let mut next = state.clone();
            next.horizon = row.sequence.versionstamp().version();
            (next.row, next.newest) = (None, [0; 3]);
            steps.push(("the tombstone is deleted".to_owned(), Ok(next)));
        }
        for end in [End::Before, End::Behind, End::Complete] {
            if let Some(read) = self.read(state, end) {
                steps.push((format!("a page that ends {end:?} is read"), read));
            }
        }
        if state.stops > 0 {
            let mut next = state.clone();
            next.stops -= 1;
            let rewound = match self.mistake {
                Some(Mistake::ScanForgotten) if state.cursor().knew_nothing() => Cursor::BEGINNING,
                _ => state.cursor().rewound(),
            };
            next.cursor = rewound.to_bytes();
            steps.push(("the filter is replaced".to_owned(), Ok(next)));
        }
        steps
    }
}

/// A step, and the state that it leads to.
#[derive(Clone, PartialEq)]
struct Step {
    name: String,
    to: Result<State, String>,
}

impl Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// A state is an error if the step to it must never happen.
impl Model for Reading {
    type State = Result<State, String>;
    type Action = Step;

    fn init_states(&self) -> Vec<Self::State> {
        vec![Ok(self.start())]
    }

    fn actions(&self, state: &Self::State, actions: &mut Vec<Step>) {
        let steps = state.as_ref().map(|state| self.steps(state)).unwrap_or_default();
        actions.extend(steps.into_iter().map(|(name, to)| Step { name, to }));
    }

    fn next_state(&self, _: &Self::State, step: Step) -> Option<Self::State> {
        Some(step.to)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("promised", |_, state: &Self::State| state.is_ok())]
    }
}

/// Returns how many states the model can reach. Fails with the shortest steps to a state that must not exist, and what is wrong there.
fn explore(model: Reading) -> Result<usize, (Vec<String>, String)> {
    let checker = model.checker().spawn_bfs().join();
    let Some(way) = checker.discovery("promised") else {
        return Ok(checker.unique_state_count());
    };
    let wrong = way.last_state().clone().expect_err("the checker has found what is wrong");
    Err((way.into_actions().into_iter().map(|step| step.name).collect(), wrong))
}

/// A model that is small enough for every build.
const SMALL: Reading = Reading { events: 5, folds: 4, stops: 2, mistake: None };

#[test]
fn a_reader_gets_every_delivery_or_expires() {
    let states = explore(SMALL).unwrap_or_else(|(steps, reason)| panic!("{reason}: {steps:#?}"));
    println!("{states} states");
    assert!(states > 1_000, "{states} states are few");
}

#[test]
fn mistakes_are_found() {
    for mistake in [Mistake::ScanForgotten, Mistake::HorizonIgnored] {
        let found = explore(Reading { mistake: Some(mistake), ..SMALL });
        let (steps, reason) = found.expect_err("a mistake is found");
        println!("{mistake:?}: {reason}, after {steps:?}");
        assert!(reason.contains("deletion"), "{mistake:?}: {reason}");
    }
}
