//! [`Time`]: the one clock of a world, with its schedule; [`Clock`]: the clock of a process.
//!
//! Time stands still while a process can run, and then jumps to the next entry in the schedule. Entries for the same moment are taken in
//! the order in which they were added, so nothing depends on the machine.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures_util::future::BoxFuture;
use notibus::store::{Env, Environment};
use parking_lot::{Mutex, MutexGuard};

use super::{Event, ProcessId};

/// The time of the wall clock at the beginning of a world, in milliseconds since 1970. It only affects times that are displayed.
const WALL_START_MS: u64 = 1_700_000_000_000;

/// The key of an entry in the schedule: its time, and its place among the entries for that time.
type TimerKey = (u64, u64);

/// An entry in the schedule.
pub enum Due {
    /// Wakes a sleeper of a process.
    Wake(ProcessId, Waker),
    Event(Event),
}

/// The clock of a world, with its schedule. Clones share both.
#[derive(Clone, Default)]
pub struct Time {
    schedule: Arc<Mutex<Schedule>>,
}

#[derive(Default)]
struct Schedule {
    /// Nanoseconds since the world began.
    now: u64,
    /// The place of the next entry that is added.
    next: u64,
    due: BTreeMap<TimerKey, Due>,
    /// The processes that can run.
    runnable: BTreeSet<ProcessId>,
}

impl Time {
    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock()
    }

    /// Schedules `due` for `at`, after the other entries for that moment.
    fn put(schedule: &mut Schedule, at: u64, due: Due) -> TimerKey {
        let place = (at, schedule.next);
        schedule.next += 1;
        schedule.due.insert(place, due);
        place
    }

    /// Returns the time since the world began.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.schedule().now)
    }

    /// Makes `event` happen after `pause`.
    pub fn after(&self, pause: Duration, event: Event) {
        let mut schedule = self.schedule();
        let at = schedule.now + nanos(pause);
        Self::put(&mut schedule, at, Due::Event(event));
    }

    /// Marks `process` as able to run.
    pub fn make_runnable(&self, process: ProcessId) {
        self.schedule().runnable.insert(process);
    }

    /// Returns the processes that can run, except for those that `is_paused` selects.
    pub fn runnable(&self, is_paused: impl Fn(ProcessId) -> bool) -> Vec<ProcessId> {
        self.schedule().runnable.iter().copied().filter(|&process| !is_paused(process)).collect()
    }

    /// Removes the mark of `process`, which is about to run.
    pub fn take_runnable(&self, process: ProcessId) {
        self.schedule().runnable.remove(&process);
    }

    /// Jumps to the next entry, and takes it; returns `None` if there is no entry.
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
            // The lock is released first, because the woken task may read the time.
            waker.wake();
            let schedule = self.schedule();
            if schedule.due.first_key_value().is_none_or(|((at, _), _)| *at > schedule.now) {
                return Some(Event::Nothing);
            }
        }
    }

    /// Wakes all sleepers of `process`, so that they read its clock again.
    pub fn wake_all(&self, process: ProcessId) {
        let wakers: Vec<_> = {
            let mut schedule = self.schedule();
            schedule.runnable.insert(process);
            let is_of = |_: &TimerKey, due: &mut Due| matches!(due, Due::Wake(of, _) if *of == process);
            schedule.due.extract_if(.., is_of).collect()
        };
        for (_, due) in wakers {
            if let Due::Wake(_, waker) = due {
                waker.wake();
            }
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("a world does not last for centuries")
}

/// The clock of a process: it starts at a random time, runs faster or slower than true time, and sometimes jumps ahead.
pub struct Clock {
    time: Time,
    process: ProcessId,
    /// When the process was started, in nanoseconds of true time.
    born: u64,
    /// How many nanoseconds the clock advances in a million true ones.
    ppm: u64,
    /// The time that the clock showed when the process started, plus its jumps, in nanoseconds.
    ahead: AtomicU64,
    /// The error of the wall clock, in milliseconds.
    wall_skew_ms: i64,
    random: Mutex<fastrand::Rng>,
}

impl Clock {
    /// Makes the clock of `process`, which starts now.
    pub fn new(time: &Time, process: ProcessId, ppm: u64, mut random: fastrand::Rng) -> Self {
        let born = nanos(time.now());
        let ahead = AtomicU64::new(random.u64(0..100_000_000_000));
        let wall_skew_ms = random.i64(-60_000..60_000);
        Self { time: time.clone(), process, born, ppm, ahead, wall_skew_ms, random: Mutex::new(random) }
    }

    /// Makes a clock that shows true time, for the answers of the store to `process`.
    pub fn exact(time: &Time, process: ProcessId) -> Self {
        let clock = Self::new(time, process, 1_000_000, fastrand::Rng::with_seed(0));
        Self { born: 0, ahead: AtomicU64::new(0), wall_skew_ms: 0, ..clock }
    }

    /// Returns an environment whose clock this is.
    pub fn env(self: &Arc<Self>) -> Env {
        Env::new(Handle(Arc::clone(self)))
    }

    /// Returns the time that the clock shows, in nanoseconds.
    fn shows(&self) -> u64 {
        let passed = nanos(self.time.now()) - self.born;
        self.ahead.load(Ordering::Relaxed) + passed / 1_000 * self.ppm / 1_000
    }

    /// Jumps ahead by `by`, as if the machine had been suspended.
    pub fn jump(&self, by: Duration) {
        self.ahead.fetch_add(nanos(by), Ordering::Relaxed);
        self.time.wake_all(self.process);
    }
}

/// A handle on a clock.
struct Handle(Arc<Clock>);

impl Environment for Handle {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.shows())
    }

    fn wall_ms(&self) -> u64 {
        (WALL_START_MS + nanos(self.0.time.now()) / 1_000_000).saturating_add_signed(self.0.wall_skew_ms)
    }

    fn random(&self) -> u64 {
        self.0.random.lock().u64(..)
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        let deadline = self.0.shows().saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
        Box::pin(Sleep { clock: Arc::clone(&self.0), deadline, place: None })
    }

    /// Time stands still while a process computes. This adds up to 2 ms, as if some of its polls took that long.
    fn computing(&self) -> Duration {
        self.now() + Duration::from_micros(self.0.random.lock().u64(..2_000))
    }
}

/// Returns an environment for a store. Its wall clock, from which the versions are taken, is `ahead_ms` milliseconds ahead of true time.
pub fn store_time(time: &Time, ahead_ms: i64) -> Env {
    let clock = Clock { wall_skew_ms: ahead_ms, ..Clock::exact(time, ProcessId::MAX) };
    Arc::new(clock).env()
}

/// Completes once a clock shows a certain time.
struct Sleep {
    clock: Arc<Clock>,
    /// The time to wait for, in nanoseconds.
    deadline: u64,
    /// The entry in the schedule, while the sleep lasts.
    place: Option<TimerKey>,
}

impl Sleep {
    /// Removes the entry from the schedule.
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
        // The cap keeps an endless sleep from overflowing the schedule.
        let pause = (left.min(u64::MAX >> 24) / 1_000 + 1) * 1_000_000 / self.clock.ppm * 1_000 + 1_000;
        let wake = Due::Wake(self.clock.process, context.waker().clone());
        let mut schedule = self.clock.time.schedule();
        let at = schedule.now + pause;
        let place = Time::put(&mut schedule, at, wake);
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

pub mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn clock(time: &Time, ppm: u64) -> Arc<Clock> {
        Arc::new(Clock::new(time, 1, ppm, fastrand::Rng::with_seed(1)))
    }

    pub fn a_fast_clock_wakes_early_and_a_jump_wakes_at_once() {
        for (ppm, expected_ms) in [(1_000_000, 1_000), (2_000_000, 500), (500_000, 2_000)] {
            let time = Time::default();
            let env = clock(&time, ppm).env();
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
        let mut sleep = clock.env().sleep(Duration::from_secs(10));
        assert!((&mut sleep).now_or_never().is_none());
        clock.jump(Duration::from_secs(11));
        assert!(sleep.now_or_never().is_some());
        assert_eq!(time.now(), Duration::ZERO);
    }

    pub fn what_is_due_at_once_comes_in_its_order_and_a_dropped_sleep_never() {
        let time = Time::default();
        let env = clock(&time, 1_000_000).env();
        let mut sleep = env.sleep(Duration::from_secs(5));
        assert!((&mut sleep).now_or_never().is_none());
        drop(sleep);
        assert!(time.leap().is_none(), "nothing is left");
    }
}
