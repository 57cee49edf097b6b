//! [`Polls`]: the polls of a process, coalesced.
//!
//! Everything that is woken by hints also polls, by an interval of its own. Here these timers fire together: at whole
//! seconds from a random start, which is another one in each process. All that are due at once read in one transaction,
//! so an idle process begins one read transaction a second, whatever it has to do.

use std::{
    fmt,
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use futures_util::future::pending;
use parking_lot::Mutex;

use crate::{
    base::{env::Env, error::Result},
    store::{Database, Transaction},
};

/// The polls of one bus in one process. Each sleeps by itself, in its own task: a bus can be used from several runtimes, and
/// one of them may end or rest.
#[derive(Debug)]
pub(crate) struct Polls {
    env: Env,
    /// At which nanosecond of each second polls fire together.
    phase: u32,
    last: Mutex<Moment>,
}

/// The last moment at which polls were due.
#[derive(Debug, Default)]
struct Moment {
    at: Duration,
    /// When the first of them came.
    came: Duration,
    transaction: Weak<Shareable>,
}

/// A poll that is due, or several together. They read at one version, which is later than what any of them knew before.
#[derive(Debug, Clone)]
pub(crate) struct Poll {
    /// When it was due: before its transaction began.
    pub at: Duration,
    transaction: Arc<Shareable>,
}

/// A transaction that the first of several polls begins.
#[derive(Default)]
struct Shareable(OnceLock<Transaction>);

impl fmt::Debug for Shareable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Shareable").field(&self.0.get().is_some()).finish()
    }
}

impl Poll {
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
        let phase = Duration::from_secs(1).mul_f64(env.random_fraction()).subsec_nanos();
        Arc::new(Self { env: env.clone(), phase, last: Mutex::default() })
    }

    /// Completes after `pause`, or less than a second before that; never after [`Duration::MAX`]. Cancel safe.
    pub async fn due(&self, pause: Duration) -> Poll {
        if pause == Duration::MAX {
            return pending().await;
        }
        let since = self.env.now();
        let Some(at) = self.tick_within(since, pause) else {
            self.env.sleep(pause).await;
            return Poll { at: self.env.now(), transaction: Arc::default() };
        };
        self.env.sleep(at.saturating_sub(since)).await;
        let poll = self.join(at, since);
        // Others whose sleep has ended at the same moment join before anybody reads.
        tokio::task::yield_now().await;
        poll
    }

    /// The poll of the moment `at` for one who has waited since `since`. It is shared only if its transaction begins after that.
    fn join(&self, at: Duration, since: Duration) -> Poll {
        let mut last = self.last.lock();
        let shared = last.transaction.upgrade().filter(|_| last.at == at && last.came > since);
        let transaction = shared.unwrap_or_else(|| {
            let transaction = Arc::default();
            *last = Moment { at, came: self.env.now(), transaction: Arc::downgrade(&transaction) };
            transaction
        });
        Poll { at, transaction }
    }

    /// The last tick within `pause` after `now`, if there is one.
    fn tick_within(&self, now: Duration, pause: Duration) -> Option<Duration> {
        let end = now.saturating_add(pause);
        let second = end.as_secs().checked_sub(u64::from(end.subsec_nanos() < self.phase))?;
        let tick = Duration::new(second, self.phase);
        (tick > now).then_some(tick)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_secs(1);
    use crate::store::Isolation;

    /// Polls of different intervals that began at different times read in one transaction at each tick.
    #[tokio::test(start_paused = true)]
    async fn polls_that_are_due_read_together() {
        let db = Database::memory();
        let polls = Polls::new(db.env());
        let begun = db.env().now();
        let first = polls.due(Duration::from_millis(1_500)).await.at;
        assert!((begun + TICK / 2..=begun + TICK * 3 / 2).contains(&first));
        let (one, three) = tokio::join!(polls.due(TICK), polls.due(3 * TICK));
        assert_eq!((one.at, three.at), (first + TICK, first + 3 * TICK));
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
        assert!((tick + Duration::from_millis(10)..=tick + Duration::from_millis(12)).contains(&short));
        let long = polls.due(Duration::from_hours(1)).await.at;
        assert_eq!(long, tick + Duration::from_hours(1));
        let mut never = std::pin::pin!(polls.due(Duration::MAX));
        tokio::select! {
            _ = &mut never => panic!("it has ended"),
            () = db.env().sleep(Duration::from_hours(1)) => {}
        }
    }

    /// Regression: one task fired all polls. It belonged to the runtime in which the first poll began, and when that had ended,
    /// no poll came any more: events without a doorbell were never folded, and dead nodes were never removed.
    #[test]
    fn polls_outlive_the_runtime_of_the_first() {
        let runtime = || {
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
        };
        let first = runtime();
        let db = first.block_on(async { Database::memory() });
        let polls = Polls::new(db.env());
        first.block_on(polls.due(2 * TICK));
        drop(first);
        runtime().block_on(async {
            tokio::time::timeout(3 * TICK, polls.due(2 * TICK)).await.expect("it comes");
        });
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
