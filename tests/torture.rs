//! Worlds in real time, whose processes have threads of their own. `docs/testing.md` says what they can meet that simulated ones cannot.
//!
//! `NOTIBUS_SEED` says which worlds.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{num::NonZeroUsize, process::Command, sync::Arc, sync::atomic::Ordering, thread, time::Duration};

use notibus::simulation::{Done, Options, torture};

/// Three worlds at once, one of them with its store in a folder.
#[test]
fn what_is_promised_holds_on_threads() {
    let from = std::env::var("NOTIBUS_SEED").map_or(1, |seed| seed.parse().expect("it is a number"));
    let (done, folder) = (Arc::new(Done::default()), tempfile::tempdir().unwrap());
    let folders = [None, None, Some(folder.path().join("store"))];
    let outcomes: Vec<_> = thread::scope(|scope| {
        let world = |(seed, folder)| {
            let options = Options { chaos: Some(Duration::from_secs(2)), folder, ..Options::default() };
            torture(seed, NonZeroUsize::new(2).unwrap(), &options, &done)
        };
        let running: Vec<_> = (from..).zip(folders).map(|drawn| scope.spawn(move || world(drawn))).collect();
        running.into_iter().map(|world| world.join().unwrap()).collect()
    });
    for outcome in outcomes {
        assert_eq!(outcome.failure, None, "in a world of seed {}", outcome.seed);
    }
    assert!(done.commits.load(Ordering::Relaxed) > 100, "{done:?}");
    assert!(done.events.load(Ordering::Relaxed) > 100, "{done:?}");
}

/// What leads to nothing is refused before a world runs.
#[test]
fn bad_arguments_are_refused_at_once() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let within = file.path().join("kept");
    for (arguments, reason) in [
        (["--for", "0s"], "no world begins".to_owned()),
        (["--keep", within.to_str().unwrap()], format!("{} cannot be made", within.display())),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_notibus"));
        let refused = command.arg("torture").args(arguments).output().unwrap();
        assert_eq!(refused.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&refused.stderr).contains(&reason), "{refused:?}");
    }
}
