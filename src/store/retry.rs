//! [`RetryPolicy`]: how long, how often and how fast a transaction is tried again.

use std::time::Duration;

use crate::env::Env;

/// Limits and pauses of [`Database::run_with`](super::Database::run_with).
///
/// A cluster's client paces retries by itself; there the two limits hold and the pauses do not. Elsewhere the pause before
/// attempt n + 1 is drawn at random between half and all of `backoff_min * 2^n`, at most `backoff_max`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Give up after this many attempts. Default: no limit.
    pub attempts_max: Option<u32>,
    /// Begin no attempt after this much time. Default: 60 s.
    pub elapsed_max: Option<Duration>,
    /// The first pause. Default: 1 ms.
    pub backoff_min: Duration,
    /// The longest pause. Default: 1 s.
    pub backoff_max: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts_max: None,
            elapsed_max: Some(Duration::from_mins(1)),
            backoff_min: Duration::from_millis(1),
            backoff_max: Duration::from_secs(1),
        }
    }
}

impl RetryPolicy {
    /// The pause after failed attempt number `attempt`, counted from 1.
    pub(crate) fn backoff(&self, attempt: u32, env: &Env) -> Duration {
        let doubled = self.backoff_min.saturating_mul(1 << (attempt - 1).min(20));
        doubled.min(self.backoff_max).mul_f64(0.5 + env.random_fraction() / 2.0)
    }

    /// Whether failed attempt number `attempt`, counted from 1, was the last one.
    pub(crate) fn is_exhausted(&self, attempt: u32, elapsed: Duration) -> bool {
        self.attempts_max.is_some_and(|max| attempt >= max)
            || self.elapsed_max.is_some_and(|max| elapsed >= max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_up_to_its_limit() {
        let policy = RetryPolicy::default();
        let env = Env::system();
        for (attempt, most_ms) in [(1, 1), (2, 2), (5, 16), (11, 1000), (4_000_000_000, 1000)] {
            let pause = policy.backoff(attempt, &env);
            let most = Duration::from_millis(most_ms);
            assert!(pause <= most && pause >= most / 2, "{attempt}: {pause:?}");
        }
    }

    #[test]
    fn either_limit_ends_it() {
        let policy = RetryPolicy { attempts_max: Some(3), ..RetryPolicy::default() };
        assert!(!policy.is_exhausted(2, Duration::from_secs(1)));
        assert!(policy.is_exhausted(3, Duration::ZERO));
        assert!(policy.is_exhausted(1, Duration::from_mins(1)));
    }
}
