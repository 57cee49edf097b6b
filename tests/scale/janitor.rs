//! What a pass of the janitor reads of groups: something of each group, and nothing of each of its shards.

use std::time::Duration;

use notibus::{JanitorOptions, group::GroupOptions, store::testing::OperationCounts};

use crate::{
    World,
    common::{db, joined, record, row_with, unpolled},
};

/// What ten passes read beside a tombstone that `groups` groups have still to read, in `shards` shards.
async fn passes(groups: usize, shards: u32) -> OperationCounts {
    let world = World::new(1, shards).await;
    for number in 0..groups {
        // Names of one length, so that keys are.
        let group = world.others.group(&format!("group{number:04}")).unwrap();
        group.create(&GroupOptions::default()).await.unwrap();
    }
    let notifier = joined(&world.others).await.notifier(unpolled()).await.unwrap();
    let gone = db("gone", 1);
    record(&world.store, &world.others, &gone, [1, 1, 0, 0]).await;
    row_with(&world.others, &gone, [1, 1, 0, 0]).await;
    notifier.shutdown().await.unwrap();
    let options = JanitorOptions {
        interval: Duration::from_secs(10),
        tombstone_retention: Duration::ZERO,
        ..JanitorOptions::default()
    };
    let janitor = joined(&world.counted).await.janitor(options).await.unwrap();
    tokio::time::sleep(Duration::from_secs(15)).await;
    let spent = world.during(tokio::time::sleep(Duration::from_secs(100))).await;
    assert_eq!(world.counted.stats().tombstones_dropped, 0, "the groups have to read it");
    janitor.shutdown().await.unwrap();
    spent
}

/// A page of tombstones read the checkpoints of all groups, in one transaction: 100 groups of 100 shards were 10,000 rows.
#[tokio::test(start_paused = true)]
async fn the_janitor_reads_nothing_that_grows_with_groups_times_shards() {
    let (few, many) = (passes(8, 2).await, passes(64, 2).await);
    let (few_wide, many_wide) = (passes(8, 64).await, passes(64, 64).await);
    println!(
        "8 and 64 groups of 2 shards: {few:?}\n{many:?}\n8 and 64 groups of 64 shards: {few_wide:?}\n{many_wide:?}"
    );
    let (narrow, wide) = (many.read_bytes - few.read_bytes, many_wide.read_bytes - few_wide.read_bytes);
    assert!(narrow > 0 && wide * 100 <= narrow * 105, "56 groups more: {narrow} bytes, of 64 shards {wide}");
    assert!(many_wide.reads - few_wide.reads <= (many.reads - few.reads) + 10);
}
