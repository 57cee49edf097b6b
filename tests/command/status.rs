//! `notibus status`, `record` and `consumers create`, on a running node and on a store, and how commands end.

use std::{
    io::Write,
    process::{Output, Stdio},
};

use crate::served::{self, Served, credential, notibus};
use serde_json::Value;

fn run(arguments: &[&str], input: &str) -> Output {
    let mut command = notibus();
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.env_remove("NOTIBUS_AUTH").spawn().unwrap();
    // The command may end without reading its input.
    drop(child.stdin.take().unwrap().write_all(input.as_bytes()));
    child.wait_with_output().unwrap()
}

/// Runs a command that must succeed, and returns its output.
fn printed(arguments: &[&str], input: &str) -> String {
    let output = run(arguments, input);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a command, and returns its exit code and its error message.
fn refused(arguments: &[&str], input: &str) -> (Option<i32>, String) {
    let output = run(arguments, input);
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_running_node_and_its_folder_are_asked_alike() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", folder.path().display());
    let served = Served::start(&["--store", &store], None);
    let url = format!("http://{}", served.at);
    let node = ["--url", url.as_str()];
    assert_eq!(
        printed(&[&["record", "shop/orders", "created"], &node[..]].concat(), ""),
        "recorded 1 event\n"
    );
    let events = "{\"db\":\"a\",\"type\":\"created\"}\n\n{\"db\":\"b\",\"type\":\"updated\"}\n";
    assert_eq!(printed(&[&["record", "-", "--json"], &node[..]].concat(), events), "{\"recorded\":2}\n");
    let create = [&["consumers", "create", "mailer", "--start", "0"], &node[..]].concat();
    assert_eq!(printed(&create, ""), "mailer is created\n");
    assert_eq!(printed(&create, ""), "mailer exists already\n");

    let screen = printed(&[&["status"], &node[..]].concat(), "");
    for part in
        ["ready\n", "NODE ", "dispatcher,http,janitor,notifier", "CONSUMER ", "mailer    notifications  0 "]
    {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
    let status: Value =
        serde_json::from_str(&printed(&[&["status", "--json"], &node[..]].concat(), "")).unwrap();
    assert_eq!((&status["ready"], &status["consumers"][0]["name"]), (&true.into(), &"mailer".into()));

    // Every command that only reads prints the same, whether it reads from the node or from the store.
    while !printed(&[&["status"], &node[..]].concat(), "").contains("nothing waits to be folded") {}
    for looks in [
        &["tail"][..],
        &["tail", "--json", "--since", "0"],
        &["topology", "show", "--rows"],
        &["topology", "show", "--json"],
        &["consumers", "list", "--json"],
        &["consumers", "show", "mailer"],
        &["consumers", "lag", "mailer"],
        &["consumers", "deferred", "list", "mailer"],
    ] {
        let [of_node, of_store] =
            [&node[..], &["--store", &store]].map(|at| printed(&[looks, at].concat(), ""));
        // Only ages differ.
        let steady = |text: &str| {
            text.split_whitespace().filter(|word| !word.ends_with('s')).map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(
            !of_node.is_empty() && steady(&of_node) == steady(&of_store),
            "{looks:?}: {of_node}{of_store}"
        );
    }
    a_running_node_is_managed(&node);

    // A store that another process has open can be read, but not written to.
    let written: Value =
        serde_json::from_str(&printed(&["status", "--json", "--store", &store], "")).unwrap();
    assert_eq!(written["consumers"][0]["name"], "mailer");
    let (code, reason) = refused(&["record", "a", "--store", &store], "");
    assert!(code == Some(1) && reason.contains("in another process"), "{code:?} {reason}");

    assert!(served.stop());
    assert_eq!(printed(&["record", "a", "--store", &store], ""), "recorded 1 event\n");
    let screen = printed(&["status", "--store", &store], "");
    for part in
        ["1 rows wait to be folded, in 1 partitions", "no node has joined", "mailer    notifications  0 "]
    {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
}

/// Shows the three rows of the node, and changes its topology and consumers.
fn a_running_node_is_managed(node: &[&str]) {
    let tailed = printed(&[&["tail"], node].concat(), "");
    assert!(
        tailed.starts_with("SEQ ") && tailed.lines().count() == 4 && tailed.contains("  shop/orders\n"),
        "{tailed}"
    );
    let nodes = printed(&[&["nodes", "--watch", "10ms"], node].concat(), "");
    assert!(nodes.starts_with("NODE ") && nodes.contains("dispatcher,http,janitor,notifier"), "{nodes}");
    let resharded = printed(&[&["topology", "reshard", "--shards", "3", "--json"], node].concat(), "");
    assert!(resharded.contains("\"open\":true"), "{resharded}");
    assert_eq!(printed(&[&["consumers", "create", "short"], node].concat(), ""), "short is created\n");
    assert_eq!(
        printed(&[&["consumers", "reset", "short", "--to", "0", "--yes"], node].concat(), ""),
        "short is set to 0\n"
    );
    assert_eq!(
        printed(&[&["consumers", "delete", "short", "--yes"], node].concat(), ""),
        "short is deleted\n"
    );
}

#[test]
fn what_is_wrong_is_said_with_an_exit_code_of_its_own() {
    let served = Served::start(&["--store", "memory"], None);
    let url = format!("http://{}", served.at);
    for (arguments, input, named) in [
        (&["record", "a", "gone"][..], "", "is none of created"),
        (&["record", "-"], "{\"db\":\"a\",\"type\":\"created\"}\nnothing\n", "line 2: "),
        (&["consumers", "create", ""], "", "name"),
        (&["consumers", "create", "g", "--start", "then"], "", "then"),
    ] {
        let (code, reason) = refused(&[arguments, &["--url", &url]].concat(), input);
        assert!(code == Some(2) && reason.contains(named), "{arguments:?}: {code:?} {reason}");
    }
    // A command requires exactly one target.
    assert_eq!(refused(&["status"], "").0, Some(2));
    assert_eq!(refused(&["status", "--store", "memory", "--url", &url], "").0, Some(2));
    assert_eq!(refused(&["status", "--url", "https://localhost"], "").0, Some(2));
    drop(served);
    assert_eq!(refused(&["status", "--url", &url], "").0, Some(1), "nobody listens any more");
}

#[test]
fn credentials_are_those_of_the_environment() {
    let (line, secret) = credential(&["anna"]).unwrap();
    let served = Served::start(&["--store", "memory"], Some(&line));
    let url = format!("http://{}", served.at);
    let (code, reason) = refused(&["status", "--url", &url], "");
    assert!(code == Some(2) && reason.contains("NOTIBUS_AUTH"), "{reason}");
    for auth in [&secret, &format!("anna:{secret}")] {
        let status = notibus().args(["status", "--url", &url]).env("NOTIBUS_AUTH", auth).output().unwrap();
        assert!(status.status.success());
    }
}

/// An option that is not on the command line is taken from the environment. If both name a target, the command line wins.
#[test]
fn options_are_also_those_of_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", folder.path().display());
    let served = Served::start(&["--store", &store], None);
    let url = format!("http://{}", served.at);
    let asked = |arguments: &[&str], variables: &[(&str, &str)]| {
        let output = notibus().args(arguments).envs(variables.iter().copied()).output().unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let (code, text) = asked(&["topology", "show"], &[("NOTIBUS_URL", &url), ("NOTIBUS_JSON", "1")]);
    assert!(code == Some(0) && text.starts_with('{'), "{text}");
    let (code, text) = asked(&["topology", "show", "--url", &url], &[("NOTIBUS_STORE", "memory")]);
    assert!(code == Some(0) && text.starts_with("FIRST "), "{text}");
    let (code, text) = asked(&["topology", "show", "--store=memory"], &[("NOTIBUS_URL", &url)]);
    assert!(code == Some(2) && text.contains("there is no bus"), "{text}");
    let (code, text) = asked(&["topology", "show"], &[("NOTIBUS_STORE", "memory"), ("NOTIBUS_URL", &url)]);
    assert!(code == Some(2) && text.contains("give one of them"), "{text}");
    let (code, text) = asked(&["topology", "show"], &[("NOTIBUS_STORE", "memory")]);
    assert!(code == Some(2) && text.contains("there is no bus under \"notibus\""), "{text}");
    assert!(printed(&["topology", "show", "--help"], "").contains("[env: NOTIBUS_STORE="));
    assert!(printed(&["serve", "--help"], "").contains("[env: NOTIBUS_CREDENTIALS_FILE="));
}

#[test]
fn help_has_the_exit_codes() {
    let help = printed(&["--help"], "");
    assert!(help.contains("Exit codes:") && help.contains("RUST_LOG"), "{help}");
}

/// Regression: a command treated a closed pipe as a failure, so `notibus … | head` ended with "Broken pipe" and exit code 1.
#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    let store = served::filled(folder.path());
    let mut child = notibus()
        .args(["tail", "--store", &store])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(0), ""));
}
