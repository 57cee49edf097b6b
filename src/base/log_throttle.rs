//! [`LogThrottle`]: logs recurring events once, and then with growing pauses and a count.

use std::{collections::BTreeMap, time::Duration};

use parking_lot::Mutex;

/// The pause after the first line for a cause. It doubles with each further line.
const PAUSE_MIN: Duration = Duration::from_mins(1);

/// The maximum pause between two lines for a cause.
const PAUSE_MAX: Duration = Duration::from_hours(1);

/// A cause that was not seen for this long is logged as a new one.
const FORGOTTEN_AFTER: Duration = Duration::from_mins(10);

/// The maximum number of causes with lines of their own; all others share one cause.
const CAUSES_MAX: usize = 256;

/// Decides which lines are logged, by their causes.
#[derive(Debug, Default)]
pub(crate) struct LogThrottle(Mutex<BTreeMap<String, Cause>>);

#[derive(Debug)]
struct Cause {
    /// When the cause may be logged again.
    due: Duration,
    /// The pause after the next line.
    pause: Duration,
    /// When the cause was last seen.
    seen: Duration,
    /// How many times the cause was seen since it was last logged.
    unsaid: u64,
}

impl LogThrottle {
    /// Records that `cause` was seen at `now`. If a line is now due, returns how many times it was seen since its last line.
    pub fn is_due(&self, now: Duration, cause: String) -> Option<u64> {
        let mut causes = self.0.lock();
        causes.retain(|_, cause| now.saturating_sub(cause.seen) < FORGOTTEN_AFTER.max(cause.pause));
        let cause =
            if causes.len() < CAUSES_MAX || causes.contains_key(&cause) { cause } else { String::new() };
        let known = causes.entry(cause).or_insert(Cause { due: now, pause: PAUSE_MIN, seen: now, unsaid: 0 });
        known.seen = now;
        if now < known.due {
            known.unsaid += 1;
            return None;
        }
        known.due = now.saturating_add(known.pause);
        known.pause = known.pause.saturating_mul(2).min(PAUSE_MAX);
        Some(std::mem::take(&mut known.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a loop logged each of its failures, 65 lines a second, without end.
    #[test]
    fn a_cause_is_said_once_and_then_with_growing_pauses() {
        let (throttle, minute) = (LogThrottle::default(), 60);
        let at = |second| throttle.is_due(Duration::from_secs(second), "store".to_owned());
        let said: Vec<_> =
            (0..100 * minute).filter_map(|second| Some((second / minute, at(second)?))).collect();
        let minutes = [0, 1, 3, 7, 15, 31, 63];
        assert_eq!(said.iter().map(|(minute, _)| *minute).collect::<Vec<_>>(), minutes);
        let unsaid: u64 = said.iter().map(|(_, unsaid)| unsaid).sum();
        assert_eq!(unsaid, 63 * minute - 6, "what was not said is counted");
        let now = Duration::from_secs(100 * minute);
        assert!(throttle.is_due(now, "other".to_owned()).is_some(), "another cause is said at once");
        assert!(throttle.is_due(now, "other".to_owned()).is_none());
        assert_eq!(at(400 * minute), Some(0), "it was forgotten");
    }

    /// Others can choose the names of causes, so the memory for causes must be bounded.
    #[test]
    fn beyond_its_bound_causes_share_a_line() {
        let throttle = LogThrottle::default();
        let said = (0..1_000).filter(|n| throttle.is_due(Duration::ZERO, n.to_string()).is_some()).count();
        assert_eq!(said, CAUSES_MAX + 1);
    }
}
