//! `notibus export` and `notibus import`, as a user calls them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Output};

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/replay/sample.tsv.gz");

/// Runs the command, which must end with `code`; returns what it printed.
fn notibus(args: &[&str], code: i32) -> String {
    let Output { status, stdout, stderr } =
        Command::new(env!("CARGO_BIN_EXE_notibus")).args(args).output().unwrap();
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    assert_eq!(status.code(), Some(code), "{args:?}: {stdout}{stderr}");
    assert!(code != 0 || stderr.is_empty(), "{args:?}: {stderr}");
    stdout + &stderr
}

#[test]
fn a_bus_moves_to_another_folder_with_all_its_rows() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (old, new, file) = (format!("dir:{}", path("old")), format!("dir:{}", path("new")), path("bus"));
    notibus(&["replay", SAMPLE, "--store", &old], 0);
    assert!(notibus(&["export", &file, "--store", &old], 0).starts_with("exported "));
    assert!(notibus(&["import", &file, "--store", &new], 0).contains("the incarnation is 1 now"));
    let rows = notibus(&["tail", "--store", &old], 0);
    assert!(rows.lines().count() >= 67);
    assert_eq!(notibus(&["tail", "--store", &new], 0), rows);
    // The bus lives on: the same history again, over the one that was moved.
    notibus(&["replay", SAMPLE, "--store", &new], 0);
    assert!(notibus(&["tail", "--store", &new], 0).lines().last().unwrap().contains("\"01"));

    assert!(notibus(&["export", &file, "--store", &old], 2).contains("exists"), "it overwrites nothing");
    assert!(notibus(&["import", &file, "--store", &new], 2).contains("there is a bus"));
    assert!(notibus(&["import", &path("none"), "--store", &new], 2).contains("No such file"));
    notibus(&["export", &path("other"), "--store", &format!("dir:{}", path("none"))], 2);
    std::fs::write(path("bad"), &std::fs::read(&file).unwrap()[..1_000]).unwrap();
    assert!(notibus(&["import", &path("bad"), "--store", &new, "--prefix", "x"], 1).contains("export"));
    assert!(notibus(&["tail", "--store", &new, "--prefix", "x"], 2).contains("there is no bus"));
}
