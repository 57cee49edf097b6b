//! Failures to open a cluster: typed errors that arrive in time and say what to do.

use std::{
    fs,
    net::TcpListener,
    path::Path,
    time::{Duration, Instant},
};

use notibus::{
    Error,
    store::{FoundationDbOptions, Isolation, Store},
};

use crate::{child::Child, fixture};

/// The time within which an error must arrive if the limit is 1 s. Only a hang takes longer.
const LATE: Duration = Duration::from_secs(30);

/// Returns the reason why the cluster of `file` cannot be opened.
async fn refused(file: &Path) -> String {
    let options = FoundationDbOptions::default().connect_timeout(Duration::from_secs(1));
    let opening = Store::foundationdb_with(file, &options);
    match tokio::time::timeout(LATE, opening).await.expect("it does not hang") {
        Err(Error::Open { path, reason, .. }) => {
            assert_eq!(path, file);
            reason
        }
        other => panic!("{}: {other:?}", file.display()),
    }
}

/// Missing files, and files that are not cluster files, are refused.
pub(crate) async fn a_bad_cluster_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let missing = refused(&folder.path().join("missing")).await;
    assert!(missing.contains("no cluster file"), "{missing}");
    refused(folder.path()).await;
    let file = folder.path().join("fdb.cluster");
    for bad in [
        &b""[..],
        b"\n\n",
        b"# only a comment\n",
        b"hello",
        b"@",
        b"a@127.0.0.1:4500",
        b"a:b@",
        b"a:b@127.0.0.1",
        b"a:b@127.0.0.1:notaport",
        b"a:b:c@127.0.0.1:4500,",
        b"\xff\xfe\x00@",
        b"a:b@127.0.0.1:1\na:b@127.0.0.1:2\n",
    ] {
        fs::write(&file, bad).unwrap();
        let reason = refused(&file).await;
        assert!(!reason.contains("did not answer"), "{:?}: {reason}", String::from_utf8_lossy(bad));
        assert_eq!(fs::read(&file).unwrap(), bad, "nothing is changed");
    }
}

/// A valid cluster file whose cluster does not exist is reported in time.
pub(crate) async fn an_unreachable_cluster_is_reported_in_time() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fdb.cluster");
    let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    fs::write(&file, format!("a:b@127.0.0.1:{port}\n")).unwrap();
    let started = Instant::now();
    let reason = refused(&file).await;
    assert!(reason.contains("did not answer within 1s"), "{reason}");
    assert!(started.elapsed() >= Duration::from_millis(900), "it was tried");
    // The client accepts this number as a port.
    fs::write(&file, "a:b@127.0.0.1:70000\n").unwrap();
    refused(&file).await;
    // Something listens here, but it is not a cluster.
    let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    fs::write(&file, format!("a:b@{}\n", silent.local_addr().unwrap())).unwrap();
    assert!(refused(&file).await.contains("did not answer"));
    // Other clients still work.
    let store = fixture::open(fixture::shared()).await;
    store.begin().get(b"k", Isolation::Snapshot).await.unwrap();
}

/// An API version is refused if the client does not offer it, if it is too old, or if another one was chosen before.
pub(crate) async fn a_bad_api_version_is_refused_and_spoils_nothing() {
    let mut child = Child::start("api versions", &fixture::shared(), b"");
    assert_eq!(child.line().await, "done");
    child.end();
}
