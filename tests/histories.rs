//! Saved histories: what the judge of a world was informed of can be judged again, and says the same; and a history in which a
//! delivery is missing, comes twice or too early breaks the guarantee of that name.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeSet, process::Command, sync::LazyLock};

use notibus::{
    Error,
    simulation::{Guarantee, Options, judge, simulate},
};
use serde_json::Value;

/// The lines of the history of a world without faults, with nobody who panics, restarts or has another filter: the first one.
static HISTORY: LazyLock<Vec<String>> = LazyLock::new(|| {
    let options = Options { history: true, intensity: 0.0, nodes: Some(2), ..Options::default() };
    let history = |seed| {
        let outcome = simulate(seed, &options);
        assert_eq!(outcome.failure, None);
        outcome.history.unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let is_plain = |lines: &Vec<String>| {
        let is_other = |line: &String| {
            ["\"saw\":\"replaced\"", "\"saw\":\"resumed\"", "\"panics\":true"]
                .iter()
                .any(|part| line.contains(part))
        };
        !lines.iter().any(is_other) && given(lines).len() > 20
    };
    (0..100).map(history).find(is_plain).unwrap()
});

/// What `lines` are judged to break.
fn broken(lines: &[String]) -> Option<Guarantee> {
    judge(&lines.join("\n")).unwrap().map(|broken| broken.guarantee)
}

/// A row that a subscriber was given.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Given {
    line: usize,
    subscriber: u64,
    seq: String,
}

/// The rows that subscribers were given who skip nothing, after their filter was replaced for the last time.
fn given(lines: &[String]) -> Vec<Given> {
    let mut rows: Vec<Given> = Vec::new();
    let mut skips = BTreeSet::new();
    for (line, text) in lines.iter().enumerate() {
        let seen: Value = serde_json::from_str(text).unwrap();
        let Some(subscriber) = seen["id"].as_u64() else { continue };
        if seen["manner"]["skips"] == true {
            skips.insert(subscriber);
        }
        match seen["saw"].as_str() {
            Some("replaced") => rows.retain(|row| row.subscriber != subscriber),
            Some("given") if !skips.contains(&subscriber) => {
                let seq = seen["given"]["row"]["row"]["seq"].as_str().map(str::to_owned);
                rows.extend(seq.map(|seq| Given { line, subscriber, seq }));
            }
            _ => {}
        }
    }
    rows
}

/// The name in the stored form of a row, which begins with a format (1 byte), and the length of the name (2 bytes).
fn name_of(lines: &[String], given: &Given) -> String {
    let seen: Value = serde_json::from_str(&lines[given.line]).unwrap();
    let row = seen["given"]["row"]["row"]["row"].as_str().unwrap();
    let byte = |place: usize| u8::from_str_radix(&row[2 * place..2 * place + 2], 16).unwrap();
    let len = usize::from(u16::from_be_bytes([byte(1), byte(2)]));
    String::from_utf8((3..3 + len).map(byte).collect()).unwrap()
}

#[test]
fn a_history_is_judged_again_as_it_was() {
    let lines = &*HISTORY;
    assert_eq!(broken(lines), None);
    assert_eq!(broken(&lines[..lines.len() - 1]), Some(Guarantee::Live), "it has no end");
}

#[test]
fn worlds_in_which_everything_goes_wrong_are_judged_again_as_they_were() {
    for seed in [0, 3, 24, 105] {
        let outcome = simulate(seed, &Options { history: true, ..Options::default() });
        assert_eq!(outcome.failure, None, "seed {seed}");
        assert_eq!(judge(&outcome.history.unwrap()).unwrap(), None, "seed {seed}");
    }
}

#[test]
fn a_delivery_that_is_missing_twice_there_or_too_early_is_found() {
    let lines = &*HISTORY;
    let rows = given(lines);
    // What the feed still has at rest: nothing has come that would stand for it.
    let pages = lines.iter().find(|line| line.starts_with("{\"saw\":\"pages\"")).unwrap();
    let is_last = |row: &&Given| pages.contains(&format!("\"seq\":\"{}\"", row.seq));
    for row in rows.iter().filter(is_last).take(3) {
        let mut without = lines.clone();
        without.remove(row.line);
        let found = broken(&without);
        assert!(matches!(found, Some(Guarantee::Complete | Guarantee::Bookmarkable)), "{row:?}: {found:?}");
        let mut twice = lines.clone();
        twice.insert(row.line, lines[row.line].clone());
        assert_eq!(broken(&twice), Some(Guarantee::Unique), "{row:?}");
    }
    // Two rows of one name, the later one first; of some the later one lacks what the earlier one would have brought.
    let pairs = rows.iter().filter_map(|row| {
        let name = name_of(lines, row);
        let mut later =
            rows.iter().filter(|other| other.line > row.line && other.subscriber == row.subscriber);
        Some((row.line, later.find(|other| name_of(lines, other) == name && other.seq > row.seq)?.line))
    });
    let found: BTreeSet<_> = pairs
        .take(5)
        .map(|(earlier, later)| {
            let mut swapped = lines.clone();
            let moved = swapped.remove(earlier);
            swapped.insert(later, moved);
            broken(&swapped)
        })
        .collect();
    let expected = [Guarantee::Ordered, Guarantee::Bookmarkable, Guarantee::Atomic].map(Some);
    assert!(found.contains(&Some(Guarantee::Ordered)), "{found:?}");
    assert!(found.iter().all(|found| expected.contains(found)), "{found:?}");
}

#[test]
fn what_is_no_history_is_a_typed_error() {
    let lines = &*HISTORY;
    let error = |text: &str| match judge(text) {
        Err(Error::Invalid { what: "history", reason }) => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(error(""), "it is empty");
    assert!(error("notibus").contains("line 1"));
    let newer = lines[0].replace("\"notibus_history\":1", "\"notibus_history\":2");
    assert!(error(&newer).contains("version is 2"));
    let torn = format!("{}\n{}\n{}", lines[0], lines[1], &lines[2][..lines[2].len() / 2]);
    assert!(error(&torn).contains("line 3"));
    let strange = format!("{}\n{{\"saw\":\"nothing\"}}", lines[0]);
    assert!(error(&strange).contains("line 2"));
    assert!(
        error(&lines[0].replace("\"partitions\":", "\"partitions\":0,\"were\":")).contains("no partitions")
    );
    assert!(error(&format!("{}\n{{\"saw\":\"ended\"}}", lines.join("\n"))).contains("has ended before"));
    let without = |saw: &str| {
        let left = lines.iter().filter(|line| !line.starts_with(&format!("{{\"saw\":\"{saw}\"")));
        left.cloned().collect::<Vec<_>>().join("\n")
    };
    assert!(error(&without("rested")).contains("come to rest"));
    let commit = lines.iter().position(|line| line.starts_with("{\"saw\":\"committed\"")).unwrap();
    let mut twice = lines.clone();
    twice.insert(commit, lines[commit].clone());
    assert!(error(&twice.join("\n")).contains("had another value before"));
    let of_nobody = format!("{}\n{{\"saw\":\"unfollowed\",\"id\":1000000}}", lines[0]);
    assert!(error(&of_nobody).contains("reader 1000000"));
}

#[test]
fn the_command_saves_a_history_and_judges_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("history");
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_notibus"));
        command.arg("simulate").args(args).output().unwrap()
    };
    let path = file.to_str().unwrap();
    let saved = run(&["--from", "7", "--intensity", "0", "--nodes", "2", "--save", path]);
    assert!(saved.status.success(), "{}", String::from_utf8_lossy(&saved.stderr));
    assert!(run(&["--judge", path]).status.success());
    let text = std::fs::read_to_string(&file).unwrap();
    let cut = text.lines().count() - 1;
    let lines: Vec<_> = text.lines().take(cut).collect();
    std::fs::write(&file, lines.join("\n")).unwrap();
    let judged = run(&["--judge", path]);
    assert_eq!(judged.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&judged.stderr).contains("Live"));
    assert_eq!(run(&["--seeds", "2", "--save", path]).status.code(), Some(2));
    assert_eq!(run(&["--judge", "no such file"]).status.code(), Some(2));
    // Before the world runs, which would take a minute here.
    let refused = run(&["--chaos", "1h", "--save", "no/such/folder/history"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no/such/folder/history cannot be written"));
    let refused = run(&["--seeds", "1", "--without", "Nobody"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("the parts are Documents, Jobs, Web"));
}
