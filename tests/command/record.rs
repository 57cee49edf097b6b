//! `notibus record`, as a user calls it, and what a repetition of it records.

use std::{
    io::Write,
    process::{Output, Stdio},
    thread,
    time::Duration,
};

use crate::served::{self, Served};
use serde_json::Value;

/// Runs `record` with `input`; returns its exit code and all of its output.
fn record(args: &[&str], input: &str) -> (Option<i32>, String) {
    let mut command = served::notibus();
    command.arg("record").args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that refuses its arguments reads nothing.
    drop(child.stdin.take().unwrap().write_all(input.as_bytes()));
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    (status.code(), String::from_utf8([stdout, stderr].concat()).unwrap())
}

/// Returns the updates of each database, once the node has folded everything.
fn updates(served: &Served) -> Vec<(String, u64)> {
    while !served.get("/_notibus/status").contains("\"is_drained\":true") {
        thread::sleep(Duration::from_millis(20));
    }
    let output = served::notibus()
        .args(["tail", "--json", "--url", &format!("http://{}", served.at)])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    rows.map(|row| (row["db"].as_str().unwrap().to_owned(), row["totals"]["updated"].as_u64().unwrap()))
        .collect()
}

/// Regression: a command with an unknown outcome had no key for a repetition, so a repetition risked counting its events twice.
#[test]
fn a_repetition_records_only_what_is_missing() {
    let served = Served::start(&["--store", "memory"], None);
    let url = format!("http://{}", served.at);
    let good: Vec<_> = (0..1_500).map(|n| format!("{{\"db\":\"db-{n}\",\"type\":\"updated\"}}\n")).collect();
    let good = good.concat();
    let (code, said) = record(&["-", "--url", &url], &format!("{good}nonsense\n"));
    assert!(code == Some(2) && said.contains("line 1501: "), "{code:?}: {said}");
    assert!(said.contains("; 1000 events were recorded before; "), "{said}");
    let key = said.split("--repeats ").nth(1).unwrap().split(' ').next().unwrap().to_owned();
    assert_eq!(updates(&served).len(), 1_000);

    for _ in 0..2 {
        let (code, said) = record(&["-", "--url", &url, "--repeats", &key], &good);
        assert_eq!((code, &*said), (Some(0), "recorded 1500 events\n"));
    }
    let found = updates(&served);
    assert_eq!(found.len(), 1_500);
    assert!(found.iter().all(|(_, updates)| *updates == 1), "{found:?}");

    // Regression: the command took the number of an event within its request, 501, for the number of a line, so it named a wrong line.
    let (code, said) =
        record(&["-", "--url", &url], &format!("{good}{{\"db\":\"a\",\"type\":\"nonsense\"}}\n"));
    assert!(code == Some(2) && said.contains("Event 501: "), "{code:?}: {said}");
    assert!(said.contains("event 1 of this request is in line 1001"), "{said}");
    updates(&served);

    // Without a key, a repetition is another event.
    for total in [3, 4] {
        assert_eq!(record(&["db-0", "--url", &url], "").0, Some(0));
        let found = updates(&served);
        assert!(found.contains(&("db-0".to_owned(), total)), "{total}");
    }
    // Other events under the same key are refused.
    let (code, said) = record(&["other", "--url", &url, "--repeats", &key], "");
    assert!(code == Some(2) && said.contains("was used for other events"), "{code:?}: {said}");
    assert_eq!(record(&["a", "--url", &url, "--repeats", "a b"], "").0, Some(2));
}

/// Regression: the command counted empty lines before the first event of a request as events, so it named a wrong line, or none.
#[test]
fn empty_lines_are_no_events() {
    let served = Served::start(&["--store", "memory"], None);
    let url = format!("http://{}", served.at);
    let (bad, fine) = ("{\"db\":\"a\",\"type\":\"nonsense\"}\n", "{\"db\":\"a\",\"type\":\"updated\"}\n");
    let good: Vec<_> = (0..1_000).map(|n| format!("{{\"db\":\"db-{n}\",\"type\":\"updated\"}}\n")).collect();
    for (before, line) in [("\n\n".to_owned(), 3), (good.concat() + "\n\n", 1_003)] {
        let (code, said) = record(&["-", "--url", &url], &(before + bad));
        assert!(code == Some(2) && said.contains("Event 1: "), "{code:?}: {said}");
        assert!(said.contains(&format!("in line {line}, ")), "{said}");
    }
    let (code, said) = record(&["-", "--url", &url], &format!("{fine}\n{bad}"));
    assert!(
        code == Some(2) && said.contains("Event 2: ") && said.contains("empty lines are no events"),
        "{said}"
    );
}

/// Regression: the command dropped the document of an event of another type, but said that it had recorded the event.
#[test]
fn a_document_goes_with_its_event_only() {
    let served = Served::start(&["--store", "memory"], None);
    let url = format!("http://{}", served.at);
    let of_document = |kind| record(&["a", kind, "--doc", "_design/x", "--url", &url], "");
    let (code, said) = of_document("updated");
    assert!(code == Some(2) && said.contains("--doc goes with ddoc_updated"), "{code:?}: {said}");
    assert_eq!(of_document("ddoc_updated"), (Some(0), "recorded 1 event\n".to_owned()));
}
