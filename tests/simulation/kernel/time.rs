//! [`Time`]: the one clock of a world, with its schedule; [`Clock`]: the clock of a process.
//!
//! Time stands still while a process can run, and then leaps to the next entry of the schedule. Entries of the same
//! moment come in the order in which they were added, so nothing depends on the machine.

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

/// The wall clock at the beginning of a world, in milliseconds since 1970: for figures that people read.
const WALL_START_MS: u64 = 1_700_000_000_000;

/// The key of an entry in the schedule: its time, and its order at that time.
type TimerKey = (u64, u64);

/// An entry of the schedule.
pub enum Due {
    /// Wakes a sleeper of a process.
    Wake(ProcessId, Waker),
    Event(Event),
}

/// The clock of a world, with its schedule. Clones share it.
#[derive(Clone, Default)]
pub struct Time {
    schedule: Arc<Mutex<Schedule>>,
}

#[derive(Default)]
struct Schedule {
    /// Nanoseconds since the world began.
    now: u64,
    /// The order of the next entry.
    next: u64,
    due: BTreeMap<TimerKey, Due>,
    /// Processes that can run.
    runnable: BTreeSet<ProcessId>,
}

impl Time {
    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock()
    }

    /// Adds `due` at `at`, after the entries of that moment.
    fn put(schedule: &mut Schedule, at: u64, due: Due) -> TimerKey {
        let place = (at, schedule.next);
        schedule.next += 1;
        schedule.due.insert(place, due);
        place
    }

    /// Time since the world began.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.schedule().now)
    }

    /// Lets `event` happen after `pause`.
    pub fn after(&self, pause: Duration, event: Event) {
        let mut schedule = self.schedule();
        let at = schedule.now + nanos(pause);
        Self::put(&mut schedule, at, Due::Event(event));
    }

    /// Marks `process` as able to run.
    pub fn make_runnable(&self, process: ProcessId) {
        self.schedule().runnable.insert(process);
    }

    /// The processes that can run, except for those that `is_paused`.
    pub fn runnable(&self, is_paused: impl Fn(ProcessId) -> bool) -> Vec<ProcessId> {
        self.schedule().runnable.iter().copied().filter(|&process| !is_paused(process)).collect()
    }

    /// Removes the mark of `process`, which is about to run.
    pub fn take_runnable(&self, process: ProcessId) {
        self.schedule().runnable.remove(&process);
    }

    /// Leaps to the next entry, and takes it; `None` if there is none.
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
            // Not under the lock: the woken task may read the time.
            waker.wake();
            let schedule = self.schedule();
            if schedule.due.first_key_value().is_none_or(|((at, _), _)| *at > schedule.now) {
                return Some(Event::Nothing);
            }
        }
    }

    /// Wakes all sleepers of `process`, so that they read their clocks again.
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

/// The clock of a process: it starts anywhere, runs faster or slower than true time, and sometimes jumps ahead.
pub struct Clock {
    time: Time,
    process: ProcessId,
    /// When the process was started, in true nanoseconds.
    born: u64,
    /// How many nanoseconds it shows for a million true ones.
    ppm: u64,
    /// The time that it showed at the start of the process, plus its jumps, in nanoseconds.
    ahead: AtomicU64,
    /// The error of its wall clock in milliseconds.
    wall_skew_ms: i64,
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

    /// A clock that shows true time, for the answers of the store to `process`.
    pub fn exact(time: &Time, process: ProcessId) -> Self {
        let clock = Self::new(time, process, 1_000_000, fastrand::Rng::with_seed(0));
        Self { born: 0, ahead: AtomicU64::new(0), wall_skew_ms: 0, ..clock }
    }

    /// The environment of a program that reads it.
    pub fn env(self: &Arc<Self>) -> Env {
        Env::new(Handle(Arc::clone(self)))
    }

    /// The time that it shows, in nanoseconds.
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

    /// Time stands still while a process computes: here a part of its polls takes up to two milliseconds.
    fn computing(&self) -> Duration {
        self.now() + Duration::from_micros(self.0.random.lock().u64(..2_000))
    }
}

/// The time of a store, whose wall clock, from which its versions are, is so many milliseconds ahead of true time.
pub fn store_time(time: &Time, ahead_ms: i64) -> Env {
    let clock = Clock { wall_skew_ms: ahead_ms, ..Clock::exact(time, ProcessId::MAX) };
    Arc::new(clock).env()
}

/// Completes when a clock shows a time.
struct Sleep {
    clock: Arc<Clock>,
    /// The time, in nanoseconds.
    deadline: u64,
    /// Its entry in the schedule, if it waits.
    place: Option<TimerKey>,
}

impl Sleep {
    /// Removes its entry from the schedule.
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
        // An endless sleep must not overflow the schedule.
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
