//! [`Problem`]: why a request cannot be done.

use std::fmt::Display;

use notibus::Error;

/// Why a request cannot be done. Nothing was changed then.
#[derive(Debug, Clone)]
pub enum Problem {
    /// The store has failed, or refuses what it was given.
    Store(Error),
    /// No database can have that name.
    BadName(String),
    /// There is no such database.
    NoDatabase,
    /// There is such a database already.
    DatabaseExists,
    /// There is no such document, and why not.
    Missing(&'static str),
    /// The document was edited by somebody else since it was read.
    Conflict,
    /// No document can look like this.
    BadDocument(String),
    /// The document does not fit into a value of the store.
    TooLarge(String),
    /// The request makes no sense.
    BadRequest(String),
    /// What CouchDB does and this layer does not.
    Unsupported(&'static str),
    /// A row of the store cannot be read.
    Corrupt(String),
}

impl Problem {
    /// A row cannot be read because of `reason`.
    pub fn corrupt(reason: impl Display) -> Self {
        Self::Corrupt(reason.to_string())
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        match error {
            // It was deleted in between.
            Error::NoFeed { .. } => Self::NoDatabase,
            error => Self::Store(error),
        }
    }
}
