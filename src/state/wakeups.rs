//! [`Wakeups`]: the last positions at which feeds of a bus may have rows, as far as this process knows, and the readers that wait for more.
//!
//! Commits of this process and the only [watcher](super::feed_watcher) of the process publish here, and everything that waits for rows
//! waits here, as a [`Listener`](super::feed_watcher::Listener). A head is never too low: a shard has no rows between its head and the
//! position up to which the watcher has polled. So a reader that compares its own position with the head misses no message, no matter when
//! the message came.
//!
//! An append by this process moves the heads at once. The watcher expects it in the pulse, and so recognises appends by other processes.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, watch},
    task::{AbortHandle, JoinSet},
};

use crate::{
    base::encoding::Sequence,
    state::keys::{FeedId, Lanes, ShardId},
};

/// The maximum number of appends by this process that are remembered until the watcher polls.
const UNSEEN_MAX: usize = 10_000;

/// The last position at which the shards of each lane may have rows.
pub(crate) type LaneHeads = [Sequence; Lanes::COUNT];

/// The heads of a feed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    /// The number of the last change. Numbers are unique in the process, across all feeds.
    pub count: u64,
    lanes: LaneHeads,
}

impl Default for Heads {
    fn default() -> Self {
        Self::unknown(0)
    }
}

impl Heads {
    /// Creates heads for a feed about which nothing is known, so all of its shards may have rows.
    fn unknown(count: u64) -> Self {
        Self { count, lanes: [Sequence::MAX; Lanes::COUNT] }
    }

    /// Whether `shard` may have rows after `after`.
    pub fn may_have_rows(&self, shard: ShardId, after: Sequence) -> bool {
        self.lanes[Lanes::of(shard)] > after
    }

    /// Whether any shard may have rows after `after`.
    pub fn any_may_have_rows(&self, after: Sequence) -> bool {
        self.lanes.iter().any(|head| *head > after)
    }
}

/// What the listeners want.
#[derive(Debug, Default)]
struct Wanted {
    /// How many listeners want the watcher to poll within each interval.
    polls: BTreeMap<Duration, usize>,
    /// How many listeners of document feeds need the watcher to read the notifications.
    followers: usize,
    documents: BTreeMap<FeedId, watch::Sender<Heads>>,
}

impl Wanted {
    fn poll_interval(&self) -> Duration {
        self.polls.keys().next().copied().unwrap_or(Duration::MAX)
    }
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Wakeups {
    notifications: watch::Sender<Heads>,
    /// The position up to which the watcher has polled. Rows of notifications up to this position are at or before the heads.
    looked: watch::Sender<Sequence>,
    /// Where the last append by this process to the notifications ended.
    appends: watch::Sender<Sequence>,
    /// Appends by this process that the watcher has not yet seen in the pulse, each with its last position. Some may be missing.
    unseen: Mutex<Vec<(Sequence, Lanes)>>,
    /// How many times heads have changed; each change gets the next number.
    count: AtomicU64,
    wanted: Mutex<Wanted>,
    /// Wakes the watcher when it should poll, or when a listener wants more from it.
    more_wanted: Notify,
    /// The watcher, as long as there are listeners.
    watcher: Mutex<Option<(Weak<JoinSet<()>>, AbortHandle)>>,
}

impl Wakeups {
    /// Returns the number of a new change. The first number is 1, because heads that have not changed yet have the number 0.
    fn next(&self) -> u64 {
        self.count.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Adds a listener to `feed`, for which the watcher polls at least once per `poll`, until the listener [leaves](Wakeups::leave). For a
    /// listener of a document feed that `follows`, the watcher reads the notifications, because nothing else reports them to that listener.
    pub fn listen(
        &self,
        feed: &FeedId,
        poll: Duration,
        follows: bool,
    ) -> (watch::Receiver<Heads>, watch::Receiver<Sequence>) {
        let mut wanted = self.wanted.lock();
        let before = (wanted.poll_interval(), wanted.followers > 0);
        *wanted.polls.entry(poll).or_default() += 1;
        let heads = if feed.instance().is_some() {
            wanted.followers += usize::from(follows);
            let first = || watch::Sender::new(Heads::unknown(self.next()));
            wanted.documents.entry(feed.clone()).or_insert_with(first).subscribe()
        } else {
            self.notifications.subscribe()
        };
        if before != (wanted.poll_interval(), wanted.followers > 0) {
            self.more_wanted.notify_one();
        }
        (heads, self.looked.subscribe())
    }

    /// Removes a listener and its receiver.
    pub fn leave(&self, feed: &FeedId, poll: Duration, follows: bool, heads: &mut watch::Receiver<Heads>) {
        let mut wanted = self.wanted.lock();
        // Replace the receiver before releasing the lock: if several listeners leave at once, the last one must find no other.
        *heads = self.notifications.subscribe();
        if let Some(listeners) = wanted.polls.get_mut(&poll) {
            *listeners -= 1;
        }
        wanted.polls.retain(|_, listeners| *listeners > 0);
        if feed.instance().is_some() {
            wanted.followers -= usize::from(follows);
            if wanted.documents.get(feed).is_some_and(|heads| heads.receiver_count() == 0) {
                wanted.documents.remove(feed);
            }
        }
    }

    /// Waits until the watcher should poll, or until a new listener wants more from it. Cancel safe.
    pub async fn more_wanted(&self) {
        self.more_wanted.notified().await;
    }

    /// Returns how often the watcher should poll.
    pub fn poll_interval(&self) -> Duration {
        self.wanted.lock().poll_interval()
    }

    /// Whether the watcher should read the notifications for listeners of document feeds.
    pub fn are_followed(&self) -> bool {
        self.wanted.lock().followers > 0
    }

    /// Returns the document feeds that have listeners.
    pub fn documents(&self) -> Vec<FeedId> {
        self.wanted.lock().documents.keys().cloned().collect()
    }

    /// Publishes that rows may have been appended to `lanes` of the notifications, up to `to`.
    pub fn moved(&self, lanes: Lanes, to: Sequence) {
        if lanes.is_empty() {
            return;
        }
        let (unseen, count) = (self.unseen.lock(), self.next());
        self.notifications.send_modify(|heads| {
            heads.count = count;
            for (shard, head) in
                (0..).map(ShardId).zip(&mut heads.lanes).filter(|(shard, _)| lanes.has(*shard))
            {
                let known = if *head == Sequence::MAX {
                    // Nothing was known before, except for appends by this process that the poll did not see.
                    unseen.iter().filter(|(_, lanes)| lanes.has(shard)).map(|(append, _)| *append).max()
                } else {
                    // A watcher that is being replaced may publish after its successor.
                    Some(*head)
                };
                *head = known.map_or(to, |known| known.max(to));
            }
        });
    }

    /// Publishes that the watcher has polled the notifications up to `to`, and has already published what it saw.
    pub fn looked(&self, to: Sequence) {
        self.looked.send_replace(to);
    }

    /// Publishes that a document feed may have rows anywhere.
    pub fn documents_moved(&self, feed: &FeedId) {
        if let Some(heads) = self.wanted.lock().documents.get(feed) {
            heads.send_replace(Heads::unknown(self.next()));
        }
    }

    /// Publishes that all document feeds may have rows anywhere.
    pub fn all_documents_moved(&self) {
        for heads in self.wanted.lock().documents.values() {
            heads.send_replace(Heads::unknown(self.next()));
        }
    }

    /// Publishes the heads of a document feed; `None` if they are unknown. `count` is what [`Wakeups::count`] returned before the read.
    pub fn found(&self, feed: &FeedId, count: u64, found: Option<LaneHeads>) {
        if let Some(heads) = self.wanted.lock().documents.get(feed) {
            let lanes = found.unwrap_or([Sequence::MAX; Lanes::COUNT]);
            heads.send_if_modified(|heads| {
                // The read may have missed rows whose messages were published after it began.
                let is_news = heads.count < count && (heads.lanes != lanes || found.is_none());
                if is_news {
                    *heads = Heads { count: self.next(), lanes };
                }
                is_news
            });
        }
    }

    /// Returns the number that the next change will get.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed) + 1
    }

    /// Publishes that a commit of this process appended to each of `lanes` of the notifications once. None of its rows is after `to`.
    pub fn appended(&self, lanes: Lanes, to: Sequence) {
        let mut unseen = self.unseen.lock();
        if unseen.len() == UNSEEN_MAX {
            // The forgotten appends will look like those of other processes.
            unseen.clear();
        }
        unseen.push((to, lanes));
        let count = self.next();
        // Nobody can take the append from `unseen` before it is in the heads.
        self.notifications.send_modify(|heads| {
            heads.count = count;
            for (shard, head) in (0..).map(ShardId).zip(&mut heads.lanes) {
                *head = if lanes.has(shard) { to.max(*head) } else { *head };
            }
        });
        drop(unseen);
        self.appends.send_if_modified(|last| {
            let is_later = to > *last;
            *last = to.max(*last);
            is_later
        });
    }

    /// Removes the appends by this process up to the position `to`, and returns the lanes of those after `from`.
    pub fn take_unseen(&self, from: Sequence, to: Sequence) -> Vec<Lanes> {
        let mut unseen = self.unseen.lock();
        let seen: Vec<_> = unseen.extract_if(.., |(append, _)| *append <= to).collect();
        seen.into_iter().filter(|(append, _)| *append > from).map(|(_, lanes)| lanes).collect()
    }

    /// Makes the watcher poll at once, because there may be rows that this process does not know about.
    pub fn look(&self) {
        self.more_wanted.notify_one();
    }

    /// Returns a receiver for the last position that [`Wakeups::appended`] published.
    pub fn appends(&self) -> watch::Receiver<Sequence> {
        self.appends.subscribe()
    }

    /// Returns the watcher, started by `start` if there is none or its runtime has ended. It ends when its last handle is dropped.
    pub fn watcher(&self, start: impl FnOnce(&mut JoinSet<()>) -> AbortHandle) -> Arc<JoinSet<()>> {
        let mut watcher = self.watcher.lock();
        let living = watcher.as_ref().filter(|(_, task)| !task.is_finished());
        living.and_then(|(tasks, _)| tasks.upgrade()).unwrap_or_else(|| {
            let mut tasks = JoinSet::new();
            let task = start(&mut tasks);
            let tasks = Arc::new(tasks);
            *watcher = Some((Arc::downgrade(&tasks), task));
            tasks
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{
        encoding::{Incarnation, Versionstamp},
        event::DbInstance,
    };

    fn position(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    const POLL: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn listeners_are_woken_for_their_feed_and_the_watcher_for_what_they_want() {
        let (wakeups, documents) = (Wakeups::default(), FeedId::documents(DbInstance([1; 16])));
        let (mut one, _) = wakeups.listen(&FeedId::notifications(), POLL, true);
        wakeups.more_wanted().await;
        assert!(!wakeups.are_followed());
        let mut two = wakeups.listen(&documents, POLL, true);
        wakeups.more_wanted().await;
        assert!(wakeups.are_followed());
        wakeups.moved([ShardId(1)].into_iter().collect(), position(5));
        assert!(one.has_changed().unwrap() && !two.0.has_changed().unwrap());
        let heads = *one.borrow_and_update();
        assert!(!heads.may_have_rows(ShardId(1), position(5)), "it has none after its head");
        assert!(heads.may_have_rows(ShardId(17), position(4)), "it is on the same lane");
        assert!(heads.may_have_rows(ShardId(2), position(5)), "nothing is known of it");
        wakeups.all_documents_moved();
        assert!(!one.has_changed().unwrap() && two.0.has_changed().unwrap());
        wakeups.leave(&documents, POLL, true, &mut two.0);
        assert!(!wakeups.are_followed() && wakeups.documents().is_empty());
    }

    /// Bug: when two listeners left at once, each thought that the other one stayed, so the watcher kept reading a feed without listeners.
    #[test]
    fn a_feed_whose_listeners_leave_at_once_has_none() {
        let (wakeups, feed) = (Wakeups::default(), FeedId::documents(DbInstance([1; 16])));
        let mut both = [0, 1].map(|_| wakeups.listen(&feed, POLL, true).0);
        for heads in &mut both {
            wakeups.leave(&feed, POLL, true, heads);
        }
        assert_eq!(wakeups.documents(), []);
    }

    /// This process may append during the watcher's first poll, which then does not see the append. The next poll expects the append and
    /// does not report it as new, so the first poll must not set the head to an earlier position.
    #[test]
    fn a_first_look_keeps_an_append_that_it_has_not_seen() {
        let (wakeups, lanes) = (Wakeups::default(), [ShardId(1)].into_iter().collect());
        wakeups.appended(lanes, position(7));
        wakeups.moved(Lanes::ALL, position(5));
        let heads = *wakeups.notifications.borrow();
        assert!(heads.may_have_rows(ShardId(1), position(6)));
        assert!(
            !heads.may_have_rows(ShardId(2), position(5)) && !heads.may_have_rows(ShardId(1), position(7))
        );
    }

    /// The watcher expects each append once: a late report of one that it has already seen must not hide an append by another process.
    #[test]
    fn an_append_counts_for_one_look() {
        let (wakeups, lanes): (_, Lanes) = (Wakeups::default(), [ShardId(1)].into_iter().collect());
        wakeups.appended(lanes, position(3));
        wakeups.appended(lanes, position(8));
        assert_eq!(wakeups.take_unseen(position(2), position(5)), [lanes]);
        wakeups.appended(lanes, position(4));
        assert_eq!(
            wakeups.take_unseen(position(5), position(9)),
            [lanes],
            "the look before has seen the one at 4"
        );
        assert_eq!(wakeups.take_unseen(position(9), position(20)), []);
    }

    /// A message that arrives while the watcher reads the heads of documents is not overwritten by the result, which may be older.
    #[test]
    fn heads_that_were_read_do_not_hide_a_later_message() {
        let (wakeups, feed) = (Wakeups::default(), FeedId::documents(DbInstance([1; 16])));
        let (mut heads, _) = wakeups.listen(&feed, POLL, true);
        let count = wakeups.count();
        wakeups.documents_moved(&feed);
        wakeups.found(&feed, count, Some([position(5); Lanes::COUNT]));
        assert!(heads.borrow_and_update().any_may_have_rows(position(9)));
        wakeups.found(&feed, wakeups.count(), Some([position(5); Lanes::COUNT]));
        assert!(heads.has_changed().unwrap());
        assert!(!heads.borrow_and_update().any_may_have_rows(position(5)));
        wakeups.found(&feed, wakeups.count(), Some([position(5); Lanes::COUNT]));
        assert!(!heads.has_changed().unwrap(), "nobody is woken for what is known");
    }

    /// Bug: when a feed got listeners again, its numbers restarted, so an earlier page counted as new. Fix: the numbers are unique in the
    /// process.
    #[test]
    fn a_feed_that_gets_listeners_again_has_no_number_of_before() {
        let (wakeups, feed) = (Wakeups::default(), FeedId::documents(DbInstance([1; 16])));
        let mut first = wakeups.listen(&feed, POLL, true).0;
        let before = first.borrow().count;
        wakeups.leave(&feed, POLL, true, &mut first);
        let listener = wakeups.listen(&feed, POLL, true).0;
        assert_ne!(listener.borrow().count, before);
        wakeups.documents_moved(&feed);
        assert!(listener.borrow().count > before + 1);
    }

    #[tokio::test]
    async fn one_watcher_serves_all_and_ends_with_its_last_handle_or_its_runtime() {
        let wakeups = Wakeups::default();
        let start = |tasks: &mut JoinSet<()>| tasks.spawn(std::future::pending());
        let one = wakeups.watcher(start);
        let two = wakeups.watcher(|_| panic!("there is one"));
        assert!(Arc::ptr_eq(&one, &two));
        drop((one, two));
        let ended = wakeups.watcher(|tasks| tasks.spawn(async {}));
        tokio::task::yield_now().await;
        assert!(!Arc::ptr_eq(&ended, &wakeups.watcher(start)), "another is started");
    }
}
