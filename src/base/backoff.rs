//! [`Backoff`]: the pauses before failed work is tried again; and [`Failures`]: how many times it failed in a row.
//!
//! Everything that is tried again follows this one rule: transactions, work on leases, tasks that panicked, listeners, consumer handlers.
//! Options for the shortest and the longest pause become a [`Backoff`].

use std::time::Duration;

use crate::base::env::Env;

/// The pause after a failure, for loops whose attempts are cheap and independent of each other, such as reads of the store.
pub(crate) const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// Pauses that double with each failure in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Backoff {
    pub min: Duration,
    pub max: Duration,
}

impl Backoff {
    /// The pauses for work that lasts as long as its role.
    pub const ROLE: Self = Self { min: FAILURE_PAUSE, max: Duration::from_mins(1) };

    /// Returns the pause after failure number `failures` in a row, counted from 1: a random time between half and all of
    /// `min * 2^(failures - 1)`, at most `max`, so that work that failed at the same time is not tried again at the same time.
    pub fn pause(&self, failures: u32, env: &Env) -> Duration {
        let doubled = self.min.saturating_mul(1 << failures.saturating_sub(1).min(20));
        env.spread(doubled.min(self.max), 0.5, 1.0)
    }
}

/// How many times something has failed in a row.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Failures(u32);

impl Failures {
    /// Counts one more failure of work that ran for `lasted`, and returns the pause before the next attempt. Work that ran for longer than
    /// the longest pause was fine until then, so the count starts again at one.
    pub fn again(&mut self, backoff: &Backoff, lasted: Duration, env: &Env) -> Duration {
        self.0 = if lasted > backoff.max { 1 } else { self.0.saturating_add(1) };
        backoff.pause(self.0, env)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_their_limit_until_work_has_lasted() {
        let (env, mut failures) = (Env::system(), Failures::default());
        let mut next = |lasted| failures.again(&Backoff::ROLE, Duration::from_secs(lasted), &env);
        for most in [1, 2, 4, 8, 16, 32, 60, 60] {
            let (pause, most) = (next(60), Duration::from_secs(most));
            assert!(pause <= most && pause >= most / 2, "{pause:?} of {most:?}");
        }
        assert!(next(61) <= Duration::from_secs(1));
        assert!(next(0) > Duration::from_millis(999));
        let late = Backoff::ROLE.pause(u32::MAX, &env);
        assert!(late >= Duration::from_secs(30) && late <= Duration::from_mins(1), "{late:?}");
    }
}
