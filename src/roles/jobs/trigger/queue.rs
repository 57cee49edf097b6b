//! [`Queue`]: orders the due names, in fair shares of their tenants.
//!
//! The next task belongs to the tenant with the fewest running tasks for its weight; among equal tenants, to the one that was served
//! longest ago; and among a tenant's names, to the one that was due first. So a tenant with a single name waits no longer than a task
//! takes, even beside a tenant with a million names.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use super::tenants::{Tenant, Tenants};
use crate::base::event::DbName;

/// The cost of a running task for a tenant of weight 1.
const UNIT: u64 = 1 << 32;

/// The state of a tenant.
#[derive(Debug)]
struct Share {
    /// Its weight, compared with other tenants.
    weight: u64,
    /// Names that are due.
    ready: BTreeSet<(Duration, DbName)>,
    /// Number of its names with waiting or running work.
    pending: usize,
    running: usize,
    /// The number of its last started task.
    served: u64,
}

impl Share {
    /// Its order among the tenants, lowest first; `None` if none of its names may be started.
    fn turn(&self, jobs_max: usize) -> Option<(u64, u64)> {
        let may_start = !self.ready.is_empty() && self.running < jobs_max;
        may_start.then(|| (self.running as u64 * UNIT / self.weight, self.served))
    }
}

#[derive(Debug)]
pub(super) struct Queue {
    /// Finds the tenants of names, with their limits.
    tenants: Tenants,
    /// Names that are not due yet.
    later: BTreeSet<(Duration, DbName, Tenant)>,
    shares: HashMap<Tenant, Share>,
    /// The tenants that may start a task, in order.
    turns: BTreeSet<(u64, u64, Tenant)>,
    ready: usize,
    served: u64,
}

impl Queue {
    pub fn new(tenants: Tenants) -> Self {
        let (later, shares, turns) = (BTreeSet::new(), HashMap::new(), BTreeSet::new());
        Self { tenants, later, shares, turns, ready: 0, served: 0 }
    }

    pub fn tenant(&self, name: &DbName) -> Tenant {
        self.tenants.of(name)
    }

    /// Number of waiting names.
    pub fn len(&self) -> usize {
        self.later.len() + self.ready
    }

    /// When the next task may be started; zero if one may now.
    pub fn next_due(&self) -> Option<Duration> {
        if !self.turns.is_empty() {
            return Some(Duration::ZERO);
        }
        self.later.first().map(|(due, ..)| *due)
    }

    /// Number of names of `tenant` with waiting or running work.
    pub fn pending(&self, tenant: &Tenant) -> usize {
        self.shares.get(tenant).map_or(0, |share| share.pending)
    }

    /// Whether `tenant` has as many such names as allowed.
    pub fn is_full(&self, tenant: &Tenant) -> bool {
        self.pending(tenant) >= self.tenants.pending_max
    }

    /// Whether half of the places of `tenant` are free.
    pub fn is_half_empty(&self, tenant: &Tenant) -> bool {
        self.pending(tenant) <= self.tenants.pending_max / 2
    }

    /// Whether one more task of `tenant` may run.
    pub fn may_run(&self, tenant: &Tenant) -> bool {
        self.shares.get(tenant).is_none_or(|share| share.running < self.tenants.jobs_max)
    }

    /// Adds a name of `tenant` with waiting or running work.
    pub fn enter(&mut self, tenant: &Tenant) {
        self.change(tenant, |share| share.pending += 1);
    }

    /// Removes a name of `tenant` without work.
    pub fn leave(&mut self, tenant: &Tenant) {
        self.change(tenant, |share| share.pending -= 1);
    }

    /// Makes `name` wait until `due`.
    pub fn put(&mut self, tenant: &Tenant, name: &DbName, due: Duration) {
        self.later.insert((due, name.clone(), Tenant::clone(tenant)));
    }

    /// Removes `name`, which waits until `due`.
    pub fn take(&mut self, tenant: &Tenant, name: &DbName, due: Duration) {
        if !self.later.remove(&(due, name.clone(), Tenant::clone(tenant))) {
            let place = (due, name.clone());
            let was_ready = self.change(tenant, |share| share.ready.remove(&place));
            self.ready -= usize::from(was_ready);
        }
    }

    /// Removes and returns the name whose turn it is at `now`.
    pub fn next(&mut self, now: Duration) -> Option<DbName> {
        self.ripen(now);
        let (_, _, tenant) = self.turns.first()?.clone();
        let next = self.change(&tenant, |share| share.ready.pop_first());
        let (_, name) = next.expect("whose turn it is has something ready");
        self.ready -= 1;
        Some(name)
    }

    /// Whether a task may be started at `now`.
    pub fn is_due(&mut self, now: Duration) -> bool {
        self.ripen(now);
        !self.turns.is_empty()
    }

    /// Counts a started task of `tenant`.
    pub fn started(&mut self, tenant: &Tenant) {
        self.served += 1;
        let served = self.served;
        self.change(tenant, |share| (share.running, share.served) = (share.running + 1, served));
    }

    /// Counts an ended task of `tenant`.
    pub fn ended(&mut self, tenant: &Tenant) {
        self.change(tenant, |share| share.running -= 1);
    }

    /// Moves the names that are due at `now` to the ready ones.
    fn ripen(&mut self, now: Duration) {
        while self.later.first().is_some_and(|(due, ..)| *due <= now) {
            let (due, name, tenant) = self.later.pop_first().expect("there is one");
            self.change(&tenant, |share| share.ready.insert((due, name)));
            self.ready += 1;
        }
    }

    /// Changes the state of `tenant`, and its turn accordingly.
    fn change<T>(&mut self, tenant: &Tenant, change: impl FnOnce(&mut Share) -> T) -> T {
        let Self { tenants, shares, turns, .. } = self;
        let share = shares.entry(Tenant::clone(tenant)).or_insert_with(|| Share {
            weight: tenants.weight(tenant),
            ready: BTreeSet::new(),
            pending: 0,
            running: 0,
            served: 0,
        });
        let before = share.turn(tenants.jobs_max);
        let changed = change(share);
        let after = share.turn(tenants.jobs_max);
        let is_idle = share.pending == 0 && share.running == 0 && share.ready.is_empty();
        if before != after {
            if let Some((running, served)) = before {
                turns.remove(&(running, served, Tenant::clone(tenant)));
            }
            if let Some((running, served)) = after {
                turns.insert((running, served, Tenant::clone(tenant)));
            }
        }
        if is_idle {
            shares.remove(tenant);
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn name(text: &str) -> DbName {
        DbName::new(text).unwrap()
    }

    /// A queue in which each tenant has ten due names; those of the first tenant are due first.
    fn filled(tenants: Tenants, named: &[&str]) -> Queue {
        let mut queue = Queue::new(tenants);
        for (index, tenant) in named.iter().enumerate() {
            for n in 0..10 {
                let name = name(&format!("{tenant}/{n}"));
                let tenant = queue.tenant(&name);
                queue.enter(&tenant);
                queue.put(&tenant, &name, SECOND * index as u32);
            }
        }
        queue
    }

    /// Starts `count` tasks, and counts them by tenant.
    fn start(queue: &mut Queue, count: usize) -> BTreeMap<String, usize> {
        let mut started = BTreeMap::new();
        for _ in 0..count {
            let Some(name) = queue.next(SECOND * 100) else { break };
            let tenant = queue.tenant(&name);
            queue.started(&tenant);
            *started.entry(tenant.to_string()).or_default() += 1;
        }
        started
    }

    #[test]
    fn tenants_have_fair_shares_in_any_order_of_arrival() {
        let mut queue = filled(Tenants::default(), &["a", "b", "c"]);
        assert_eq!(queue.len(), 30);
        let started = start(&mut queue, 6);
        assert_eq!(started, [("a", 2), ("b", 2), ("c", 2)].map(|(t, n)| (t.to_owned(), n)).into());
        // The tenant whose task has ended is next.
        queue.ended(&"b".into());
        assert_eq!(start(&mut queue, 1), [("b".to_owned(), 1)].into());
        assert_eq!(queue.len(), 23);
    }

    #[test]
    fn shares_go_by_weight_and_no_tenant_has_more_than_it_may() {
        let tenants = Tenants::default().weighted(|tenant| if tenant == "a" { 3 } else { 1 });
        let started = start(&mut filled(tenants.clone(), &["b", "a"]), 8);
        assert_eq!(started, [("a", 6), ("b", 2)].map(|(t, n)| (t.to_owned(), n)).into());
        let mut queue = filled(tenants.jobs_max(4), &["b", "a"]);
        let started = start(&mut queue, 100);
        assert_eq!(started, [("a", 4), ("b", 4)].map(|(t, n)| (t.to_owned(), n)).into());
        assert!(!queue.may_run(&"a".into()) && !queue.is_due(SECOND * 100) && queue.next_due().is_none());
        queue.ended(&"a".into());
        assert!(queue.is_due(SECOND * 100) && queue.next_due().is_some());
    }

    #[test]
    fn what_is_taken_out_is_not_started_and_nothing_is_kept_of_idle_tenants() {
        let mut queue = filled(Tenants::default(), &["a"]);
        let tenant: Tenant = "a".into();
        assert!(queue.is_due(SECOND));
        queue.put(&tenant, &name("a/later"), SECOND * 9);
        queue.take(&tenant, &name("a/later"), SECOND * 9);
        for n in 0..10 {
            queue.take(&tenant, &name(&format!("a/{n}")), Duration::ZERO);
            queue.leave(&tenant);
        }
        assert_eq!((queue.next(SECOND * 100), queue.len(), queue.shares.len()), (None, 0, 0));
    }

    #[test]
    fn a_tenant_is_full_and_half_empty_by_its_names() {
        let queue = filled(Tenants::default().pending_max(10), &["a"]);
        assert!(queue.is_full(&"a".into()) && !queue.is_half_empty(&"a".into()));
        assert!(!queue.is_full(&"b".into()) && queue.is_half_empty(&"b".into()));
    }
}
