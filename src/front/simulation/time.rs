//! [`Time`]: the one clock of a world, and what is due on it; [`Clock`]: what a process makes of it.
//!
//! Time stands still while anything can run, and then leaps to whatever is due next. What is due at the same moment comes in
//! the order in which it was asked for, so nothing depends on the machine.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures_util::future::BoxFuture;

use super::world::Event;
use crate::base::env::Environment;

/// The number of a process in its world.
pub(super) type ProcessId = usize;

/// When a world begins, in milliseconds since 1970: for figures that people read.
const WALL_START_MS: u64 = 1_700_000_000_000;

/// The place of something in the schedule: when it is due, and the order in which it was asked for.
type Place = (u64, u64);

/// What happens when something is due.
pub(super) enum Due {
    /// A sleeper of a process wakes.
    Wake(ProcessId, Waker),
    /// Something happens to the world.
    Event(Event),
}

/// The clock of a world, and what is due on it. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Time(Arc<Mutex<Schedule>>);

/// What is due.
#[derive(Default)]
struct Schedule {
    /// Nanoseconds since the world began.
    now: u64,
    /// The next place at the same moment.
    next: u64,
    /// In order.
    due: BTreeMap<Place, Due>,
    /// Processes that have something to do now.
    runnable: BTreeSet<ProcessId>,
}

impl Time {
    /// The schedule. No code that holds the lock can leave it half changed by a panic.
    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time since the world began.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.schedule().now)
    }

    /// Lets `event` happen after `pause`.
    pub fn after(&self, pause: Duration, event: Event) {
        let mut schedule = self.schedule();
        let at = schedule.now + nanos(pause);
        schedule.put(at, Due::Event(event));
    }

    /// Takes note that `process` has something to do.
    pub fn make_runnable(&self, process: ProcessId) {
        self.schedule().runnable.insert(process);
    }

    /// The processes that have something to do, but for those that `is_paused`.
    pub fn runnable(&self, is_paused: impl Fn(ProcessId) -> bool) -> Vec<ProcessId> {
        self.schedule().runnable.iter().copied().filter(|&process| !is_paused(process)).collect()
    }

    /// `process` is about to do what it has to do.
    pub fn take_runnable(&self, process: ProcessId) {
        self.schedule().runnable.remove(&process);
    }

    /// Leaps to what is due next, and takes it; `None` if nothing ever will be.
    pub fn leap(&self) -> Option<Event> {
        loop {
            let waker = {
                let mut schedule = self.schedule();
                let ((at, _), due) = schedule.due.pop_first()?;
                schedule.now = schedule.now.max(at);
                match due {
                    Due::Event(event) => return Some(event),
                    Due::Wake(process, waker) => {
                        schedule.runnable.insert(process);
                        waker
                    }
                }
            };
            // Not under the lock: what wakes may ask for the time.
            waker.wake();
            let schedule = self.schedule();
            if schedule.due.first_key_value().is_none_or(|((at, _), _)| *at > schedule.now) {
                return Some(Event::Nothing);
            }
        }
    }

    /// Wakes all sleepers of `process`, so that they look at their clocks again.
    pub fn wake_all(&self, process: ProcessId) {
        let wakers = {
            let mut schedule = self.schedule();
            let is_of = |due: &Due| matches!(due, Due::Wake(of, _) if *of == process);
            let places: Vec<_> =
                schedule.due.iter().filter(|(_, due)| is_of(due)).map(|(&place, _)| place).collect();
            schedule.runnable.insert(process);
            places.into_iter().filter_map(|place| schedule.due.remove(&place)).collect::<Vec<_>>()
        };
        for due in wakers {
            if let Due::Wake(_, waker) = due {
                waker.wake();
            }
        }
    }
}

impl Schedule {
    /// Puts `due` at `at`, behind what is due there already.
    fn put(&mut self, at: u64, due: Due) -> Place {
        let place = (at, self.next);
        self.next += 1;
        self.due.insert(place, due);
        place
    }
}

/// A duration in nanoseconds.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("a world does not last for centuries")
}

/// The clock of a process: it starts anywhere, runs faster or slower than true time, and sometimes jumps ahead.
pub(super) struct Clock {
    /// True time.
    time: Time,
    /// Whose clock it is.
    process: ProcessId,
    /// When the process was started, in true nanoseconds.
    born: u64,
    /// How many nanoseconds it shows for a million true ones.
    ppm: u64,
    /// What it showed when the process was started, and by how much it has jumped, in nanoseconds.
    ahead: AtomicU64,
    /// By how many milliseconds its wall clock is wrong.
    wall_skew_ms: i64,
    /// The process's random bits.
    random: Mutex<fastrand::Rng>,
}

impl Clock {
    /// The clock of `process`, which starts now.
    pub fn new(time: &Time, process: ProcessId, ppm: u64, mut random: fastrand::Rng) -> Self {
        let born = nanos(time.now());
        let ahead = AtomicU64::new(random.u64(0..100_000_000_000));
        let wall_skew_ms = random.i64(-60_000..60_000);
        Self { time: time.clone(), process, born, ppm, ahead, wall_skew_ms, random: Mutex::new(random) }
    }

    /// A clock that shows true time, by which the store answers `process`.
    pub fn exact(time: &Time, process: ProcessId) -> Self {
        Self {
            time: time.clone(),
            process,
            born: 0,
            ppm: 1_000_000,
            ahead: AtomicU64::new(0),
            wall_skew_ms: 0,
            random: Mutex::new(fastrand::Rng::with_seed(0)),
        }
    }

    /// What it shows, in nanoseconds.
    fn shows(&self) -> u64 {
        let passed = nanos(self.time.now()) - self.born;
        self.ahead.load(Ordering::Relaxed) + passed / 1_000 * self.ppm / 1_000
    }

    /// Jumps ahead, as after a suspension.
    pub fn jump(&self, by: Duration) {
        self.ahead.fetch_add(nanos(by), Ordering::Relaxed);
        self.time.wake_all(self.process);
    }
}

impl Environment for Arc<Clock> {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.shows())
    }

    fn wall_ms(&self) -> u64 {
        (WALL_START_MS + nanos(self.time.now()) / 1_000_000).saturating_add_signed(self.wall_skew_ms)
    }

    fn random(&self) -> u64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).u64(..)
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        let deadline = self.shows().saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
        Box::pin(Sleep { clock: Arc::clone(self), deadline, place: None })
    }
}

/// Completes when a clock shows a time.
struct Sleep {
    clock: Arc<Clock>,
    /// The time, in nanoseconds.
    deadline: u64,
    /// Where it is in the schedule, if it waits.
    place: Option<Place>,
}

impl Sleep {
    /// Takes it out of the schedule.
    fn unschedule(&mut self) {
        if let Some(place) = self.place.take() {
            self.clock.time.schedule().due.remove(&place);
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.unschedule();
        let left = self.deadline.saturating_sub(self.clock.shows());
        if left == 0 {
            return Poll::Ready(());
        }
        // Whoever sleeps for ever needs no place that overflows.
        let pause = (left.min(u64::MAX >> 24) / 1_000 + 1) * 1_000_000 / self.clock.ppm * 1_000 + 1_000;
        let wake = Due::Wake(self.clock.process, context.waker().clone());
        let mut schedule = self.clock.time.schedule();
        let at = schedule.now + pause;
        let place = schedule.put(at, wake);
        drop(schedule);
        self.place = Some(place);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.unschedule();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::base::env::Env;

    fn clock(time: &Time, ppm: u64) -> Arc<Clock> {
        Arc::new(Clock::new(time, 1, ppm, fastrand::Rng::with_seed(1)))
    }

    #[test]
    fn a_fast_clock_wakes_early_and_a_jump_wakes_at_once() {
        for (ppm, expected_ms) in [(1_000_000, 1_000), (2_000_000, 500), (500_000, 2_000)] {
            let time = Time::default();
            let env = Env::new(clock(&time, ppm));
            let mut sleep = env.sleep(Duration::from_secs(1));
            assert!((&mut sleep).now_or_never().is_none());
            while (&mut sleep).now_or_never().is_none() {
                assert!(matches!(time.leap(), Some(Event::Nothing)));
            }
            let off = time.now().abs_diff(Duration::from_millis(expected_ms));
            assert!(off < Duration::from_millis(1), "{ppm}: {:?}", time.now());
        }
        let time = Time::default();
        let clock = clock(&time, 1_000_000);
        let mut sleep = Env::new(Arc::clone(&clock)).sleep(Duration::from_secs(10));
        assert!((&mut sleep).now_or_never().is_none());
        clock.jump(Duration::from_secs(11));
        assert!(sleep.now_or_never().is_some());
        assert_eq!(time.now(), Duration::ZERO);
    }

    #[test]
    fn what_is_due_at_once_comes_in_its_order_and_a_dropped_sleep_never() {
        let time = Time::default();
        let env = Env::new(clock(&time, 1_000_000));
        let mut sleep = env.sleep(Duration::from_secs(5));
        assert!((&mut sleep).now_or_never().is_none());
        drop(sleep);
        assert!(time.leap().is_none(), "nothing is left");
    }
}
