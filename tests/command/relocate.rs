//! `notibus export` and `notibus import`, as a user calls them.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use crate::served::{self, Served, filled};
use notibus::store::{Store, Transaction};

/// Runs the command, which must end with `code`; returns what it printed.
fn notibus(args: &[&str], code: i32) -> String {
    let Output { status, stdout, stderr } =
        Command::new(env!("CARGO_BIN_EXE_notibus")).args(args).env("RUST_LOG", "error").output().unwrap();
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    assert_eq!(status.code(), Some(code), "{args:?}: {stdout}{stderr}");
    assert!(code != 0 || stderr.is_empty(), "{args:?}: {stderr}");
    stdout + &stderr
}

#[test]
fn a_bus_moves_to_another_folder_with_all_its_rows() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (old, new, file) = (filled(&dir.path().join("old")), format!("dir:{}", path("new")), path("bus"));
    let exported = notibus(&["export", &file, "--store", &old], 0);
    assert!(exported.starts_with("exported ") && exported.contains(" rows of feeds\n"), "{exported}");
    assert!(exported.contains("left out: nodes, roles and leases"), "{exported}");
    #[cfg(unix)]
    {
        // Regression: `export` made its file readable by everyone on the machine, so they could read the names of all databases.
        let mode = std::fs::metadata(&file).unwrap().permissions();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);
    }
    assert!(notibus(&["import", &file, "--store", &new], 0).contains("the incarnation is 1 now"));
    let rows = notibus(&["tail", "--store", &old], 0);
    assert!(rows.lines().count() > 60);
    assert_eq!(notibus(&["tail", "--store", &new], 0), rows);
    // From here on the bus is used in its new folder.
    filled(&dir.path().join("new"));
    assert!(notibus(&["tail", "--store", &new], 0).lines().last().unwrap().starts_with("01"));

    assert!(
        notibus(&["export", &file, "--store", &old], 2).contains("name a new file"),
        "it overwrites nothing"
    );
    assert!(notibus(&["import", &file, "--store", &new], 2).contains("there is a bus"));
    assert!(notibus(&["import", &path("none"), "--store", &new], 2).contains("No such file"));
    notibus(&["export", &path("other"), "--store", &format!("dir:{}", path("none"))], 2);
    std::fs::write(path("bad"), &std::fs::read(&file).unwrap()[..1_000]).unwrap();
    assert!(
        notibus(&["import", &path("bad"), "--store", &new, "--prefix", "x"], 2).contains("it ends early")
    );
    assert!(notibus(&["tail", "--store", &new, "--prefix", "x"], 2).contains("there is no bus"));
}

#[test]
fn a_bus_moves_through_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (filled(&dir.path().join("old")), format!("dir:{}", dir.path().join("new").display()));
    let command = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_notibus"));
        command.args(args);
        command
    };
    let export = command(&["export", "-", "--store", &old]).output().unwrap();
    assert!(export.status.success() && String::from_utf8_lossy(&export.stderr).contains("exported "));
    let mut import = command(&["import", "-", "--store", &new])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    import.stdin.take().unwrap().write_all(&export.stdout).unwrap();
    let import = import.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&import.stdout), "imported; the incarnation is 1 now\n");
    assert_eq!(notibus(&["tail", "--store", &new], 0), notibus(&["tail", "--store", &old], 0));
}

#[test]
fn an_incarnation_is_shown_and_raised() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", dir.path().join("store").display());
    assert!(notibus(&["incarnation", "show", "--store", &store], 2).contains("there is no store"));
    // The folder of a disk that is not mounted stays empty.
    let empty = tempfile::tempdir().unwrap();
    let raise =
        ["incarnation", "raise", "--from", "0", "--store", &format!("dir:{}", empty.path().display())];
    assert!(notibus(&raise, 2).contains("there is no store"));
    assert!(empty.path().read_dir().unwrap().next().is_none());
    assert!(
        notibus(&["incarnation", "raise", "--from", "0", "--store", &store], 2).contains("there is no store")
    );
    filled(&dir.path().join("store"));
    let show = || notibus(&["incarnation", "show", "--store", &store], 0);
    let raise = |from, code| notibus(&["incarnation", "raise", "--from", from, "--store", &store], code);
    assert_eq!(show(), "the incarnation is 0\n");
    assert!(raise("0", 2).contains("as if nothing was restored"));
    put_ahead(&dir.path().join("store"));
    assert!(notibus(&["export", "-", "--store", &store], 2).contains("an older state was restored"));
    assert_eq!(raise("0", 0), "the incarnation is 1\n");
    assert_eq!(raise("0", 0), "the incarnation is 1\n", "the same again");
    assert!(raise("7", 2).contains("it is 1, not 7"));
    assert_eq!(show(), "the incarnation is 1\n");
    let forced = ["incarnation", "raise", "--from", "1", "--force", "--store", &store];
    assert_eq!(notibus(&forced, 0), "the incarnation is 2\n", "as of a copy in a store of later versions");
}

/// Makes `folder` look as if rows of later versions had been restored into it.
fn put_ahead(folder: &Path) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let ahead = [&[0][..], &[0x7f; 12]].concat();
        let put = async |tx: Transaction| {
            tx.set(&[&b"notibus"[..], &[0x15, 26, 0x14]].concat(), &ahead);
            Ok(())
        };
        Store::open_dir(folder).unwrap().run(put).await.unwrap();
    });
}

/// A node whose store is older than its rows says so, and joins again in the same process once the incarnation is raised.
#[test]
fn a_running_node_is_healed_by_a_raise() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(&dir.path().join("store"));
    put_ahead(&dir.path().join("store"));
    let served = Served::start(&["--store", &store], None);
    let ready = || {
        served.try_ask("GET /_notibus/health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    };
    assert!(ready().unwrap().contains("older_than_rows"));
    let url = format!("http://{}", served.at);
    assert_eq!(notibus(&["incarnation", "show", "--url", &url], 0), "the incarnation is 0\n");
    assert_eq!(notibus(&["incarnation", "raise", "--from", "0", "--url", &url], 0), "the incarnation is 1\n");
    let began = Instant::now();
    // The node may be queried while it joins again.
    while !ready().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200 ")) {
        assert!(began.elapsed() < served::LIMIT);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(notibus(&["incarnation", "show", "--url", &url], 0), "the incarnation is 1\n");
    assert!(notibus(&["incarnation", "raise", "--from", "1", "--url", &url], 2).contains("as if nothing"));
    assert!(served.stop());
}

/// Bug: a node lost a request to stop that arrived while it joined again, so the process did not stop.
#[test]
fn a_node_that_joins_again_can_be_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(&dir.path().join("store"));
    put_ahead(&dir.path().join("store"));
    let mut command = served::notibus();
    command.args(["serve", "--listen", "127.0.0.1:0", "--store", &store]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut printed = BufReader::new(child.stdout.take().unwrap()).lines();
    let announced = printed.next().unwrap().unwrap();
    let url = announced.rsplit_once(' ').unwrap().1;
    assert_eq!(notibus(&["incarnation", "raise", "--from", "0", "--url", url], 0), "the incarnation is 1\n");
    let mut logged = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(logged.any(|line| line.unwrap().contains("this node joins again")));
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    let asked = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if asked.elapsed() > served::LIMIT {
            child.kill().unwrap();
            panic!("the process does not stop");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(child.wait().unwrap().success());
}
