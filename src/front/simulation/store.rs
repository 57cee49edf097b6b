//! The store of a process in a world: the embedded engine behind a network that delays, loses and lies.
//!
//! Reads and commits go over the [`Link`] of the process. What becomes of a commit is in [`commits`](super::commits).

use std::sync::Arc;

use futures_util::future::BoxFuture;

use super::{
    commits::send,
    keyspace::show_key,
    link::Link,
    witness::{Fault, Witness},
};
use crate::{
    base::{
        encoding::Versionstamp,
        error::{Result, StoreError},
    },
    store::{
        Database, Watch,
        testing::{Commit, Failed, Interceptor, Operation},
    },
};

impl Interceptor for Link {
    /// A read comes after a delay, unless a fault strikes. All that an attempt does after a failed read fails.
    fn before_read(&self, operation: &Operation, failed: &Failed) -> Option<BoxFuture<'static, Result<()>>> {
        let is_watch = matches!(operation, Operation::Watch { .. });
        let is_refused = is_watch && self.shared.strikes(Fault::WatchRefused);
        let (fault, pause) = self.read_fault();
        self.note(|| match &fault {
            None => show(operation),
            Some(error) => format!("{} -> {error}", show(operation)),
        });
        let (env, failed) = (self.env.clone(), Arc::clone(failed));
        Some(Box::pin(async move {
            if !pause.is_zero() {
                env.sleep(pause).await;
            }
            let mut failed = failed.lock();
            if failed.is_none() {
                *failed = fault;
            }
            match &*failed {
                Some(error) => Err(error.clone().into()),
                None if is_refused => Err(StoreError::TOO_MANY_WATCHES.into()),
                None => Ok(()),
            }
        }))
    }

    fn has_read(&self, operation: &Operation, rows: usize, _bytes: usize) {
        if let Operation::Get { key, .. } = operation
            && rows > 0
            && key.starts_with(Database::TRANSACTION_IDS_PREFIX)
        {
            self.shared.witness(Witness::CommittedOnceFound);
        }
    }

    fn watch(
        self: &Arc<Self>,
        key: &[u8],
        set: BoxFuture<'static, Result<Watch>>,
    ) -> BoxFuture<'static, Result<Watch>> {
        let (link, key) = (Arc::clone(self), key.to_vec());
        Box::pin(async move {
            let watch = set.await?;
            let before = link.shared.fault_count(Fault::WatchDropped);
            let watch = link.disturb(watch);
            if link.shared.fault_count(Fault::WatchDropped) > before {
                link.shared.oracle().watch_lost(link.issuer, &key);
            }
            Ok(watch)
        })
    }

    fn commit(self: &Arc<Self>, commit: Commit<'_>) -> BoxFuture<'static, Result<Option<Versionstamp>>> {
        if !commit.attempt.writes() {
            // The client decides this by itself.
            return commit.happen();
        }
        if commit.attempt.operations.iter().any(|done| matches!(done, Operation::Watch { .. })) {
            self.shared.fail("a watch was set in a transaction that writes".to_owned());
        }
        send(self, commit)
    }
}

/// A read in the trace.
fn show(operation: &Operation) -> String {
    match operation {
        Operation::Get { key, .. } => format!("reads {}", show_key(key)),
        Operation::GetRange { range, .. } => format!("reads from {}", show_key(&range.begin)),
        Operation::Watch { key } => format!("watches {}", show_key(key)),
        _ => "reads the version".to_owned(),
    }
}
