//! Crashes: the content of a folder's store after its process was killed.
//!
//! The test runs itself again as a child, which commits as fast as it can and prints each acknowledged commit.
//! The child is killed at a random moment, and the folder is opened: every acknowledged commit must be there, and every
//! transaction whole. `open_dir.rs` tests unreadable and damaged folders.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use notibus::{
    Error, Result,
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Store},
};

/// The environment variable with the folder of the child; a process without it is the parent.
const FOLDER: &str = "NOTIBUS_CRASH_FOLDER";

/// The environment variable with the seed for the moments at which children are killed.
const SEED: &str = "NOTIBUS_SEED";

/// The number of children that are killed, unless `NOTIBUS_KILLS` sets another number.
const ROUNDS: u32 = 14;

/// The number of transactions that the child runs at once.
const WORKERS: u64 = 8;

/// The number of keys that each transaction sets to one token.
const PARTS: u64 = 5;

/// The number of transactions whose rows each worker keeps.
const KEPT: u64 = 20;

/// How long to wait for an expected event.
const PATIENCE: Duration = Duration::from_mins(2);

#[test]
fn a_killed_process_loses_nothing_acknowledged_and_tears_nothing() {
    if let Ok(folder) = std::env::var(FOLDER) {
        commit_until_killed(Path::new(&folder));
    }
    let seed = std::env::var(SEED)
        .map_or_else(|_| fastrand::u64(..), |seed| seed.parse().expect("the seed is a number"));
    println!("{SEED}={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let mut acknowledged = vec![0; WORKERS as usize];
    let mut rounds_with_load = 0;
    let rounds =
        std::env::var("NOTIBUS_KILLS").map_or(ROUNDS, |kills| kills.parse().expect("it is a number"));
    for round in 0..rounds {
        let mut killed = Killed::start(folder.path());
        // Every fourth child is killed while it starts.
        if round % 4 == 3 {
            thread::sleep(Duration::from_millis(random.u64(0..60)));
        } else {
            killed.wait_for_load();
            assert_is_locked(folder.path());
            thread::sleep(Duration::from_millis(random.u64(0..250)));
            rounds_with_load += 1;
        }
        let count = killed.kill(&mut acknowledged);
        println!("round {round}: {count} commits acknowledged");
        check(folder.path(), &mut acknowledged);
    }
    assert!(rounds_with_load >= rounds / 2);
    assert!(acknowledged.iter().all(|&last| last > 0), "{acknowledged:?}");
}

/// A child that will be killed.
struct Killed {
    child: Child,
    /// The child's acknowledged commits: the worker and the number of the transaction.
    acknowledgements: mpsc::Receiver<(usize, u64)>,
    /// Acknowledgements that are already read from the channel.
    taken: Vec<(usize, u64)>,
}

impl Killed {
    /// Starts this test again, as a child that opens `folder`.
    fn start(folder: &Path) -> Self {
        let program = std::env::current_exe().expect("the test has a program");
        let mut child = Command::new(program)
            .args([
                "--exact",
                "crash::a_killed_process_loses_nothing_acknowledged_and_tears_nothing",
                "--nocapture",
            ])
            .env(FOLDER, folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the test can be run again");
        let output = child.stdout.take().expect("the output is piped");
        let (sender, acknowledgements) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(std::io::Result::ok) {
                if let Some(acknowledged) = parse(&line) {
                    // The receiver may be gone, if the test has failed.
                    let _ = sender.send(acknowledged);
                }
            }
        });
        Self { child, acknowledgements, taken: Vec::new() }
    }

    /// Waits for the first commit of the child.
    fn wait_for_load(&mut self) {
        let first = self.acknowledgements.recv_timeout(PATIENCE);
        self.taken.push(first.expect("the child commits"));
    }

    /// Kills the child, updates the last number of each worker from the acknowledgements, and returns the number of acknowledgements.
    fn kill(mut self, acknowledged: &mut [u64]) -> usize {
        self.child.kill().expect("the child can be killed");
        let status = self.child.wait().expect("the child ends");
        assert!(status.code().is_none(), "it ended by itself: {status}");
        // The channel ends with the child's output.
        self.taken.extend(self.acknowledgements.iter());
        for &(worker, number) in &self.taken {
            acknowledged[worker] = acknowledged[worker].max(number);
        }
        self.taken.len()
    }
}

/// Parses the worker and the number of an acknowledgement. The last line of a killed child may be cut off; a complete line ends with a dot.
fn parse(line: &str) -> Option<(usize, u64)> {
    let (worker, number) = line.strip_prefix("ack ")?.strip_suffix('.')?.split_once(' ')?;
    Some((worker.parse().ok()?, number.parse().ok()?))
}

/// Asserts that a folder that another process has open is refused for this reason.
fn assert_is_locked(folder: &Path) {
    match Store::open_dir(folder) {
        Err(Error::Open { reason, .. }) => {
            assert!(reason.contains("open in another process"), "{reason}");
        }
        other => panic!("a second open gave {other:?}"),
    }
}

/// The child: commits in [`WORKERS`] tasks until it is killed.
fn commit_until_killed(folder: &Path) -> ! {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .expect("a runtime can be built");
    let store = Store::open_dir(folder).expect("the folder can be opened");
    runtime.block_on(async {
        let workers = (0..WORKERS).map(|worker| tokio::spawn(work(store.clone(), worker)));
        futures_util::future::join_all(workers).await;
    });
    unreachable!("the workers do not end");
}

/// Commits transactions one by one, and prints each once it is acknowledged.
async fn work(store: Store, worker: u64) -> Result<()> {
    let mut number = last(&store, worker).await?;
    loop {
        number += 1;
        let tx = store.begin();
        for part in 0..PARTS {
            tx.set(&row_key(worker, number, part), &token(worker, number));
        }
        let old = number.saturating_sub(KEPT);
        tx.clear_range(&KeyRange::new(row_key(worker, old, 0), row_key(worker, old, PARTS)));
        tx.set(&last_key(worker), &number.to_be_bytes());
        tx.atomic(AtomicOp::Add, b"count/a", &1_u64.to_le_bytes());
        tx.atomic(AtomicOp::Add, b"count/b", &1_u64.to_le_bytes());
        tx.commit().await?;
        let mut output = std::io::stdout().lock();
        writeln!(output, "ack {worker} {number}.").expect("the parent reads");
        output.flush().expect("the parent reads");
    }
}

fn row_key(worker: u64, number: u64, part: u64) -> Vec<u8> {
    let numbers = [worker, number, part].map(u64::to_be_bytes);
    [&b"row/"[..], &numbers.concat()].concat()
}

/// Returns the key of the number of a worker's newest transaction.
fn last_key(worker: u64) -> Vec<u8> {
    [&b"last/"[..], &worker.to_be_bytes()].concat()
}

/// Returns the value of all parts of a transaction.
fn token(worker: u64, number: u64) -> Vec<u8> {
    format!("transaction {number} of worker {worker}").repeat(5).into_bytes()
}

/// Reads the number of a worker's newest transaction.
async fn last(store: &Store, worker: u64) -> Result<u64> {
    let value = store.begin().get(&last_key(worker), Isolation::Snapshot).await?;
    Ok(value.map_or(0, |value| u64::from_be_bytes(value[..].try_into().expect("it has 8 bytes"))))
}

/// Opens the folder, and checks that it has every acknowledged transaction, and no partial one. From then on, all that it has counts as
/// acknowledged.
fn check(folder: &Path, acknowledged: &mut [u64]) {
    let store = Store::open_dir(folder).expect("a killed process leaves a good folder");
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime can be built");
    runtime.block_on(async {
        let mut expected = BTreeMap::new();
        let mut total = 0;
        for (worker, acknowledged) in (0..WORKERS).zip(acknowledged) {
            let last = last(&store, worker).await.expect("it can be read");
            // A worker waits for each commit, so at most one commit was not acknowledged.
            assert!(
                (*acknowledged..=*acknowledged + 1).contains(&last),
                "worker {worker}: {acknowledged} was acknowledged, {last} is there"
            );
            *acknowledged = last;
            total += last;
            for number in last.saturating_sub(KEPT - 1).max(1)..=last {
                for part in 0..PARTS {
                    expected.insert(row_key(worker, number, part), token(worker, number));
                }
            }
        }
        let rows = all_rows(&store, KeyRange::prefix("row/")).await.expect("they can be read");
        assert!(rows == expected, "{} rows, expected {}", rows.len(), expected.len());
        for counter in [b"count/a", b"count/b"] {
            let value = store.begin().get(counter, Isolation::Snapshot).await.expect("it can be read");
            let count =
                value.map_or(0, |value| u64::from_le_bytes(value[..].try_into().expect("it has 8 bytes")));
            assert_eq!(count, total);
        }
    });
}

async fn all_rows(store: &Store, range: KeyRange) -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let tx = store.begin();
    let mut pages = tx.pages(RangeRead::new(range), Isolation::Snapshot);
    let mut all = BTreeMap::new();
    while let Some(rows) = pages.next().await? {
        all.extend(rows.into_iter().map(|(key, value)| (key.to_vec(), value.to_vec())));
    }
    Ok(all)
}
