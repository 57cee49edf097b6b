//! Bodies of requests that clients have compressed.

use std::{io::Write, sync::Arc};

use flate2::{Compression, write::GzEncoder};
use notibus::http::{ApiOptions, ServerOptions};
use tokio::io::AsyncWriteExt;

use crate::{
    client::{Answer, Connection},
    common::db,
    layer::Layer,
    world::World,
};

/// The most bytes of a body.
const LEN_MAX: usize = 10_000;

fn packed(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

async fn post(world: &World, target: &str, encoding: &str, body: &[u8]) -> Answer {
    let mut connection = Connection::open(world.at()).await;
    let length = body.len();
    connection
        .send(&format!(
            "POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\nContent-Encoding: {encoding}\r\n\r\n"
        ))
        .await;
    connection.socket.write_all(body).await.unwrap();
    connection.answer().await
}

/// IBM's clients compress all that they post, also `{}`, which was once refused as no JSON and ended their followers.
#[tokio::test]
async fn compressed_bodies_are_inflated_within_their_bound() {
    let mut layer = None;
    let options = ApiOptions { body_len_max: LEN_MAX, ..ApiOptions::default() };
    let world = World::with(options, ServerOptions::default(), |api, store, bus| {
        let made = Layer::new(store, bus);
        let changes = api.changes(&made.changes, Arc::clone(&made) as _);
        layer = Some(made);
        changes.merge(api.events()).merge(api.db_updates())
    })
    .await;
    let (layer, d) = (layer.unwrap(), db("d", 1));
    layer.create(&d, 1).await;
    for id in ["a", "b"] {
        layer.write(&d, id, 1, 1, false).await;
    }

    assert_eq!(post(&world, "/_db_updates", "gzip", &packed(b"{}")).await.head.status, 200);
    let ids = packed(br#"{"doc_ids":["b"]}"#);
    let chosen = post(&world, "/d/_changes?filter=_doc_ids", "GZIP", &ids).await;
    assert_eq!(chosen.json()["results"].as_array().unwrap().len(), 1);
    let events = br#"[{"db":"a","type":"created"}]"#;
    for (encoding, body) in
        [("gzip", packed(events)), ("x-gzip", packed(events)), ("identity", events.into())]
    {
        assert_eq!(post(&world, "/_notibus/events", encoding, &body).await.head.status, 201, "{encoding}");
    }

    let long = [b" ".repeat(LEN_MAX), b"[]".into()].concat();
    let fits = &long[2..];
    for (encoding, body, status) in [
        ("gzip", packed(fits), 201),
        // Some 30 bytes that become too many.
        ("gzip", packed(&long), 413),
        ("gzip", packed(&b" ".repeat(1 << 24)), 413),
        ("gzip", events.into(), 400),
        ("gzip", packed(events)[..20].into(), 400),
        ("deflate", events.into(), 415),
        ("gzip, gzip", packed(&packed(events)), 415),
    ] {
        let answer = post(&world, "/_notibus/events", encoding, &body).await;
        assert_eq!(answer.head.status, status, "{encoding} {}", answer.body);
        assert!(status < 400 || answer.json()["reason"].is_string());
    }
}
