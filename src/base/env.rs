//! Time and randomness, behind one seam.
//!
//! All code that sleeps, measures time, adds jitter or draws random numbers uses an [`Env`], so that a run can be replayed from its seed
//! and tests can pause time. The wall clock is for lag figures, and for the version at which an embedded store begins; nothing else depends
//! on it.

use std::{
    fmt,
    future::poll_fn,
    pin::pin,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures_util::future::BoxFuture;

/// The functions of an environment. Implement this trait to simulate one.
pub trait Environment: Send + Sync + 'static {
    /// Returns the time since an arbitrary start; it never goes back.
    fn now(&self) -> Duration;
    /// Returns the milliseconds since 1970, for figures that people read and for the first version of an embedded store.
    fn wall_ms(&self) -> u64;
    /// Returns 64 random bits.
    fn random(&self) -> u64;
    /// Completes after `duration`.
    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()>;
    /// Returns the time on the clock that measures how long code computes between two awaits. In a simulation, where computing takes no
    /// time, this clock may advance by itself.
    fn computing(&self) -> Duration {
        self.now()
    }
}

/// A shared handle to the environment of a process, or of a simulated node.
#[derive(Clone)]
pub struct Env(Arc<dyn Environment>);

impl Env {
    /// Returns the real environment: tokio's clock (which tests can pause) and the thread's generator.
    pub fn system() -> Self {
        Self::new(System { start: tokio::time::Instant::now() })
    }

    /// Returns a handle to `environment`.
    pub fn new(environment: impl Environment) -> Self {
        Self(Arc::new(environment))
    }

    /// Returns the time since an arbitrary start; it never goes back.
    pub fn now(&self) -> Duration {
        self.0.now()
    }

    /// Returns the milliseconds since 1970, for figures that people read and for the first version of an embedded store.
    pub fn wall_ms(&self) -> u64 {
        self.0.wall_ms()
    }

    /// Returns 64 random bits.
    pub fn random(&self) -> u64 {
        self.0.random()
    }

    /// Returns the output of `future`, and how long it computed: the time spent within its polls. Time spent waiting does not count.
    pub(crate) async fn measured<T>(&self, future: impl Future<Output = T>) -> (T, Duration) {
        let mut future = pin!(future);
        let mut computed = Duration::ZERO;
        let output = poll_fn(|context| {
            let began = self.0.computing();
            let polled = future.as_mut().poll(context);
            computed += self.0.computing().saturating_sub(began);
            polled
        });
        (output.await, computed)
    }

    /// Returns a random fraction in `0.0..1.0`.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit a double exactly")]
    pub fn random_fraction(&self) -> f64 {
        (self.random() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a random time between `least` and `most` times `duration`, so that tasks that began together do not stay in step.
    /// [`Duration::MAX`], which means "never", stays "never".
    pub(crate) fn spread(&self, duration: Duration, least: f64, most: f64) -> Duration {
        let factor = least + (most - least) * self.random_fraction();
        Duration::try_from_secs_f64(duration.as_secs_f64() * factor).unwrap_or(Duration::MAX)
    }

    /// Returns how much is left of an `interval` that began at `since`. [`Duration::MAX`], which means "never", is returned unchanged. Use
    /// this instead of adding a given interval to a time, which could overflow.
    #[cfg(feature = "http")]
    pub(crate) fn left_of(&self, interval: Duration, since: Duration) -> Duration {
        if interval == Duration::MAX {
            return interval;
        }
        interval.saturating_sub(self.now().saturating_sub(since))
    }

    /// Completes after `duration`; never after [`Duration::MAX`]. Dropping the future cancels the sleep.
    pub fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        self.0.sleep(duration)
    }
}

/// Clamps `duration` to what timers of the operating system and of libraries can take: 1 ms to 24 days. Such timers count in 32 bits, or
/// add the duration to the current time.
#[cfg(feature = "http")]
pub(crate) fn bounded_timer(duration: Duration) -> Duration {
    duration.clamp(Duration::from_millis(1), Duration::from_hours(24 * 24))
}

impl fmt::Debug for Env {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Env")
    }
}

/// The environment of a real process.
struct System {
    /// When the environment was made: the zero of [`Environment::now`].
    start: tokio::time::Instant,
}

impl Environment for System {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn wall_ms(&self) -> u64 {
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
    }

    fn random(&self) -> u64 {
        fastrand::u64(..)
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(duration))
    }
}
