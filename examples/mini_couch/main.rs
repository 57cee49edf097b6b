//! A small document database that works with clients of CouchDB: an example of a layer on the bus.
//!
//! It keeps databases and documents in the same store as the bus, and records events in the transactions of its edits (`couch`). The
//! library provides `_db_updates` and `_changes`, next to the layer's own routes (`http`).
//!
//! Run it with `cargo run --example mini_couch`, or with `cargo run --example mini_couch -- 127.0.0.1:5984 FOLDER` to keep its data in a
//! folder. It runs until its standard input ends (Ctrl-D), or until a signal asks it to stop (Ctrl-C, SIGTERM).
//!
//! The environment variable `MINI_COUCH_CREDENTIALS` can contain lines from `notibus credential`; without it, every user of the machine is
//! an admin. `MINI_COUCH_ORIGIN` can name an origin whose pages may use the server from a browser.
//!
//! It is not for production: documents have no branches of revisions, no attachments and at most 99,000 bytes, and there are no views or
//! accounts.

pub mod couch;
pub mod document;
pub mod documents;
pub mod feeds;
pub mod http;
pub mod keys;
pub mod problem;

use std::{error::Error, sync::Arc};

use notibus::{
    Bus, BusOptions, NodeHandle, StartOptions,
    http::{ApiOptions, Credentials, ServerOptions},
    store::Store,
};
use tokio::{net::TcpListener, sync::oneshot};

/// Serves until standard input ends or a signal arrives.
#[tokio::main]
pub async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let listen = arguments.next().unwrap_or_else(|| "127.0.0.1:5984".to_owned());
    let store = arguments.next().map_or_else(|| Ok(Store::memory()), Store::open_dir)?;
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let running = bus.start(StartOptions::default()).await?;

    let couch = Arc::new(couch::Couch::new(store.clone(), &bus));
    let mut options = ApiOptions::default().body_len_max(http::BODY_LEN_MAX);
    if let Ok(lines) = std::env::var("MINI_COUCH_CREDENTIALS") {
        options = options.authorize(Arc::new(lines.parse::<Credentials>()?));
    }
    let api = running.api(options)?;
    let feeds = api.db_updates().merge(api.changes(couch.changes(), couch.clone()));
    let app = http::finished(
        &api,
        api.protected(http::router(couch)).merge(feeds).merge(api.status()).merge(api.sessions()),
    );
    // There are no accounts, so the defaults must stay: only this machine gets answers, and no web pages from elsewhere in its browsers.
    let listener = TcpListener::bind(listen).await?;
    let origins = std::env::var("MINI_COUCH_ORIGIN").into_iter().collect();
    let limits = ServerOptions::default().cors_origins(origins).cors_credentials(true);
    let address = running.serve(listener, app, limits).await?;
    println!("mini_couch listens on http://{address}");

    let (ended, end) = oneshot::channel();
    std::thread::spawn(move || {
        // If copying fails, input has ended as well. If `send` fails, the program is already ending.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = ended.send(());
    });
    // The end of standard input is one way to stop the program, a signal the other.
    Ok(running.shutdown_on(&mut NodeHandle::signals()?, async { drop(end.await) }).await?)
}
