//! The outside of the bus: `_db_updates` and `_changes` over HTTP, as clients of CouchDB speak them.
//!
//! [`Api`] gives routers ([`axum::Router`]) that a layer merges into its own, or that the command `notibus serve` serves alone.
//! [`Server`] is a listener with limits. What a layer has to tell, which database has a name and what is in its documents, is
//! one trait, [`Databases`].
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
//! As it stands there it is open to the programs of its machine and to nobody else: it answers to `localhost` and loopback
//! addresses alone ([`Hosts`]), so that no web page reaches it through a browser, and does not listen for other machines. For
//! those, say who may ask ([`ApiOptions::access`]) or put accounts in front, and then set [`ServerOptions::is_public`].
//!
//! # How `_db_updates` differs from CouchDB's
//!
//! - A database has a row for each type that is news to the reader, as in CouchDB, in the order in which they happened: `deleted` of
//!   an earlier one that it may have known, `created`, `updated`, and `ddoc_updated` where `types` asks for it. One that is deleted
//!   has that row alone; CouchDB goes on to tell of its creation as well.
//! - Sequences sort, as text, and never go back. Clients give them back as they came: mostly 26 hexadecimal digits, but in the
//!   middle of what there is to read also where the reading began.
//! - Headers go out at once, heartbeats in every mode, and events of an event source are the same rows.
//!
//! What this is not: a database server. Documents are the layer's.

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
mod checks;
mod cookie;
mod cors;
mod databases;
mod db_updates;
mod events;
mod failure;
mod groups;
mod guard;
mod hosts;
mod lockout;
mod metrics;
mod name_locks;
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
mod triggers;
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
#[cfg(feature = "simulation")]
pub(crate) use self::{events::decode_events, query::decode_query};
