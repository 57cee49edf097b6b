//! [`DispatcherOptions`]: how a dispatcher works; and [`Order`]: what a subscriber asked for.

use std::time::Duration;

use crate::{
    base::{
        cursor::Start,
        error::{Error, Result},
        filter::Filter,
    },
    state::feed::PAGE_ROWS_MAX,
};

/// How a dispatcher works.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DispatcherOptions {
    /// The most rows that the ring holds; subscribers further behind read the feed. Default: 65,536.
    pub ring_rows_max: usize,
    /// The most rows that the tail reads at once, 1 to 10,000. Default: 1,000.
    pub page_rows_max: usize,
    /// How often the tail polls for rows whose hint was lost. Default: 1 s.
    pub poll_interval: Duration,
    /// How many lagging subscribers read the feed at once, 1 to 10,000; others wait for their turn. Default: 8.
    pub catch_ups_max: usize,
    /// The most rows that a lagging subscriber reads at once, and that a batch of the ring has: an idle subscriber holds so many. 1 to
    /// 10,000, and never more than [`DispatcherOptions::page_rows_max`]. Default: 256.
    pub catch_up_rows_max: usize,
}

crate::base::macros::setters!(DispatcherOptions {
    ring_rows_max: usize,
    page_rows_max: usize,
    poll_interval: Duration,
    catch_ups_max: usize,
    catch_up_rows_max: usize
});

impl Default for DispatcherOptions {
    fn default() -> Self {
        Self {
            ring_rows_max: 65_536,
            page_rows_max: 1_000,
            poll_interval: Duration::from_secs(1),
            catch_ups_max: 8,
            catch_up_rows_max: 256,
        }
    }
}

impl DispatcherOptions {
    /// The most that [`DispatcherOptions::catch_ups_max`](field@Self::catch_ups_max) may be.
    pub const CATCH_UPS_MAX: usize = 10_000;
    /// The most that [`DispatcherOptions::page_rows_max`](field@Self::page_rows_max) and
    /// [`DispatcherOptions::catch_up_rows_max`](field@Self::catch_up_rows_max) may be.
    pub const ROWS_MAX: usize = PAGE_ROWS_MAX;

    pub(super) fn check(&self) -> Result<()> {
        if self.ring_rows_max == 0 {
            return Err(Error::invalid("ring_rows_max", "it is zero"));
        }
        for (what, number, max) in [
            ("page_rows_max", self.page_rows_max, Self::ROWS_MAX),
            ("catch_up_rows_max", self.catch_up_rows_max, Self::ROWS_MAX),
            ("catch_ups_max", self.catch_ups_max, Self::CATCH_UPS_MAX),
        ] {
            if !(1..=max).contains(&number) {
                return Err(Error::invalid(what, format!("{number} is not 1 to {max}")));
            }
        }
        if self.poll_interval.is_zero() {
            return Err(Error::invalid("poll_interval", "it is zero"));
        }
        Ok(())
    }
}

/// The start and the options of a subscription.
#[derive(Debug)]
pub(super) struct Order {
    pub filter: Filter,
    pub start: Start,
    /// Whether the feed was just read up to `start`, which is therefore not ahead of the store.
    pub is_caught_up: bool,
    pub skips: bool,
    /// The least time between rounds; `None` to deliver at once.
    pub pace: Option<Duration>,
    pub ddocs: bool,
}

impl Order {
    pub fn new(filter: Filter) -> Self {
        Self {
            ddocs: filter.ddocs.is_some(),
            filter,
            start: Start::Now,
            is_caught_up: false,
            skips: false,
            pace: None,
        }
    }
}
