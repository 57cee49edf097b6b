//! A layer that uses the `foundationdb` client by itself: it writes a document and records the event in one transaction of
//! its own, and knows nothing of the bus's store. The bus runs beside it on the same connection.
//!
//! Run it with `cargo run --features foundationdb --example foundationdb_layer -- CLUSTER_FILE`.

use std::{error::Error, sync::Arc};

use foundationdb::{Database as Client, api::NetworkAutoStop};
use notibus::{
    Bus, BusOptions, Db, DbInstance, DispatcherOptions, Filter, NotifierOptions, Producer, store::Database,
};
use tokio_stream::StreamExt;

/// Writes a document of `db` in one raw transaction, and rings once it is committed.
async fn write(
    client: &Client,
    producer: &Producer,
    db: &Db,
    id: &str,
    body: &str,
) -> Result<(), Box<dyn Error>> {
    let mut transaction = client.create_trx()?;
    let receipt = loop {
        transaction.set(format!("layer/{}/{id}", db.name).as_bytes(), body.as_bytes());
        let receipt = producer.updated(&transaction, db);
        match transaction.commit().await {
            Ok(_) => break receipt,
            // The write is the same each time, so trying again after an unknown result is harmless, and the event may be
            // counted twice; a layer that minds writes a key of its own to find out.
            Err(failed) => transaction = failed.on_error().await?,
        }
    };
    receipt.ring();
    Ok(())
}

/// What the layer does, with the bus beside it.
async fn run(cluster_file: &str) -> Result<(), Box<dyn Error>> {
    let client = Arc::new(Client::from_path(cluster_file)?);
    let store = Database::from_foundationdb(Arc::clone(&client));
    let bus =
        Bus::open(&store, BusOptions { prefix: b"layer-example/".to_vec(), ..BusOptions::default() }).await?;
    let notifier = bus.notifier(NotifierOptions::default()).await?;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await?;
    let mut orders = dispatcher.subscribe(Filter::name("orders")?).stream();

    let db = Db::new("orders".parse()?, DbInstance::random(store.env()));
    write(&client, &bus.producer(), &db, "1", "{\"total\": 42}").await?;

    let delivery = orders.next().await.ok_or("the dispatcher has ended")??;
    for (instance, kind) in delivery.news().iter() {
        println!(
            "{} {} ({instance}) at {}",
            delivery.notification().name,
            kind.as_str(),
            delivery.sequence()
        );
    }
    dispatcher.shutdown().await;
    notifier.shutdown().await?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let cluster_file = std::env::args().nth(1).ok_or("name a cluster file")?;
    let network = boot()?;
    let runtime = tokio::runtime::Runtime::new()?;
    let outcome = runtime.block_on(run(&cluster_file));
    // In this order: nothing may use the network once it has stopped.
    drop(runtime);
    drop(network);
    outcome
}

/// Boots the client's network, as a layer without the bus would.
#[expect(unsafe_code, reason = "the client has no safe form of this call")]
fn boot() -> Result<NetworkAutoStop, Box<dyn Error>> {
    let builder = foundationdb::api::FdbApiBuilder::default().build()?;
    // SAFETY: `main` drops the guard before the process ends.
    Ok(unsafe { builder.boot()? })
}
