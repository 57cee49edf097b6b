//! [`Problem`]: why a request fails.

use std::{borrow::Cow, fmt::Display};

use notibus::Error;
use serde::{Deserialize, Serialize};

/// Why a request fails. Then nothing was changed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Problem {
    /// The store has failed, or refuses the request.
    #[serde(skip)]
    Store(Error),
    /// No database can have that name.
    BadName(String),
    /// There is no such database.
    NoDatabase,
    /// There is such a database already.
    DatabaseExists,
    /// There is no such document, for this reason.
    Missing(Cow<'static, str>),
    /// Another client has edited the document since it was read.
    Conflict,
    /// The document is invalid.
    BadDocument(String),
    /// The document does not fit into a value of the store.
    TooLarge(String),
    /// The request is invalid.
    BadRequest(String),
    /// CouchDB supports it, but this layer does not.
    Unsupported(Cow<'static, str>),
    /// A row of the store cannot be decoded.
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
            // The database was deleted meanwhile.
            Error::NoFeed { .. } => Self::NoDatabase,
            error => Self::Store(error),
        }
    }
}
