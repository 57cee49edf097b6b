//! Worlds in doubt: many results are unknown, and some of them for long.

use std::time::Duration;

use fastrand::Rng;

use super::{AbsencePlan, WorldPlan};
use crate::witness::Fault;

impl WorldPlan {
    /// Leaves many results unknown in some worlds, and answers late, so that others act before the transaction is tried again. Groups
    /// give rows up after two attempts there: what the first one has left in doubt is decided between the two. More groups expire, each
    /// after a few passes of the janitor, some of which fail.
    pub(super) fn with_doubts(mut self, random: &mut Rng) -> Self {
        if random.u32(0..6) > 0 {
            return self;
        }
        self.doubts_last = true;
        for fault in [Fault::UnknownCommitted, Fault::LateCommit, Fault::TimedOut] {
            let rate = random.f64() * 0.15;
            if random.u32(0..3) > 0 {
                self.forget(fault);
                self.rates.push((fault, rate));
            }
        }
        for group in &mut self.groups {
            let retry = &mut group.options.retry;
            (retry.attempts_max, retry.backoff_min) = (Some(2), Duration::from_millis(random.u64(10..=200)));
        }
        if self.has_janitor() && !self.churns_groups && random.bool() {
            for group in &mut self.groups {
                let absences = group.absences.get_or_insert_with(|| AbsencePlan::draw(random));
                self.janitor.interval = absences.expiry / random.u32(3..=8);
            }
        }
        self
    }
}
