//! Opens a bus in memory, subscribes, records events in a transaction, and receives them.
//!
//! Run it with `cargo run --example quickstart`.

use notibus::{
    Bus, BusOptions, Db, DbInstance, Filter, StartOptions,
    store::{Isolation, Store},
};
use tokio_stream::StreamExt;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `Store::open_dir("folder")` keeps everything on disk instead.
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await?;

    // A node with all roles: it folds events into the feed, and delivers them to subscribers. It stops when this handle is dropped.
    let running = bus.start(StartOptions::default()).await?;
    let orders = running.dispatcher().subscribe(Filter::prefix("shop/"));
    let mut orders = orders.deliveries(|trouble| eprintln!("{trouble}"));

    // A layer creates a database and writes a document: the events are part of the transaction.
    let producer = bus.producer();
    let db = Db::new("shop/orders".parse()?, DbInstance::new());
    store
        .run(async |tx| {
            tx.set(b"shop/orders/1", b"{\"total\": 42}");
            producer.created(&tx, &db);
            producer.updated(&tx, &db);
            Ok(())
        })
        .await?;

    let delivery = orders.next().await.ok_or("the dispatcher has ended")?;
    for (instance, kind) in delivery.news().iter() {
        println!("{} {} ({instance})", delivery.notification().name, kind.as_str());
    }
    println!("at {}", delivery.sequence());

    let document = store.run(async |tx| tx.get(b"shop/orders/1", Isolation::Snapshot).await).await?;
    println!("document: {}", String::from_utf8_lossy(&document.ok_or("the document is missing")?));

    Ok(running.shutdown().await?)
}
