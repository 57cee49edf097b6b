//! Reads changes together with the layer's leaves and bodies of the documents.

use std::{future::ready, sync::Arc};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, future::BoxFuture, stream};

use super::{Change, DocSummary, Revision};
use crate::{
    base::{
        cursor::Cursor,
        error::{Error, Result},
        event::Db,
    },
    state::{
        feed::{Feed, FeedPage, Resharded, ShardPage},
        keys::ShardId,
    },
    store::Transaction,
};

/// How many documents are read from the source at once.
const DOCS_AT_ONCE: usize = 32;

/// A leaf of a document: the end of a branch of edits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaf {
    /// The revision of the leaf.
    pub revision: Revision,
    /// Whether the leaf is a deletion.
    pub is_deleted: bool,
}

/// Provides the layer's leaves and bodies of documents, read in the same transaction as the changes.
pub trait DocSource: Send + Sync {
    /// Returns all leaves of `doc`, the winning one first. Called only for documents with more than one branch. Default: only the winner,
    /// for layers whose documents have no branches.
    fn leaves<'a>(
        &'a self,
        _tx: &'a Transaction,
        _db: &'a Db,
        doc: &'a DocSummary,
    ) -> BoxFuture<'a, Result<Vec<Leaf>>> {
        Box::pin(ready(Ok(vec![winner(doc)])))
    }

    /// Returns the winning revision of `doc` in the layer's own format; `None` if there is nothing to show. Default: `None`.
    fn body<'a>(
        &'a self,
        _tx: &'a Transaction,
        _db: &'a Db,
        _doc: &'a DocSummary,
    ) -> BoxFuture<'a, Result<Option<Bytes>>> {
        Box::pin(ready(Ok(None)))
    }
}

/// Returns the leaf of the winning revision.
fn winner(doc: &DocSummary) -> Leaf {
    Leaf { revision: doc.revision, is_deleted: doc.is_deleted }
}

/// Which changes to read, and what to read with them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChangesQuery {
    /// Where to start: with rows after this cursor, or, if descending, with rows before its position. Default: [`Cursor::BEGINNING`].
    pub from: Cursor,
    /// The maximum number of rows, 1 to 10,000. With large documents choose a number that can be read within 5 s. Default: 1,000.
    pub limit: usize,
    /// Whether to read the newest rows first. Default: no.
    pub descending: bool,
    /// Whether to read all leaves of each document (`style=all_docs`), not just the winning revision. Default: no.
    pub all_leaves: bool,
    /// Whether to read the documents, too (`include_docs`). Default: no.
    pub include_docs: bool,
    /// If set, only the rows of this shard are read, oldest first. Default: rows of all shards.
    pub shard: Option<ShardId>,
}

crate::base::macros::setters!(ChangesQuery { from: Cursor, limit: usize, descending: bool, all_leaves: bool, include_docs: bool, shard: Option<ShardId> });

impl Default for ChangesQuery {
    fn default() -> Self {
        Self {
            from: Cursor::BEGINNING,
            limit: 1_000,
            descending: false,
            all_leaves: false,
            include_docs: false,
            shard: None,
        }
    }
}

/// A change, with the leaves and the body that were asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangeRow {
    /// The row of the feed.
    pub change: Arc<Change>,
    /// The leaves that were asked for, the winning one first.
    pub leaves: Vec<Leaf>,
    /// The document, if it was asked for and there is one.
    pub body: Option<Bytes>,
}

/// Changes in the order that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangesPage {
    /// The rows.
    pub rows: Vec<ChangeRow>,
    /// Where to continue.
    pub next: Cursor,
    /// Whether there was more to read.
    pub more: bool,
    /// The successors, if one closed shard was read to its end.
    pub resharded: Option<Resharded>,
}

pub(super) async fn read(
    tx: &Transaction,
    feed: &Feed<Change>,
    db: &Db,
    query: &ChangesQuery,
    source: &dyn DocSource,
) -> Result<ChangesPage> {
    let (rows, next, more, resharded) = match query.shard {
        None => {
            let page = if query.descending {
                feed.page_before_in(tx, query.from.position(), query.limit).await?
            } else {
                feed.page_in(tx, query.from, query.limit).await?
            };
            let FeedPage { rows, next, more, .. } = page;
            (rows, next, more, None)
        }
        Some(_) if query.descending => {
            return Err(Error::invalid("query", "the rows of one shard come oldest first"));
        }
        Some(shard) => {
            let page = feed.shard_page_in(tx, shard, query.from, query.limit).await?;
            let ShardPage { rows, next, more, resharded, .. } = page;
            (rows, next, more, resharded)
        }
    };
    let row = async |change: Arc<Change>| {
        let doc = &change.doc;
        let leaves = if query.all_leaves && doc.branches > 1 {
            source.leaves(tx, db, doc).await?
        } else {
            vec![winner(doc)]
        };
        let body = if query.include_docs { source.body(tx, db, doc).await? } else { None };
        Ok::<_, Error>(ChangeRow { change, leaves, body })
    };
    let rows = stream::iter(rows).map(row).buffered(DOCS_AT_ONCE).try_collect().await?;
    Ok(ChangesPage { rows, next, more, resharded })
}
