//! Folders of stores, as operators see them: `check`, `backup`, commands that only read, and `serve` with
//! few open files or with credentials that others may read.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use crate::served::{self, LIMIT, Served};
use notibus::{Bus, BusOptions, NodeOptions, NotifierOptions, store::Store};
use serde_json::Value;

/// Runs the command, which must end with `code`; returns its standard output and its standard error.
fn notibus(args: &[&str], code: i32) -> (String, String) {
    let Output { status, stdout, stderr } = served::notibus().args(args).output().unwrap();
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    assert_eq!(status.code(), Some(code), "{args:?}: {stdout}{stderr}");
    (stdout, stderr)
}

/// Makes the folder of a store with a bus. Returns its path, its path as text, and its name as a store.
fn folder(parent: &Path) -> (PathBuf, String, String) {
    let path = parent.join("store");
    let store = served::filled(&path);
    (path.clone(), path.display().to_string(), store)
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap()))
        .collect()
}

/// Returns the arguments of commands that only read `store`.
fn readers(store: &str) -> Vec<Vec<&str>> {
    vec![
        vec!["topology", "show", "--store", store],
        vec!["tail", "--store", store],
        vec!["consumers", "list", "--store", store],
        vec!["nodes", "--store", store, "--watch", "10ms"],
    ]
}

/// Regression: commands that only read opened the folder for writing, so they reported damage without write permission, and nothing useful
/// if another process had the folder open.
#[test]
fn commands_that_read_change_nothing_and_need_no_right_to_write() {
    let parent = tempfile::tempdir().unwrap();
    let (path, _, store) = folder(parent.path());
    let before = files(&path);
    let set_modes = |folder: u32, file: u32| {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        for name in before.keys() {
            fs::set_permissions(path.join(name), fs::Permissions::from_mode(file)).unwrap();
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(folder)).unwrap();
    };
    set_modes(0o500, 0o400);
    for reader in readers(&store) {
        let (_, said) = notibus(&reader, 0);
        assert!(said.is_empty(), "{reader:?}: {said}");
    }
    set_modes(0o700, 0o600);
    assert_eq!(files(&path), before);

    let missing = format!("dir:{}", parent.path().join("missing").display());
    for reader in readers(&missing) {
        notibus(&reader, 2);
    }
    assert!(!parent.path().join("missing").exists());
}

#[test]
fn commands_that_read_say_so_if_another_process_has_the_folder_open() {
    let parent = tempfile::tempdir().unwrap();
    let (path, text, store) = folder(parent.path());
    let rows = notibus(&["tail", "--store", &store], 0).0;
    let db = Store::open_dir(&path).unwrap();
    for reader in readers(&store) {
        let (printed, said) = notibus(&reader, 0);
        assert!(said.contains("another process has") && said.contains(&text), "{reader:?}: {said}");
        assert!(reader[0] != "tail" || printed == rows);
    }
    assert!(notibus(&["check", &store], 0).0.contains("another process has it open"));
    let file = parent.path().join("bus").display().to_string();
    for (writer, instead) in [
        (&["topology", "reshard", "--store", &store, "--shards", "2"][..], "--url"),
        (&["export", &file, "--store", &store], "--while-running"),
        (&["tail", "--follow", "--store", &store], "--url"),
        (&["consumers", "delete", "mailer", "--yes", "--store", &store], "--url"),
    ] {
        // The other process may close the store later, so this is not a usage error.
        let said = notibus(writer, 1).1;
        assert!(said.contains("in another process") && said.contains(instead), "{writer:?}: {said}");
    }
    drop(db);
}

/// A damaged folder is refused with the place of the damage, and `check` names the place.
#[test]
fn damage_is_named() {
    let parent = tempfile::tempdir().unwrap();
    let (path, text, store) = folder(parent.path());
    let (whole, _) = notibus(&["check", &text], 0);
    assert!(whole.starts_with("whole: "), "{whole}");

    let journal = path.join("journal-0000000000000001");
    let mut bytes = fs::read(&journal).unwrap();
    let place = bytes.len() / 2;
    bytes[place] ^= 1;
    fs::write(&journal, &bytes).unwrap();

    let (damages, said) = notibus(&["check", &text], 2);
    let at = damages.strip_prefix("damaged: journal-0000000000000001 at byte ").unwrap();
    let at: usize = at.split(':').next().unwrap().parse().unwrap();
    assert!(at <= place && place - at < 20_000 && damages.lines().count() == 1, "{place}: {damages}");
    assert!(said.contains("in 1 places"), "{said}");
    for refused in
        [&["tail", "--store", &store][..], &["serve", "--listen", "127.0.0.1:0", "--store", &store]]
    {
        let said = notibus(refused, 2).1;
        assert!(said.contains(&format!("journal-0000000000000001 at byte {at}")), "{said}");
    }
    let copy = parent.path().join("copy").display().to_string();
    assert!(notibus(&["backup", &text, &copy], 2).1.contains("damaged"), "a copy would look whole");

    let file = parent.path().join("bus");
    notibus(&["export", &file.display().to_string(), "--store", &store], 2);
    assert!(!file.exists());
}

/// A copy that is made while the folder is written to has the store as of one moment, and can be opened where it is or in place of the
/// original.
#[test]
fn a_backup_is_made_while_the_folder_is_in_use() {
    let parent = tempfile::tempdir().unwrap();
    let (path, text, _) = folder(parent.path());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let db = Store::open_dir(&path).unwrap();
    let writer = db.clone();
    let writing = runtime.spawn(async move {
        for number in 0_u64.. {
            let set = async |tx: notibus::store::Transaction| {
                // The copy has both keys, or neither.
                tx.set(b"zz/first", &number.to_be_bytes());
                tx.set(b"zz/second", &number.to_be_bytes());
                tx.set(format!("zz/rows/{}", number % 50).as_bytes(), &[7; 2_000]);
                Ok(())
            };
            writer.run(set).await.unwrap();
        }
    });
    let mut newest = None;
    for round in 0..8 {
        std::thread::sleep(Duration::from_millis(30));
        let copy = parent.path().join(format!("copy{round}"));
        let (said, _) = notibus(&["backup", &text, &copy.display().to_string()], 0);
        assert!(said.contains("another process has it open"), "{said}");
        let copied = Store::open_dir(&copy).unwrap();
        let values = runtime.block_on(async {
            let get = async |tx: notibus::store::Transaction| {
                let isolation = notibus::store::Isolation::Snapshot;
                Ok((tx.get(b"zz/first", isolation).await?, tx.get(b"zz/second", isolation).await?))
            };
            Bus::open(&copied, BusOptions::default()).await.unwrap();
            copied.run(get).await.unwrap()
        });
        assert_eq!(values.0, values.1);
        assert!(values.0 >= newest, "later copies have more");
        newest = values.0;
        assert!(notibus(&["backup", &text, &copy.display().to_string()], 2).1.contains("there is a store"));
    }
    assert!(newest.is_some());
    writing.abort();
}

/// A client that resumes from a history that a restored copy does not have gets status 410, and then starts from the beginning.
#[test]
fn a_restored_copy_expires_clients_that_have_seen_lost_rows() {
    let parent = tempfile::tempdir().unwrap();
    let (path, text, store) = folder(parent.path());
    let copy = parent.path().join("copy");
    let served = Served::start(&["--store", &store], None);
    let post = |served: &Served| {
        let body = r#"[{"db":"later","type":"created"}]"#;
        let length = body.len();
        let answer = served.ask(&format!(
            "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        ));
        assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
    };
    let last_seq = |answer: &str| {
        let rest = answer.split("\"last_seq\":\"").nth(1).unwrap();
        rest.split('"').next().unwrap().to_owned()
    };
    let kept = last_seq(&served.get("/_db_updates?since=now"));
    notibus(&["backup", &text, &copy.display().to_string()], 0);
    post(&served);
    let mut lost = kept.clone();
    while lost == kept {
        lost = last_seq(&served.get(&format!("/_db_updates?since={kept}&feed=longpoll")));
    }
    assert!(served.stop());
    fs::remove_dir_all(&path).unwrap();
    fs::rename(&copy, &path).unwrap();

    let served = Served::start(&["--store", &store], None);
    for _ in 0..2 {
        let answer = served.get(&format!("/_db_updates?since={lost}"));
        assert!(answer.starts_with("HTTP/1.1 410 Gone\r\n"), "{answer}");
        let answer = served.get(&format!("/_db_updates?since={kept}"));
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        post(&served);
    }
    assert!(served.stop());
}

/// Regression: the server let idle connections use up the limit on open files, so the store, which needed one more file, failed for good.
#[test]
fn connections_leave_the_store_the_files_that_it_needs() {
    let parent = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", parent.path().join("store").display());
    let script = format!(
        "ulimit -n 70 && exec {} serve --listen 127.0.0.1:0 --store {store}",
        env!("CARGO_BIN_EXE_notibus")
    );
    let mut child = Command::new("sh")
        .args(["-c", &script])
        .env_remove("NOTIBUS_CREDENTIALS")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let at = line.trim().strip_prefix("notibus: listening on http://").unwrap();
    let mut first = TcpStream::connect(at).unwrap();
    let idle: Vec<_> = (0..80).map(|_| TcpStream::connect(at).unwrap()).collect();
    first.set_read_timeout(Some(LIMIT)).unwrap();
    for number in 0..20 {
        let body = format!(r#"[{{"db":"db{number}","type":"created"}}]"#);
        let length = body.len();
        write!(
            first,
            "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = [0; 4_096];
        let len = first.read(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer[..len]).into_owned();
        assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop((first, idle));
    child.kill().unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    child.wait().unwrap();
    assert!(said.contains("at most 30 connections") && said.contains("open files is 70"), "{said}");
    assert!(!said.contains("ERROR"), "{said}");
}

/// A credentials file that others may read shows them the names, and one that others may write lets them in.
#[test]
fn credentials_that_others_may_read_are_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "").unwrap();
    let path = file.path().to_str().unwrap();
    for mode in [0o640, 0o604, 0o620, 0o602] {
        fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
        let (_, said) = notibus(&["serve", "--store", "memory", "--credentials", path], 2);
        assert!(said.contains(&format!("chmod 600 {path}")), "{mode:o}: {said}");
    }
}

/// From version 254 on, systemd lets the group of a dynamic user, which only that user is in, read credentials loaded with
/// `LoadCredential`. Regression: `serve` refused such credentials, although the unit recommends them.
#[test]
fn credentials_that_systemd_has_loaded_may_be_read_by_the_group() {
    let loaded = tempfile::tempdir().unwrap();
    let below = loaded.path().join("below");
    fs::create_dir(&below).unwrap();
    let refusal = |folder: &Path, mode: u32| {
        let file = folder.join("credentials");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        let mut command = served::notibus();
        command.env("CREDENTIALS_DIRECTORY", loaded.path());
        command.args(["serve", "--store", "memory", "--host", "not:a:host", "--credentials"]).arg(&file);
        let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
        fs::remove_file(file).unwrap();
        said
    };
    for mode in [0o440, 0o400, 0o640] {
        let said = refusal(loaded.path(), mode);
        assert!(!said.contains("chmod") && said.contains("notibus: "), "{mode:o}: {said}");
    }
    for mode in [0o444, 0o460, 0o442, 0o404] {
        assert!(refusal(loaded.path(), mode).contains("chmod 600"), "{mode:o}");
    }
    assert!(refusal(&below, 0o440).contains("chmod 600"), "only what systemd has put there");
}

#[test]
fn what_is_wrong_with_a_store_is_said_and_nothing_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    let (file, missing) =
        (format!("dir:{}", file.display()), format!("dir:{}", folder.path().join("missing").display()));
    for (arguments, reason) in [
        (&["tail", "--store", &missing][..], "there is no store"),
        (&["tail", "--store", "memory"], "there is no bus"),
        (&["tail", "--store", "memory", "--since", "yesterday"], "invalid cursor"),
        (&["tail", "--store", "disk:x"], "none of \"memory\""),
        (&["tail", "--store", &file], "it is a file"),
        (&["nodes", "--store", &file], "it is a file"),
        (&["nodes", "--store", "memory"], "there is no bus"),
        (&["nodes", "--store", "memory", "--watch", "soon"], "--watch"),
    ] {
        let (printed, said) = notibus(arguments, 2);
        assert!(printed.is_empty() && said.contains(reason), "{arguments:?}: {said}");
    }
    assert!(!folder.path().join("missing").exists());
}

#[test]
fn a_folder_can_be_tailed_from_any_row() {
    let parent = tempfile::tempdir().unwrap();
    let (.., store) = folder(parent.path());
    let tail = |since: &str| -> Vec<Value> {
        let (lines, _) = notibus(&["tail", "--json", "--store", &store, "--since", since], 0);
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let all = tail("0");
    assert_eq!(all.iter().filter(|row| row["db"].as_str().unwrap().starts_with("db-")).count(), 60);
    assert_eq!(tail(all[7]["seq"].as_str().unwrap()), all[8..]);
    assert!(tail("now").is_empty());
}

/// A killed node leaves its row behind until the folder is opened again. The command cannot know whether its process is alive.
#[test]
fn the_nodes_of_a_folder_are_shown_with_what_they_hold() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", folder.path().display());
    let nodes =
        |more: &[&str]| notibus(&[&["nodes", "--store", &store, "--watch", "50ms"], more].concat(), 0).0;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let id = runtime.block_on(async {
        let db = Store::open_dir(folder.path()).unwrap();
        let bus = Bus::open(&db, BusOptions::default()).await.unwrap();
        let node = bus.node(NodeOptions::default()).await.unwrap();
        let _notifier = node.notifier(NotifierOptions::default()).await.unwrap();
        node.id().to_string()
    });
    drop(runtime);
    let text = nodes(&[]);
    let line = text.lines().nth(1).unwrap();
    assert!(text.starts_with("NODE ") && line.starts_with(&id), "{text}");
    assert!(line.contains("  of the last opening  notifier  partition 64  2"), "{line}");
    let seen: Value = serde_json::from_str(&nodes(&["--json"])).unwrap();
    assert_eq!(seen["id"], Value::from(id));
    assert_eq!((&seen["roles"][0], &seen["leases"]["partition"]), (&"notifier".into(), &64.into()));
}
