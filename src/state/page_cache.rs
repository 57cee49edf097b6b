//! [`PageCache`]: the last page that consumers of this process have read of each shard.
//!
//! Consumers that follow the same feed are at the same position most of the time. The first one to read a page keeps it here, and the
//! others take it from memory, so a node reads a feed once, however many consumers it has. A consumer that is further behind reads for
//! itself, and gets each id once, in its newest row. A row that was superseded after the page was read appears once more, at its new
//! position, as it does for any reader that read a moment earlier.
//!
//! A reader takes no page that is older than one that it has read, because a row that moved between the two reads would be in neither page.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::{
    base::encoding::Sequence,
    state::keys::{FeedId, ShardId},
};

/// How many bytes of rows are kept in total.
const BYTES_MAX: usize = 16 << 20;

/// The minimum number of shards at which shards without readers are forgotten.
const FORGET_MIN: usize = 64;

/// Rows of a shard: everything after `after` and up to `to`, as of one version.
#[derive(Debug)]
pub(crate) struct CachedPage {
    pub after: Sequence,
    pub to: Sequence,
    pub rows: Vec<(Sequence, Bytes)>,
    /// The version at which the page was read.
    pub version: u64,
    /// Whether there was more to read.
    pub more: bool,
    /// The number of hints about the feed before the page was read: if it has changed, there may be rows after the page.
    pub hints: u64,
    bytes: usize,
}

type ShardOfFeed = (FeedId, ShardId);

/// Each reader of a shard keeps a clone. The reader that reads the next page from the store holds the lock.
pub(crate) type Turn = Arc<tokio::sync::Mutex<()>>;

/// A shard with readers.
#[derive(Debug, Default)]
struct Shard {
    /// Shared with the readers.
    turn: Turn,
    page: Option<Arc<CachedPage>>,
}

impl Shard {
    fn is_forgotten(&self) -> bool {
        self.page.is_none() && Arc::strong_count(&self.turn) == 1
    }
}

#[derive(Debug, Default)]
struct Cached {
    shards: HashMap<ShardOfFeed, Shard>,
    /// The shards with pages, in the order in which they got their pages.
    order: VecDeque<ShardOfFeed>,
    bytes: usize,
    /// Once there are this many shards, shards without readers are forgotten.
    forget_at: usize,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct PageCache(Mutex<Cached>);

impl PageCache {
    /// Returns the last page, if it has the first rows after `after`, and was read at `version` or later.
    pub fn get(
        &self,
        feed: &FeedId,
        shard: ShardId,
        after: Sequence,
        version: u64,
    ) -> Option<Arc<CachedPage>> {
        let cached = self.0.lock();
        let page = cached.shards.get(&(feed.clone(), shard))?.page.as_ref()?;
        (page.after <= after && after < page.to && page.version >= version).then(|| Arc::clone(page))
    }

    /// Registers a reader of `shard`. A reader that had to wait for the lock finds the page of the other reader in the cache.
    pub fn reader(&self, feed: &FeedId, shard: ShardId) -> Turn {
        let cached = &mut *self.0.lock();
        if cached.shards.len() >= cached.forget_at {
            cached.shards.retain(|_, shard| !shard.is_forgotten());
            cached.forget_at = (2 * cached.shards.len()).max(FORGET_MIN);
        }
        Arc::clone(&cached.shards.entry((feed.clone(), shard)).or_default().turn)
    }

    /// Keeps a page that was read, if the shard has other readers.
    pub fn put(
        &self,
        (feed, shard, turn): (&FeedId, ShardId, &Turn),
        (after, to): (Sequence, Sequence),
        rows: impl FnOnce() -> Vec<(Sequence, Bytes)>,
        (version, more, hints): (u64, bool, u64),
    ) {
        // One reference is this reader's, the other is the table's.
        if Arc::strong_count(turn) <= 2 {
            return;
        }
        let rows = rows();
        let bytes = rows.iter().map(|(_, value)| value.len() + 64).sum::<usize>() + 64;
        let page = Arc::new(CachedPage { after, to, rows, version, more, hints, bytes });
        let cached = &mut *self.0.lock();
        let place = (feed.clone(), shard);
        let kept = &mut cached.shards.entry(place.clone()).or_default().page;
        if kept.as_ref().is_some_and(|kept| kept.to > to) {
            // This reader is behind the others.
            return;
        }
        let before = kept.replace(page);
        cached.bytes = cached.bytes + bytes - before.as_ref().map_or(0, |before| before.bytes);
        if before.is_none() {
            cached.order.push_back(place);
        }
        while cached.bytes > BYTES_MAX {
            let Some(oldest) = cached.order.pop_front() else { break };
            let dropped = cached.shards.get_mut(&oldest).and_then(|shard| shard.page.take());
            cached.bytes -= dropped.map_or(0, |page| page.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::encoding::{Incarnation, Versionstamp};

    fn position(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    #[test]
    fn a_page_serves_every_position_within_it_until_newer_ones_take_its_room() {
        let (cache, feed) = (PageCache::default(), FeedId::notifications());
        let value = Bytes::from(vec![0; BYTES_MAX / 4]);
        let row = |version| vec![(position(version), value.clone())];
        let readers: Vec<_> = (1..7).chain(1..7).map(|shard| cache.reader(&feed, ShardId(shard))).collect();
        let put = |shard: u64, (after, to): (u64, u64), at| {
            let place = (&feed, ShardId(shard), &readers[shard as usize - 1]);
            cache.put(place, (position(after), position(to)), || row(at), (7, false, 0));
        };
        put(1, (1, 5), 3);
        for (after, is_kept) in [(0, false), (1, true), (4, true), (5, false)] {
            assert_eq!(cache.get(&feed, ShardId(1), position(after), 7).is_some(), is_kept, "{after}");
        }
        assert!(
            cache.get(&feed, ShardId(1), position(1), 8).is_none(),
            "the reader has read at a later version"
        );
        assert!(cache.get(&feed, ShardId(2), position(1), 7).is_none());
        put(1, (5, 6), 6);
        assert!(cache.get(&feed, ShardId(1), position(1), 7).is_none(), "who is behind reads for itself");
        put(1, (0, 2), 1);
        assert!(cache.get(&feed, ShardId(1), position(5), 7).is_some(), "and takes no page from the others");
        for shard in 2..6 {
            put(shard, (1, 5), 3);
        }
        assert!(cache.get(&feed, ShardId(1), position(5), 0).is_none(), "it had to make room");
        assert!(cache.get(&feed, ShardId(5), position(1), 0).is_some());
    }

    #[test]
    fn nothing_is_kept_for_the_only_reader_and_of_shards_without_readers() {
        let (cache, feed) = (PageCache::default(), FeedId::notifications());
        let only = cache.reader(&feed, ShardId(0));
        let row = || vec![(position(3), Bytes::from_static(b"row"))];
        cache.put((&feed, ShardId(0), &only), (position(1), position(5)), row, (7, false, 0));
        assert!(cache.get(&feed, ShardId(0), position(1), 7).is_none());
        for shard in 1..1_000 {
            drop(cache.reader(&feed, ShardId(shard)));
        }
        assert!(cache.0.lock().shards.len() <= FORGET_MIN);
    }
}
