//! The HTTP side of the bus: `_db_updates` and `_changes`, in the form that CouchDB's clients use.
//!
//! [`Api`] makes routers ([`axum::Router`]). A layer merges them into its own, or the command `notibus serve` serves them alone. [`Server`]
//! is a listener with limits. A layer implements one trait, [`Databases`], which says which database a name belongs to and what the
//! documents contain.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use notibus::{Bus, BusOptions, StartOptions, http::{ApiOptions, ServerOptions}, store::Store};
//!
//! let store = Store::memory();
//! let bus = Bus::open(&store, BusOptions::default()).await?;
//! let running = bus.start(StartOptions::default()).await?;
//! let api = running.api(ApiOptions::default())?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
//! let router = api.db_updates().merge(api.status());
//! let address = running.serve(listener, router, ServerOptions::default()).await?;
//! println!("http://{address}/_db_updates");
//! running.shutdown().await?; // feeds end with their last line, then connections, then the roles
//! # Ok(()) }
//! ```
//!
//! This server is open to the programs on its own machine, and to nobody else. It answers only to `localhost` and loopback addresses
//! ([`ServerOptions::hosts`]), so that no web page reaches it through a browser, and it does not listen for other machines. To open it to
//! other machines, say who may send requests ([`ApiOptions::authorize`]), and then set [`ServerOptions::is_public`].
//!
//! # How `_db_updates` differs from CouchDB's
//!
//! - A database has a row for each type that is news to the reader, as in CouchDB. The rows come in the order of the events: `deleted` for
//!   an earlier database of that name, if the reader may have known it, `created`, `updated`, and `ddoc_updated` if `types` asks for it. A
//!   deleted database has only the row `deleted`; CouchDB still reports that it was created.
//! - Sequences sort as text, and never go back. Clients return them unchanged. Usually a sequence has 26 hexadecimal digits. In the middle
//!   of a reading it also says where the reading began.
//! - Rows of one database are not split: a page may exceed `limit` by up to three rows.
//! - Headers are sent at once, every mode has heartbeats, and event sources have the same rows as the other feeds.
//!
//! This module is not a database server: the layer keeps the documents.

mod answer;
mod api;
mod body;
mod caller;
mod changes;
mod cookie;
mod credentials;
mod databases;
mod events;
mod manage;
mod metrics;
mod options;
mod page;
mod query;
mod row;
mod server;
mod session;
mod stream;
mod updates;
mod wire_format;

pub use axum;

use self::api::Inner;
pub use self::{
    answer::Failure,
    api::Api,
    caller::{Caller, Grant},
    credentials::Credentials,
    databases::{ChangesRequest, Databases, DocView},
    options::{ApiOptions, Authorize, allow_all},
    server::{Server, ServerOptions},
};
#[cfg(feature = "test-util")]
pub(crate) use self::{events::decode_events, query::decode_query};
