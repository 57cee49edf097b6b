//! [`FeedWakeups`]: tells the consumers of a process which feeds may have new rows.
//!
//! One watcher per process looks at the store, whatever the number of consumers, shards and feeds; consumers only listen.
//! What it tells is a hint: each consumer also looks for itself from time to time.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
};

use crate::{
    base::encoding::Sequence,
    state::keys::{FeedId, ShardId},
};

/// What was last told of a feed.
#[derive(Debug, Clone, Default)]
pub(crate) struct FeedHeads {
    /// How often something was told.
    pub count: u64,
    /// Up to where shards may have rows, as far as that is known.
    pub heads: Arc<HashMap<ShardId, Sequence>>,
}

impl FeedHeads {
    /// Whether `shard` may have rows after `after`.
    pub fn may_have_rows(&self, shard: ShardId, after: Sequence) -> bool {
        self.heads.get(&shard).is_none_or(|head| *head > after)
    }
}

/// What the consumers of a process are told.
#[derive(Debug, Default)]
pub(crate) struct FeedWakeups {
    feeds: Mutex<HashMap<FeedId, watch::Sender<FeedHeads>>>,
    /// How often the watcher has looked at the heads of the notifications, and has told what it saw.
    looks: AtomicU64,
    /// Wakes the watcher when a feed is listened to that was not.
    joined: Notify,
    /// The task of the watcher, as long as somebody needs it.
    watcher: Mutex<Weak<JoinSet<()>>>,
}

/// Locks `mutex`. Nothing that is done under the locks of this file can be left half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FeedWakeups {
    /// Listens to what is told of `feed`.
    pub fn listen(&self, feed: &FeedId) -> watch::Receiver<FeedHeads> {
        let mut feeds = lock(&self.feeds);
        feeds.retain(|_, sender| sender.receiver_count() > 0);
        if !feeds.contains_key(feed) {
            self.joined.notify_one();
        }
        feeds.entry(feed.clone()).or_default().subscribe()
    }

    /// The watcher has looked at the heads of the notifications, and has told what it saw.
    pub fn looked(&self) {
        self.looks.fetch_add(1, Ordering::Release);
    }

    /// How often it has.
    pub fn looks(&self) -> u64 {
        self.looks.load(Ordering::Acquire)
    }

    /// Completes when a feed is listened to that was not. Cancel safe.
    pub async fn joined(&self) {
        self.joined.notified().await;
    }

    /// How many listen to feeds of documents.
    pub fn documents(&self) -> usize {
        let feeds = lock(&self.feeds);
        let documents = feeds.iter().filter(|(feed, _)| feed.instance().is_some());
        documents.map(|(_, sender)| sender.receiver_count()).sum()
    }

    /// Tells that `feed` may have new rows: in all shards, or in those whose heads are here up to there, and in all others.
    pub fn tell(&self, feed: &FeedId, heads: Option<Arc<HashMap<ShardId, Sequence>>>) {
        if let Some(sender) = lock(&self.feeds).get(feed) {
            tell(sender, heads);
        }
    }

    /// Tells that all feeds of documents may have new rows. What is known of the heads of the notifications stays: nobody else would
    /// tell of them before they move, and until then each of their shards would be polled for itself.
    pub fn tell_documents(&self) {
        let feeds = lock(&self.feeds);
        let documents = feeds.iter().filter(|(feed, _)| feed.instance().is_some());
        documents.for_each(|(_, sender)| tell(sender, None));
    }

    /// The watcher of the process, which `start` starts if there is none. It ends with its last handle.
    pub fn watcher(&self, start: impl FnOnce() -> JoinSet<()>) -> Arc<JoinSet<()>> {
        let mut watcher = lock(&self.watcher);
        watcher.upgrade().unwrap_or_else(|| {
            let started = Arc::new(start());
            *watcher = Arc::downgrade(&started);
            started
        })
    }
}

/// Tells the listeners of one feed.
fn tell(sender: &watch::Sender<FeedHeads>, heads: Option<Arc<HashMap<ShardId, Sequence>>>) {
    sender.send_modify(|told| {
        told.count = told.count.wrapping_add(1);
        told.heads = heads.unwrap_or_default();
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::event::DbInstance;

    #[tokio::test]
    async fn listeners_are_told_of_their_feed_and_the_watcher_of_new_ones() {
        let arrivals = FeedWakeups::default();
        let documents = FeedId::documents(DbInstance([1; 16]));
        let mut one = arrivals.listen(&FeedId::notifications());
        arrivals.joined().await;
        assert_eq!(arrivals.documents(), 0);
        let two = arrivals.listen(&documents);
        arrivals.joined().await;
        assert_eq!(arrivals.documents(), 1);
        let heads = HashMap::from([(ShardId(1), Sequence::MIN)]);
        arrivals.tell(&FeedId::notifications(), Some(Arc::new(heads)));
        assert!(one.has_changed().unwrap() && !two.has_changed().unwrap());
        let told = one.borrow_and_update().clone();
        assert!(!told.may_have_rows(ShardId(1), Sequence::MIN), "it has none after its head");
        assert!(told.may_have_rows(ShardId(2), Sequence::MAX), "nothing is known of it");
        arrivals.tell_documents();
        assert!(!one.has_changed().unwrap() && two.has_changed().unwrap());
        assert!(!one.borrow().may_have_rows(ShardId(1), Sequence::MIN), "its head is known as before");
        drop(two);
        assert_eq!(arrivals.documents(), 0);
    }

    #[tokio::test]
    async fn one_watcher_serves_all_and_ends_with_its_last_handle() {
        let arrivals = FeedWakeups::default();
        let start = || {
            let mut tasks = JoinSet::new();
            tasks.spawn(std::future::pending());
            tasks
        };
        let one = arrivals.watcher(start);
        let two = arrivals.watcher(|| panic!("there is one"));
        assert!(Arc::ptr_eq(&one, &two));
        drop((one, two));
        assert_eq!(arrivals.watcher(start).len(), 1, "another is started");
    }
}
