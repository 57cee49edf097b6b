//! The protocol for recorders without this crate: `docs/protocol-vectors.json` describes what a producer writes, and what the recorders
//! under `clients/` write for the same events.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    fmt::Write as _,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use common::{counts, until};
use notibus::{
    Bus, BusOptions, Db, DbInstance, StartOptions,
    event::DdocId,
    producer::ProducerOptions,
    store::{Isolation, KeyRange, RangeRead, Store},
};
use serde_json::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn vectors() -> Value {
    let text = std::fs::read_to_string(root().join("docs/protocol-vectors.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn bytes(value: &Value) -> Vec<u8> {
    let digits = text(value);
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn lane(record: &Value, kind: &str) -> u64 {
    record["events"][kind].as_u64().unwrap_or_default()
}

fn ddocs(record: &Value) -> Vec<&str> {
    record["events"]["ddocs"].as_array().into_iter().flatten().map(text).collect()
}

async fn rows(store: &Store, prefix: &[u8], family: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let range = KeyRange::prefix([prefix, family].concat());
    let page = store
        .run(async |tx| tx.get_range(&RangeRead::new(range.clone()), Isolation::Snapshot).await)
        .await
        .unwrap();
    page.rows.into_iter().map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
}

#[tokio::test(start_paused = true)]
async fn a_producer_writes_what_the_vectors_say() {
    let vectors = vectors();
    let records = vectors["records"].as_array().unwrap();
    assert!(records.len() > 8);
    for record in records {
        let (prefix, config) = (bytes(&record["prefix"]), bytes(&record["config"]));
        let partitions = u32::from_be_bytes(config[2..6].try_into().unwrap());
        let store = Store::memory();
        let options = BusOptions::default().prefix(prefix.clone()).partitions(partitions);
        let bus = Bus::open(&store, options).await.unwrap();
        let stored = store
            .run(async |tx| tx.get(&bytes(&record["config_key"]), Isolation::Snapshot).await)
            .await
            .unwrap();
        // A bus that was never moved has the incarnation 0.
        assert_eq!(stored.unwrap()[..6], config[..6]);

        let slot = record["slot"].as_u64().unwrap();
        let slots = if slot == 0 { 1 } else { 256 };
        let producer = bus.producer_with(ProducerOptions::default().slots(slots)).unwrap();
        let instance = DbInstance(bytes(&record["instance"]).try_into().unwrap());
        let db = Db::new(text(&record["name"]).parse().unwrap(), instance);
        let lanes = counts(["created", "deleted", "updated", "ddoc_updated"].map(|kind| lane(record, kind)));
        store
            .run(async |tx| {
                producer.record_all(&tx, &db, &lanes)?;
                for id in ddocs(record) {
                    producer.ddoc_updated(&tx, &db, Some(&DdocId::new(id)?));
                }
                Ok(())
            })
            .await
            .unwrap();
        let mut wanted = record["mutations"].as_array().unwrap().clone();
        wanted.sort_by_key(|mutation| text(&mutation["key"]).to_owned());
        let written = rows(&store, &prefix, &[0x15, 1]).await;
        assert_eq!(written.len(), wanted.len(), "{record}");
        for ((key, value), wanted) in written.iter().zip(&wanted) {
            let (wanted_key, operand) = (bytes(&wanted["key"]), bytes(&wanted["operand"]));
            // With many slots, one is drawn at random: only its number may differ.
            let fixed = if slot == 0 { wanted_key.len() } else { wanted_key.len() - 2 };
            assert_eq!(hex(&key[..fixed]), hex(&wanted_key[..fixed]), "{record}");
            match text(&wanted["op"]) {
                "add" => assert_eq!(hex(value), hex(&operand), "{record}"),
                _ => assert_eq!((value.len(), operand), (10, vec![0; 14]), "{record}"),
            }
        }
        let doorbell = (bytes(&record["doorbell"]["key"]), bytes(&record["doorbell"]["operand"]));
        until("the doorbell", async || rows(&store, &prefix, &[0x15, 2]).await.contains(&doorbell)).await;
    }
}

/// Encodes a tuple of one small integer.
fn integer(number: u8) -> Vec<u8> {
    if number == 0 { vec![0x14] } else { vec![0x15, number] }
}

/// Follows the feed by its bytes alone. Regression: the page named eight keys for a pulse that had long been a single key, so a reader in
/// another language waited for keys that never changed.
#[tokio::test(start_paused = true)]
async fn a_reader_finds_the_feed_where_the_page_says() {
    let prefix = b"layer";
    let store = Store::memory();
    let options = BusOptions::default().prefix(prefix.to_vec());
    let bus = Bus::open(&store, options).await.unwrap();
    let running = bus.start(StartOptions::default()).await.unwrap();
    let feed = [0x01, b'n', 0x00];
    let of_feed = |family: u8| [&integer(family)[..], &feed].concat();
    let names = async || {
        let topology = rows(&store, prefix, &of_feed(7)).await;
        assert_eq!(topology.len(), 1, "nothing was resharded");
        let entry = &topology[0].1;
        assert_eq!((entry[0], entry[1], entry.len()), (1, 0, 32), "shards, open");
        let first = u64::from_be_bytes(entry[20..28].try_into().unwrap());
        let count = u64::from(u32::from_be_bytes(entry[28..].try_into().unwrap()));
        let mut names = Vec::new();
        for shard in first..first + count {
            let shard = [of_feed(4), integer(shard as u8)].concat();
            for (key, row) in rows(&store, prefix, &shard).await {
                let position = &key[prefix.len() + shard.len()..];
                assert_eq!(
                    (position.len(), &position[..2]),
                    (14, &[0x14, 0x33][..]),
                    "incarnation 0, a versionstamp"
                );
                let len = usize::from(u16::from_be_bytes(row[1..3].try_into().unwrap()));
                names.push((
                    position.to_vec(),
                    String::from_utf8(row[3..3 + len].to_vec()).unwrap(),
                    row[19 + len],
                ));
            }
        }
        names.sort();
        names.into_iter().map(|(_, name, kinds)| (name, kinds)).collect::<Vec<_>>()
    };
    let pulse = async || rows(&store, prefix, &of_feed(15)).await;
    let record = async |name: &str| {
        let db = Db::new(name.parse().unwrap(), DbInstance::new());
        let created = async |tx| {
            bus.producer().created(&tx, &db);
            Ok(())
        };
        store.run(created).await.unwrap();
    };
    record("a").await;
    until("a row", async || names().await == [("a".to_owned(), 1)]).await;
    let before = pulse().await;
    assert_eq!(
        before.iter().map(|(key, value)| (key.len(), value.len())).collect::<Vec<_>>(),
        [(10, 64)],
        "one key"
    );
    record("b").await;
    until("another row", async || names().await == [("a".to_owned(), 1), ("b".to_owned(), 1)]).await;
    assert_ne!(pulse().await, before);
    assert!(rows(&store, prefix, &of_feed(8)).await.is_empty(), "nothing is below the horizon yet");
    running.shutdown().await.unwrap();
}

/// Returns the input lines for a recorder, and its expected answers.
fn lines(vectors: &Value) -> (String, String) {
    let (mut asked, mut wanted) = (String::new(), String::new());
    for hash in vectors["hashes"].as_array().unwrap() {
        writeln!(asked, "hash x{}", hex(text(&hash["name"]).as_bytes())).unwrap();
        writeln!(wanted, "{}", text(&hash["xxh3_64"])).unwrap();
    }
    for record in vectors["records"].as_array().unwrap() {
        let (prefix, config, instance) =
            (text(&record["prefix"]), text(&record["config"]), text(&record["instance"]));
        let name = hex(text(&record["name"]).as_bytes());
        write!(asked, "record x{prefix} x{config} x{name} x{instance} {}", record["slot"]).unwrap();
        for kind in ["created", "deleted", "updated", "ddoc_updated"] {
            write!(asked, " {}", lane(record, kind)).unwrap();
        }
        for id in ddocs(record) {
            write!(asked, " x{}", hex(id.as_bytes())).unwrap();
        }
        asked.push('\n');
        wanted.push_str(text(&record["config_key"]));
        for mutation in record["mutations"].as_array().unwrap().iter().chain([&record["doorbell"]]) {
            let [op, key, operand] = ["op", "key", "operand"].map(|part| text(&mutation[part]));
            write!(wanted, " {op} {key} {operand}").unwrap();
        }
        wanted.push('\n');
    }
    for config in vectors["refused_configs"].as_array().unwrap() {
        writeln!(asked, "record x x{} x61 x{} 0 0 0 1 0", text(config), "00".repeat(16)).unwrap();
        wanted.push_str("refused\n");
    }
    let [prefix, config, name, instance] =
        ["prefix", "config", "name", "instance"].map(|part| text(&vectors["records"][0][part]));
    for ddoc in vectors["refused_ddocs"].as_array().unwrap() {
        let (name, ddoc) = (hex(name.as_bytes()), hex(text(ddoc).as_bytes()));
        writeln!(asked, "record x{prefix} x{config} x{name} x{instance} 0 0 0 0 0 x{ddoc}").unwrap();
        wanted.push_str("refused\n");
    }
    (asked, wanted)
}

/// Whether `program` exists; if not, prints that its recorder is not checked.
fn is_there(program: &str, argument: &str) -> bool {
    let found = Command::new(program).arg(argument).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let is_there = found.is_ok_and(|status| status.success());
    if !is_there {
        eprintln!("SKIPPED: the recorder for {program} is not checked, because there is no {program}");
    }
    is_there
}

/// Runs `command` with `input`; returns its output.
fn run(command: &mut Command, input: &str) -> String {
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).current_dir(root()).spawn();
    let mut child = child.unwrap();
    let (mut stdin, input) = (child.stdin.take().unwrap(), input.to_owned());
    // The recorder answers while it reads.
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().unwrap();
    drop(writer.join());
    assert!(output.status.success(), "{command:?}: {}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Has a recorder, run by `program`, check itself against the vectors.
fn check_itself(program: &str, recorder: &Path) {
    let said = run(Command::new(program).arg(recorder).arg("docs/protocol-vectors.json"), "");
    assert!(said.contains("as they should be"), "{program}: {said}");
}

#[test]
fn the_recorder_in_python_agrees_with_the_vectors() {
    if is_there("python3", "--version") {
        check_itself("python3", Path::new("clients/python/notibus.py"));
    }
}

/// The compiler that `tests/clients/install` fetches checks the recorder's types and strips them. A version of Node that knows types runs
/// the recorder as it is.
#[test]
fn the_recorder_in_typescript_agrees_with_the_vectors() {
    let recorder = Path::new("clients/node/notibus.mts");
    if !is_there("node", "--version") {
        return;
    }
    let knows_types =
        run(Command::new("node").args(["-p", "Boolean(process.features.typescript)"]), "").trim() == "true";
    if knows_types {
        check_itself("node", recorder);
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it lies in the target folder");
    let packages = target.join("clients/node_modules");
    let compiler = packages.join("typescript/bin/tsc");
    if compiler.exists() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("node");
        command
            .arg(compiler)
            .arg("--outDir")
            .arg(folder.path())
            .arg("--typeRoots")
            .arg(packages.join("@types"));
        command.args(["--types", "node", "--strict", "--erasableSyntaxOnly", "--verbatimModuleSyntax"]);
        run(command.args(["--target", "es2022", "--module", "nodenext"]).arg(recorder), "");
        check_itself("node", &folder.path().join("notibus.mjs"));
    } else {
        eprintln!(
            "SKIPPED: the types of the recorder in TypeScript are not checked{}: `tests/clients/install` fetches what does it",
            if knows_types { "" } else { ", nor is it run" }
        );
    }
}

#[test]
fn recorders_that_read_lines_agree_with_the_vectors() {
    let (asked, wanted) = lines(&vectors());
    let folder = tempfile::tempdir().unwrap();
    let check = |language: &str, command: &mut Command| {
        let answered = run(command, &asked);
        for (question, (answer, wanted)) in asked.lines().zip(answered.lines().zip(wanted.lines())) {
            assert_eq!(answer, wanted, "{language}: {question}");
        }
        assert_eq!(answered.lines().count(), wanted.lines().count(), "{language}");
    };
    if is_there("java", "-version") {
        check("Java", Command::new("java").arg("clients/java/Notibus.java"));
    }
    if is_there("go", "version") {
        check("Go", Command::new("go").env("GOCACHE", folder.path()).args(["run", "clients/go/notibus.go"]));
    }
    if is_there("rustc", "--version") {
        let program = folder.path().join("recorder");
        let mut compiler = Command::new("rustc");
        compiler.args(["--edition", "2024", "-D", "warnings", "-o"]).arg(&program);
        run(compiler.arg("clients/rust/notibus.rs"), "");
        check("Rust", &mut Command::new(program));
    }
    if is_there("erlc", "-help") || is_there("erl", "-version") {
        run(Command::new("erlc").arg("-o").arg(folder.path()).arg("clients/erlang/notibus.erl"), "");
        let mut command = Command::new("erl");
        command.args(["-noshell", "-pa"]).arg(folder.path()).args(["-eval", "notibus:main([]), halt()."]);
        check("Erlang", &mut command);
    }
}
