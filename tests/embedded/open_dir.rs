//! Opening folders: refusals and their reasons, content that survives closing, and damaged stores.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use notibus::{
    Error, Result,
    store::{Isolation, KeyRange, OpenCause, RangeRead, Store},
};
use tempfile::TempDir;

type Rows = BTreeMap<Vec<u8>, Vec<u8>>;

fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder can be made")
}

/// Runs `body` to its end.
fn wait<T>(body: impl Future<Output = Result<T>>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime can be built")
        .block_on(body)
        .expect("the store meets no error")
}

/// Asserts that `folder` is refused with the cause `expected`, and returns the reason.
fn refusal(folder: &Path, expected: OpenCause) -> String {
    match Store::open_dir(folder) {
        Err(Error::Open { path, cause, reason }) => {
            assert_eq!((&*path, cause), (folder, expected), "{reason}");
            reason
        }
        other => panic!("{other:?}"),
    }
}

fn rows(store: &Store) -> Rows {
    wait(async {
        let tx = store.begin();
        let all = RangeRead::new(KeyRange::prefix(""));
        let mut pages = tx.pages(all, Isolation::Snapshot);
        let mut rows = Rows::new();
        while let Some(page) = pages.next().await? {
            rows.extend(page.into_iter().map(|(key, value)| (key.to_vec(), value.to_vec())));
        }
        Ok(rows)
    })
}

/// Commits `count` transactions, each of one row, from number `first` on.
fn commit(store: &Store, first: u32, count: u32) {
    wait(async {
        for number in first..first + count {
            let tx = store.begin();
            tx.set(format!("key {number:05}").as_bytes(), &value(number));
            tx.commit().await?;
        }
        Ok(())
    });
}

fn value(number: u32) -> Vec<u8> {
    format!("value of row {number}, ").repeat(10).into_bytes()
}

#[test]
fn a_missing_folder_is_made_with_its_parents() {
    let folder = folder();
    let path = folder.path().join("a/b/c");
    commit(&Store::open_dir(&path).expect("it can be made"), 0, 1);
    assert_eq!(rows(&Store::open_dir(&path).expect("it is a store")).len(), 1);
}

#[test]
fn a_file_is_refused() {
    let folder = folder();
    let path = folder.path().join("file");
    fs::write(&path, "text").expect("it can be written");
    let reason = refusal(&path, OpenCause::Unusable);
    assert!(reason.contains("it is a file"), "{reason}");
    assert_eq!(fs::read(&path).expect("it is there"), b"text");
}

#[test]
fn a_folder_below_a_file_is_refused() {
    let folder = folder();
    let path = folder.path().join("file");
    fs::write(&path, "text").expect("it can be written");
    assert!(!refusal(&path.join("store"), OpenCause::Unusable).is_empty());
}

#[test]
fn a_folder_with_other_files_is_refused_and_left_alone() {
    let folder = folder();
    fs::write(folder.path().join("letter.txt"), "text").expect("it can be written");
    let reason = refusal(folder.path(), OpenCause::Unusable);
    assert!(reason.contains("no store"), "{reason}");
    let left: Vec<_> = files(folder.path());
    assert_eq!(left, [Path::new("letter.txt")]);
}

#[test]
fn a_store_of_another_format_is_refused() {
    let folder = folder();
    drop(Store::open_dir(folder.path()).expect("it can be made"));
    let marker = format!("99 {:016x}\n", xxhash_rust::xxh3::xxh3_64(b"99"));
    fs::write(folder.path().join("NOTIBUS_STORE"), marker).expect("it can be written");
    let reason = refusal(folder.path(), OpenCause::Unusable);
    assert!(reason.contains("99") && reason.contains("format"), "{reason}");
}

#[test]
fn a_second_handle_of_the_same_process_is_refused_until_the_first_is_closed() {
    let folder = folder();
    let store = Store::open_dir(folder.path()).expect("it can be made");
    let clone = store.clone();
    commit(&store, 0, 1);
    drop(store);
    let reason = refusal(folder.path(), OpenCause::InUse);
    assert!(reason.contains("open in another process"), "{reason}");
    drop(clone);
    assert_eq!(rows(&Store::open_dir(folder.path()).expect("it is free")).len(), 1);
}

#[test]
fn rows_and_versions_survive_closing() {
    let folder = folder();
    let mut expected = Rows::new();
    let mut newest = 0;
    for round in 0..5 {
        let store = Store::open_dir(folder.path()).expect("it can be opened");
        assert_eq!(rows(&store), expected);
        let version = wait(store.begin().read_version());
        assert!(version >= newest, "{version} after {newest}");
        let number = round * 10;
        commit(&store, number, 10);
        expected.extend((number..number + 10).map(|n| (format!("key {n:05}").into_bytes(), value(n))));
        let removed = format!("key {:05}", number + 3).into_bytes();
        expected.remove(&removed);
        newest = wait(async {
            let tx = store.begin();
            tx.clear(&removed);
            let committed = tx.commit().await?.expect("a clear is a write");
            Ok(committed.versionstamp.version())
        });
        assert!(newest > version);
    }
}

#[test]
fn the_empty_key_and_the_largest_entries_survive_closing() {
    let folder = folder();
    let (key, value) = (vec![b'k'; 10_000], vec![7; 100_000]);
    let db = Store::open_dir(folder.path()).expect("it can be made");
    wait(async {
        let tx = db.begin();
        tx.set(b"", b"");
        tx.set(b"\0", b"zero");
        tx.set(&key, &value);
        tx.commit().await
    });
    drop(db);
    let expected = Rows::from([(vec![], vec![]), (vec![0], b"zero".to_vec()), (key, value)]);
    assert!(rows(&Store::open_dir(folder.path()).expect("it is a store")) == expected);
}

/// Returns the paths of all files below `folder`, in order, relative to it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).expect("it is a folder") {
            let path = entry.expect("it can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let relative = path.strip_prefix(folder).expect("it lies within");
                found.push(relative.to_owned());
            }
        }
    }
    found.sort();
    found
}

/// Copies all files of `from` into the empty folder `to`.
fn copy(from: &Path, to: &Path) {
    for file in files(from) {
        let target = to.join(&file);
        fs::create_dir_all(target.parent().expect("it has a folder")).expect("it can be made");
        fs::copy(from.join(&file), target).expect("it can be copied");
    }
}

/// A way to damage a file.
#[derive(Debug, Clone, Copy)]
enum Damage {
    /// The file is removed.
    Missing,
    /// The file is cut to this percentage of its length.
    Cut(usize),
    /// The byte at this percentage of the file's length is changed.
    Flipped(usize),
}

impl Damage {
    /// Damages `file`; returns false if there is nothing to damage.
    fn apply(self, file: &Path) -> bool {
        let mut bytes = fs::read(file).expect("it can be read");
        match self {
            Self::Missing => {
                fs::remove_file(file).expect("it can be removed");
                return true;
            }
            Self::Cut(_) | Self::Flipped(_) if bytes.is_empty() => return false,
            Self::Cut(share) => bytes.truncate(bytes.len() * share / 100),
            Self::Flipped(share) => {
                let place = (bytes.len() * share / 100).min(bytes.len() - 1);
                bytes[place] ^= 0x55;
            }
        }
        fs::write(file, bytes).expect("it can be written");
        true
    }
}

/// Regression: a commit that changed no row, such as clearing an empty range, raised the version only in memory, so the store was closed at
/// a version that its folder did not have, and could not be opened again.
#[test]
fn a_commit_that_changes_no_row_keeps_its_version() {
    let folder = folder();
    let version = {
        let db = Store::open_dir(folder.path()).expect("it is a new store");
        commit(&db, 0, 1);
        wait(async {
            let tx = db.begin();
            tx.clear_range(&KeyRange::prefix("nothing is here"));
            tx.commit().await?;
            db.begin().read_version().await
        })
    };
    let db = Store::open_dir(folder.path()).expect("it was closed in order");
    let reopened = wait(async { db.begin().read_version().await });
    assert!(reopened >= version, "{reopened} after {version}: read versions never go back");
}

/// The result of opening a damaged store.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    /// The folder was refused with [`Error::Open`].
    Refused,
    /// The folder was opened with all rows.
    Whole,
    /// The folder was opened without the rows of some of the newest commits.
    Shorter,
}

/// Opens `folder`, which had the rows `expected` before it was damaged. It must have only the rows of the first commits, or all.
fn open_damaged(folder: &Path, expected: &Rows) -> Outcome {
    match Store::open_dir(folder) {
        Err(Error::Open { reason, cause, .. }) => {
            assert!(!reason.is_empty());
            assert!(matches!(cause, OpenCause::Damaged | OpenCause::Unusable), "{cause:?}: {reason}");
            Outcome::Refused
        }
        Err(error) => panic!("{error}"),
        Ok(db) => {
            let found = rows(&db);
            assert!(found.iter().eq(expected.iter().take(found.len())), "wrong rows");
            if found.len() == expected.len() { Outcome::Whole } else { Outcome::Shorter }
        }
    }
}

/// Makes a store whose keys were committed in their order, so that the rows of the first commits are the first rows.
fn store_in_order() -> (TempDir, Rows) {
    let folder = folder();
    for round in 0..3 {
        let store = Store::open_dir(folder.path()).expect("it can be opened");
        commit(&store, round * 150, 150);
    }
    let expected = (0..450).map(|n| (format!("key {n:05}").into_bytes(), value(n)));
    (folder, expected.collect())
}

/// Each file is damaged in many ways, in a store that was closed cleanly and in one that was not. A journal that was cut looks as if a
/// power failure had cut it: without the note of a clean close the newest commits may be missing; with the note their absence is an error.
/// All other damage is refused or does no harm.
///
/// Regression: a store did not check what its folder must have, so a folder that had lost all of its rows was opened as an empty store, and
/// one with a cut journal as an undamaged one, even if it had been closed cleanly.
#[test]
fn a_damaged_store_is_refused_or_ends_earlier() {
    let (original, expected) = store_in_order();
    for closed in [true, false] {
        if !closed {
            fs::remove_file(original.path().join(CLOSED)).expect("it was closed in order");
        }
        let mut refused = BTreeMap::<String, usize>::new();
        for file in files(original.path()) {
            let name = file.display().to_string();
            for damage in DAMAGES {
                let copied = folder();
                copy(original.path(), copied.path());
                if !damage.apply(&copied.path().join(&file)) {
                    continue;
                }
                let outcome = open_damaged(copied.path(), &expected);
                println!("{name} {damage:?}: {outcome:?}");
                let may_end_earlier =
                    !closed && name.starts_with("journal-") && matches!(damage, Damage::Cut(_));
                assert!(outcome != Outcome::Shorter || may_end_earlier, "{name} {damage:?} lost rows");
                *refused.entry(name.clone()).or_default() += usize::from(outcome == Outcome::Refused);
            }
        }
        for (name, least) in
            [("NOTIBUS_STORE", 5), ("journal-0000000000000001", 6), ("snapshot-0000000000000001", 9)]
        {
            assert!(refused[name] >= least, "{refused:?}");
        }
    }
}

/// Regression: a store made its folder and files readable by every local user.
#[cfg(unix)]
#[test]
fn nobody_else_may_read_a_folder_or_its_files() {
    use std::os::unix::fs::PermissionsExt;
    let parent = folder();
    let path = parent.path().join("store");
    commit(&Store::open_dir(&path).expect("it can be made"), 0, 1);
    let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o700);
    let files = files(&path);
    assert_eq!(files.len(), 4, "{files:?}");
    for file in files {
        assert_eq!(mode(&path.join(&file)), 0o600, "{}", file.display());
    }
}

/// The name of the file that notes a clean close.
const CLOSED: &str = "NOTIBUS_CLOSED";

/// The ways in which each file is damaged.
const DAMAGES: [Damage; 11] = [
    Damage::Missing,
    Damage::Cut(0),
    Damage::Cut(1),
    Damage::Cut(50),
    Damage::Cut(99),
    Damage::Flipped(0),
    Damage::Flipped(1),
    Damage::Flipped(30),
    Damage::Flipped(60),
    Damage::Flipped(99),
    Damage::Flipped(100),
];

/// A crash during the creation of a folder leaves a marker that says so, or an empty one.
#[test]
fn a_half_made_folder_is_finished() {
    let unfinished = format!("3 unfinished {:016x}\n", xxhash_rust::xxh3::xxh3_64(b"3 unfinished"));
    for marker in ["", &*unfinished] {
        let folder = folder();
        fs::write(folder.path().join("NOTIBUS_STORE"), marker).expect("it can be written");
        let db = Store::open_dir(folder.path()).expect("it is finished");
        commit(&db, 0, 1);
        drop(db);
        assert_eq!(rows(&Store::open_dir(folder.path()).expect("it is a store")).len(), 1);
    }
}

/// Regression: a check whether a store is open locked its folder, so the store could not be opened during the check.
#[test]
fn asking_whether_a_store_is_open_does_not_block_opening_it() {
    let folder = folder();
    drop(Store::open_dir(folder.path()).expect("it can be made"));
    let asking = fs::File::open(folder.path()).expect("it is there");
    asking.lock_shared().expect("nobody has it");
    let asked = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        drop(asking);
    });
    Store::open_dir(folder.path()).expect("it is open nowhere");
    asked.join().expect("it does not panic");
}

/// Regression: `check` took a flipped byte in the marker for another format, so it stopped there.
#[test]
fn a_damaged_marker_is_named_and_hides_no_row() {
    let folder = folder();
    commit(&Store::open_dir(folder.path()).expect("it is a new store"), 0, 10);
    let marker = folder.path().join("NOTIBUS_STORE");
    let good = fs::read(&marker).expect("it is there");
    for damage in [Damage::Flipped(0), Damage::Flipped(60), Damage::Cut(50), Damage::Missing] {
        fs::write(&marker, &good).expect("it can be written");
        assert!(damage.apply(&marker));
        let reason = refusal(folder.path(), OpenCause::Damaged);
        assert!(reason.contains("damaged: NOTIBUS_STORE at byte 0"), "{damage:?}: {reason}");
        let report = Store::check_dir(folder.path()).expect("it can be checked");
        assert_eq!((report.damages.len(), &*report.damages[0].file), (1, "NOTIBUS_STORE"));
        assert_eq!(report.rows, 10, "{damage:?}");
    }
}

/// Commits one row, and returns whether the commit is acknowledged.
#[cfg(unix)]
fn is_acknowledged(store: &Store, number: u32) -> bool {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime can be built")
        .block_on(async {
            let tx = store.begin();
            tx.set(format!("key {number:05}").as_bytes(), &value(number));
            tx.commit().await.is_ok()
        })
}

/// Bug: a store found its files by the path of its folder, so a process whose folder was replaced wrote its journal over that of the new
/// folder. Fix: it finds them by the handle of the folder, and a process whose folder was replaced fails.
#[cfg(unix)]
#[test]
fn a_process_whose_folder_is_replaced_fails_and_mixes_nothing() {
    let parent = folder();
    let (path, moved) = (parent.path().join("store"), parent.path().join("moved"));
    let old = Store::open_dir(&path).expect("it can be made");
    commit(&old, 0, 10);
    let before = rows(&old);
    fs::rename(&path, &moved).expect("it can be moved");
    let new = Store::open_dir(&path).expect("another one is made in its place");
    commit(&new, 100, 20);
    let expected = rows(&new);
    assert!(!is_acknowledged(&old, 50), "it would be lost for who opens the path");
    assert!(old.failure().is_some());
    commit(&new, 200, 1);
    drop(old);
    let mut expected = expected;
    expected.insert(b"key 00200".to_vec(), value(200));
    assert_eq!(rows(&new), expected);
    drop(new);
    assert_eq!(rows(&Store::open_dir(&path).expect("it is whole")), expected);
    let mut left = rows(&Store::open_dir(&moved).expect("it is whole"));
    left.remove(&b"key 00050"[..]);
    assert_eq!(left, before);
}

/// Bug: the lock was a file, so its removal let a second process in, and rows of both were lost. Fix: the folder itself is locked, and a
/// process fails once a file without which its folder cannot be opened is removed.
#[cfg(unix)]
#[test]
fn a_removed_file_fails_the_process_and_lets_nobody_in() {
    let names: Vec<_> = {
        let folder = folder();
        let _db = Store::open_dir(folder.path()).expect("it can be made");
        files(folder.path())
    };
    assert_eq!(names.len(), 3, "{names:?}");
    for name in names {
        let folder = folder();
        let store = Store::open_dir(folder.path()).expect("it can be made");
        commit(&store, 0, 5);
        fs::remove_file(folder.path().join(&name)).expect("it is there");
        match Store::open_dir(folder.path()) {
            Err(Error::Open { cause, .. }) => {
                assert!(matches!(cause, OpenCause::InUse | OpenCause::Damaged), "{cause:?}");
            }
            other => panic!("{other:?}"),
        }
        assert!(!is_acknowledged(&store, 6), "{}", name.display());
    }
}

/// Another path to the same folder leads to the same lock.
#[cfg(unix)]
#[test]
fn another_path_to_a_folder_in_use_is_refused() {
    let parent = folder();
    let (path, link) = (parent.path().join("store"), parent.path().join("link"));
    let db = Store::open_dir(&path).expect("it can be made");
    std::os::unix::fs::symlink(&path, &link).expect("it can be made");
    refusal(&link, OpenCause::InUse);
    // A bind mount needs rights that the test may not have.
    let bound = parent.path().join("bound");
    fs::create_dir(&bound).expect("it can be made");
    let mount = std::process::Command::new("mount").arg("--bind").args([&path, &bound]).output();
    if mount.is_ok_and(|mount| mount.status.success()) {
        refusal(&bound, OpenCause::InUse);
        let ended = std::process::Command::new("umount").arg(&bound).status();
        assert!(ended.expect("it has started").success());
    }
    commit(&db, 0, 1);
}
