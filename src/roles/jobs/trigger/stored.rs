//! [`StoredTrigger`]: the stored state of a trigger, to be inspected and managed, whether it runs or not.

use std::sync::Arc;

use serde::Serialize;

use crate::{
    base::{
        cursor::Cursor,
        error::{Error, Result},
        event::{Db, DbInstance, DbName},
    },
    state::{context::Context, keys::ParkedRow, named_cursor::NamedCursor},
};

/// The most parked databases that are listed at once.
const LIST_MAX: usize = 10_000;

/// A database for which a trigger's job has failed too often.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ParkedDb {
    /// Its name.
    #[serde(rename = "db")]
    pub name: DbName,
    /// Which instance.
    pub instance: DbInstance,
    /// Whether the clean-up after its deletion has failed, instead of its work.
    pub is_gone: bool,
    /// Whether a retry was requested that has not happened yet.
    pub is_asked: bool,
    /// How often it was tried.
    pub attempts: u32,
    /// When it was tried last, in milliseconds since 1970.
    pub at_ms: u64,
    /// Why the last attempt failed.
    pub error: String,
}

impl ParkedDb {
    /// The parked `db` with its row. If that cannot be decoded, nothing but this is known.
    fn new(db: Db, row: Result<ParkedRow>) -> Self {
        let row = row.unwrap_or_else(|error| ParkedRow {
            error: format!("its row cannot be decoded: {error}"),
            ..ParkedRow::default()
        });
        let ParkedRow { is_gone, is_fresh: _, is_asked, attempts, retries: _, at_ms, error } = row;
        Self { name: db.name, instance: db.instance, is_gone, is_asked, attempts, at_ms, error }
    }

    /// The database.
    pub fn db(&self) -> Db {
        Db::new(self.name.clone(), self.instance)
    }
}

/// The stored state of a trigger.
#[derive(Debug, Clone)]
pub struct StoredTrigger(NamedCursor);

impl StoredTrigger {
    /// A handle on the trigger `name`. Fails if the name is empty or too long.
    pub(crate) fn new(context: &Arc<Context>, name: &str) -> Result<Self> {
        NamedCursor::new(context, None, name).map(Self)
    }

    /// The names of all triggers that have worked on a database or have parked one. It costs two reads per
    /// cursor of the bus.
    pub(crate) async fn names(context: &Arc<Context>) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for cursor in NamedCursor::all(context).await? {
            if cursor.is_of_trigger().await? {
                names.push(cursor.name().to_owned());
            }
        }
        Ok(names)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// The position of its cursor: all work before it is done or parked. `None` if it was never started.
    pub async fn position(&self) -> Result<Option<Cursor>> {
        self.0.read().await
    }

    /// At most `limit` (1 to 10,000) of its parked databases after `last`, by name.
    pub async fn parked(&self, last: Option<&Db>, limit: usize) -> Result<Vec<ParkedDb>> {
        if !(1..=LIST_MAX).contains(&limit) {
            return Err(Error::invalid("limit", format!("{limit} is not 1 to {LIST_MAX}")));
        }
        let rows = self.0.parked(last, limit).await?.into_iter();
        Ok(rows.map(|(db, row)| ParkedDb::new(db, row)).collect())
    }

    /// Requests a retry of its parked databases of this name, or of all: within about 10 s if it runs, else when it is started;
    /// many are tried one after the other. Returns how many there are, without those whose rows cannot be decoded.
    pub async fn retry(&self, name: Option<&DbName>) -> Result<u64> {
        self.0.ask(name).await
    }

    /// Deletes all its stored state: its cursor, the marks of its work, and its parked databases. The next trigger of this name
    /// begins with all databases, and is not informed of those that are gone by then. A running trigger ends with
    /// [`Error::CursorLost`].
    pub async fn reset(&self) -> Result<()> {
        self.0.delete().await
    }
}
