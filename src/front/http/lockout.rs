//! [`Failures`] counts failed log-ins by name and network, until they expire.
//!
//! The same counts limit how many lines the log gets about one address. The table has a bound: when it is full, it forgets the
//! pairs whose last failure is the oldest.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

use parking_lot::Mutex;

/// A name, by its place or its hash, and the network that the log-in came from.
type Key = (u64, IpAddr);

/// The failures of a pair.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// How many there are, including checks in progress.
    failures: u32,
    /// When the last check began.
    last: Duration,
}

/// Counts the failed log-ins of pairs of a name and a network.
#[derive(Debug)]
pub(super) struct Failures {
    entries: Mutex<HashMap<Key, Entry>>,
    allowed: u32,
    /// How long a failure counts after the last one.
    lifetime: Duration,
    /// How many pairs are remembered.
    entries_max: usize,
}

impl Failures {
    /// Allows each pair `failures_max` failures, which expire `lifetime` after the last one; remembers `entries_max` pairs.
    pub fn new(failures_max: u32, lifetime: Duration, entries_max: usize) -> Self {
        Self { entries: Mutex::default(), allowed: failures_max, lifetime, entries_max }
    }

    /// Counts a try as a failure, until [`Failures::clear`] or [`Failures::take_back`] removes it. So parallel tries count like
    /// tries one after the other. Returns the number of failures. Fails with the remaining time if the pair is locked out.
    pub fn count(&self, key: Key, now: Duration) -> Result<u32, Duration> {
        let mut entries = self.entries.lock();
        if !entries.contains_key(&key) && entries.len() >= self.entries_max {
            self.forget(&mut entries, now);
        }
        let entry = entries.entry(key).or_insert(Entry { failures: 0, last: now });
        let age = now.saturating_sub(entry.last);
        if age >= self.lifetime {
            entry.failures = 0;
        }
        if entry.failures >= self.allowed {
            return Err(self.lifetime.saturating_sub(age));
        }
        *entry = Entry { failures: entry.failures + 1, last: now };
        Ok(entry.failures)
    }

    /// Forgets the failures of a pair, because a try was right.
    pub fn clear(&self, key: Key) {
        self.entries.lock().remove(&key);
    }

    /// Takes back one failure, because the try was never checked.
    pub fn take_back(&self, key: Key) {
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.get_mut(&key) {
            entry.failures = entry.failures.saturating_sub(1);
        }
    }

    /// Makes room: forgets expired pairs, or else the oldest eighth.
    fn forget(&self, entries: &mut HashMap<Key, Entry>, now: Duration) {
        entries.retain(|_, entry| now.saturating_sub(entry.last) < self.lifetime);
        if entries.len() < self.entries_max {
            return;
        }
        let mut ages: Vec<_> = entries.values().map(|entry| entry.last).collect();
        let eighth = ages.len() / 8;
        let until = *ages.select_nth_unstable(eighth).1;
        entries.retain(|_, entry| entry.last > until);
    }
}

/// Returns the network of `address`: one subscriber of a provider can use all addresses of a network, so they count as one.
pub(super) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Key = (1, IpAddr::V6(Ipv6Addr::LOCALHOST));

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_pair_is_locked_out_for_a_time_and_nobody_else() {
        let failures = Failures::new(2, seconds(10), 100);
        assert_eq!([failures.count(A, seconds(0)), failures.count(A, seconds(4))], [Ok(1), Ok(2)]);
        assert_eq!(failures.count(A, seconds(5)), Err(seconds(9)));
        assert_eq!(failures.count((2, A.1), seconds(5)), Ok(1));
        assert_eq!(failures.count(A, seconds(14)), Ok(1), "the time is over");
        failures.take_back(A);
        assert_eq!(failures.count(A, seconds(14)), Ok(1));
        failures.clear(A);
        assert_eq!([failures.count(A, seconds(14)), failures.count(A, seconds(14))], [Ok(1), Ok(2)]);
    }

    #[test]
    fn the_table_is_bounded_and_forgets_the_oldest() {
        let failures = Failures::new(1, seconds(1_000), 64);
        for place in 0..1_000 {
            assert_eq!(failures.count((place, A.1), seconds(place)), Ok(1));
            assert!(failures.entries.lock().len() <= 64);
        }
        assert!(failures.count((999, A.1), seconds(999)).is_err());
        assert!(failures.count((0, A.1), seconds(999)).is_ok());
    }

    #[test]
    fn addresses_that_one_can_choose_from_are_one() {
        let of = |text: &str| network(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2:3::4"), of("2001:db8:1:2:ffff::1"));
        assert_ne!(of("2001:db8:1:2::"), of("2001:db8:1:3::"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
