//! [`NamedCursor`]: the cursor of a durable subscriber, kept in the store under a name.
//!
//! It is for one subscriber at a time: the last one that opens it can write it, and an earlier one finds with its
//! next write that it has lost the cursor. It does not keep tombstones in the feed, as a group's checkpoint does: a
//! subscriber that was away for longer than their retention gets `Expired`. Many consumers that divide a feed among
//! them are a [`Group`](crate::group::Group) instead.

pub(crate) mod autosave;
mod owed;
mod parked;
#[cfg(test)]
mod tests;

pub(crate) use self::parked::Parked;

use std::{fmt, sync::Arc};

use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        event::{Db, DbName},
        filter::Filter,
    },
    state::{
        context::Context,
        keys::{CursorId, CursorRow, NodeId, ParkedRow},
    },
    store::{Isolation, KeyRange, RangeRead, Transaction, key_after},
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

    /// Deletes it, with everything that a trigger has kept with it. Subscribers that have it open lose it.
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
    ///
    /// `starts_over` is for work that must miss nothing: a cursor that was saved for another filter begins at nothing
    /// again.
    pub(crate) async fn open(&self, start: Cursor, filter: &Filter, starts_over: bool) -> Result<OpenCursor> {
        let (token, has_predicate, filter) = (self.token(), filter.has_predicate(), filter.hash());
        let open = async |tx: Transaction| {
            self.check_bus()?;
            let version = tx.read_version().await?;
            let stored = self.row(&tx).await?;
            let is_other = stored.is_some_and(|row| row.filter != filter);
            let mut cursor = stored.map_or(start, |row| row.cursor);
            if is_other && starts_over {
                cursor = Cursor::NOTHING;
            } else if is_other || has_predicate {
                cursor = cursor.rewound();
            }
            let marks = RangeRead::new(self.context.keys.scans(&self.id)).limit(1);
            let has_marks = starts_over && !tx.get_range(&marks, Isolation::Snapshot).await?.rows.is_empty();
            if cursor.knew_nothing() {
                cursor = cursor.begin(Sequence::last_at(self.context.config.incarnation, version));
            }
            tx.set(&self.context.keys.cursor(&self.id), &CursorRow { token, cursor, filter }.to_bytes());
            Ok((cursor, has_marks))
        };
        let (stored, has_marks) = self.context.db.run(open).await?;
        Ok(OpenCursor { cursor: self.clone(), token, stored, is_in_doubt: false, filter, has_marks })
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
    /// Whether it had marks of databases when it was opened, or read again. Only triggers have marks.
    has_marks: bool,
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

    /// Whether it had marks of databases when it was opened, or read again.
    pub fn has_marks(&self) -> bool {
        self.has_marks
    }

    /// Saves `position`, unless it is saved already. Fails with [`Error::CursorLost`] if another subscriber has
    /// opened the cursor.
    pub async fn save(&mut self, position: Cursor) -> Result<()> {
        self.save_for(position, self.filter).await
    }

    /// [`OpenCursor::save`] for a filter with the hash `filter`.
    pub async fn save_for(&mut self, position: Cursor, filter: u64) -> Result<()> {
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

    /// The same cursor as it is in the store at present. Fails with [`Error::CursorLost`] if another subscriber
    /// has opened it.
    pub async fn read_again(&self) -> Result<Self> {
        let NamedCursor { context, id } = &self.cursor;
        let read = async |tx: Transaction| {
            self.check(&tx).await?;
            // There may be marks by now: those of before the panic.
            let marks = RangeRead::new(context.keys.scans(id)).limit(1);
            let has_marks = !tx.get_range(&marks, Isolation::Snapshot).await?.rows.is_empty();
            let stored = self.cursor.row(&tx).await?.map_or(self.stored, |row| row.cursor);
            Ok((stored, has_marks))
        };
        let (stored, has_marks) = context.db.run(read).await?;
        Ok(Self { stored, is_in_doubt: false, has_marks, ..self.clone() })
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

    /// Begins a scan of `db`: earlier scans cannot write any more. If the database is parked, and this is no
    /// `is_retry`, no scan begins; instead the parked row notes the new events, and whether the database `is_fresh`.
    /// An `is_retry` begins none if the database is not parked any more. Fails with [`Error::CursorLost`] if another subscriber has
    /// opened the cursor.
    pub async fn begin_scan(&self, db: &Db, is_retry: bool, is_fresh: bool) -> Result<Begun> {
        let NamedCursor { context, id } = &self.cursor;
        let (token, key, parked_key) =
            (self.cursor.token(), context.keys.scan(id, db), context.keys.parked(id, db));
        let begin = async |tx: Transaction| {
            self.check(&tx).await?;
            let stored = tx.get(&key, Isolation::Serializable);
            let parked = tx.get(&parked_key, Isolation::Serializable);
            let (stored, parked) = tokio::try_join!(stored, parked)?;
            let parked = parked.map(|bytes| ParkedRow::from_bytes(&bytes)).transpose()?;
            match parked {
                Some(parked) if !is_retry => {
                    let is_fresh = parked.is_fresh || is_fresh;
                    // New events may have removed the cause of the failures.
                    tx.set(&parked_key, &ParkedRow { is_fresh, retries: 0, ..parked }.to_bytes());
                    return Ok(None);
                }
                // It was read some time ago, and may have been deleted and forgotten since.
                parked if is_retry && parked.as_ref().is_none_or(|parked| parked.is_gone) => return Ok(None),
                // What is requested from now on is another retry.
                Some(parked) if parked.is_asked => {
                    tx.set(&parked_key, &ParkedRow { is_asked: false, ..parked }.to_bytes());
                }
                _ => {}
            }
            let stored = stored.map(|bytes| CursorRow::from_bytes(&bytes)).transpose()?;
            let cursor = stored.map_or(Cursor::NOTHING, |row| row.cursor);
            tx.set(&key, &CursorRow { token, cursor, filter: 0 }.to_bytes());
            Ok(Some(cursor))
        };
        let Some(position) = context.db.run(begin).await? else { return Ok(Begun::OutOfTurn) };
        let (context, db) = (Arc::clone(context), db.clone());
        Ok(Begun::Scan(ScanMark { context, db, key: key.into(), token, position }))
    }

    /// Ends the scan of `db`: it cannot write any more, nor can transactions that it has checked. The mark of the
    /// scan stays. Fails as [`OpenCursor::begin_scan`] does.
    pub async fn end_scan(&self, db: &Db) -> Result<()> {
        let NamedCursor { context, id } = &self.cursor;
        let (token, key) = (self.cursor.token(), context.keys.scan(id, db));
        let end = async |tx: Transaction| {
            self.check(&tx).await?;
            if let Some(stored) = tx.get(&key, Isolation::Serializable).await? {
                // A row that cannot be decoded makes the next scan begin at the beginning; otherwise nothing would
                // ever repair it.
                let row = CursorRow::from_bytes(&stored);
                let (cursor, filter) = row.map_or((Cursor::NOTHING, 0), |row| (row.cursor, row.filter));
                tx.set(&key, &CursorRow { token, cursor, filter }.to_bytes());
            }
            Ok(())
        };
        context.db.run(end).await
    }

    /// Removes the mark, the scans and the parked row of `db`. Fails as [`OpenCursor::begin_scan`] does.
    pub async fn unmark(&self, db: &Db) -> Result<()> {
        let NamedCursor { context, id } = &self.cursor;
        let forget = async |tx: Transaction| {
            self.check(&tx).await?;
            tx.clear(&context.keys.scan(id, db));
            tx.clear(&context.keys.parked(id, db));
            Ok(())
        };
        context.db.run(forget).await
    }

    /// At most `limit` of the marked databases, after `last` in their order.
    pub async fn marked(&self, last: Option<&Db>, limit: usize) -> Result<Vec<Db>> {
        let NamedCursor { context, id } = &self.cursor;
        let KeyRange { begin, end } = context.keys.scans(id);
        let begin = last.map_or(begin, |last| key_after(&context.keys.scan(id, last)));
        self.marked_in(RangeRead::new(KeyRange { begin, end }).limit(limit)).await
    }

    /// The marked instances of the database `name`: some of them, if they are many.
    pub async fn marked_as(&self, name: &DbName) -> Result<Vec<Db>> {
        let NamedCursor { context, id } = &self.cursor;
        self.marked_in(RangeRead::new(context.keys.scans_of(id, name))).await
    }

    /// The databases of the scans in the range `read`.
    async fn marked_in(&self, read: RangeRead) -> Result<Vec<Db>> {
        let NamedCursor { context, .. } = &self.cursor;
        let page =
            context.db.run(async |tx: Transaction| tx.get_range(&read, Isolation::Snapshot).await).await?;
        page.rows.iter().map(|row| context.keys.scan_db(row)).collect()
    }
}

/// The result of beginning a scan.
pub(crate) enum Begun {
    Scan(ScanMark),
    /// Its database is parked, or, if this was to be a retry, is not parked any more.
    OutOfTurn,
}

/// The position of the scans of one database, for the current scan. Clones are of the same scan.
#[derive(Debug, Clone)]
pub(crate) struct ScanMark {
    context: Arc<Context>,
    db: Db,
    key: Arc<[u8]>,
    token: [u8; 16],
    /// The position of earlier scans.
    pub position: Cursor,
}

impl ScanMark {
    /// Makes `tx` fail unless the scan is still the current one at the commit. Fails with [`Error::Cancelled`] if it
    /// is not any more.
    pub async fn check_in(&self, tx: &Transaction) -> Result<()> {
        let stored = tx.get(&self.key, Isolation::Serializable).await?;
        let stored = stored.map(|bytes| CursorRow::from_bytes(&bytes)).transpose()?;
        if stored.is_some_and(|row| row.token == self.token) {
            return Ok(());
        }
        Err(Error::Cancelled { what: format!("database {}", self.db.name) })
    }

    /// Saves `position` as the scan's. Returns whether it is still the current scan; if not, nothing is written.
    pub async fn report(&self, position: Cursor) -> Result<bool> {
        let report = async |tx: Transaction| {
            let Some(stored) = tx.get(&self.key, Isolation::Serializable).await? else { return Ok(false) };
            let stored = CursorRow::from_bytes(&stored)?;
            if stored.token != self.token {
                return Ok(false);
            }
            if position > stored.cursor {
                tx.set(&self.key, &CursorRow { cursor: position, ..stored }.to_bytes());
            }
            Ok(true)
        };
        self.context.db.run(report).await
    }
}
