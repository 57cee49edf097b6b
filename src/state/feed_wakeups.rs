//! [`FeedWakeups`]: informs the consumers of a process which feeds may have new rows.
//!
//! One watcher per process polls the store, whatever the number of consumers, shards and feeds; consumers only
//! listen. Its messages are hints: each consumer also polls by itself from time to time.

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
};

use crate::{
    base::encoding::Sequence,
    state::keys::{FeedId, ShardId},
};

/// The last message about a feed.
#[derive(Debug, Clone, Default)]
pub(crate) struct FeedHeads {
    /// The number of the message. No other message of the process has it, of whatever feed.
    pub count: u64,
    /// The last position at which each shard may have rows, as far as that is known.
    pub heads: Arc<HashMap<ShardId, Sequence>>,
}

impl FeedHeads {
    /// Whether `shard` may have rows after `after`.
    pub fn may_have_rows(&self, shard: ShardId, after: Sequence) -> bool {
        self.heads.get(&shard).is_none_or(|head| *head > after)
    }

    /// Whether any shard may have rows after `after`, as far as anything is known.
    pub fn any_may_have_rows(&self, after: Sequence) -> bool {
        self.heads.values().any(|head| *head > after)
    }
}

/// The messages to the consumers of a process.
#[derive(Debug, Default)]
pub(crate) struct FeedWakeups {
    feeds: Mutex<HashMap<FeedId, watch::Sender<FeedHeads>>>,
    /// How many messages there were. A feed that gets listeners again goes on with new numbers: nobody has heard what came meanwhile.
    count: AtomicU64,
    /// How often the watcher has read the heads of the notifications and informed the listeners.
    polls: AtomicU64,
    /// Wakes the watcher when a feed gets its first listener.
    joined: Notify,
    /// The task of the watcher, as long as a consumer needs it.
    watcher: Mutex<Weak<JoinSet<()>>>,
}

impl FeedWakeups {
    /// Listens to messages about `feed`.
    pub fn listen(&self, feed: &FeedId) -> watch::Receiver<FeedHeads> {
        let mut feeds = self.feeds.lock();
        feeds.retain(|_, sender| sender.receiver_count() > 0);
        if !feeds.contains_key(feed) {
            self.joined.notify_one();
        }
        let first = || watch::Sender::new(FeedHeads { count: self.next(), heads: Arc::default() });
        feeds.entry(feed.clone()).or_insert_with(first).subscribe()
    }

    fn next(&self) -> u64 {
        self.count.fetch_add(1, Ordering::Relaxed)
    }

    /// Counts a read of the heads, after its messages.
    pub fn polled(&self) {
        self.polls.fetch_add(1, Ordering::Release);
    }

    /// How often the watcher has read the heads.
    pub fn polls(&self) -> u64 {
        self.polls.load(Ordering::Acquire)
    }

    /// Completes when a feed gets its first listener. Cancel safe.
    pub async fn joined(&self) {
        self.joined.notified().await;
    }

    /// The number of listeners to feeds of documents.
    pub fn documents(&self) -> usize {
        let feeds = self.feeds.lock();
        let documents = feeds.iter().filter(|(feed, _)| feed.instance().is_some());
        documents.map(|(_, sender)| sender.receiver_count()).sum()
    }

    /// Informs the listeners that `feed` may have new rows: in all shards; or, with `heads`, up to these heads and in
    /// all other shards.
    pub fn notify(&self, feed: &FeedId, heads: Option<Arc<HashMap<ShardId, Sequence>>>) {
        if let Some(sender) = self.feeds.lock().get(feed) {
            notify(sender, self.next(), heads);
        }
    }

    /// Informs the listeners that all feeds of documents may have new rows. The known heads of the notifications
    /// stay: without them, each shard of the notifications would be polled by itself until its head moves.
    pub fn notify_documents(&self) {
        let feeds = self.feeds.lock();
        let documents = feeds.iter().filter(|(feed, _)| feed.instance().is_some());
        documents.for_each(|(_, sender)| notify(sender, self.next(), None));
    }

    /// The watcher of the process, which `start` starts if there is none. It ends with its last handle.
    pub fn watcher(&self, start: impl FnOnce() -> JoinSet<()>) -> Arc<JoinSet<()>> {
        let mut watcher = self.watcher.lock();
        watcher.upgrade().unwrap_or_else(|| {
            let started = Arc::new(start());
            *watcher = Arc::downgrade(&started);
            started
        })
    }
}

/// Informs the listeners of one feed.
fn notify(sender: &watch::Sender<FeedHeads>, count: u64, heads: Option<Arc<HashMap<ShardId, Sequence>>>) {
    sender.send_replace(FeedHeads { count, heads: heads.unwrap_or_default() });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::event::DbInstance;

    #[tokio::test]
    async fn listeners_are_woken_for_their_feed_and_the_watcher_for_new_ones() {
        let wakeups = FeedWakeups::default();
        let documents = FeedId::documents(DbInstance([1; 16]));
        let mut one = wakeups.listen(&FeedId::notifications());
        wakeups.joined().await;
        assert_eq!(wakeups.documents(), 0);
        let two = wakeups.listen(&documents);
        wakeups.joined().await;
        assert_eq!(wakeups.documents(), 1);
        let heads = HashMap::from([(ShardId(1), Sequence::MIN)]);
        wakeups.notify(&FeedId::notifications(), Some(Arc::new(heads)));
        assert!(one.has_changed().unwrap() && !two.has_changed().unwrap());
        let last = one.borrow_and_update().clone();
        assert!(!last.may_have_rows(ShardId(1), Sequence::MIN), "it has none after its head");
        assert!(last.may_have_rows(ShardId(2), Sequence::MAX), "nothing is known of it");
        wakeups.notify_documents();
        assert!(!one.has_changed().unwrap() && two.has_changed().unwrap());
        assert!(!one.borrow().may_have_rows(ShardId(1), Sequence::MIN), "its head is known as before");
        drop(two);
        assert_eq!(wakeups.documents(), 0);
    }

    /// Bug: the numbers of a feed began again with its listeners, so a page that was read before nobody listened counted as new. Fix: they
    /// are those of the process.
    #[tokio::test]
    async fn a_feed_that_gets_listeners_again_has_no_number_of_before() {
        let (wakeups, feed) = (FeedWakeups::default(), FeedId::notifications());
        let listener = wakeups.listen(&feed);
        let before = listener.borrow().count;
        drop(listener);
        let listener = wakeups.listen(&feed);
        assert_ne!(listener.borrow().count, before);
        wakeups.notify(&feed, None);
        assert!(listener.borrow().count > before + 1);
    }

    #[tokio::test]
    async fn one_watcher_serves_all_and_ends_with_its_last_handle() {
        let wakeups = FeedWakeups::default();
        let start = || {
            let mut tasks = JoinSet::new();
            tasks.spawn(std::future::pending());
            tasks
        };
        let one = wakeups.watcher(start);
        let two = wakeups.watcher(|| panic!("there is one"));
        assert!(Arc::ptr_eq(&one, &two));
        drop((one, two));
        assert_eq!(wakeups.watcher(start).len(), 1, "another is started");
    }
}
