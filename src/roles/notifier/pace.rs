//! [`Pace`]: how long a partition rests after a fold, so that folding takes a bounded share of the processor's time.
//!
//! Only the time that a fold spends computing costs a rest. A fold that waits for the store already rests: the events of that time are
//! coalesced, and another pause would only add latency.

use std::time::Duration;

use super::options::NotifierOptions;

/// The shortest rest, because timers are not more precise. Shorter rests accumulate until they reach it.
const REST_MIN: Duration = Duration::from_millis(1);

/// A fold that computes for at least this time is long.
const LONG: Duration = Duration::from_micros(250);

/// The rest that a partition still has to take.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The rest that remained when the last fold ended.
    left: Duration,
    /// When the last fold ended, on the clock of the store.
    ended: Duration,
    /// The time that the last fold spent computing.
    computed: Duration,
}

impl Pace {
    /// Records a fold from `began` to `ended`, which spent `computed` of that time computing. Time spent waiting counts as rest.
    pub fn folded(
        &mut self,
        (began, ended): (Duration, Duration),
        computed: Duration,
        options: &NotifierOptions,
    ) {
        let percent = u32::from(options.fold_percent.clamp(1, 100));
        let rest = computed.saturating_mul(100 - percent) / percent;
        let waited = ended.saturating_sub(began).saturating_sub(computed);
        let left = self.rest(began).saturating_add(rest).saturating_sub(waited);
        (self.left, self.ended) = (left.min(options.fold_interval_max), ended);
        self.computed = computed;
    }

    /// Whether the last fold was long, so that the next one is likely to be.
    pub fn is_long(&self) -> bool {
        self.computed >= LONG
    }

    pub fn pause(&self, now: Duration) -> Duration {
        let rest = self.rest(now);
        if rest < REST_MIN { Duration::ZERO } else { rest }
    }

    fn rest(&self, now: Duration) -> Duration {
        self.left.saturating_sub(now.saturating_sub(self.ended))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    #[test]
    fn a_fold_rests_for_as_long_as_its_share_of_time_asks() {
        let options = NotifierOptions { fold_percent: 25, ..NotifierOptions::default() };
        let mut pace = Pace::default();
        assert_eq!(pace.pause(us(0)), us(0), "an idle partition is folded at once");
        assert!(!pace.is_long(), "and waits for no other one");
        pace.folded((us(1_000), us(3_000)), us(2_000), &options);
        assert_eq!(pace.pause(us(3_000)), us(6_000));
        assert!(pace.is_long());
        assert_eq!(pace.pause(us(7_000)), us(2_000), "time that passes is rest");
        pace.folded((us(9_000), us(59_000)), us(50_000), &options);
        assert_eq!(pace.pause(us(59_000)), options.fold_interval_max);
    }

    /// Regression: a fold that waited for a slow store then paused for a multiple of that time, which doubled the latency and saved
    /// nothing. Now only the time that a fold spends computing counts.
    #[test]
    fn time_that_a_fold_waits_is_rest() {
        let options = NotifierOptions { fold_percent: 25, ..NotifierOptions::default() };
        let mut pace = Pace::default();
        pace.folded((us(0), us(100_000)), us(2_000), &options);
        assert_eq!(pace.pause(us(100_000)), us(0), "it has waited for 98 ms");
        pace.folded((us(100_000), us(106_000)), us(2_000), &options);
        assert_eq!(pace.pause(us(106_000)), us(2_000), "it has waited for 4 ms of the 6");
    }

    #[test]
    fn short_rests_are_added_up() {
        let options = NotifierOptions { fold_percent: 50, ..NotifierOptions::default() };
        let mut pace = Pace::default();
        let (mut now, mut folds) = (us(0), 0);
        while pace.pause(now).is_zero() {
            pace.folded((now, now + us(100)), us(100), &options);
            now += us(100);
            folds += 1;
        }
        assert_eq!((folds, pace.pause(now)), (10, us(1_000)));
    }

    #[test]
    fn without_a_longest_pause_there_is_none() {
        let options = NotifierOptions { fold_interval_max: us(0), ..NotifierOptions::default() };
        let mut pace = Pace::default();
        pace.folded((us(0), us(50_000)), us(50_000), &options);
        assert_eq!(pace.pause(us(50_000)), us(0));
    }
}
