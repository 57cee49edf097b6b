//! Decoders of untrusted bytes never panic, and understand what they accept: the targets in `fuzz/`, as property tests.
//!
//! The input is arbitrary bytes, and stored rows of a bus, a part of which is changed, cut off or doubled.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod disk;

use std::{panic::catch_unwind, sync::LazyLock};

use common::{db, eager, joined, narrow_bus, record, row_with, stored, until};
use notibus::{
    Notification,
    consumer::{ConsumerOptions, Work},
    store::Store,
    test_util::Decoder,
};
use proptest::{collection::vec, prelude::*, sample::Index};

/// The rows that a working bus has in its store.
static ROWS: LazyLock<Vec<(Vec<u8>, Vec<u8>)>> = LazyLock::new(|| {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let rows = runtime.block_on(rows_of_a_bus());
    assert!(rows.len() > 30, "{} rows are few", rows.len());
    rows
});

async fn rows_of_a_bus() -> Vec<(Vec<u8>, Vec<u8>)> {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let node = joined(&bus).await;
    let _notifier = node.notifier(eager()).await.unwrap();
    let fails = async |_: Work<Notification>| Err("on purpose".into());
    let options = ConsumerOptions::default().attempts_max(1);
    let consumer = node.consumer("readers").unwrap().options(options).run(fails).await.unwrap();
    for number in 0..5 {
        record(&store, &bus, &db(&format!("db{number}"), 1), [1, 0, number, 1]).await;
    }
    for number in 0..5 {
        row_with(&bus, &db(&format!("db{number}"), 1), [1, 0, number, 1]).await;
    }
    until("all are deferred", async || bus.stats().consumer_deferred == 5).await;
    // These events stay in the counters, because no notifier is running.
    drop((consumer, node));
    for number in 0..3 {
        record(&store, &bus, &db(&format!("db{number}"), 1), [0, 1, 0, 0]).await;
    }
    stored(&store, b"").await.into_iter().map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
}

/// Texts that are read as queries, bodies and positions.
const TEXTS: [&str; 6] = [
    "feed=continuous&since=00000000000000000000000001-00000000000000000000000002&limit=3&heartbeat=true",
    "since=now&types=created,deleted&timeout=5&descending=true\nLast-Event-ID: 00000000000000000000000001",
    "filter=_doc_ids&doc_ids=%5B%22a%22%5D&style=all_docs&include_docs=true&seq_interval=10",
    "[{\"db\":\"a\",\"type\":\"updated\"},{\"db\":\"b\",\"type\":\"ddoc_updated\",\"ddoc_id\":\"_design/x\"}]",
    "00000000000000000000000001.0500000000000000000000000000000000ff00000000000000000000000002",
    "2-7051cbe5c8faecd085a3fa619e6e6337",
];

fn changed(mut bytes: Vec<u8>, (kind, place, byte): (u8, Index, u8)) -> Vec<u8> {
    if bytes.is_empty() {
        return vec![byte];
    }
    let place = place.index(bytes.len());
    match kind % 5 {
        0 => bytes[place] = byte,
        1 => bytes[place] ^= 1 << (byte % 8),
        2 => bytes.truncate(place),
        3 => bytes.insert(place, byte),
        _ => bytes.extend_from_within(place..),
    }
    bytes
}

/// Decodes `input` with every decoder.
fn decode(input: &[u8]) -> Result<(), TestCaseError> {
    for decoder in Decoder::ALL {
        let ran = catch_unwind(|| decoder.run(input));
        prop_assert!(ran.is_ok(), "{decoder:?} panics at {input:?}");
    }
    let opened = catch_unwind(|| disk::open_with_file(input));
    prop_assert!(opened.is_ok(), "an opening panics at {input:?}");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_borne(input in vec(any::<u8>(), 0..200)) {
        decode(&input)?;
    }

    #[test]
    fn rows_of_a_store_are_borne_with_any_change(
        place: Index,
        changes in vec(any::<(u8, Index, u8)>(), 0..4),
        is_in_key: bool,
    ) {
        let (mut key, mut value) = place.get(&ROWS).clone();
        for change in changes {
            let part = if is_in_key { &mut key } else { &mut value };
            *part = changed(std::mem::take(part), change);
        }
        Decoder::Values.run(&value);
        Decoder::Texts.run(&value);
        let len = u8::try_from(key.len()).unwrap_or(u8::MAX);
        Decoder::Keys.run(&[&[len][..], &key, &value].concat());
    }

    #[test]
    fn texts_are_borne_with_any_change(place in 0..TEXTS.len(), changes in vec(any::<(u8, Index, u8)>(), 0..4)) {
        let mut bytes = TEXTS[place].as_bytes().to_vec();
        for change in changes {
            bytes = changed(bytes, change);
        }
        decode(&bytes)?;
    }
}
