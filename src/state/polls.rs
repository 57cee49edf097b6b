//! [`Polls`]: the polls of a process, coalesced.
//!
//! Everything that is woken by hints also polls, at its own interval. Here these timers fire together: at whole seconds from a random
//! start, which differs between processes. All polls that are due at once read in one transaction, so an idle process begins one read
//! transaction per second, however many polls it has.
//!
//! Data that several polls need is read once: the pulse of the notifications, the common version, and the rows of the nodes, if there are
//! only a few ([`Polled`]).

use std::{
    fmt,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::pending;
use parking_lot::Mutex;
use tokio::sync::OnceCell;

use crate::{
    base::{env::Env, error::Result},
    state::keys::{FeedId, Keys},
    store::{Isolation, RangeRead, Row, Store, Transaction},
};

/// The maximum number of nodes that counts as few.
const NODES_FEW: usize = 9;

/// The polls of one bus in one process. Each sleeps in its own task, because a bus can be used from several runtimes, and any of them may
/// end or stall.
#[derive(Debug)]
pub(crate) struct Polls {
    env: Env,
    /// The nanosecond of each second at which polls fire together.
    phase: u32,
    last: Mutex<Moment>,
    /// Whether there were too many nodes to read their rows together with the other polled keys.
    are_many: Arc<AtomicBool>,
}

/// The last moment at which polls were due.
#[derive(Debug, Default)]
struct Moment {
    at: Duration,
    /// When the first poll of that moment woke up. Only polls that were already waiting by then share its transaction.
    came: Duration,
    shared: Weak<Shareable>,
}

/// A poll that is due, or several that read together. They read at one version, later than any version that any of them knew before.
#[derive(Debug, Clone)]
pub(crate) struct Poll {
    /// When the poll was due, which is before its transaction began.
    pub at: Duration,
    shared: Arc<Shareable>,
}

/// A transaction that the first of several polls begins, and what was read in it for all of them.
#[derive(Default)]
struct Shareable {
    transaction: OnceLock<Transaction>,
    polled: OnceCell<Arc<Polled>>,
    are_many: Arc<AtomicBool>,
}

impl fmt::Debug for Shareable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shareable").field("polled", &self.polled.get()).finish_non_exhaustive()
    }
}

/// The values that every process polls, read at snapshot isolation.
#[derive(Debug, Default)]
pub(crate) struct Polled {
    /// The pulse of the notifications.
    pub pulse: Option<Bytes>,
    /// The common version of all pools.
    pub common: Option<Bytes>,
    /// The rows of all nodes; `None` if there are more than a few.
    pub nodes: Option<Vec<Row>>,
}

impl Polled {
    async fn read(tx: &Transaction, keys: &Keys, are_many: &AtomicBool) -> Result<Self> {
        let (common, pulse) = (keys.common_version(), keys.pulse(&FeedId::notifications()));
        let limit = if are_many.load(Ordering::Relaxed) { 2 } else { NODES_FEW + 3 };
        // Read from the end, so that the other keys fit even if there are many nodes.
        let range = RangeRead::new(keys.polled()).limit(limit).reverse();
        let mut rows = tx.get_range(&range, Isolation::Snapshot).await?.rows;
        let is_complete = rows.len() < limit;
        are_many.fetch_or(!is_complete, Ordering::Relaxed);
        let mut take = |key: Vec<u8>| {
            let at = rows.iter().position(|(found, _)| *found == key)?;
            Some(rows.remove(at).1)
        };
        let (pulse, common) = (take(pulse), take(common));
        rows.reverse();
        Ok(Self { pulse, common, nodes: is_complete.then_some(rows) })
    }
}

impl Poll {
    /// Returns the transaction in which all polls of the moment read. It is never committed.
    pub fn transaction(&self, store: &Store) -> Transaction {
        self.shared.transaction.get_or_init(|| store.begin()).clone()
    }

    /// Returns the values that every process polls, read once in this transaction for all polls of the moment.
    pub async fn polled(&self, store: &Store, keys: &Keys) -> Result<Arc<Polled>> {
        let Shareable { polled, are_many, .. } = &*self.shared;
        let read = || async { Polled::read(&self.transaction(store), keys, are_many).await.map(Arc::new) };
        Ok(Arc::clone(polled.get_or_try_init(read).await?))
    }
}

/// Runs `body` as part of `poll`. If that fails, runs it in transactions of its own, with [`Store::run`].
pub(crate) async fn read<T, F, R>(poll: Poll, store: &Store, body: F) -> Result<T>
where
    F: Fn(Poll) -> R,
    R: Future<Output = Result<T>>,
{
    let (at, are_many) = (poll.at, Arc::clone(&poll.shared.are_many));
    if let Ok(found) = body(poll).await {
        return Ok(found);
    }
    let alone = |tx: Transaction| {
        let (transaction, are_many) = (OnceLock::from(tx), Arc::clone(&are_many));
        body(Poll { at, shared: Arc::new(Shareable { transaction, polled: OnceCell::new(), are_many }) })
    };
    store.run(alone).await
}

impl Polls {
    pub fn new(env: &Env) -> Arc<Self> {
        let phase = Duration::from_secs(1).mul_f64(env.random_fraction()).subsec_nanos();
        Arc::new(Self { env: env.clone(), phase, last: Mutex::default(), are_many: Arc::default() })
    }

    fn shareable(&self) -> Arc<Shareable> {
        Arc::new(Shareable { are_many: Arc::clone(&self.are_many), ..Shareable::default() })
    }

    /// Notes how many other nodes there are. Once nodes are few again, their rows are read together with the other polled keys.
    pub fn found_nodes(&self, others: usize) {
        if others + 1 < NODES_FEW {
            self.are_many.store(false, Ordering::Relaxed);
        }
    }

    /// Waits for `pause`, or up to a second less; forever if `pause` is [`Duration::MAX`]. Cancel safe.
    pub async fn due(&self, pause: Duration) -> Poll {
        if pause == Duration::MAX {
            return pending().await;
        }
        let since = self.env.now();
        let Some(at) = self.tick_within(since, pause) else {
            self.env.sleep(pause).await;
            return Poll { at: self.env.now(), shared: self.shareable() };
        };
        self.env.sleep(at.saturating_sub(since)).await;
        let poll = self.join(at, since);
        // Let other polls whose sleep ends at the same moment join before any of them reads.
        tokio::task::yield_now().await;
        poll
    }

    /// Returns the poll of the moment `at`. A caller that began to wait at `since` shares it only if the first such poll woke up later.
    fn join(&self, at: Duration, since: Duration) -> Poll {
        let mut last = self.last.lock();
        let shared = last.shared.upgrade().filter(|_| last.at == at && last.came > since);
        let shared = shared.unwrap_or_else(|| {
            let shared = self.shareable();
            *last = Moment { at, came: self.env.now(), shared: Arc::downgrade(&shared) };
            shared
        });
        Poll { at, shared }
    }

    /// Returns the last tick within `pause` after `now`, if there is one.
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

    /// Polls of different intervals that began at different times read in one transaction at each tick.
    #[tokio::test(start_paused = true)]
    async fn polls_that_are_due_read_together() {
        let store = Store::memory();
        let polls = Polls::new(store.env());
        let begun = store.env().now();
        let first = polls.due(Duration::from_millis(1_500)).await.at;
        assert!((begun + TICK / 2..=begun + TICK * 3 / 2).contains(&first));
        let (one, three) = tokio::join!(polls.due(TICK), polls.due(3 * TICK));
        assert_eq!((one.at, three.at), (first + TICK, first + 3 * TICK));
        store.env().sleep(Duration::from_millis(300)).await;
        let (one, other) = tokio::join!(polls.due(TICK), polls.due(TICK.mul_f64(1.2)));
        assert_eq!((one.at, other.at), (first + 4 * TICK, first + 4 * TICK));
        let version = one.transaction(&store).read_version().await.unwrap();
        store
            .run(async |tx| {
                tx.set(b"later", b"");
                Ok(())
            })
            .await
            .unwrap();
        let found = read(other, &store, async |poll| {
            let tx = poll.transaction(&store);
            Ok((tx.read_version().await?, tx.get(b"later", Isolation::Snapshot).await?))
        });
        assert_eq!(found.await.unwrap(), (version, None), "both read at one version");
    }

    /// A pause without a tick in it is kept, a long one ends at its last tick, and an infinite one never ends.
    #[tokio::test(start_paused = true)]
    async fn pauses_are_kept_but_for_a_part_of_a_tick() {
        let store = Store::memory();
        let polls = Polls::new(store.env());
        let tick = polls.due(2 * TICK).await.at;
        let short = polls.due(Duration::from_millis(10)).await.at;
        assert!((tick + Duration::from_millis(10)..=tick + Duration::from_millis(12)).contains(&short));
        let long = polls.due(Duration::from_hours(1)).await.at;
        assert_eq!(long, tick + Duration::from_hours(1));
        let mut never = std::pin::pin!(polls.due(Duration::MAX));
        tokio::select! {
            _ = &mut never => panic!("it has ended"),
            () = store.env().sleep(Duration::from_hours(1)) => {}
        }
    }

    /// Regression: one task fired all polls. It belonged to the runtime in which the first poll began, and after that runtime ended, no
    /// poll fired: events without a doorbell were never folded, and dead nodes were never removed.
    #[test]
    fn polls_outlive_the_runtime_of_the_first() {
        let runtime = || {
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
        };
        let first = runtime();
        let store = first.block_on(async { Store::memory() });
        let polls = Polls::new(store.env());
        first.block_on(polls.due(2 * TICK));
        drop(first);
        runtime().block_on(async {
            tokio::time::timeout(3 * TICK, polls.due(2 * TICK)).await.expect("it comes");
        });
    }

    /// A read that fails in the shared transaction is repeated in its own.
    #[tokio::test(start_paused = true)]
    async fn a_failed_read_is_repeated_by_itself() {
        use crate::{
            base::error::StoreError,
            store::testing::{Faults, Operation},
        };
        let faults = Faults::new(&Store::memory());
        let store = faults.store();
        let poll = Polls::new(store.env()).due(2 * TICK).await;
        let mut is_first = true;
        faults.plan_reads(move |operation| match operation {
            Operation::Get { .. } if std::mem::take(&mut is_first) => Some(StoreError::TRANSACTION_TOO_OLD),
            _ => None,
        });
        let found =
            read(poll, &store, async |poll| poll.transaction(&store).get(b"key", Isolation::Snapshot).await);
        assert_eq!(found.await.unwrap(), None);
    }
}
