//! [`Polls`]: the polls of a process, coalesced.
//!
//! Everything that is woken by hints also polls, by an interval of its own. Here these timers fire together: at whole
//! seconds from a random start, which is another one in each process. All that are due at once read in one transaction,
//! so an idle process begins one read transaction a second, whatever it has to do.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures_util::future::pending;
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, oneshot},
    task::JoinSet,
};

use crate::{
    base::{env::Env, error::Result},
    store::{Database, Transaction},
};

/// The time between two moments at which polls fire together. Shorter pauses are kept as they are.
const TICK: Duration = Duration::from_secs(1);

/// The polls of one bus in one process.
#[derive(Debug)]
pub(crate) struct Polls {
    shared: Arc<Shared>,
    /// Fires the polls, once there are any.
    timer: OnceLock<JoinSet<()>>,
}

#[derive(Debug)]
struct Shared {
    env: Env,
    /// A time at which polls fire, and with it each whole tick before and after.
    origin: Duration,
    queue: Mutex<Queue>,
    /// Wakes the timer when a poll is due before all others.
    sooner: Notify,
}

/// The polls that wait.
#[derive(Debug, Default)]
struct Queue {
    /// By the time when each is due, and a number.
    waiting: BTreeMap<(Duration, u64), oneshot::Sender<Poll>>,
    next: u64,
    /// When the timer fires.
    fires: Option<Duration>,
}

/// A poll that is due, or several together. They read at one version, which is later than what any of them knew before.
#[derive(Debug, Clone)]
pub(crate) struct Poll {
    /// When it was due: before its transaction began.
    pub at: Duration,
    transaction: Arc<Shareable>,
}

/// A transaction that the first one of several begins.
#[derive(Default)]
struct Shareable(OnceLock<Transaction>);

impl std::fmt::Debug for Shareable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Shareable").field(&self.0.get().is_some()).finish()
    }
}

impl Poll {
    fn new(at: Duration) -> Self {
        Self { at, transaction: Arc::default() }
    }

    /// The transaction in which all polls of the moment read. Nobody commits it.
    pub fn transaction(&self, db: &Database) -> Transaction {
        self.transaction.0.get_or_init(|| db.begin()).clone()
    }
}

/// Reads with `body`: in the transaction of `poll`, if there is one; else, or if that fails, by [`Database::run`].
pub(crate) async fn read<T, F, R>(poll: Option<Poll>, db: &Database, body: F) -> Result<T>
where
    F: Fn(Transaction) -> R,
    R: Future<Output = Result<T>>,
{
    if let Some(poll) = poll
        && let Ok(found) = body(poll.transaction(db)).await
    {
        return Ok(found);
    }
    db.run(body).await
}

impl Polls {
    pub fn new(env: &Env) -> Arc<Self> {
        let origin = env.now() + TICK.mul_f64(env.random_fraction());
        let shared = Shared { env: env.clone(), origin, queue: Mutex::default(), sooner: Notify::new() };
        Arc::new(Self { shared: Arc::new(shared), timer: OnceLock::new() })
    }

    /// Completes after `pause`, or less than a tick before that; never after [`Duration::MAX`]. Cancel safe.
    pub async fn due(&self, pause: Duration) -> Poll {
        if pause == Duration::MAX {
            return pending().await;
        }
        let env = &self.shared.env;
        let now = env.now();
        let Some(at) = self.shared.tick_within(now, pause) else {
            env.sleep(pause).await;
            return Poll::new(env.now());
        };
        let (place, fired) = self.shared.enqueue(at);
        let shared = Arc::clone(&self.shared);
        self.timer.get_or_init(|| {
            let mut timer = JoinSet::new();
            timer.spawn(shared.fire());
            timer
        });
        let fired = fired.await;
        drop(place);
        // The timer ends after everything that polls.
        fired.expect("the timer fires all polls")
    }
}

/// The place of a poll in the queue, until it is dropped.
struct Place<'a> {
    shared: &'a Shared,
    key: (Duration, u64),
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.shared.queue.lock().waiting.remove(&self.key);
    }
}

impl Shared {
    /// The last tick within `pause` after `now`, if there is one.
    fn tick_within(&self, now: Duration, pause: Duration) -> Option<Duration> {
        let first = match self.origin.checked_sub(now) {
            Some(left) => Duration::from_nanos((left.as_nanos() % TICK.as_nanos()) as u64),
            None => TICK - Duration::from_nanos(((now - self.origin).as_nanos() % TICK.as_nanos()) as u64),
        };
        let rest = pause.checked_sub(first)?;
        Some(
            now.saturating_add(first)
                .saturating_add(rest - Duration::from_nanos((rest.as_nanos() % TICK.as_nanos()) as u64)),
        )
    }

    fn enqueue(&self, at: Duration) -> (Place<'_>, oneshot::Receiver<Poll>) {
        let (sender, fired) = oneshot::channel();
        let mut queue = self.queue.lock();
        let key = (at, queue.next);
        queue.next += 1;
        queue.waiting.insert(key, sender);
        if queue.fires.is_none_or(|fires| at < fires) {
            self.sooner.notify_one();
        }
        (Place { shared: self, key }, fired)
    }

    /// Fires polls until it is dropped.
    async fn fire(self: Arc<Self>) {
        loop {
            let next = {
                let mut queue = self.queue.lock();
                queue.fires = queue.waiting.keys().next().map(|(at, _)| *at);
                queue.fires
            };
            let pause = next.map_or(Duration::MAX, |next| next.saturating_sub(self.env.now()));
            tokio::select! {
                biased;
                () = self.sooner.notified() => {}
                () = self.env.sleep(pause) => self.fire_until(next.unwrap_or_default()),
            }
        }
    }

    /// Fires the polls that are due at `at` or before, together.
    fn fire_until(&self, at: Duration) {
        let due = {
            let mut queue = self.queue.lock();
            let later = queue.waiting.split_off(&(at, u64::MAX));
            std::mem::replace(&mut queue.waiting, later)
        };
        let poll = Poll::new(at);
        for (_, sender) in due {
            // One that was cancelled does not listen.
            let _ = sender.send(poll.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Isolation;

    /// Polls of different intervals that began at different times read in one transaction at each tick.
    #[tokio::test(start_paused = true)]
    async fn polls_that_are_due_read_together() {
        let db = Database::memory();
        let polls = Polls::new(db.env());
        let begun = db.env().now();
        let first = polls.due(Duration::from_millis(1_500)).await.at;
        assert!((500..=1_500).contains(&(first - begun).as_millis()));
        let (one, three) = tokio::join!(polls.due(TICK), polls.due(3 * TICK));
        assert_eq!((one.at - first, three.at - first), (TICK, 3 * TICK));
        db.env().sleep(Duration::from_millis(300)).await;
        let (one, other) = tokio::join!(polls.due(TICK), polls.due(TICK.mul_f64(1.2)));
        assert_eq!((one.at, other.at), (first + 4 * TICK, first + 4 * TICK));
        let version = one.transaction(&db).read_version().await.unwrap();
        db.run(async |tx| {
            tx.set(b"later", b"");
            Ok(())
        })
        .await
        .unwrap();
        let found = read(Some(other), &db, async |tx| {
            Ok((tx.read_version().await?, tx.get(b"later", Isolation::Snapshot).await?))
        });
        assert_eq!(found.await.unwrap(), (version, None), "both read at one version");
    }

    /// A pause without a tick in it is kept, a long one ends at its last tick, and one without end never ends.
    #[tokio::test(start_paused = true)]
    async fn pauses_are_kept_but_for_a_part_of_a_tick() {
        let db = Database::memory();
        let polls = Polls::new(db.env());
        let tick = polls.due(2 * TICK).await.at;
        let short = polls.due(Duration::from_millis(10)).await.at;
        assert!((10..=12).contains(&(short - tick).as_millis()));
        let long = polls.due(Duration::from_hours(1)).await.at;
        assert_eq!(long - tick, Duration::from_hours(1));
        let mut never = std::pin::pin!(polls.due(Duration::MAX));
        tokio::select! {
            _ = &mut never => panic!("it has ended"),
            () = db.env().sleep(Duration::from_hours(1)) => {}
        }
    }

    /// A poll that is cancelled leaves nothing behind, and one that is due sooner does not wait for those before it.
    #[tokio::test(start_paused = true)]
    async fn cancelled_polls_leave_the_queue() {
        let db = Database::memory();
        let polls = Polls::new(db.env());
        let (later, begun) = (polls.due(60 * TICK), db.env().now());
        let mut later = Box::pin(later);
        tokio::select! {
            _ = &mut later => panic!("it was not due"),
            sooner = polls.due(2 * TICK) => assert!(sooner.at - begun <= 2 * TICK),
        }
        assert_eq!(polls.shared.queue.lock().waiting.len(), 1);
        drop(later);
        assert!(polls.shared.queue.lock().waiting.is_empty());
    }

    /// What fails in the common transaction is read once more in one of its own.
    #[tokio::test(start_paused = true)]
    async fn a_failed_read_is_repeated_by_itself() {
        use crate::{
            base::error::StoreError,
            store::testing::{Faults, Operation},
        };
        let faults = Faults::new(&Database::memory());
        let db = faults.database();
        let poll = Polls::new(db.env()).due(2 * TICK).await;
        let mut is_first = true;
        faults.plan_reads(move |operation| match operation {
            Operation::Get { .. } if std::mem::take(&mut is_first) => Some(StoreError::TRANSACTION_TOO_OLD),
            _ => None,
        });
        let found = read(Some(poll), &db, async |tx| tx.get(b"key", Isolation::Snapshot).await);
        assert_eq!(found.await.unwrap(), None);
    }
}
