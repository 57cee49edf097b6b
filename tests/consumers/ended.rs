//! Members that can no longer work, because their consumer or their bus is gone.

use std::pin::pin;

use futures_util::FutureExt;
use notibus::{
    Bus, Cursor, Error, Notification,
    consumer::{ConsumerSettings, Work},
    event::Incarnation,
    store::Transaction,
};

use crate::{
    common::{until, within},
    fixture::{ConsumerFixture, Log},
};

type Ids = Log<Work<Notification>>;

/// A consumer is deleted, or expires while its only process is paused. Regression: the member waited forever for its consumer, and reported
/// nothing.
#[tokio::test(start_paused = true)]
async fn a_member_whose_consumer_was_deleted_is_informed() {
    let fixture = ConsumerFixture::new(1).await;
    let consumer = fixture.member().await.run(Ids::new().handler()).await.unwrap();
    until("it works", async || consumer.shards().len() == 1).await;
    fixture.handle().delete(true).await.unwrap();
    let ended = within("it is informed", consumer.ended()).await;
    assert!(matches!(ended, Error::NoConsumer { .. }), "{ended}");
    consumer.shutdown().await.unwrap();
}

/// Until a starting node is a member, its consumer can be deleted without `force`. Regression: the member then had no consumer.
#[tokio::test(start_paused = true)]
async fn a_consumer_that_is_deleted_while_a_member_starts_is_created_again() {
    let fixture = ConsumerFixture::new(1).await;
    let (log, handle) = (Ids::new(), fixture.handle());
    handle.create(&ConsumerSettings::default().start(Cursor::BEGINNING.into())).await.unwrap();
    let member = fixture.member().await.start_from(Cursor::BEGINNING);
    let mut starting = pin!(member.run(log.handler()));
    // It has found its consumer, and waits until it is a member.
    assert!(starting.as_mut().now_or_never().is_none());
    handle.delete(false).await.unwrap();
    let consumer = starting.await.unwrap();
    fixture.create(["a"]).await;
    log.until_calls(1).await;
    consumer.shutdown().await.unwrap();
}

/// Regression: a member of a bus whose incarnation was raised waited forever.
#[tokio::test(start_paused = true)]
async fn a_member_of_a_bus_that_was_raised_is_informed() {
    let fixture = ConsumerFixture::new(1).await;
    let consumer = fixture.member().await.run(Ids::new().handler()).await.unwrap();
    // As if rows of later versions had been restored.
    let write = async |tx: Transaction| {
        tx.set(b"notibus\x15\x1a\x14", &[&[0][..], &[0x7f; 12]].concat());
        Ok(())
    };
    fixture.store.run(write).await.unwrap();
    Bus::raise_incarnation(&fixture.store, b"notibus", Incarnation(0), false).await.unwrap();
    let ended = within("it is informed", consumer.ended()).await;
    assert!(matches!(ended, Error::BusGone { .. }), "{ended}");
}
