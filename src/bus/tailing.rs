//! [`Tailing`]: whether the tail of the dispatcher stands where the feed ends.

use std::time::Duration;

use parking_lot::Mutex;

use super::Bus;
use crate::{base::encoding::Sequence, roles::dispatcher::Dispatcher};

/// An end of the feed that the tail has not reached yet, and when it was seen.
#[derive(Debug, Default)]
pub(super) struct Tailing(Mutex<Option<(Sequence, Duration)>>);

impl Tailing {
    /// Notes at `now` that the tail has read up to `read`, and that the feed ends at `end`. Returns how long ago that end was seen which
    /// the tail has not reached; zero if it has reached the one that was noted last.
    fn see(&self, read: Sequence, end: Sequence, now: Duration) -> Duration {
        let mut noted = self.0.lock();
        match *noted {
            Some((wanted, since)) if read < wanted => now.saturating_sub(since),
            _ => {
                *noted = Some((end, now));
                Duration::ZERO
            }
        }
    }
}

impl Bus {
    /// For how long the tail of `dispatcher` has not reached an end of the feed that this process has seen; `end` is the present one.
    /// A tail that reads reaches each end soon, even one without rows.
    pub(crate) fn tail_lag(&self, dispatcher: &Dispatcher, end: Sequence) -> Duration {
        self.seen.tailing.see(dispatcher.tailed(), end, self.context.env().now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_lags_since_the_first_end_that_it_has_not_reached() {
        let (tailing, second) = (Tailing::default(), Duration::from_secs);
        let at = |version| Sequence::last_at(crate::base::encoding::Incarnation(0), version);
        assert_eq!(tailing.see(at(1), at(3), second(0)), second(0));
        assert_eq!(tailing.see(at(2), at(4), second(1)), second(1));
        assert_eq!(tailing.see(at(2), at(5), second(2)), second(2));
        // It has reached the end of the first look, and is asked for the present one.
        assert_eq!(tailing.see(at(3), at(6), second(3)), second(0));
        assert_eq!(tailing.see(at(5), at(7), second(4)), second(1));
    }
}
