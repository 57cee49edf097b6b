//! A layer that uses the `foundationdb` client directly: it creates a database, writes documents, and records the events in its own
//! transactions, without the bus's store. The bus runs next to it on the same connection.
//!
//! A database has an instance, which is drawn when the database is created, and stored with it. Events of an instance that was never
//! created, or that was replaced, are counted as stale and not delivered. So the layer stores the instance, and reads it in the transaction
//! that records the event.
//!
//! Run it, as often as you like, with `cargo run --features foundationdb --example foundationdb_layer -- CLUSTER_FILE`.

use std::{error::Error, fmt::Write as _, sync::Arc};

use foundationdb::{Database as Client, FdbError, Transaction, api::NetworkAutoStop};
use notibus::{
    Bus, BusOptions, Db, DbInstance, Filter, Producer, StartOptions, producer::Receipt, store::Store,
};
use tokio_stream::StreamExt;

/// Writes a document to the database `name` in one raw transaction, creates the database if it does not exist, and rings the doorbell after
/// the commit.
async fn write(
    client: &Client,
    producer: &Producer,
    new: &Db,
    id: &str,
    body: &str,
) -> Result<(), Box<dyn Error>> {
    let mut transaction = client.create_trx()?;
    loop {
        let recorded = record(&transaction, producer, new, id, body).await;
        let receipts = match recorded {
            Ok(receipts) => receipts,
            Err(failed) => {
                transaction = transaction.on_error(failed).await?;
                continue;
            }
        };
        match transaction.commit().await {
            Ok(_) => {
                receipts.into_iter().for_each(Receipt::notify);
                return Ok(());
            }
            // After an unknown result the database may already exist, and is then found. The document is the same each time. Its event may
            // be counted twice; a layer that must avoid this writes a key of its own, which shows whether the transaction was committed.
            Err(failed) => transaction = failed.on_error().await?,
        }
    }
}

/// Writes the document and records the events. The database is created with the instance of `new`, unless it exists.
async fn record(
    transaction: &Transaction,
    producer: &Producer,
    new: &Db,
    id: &str,
    body: &str,
) -> Result<Vec<Receipt>, FdbError> {
    let instance_key = format!("layer/{}", new.name).into_bytes();
    let mut receipts = Vec::new();
    let db = if let Some(stored) = transaction.get(&instance_key, false).await? {
        let instance = <[u8; 16]>::try_from(&stored[..]).expect("the layer has written 16 bytes");
        Db::new(new.name.clone(), DbInstance(instance))
    } else {
        transaction.set(&instance_key, &new.instance.0);
        receipts.push(producer.created(transaction, new));
        new.clone()
    };
    transaction.set(format!("layer/{}/{id}", db.name).as_bytes(), body.as_bytes());
    receipts.push(producer.updated(transaction, &db));
    Ok(receipts)
}

/// Runs the layer with the bus next to it. Returns the delivered news as text.
pub async fn run(cluster_file: &str) -> Result<String, Box<dyn Error>> {
    let client = Arc::new(Client::from_path(cluster_file)?);
    let store = Store::from_foundationdb(Arc::clone(&client));
    let bus = Bus::open(&store, BusOptions::default().prefix(b"layer-example/".to_vec())).await?;
    let running = bus.start(StartOptions::default()).await?;
    let orders = running.dispatcher().subscribe(Filter::name("orders")?);
    let mut orders = orders.deliveries(|trouble| eprintln!("{trouble}"));

    let new = Db::new("orders".parse()?, DbInstance::new());
    write(&client, &bus.producer(), &new, "1", "{\"total\": 42}").await?;

    let delivery = orders.next().await.ok_or("the dispatcher has ended")?;
    let mut delivered = String::new();
    for (instance, kind) in delivery.news().iter() {
        let (name, at) = (&delivery.notification().name, delivery.sequence());
        writeln!(delivered, "{name} {} ({instance}) at {at}", kind.as_str())?;
    }
    running.shutdown().await?;
    Ok(delivered)
}

#[allow(dead_code, reason = "a test runs the rest in a process whose network runs already")]
fn main() -> Result<(), Box<dyn Error>> {
    let cluster_file = std::env::args().nth(1).ok_or("name a cluster file")?;
    let network = boot()?;
    let runtime = tokio::runtime::Runtime::new()?;
    let outcome = runtime.block_on(run(&cluster_file));
    // The order matters: nothing may use the network once it has stopped.
    drop(runtime);
    drop(network);
    print!("{}", outcome?);
    Ok(())
}

/// Boots the client's network, as a layer without the bus would.
#[allow(dead_code, reason = "as `main`")]
#[expect(unsafe_code, reason = "the client has no safe form of this call")]
fn boot() -> Result<NetworkAutoStop, Box<dyn Error>> {
    let builder = foundationdb::api::FdbApiBuilder::default().build()?;
    // SAFETY: `main` drops the guard before the process ends.
    Ok(unsafe { builder.boot()? })
}
