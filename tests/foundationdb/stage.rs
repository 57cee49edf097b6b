//! [`Stage`]: a node under `notibus serve` on a cluster of its own, with its log, a client that posts, and clients that follow.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{
    cluster::{Cluster, text},
    served::{Served, notibus},
};

/// How long to wait for expected events before the test fails.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);

const POSTED: usize = 16;

/// Commands that only read.
pub(crate) const COMMANDS: [&[&str]; 4] =
    [&["nodes"], &["topology", "show"], &["consumers", "list"], &["tail"]];

/// The same commands, and commands that write.
///
/// Regression: the last of these commands had no time limit, so it waited until the cluster was back.
pub(crate) const ALL_COMMANDS: [&[&str]; 6] = [
    COMMANDS[0],
    COMMANDS[1],
    COMMANDS[2],
    COMMANDS[3],
    &["consumers", "create", "late"],
    &["record", "late"],
];

/// Texts, one of which a command prints if it gets no answer.
pub(crate) const NO_ANSWER: &[&str] = &["gave up", "did not answer"];

/// A node on its own cluster, with its log.
pub(crate) struct Stage {
    pub cluster: Cluster,
    pub served: Served,
    pub log: Log,
    store: String,
}

pub(crate) struct Log(TempDir);

impl Log {
    /// Returns the whole log.
    pub fn text(&self) -> String {
        fs::read_to_string(self.0.path().join("log")).unwrap()
    }

    /// Returns the lines of the log that are warnings or errors.
    pub fn troubles(&self) -> Vec<String> {
        let is_trouble = |line: &&str| line.contains("WARN") || line.contains("ERROR");
        self.text().lines().filter(is_trouble).map(str::to_owned).collect()
    }

    /// Whether the log says that everything works again after the last failure that it names. If a cause recurs during its pause, neither
    /// the failure nor its end is logged.
    fn is_over(&self) -> bool {
        let is_either = |line: &&String| line.contains("trying again") || line.contains("works again");
        self.troubles().iter().rfind(is_either).is_none_or(|line| line.contains("works again"))
    }
}

/// The exit code and the output of a command.
#[derive(Debug)]
pub(crate) struct Said {
    pub code: Option<i32>,
    pub text: String,
}

impl Stage {
    /// Starts a node on `cluster`.
    pub fn start(cluster: Cluster) -> Self {
        let store = format!("fdb:{}", text(&cluster.file()));
        let (served, log) = serve(&store);
        let this = Self { cluster, served, log, store };
        this.until_ready("200", "\"status\":\"ok\"");
        this
    }

    /// Shuts the node down cleanly, and starts another one with its own log.
    pub fn restart_node(&mut self) {
        let (served, log) = serve(&self.store);
        assert!(std::mem::replace(&mut self.served, served).stop(), "it ends in order");
        self.log = log;
        self.until_ready("200", "\"status\":\"ok\"");
    }

    /// Waits until the node's answer to `ready` has this status and contains `expected`.
    pub fn until_ready(&self, status: &str, expected: &str) {
        self.until_health("ready", status, expected);
    }

    /// Waits until the node's answer to `live` has this status.
    pub fn until_live(&self, status: &str) {
        self.until_health("live", status, "");
    }

    /// Waits until this health endpoint of the node returns this status and a body that contains `expected`.
    fn until_health(&self, what: &str, status: &str, expected: &str) {
        let began = Instant::now();
        loop {
            let health = self.served.get(&format!("/_notibus/health/{what}"));
            if status_of(&health) == status && health.contains(expected) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{what} is not {status} with {expected}: {health}");
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// Runs a command that gives up after 3 s if the store does not answer.
    pub fn command(&self, arguments: &[&str]) -> Said {
        let mut command = notibus();
        let output = command.args(arguments).args(["--store", &self.store, "--timeout", "3s"]).output();
        let output = output.unwrap();
        let text = [output.stdout, output.stderr].concat();
        Said { code: output.status.code(), text: String::from_utf8_lossy(&text).into_owned() }
    }

    /// Runs all `commands` at once, and asserts that each exits with `code` and prints one of `expected`.
    pub fn commands_say(&self, commands: &[&[&str]], code: i32, expected: &[&str]) {
        thread::scope(|scope| {
            for arguments in commands {
                scope.spawn(move || {
                    let said = self.command(arguments);
                    let is_said = expected.iter().any(|text| said.text.contains(text));
                    assert!(
                        said.code == Some(code) && is_said,
                        "{arguments:?}, not {code} with {expected:?}: {said:?}"
                    );
                });
            }
        });
    }

    /// Posts events without waiting for the answer.
    pub fn begin_to_post(&self) -> TcpStream {
        let event = |number| format!(r#"{{"db":"{}","type":"created"}}"#, name(number));
        let body = format!("[{}]", (0..POSTED).map(event).collect::<Vec<_>>().join(","));
        let length = body.len();
        let mut socket = TcpStream::connect(self.served.at).unwrap();
        write!(
            socket,
            "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        socket
    }

    /// Requests one row of the feed without waiting for new rows, and returns the status of the answer.
    pub fn list(&self) -> String {
        let mut socket = TcpStream::connect(self.served.at).unwrap();
        let target = "/_db_updates?limit=1";
        write!(socket, "GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        status_of(&answer_to(socket))
    }

    /// Posts events; returns the status of the answer.
    pub fn post(&self) -> String {
        status_of(&answer_to(self.begin_to_post()))
    }

    /// Starts a follower that reads the feed from now on.
    pub fn follow(&self) -> Follower {
        let mut follower = Follower::start(self, "since=now");
        assert_eq!(status_of(&follower.line()), "200");
        follower
    }

    /// Asserts that the node works: it is ready, posts are accepted, feeds have their rows, commands work, and a log that names a failure
    /// also says that everything works again.
    pub fn works(&self, follower: &mut Follower) {
        self.until_ready("200", "\"status\":\"ok\"");
        follower.seen.clear();
        assert_eq!(self.post(), "201");
        follower.until_all_rows();
        // The log reports that everything works again, perhaps a few seconds after the first row.
        let began = Instant::now();
        while !self.log.is_over() {
            assert!(began.elapsed() < PATIENCE, "{:#?}", self.log.troubles());
            thread::sleep(Duration::from_millis(100));
        }
        self.commands_say(&COMMANDS, 0, &[""]);
    }
}

/// Starts a node on `store`.
fn serve(store: &str) -> (Served, Log) {
    let folder = tempfile::tempdir().unwrap();
    let log = File::create(folder.path().join("log")).unwrap();
    let served = Served::start_logging(&["--store", store, "--timeout", "6s"], None, log.into());
    (served, Log(folder))
}

/// Returns the name of database number `number` in a post.
fn name(number: usize) -> String {
    format!("late-{number:02}")
}

pub(crate) fn status_of(answer: &str) -> String {
    answer.split(' ').nth(1).unwrap_or_default().to_owned()
}

/// Reads the answer on `socket`. An answer must arrive, whatever the cluster does.
pub(crate) fn answer_to(mut socket: TcpStream) -> String {
    let mut answer = String::new();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

/// A client that reads a feed as it grows.
pub(crate) struct Follower {
    feed: BufReader<TcpStream>,
    /// The posted databases for which the client has received rows.
    pub seen: BTreeSet<String>,
}

impl Follower {
    /// Requests a feed, but reads nothing yet.
    pub fn start(stage: &Stage, since: &str) -> Self {
        let mut socket = TcpStream::connect(stage.served.at).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let target = format!("/_db_updates?feed=continuous&{since}&heartbeat=1000");
        write!(socket, "GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        Self { feed: BufReader::new(socket), seen: BTreeSet::new() }
    }

    /// Reads the next line.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.feed.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the feed has ended");
        self.seen.extend((0..POSTED).map(name).filter(|name| line.contains(&format!("\"{name}\""))));
        line
    }

    /// Waits for the next heartbeat: a chunk of one empty line.
    pub fn until_heartbeat(&mut self) {
        while self.line() != "1\r\n" {}
        assert_eq!(self.line(), "\n");
    }

    /// Waits for a row of each posted database.
    pub fn until_all_rows(&mut self) {
        while self.seen.len() < POSTED {
            self.line();
        }
    }

    /// Reads until the feed ends. Returns whether it ended cleanly rather than being cut off.
    pub fn until_end(mut self) -> bool {
        let mut rest = Vec::new();
        // A connection that is cut off may be reset.
        let end = self.feed.read_to_end(&mut rest);
        end.is_ok() && rest.ends_with(b"0\r\n\r\n")
    }
}
