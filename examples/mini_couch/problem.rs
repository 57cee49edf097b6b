//! [`Problem`]: why a request fails.

use std::{borrow::Cow, fmt::Display};

use notibus::Error;
use serde::{Deserialize, Serialize};

/// Why a request fails. After a problem, nothing was changed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Problem {
    /// The store failed, or refused the request.
    #[serde(skip)]
    Store(Error),
    /// A database cannot have this name.
    BadName(String),
    /// There is no such database.
    NoDatabase,
    /// There already is such a database.
    DatabaseExists,
    /// There is no such document, for this reason.
    Missing(Cow<'static, str>),
    /// Another client edited the document since it was read.
    Conflict,
    /// The document is invalid.
    BadDocument(String),
    /// The document does not fit into a value of the store.
    TooLarge(String),
    /// The request is invalid.
    BadRequest(String),
    /// CouchDB supports this, but the layer does not.
    Unsupported(Cow<'static, str>),
    /// A row in the store cannot be decoded.
    Corrupt(String),
}

impl Problem {
    /// Makes the problem for a row that cannot be read because of `reason`.
    pub fn corrupt(reason: impl Display) -> Self {
        Self::Corrupt(reason.to_string())
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        match error {
            // The database was deleted in the meantime.
            Error::NoFeed { .. } => Self::NoDatabase,
            error => Self::Store(error),
        }
    }
}
