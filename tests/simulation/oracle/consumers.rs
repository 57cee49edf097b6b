//! The oracle for consumers. It sees the rows of the feed, the writes of handlers, the checkpoints and the keys of ids, but not how they
//! come about. It checks that:
//!
//! - each row that a consumer has passed is finished or unwanted, or has a key that records the pending work;
//! - the effects of a transaction that finishes work happen once for each row, and at most once more for each request to repeat the work;
//! - no handler writes without the lease of its shard, after the next run for the same id has begun, or while the consumer is paused;
//! - no row is worked on after a newer row of its id was finished, and no database after the consumer learned of its end;
//! - a consumer that worked on a database learns that this database ended before it works on the next one of the same name;
//! - no process runs two handlers for one id at the same time;
//! - at rest, everything is finished or deferred, work that always fails was retried, and all keys are in shards that are read.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use bytes::Bytes;
use notibus::{
    consumer::FencingToken,
    cursor::{Cursor, Knowledge},
    event::{DbInstance, Kinds, Notification, Sequence},
    feed::ShardId,
    test_util::inspect::{self, StoredKey},
};

use super::{
    Oracle,
    commit::{ObservedCommit, StoredChanges, Verdict},
    given::Start,
    models::{
        consumer::{ConsumerModel, Followed, Progress, Run, RunId, Shown, began, is_news},
        documents::DocFeed,
    },
    stored_item::StoredItem,
};
use crate::{
    app::{self, AppKey},
    draw::ConsumerPlan,
    findings::Findings,
    guarantee::{Broken, Guarantee},
    kernel::Issuer,
    keyspace::Rows,
    witness::Witness,
};

/// Returns the pool of the shards of `consumer`.
fn pool(consumer: &str) -> String {
    format!("consumer/{consumer}")
}

impl Oracle {
    /// Sets the consumers that are expected from now on.
    pub fn expect_consumers(&mut self, plans: &[ConsumerPlan]) {
        self.consumer_plans = plans.iter().map(|plan| (plan.name.clone(), plan.clone())).collect();
    }

    /// Records that the faults have ended.
    pub fn has_come_to_rest(&mut self) {
        self.is_calm = true;
    }

    /// Records that a handler of `consumer` was called at `issuer`. Returns the number of the run.
    pub fn run_began(
        &mut self,
        findings: &Findings,
        (issuer, consumer): (Issuer, &str),
        (token, shard): (FencingToken, ShardId),
        shown: Vec<Shown>,
    ) -> RunId {
        self.next_reader += 1;
        let run = self.next_reader;
        for of in &shown {
            let key = (consumer.to_owned(), of.id.clone());
            let last = self.last_runs.entry(key).or_insert((token, run));
            if let Some(other) = self.runs.get(&last.1).filter(|other| !other.is_over) {
                findings.witness(Witness::RunsOverlap);
                if other.issuer == issuer {
                    let (id, number) = (&of.id, last.1);
                    let reason = format!("run {run} of {consumer} on {id:?} begins beside run {number}");
                    findings.fail(Guarantee::Ended.broken(reason));
                }
            }
            *last = (*last).max((token, run));
        }
        let (began, is_calm) = (self.commits, self.is_calm);
        let consumer = consumer.to_owned();
        self.runs.insert(run, Run { issuer, consumer, token, shard, shown, began, is_calm, is_over: false });
        run
    }

    /// Records that the handler of a run returned, or was dropped.
    pub fn run_ended(&mut self, run: RunId) {
        if let Some(run) = self.runs.get_mut(&run) {
            run.is_over = true;
        }
    }

    /// Records that a row of `id` arrived, which may report the end of a database.
    pub(super) fn note_row_for_consumers(&self, findings: &Findings, id: &str, is_end: bool) {
        let of_notifications = self.consumers.iter().filter(|(_, model)| model.row.instance.is_none());
        for (name, model) in of_notifications {
            let last = self.last_runs.get(&(name.clone(), id.to_owned()));
            if last.is_some_and(|(_, run)| self.runs.get(run).is_some_and(|run| !run.is_over)) {
                findings.witness(if is_end { Witness::EndWhileRunning } else { Witness::RowWhileRunning });
            } else if is_end && model.pending(id).is_some() {
                findings.witness(Witness::EndWhileDeferred);
            }
        }
    }

    /// Returns the newest rows of the feed that `model` follows, each with its shard.
    fn newest_rows<'a>(
        &'a self,
        model: &ConsumerModel,
    ) -> Box<dyn Iterator<Item = (ShardId, Followed<'a>)> + 'a> {
        match model.row.instance {
            None => Box::new(self.rows.values().map(|placed| (placed.shard, (&*placed.row).into()))),
            Some(instance) => Box::new(self.documents.get(&instance).into_iter().flat_map(DocFeed::newest)),
        }
    }

    /// Returns the row that is or was at `at` in the document feed of `instance`, or, without an instance, in the feed of notifications.
    fn row_at(&self, instance: Option<DbInstance>, at: Sequence) -> Option<Followed<'_>> {
        match instance {
            None => self.past.get(&at).map(|row| (&**row).into()),
            Some(instance) => {
                let doc = self.documents.get(&instance)?.past.get(&at)?;
                Some(Followed { id: doc.id.as_str(), at, notification: None })
            }
        }
    }

    /// Returns the position of the last row of `id`, if the id no longer has a row.
    fn last_row(&self, id: &str) -> Option<Sequence> {
        let of_id = self.past.values().rev().find(|row| row.name.as_str() == id);
        of_id.filter(|_| !self.rows.contains_key(id)).map(|row| row.sequence)
    }

    /// Returns all topology entries so far of the feed that `model` follows.
    fn entries_of(&self, model: &ConsumerModel) -> &[Range<u64>] {
        match model.row.instance {
            None => &self.entries,
            Some(instance) => self.documents.get(&instance).map_or(&[], |feed| &feed.entries),
        }
    }

    /// Judges the changes that a commit made to consumers.
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
        let (set, mut touched) = (self.take_consumers(findings, seen, items)?, BTreeSet::new());
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
            self.judge_rest_of_consumer(findings, name)?;
        }
        self.judge_entries_of_consumers(findings, items, &set)
    }

    /// Records changes to the rows of consumers. Returns the consumers whose position was set or that were deleted.
    fn take_consumers(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
    ) -> Result<BTreeSet<String>, Broken> {
        let mut set = BTreeSet::new();
        for (item, change) in items {
            let StoredItem::Consumer(name) = item else { continue };
            let row = change.after.as_ref().map(|value| inspect::consumer(value)).transpose();
            let row = row.map_err(|error| error.to_string())?;
            let known = self.consumers.get_mut(name);
            let was_used = known.as_ref().is_some_and(|model| model.is_used);
            if let (Some(model), Some(row)) = (known, &row)
                && (model.row.identity, model.row.generation) == (row.identity, row.generation)
            {
                if row.is_paused && !model.row.is_paused && was_used {
                    findings.witness(Witness::ConsumerPaused);
                }
                model.row = row.clone();
                continue;
            }
            set.insert(name.clone());
            self.consumer_changes += 1;
            if change.before.is_some() {
                self.judge_operation(seen, name)?;
            }
            let before = self.consumers.remove(name);
            let Some(row) = row else {
                self.deleted.insert(name.clone());
                if let Some(before) = before {
                    self.judge_expiry(findings, seen, (name, &before.row, before.created))?;
                }
                if was_used {
                    findings.witness(Witness::ConsumerDeleted);
                }
                continue;
            };
            let is_behind = match row.start.knowledge() {
                Knowledge::UpTo(_) if row.instance.is_none() => row.start.position() < self.horizon,
                _ => false,
            };
            if is_behind {
                return Guarantee::ExpiredNotSilent.fails(format!(
                    "{name} begins at {}, and the horizon is at {}",
                    row.start, self.horizon
                ));
            }
            let mut model = ConsumerModel::new(row, seen.stamp.version(), self.commits);
            if let Some(before) = before {
                (model.created, model.ended) = (before.created, before.ended);
                if was_used {
                    findings.witness(Witness::ConsumerReset);
                }
            } else {
                // Tokens of a deleted consumer are not compared with those of the next consumer of that name.
                self.last_runs.retain(|(of, _), _| of != name);
            }
            self.consumers.insert(name.clone(), model);
        }
        Ok(set)
    }

    /// Judges what a handler wrote.
    fn judge_work_of_consumer(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        (name, id): (&str, &str),
        value: &[u8],
    ) -> Verdict {
        let (run, is_final) = app::work_of(value);
        let who = format!("run {run} of {name} on {id:?}");
        let shown = &self.runs.get(&run).ok_or_else(|| format!("{who} is not known"))?.shown;
        // A batch can have several rows of a document if a layer named wrong previous edits; the last one counts.
        let Some(shown) = shown.iter().rfind(|shown| shown.id == id) else {
            return Err(format!("{who} works on what it was not given").into());
        };
        let model = self.judge_fence(seen, &who, (name, id), run)?;
        let once = self.consumer_plans.get(name).is_some_and(|plan| plan.is_exact);
        let instance = model.row.instance;
        if instance.is_some_and(|instance| !self.documents.contains_key(&instance)) {
            // Work on a deleted feed may still be finished until a member notices the deletion.
            return Ok(());
        }
        let row = shown.at.map(|at| {
            self.row_at(instance, at).ok_or_else(|| format!("{who} is given {at}, which is no row"))
        });
        let row = row.transpose()?;
        let (base, empty) = (model.base(id), Progress::default());
        let progress = model.progress.get(id).unwrap_or(&empty);
        if let (Some(row), Some(finished)) = (&row, progress.finished) {
            if row.at < finished && !progress.is_given_up && !(instance.is_some() && self.leaves_rows) {
                return Guarantee::Ordered
                    .fails(format!("{who} is at {}, and {finished} was finished", row.at));
            }
            if once && is_final && !progress.may_finish(row.at) {
                return Guarantee::ExactlyOnce.fails(format!("{who} finishes {finished}, which is finished"));
            }
        }
        let lives = row.and_then(|row| row.lives());
        if let Some(lives) = lives.filter(|lives| model.ended.contains(lives)) {
            return Guarantee::Ended.fails(format!("{who} works on {lives}, whose end it has learned"));
        }
        let mut others = progress.begun.iter().filter(|begun| lives != Some(**begun));
        if let Some(begun) = others.next() {
            if shown.end.is_none() {
                return Guarantee::Worked
                    .fails(format!("{who} has worked on {begun}, and does not learn of its end"));
            }
            findings.witness(Witness::EndBeforeNextWork);
        }
        if is_final && let Some(row) = row.and_then(|row| row.notification) {
            self.judge_news((&who, name), model, row, (base, shown))?;
        }
        self.note_work(findings, (name, id), run, is_final);
        Ok(())
    }

    /// Records what a handler wrote.
    fn note_work(&mut self, findings: &Findings, (name, id): (&str, &str), run: RunId, is_final: bool) {
        let (instance, of) = (self.consumers[name].row.instance, &self.runs[&run]);
        let (since, shown) =
            (of.began, of.shown.iter().rfind(|shown| shown.id == id).expect("it was judged"));
        let (end, row) = (shown.end, shown.at.and_then(|at| self.row_at(instance, at)));
        let lives = row.and_then(|row| row.lives());
        let finished = row.map_or_else(|| self.last_row(id), |row| Some(row.at));
        // An end that arrives without a row covers all databases before the row that follows.
        let of_id = |run: &Run| run.shown.iter().rfind(|before| before.id == id)?.at;
        let after_end = self.runs.values().rev().filter(|run| run.consumer == name).find_map(of_id);
        let next = row.or_else(|| self.row_at(instance, after_end?));
        let (next, replaced) = next.map_or((None, None), |next| {
            (next.lives(), next.notification.and_then(|row| row.replaced).map(|replaced| replaced.instance))
        });
        let has_row = row.is_some();
        let model = self.consumers.get_mut(name).expect("it was just there");
        model.is_used = true;
        let progress = model.progress.entry(id.to_owned()).or_default();
        if !is_final {
            // The end of the previous database counts as learned only once the work is finished.
            progress.begun.extend(lives);
            return;
        }
        model
            .ended
            .extend(progress.begun.extract_if(.., |begun| end == Some(*begun) || next != Some(*begun)));
        model.ended.extend([end, replaced].into_iter().flatten().filter(|_| !has_row));
        progress.begun.extend(lives);
        progress.answered = progress.answered.max(Some(since));
        progress.is_given_up = false;
        if progress.finish(finished, has_row) {
            findings.witness(Witness::WorkedAgain);
        }
        let met = [(!has_row, Witness::GoneWithoutRow), (instance.is_some(), Witness::DocumentsWorked)];
        met.iter().filter(|(is_met, _)| *is_met).for_each(|(_, witness)| findings.witness(*witness));
        progress.finished = progress.finished.max(finished);
    }

    /// Judges whether a run may write at all. Returns the consumer of the run.
    fn judge_fence(
        &self,
        seen: &ObservedCommit<'_>,
        who: &str,
        (name, id): (&str, &str),
        run: RunId,
    ) -> Result<&ConsumerModel, Broken> {
        let of = &self.runs[&run];
        let Some(model) = self.consumers.get(name) else {
            return Guarantee::Fenced.fails(format!("{who} writes, and the consumer is gone"));
        };
        if !self.owns(seen, &pool(name), of.shard.0) {
            return Guarantee::Fenced.fails(format!("{who} writes without the lease of {}", of.shard));
        }
        if of.generation() != model.row.generation || of.began < model.since {
            return Guarantee::Fenced.fails(format!("{who} is of before the last reset, and writes"));
        }
        if model.row.is_paused {
            return Guarantee::Fenced.fails(format!("{who} writes, and the consumer is paused"));
        }
        let last = self.last_runs.get(&(name.to_owned(), id.to_owned()));
        // Members of a deleted consumer may still begin futile runs, whose tokens cannot be compared with those of the next consumer.
        if !self.deleted.contains(name)
            && let Some(last) = last.filter(|last| **last > (of.token, run))
        {
            return Guarantee::Ended.fails(format!("{who} writes after {last:?} has begun"));
        }
        Ok(model)
    }

    /// Judges whether a handler was shown everything in `row` that is news after `base`, up to which the work is finished.
    fn judge_news(
        &self,
        (who, name): (&str, &str),
        model: &ConsumerModel,
        row: &Notification,
        (base, shown): (Start, &Shown),
    ) -> Verdict {
        let wanted =
            self.consumer_plans.get(name).map_or(Kinds::ALL, |plan| plan.interest.kinds_of(&row.name));
        if wanted.is_empty() {
            return Guarantee::Truthful.fails(format!("{who} works on what it does not want"));
        }
        for kind in wanted.iter() {
            if let Some(at) = is_news(row, kind, base).filter(|_| !shown.news.contains(kind)) {
                return Guarantee::Complete.fails(format!(
                    "{who} was not shown of {kind:?} at {at}, and {base:?} was finished: {shown:?}"
                ));
            }
        }
        match model.ends(row, base).first() {
            Some(at) if shown.end.is_none() => Guarantee::Complete
                .fails(format!("{who} was not shown of the end at {at}, and {base:?} was finished")),
            _ => Ok(()),
        }
    }

    /// Judges and records the change to a checkpoint.
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
            // All shards are switched at once, under the lease of one of the previous shards.
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

    /// Judges and records changes to keys.
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
            let (before, after) = (stored_key(change.before.as_ref())?, stored_key(change.after.as_ref())?);
            let owns = self.owns(seen, &pool(name), shard.0);
            let instance = self.consumers.get(name).and_then(|model| model.row.instance);
            // A batch shows its handler nothing about an id without a row.
            let is_batch = self.consumer_plans.get(name).is_some_and(|plan| plan.is_batch);
            let may_forget = is_batch || instance.is_some() || self.rows.keys().any(|db| db.as_str() == id);
            let is_repeatable = self.is_repeatable(name, &id);
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
            let is_asked = keys.values().any(|key| key.again.is_some());
            if set.contains(name) {
                continue;
            }
            if is_moved(items, (name, *shard, &id), after.is_some()) {
                findings.witness(Witness::KeyMoved);
                continue;
            }
            let progress = model.progress.entry(id.clone()).or_default();
            let again = |key: &Option<StoredKey>| key.as_ref().and_then(|key| key.again);
            let asks = again(&after).is_some() && again(&after) != again(&before);
            // An operator that repeats a request after an unknown result sends the same random value again.
            let given_up =
                after.as_ref().filter(|after| is_operator && after.is_pending && after.again.is_none());
            if is_operator && after.is_none() {
                return Guarantee::Fenced
                    .fails(format!("an operator has removed the key of {id:?} of {name}"));
            }
            if !is_operator && !owns {
                return Guarantee::Fenced
                    .fails(format!("the key of {id:?} of {name} was written without the lease of {shard}"));
            }
            if let Some(begun) = progress.begun.first().filter(|_| after.is_none() && !may_forget) {
                return Guarantee::Worked
                    .fails(format!("{name} has forgotten {id:?}, and not learned of the end of {begun}"));
            }
            if asks {
                progress.ask(self.commits, again(&after));
            } else if let Some(given_up) = given_up {
                findings.witness(Witness::DeferredIdDiscarded);
                progress.give_up(given_up.done.position(), is_batch);
            } else if again(&before).is_some() && !is_asked {
                let asked = progress.end_requests(is_batch);
                if progress.answered < asked && is_repeatable {
                    return Guarantee::Worked
                        .fails(format!("{name} was asked to work on {id:?} again, and has forgotten it"));
                }
            }
            let is_pending = |key: &Option<StoredKey>| key.as_ref().is_some_and(|key| key.is_pending);
            match (is_pending(&before), is_pending(&after)) {
                (false, true) if !is_operator => findings.witness(Witness::IdDeferred),
                (true, false) => findings.witness(Witness::DeferredIdDone),
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether there is work on `id` to repeat: its row has something that `name` wants and that would not be worked on anyway.
    fn is_repeatable(&self, name: &str, id: &str) -> bool {
        let (Some(model), Some(plan)) = (self.consumers.get(name), self.consumer_plans.get(name)) else {
            return false;
        };
        let facts = |row, base| model.facts(row, base, &plan.interest).len();
        let mut rows = self.newest_rows(model).map(|(_, row)| row);
        rows.find(|row| row.id == id)
            .is_some_and(|row| facts(row, Start::Nothing) > facts(row, model.base(id)))
    }

    /// Judges whether everything that the consumer `name` has passed is finished or has a key.
    fn judge_rest_of_consumer(&self, findings: &Findings, name: &str) -> Verdict {
        let Some(model) = self.consumers.get(name) else { return Ok(()) };
        let Some(plan) = self.consumer_plans.get(name) else { return Ok(()) };
        for (shard, row) in self.newest_rows(model) {
            let id = row.id;
            let facts = model.facts(row, model.base(id), &plan.interest);
            let Some(missed) = facts.first() else { continue };
            match model.pending(id) {
                Some(key) => {
                    let lost = facts.iter().find(|fact| !key.done.is_news(**fact));
                    if let Some(lost) = lost {
                        return Guarantee::AtLeastOnce.fails(format!(
                            "{name} has a key of {id:?} that says {} is finished, and {lost} is not",
                            key.done
                        ));
                    }
                    if model.has_passed(shard, row.at) {
                        findings.witness(Witness::DeferredIdPassed);
                    }
                }
                None if model.has_passed(shard, row.at) => {
                    return Guarantee::AtLeastOnce.fails(format!(
                        "{name} has passed {id:?} at {} in {shard}, by {:?} and {:?}, and has not worked on {missed}",
                        row.at, model.checkpoints, model.low
                    ));
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Judges, for each consumer that gained or lost a checkpoint, whether all its checkpoints and keys belong to one topology entry.
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
            let entries = self.entries_of(model);
            if entries.is_empty() {
                // The feed that the consumer follows is gone.
                continue;
            }
            let Some(place) = entries.iter().position(|entry| entry.clone().eq(shards.iter().copied()))
            else {
                return Guarantee::AtLeastOnce
                    .fails(format!("{name} reads {shards:?}, which are of no one topology entry"));
            };
            let here = &entries[place..];
            if !set.contains(name) && here.len() > 1 {
                findings.witness(Witness::ConsumerWentOverToClosed);
            }
            let mut keys = model.keys.iter().flat_map(|(id, keys)| keys.keys().map(move |shard| (id, shard)));
            let left = keys.find(|(_, shard)| !here.iter().take(2).any(|entry| entry.contains(&shard.0)));
            if let Some((id, shard)) = left {
                return Guarantee::AtLeastOnce
                    .fails(format!("{name} reads {shards:?}, and has left the key of {id:?} in {shard}"));
            }
        }
        Ok(())
    }

    /// Judges whether consumers allow the tombstone `row` to be dropped.
    pub(super) fn may_drop_from_consumers(&self, row: &Notification) -> Verdict {
        for (name, model) in self.consumers.iter().filter(|(_, model)| model.row.instance.is_none()) {
            let Some(plan) = self.consumer_plans.get(name) else { continue };
            let id = row.name.as_str();
            let is_wanted = !plan.interest.kinds_of(&row.name).is_empty();
            let has_begun = model.progress.get(id).is_some_and(|progress| !progress.begun.is_empty());
            // A consumer that began with nothing need not learn of databases that ended before it began.
            let may_know = has_begun || began(&model.row.start).is_some_and(|began| row.sequence > began);
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

    /// Describes work that a consumer still has to do, if there is any.
    pub(super) fn consumers_owe(&self, findings: &Findings) -> Option<String> {
        self.consumer_plans.iter().find_map(|(name, plan)| {
            if plan.is_given_up() {
                return None;
            }
            let instance = match &plan.documents {
                None => None,
                Some(db) => Some(*self.databases.get(db)?),
            };
            let Some(model) = self.consumers.get(name).filter(|model| model.row.instance == instance) else {
                return Some(format!("{name} does not exist"));
            };
            if model.row.is_paused {
                return Some(format!("{name} is paused"));
            }
            let fails = |id: &str| plan.failing.iter().any(|failing| failing == id);
            for (id, keys) in model.keys.iter().filter(|(_, keys)| keys.values().any(|key| key.is_pending)) {
                if !fails(id) {
                    return Some(format!(
                        "{name} has still to work on {id:?}, which is deferred in {keys:?}"
                    ));
                }
                // The run with the greatest token may be a futile one of a deleted consumer, so any run counts.
                let mut runs = self.runs.values().filter(|run| run.is_calm && run.consumer == *name);
                if !runs.any(|run| run.shown.iter().any(|of| of.id == *id)) {
                    return Some(format!("{name} has still to try {id:?} again, which always fails"));
                }
                findings.witness(Witness::FailingIdTriedAtRest);
            }
            let missed = self.newest_rows(model).find_map(|(_, row)| {
                let facts = model.facts(row, model.base(row.id), &plan.interest);
                facts.first().filter(|_| !fails(row.id)).map(|fact| (row.id, *fact))
            });
            if let Some((id, fact)) = missed {
                return Some(format!("{name} has still to work on {id:?}, for what happened at {fact}"));
            }
            let reads: BTreeSet<_> = model.checkpoints.keys().copied().collect();
            if let Some(entry) = self.entries_of(model).last()
                && !entry.clone().eq(reads.iter().map(|shard| shard.0))
            {
                return Some(format!("{name} reads {reads:?}, and has still to go over to {entry:?}"));
            }
            let mut keys = model.keys.iter().flat_map(|(id, keys)| keys.keys().map(move |shard| (id, shard)));
            let (id, shard) = keys.find(|(_, shard)| !reads.contains(shard))?;
            Some(format!("{name} reads {reads:?}, and has a key of {id:?} in {shard}"))
        })
    }

    /// Judges whether `rows` still contain anything of consumers that no longer exist.
    pub fn judge_left(&self, rows: &Rows) -> Verdict {
        let is_left = |key: &Bytes| match StoredItem::of(key) {
            StoredItem::ConsumerCheckpoint(name, _)
            | StoredItem::Deferred(name, ..)
            | StoredItem::LowWatermark(name)
            | StoredItem::Idle(name) => !self.consumers.contains_key(&name),
            StoredItem::Lease(pool, _) => {
                pool.strip_prefix("consumer/").is_some_and(|name| !self.consumers.contains_key(name))
            }
            _ => false,
        };
        match rows.keys().find(|key| is_left(key)) {
            Some(key) => Guarantee::Consistent
                .fails(format!("of a consumer that is gone {:?} is left", StoredItem::of(key))),
            None => Ok(()),
        }
    }

    /// Returns the position up to which consumers keep no tombstones; `None` if there are no consumers.
    pub(super) fn passed_by_consumers(&self) -> Option<Sequence> {
        let of_notifications = self.consumers.values().filter(|model| model.row.instance.is_none());
        of_notifications.map(|model| model.low.unwrap_or(model.row.start.position())).min()
    }
}

/// Decodes the value at the key of an id.
fn stored_key(value: Option<&Bytes>) -> Result<Option<StoredKey>, String> {
    value.map(|value| inspect::deferred(value)).transpose().map_err(|error| error.to_string())
}

/// Whether the key of `id` moves: from another shard to `shard` if `comes`, otherwise from `shard` to another one.
fn is_moved(items: &StoredChanges<'_>, (name, shard, id): (&str, ShardId, &str), comes: bool) -> bool {
    items.iter().any(|(item, other)| match item {
        StoredItem::Deferred(of, there, moved) => {
            of == name && *there != shard && moved == id.as_bytes() && other.after.is_some() != comes
        }
        _ => false,
    })
}
