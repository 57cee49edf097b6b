//! [`RetryPolicy`]: how long, how many times and how fast a transaction is tried again; and [`Tries`], which all retry loops share.

use std::time::Duration;

use super::{Transaction, types::TRANSACTION_LIFETIME};
use crate::base::{
    backoff::Backoff,
    env::Env,
    error::{Error, Result},
};

/// Limits and pauses of [`Store::run_with`](super::Store::run_with).
///
/// The client of a cluster paces retries by itself, so there only the two limits apply, not the pauses. Elsewhere the pause before attempt
/// n + 1 is drawn at random between half and all of `backoff_min * 2^n`, at most `backoff_max`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RetryPolicy {
    /// Give up after this many attempts. Default: no limit.
    pub attempts_max: Option<u32>,
    /// Begin no further attempt after trying for this long. An attempt counts for at most [`Transaction::LIFETIME`]: if it takes longer,
    /// the store was unavailable, and the run deserves another attempt once the store is back. Default: 60 s.
    pub elapsed_max: Option<Duration>,
    /// The first pause. Default: 1 ms.
    pub backoff_min: Duration,
    /// The longest pause. Default: 1 s.
    pub backoff_max: Duration,
}

crate::base::macros::setters!(RetryPolicy { attempts_max: Option<u32>, elapsed_max: Option<Duration>, backoff_min: Duration, backoff_max: Duration });

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
    /// Returns the pauses after failed attempts.
    pub(crate) fn backoff(&self) -> Backoff {
        Backoff { min: self.backoff_min, max: self.backoff_max }
    }

    /// Whether attempt number `attempt`, counted from 1, was the last one allowed, after trying for `tried`.
    pub(crate) fn is_exhausted(&self, attempt: u32, tried: Duration) -> bool {
        self.attempts_max.is_some_and(|max| attempt >= max)
            || self.elapsed_max.is_some_and(|max| tried >= max)
    }
}

/// The attempts of one run.
pub(crate) struct Tries<'a> {
    policy: &'a RetryPolicy,
    env: &'a Env,
    /// The transaction, which is the same in all attempts.
    transaction: Transaction,
    /// When the attempt began, on the clock of `env`.
    attempt_started: Duration,
    /// The total time that the earlier attempts count for.
    tried: Duration,
    /// The number of the current attempt, counted from 1.
    number: u32,
}

impl<'a> Tries<'a> {
    /// Begins the first attempt of a run with `transaction`.
    pub fn begin(transaction: Transaction, env: &'a Env, policy: &'a RetryPolicy) -> Self {
        Self { policy, env, transaction, attempt_started: env.now(), tried: Duration::ZERO, number: 1 }
    }

    /// Returns a handle to the transaction.
    pub fn transaction(&self) -> Transaction {
        self.transaction.clone()
    }

    /// Returns the number of the current attempt, counted from 1.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Waits after `error` and begins the next attempt. Fails with the error that ends the run, if no further attempt can help or is
    /// allowed.
    pub async fn recover(&mut self, error: Error) -> Result<()> {
        let last = match error {
            Error::Store(last) if self.transaction.is_retryable(&last) => last,
            error => return Err(error),
        };
        let attempt = self.number;
        let now = self.env.now();
        let lasted = now.saturating_sub(std::mem::replace(&mut self.attempt_started, now));
        self.tried += lasted.min(TRANSACTION_LIFETIME);
        if self.policy.is_exhausted(attempt, self.tried) {
            return Err(Error::RetriesExhausted { attempts: attempt, last });
        }
        tracing::debug!(attempt, error = %last, "transaction failed, trying again");
        let backoff = self.env.sleep(self.policy.backoff().pause(attempt, self.env));
        self.transaction.recover(Error::Store(last), backoff).await?;
        self.number = attempt.saturating_add(1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_limit_ends_it() {
        let policy = RetryPolicy { attempts_max: Some(3), ..RetryPolicy::default() };
        assert!(!policy.is_exhausted(2, Duration::from_secs(1)));
        assert!(policy.is_exhausted(3, Duration::ZERO));
        assert!(policy.is_exhausted(1, Duration::from_mins(1)));
    }
}
