//! [`NameLocks`] puts requests that create or delete the same name in order: each waits for those that came before it.
//!
//! Without these locks their transactions would conflict in the store, which retries one of two. If fifty came at once, the store
//! would retry some of them for seconds. These locks only save time, and do not make anything correct: other processes do not know
//! them, and the store alone decides.

use std::sync::Arc;

use dashmap::DashMap;
use futures_util::future::Either;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

use crate::base::event::DbName;

/// The names that requests are working on.
#[derive(Debug, Default)]
pub(super) struct NameLocks(Arc<DashMap<DbName, Arc<RwLock<()>>>>);

/// The lock of one name. Dropping it lets the next request take its turn.
pub(super) struct NameLock {
    /// The map that the lock was taken from.
    names: Arc<DashMap<DbName, Arc<RwLock<()>>>>,
    name: DbName,
    held: Option<Guard>,
}

/// A request that creates or deletes the name holds the lock alone; other requests share it.
type Guard = Either<OwnedRwLockWriteGuard<()>, OwnedRwLockReadGuard<()>>;

impl NameLocks {
    /// Takes the lock of `name`: alone if the request `decides` what the name stands for, or else together with others. To take
    /// several locks, take them in the order of the names.
    pub async fn take(&self, name: DbName, decides: bool) -> NameLock {
        let lock = Arc::clone(&self.0.entry(name.clone()).or_default());
        let mut turn = NameLock { names: Arc::clone(&self.0), name, held: None };
        turn.held = Some(if decides {
            Either::Left(lock.write_owned().await)
        } else {
            Either::Right(lock.read_owned().await)
        });
        turn
    }
}

impl Drop for NameLock {
    fn drop(&mut self) {
        self.held = None;
        // Every waiting request holds a reference to the lock.
        self.names.remove_if(&self.name, |_, lock| Arc::strong_count(lock) == 1);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn who_decides_is_alone_and_names_are_forgotten() {
        let turns = NameLocks::default();
        let name = || DbName::new("a").unwrap();
        let readers = [turns.take(name(), false).await, turns.take(name(), false).await];
        assert!(turns.take(name(), true).now_or_never().is_none());
        drop(readers);
        let writer = turns.take(name(), true).await;
        assert!(turns.take(name(), false).now_or_never().is_none());
        let other = turns.take(DbName::new("b").unwrap(), true).await;
        drop((writer, other));
        assert!(turns.0.is_empty());
    }
}
