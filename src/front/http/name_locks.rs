//! [`NameLocks`]: requests that decide what one name stands for come one after the other, in the order in which they came.
//!
//! Their transactions meet in the store all the same, where one of two is tried again; of fifty at once some would be tried again for
//! seconds. What this is not: a lock. Other processes know nothing of it, and the store alone decides.

use std::sync::Arc;

use dashmap::DashMap;
use futures_util::future::Either;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

use crate::base::event::DbName;

/// The names that requests are at work on.
#[derive(Debug, Default)]
pub(super) struct NameLocks(Arc<DashMap<DbName, Arc<RwLock<()>>>>);

/// A turn at one name, until it is dropped.
pub(super) struct NameLock {
    /// Where it is given back.
    names: Arc<DashMap<DbName, Arc<RwLock<()>>>>,
    name: DbName,
    /// Alone, or with others that only go by what the name stands for.
    held: Option<Guard>,
}

/// How a turn is held: alone, or with others.
type Guard = Either<OwnedRwLockWriteGuard<()>, OwnedRwLockReadGuard<()>>;

impl NameLocks {
    /// The turn at `name`: of one that decides what it stands for alone, of others together. Who takes several takes them in
    /// the order of the names.
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
        // Anyone who waits for it holds it as well.
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
