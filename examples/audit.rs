//! An audit log that counts news of databases exactly once, whatever happens: each batch is counted in the transaction that commits the
//! progress of its consumer. A member dies in the middle of its work, and another one takes over.
//!
//! Run it with `cargo run --example audit`.

use std::time::Duration;

use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, NodeOptions, Notification, StartOptions,
    consumer::{Batch, ConsumerOptions, HandlerResult},
    store::{
        AtomicOp, Isolation, Store, StoreError, Transaction,
        testing::{CommitFault, Faults},
    },
};

/// The key of the count.
const COUNT: &[u8] = b"audit/count";

/// Writes a log line for each row of `batch`, and adds the rows to the count.
async fn audit(store: &Store, batch: &Batch<Notification>) -> HandlerResult {
    let audit = async |tx: Transaction| {
        // An earlier attempt was committed, but its result was unknown or its process died.
        if batch.commit_in(&tx).await?.is_already_committed() {
            return Ok(());
        }
        for row in &batch.rows {
            tx.set(format!("audit/{}", row.sequence).as_bytes(), row.name.as_str().as_bytes());
        }
        tx.atomic(AtomicOp::Add, COUNT, &(batch.rows.len() as u64).to_le_bytes());
        Ok(())
    };
    store.run(audit).await?;
    Ok(())
}

/// Reads the count.
async fn count(store: &Store) -> notibus::Result<u64> {
    let count = store.begin().get(COUNT, Isolation::Snapshot).await?;
    Ok(count.map_or(0, |count| u64::from_le_bytes(count[..].try_into().expect("it has 8 bytes"))))
}

/// Counts a hundred databases with two members, one of which dies.
#[tokio::main(flavor = "current_thread")]
pub async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let running = bus.start(StartOptions::default()).await?;
    let producer = bus.producer();
    for n in 0..100 {
        let db = Db::new(format!("db{n}").parse()?, DbInstance::new());
        let create = async |tx| {
            producer.created(&tx, &db);
            Ok(())
        };
        store.run(create).await?;
    }

    // A member on an unreliable network: some of its commits succeed without its knowledge, and then it dies.
    let faults = Faults::new(&store);
    let unknown = StoreError::COMMIT_UNKNOWN_RESULT;
    faults.script_commits([CommitFault::After(unknown.clone()), CommitFault::Before(unknown)]);
    let shaky = faults.store();
    let slowly = move |batch: Batch<Notification>| {
        let store = shaky.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            audit(&store, &batch).await
        }
    };
    let node = bus.node(NodeOptions::default()).await?;
    let few = ConsumerOptions::default().batch_rows_max(7);
    let first =
        node.consumer("audit")?.start_from(Cursor::BEGINNING).options(few).run_batches(slowly).await?;
    while count(&store).await? == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop((first, node));
    println!("the first member died after counting {}", count(&store).await?);

    // Another member takes over once the first is certainly dead. The durations are short for the sake of the example.
    let (heartbeat, expiry) = (Duration::from_millis(100), Duration::from_millis(300));
    let node = bus.node(NodeOptions::default().heartbeat(heartbeat).expiry(expiry)).await?;
    let counts = store.clone();
    let at_once = move |batch: Batch<Notification>| {
        let store = counts.clone();
        async move { audit(&store, &batch).await }
    };
    let second = node.consumer("audit")?.run_batches(at_once).await?;
    while !bus.is_drained().await? {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    second.caught_up().await?;
    second.shutdown().await?;
    println!("counted {} of 100", count(&store).await?);
    assert_eq!(count(&store).await?, 100, "each database is counted once");
    node.shutdown().await?;
    Ok(running.shutdown().await?)
}
