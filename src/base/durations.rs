//! [`Count`]: a count that only grows; and [`Durations`]: the counts of a histogram.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// The upper bounds of the counts, in milliseconds. One more count is for everything above the last bound.
const BOUNDS_MS: [u64; 13] = [1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000];

/// A count that only grows.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A histogram of how long something took.
#[derive(Debug, Default)]
pub(crate) struct Durations {
    /// The number of durations above the previous bound and up to this one.
    counts: [Count; BOUNDS_MS.len() + 1],
    /// The sum, in microseconds.
    micros: Count,
}

impl Durations {
    /// Adds one duration.
    pub fn add(&self, took: Duration) {
        let place = BOUNDS_MS.partition_point(|&bound| Duration::from_millis(bound) < took);
        self.counts[place].add(1);
        self.micros.add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
    }

    /// Returns the sum in seconds, and each count with its upper bound in seconds.
    #[cfg(feature = "http")]
    pub fn snapshot(&self) -> (f64, Vec<(f64, u64)>) {
        let bounds =
            BOUNDS_MS.iter().map(|&bound| Duration::from_millis(bound).as_secs_f64()).chain([f64::MAX]);
        let counts = bounds.zip(self.counts.iter().map(Count::get)).collect();
        (Duration::from_micros(self.micros.get()).as_secs_f64(), counts)
    }
}

#[cfg(all(test, feature = "http"))]
mod tests {
    use super::*;

    #[test]
    fn each_duration_is_counted_under_the_next_bound() {
        let durations = Durations::default();
        for took_ms in [0, 1, 2, 3, 10_000, 10_001] {
            durations.add(Duration::from_millis(took_ms));
        }
        let (sum, counts) = durations.snapshot();
        assert!((sum - 20.007).abs() < 1e-9, "{sum}");
        let filled: Vec<_> = counts.into_iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(filled, [(0.001, 2), (0.002, 1), (0.005, 1), (10.0, 1), (f64::MAX, 1)]);
    }
}
