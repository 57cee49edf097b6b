//! A whole program: a layer that records events in its transactions, and the ways to follow these events: a stream, two consumers, an
//! index, and clients over HTTP.
//!
//! Run it with `cargo run --example whole_program`. With `-- serve 127.0.0.1:5984 FOLDER` it keeps its data in a folder, and runs until
//! Ctrl-C or SIGTERM.

use std::{error::Error, future::ready, time::Duration};

use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, Filter, Notification, Producer, Result, StartOptions,
    consumer::{Batch, ConsumerOptions, IndexBuild, Work, index},
    http::{ApiOptions, ServerOptions},
    store::{AtomicOp, Store, Transaction},
};
use tokio::{net::TcpListener, sync::mpsc};
use tokio_stream::StreamExt;

/// Writes a document, and records its event in the same transaction.
async fn write(store: &Store, producer: &Producer, db: &Db, body: &str) -> Result<()> {
    let write = async |tx: Transaction| {
        tx.set(format!("layer/{}/1", db.instance).as_bytes(), body.as_bytes());
        producer.updated(&tx, db);
        Ok(())
    };
    store.run(write).await
}

/// Counts the rows of `batch` in the transaction that commits the progress, so each row is counted exactly once.
async fn count(store: &Store, batch: &Batch<Notification>) -> Result<()> {
    let count = async |tx: Transaction| {
        if !batch.commit_in(&tx).await?.is_already_committed() {
            tx.atomic(AtomicOp::Add, b"layer/count", &(batch.rows.len() as u64).to_le_bytes());
        }
        Ok(())
    };
    store.run(count).await
}

/// Serves until a signal arrives, or only shows the deliveries for one document.
#[tokio::main]
pub async fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip_while(|argument| argument != "serve").skip(1);
    let (listen, folder) = (arguments.next(), arguments.next());
    let store = folder.map_or_else(|| Ok(Store::memory()), Store::open_dir)?;
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let running = bus.start(StartOptions::default()).await?;
    let (say, mut heard) = mpsc::unbounded_channel();

    // A stream, which delivers events as long as the program runs.
    let shop = running.dispatcher().subscribe(Filter::prefix("shop/"));
    let mut deliveries = shop.deliveries(|trouble| eprintln!("{trouble}"));
    // A consumer whose handler is called for each database: after a restart it continues where it was.
    let said = say.clone();
    let mail = move |work: Work<Notification>| {
        let name = String::from_utf8_lossy(work.id()).into_owned();
        ready(said.send(format!("mailer: {name}")).map_err(Into::into))
    };
    let _mailer = running.consumer("mailer")?.run(mail).await?;
    // A consumer that works in batches and has effects exactly once. All nodes that run it share the work.
    let (said, counts) = (say.clone(), store.clone());
    let counting = move |batch: Batch<Notification>| {
        let (said, store) = (said.clone(), counts.clone());
        async move {
            count(&store, &batch).await?;
            Ok(said.send("counter: counted".to_owned())?)
        }
    };
    let _counter = running.consumer("counter")?.run_batches(counting).await?;
    // An index: a build for each changed database, repeated until it succeeds.
    let options = ConsumerOptions::index().debounce(Duration::ZERO);
    let build =
        move |build: IndexBuild| ready(say.send(format!("index: {}", build.db.name)).map_err(Into::into));
    let indexer = running.consumer("indexer")?.start_from(Cursor::BEGINNING).options(options);
    let _indexer = indexer.run(index(build)).await?;
    // Clients of CouchDB can use `_db_updates`, `_changes` and the administration.
    let routes = running.api(ApiOptions::default())?.routes();
    let listener = TcpListener::bind(listen.as_deref().unwrap_or("127.0.0.1:0")).await?;
    println!("http://{}", running.serve(listener, routes, ServerOptions::default()).await?);

    let orders = Db::new("shop/orders".parse()?, DbInstance::new());
    write(&store, &bus.producer(), &orders, "{\"total\":42}").await?;
    let delivery = deliveries.next().await.ok_or("the dispatcher has ended")?;
    println!("stream: {}", delivery.notification().name);
    let mut waiting = vec!["mailer", "counter", "index"];
    while !waiting.is_empty() {
        let line = heard.recv().await.ok_or("nobody is left to speak")?;
        waiting.retain(|who| !line.starts_with(who));
        println!("{line}");
    }
    let ended = if listen.is_some() { running.shutdown_on_signal().await } else { running.shutdown().await };
    Ok(ended?)
}
