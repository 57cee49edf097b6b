//! Tests of the plan, step by step.

use super::*;
use crate::base::{
    encoding::{Incarnation, Sequence, Versionstamp},
    event::DbInstance,
};

impl Merge for Vec<u32> {
    fn merge(&mut self, later: Self) {
        self.extend(later);
    }
}

const SECOND: Duration = Duration::from_secs(1);

fn db(instance: u8) -> Db {
    Db::new(DbName::new("db").unwrap(), DbInstance([instance; 16]))
}

fn at(version: u64) -> Cursor {
    Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0).into()
}

fn plan() -> Plan<Vec<u32>> {
    Plan::new(Pacing { debounce: SECOND, tasks_max: 2 }, Tenants::default())
}

/// Where a trigger that starts again begins.
fn since(plan: &Plan<Vec<u32>>) -> Option<Cursor> {
    plan.since_without(&BTreeSet::new())
}

fn seen(instance: u8, work: u32, since: u64) -> Observed<Vec<u32>> {
    Observed { db: db(instance), replaced: None, work: Some(vec![work]), since: at(since) }
}

fn end(plan: &mut Plan<Vec<u32>>, now: Duration, number: u64, is_done: bool) -> Outcome {
    let end = if is_done { End::Done(Vec::new()) } else { End::Failed };
    plan.end(now, (&db(1).name, number), end, |failures| SECOND * 10 * failures)
}

#[test]
fn work_waits_for_more_of_the_same_but_is_not_put_off() {
    let mut plan = plan();
    plan.observe(SECOND, seen(1, 1, 1));
    plan.observe(SECOND * 19 / 10, seen(1, 2, 2));
    assert_eq!(plan.start(SECOND * 19 / 10), None);
    let (number, task, attempt) = plan.start(SECOND * 2).unwrap();
    assert_eq!((task, attempt), (PlannedTask::Work(db(1), vec![1, 2]), 1));
    assert_eq!(since(&plan), Some(at(1)));
    assert_eq!(end(&mut plan, SECOND * 3, number, true), Outcome::Done);
    assert_eq!((plan.len(), since(&plan), plan.next_due()), (0, None, None));
}

#[test]
fn what_could_not_be_begun_waits_for_the_news_of_others_and_is_no_attempt() {
    let mut plan = plan();
    let backoff = |failures| SECOND * 10 * failures;
    let name = db(3).name;
    plan.observe(SECOND, seen(3, 1, 1));
    let (number, ..) = plan.start(SECOND * 2).unwrap();
    let put_off = End::PutOff(Vec::new());
    assert_eq!(plan.end(SECOND * 2, (&name, number), put_off, backoff), Outcome::Failed);
    let (number, task, attempt) = plan.start(SECOND * 12).unwrap();
    assert_eq!((task, attempt), (PlannedTask::Work(db(3), vec![1]), 1));
    let put_off = End::PutOff(vec![db(2)]);
    assert_eq!(plan.end(SECOND * 12, (&name, number), put_off, backoff), Outcome::PutOff);
    assert_eq!(since(&plan), Some(at(1)));
    let (number, task, _) = plan.start(SECOND * 12).unwrap();
    assert_eq!(task, PlannedTask::Gone(db(2)));
    // A task may find a gone instance, too; the job is informed before the work.
    let done = End::Done(vec![db(1)]);
    assert_eq!(plan.end(SECOND * 12, (&name, number), done, backoff), Outcome::Done);
    let (number, task, _) = plan.start(SECOND * 12).unwrap();
    assert_eq!(task, PlannedTask::Gone(db(1)));
    assert_eq!(plan.end(SECOND * 12, (&name, number), End::Parked, backoff), Outcome::Parked);
    let (_, task, attempt) = plan.start(SECOND * 13).unwrap();
    assert_eq!((task, attempt), (PlannedTask::Work(db(3), vec![1]), 1));
}

#[test]
fn what_comes_while_a_task_runs_causes_another_one_afterwards() {
    let mut plan = plan();
    plan.observe(SECOND, seen(1, 1, 1));
    let (first, ..) = plan.start(SECOND * 2).unwrap();
    plan.observe(SECOND * 2, seen(1, 2, 2));
    assert_eq!(plan.start(SECOND * 100), None, "one at a time");
    assert_eq!(end(&mut plan, SECOND * 100, first, true), Outcome::Done);
    assert_eq!(since(&plan), Some(at(2)), "the first is done");
    let (second, task, _) = plan.start(SECOND * 101).unwrap();
    assert_eq!(task, PlannedTask::Work(db(1), vec![2]));
    assert_eq!(end(&mut plan, SECOND * 102, first, true), Outcome::Stale);
    assert_eq!(end(&mut plan, SECOND * 102, second, true), Outcome::Done);
    assert_eq!(end(&mut plan, SECOND * 102, second, true), Outcome::Stale);
}

#[test]
fn a_failure_is_tried_again_later_with_what_came_since() {
    let mut plan = plan();
    plan.observe(SECOND, seen(1, 1, 1));
    let (number, ..) = plan.start(SECOND * 2).unwrap();
    plan.observe(SECOND * 2, seen(1, 2, 2));
    assert_eq!(end(&mut plan, SECOND * 2, number, false), Outcome::Failed);
    assert_eq!(since(&plan), Some(at(1)));
    assert_eq!(plan.next_due(), Some(SECOND * 12));
    let (number, task, attempt) = plan.start(SECOND * 12).unwrap();
    assert_eq!((task, attempt), (PlannedTask::Work(db(1), vec![1, 2]), 2));
    assert_eq!(end(&mut plan, SECOND * 12, number, false), Outcome::Failed);
    assert_eq!(plan.next_due(), Some(SECOND * 32));
}

#[test]
fn what_is_parked_holds_nothing_back_and_is_tried_again_beside_the_rest() {
    let mut plan = plan();
    let name = db(1).name;
    let backoff = |failures| SECOND * 10 * failures;
    plan.observe(SECOND, seen(1, 1, 1));
    let (number, ..) = plan.start(SECOND * 2).unwrap();
    assert_eq!(plan.end(SECOND * 2, (&name, number), End::Parked, backoff), Outcome::Parked);
    assert_eq!((plan.len(), since(&plan)), (0, None));
    let task = PlannedTask::Work(db(1), vec![9]);
    let number = plan.start_retry(&task).unwrap();
    assert_eq!((plan.len(), since(&plan), plan.running(), plan.retrying()), (1, None, 1, 1));
    assert_eq!(plan.start_retry(&task), None, "one at a time");
    // A change meanwhile causes a task afterwards, and the feed delivers it again until then.
    plan.observe(SECOND * 3, seen(1, 2, 5));
    assert_eq!(since(&plan), Some(at(5)));
    let put_off = End::PutOff(Vec::new());
    assert_eq!(plan.end(SECOND * 3, (&name, number), put_off, backoff), Outcome::Failed);
    assert_eq!((plan.running(), plan.retrying()), (0, 0));
    let (number, task, _) = plan.start(SECOND * 13).unwrap();
    assert_eq!(task, PlannedTask::Work(db(1), vec![2]), "the store knows the rest");
    assert_eq!(plan.end(SECOND * 13, (&name, number), End::OutOfTurn, backoff), Outcome::Stale);
    assert_eq!((plan.len(), since(&plan)), (0, None));
    // The database is deleted during a retry.
    let number = plan.start_retry(&PlannedTask::Work(db(1), vec![9])).unwrap();
    let gone = Observed { db: db(1), replaced: None, work: None, since: at(7) };
    assert_eq!(plan.observe(SECOND * 14, gone), Some(number));
    assert_eq!(plan.end(SECOND * 14, (&name, number), End::Parked, backoff), Outcome::Stale);
    assert_eq!(plan.start(SECOND * 14).unwrap().1, PlannedTask::Gone(db(1)));
    assert_eq!(plan.retrying(), 0);
}

#[test]
fn a_deletion_cancels_and_the_job_is_informed_once_the_task_has_ended() {
    let mut plan = plan();
    plan.observe(SECOND, seen(1, 1, 1));
    let (number, ..) = plan.start(SECOND * 2).unwrap();
    let gone = Observed { db: db(1), replaced: None, work: None, since: at(2) };
    assert_eq!(plan.observe(SECOND * 3, gone), Some(number));
    assert_eq!(plan.start(SECOND * 3), None, "it has not ended yet");
    assert_eq!(end(&mut plan, SECOND * 4, number, true), Outcome::Stale);
    let (number, task, _) = plan.start(SECOND * 4).unwrap();
    assert_eq!(task, PlannedTask::Gone(db(1)));
    assert_eq!(end(&mut plan, SECOND * 4, number, true), Outcome::Done);
    assert_eq!(plan.len(), 0);
}

#[test]
fn a_recreation_begins_afresh_after_the_job_is_informed_of_the_end_of_the_old_one() {
    let mut plan = plan();
    plan.observe(SECOND, seen(1, 1, 1));
    let (number, ..) = plan.start(SECOND * 2).unwrap();
    plan.observe(SECOND * 2, seen(1, 2, 2));
    let again = Observed { replaced: Some(db(1)), ..seen(2, 7, 3) };
    assert_eq!(plan.observe(SECOND * 3, again), Some(number));
    assert_eq!(plan.runs(&db(1).name), Some(&db(1)));
    assert_eq!(end(&mut plan, SECOND * 3, number, false), Outcome::Stale);
    let (number, task, _) = plan.start(SECOND * 3).unwrap();
    assert_eq!(task, PlannedTask::Gone(db(1)));
    assert_eq!(plan.living(), [db(2)]);
    end(&mut plan, SECOND * 3, number, true);
    let (_, task, attempt) = plan.start(SECOND * 4).unwrap();
    assert_eq!((task, attempt), (PlannedTask::Work(db(2), vec![7]), 1), "nothing of the old one is left");
}

#[test]
fn an_instance_that_is_found_to_be_gone_does_not_take_its_successor_along() {
    let mut plan = plan();
    plan.observe(SECOND, seen(2, 1, 5));
    assert_eq!(plan.forget(SECOND, db(1), at(6)), None);
    let (number, task, _) = plan.start(SECOND).unwrap();
    assert_eq!(task, PlannedTask::Gone(db(1)));
    end(&mut plan, SECOND, number, true);
    let (number, task, _) = plan.start(SECOND).unwrap();
    assert_eq!(task, PlannedTask::Work(db(2), vec![1]));
    assert_eq!(plan.forget(SECOND, db(2), at(6)), Some(number));
    end(&mut plan, SECOND, number, false);
    assert_eq!(plan.start(SECOND).unwrap().1, PlannedTask::Gone(db(2)));
}

#[test]
fn no_more_tasks_run_at_once_than_may() {
    let mut plan = plan();
    for n in 0..3 {
        let name = DbName::new(&format!("db{n}")).unwrap();
        let db = Db::new(name, DbInstance([1; 16]));
        plan.observe(SECOND, Observed { db, ..seen(1, n, 1) });
    }
    let now = SECOND * 2;
    let (number, task, _) = plan.start(now).unwrap();
    assert!(plan.start(now).is_some() && plan.start(now).is_none() && plan.next_due().is_none());
    let name = task.db().name.clone();
    plan.end(now, (&name, number), End::Done(Vec::new()), |_| SECOND);
    assert!(plan.start(now).is_some());
}

/// Regression: a job that hung held the cursor back for as long as it hung: after a restart, all that other jobs had done meanwhile
/// was done again.
#[test]
fn what_takes_long_is_noted_in_the_store_and_holds_the_cursor_back_no_longer() {
    let mut plan = plan();
    let name = db(1).name;
    let none = |_: &Vec<u32>| false;
    assert!(!plan.has_place_for_left(), "the list of before is empty");
    plan.observe(SECOND, seen(1, 1, 1));
    let (number, ..) = plan.start(SECOND * 2).unwrap();
    assert_eq!(plan.overdue(SECOND * 10, (SECOND * 10, 5), none), []);
    let overdue = plan.overdue(SECOND * 11, (SECOND * 10, 5), |work| work.contains(&1));
    assert_eq!(overdue, [(name.clone(), true)]);
    plan.set_listed([&name].into_iter());
    assert_eq!((since(&plan), plan.overdue(SECOND * 99, (SECOND, 5), none)), (None, Vec::new()));
    // A change meanwhile is covered, too.
    plan.observe(SECOND * 20, seen(1, 2, 2));
    assert_eq!(since(&plan), None);
    assert_eq!(end(&mut plan, SECOND * 30, number, true), Outcome::Done);
    assert!(plan.settled(5).is_empty(), "something waits");
    let (number, ..) = plan.start(SECOND * 31).unwrap();
    assert_eq!(end(&mut plan, SECOND * 31, number, true), Outcome::Done);
    assert_eq!(plan.settled(5), std::slice::from_ref(&name));
    // Whether the store has removed it is not known, and something else is observed: it counts as listed no more.
    plan.observe(SECOND * 40, seen(1, 3, 7));
    assert_eq!((since(&plan), plan.settled(5)), (Some(at(7)), Vec::new()));
    let (number, ..) = plan.start(SECOND * 41).unwrap();
    assert_eq!(end(&mut plan, SECOND * 41, number, true), Outcome::Done);
    assert_eq!(plan.settled(5), std::slice::from_ref(&name));
    plan.set_unlisted(&[name]);
    assert!(plan.settled(5).is_empty());
}

#[test]
fn what_was_owed_is_done_after_a_restart() {
    let mut plan = plan();
    let (name, now) = (db(1).name, SECOND * 5);
    assert!(plan.wants_owed(&name));
    plan.observe_owed(now, &name, Some((db(2), vec![7])), Vec::new());
    assert!(!plan.wants_owed(&name), "it is in hand");
    let (number, task, _) = plan.start(now).unwrap();
    assert_eq!((task, since(&plan)), (PlannedTask::Work(db(2), vec![7]), None));
    assert_eq!(end(&mut plan, now, number, true), Outcome::Done);
    assert!(!plan.wants_owed(&name), "it is done");
    assert_eq!(plan.settled(5), std::slice::from_ref(&name));
    // A name whose instance is gone, and a name without any work.
    plan.observe_owed(now, &name, None, vec![db(1)]);
    let (number, task, _) = plan.start(now).unwrap();
    assert_eq!(task, PlannedTask::Gone(db(1)));
    assert_eq!(end(&mut plan, now, number, true), Outcome::Done);
    plan.set_unlisted(std::slice::from_ref(&name));
    plan.observe_owed(now, &name, None, Vec::new());
    assert_eq!((plan.len(), plan.settled(5)), (0, vec![name.clone()]));
    // The delivery since the start is newer; the owed work is done as well.
    plan.observe(now, seen(3, 1, 9));
    plan.observe_owed(now, &name, Some((db(2), vec![7])), vec![db(1)]);
    let (number, task, _) = plan.start(now).unwrap();
    assert_eq!(task, PlannedTask::Work(db(3), vec![1]));
    plan.observe_owed(now, &name, Some((db(3), vec![8])), Vec::new());
    assert_eq!(end(&mut plan, now, number, true), Outcome::Done);
    assert_eq!(plan.start(now + SECOND).unwrap().1, PlannedTask::Work(db(3), vec![8]));
}

#[test]
fn a_tenant_that_has_no_place_left_waits_in_the_store() {
    let tenants = Tenants::default().pending_max(2);
    let mut plan = Plan::new(Pacing { debounce: SECOND, tasks_max: 2 }, tenants);
    let of = |name: &str| DbName::new(name).unwrap();
    for name in ["a/1", "a/2"] {
        assert!(!plan.is_full_for(&of(name)));
        let db = Db::new(of(name), DbInstance([1; 16]));
        plan.observe(SECOND, Observed { db, ..seen(1, 1, 5) });
    }
    assert!(plan.is_full_for(&of("a/3")) && !plan.is_full_for(&of("a/1")) && !plan.is_full_for(&of("b/1")));
    plan.spill(SECOND, of("a/3"), at(3), false);
    plan.spill(SECOND, of("a/3"), at(4), true);
    assert_eq!((since(&plan), plan.spilled()), (Some(at(3)), 1));
    let owed = plan.overdue(SECOND, (SECOND * 9, 5), |_| false);
    assert_eq!(owed, [(of("a/3"), true)]);
    plan.set_listed(owed.iter().map(|(name, _)| name));
    assert_eq!((since(&plan), plan.spilled()), (Some(at(5)), 0));
    assert!(!plan.has_place_for_left() && !plan.wants_owed(&of("a/3")));
    let (number, task, _) = plan.start(SECOND * 2).unwrap();
    plan.end(SECOND * 2, (&task.db().name.clone(), number), End::Done(Vec::new()), |_| SECOND);
    assert!(plan.has_place_for_left(), "half of its places are free");
    assert!(!plan.has_place_for_left(), "once");
    assert!(plan.wants_owed(&of("a/3")));
}

/// A name was done, and was to be removed from the list of the store. Then something came for it, while its tenant had no room: it was
/// listed and removed in one transaction, and never done.
#[test]
fn a_name_that_is_to_be_listed_is_not_removed_from_the_list() {
    let mut plan = Plan::new(Pacing { debounce: SECOND, tasks_max: 2 }, Tenants::default().pending_max(1));
    let [first, other] = ["a/1", "a/2"].map(|name| DbName::new(name).unwrap());
    let of = |name: &DbName| Db::new(name.clone(), DbInstance([1; 16]));
    plan.observe_owed(SECOND, &first, Some((of(&first), vec![1])), Vec::new());
    let (number, ..) = plan.start(SECOND).unwrap();
    plan.end(SECOND, (&first, number), End::Done(Vec::new()), |_| SECOND);
    assert_eq!(plan.settled(5), std::slice::from_ref(&first));
    plan.observe(SECOND, Observed { db: of(&other), ..seen(1, 1, 5) });
    plan.spill(SECOND, first.clone(), at(6), false);
    assert_eq!(plan.overdue(SECOND, (SECOND * 9, 5), |_| false), [(first.clone(), false)]);
    assert!(plan.settled(5).is_empty());

    // It was read before it was to be listed, and is done before it is.
    let (number, ..) = plan.start(SECOND * 3).unwrap();
    plan.end(SECOND * 3, (&other, number), End::Done(Vec::new()), |_| SECOND);
    plan.observe_owed(SECOND * 3, &first, Some((of(&first), vec![1])), Vec::new());
    let (number, ..) = plan.start(SECOND * 4).unwrap();
    plan.end(SECOND * 4, (&first, number), End::Done(Vec::new()), |_| SECOND);
    assert!(plan.settled(5).is_empty());
    assert_eq!(since(&plan), Some(at(6)));
}

/// A database was parked, deleted and created again. A trigger that started tried the parked instance again while it read the owed
/// work on the new one, took the parked one for newer, and removed the name from the list: the new one was never built.
#[test]
fn owed_work_waits_for_the_retry_of_the_parked_instance_before_it() {
    let mut plan = plan();
    let name = db(1).name;
    let number = plan.start_retry(&PlannedTask::Work(db(1), vec![1])).unwrap();
    plan.observe_owed(SECOND, &name, Some((db(2), vec![2])), Vec::new());
    plan.end(SECOND, (&name, number), End::Parked, |_| SECOND);
    assert!(plan.settled(5).is_empty());
    let (number, task, _) = plan.start(SECOND * 3).unwrap();
    assert_eq!(task, PlannedTask::Work(db(2), vec![2]));

    // The feed has delivered the end of the instance since.
    plan.observe(SECOND * 3, Observed { db: db(2), replaced: None, work: None, since: at(1) });
    plan.observe_owed(SECOND * 3, &name, Some((db(2), vec![2])), Vec::new());
    plan.end(SECOND * 3, (&name, number), End::Done(Vec::new()), |_| SECOND);
    let (number, task, _) = plan.start(SECOND * 9).unwrap();
    assert_eq!(task, PlannedTask::Gone(db(2)));
    plan.end(SECOND * 9, (&name, number), End::Done(Vec::new()), |_| SECOND);
    assert_eq!(plan.len(), 0);
}

/// A name had work that found no room, while the retry of a parked instance of it ran. When the work was listed in the store, the
/// retry was taken for it, and its end removed the name from the list: the job was never informed that the parked instance was
/// gone.
#[test]
fn the_end_of_a_retry_does_not_settle_work_that_found_no_room() {
    let mut plan = Plan::new(Pacing { debounce: SECOND, tasks_max: 2 }, Tenants::default().pending_max(1));
    let [other, name] = ["a/1", "a/2"].map(|name| DbName::new(name).unwrap());
    let of = |name: &DbName| Db::new(name.clone(), DbInstance([1; 16]));
    plan.observe(SECOND, Observed { db: of(&other), ..seen(1, 1, 5) });
    assert!(plan.is_full_for(&name));
    plan.spill(SECOND, name.clone(), at(6), false);
    let retry = plan.start_retry(&PlannedTask::Work(of(&name), vec![1])).unwrap();
    let owed = plan.overdue(SECOND, (SECOND * 9, 5), |_| false);
    assert_eq!(owed, [(name.clone(), false)]);
    plan.set_listed(owed.iter().map(|(name, _)| name));
    plan.end(SECOND, (&name, retry), End::Parked, |_| SECOND);
    assert!(plan.settled(5).is_empty(), "the store lists it still");
    let (number, ..) = plan.start(SECOND * 2).unwrap();
    plan.end(SECOND * 2, (&other, number), End::Done(Vec::new()), |_| SECOND);
    assert!(plan.has_place_for_left() && plan.wants_owed(&name));
    plan.observe_owed(SECOND * 3, &name, None, vec![of(&name)]);
    let (number, task, _) = plan.start(SECOND * 3).unwrap();
    assert_eq!(task, PlannedTask::Gone(of(&name)));
    plan.end(SECOND * 3, (&name, number), End::Done(Vec::new()), |_| SECOND);
    assert_eq!(plan.settled(5), [name]);
}

/// After a start, a name came from the feed before it was read from the list of before, and its job took long. When it was listed as
/// owed, all that the list had of it counted as known, so the work of before was removed undone.
#[test]
fn a_name_that_takes_long_before_the_list_is_read_is_read_nevertheless() {
    for is_read_while_it_runs in [true, false] {
        let mut plan = plan();
        let name = db(1).name;
        plan.observe(SECOND, seen(1, 1, 5));
        let (number, ..) = plan.start(SECOND * 2).unwrap();
        assert_eq!(plan.set_listed([&name].into_iter()), []);
        if is_read_while_it_runs {
            assert!(plan.wants_owed(&name));
            plan.observe_owed(SECOND * 3, &name, Some((db(1), vec![7])), Vec::new());
        }
        assert_eq!(end(&mut plan, SECOND * 4, number, true), Outcome::Done);
        assert!(plan.settled(5).is_empty(), "the list has more of it");
        if !is_read_while_it_runs {
            assert!(plan.has_place_for_left() && plan.wants_owed(&name));
            plan.observe_owed(SECOND * 5, &name, Some((db(1), vec![7])), Vec::new());
        }
        let (number, task, _) = plan.start(SECOND * 9).unwrap();
        assert_eq!(task, PlannedTask::Work(db(1), vec![7]));
        assert_eq!(end(&mut plan, SECOND * 9, number, true), Outcome::Done);
        assert_eq!(plan.settled(5), [name]);
    }
}

/// A name was looked up, and then deleted, while its tenant had no room: its end was to be listed. When there was room again, what had been
/// looked up before came, and its job began. So when the list was read again, that job counted as newer than all that the list had, and
/// its end removed the name: nobody was ever informed that the database is gone, or built the one that was created since.
#[test]
fn what_is_read_while_older_work_of_the_name_runs_is_not_removed_undone() {
    let [other, third, name] = ["a/1", "a/2", "a/3"].map(|name| DbName::new(name).unwrap());
    let of = |name: &DbName, instance| Db::new(name.clone(), DbInstance([instance; 16]));
    for lives_again in [false, true] {
        let tenants = Tenants::default().pending_max(2);
        let mut plan = Plan::new(Pacing { debounce: SECOND, tasks_max: 2 }, tenants);
        assert!(plan.wants_owed(&name), "it is being looked up");
        for full in [&other, &third] {
            plan.observe(SECOND, Observed { db: of(full, 1), ..seen(1, 1, 5) });
        }
        assert!(plan.is_full_for(&name));
        plan.spill(SECOND, name.clone(), at(6), lives_again);
        for _ in 0..2 {
            let (number, task, _) = plan.start(SECOND * 2).unwrap();
            plan.end(SECOND * 2, (&task.db().name.clone(), number), End::Done(Vec::new()), |_| SECOND);
        }
        // This is the result of the earlier look-up.
        assert!(plan.wants_owed(&name));
        plan.observe_owed(SECOND * 3, &name, Some((of(&name, 1), vec![1])), Vec::new());
        let (number, task, _) = plan.start(SECOND * 3).unwrap();
        assert_eq!(task, PlannedTask::Work(of(&name, 1), vec![1]));
        let owed = plan.overdue(SECOND * 3, (SECOND * 9, 5), |_| false);
        assert_eq!(plan.set_listed(owed.iter().map(|(name, _)| name)), std::slice::from_ref(&name));
        // The list is read again, while that runs.
        let read = |plan: &mut Plan<Vec<u32>>, now| {
            if lives_again {
                plan.observe_owed(now, &name, Some((of(&name, 2), vec![2])), Vec::new());
            } else {
                plan.observe_owed(now, &name, None, vec![of(&name, 1)]);
            }
        };
        assert!(plan.has_place_for_left() && plan.wants_owed(&name));
        read(&mut plan, SECOND * 4);
        plan.end(SECOND * 5, (&name, number), End::Done(Vec::new()), |_| SECOND);
        assert!(plan.settled(5).is_empty(), "the list has more of it");
        if plan.has_place_for_left() && plan.wants_owed(&name) {
            read(&mut plan, SECOND * 6);
        }
        let (number, task, _) = plan.start(SECOND * 9).expect("the rest is done as well");
        if lives_again {
            assert_eq!(task, PlannedTask::Work(of(&name, 2), vec![2]));
        } else {
            assert_eq!(task, PlannedTask::Gone(of(&name, 1)));
        }
        plan.end(SECOND * 9, (&name, number), End::Done(Vec::new()), |_| SECOND);
        assert_eq!(plan.settled(5), std::slice::from_ref(&name));
    }
}
