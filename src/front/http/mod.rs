//! The HTTP side of the bus: `_db_updates` and `_changes`, in the form that CouchDB's clients use.
//!
//! [`Api`] makes routers ([`axum::Router`]). A layer merges them into its own, or the command `notibus serve` serves them alone.
//! [`Server`] is a listener with limits. A layer implements one trait, [`Databases`], which says which database has a name and what
//! its documents contain.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use notibus::{Bus, BusOptions, Roles, http::{ApiOptions, ServerOptions}, store::Database};
//!
//! let store = Database::memory();
//! let bus = Bus::open(&store, BusOptions::default()).await?;
//! let running = bus.start(Roles::default()).await?;
//! let api = running.api(ApiOptions::default())?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
//! let router = api.db_updates().merge(api.status());
//! let address = running.serve(listener, router, ServerOptions::default()).await?;
//! println!("http://{address}/_db_updates");
//! running.shutdown().await?; // feeds end with their last line, then connections, then the roles
//! # Ok(()) }
//! ```
//!
//! This server is open to the programs of its machine, and to nobody else. It answers only to `localhost` and loopback addresses
//! ([`Hosts`]), so that no web page reaches it through a browser, and it does not listen for other machines. To open it to them,
//! set credentials ([`ApiOptions::access`]) or put a server with accounts in front, and then set [`ServerOptions::is_public`].
//!
//! # How `_db_updates` differs from CouchDB's
//!
//! - A database has a row for each type that is news to the reader, as in CouchDB. The rows come in the order of the events:
//!   `deleted` for an earlier database of the name that the reader may have known, `created`, `updated`, and `ddoc_updated` if
//!   `types` asks for it. A deleted database has only the row `deleted`; CouchDB also goes on to say that it was created.
//! - Sequences sort as text, and never go back. Clients return them unchanged. Mostly a sequence has 26 hexadecimal digits. In the
//!   middle of a reading it also says where the reading began.
//! - Headers are sent at once, every mode has heartbeats, and event sources have the same rows as the other feeds.
//!
//! This is not a database server: the layer keeps the documents.

mod access;
mod admission;
mod answer;
mod answer_counts;
mod api;
mod bodies;
mod body;
mod caller;
mod catalogue;
mod changes;
mod consumers;
mod cookie;
mod cors;
mod databases;
mod db_updates;
mod events;
mod failure;
mod feeds;
mod guard;
mod hosts;
mod incarnation;
mod manage;
mod metrics;
mod name_locks;
mod nodes;
mod options;
mod page;
mod position;
mod query;
mod refusals;
mod row;
mod running;
mod server;
mod session;
mod socket;
mod status;
mod stream;
mod tally;
mod updates;
mod wire_format;

pub use axum;

use self::api::Inner;
pub use self::{
    access::{Access, Credentials},
    admission::Peer,
    api::Api,
    caller::{Caller, Grant},
    cors::Cors,
    databases::{Asked, Databases, Lens},
    failure::Failure,
    hosts::Hosts,
    options::ApiOptions,
    server::{Server, ServerOptions},
};
#[cfg(feature = "test-util")]
pub(crate) use self::{events::decode_events, query::decode_query};
