//! Other processes: the test program runs itself again as a child with a part to play.
//!
//! A child plays its part until its standard input ends, and prints its reports line by line. It never survives the trial that started it.
//! Unless it is killed, it must end cleanly: the client library crashes processes that exit while its network runs.

use std::{
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    process::{Child as Process, ChildStdin, Command, ExitCode, Stdio},
    thread,
};

use notibus::{
    Cursor, DispatcherOptions, Error, Filter,
    store::{FoundationDbOptions, Store},
};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt;

use crate::{
    common::{eager, joined, within},
    fixture, fleet, index,
};

/// The environment variable with the part of a child; a process without it is the parent.
const PART: &str = "NOTIBUS_CHILD_PART";

/// The environment variable with the path of the cluster file.
const CLUSTER: &str = "NOTIBUS_CHILD_CLUSTER";

const PREFIX: &str = "NOTIBUS_CHILD_PREFIX";

/// A child of the trial. Dropping it kills it.
pub(crate) struct Child {
    process: Process,
    /// The standard input of the child, whose part ends when this is closed.
    input: Option<ChildStdin>,
    lines: mpsc::UnboundedReceiver<String>,
}

impl Child {
    /// Starts a child that plays `part` on the cluster of `file`, with the bus below `prefix`.
    pub fn start(part: &str, file: &Path, prefix: &[u8]) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("the test has a program"))
            .env(PART, part)
            .env(CLUSTER, file)
            .env(PREFIX, String::from_utf8_lossy(prefix).as_ref())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test can be run again");
        let output = process.stdout.take().expect("the output is piped");
        let (sender, lines) = mpsc::unbounded_channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The trial may have ended already.
                let _ = sender.send(line);
            }
        });
        let input = process.stdin.take();
        Self { process, input, lines }
    }

    /// Returns the next report.
    pub async fn line(&mut self) -> String {
        within("the child to report", self.lines.recv()).await.expect("the child goes on")
    }

    /// Returns the next report, without those that have already arrived.
    pub async fn next_line(&mut self) -> String {
        while self.lines.try_recv().is_ok() {}
        self.line().await
    }

    /// Returns the process id of the child.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Kills the child at once.
    pub fn kill(mut self) {
        self.process.kill().expect("the child can be killed");
        let status = self.process.wait().expect("the child ends");
        assert!(status.code().is_none(), "it ended by itself: {status}");
    }

    /// Ends the part of the child, which must exit cleanly.
    pub fn end(mut self) {
        drop(self.input.take());
        let status = self.process.wait().expect("the child ends");
        assert!(status.success(), "it did not end well: {status}");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Plays the part of a child, if this process is one.
pub(crate) fn play() -> Option<ExitCode> {
    let part = std::env::var(PART).ok()?;
    let (ended, end) = oneshot::channel();
    thread::spawn(move || {
        // An error or the end of input both mean that the parent is done.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = ended.send(());
    });
    fixture::block_on(async {
        let file = std::env::var(CLUSTER).expect("the parent sets the cluster");
        match part.as_str() {
            "notifier" => notifier(&file, end).await,
            "dispatcher" => dispatcher(&file, end).await,
            "client" => client(&file, end).await,
            "layer" => layer(&file, end).await,
            "worker" => {
                let prefix = std::env::var(PREFIX).expect("the parent sets the prefix");
                fleet::worker(&file, prefix.as_bytes(), end).await;
            }
            "indexer" => {
                let prefix = std::env::var(PREFIX).expect("the parent sets the prefix");
                index::indexer(&file, prefix.as_bytes(), end).await;
            }
            "api versions" => api_versions(&file).await,
            other => panic!("there is no part {other:?}"),
        }
    });
    notibus::store::stop_network();
    Some(ExitCode::SUCCESS)
}

/// Prints a line for the parent.
pub(crate) fn report(line: &str) {
    let mut output = std::io::stdout().lock();
    // The parent may be gone, in which case this part is about to end.
    let _ = writeln!(output, "{line}").and_then(|()| output.flush());
}

async fn bus(file: &str) -> notibus::Bus {
    let prefix = std::env::var(PREFIX).expect("the parent sets the prefix");
    fixture::bus(&fixture::open(file).await, prefix.as_bytes()).await
}

async fn notifier(file: &str, end: oneshot::Receiver<()>) {
    let notifier = joined(&bus(file).await).await.notifier(eager()).await.expect("the notifier starts");
    report("ready");
    let _ = end.await;
    notifier.shutdown().await.expect("the leases can be released");
}

/// Prints each delivery: the name of the database, and its number of updates.
async fn dispatcher(file: &str, end: oneshot::Receiver<()>) {
    let bus = bus(file).await;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.expect("the dispatcher starts");
    let stream = dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING);
    let mut stream = stream.deliveries(|trouble| panic!("the feed can be read: {trouble}"));
    report("ready");
    let report_all = async {
        while let Some(delivery) = stream.next().await {
            let row = delivery.notification();
            report(&format!("{} {}", row.name, row.totals.lanes()[2]));
        }
    };
    tokio::select! {
        () = report_all => {}
        _ = end => {}
    }
    drop(stream);
    dispatcher.shutdown().await;
}

/// Opens the cluster, and ends with a transaction and a watch still in progress.
async fn client(file: &str, end: oneshot::Receiver<()>) {
    let store = fixture::open(file).await;
    let reading = store.begin();
    reading.read_version().await.expect("the cluster answers");
    let watch = store.run(async |tx| tx.watch(b"client").await).await.expect("a watch can be set");
    report("ready");
    let _ = end.await;
    drop((reading, watch));
}

/// Runs the layer example, and reports in one line what was delivered to it.
async fn layer(file: &str, end: oneshot::Receiver<()>) {
    // This starts the network, which must run.
    drop(fixture::open(file).await);
    let delivered = crate::layer::run(file).await.expect("the example runs");
    report(&delivered.replace('\n', "; "));
    let _ = end.await;
}

/// Requests API versions that do not exist, which must do no harm.
async fn api_versions(file: &str) {
    let open = async |api_version| {
        let options = FoundationDbOptions::default().api_version(api_version);
        Store::foundationdb_with(file, &options).await.map(drop)
    };
    for bad in [10_000, i32::MAX, -1, 0, 13, 500] {
        match open(bad).await {
            Err(Error::Invalid { what: "API version", .. }) => {}
            other => panic!("{bad}: {other:?}"),
        }
    }
    open(710).await.expect("a good version after bad ones");
    open(710).await.expect("the same version again");
    match open(700).await {
        Err(Error::Invalid { what: "API version", reason }) => assert!(reason.contains("710"), "{reason}"),
        other => panic!("{other:?}"),
    }
    report("done");
}
