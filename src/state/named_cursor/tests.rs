//! Tests of cursors whose store fails.

use super::*;
use crate::{
    base::{
        encoding::{Incarnation, Versionstamp},
        error::StoreError,
        filter::Filter,
    },
    state::keys::{Config, Keys},
    store::{
        Database,
        testing::{CommitFault, Faults},
    },
};

/// Regression: a save that had failed, and was committed all the same, was taken for one that was not. If the cursor was
/// then set back to exactly its position before, nothing was saved, and the store stayed ahead of the subscriber.
#[tokio::test]
async fn a_save_that_has_failed_and_was_committed_can_be_taken_back() {
    let faults = Faults::new(&Database::memory());
    let config = Config { partitions: 1, incarnation: Incarnation(0) };
    let keys = Keys::new(b"p").unwrap();
    let context = Context::new(faults.database(), keys, config, <_>::default());
    let at = |version| Cursor::from(Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0));
    let cursor = NamedCursor::new(&context, None, "c").unwrap();
    let mut open = cursor.open(at(1), &Filter::all()).await.unwrap();
    faults.script_commits([CommitFault::After(StoreError::IO_ERROR)]);
    open.save(at(2), open.filter).await.unwrap_err();
    assert_eq!(cursor.read().await.unwrap(), Some(at(2)));
    open.save(at(1), open.filter).await.unwrap();
    assert_eq!(cursor.read().await.unwrap(), Some(at(1)));
    // A position that is known to be saved costs nothing.
    let before = faults.counts().commits;
    open.save(at(1), open.filter).await.unwrap();
    assert_eq!(faults.counts().commits, before);
}
