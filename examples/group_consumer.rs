//! A group that counts events exactly once, whatever happens: it counts each batch in the transaction that writes the
//! checkpoint. A consumer dies in the middle of its work, and another one continues.
//!
//! Run it with `cargo run --example group_consumer`.

use std::time::Duration;

use notibus::{
    Bus, BusOptions, Db, DbInstance, NodeOptions, Notification, Observer, Roles, Sequence,
    feed::ShardId,
    group::{CloseReason, ConsumerOptions, GroupBatch, GroupOptions, ObserverResult},
    store::{
        AtomicOp, Database, Isolation, StoreError,
        testing::{CommitFault, Faults},
    },
};

/// The key of the count.
const COUNT: &[u8] = b"databases created";

/// Counts the databases that were created.
struct Counter {
    /// The store of the count, which is also the store of the bus.
    store: Database,
    /// How long it works on a batch.
    pause: Duration,
}

impl Observer<Notification> for Counter {
    async fn opened(&mut self, shard: ShardId, position: Sequence) {
        println!("shard {shard} from {position} on");
    }

    async fn batch(&mut self, batch: GroupBatch<Notification>) -> ObserverResult {
        tokio::time::sleep(self.pause).await;
        self.store
            .run(async |tx| {
                // An earlier attempt has committed, although its result was unknown or its process has died.
                if batch.checkpoint_in(&tx).await?.is_done() {
                    return Ok(());
                }
                tx.atomic(AtomicOp::Add, COUNT, &(batch.rows.len() as u64).to_le_bytes());
                Ok(())
            })
            .await?;
        Ok(())
    }

    async fn closed(&mut self, reason: CloseReason) {
        println!("closed: {reason:?}");
    }
}

/// The count.
async fn count(store: &Database) -> notibus::Result<u64> {
    let count = store.begin().get(COUNT, Isolation::Snapshot).await?;
    Ok(count.map_or(0, |count| u64::from_le_bytes(count[..].try_into().expect("it has 8 bytes"))))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = Database::memory();
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let running = bus.start(Roles::default()).await?;

    // The group starts here: everything from now on is counted, whenever a consumer runs.
    let group = bus.group("counter")?;
    group.create(&GroupOptions::default()).await?;
    let producer = bus.producer();
    for n in 0..100 {
        let db = Db::new(format!("db{n}").parse()?, DbInstance::new());
        let create = async |tx| {
            producer.created(&tx, &db);
            Ok(())
        };
        store.run(create).await?;
    }

    // A consumer on a bad network: some of its commits succeed without its knowledge, and then it dies.
    let faults = Faults::new(&store);
    let unknown = StoreError::COMMIT_UNKNOWN_RESULT;
    faults.script_commits([CommitFault::After(unknown.clone()), CommitFault::Before(unknown)]);
    let shaky = faults.database();
    let observe = move |_shard| Counter { store: shaky.clone(), pause: Duration::from_millis(20) };
    let node = bus.node(NodeOptions::default()).await?;
    let first = node.consumer(&group, observe, ConsumerOptions::default().rows_max(7)).await?;
    while count(&store).await? == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop((first, node));
    println!("the first consumer has died after counting {}", count(&store).await?);

    // Another one continues, once it is certain that the first is dead. The times are short for the example.
    let (heartbeat, expiry) = (Duration::from_millis(100), Duration::from_millis(300));
    let node = bus.node(NodeOptions::default().heartbeat(heartbeat).expiry(expiry)).await?;
    let counts = store.clone();
    let observe = move |_shard| Counter { store: counts.clone(), pause: Duration::ZERO };
    let second = node.consumer(&group, observe, ConsumerOptions::default()).await?;
    while group.lag().await?.iter().any(|shard| shard.rows > 0) || !bus.is_drained().await? {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    second.shutdown().await?;
    println!("counted {} of 100", count(&store).await?);
    assert_eq!(count(&store).await?, 100);
    node.shutdown().await?;
    Ok(running.shutdown().await?)
}
