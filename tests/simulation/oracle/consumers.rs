//! The oracle on consumers. It sees the rows of the feed, what handlers write, the checkpoints and the keys of ids, and knows nothing of
//! how they come about:
//!
//! - what a consumer has passed is finished, unwanted, or has a key by which it is still to be done;
//! - the effects of a transaction that finishes work happen once for each row, unless somebody has asked for them again;
//! - nobody writes without the lease of the shard, after the next run of the id has begun, or while the consumer is paused;
//! - no row is worked on after a newer one of its id was finished, and no database after its end was learned;
//! - who has worked on a database learns that it has ended before anything is worked on for the next one of the name.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use notibus::{
    consumer::FencingToken,
    cursor::{Cursor, Knowledge},
    event::{DbName, Kinds, Notification, Sequence},
    feed::ShardId,
    test_util::inspect,
};

use super::{
    Oracle, Placed,
    commit::{ObservedCommit, StoredChanges, Verdict},
    given::Start,
    models::consumer::{ConsumerModel, Progress, Run, RunId, Told, is_news},
    stored_item::StoredItem,
};
use crate::{
    app::{self, AppKey},
    draw::ConsumerPlan,
    findings::Findings,
    guarantee::Guarantee,
    witness::Witness,
};

/// The pool of the shards of `consumer`.
fn pool(consumer: &str) -> String {
    format!("consumer/{consumer}")
}

impl Oracle {
    /// From now on there are these consumers.
    pub fn expect_consumers(&mut self, plans: &[ConsumerPlan]) {
        self.consumer_plans = plans.iter().map(|plan| (plan.name.clone(), plan.clone())).collect();
    }

    /// A handler of `consumer` is called. Returns the number of the run.
    pub fn run_began(
        &mut self,
        consumer: &str,
        (token, shard): (FencingToken, ShardId),
        told: Vec<Told>,
    ) -> RunId {
        self.next_reader += 1;
        let run = self.next_reader;
        for of in &told {
            let last = self.last_runs.entry((consumer.to_owned(), of.id.clone())).or_insert((token, run));
            *last = (*last).max((token, run));
        }
        let began = self.commits;
        self.runs.insert(run, Run { token, shard, told, began });
        run
    }

    /// Judges the changes of a commit to consumers.
    pub(super) fn judge_consumers(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
    ) -> Verdict {
        self.commits += 1;
        if self.consumer_plans.is_empty() {
            return Ok(());
        }
        let (set, mut touched) = (self.take_consumers(findings, items)?, BTreeSet::new());
        for (item, change) in items {
            if let (StoredItem::App(AppKey::Worked(consumer, id)), Some(value)) = (item, &change.after) {
                let id = String::from_utf8_lossy(id).into_owned();
                self.judge_work_of_consumer(findings, seen, (consumer, &id), value)?;
                touched.insert(consumer.clone());
            }
        }
        let shards = |model: &ConsumerModel| model.checkpoints.keys().copied().collect();
        let read: BTreeMap<String, Vec<ShardId>> =
            self.consumers.iter().map(|(name, model)| (name.clone(), shards(model))).collect();
        for (item, change) in items {
            match item {
                StoredItem::Consumer(name) => drop(touched.insert(name.clone())),
                StoredItem::ConsumerCheckpoint(name, shard) => {
                    touched.insert(name.clone());
                    let position = |value: &Option<Bytes>| {
                        value.as_ref().map(|value| Cursor::from_bytes(value)).transpose()
                    };
                    let (before, after) = (position(&change.before), position(&change.after));
                    let (before, after) = (
                        before.map_err(|error| error.to_string())?,
                        after.map_err(|error| error.to_string())?,
                    );
                    self.judge_consumer_checkpoint(
                        seen,
                        (name, *shard),
                        (before, after),
                        (set.contains(name), read.get(name)),
                    )?;
                }
                StoredItem::LowWatermark(name) => {
                    touched.insert(name.clone());
                    let low = change.after.as_ref().map(|value| Sequence::from_bytes(value)).transpose();
                    let low = low.map_err(|error| error.to_string())?;
                    let Some(model) = self.consumers.get_mut(name) else {
                        if low.is_some() {
                            return Guarantee::Kept.fails(format!("{name} is gone, and has a low watermark"));
                        }
                        continue;
                    };
                    model.low = low;
                    if low > model.checkpoints.values().min().copied() {
                        findings.witness(Witness::LowWatermarkAhead);
                    }
                }
                _ => {}
            }
        }
        self.judge_keys(findings, seen, items, (&set, &mut touched))?;
        for name in &touched {
            self.judge_rest_of_consumer(name)?;
        }
        self.judge_entries_of_consumers(findings, items, &set)
    }

    /// Records the changes of rows of consumers. Returns the consumers whose position was set, or that are gone.
    fn take_consumers(
        &mut self,
        findings: &Findings,
        items: &StoredChanges<'_>,
    ) -> Result<BTreeSet<String>, crate::guarantee::Broken> {
        let mut set = BTreeSet::new();
        for (item, change) in items {
            let StoredItem::Consumer(name) = item else { continue };
            let was_used = self.consumers.get(name).is_some_and(|model| model.is_used);
            let Some(value) = &change.after else {
                set.insert(name.clone());
                self.consumers.remove(name);
                if was_used {
                    findings.witness(Witness::ConsumerDeleted);
                }
                continue;
            };
            let row = inspect::consumer(value).map_err(|error| error.to_string())?;
            if let Some(model) = self.consumers.get_mut(name)
                && (model.row.identity, model.row.generation) == (row.identity, row.generation)
            {
                if row.is_paused && !model.row.is_paused && was_used {
                    findings.witness(Witness::ConsumerPaused);
                }
                model.row = row;
                continue;
            }
            set.insert(name.clone());
            let is_behind = match row.start.knowledge() {
                Knowledge::Nothing => false,
                Knowledge::UpTo(_) => row.start.position() < self.horizon,
            };
            if is_behind {
                return Guarantee::ExpiredNotSilent.fails(format!(
                    "{name} begins at {}, and the horizon is at {}",
                    row.start, self.horizon
                ));
            }
            if was_used && change.before.is_some() {
                findings.witness(Witness::ConsumerReset);
            }
            // Tokens of one that was deleted are not compared with those of the next one.
            self.last_runs.retain(|(of, _), _| of != name);
            self.consumers.insert(name.clone(), ConsumerModel::new(row, self.commits));
        }
        Ok(set)
    }

    /// Judges what a handler has written.
    fn judge_work_of_consumer(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        (name, id): (&str, &str),
        value: &[u8],
    ) -> Verdict {
        let (run, is_final) = app::work_of(value);
        let who = format!("run {run} of {name} on {id:?}");
        let Some(Run { token, shard, told, began, .. }) = self.runs.get(&run) else {
            return Err(format!("{who} is not known").into());
        };
        let generation = self.runs[&run].generation();
        let Some(told) = told.iter().find(|told| told.id == id) else {
            return Err(format!("{who} works on what it was not given").into());
        };
        let Some(model) = self.consumers.get(name) else {
            return Guarantee::Fenced.fails(format!("{who} writes, and the consumer is gone"));
        };
        if !self.owns(seen, &pool(name), shard.0) {
            return Guarantee::Fenced.fails(format!("{who} writes without the lease of {shard}"));
        }
        if generation != model.row.generation || *began < model.since {
            return Guarantee::Fenced.fails(format!("{who} is of before the last reset, and writes"));
        }
        if model.row.is_paused {
            return Guarantee::Fenced.fails(format!("{who} writes, and the consumer is paused"));
        }
        let last = self.last_runs.get(&(name.to_owned(), id.to_owned()));
        if last.is_some_and(|last| *last > (*token, run)) {
            return Guarantee::Ended.fails(format!("{who} writes after {last:?} has begun"));
        }
        let once = self.consumer_plans.get(name).is_some_and(|plan| plan.is_exact);
        let row = told
            .at
            .map(|at| self.past.get(&at).ok_or_else(|| format!("{who} is given {at}, which is no row")));
        let row = row.transpose()?.cloned();
        let (base, empty) = (model.base(id), Progress::default());
        let progress = model.progress.get(id).unwrap_or(&empty);
        if let (Some(row), Some(finished)) = (&row, progress.finished) {
            if row.sequence < finished {
                return Guarantee::Ordered
                    .fails(format!("{who} is at {}, and {finished} was finished", row.sequence));
            }
            if once && is_final && row.sequence == finished && !progress.may_repeat {
                return Guarantee::ExactlyOnce.fails(format!("{who} finishes {finished}, which is finished"));
            }
        }
        let lives = row.as_ref().filter(|row| !row.is_deleted()).map(|row| row.instance);
        if let Some(lives) = lives
            && self.ended.contains(&(name.to_owned(), lives))
        {
            return Guarantee::Ended.fails(format!("{who} works on {lives}, whose end it has learned"));
        }
        if let Some(begun) = progress.begun.filter(|begun| lives != Some(*begun)) {
            if !told.is_end {
                return Guarantee::Worked
                    .fails(format!("{who} has worked on {begun}, and does not learn of its end"));
            }
            findings.witness(Witness::EndBeforeNextWork);
        }
        if is_final && let Some(row) = &row {
            let wanted = self.consumer_plans.get(name).map(|plan| plan.interest.kinds_of(&row.name));
            Self::judge_news(&who, (model, wanted.unwrap_or_default()), row, (base, told))?;
        }
        let (is_repeated, told, began) =
            (row.as_ref().map(|row| row.sequence) == progress.finished, told.clone(), *began);
        let newest = self.ledger_newest(id);
        let begun = progress.begun;
        let model = self.consumers.get_mut(name).expect("it was just there");
        model.is_used = true;
        let progress = model.progress.entry(id.to_owned()).or_default();
        if !is_final {
            // The end of the one before is learned only once the work is finished.
            progress.begun = if begun.is_some() && begun != lives { begun } else { lives.or(begun) };
            return Ok(());
        }
        if told.is_end
            && let Some(begun) = begun.filter(|begun| lives != Some(*begun))
        {
            self.ended.insert((name.to_owned(), begun));
        }
        progress.begun = lives;
        progress.answered = progress.answered.max(Some(began));
        if is_repeated && progress.may_repeat {
            progress.may_repeat = false;
            findings.witness(Witness::WorkedAgain);
        }
        if row.is_none() {
            findings.witness(Witness::GoneWithoutRow);
        }
        let at = told.at.or(newest);
        progress.finished = progress.finished.max(at);
        Ok(())
    }

    /// The newest row that there ever was of `id`.
    fn ledger_newest(&self, id: &str) -> Option<Sequence> {
        self.past.values().rev().find(|row| row.name.as_str() == id).map(|row| row.sequence)
    }

    /// Judges whether a handler was told everything that is new in `row`, where `base` is finished.
    fn judge_news(
        who: &str,
        (model, wanted): (&ConsumerModel, Kinds),
        row: &Notification,
        (base, told): (Start, &Told),
    ) -> Verdict {
        for kind in wanted.iter() {
            if let Some(at) = is_news(row, kind, base).filter(|_| !told.news.contains(kind)) {
                return Guarantee::Complete.fails(format!(
                    "{who} was not told of {kind:?} at {at}, and {base:?} was finished: {told:?}"
                ));
            }
        }
        match model.ends(row, base).first() {
            Some(at) if !told.is_end => Guarantee::Complete
                .fails(format!("{who} was not told of the end at {at}, and {base:?} was finished")),
            _ => Ok(()),
        }
    }

    /// Judges and records the change of a checkpoint.
    fn judge_consumer_checkpoint(
        &mut self,
        seen: &ObservedCommit<'_>,
        (name, shard): (&str, ShardId),
        (before, after): (Option<Cursor>, Option<Cursor>),
        (is_set, read): (bool, Option<&Vec<ShardId>>),
    ) -> Verdict {
        let owns = |shard: ShardId| self.owns(seen, &pool(name), shard.0);
        let may = is_set
            || owns(shard)
            // A switch of all shards is made under the lease of one of those before.
            || before.is_none() != after.is_none() && read.is_none_or(|read| read.iter().any(|of| owns(*of)));
        let Some(model) = self.consumers.get_mut(name) else {
            return match after {
                Some(_) => {
                    Guarantee::AtLeastOnce.fails(format!("{name} is gone, and has a checkpoint in {shard}"))
                }
                None => Ok(()),
            };
        };
        match after {
            Some(after) => drop(model.checkpoints.insert(shard, after.position())),
            None => drop(model.checkpoints.remove(&shard)),
        }
        if !may {
            return Guarantee::Fenced
                .fails(format!("the checkpoint of {name} in {shard} was written without its lease"));
        }
        match (before, after) {
            (Some(before), Some(after)) if !is_set && after.position() < before.position() => {
                Guarantee::AtLeastOnce.fails(format!("{name} went back in {shard}, from {before} to {after}"))
            }
            _ => Ok(()),
        }
    }

    /// Judges and records the changes of keys.
    fn judge_keys(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
        (set, touched): (&BTreeSet<String>, &mut BTreeSet<String>),
    ) -> Verdict {
        let is_operator = !self.nodes.contains_key(&seen.issuer);
        for (item, change) in items {
            let StoredItem::Deferred(name, shard, id) = item else { continue };
            touched.insert(name.clone());
            let id = String::from_utf8_lossy(id).into_owned();
            let read = |value: &Option<Bytes>| {
                value
                    .as_ref()
                    .map(|value| inspect::deferred(value))
                    .transpose()
                    .map_err(|error| error.to_string())
            };
            let (before, after) = (read(&change.before)?, read(&change.after)?);
            let owns = self.owns(seen, &pool(name), shard.0);
            let newest = self.ledger_newest(&id);
            let Some(model) = self.consumers.get_mut(name) else {
                if after.is_some() {
                    return Guarantee::Consistent.fails(format!("{name} is gone, and has a key of {id:?}"));
                }
                continue;
            };
            let keys = model.keys.entry(id.clone()).or_default();
            match &after {
                Some(after) => drop(keys.insert(*shard, after.clone())),
                None => drop(keys.remove(shard)),
            }
            let left: Vec<_> = keys.values().cloned().collect();
            if set.contains(name) {
                continue;
            }
            let is_moved = items.iter().any(|(item, other)| {
                matches!(item, StoredItem::Deferred(of, there, moved) if of == name && there != shard && moved == id.as_bytes())
                    && (other.after.is_some() != after.is_some())
            });
            if is_moved && before.is_some() {
                findings.witness(Witness::KeyMoved);
            }
            if is_moved {
                continue;
            }
            let progress = model.progress.entry(id.clone()).or_default();
            let again = |key: &Option<inspect::StoredKey>| key.as_ref().and_then(|key| key.again);
            let asks = again(&after).is_some() && again(&after) != again(&before);
            // Whoever asks again after an unknown result asks with the same words.
            let is_discarded = |after: &inspect::StoredKey| after.is_pending && after.again.is_none();
            let discards = is_operator && after.as_ref().is_some_and(is_discarded);
            if is_operator && after.is_none() {
                return Guarantee::Fenced
                    .fails(format!("an operator has removed the key of {id:?} of {name}"));
            }
            if !is_operator && !owns {
                return Guarantee::Fenced
                    .fails(format!("the key of {id:?} of {name} was written without the lease of {shard}"));
            }
            if asks {
                (progress.asked, progress.may_repeat) = (Some(self.commits), true);
            } else if discards {
                findings.witness(Witness::DeferredIdDiscarded);
                *progress = Progress { finished: newest.max(progress.finished), ..Progress::default() };
            } else if again(&before).is_some()
                && again(&after).is_none()
                && left.iter().all(|key| key.again.is_none())
            {
                let asked = progress.asked.take();
                if progress.answered < asked {
                    return Guarantee::Worked
                        .fails(format!("{name} was asked to work on {id:?} again, and has forgotten it"));
                }
            }
            let was_pending = before.as_ref().is_some_and(|before| before.is_pending);
            let is_pending = after.as_ref().is_some_and(|after| after.is_pending);
            if is_pending && !was_pending && !is_operator {
                findings.witness(Witness::IdDeferred);
            }
            if was_pending && !is_pending {
                findings.witness(Witness::DeferredIdDone);
            }
        }
        Ok(())
    }

    /// Judges whether everything that the consumer `name` has passed is finished, or has a key.
    fn judge_rest_of_consumer(&self, name: &str) -> Verdict {
        let Some(model) = self.consumers.get(name) else { return Ok(()) };
        let Some(plan) = self.consumer_plans.get(name) else { return Ok(()) };
        for (db, Placed { shard, row }) in &self.rows {
            let id = db.as_str();
            let facts = model.facts(row, model.base(id), &plan.interest);
            let Some(owed) = facts.first() else { continue };
            match model.pending(id) {
                Some(key) => {
                    let lost = facts.iter().find(|fact| !key.done.is_news(**fact));
                    if let Some(lost) = lost {
                        return Guarantee::AtLeastOnce.fails(format!(
                            "{name} has a key of {id:?} that says {} is finished, and {lost} is not",
                            key.done
                        ));
                    }
                }
                None if model.has_passed(*shard, row.sequence) => {
                    return Guarantee::AtLeastOnce.fails(format!(
                        "{name} has passed {id:?} at {} in {shard}, by {:?} and {:?}, and has not worked on {owed}",
                        row.sequence, model.checkpoints, model.low
                    ));
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Judges whether the consumers whose checkpoints have changed stand in one topology entry, with all of their keys.
    fn judge_entries_of_consumers(
        &self,
        findings: &Findings,
        items: &StoredChanges<'_>,
        set: &BTreeSet<String>,
    ) -> Verdict {
        let begun = items.iter().filter_map(|(item, change)| match item {
            StoredItem::ConsumerCheckpoint(name, _) if change.before.is_none() != change.after.is_none() => {
                Some(name)
            }
            _ => None,
        });
        for name in begun.collect::<BTreeSet<_>>() {
            let Some(model) = self.consumers.get(name) else { continue };
            if !set.contains(name) {
                findings.witness(Witness::ConsumerWentOver);
            }
            let shards: Vec<_> = model.checkpoints.keys().map(|shard| shard.0).collect();
            let Some(place) = self.entries.iter().position(|entry| entry.clone().eq(shards.iter().copied()))
            else {
                return Guarantee::AtLeastOnce
                    .fails(format!("{name} reads {shards:?}, which are of no one topology entry"));
            };
            let here = &self.entries[place..];
            let mut keys = model.keys.iter().flat_map(|(id, keys)| keys.keys().map(move |shard| (id, shard)));
            let left = keys.find(|(_, shard)| !here.iter().take(2).any(|entry| entry.contains(&shard.0)));
            if let Some((id, shard)) = left {
                return Guarantee::AtLeastOnce
                    .fails(format!("{name} reads {shards:?}, and has left the key of {id:?} in {shard}"));
            }
        }
        Ok(())
    }

    /// Judges whether the tombstone `row` may be dropped.
    pub(super) fn may_drop_from_consumers(&self, row: &Notification) -> Verdict {
        for (name, model) in &self.consumers {
            let Some(plan) = self.consumer_plans.get(name) else { continue };
            let id = row.name.as_str();
            let is_wanted = !plan.interest.kinds_of(&row.name).is_empty();
            let has_begun = model.progress.get(id).is_some_and(|progress| progress.begun.is_some());
            // One that began with nothing need not learn of what had ended before.
            let began = match model.row.start.knowledge() {
                Knowledge::Nothing => model.row.start.began(),
                Knowledge::UpTo(known) => Some(known),
            };
            let may_know = has_begun || began.is_some_and(|began| row.sequence > began);
            let is_owed = !model.ends(row, model.base(id)).is_empty();
            if is_wanted && may_know && is_owed && model.pending(id).is_none() {
                return Guarantee::Kept.fails(format!(
                    "the tombstone of {id:?} at {} was dropped, and {name} has still to learn of it: {:?}",
                    row.sequence, model.checkpoints
                ));
            }
        }
        Ok(())
    }

    /// Work that consumers have still to do.
    pub(super) fn consumers_owe(&self) -> Option<String> {
        self.consumer_plans.iter().find_map(|(name, plan)| {
            let Some(model) = self.consumers.get(name) else { return Some(format!("{name} does not exist")) };
            if model.row.is_paused {
                return Some(format!("{name} is paused"));
            }
            let fails = |id: &str| plan.failing.iter().any(|name| name.as_str() == id);
            let mut pending = model.keys.iter().filter(|(_, keys)| keys.values().any(|key| key.is_pending));
            if let Some((id, _)) = pending.find(|(id, _)| !fails(id)) {
                return Some(format!("{name} has still to work on {id:?}, which is deferred"));
            }
            let owed = |(db, placed): (&DbName, &Placed)| {
                let facts = model.facts(&placed.row, model.base(db.as_str()), &plan.interest);
                facts.first().filter(|_| !fails(db.as_str())).map(|fact| (db.clone(), *fact))
            };
            let (db, fact) = self.rows.iter().find_map(owed)?;
            Some(format!("{name} has still to work on {db:?}, for what happened at {fact}"))
        })
    }

    /// The position up to which consumers keep no tombstones; `None` if there are none.
    pub(super) fn passed_by_consumers(&self) -> Option<Sequence> {
        self.consumers.values().map(|model| model.low.unwrap_or(model.row.start.position())).min()
    }
}
