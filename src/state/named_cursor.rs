//! [`NamedCursor`]: the cursor of a durable subscriber, kept in the store under a name.
//!
//! It is for one subscriber at a time: the last one that opens it can write it, and an earlier one finds with its
//! next write that it has lost the cursor. It does not keep tombstones in the feed, as a group's checkpoint does: a
//! subscriber that was away for longer than their retention gets `Expired`. Many consumers that divide a feed among
//! them are a [`Group`](crate::group::Group) instead.

pub(crate) mod autosave;
#[cfg(test)]
mod tests;

use std::{fmt, sync::Arc};

use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        filter::Filter,
    },
    state::{
        context::Context,
        keys::{CursorId, CursorRow, NodeId},
    },
    store::{Isolation, Transaction},
};

/// A named cursor in the feed of notifications, which may not exist in the store yet. Clones are cheap.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, Filter, Roles, store::Database};
/// use tokio_stream::StreamExt;
///
/// let store = Database::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let running = bus.start(Roles::default()).await?;
/// let cursor = bus.cursor("mirror")?;
/// assert_eq!(cursor.read().await?, None);
/// // From now on, and after a restart from where it was.
/// let mut updates = running.dispatcher().subscribe(Filter::all()).durable(&cursor).await?.stream();
/// # let db = notibus::Db::new("orders".parse()?, notibus::DbInstance::new());
/// # store.run(async |tx| Ok(bus.producer().created(&tx, &db))).await?;
/// let delivery = updates.next().await.expect("the dispatcher runs").expect("nothing interrupts");
/// println!("{}", delivery.notification().name);
/// updates.checkpoint().await?;
/// # running.shutdown().await?;
/// cursor.delete().await
/// # }
/// ```
#[derive(Clone)]
pub struct NamedCursor {
    context: Arc<Context>,
    id: CursorId,
}

impl NamedCursor {
    /// The longest name, in bytes.
    pub const NAME_LEN_MAX: usize = CursorId::NAME_LEN_MAX;

    /// The cursor `name` of `node`, or of the bus as a whole. Fails if the name is empty or too long.
    pub(crate) fn new(context: &Arc<Context>, node: Option<&NodeId>, name: &str) -> Result<Self> {
        Ok(Self { context: Arc::clone(context), id: CursorId::new(node, name)? })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.id.name()
    }

    /// Its position; `None` if it does not exist yet.
    pub async fn read(&self) -> Result<Option<Cursor>> {
        let read = async |tx| Ok(self.row(&tx).await?.map(|row| row.cursor));
        self.context.db.run(read).await
    }

    /// Deletes it. Subscribers that have it open lose it.
    pub async fn delete(&self) -> Result<()> {
        let delete = async |tx: Transaction| {
            self.check_bus()?;
            tx.clear_range(&self.context.keys.whole_cursor(&self.id));
            Ok(())
        };
        self.context.db.run(delete).await
    }

    /// Opens it, takes it from an earlier owner, and returns its position. A new cursor begins at `start`.
    ///
    /// A cursor that knows nothing begins now, because rows that are delivered before the first save may be known
    /// when it is opened again. A cursor that was saved in the middle of a reading starts over, unless it was saved for this
    /// very filter: it has passed over rows that another one may want. Predicates hash alike, so any of them may be another one.
    pub(crate) async fn open(&self, start: Cursor, filter: &Filter) -> Result<OpenCursor> {
        let (token, has_predicate, filter) = (self.token(), filter.has_predicate(), filter.hash());
        let open = async |tx: Transaction| {
            self.check_bus()?;
            let version = tx.read_version().await?;
            let stored = self.row(&tx).await?;
            let is_other = stored.is_some_and(|row| row.filter != filter);
            let mut cursor = stored.map_or(start, |row| row.cursor);
            if is_other || has_predicate {
                cursor = cursor.rewound();
            }
            if cursor.knew_nothing() {
                cursor = cursor.begin(Sequence::last_at(self.context.config.incarnation, version));
            }
            tx.set(&self.context.keys.cursor(&self.id), &CursorRow { token, cursor, filter }.to_bytes());
            Ok(cursor)
        };
        let stored = self.context.db.run(open).await?;
        Ok(OpenCursor { cursor: self.clone(), token, stored, is_in_doubt: false, filter })
    }

    /// Fails once the bus is gone: what stands under the prefix is of another one.
    fn check_bus(&self) -> Result<()> {
        self.context.stats.health.ended().map_or(Ok(()), |gone| Err(gone.clone()))
    }

    fn token(&self) -> [u8; 16] {
        let env = self.context.env();
        (u128::from(env.random()) << 64 | u128::from(env.random())).to_be_bytes()
    }

    async fn row(&self, tx: &Transaction) -> Result<Option<CursorRow>> {
        let stored = tx.get(&self.context.keys.cursor(&self.id), Isolation::Serializable).await?;
        stored.map(|bytes| CursorRow::from_bytes(&bytes)).transpose()
    }
}

impl fmt::Debug for NamedCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NamedCursor").field(&self.id).finish()
    }
}

/// An open cursor, which can be written until another subscriber opens it. Clones share its token.
#[derive(Debug, Clone)]
pub(crate) struct OpenCursor {
    cursor: NamedCursor,
    token: [u8; 16],
    /// Its position in the store, unless that is unknown.
    stored: Cursor,
    /// Whether a save has failed or was cancelled, and may have happened.
    is_in_doubt: bool,
    /// The hash of the filter that it was saved for.
    filter: u64,
}

impl OpenCursor {
    /// Logs that it could not be saved; the next save repeats it.
    pub fn complain(&self, error: &Error) {
        let context = &self.cursor.context;
        context.stats.health.complain(context.env(), "saving of a cursor", error);
    }

    /// Its position in the store.
    pub fn stored(&self) -> Cursor {
        self.stored
    }

    /// Saves `position`, for a filter with the hash `filter`, unless it is saved already. Fails with [`Error::CursorLost`] if another
    /// subscriber has opened the cursor.
    pub async fn save(&mut self, position: Cursor, filter: u64) -> Result<()> {
        if !self.is_in_doubt && (position, filter) == (self.stored, self.filter) {
            return Ok(());
        }
        self.is_in_doubt = true;
        let Self { cursor, token, .. } = &*self;
        let save = async |tx: Transaction| {
            self.check(&tx).await?;
            let row = CursorRow { token: *token, cursor: position, filter };
            tx.set(&cursor.context.keys.cursor(&cursor.id), &row.to_bytes());
            Ok(())
        };
        cursor.context.db.run(save).await?;
        (self.stored, self.filter, self.is_in_doubt) = (position, filter, false);
        Ok(())
    }

    /// Fails with [`Error::CursorLost`] if another subscriber has opened it.
    pub async fn verify(&self) -> Result<()> {
        self.cursor.context.db.run(async |tx| self.check(&tx).await).await
    }

    /// Fails if another subscriber has opened it, or the bus is gone, and makes `tx` fail if one does before the commit.
    async fn check(&self, tx: &Transaction) -> Result<()> {
        self.cursor.check_bus()?;
        match self.cursor.row(tx).await? {
            Some(row) if row.token == self.token => Ok(()),
            _ => Err(Error::CursorLost { cursor: self.cursor.id.to_string() }),
        }
    }
}
