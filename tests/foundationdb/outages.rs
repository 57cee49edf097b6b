//! A cluster that is away, locked or wiped under a running node: the reports of the node and of commands, and how all of it ends.
//!
//! `docs/foundationdb.md` has a table of these states.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;
use tokio::task::block_in_place;

use crate::{
    cluster::{Cluster, text},
    served::{Served, notibus},
};

/// How long to wait for a state to be reported.
const PATIENCE: Duration = Duration::from_mins(1);

/// A node on its own cluster, with its log.
struct Stage {
    cluster: Cluster,
    served: Served,
    folder: TempDir,
    store: String,
}

impl Stage {
    /// Starts both.
    fn start(cluster: Cluster) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = format!("fdb:{}", text(&cluster.file()));
        let log = File::create(folder.path().join("log")).unwrap();
        let served = Served::start_logging(&["--store", &store, "--deadline", "6s"], None, log.into());
        let this = Self { cluster, served, folder, store };
        this.until_ready("\"status\":\"ok\"");
        this
    }

    /// The node's answer to `ready`.
    fn ready(&self) -> String {
        self.served.get("/_notibus/health/ready")
    }

    /// Waits until that answer contains `expected`.
    fn until_ready(&self, expected: &str) {
        let began = Instant::now();
        loop {
            let ready = self.ready();
            if ready.contains(expected) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "not {expected}: {ready}");
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// The lines of its log about failures.
    fn troubles(&self) -> Vec<String> {
        let log = fs::read_to_string(self.folder.path().join("log")).unwrap();
        let is_trouble = |line: &&str| line.contains("WARN") || line.contains("ERROR");
        log.lines().filter(is_trouble).map(str::to_owned).collect()
    }

    /// The exit code and text of a command that finds no answer.
    fn command(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let mut command = notibus();
        let output = command.args(arguments).args(["--store", &self.store, "--deadline", "3s"]).output();
        let output = output.unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&text).into_owned())
    }

    /// Asserts that commands give up and say so.
    fn commands_give_up(&self) {
        let history = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/replay/sample.tsv.gz");
        for arguments in [
            &["nodes"][..],
            &["topology", "show"],
            &["groups", "list"],
            &["tail"],
            &["groups", "create", "late"],
            // Regression: these two waited until the cluster was back.
            &["record", "late"],
            &["replay", history, "--prefix", "replayed"],
        ] {
            let began = Instant::now();
            let (code, said) = self.command(arguments);
            assert_eq!(code, Some(1), "{arguments:?}: {said}");
            let is_said = said.contains("gave up") || said.contains("did not answer");
            assert!(is_said, "{arguments:?}: {said}");
            assert!(began.elapsed() < PATIENCE, "{arguments:?}");
        }
    }

    /// Begins to post an event, and does not wait for the answer.
    fn begin_to_post(&self) -> TcpStream {
        let mut socket = TcpStream::connect(self.served.at).unwrap();
        let body = r#"[{"db":"late","type":"created"}]"#;
        let length = body.len();
        write!(
            socket,
            "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        socket
    }

    /// Posts an event; returns the answer.
    fn post(&self) -> String {
        answer_to(self.begin_to_post())
    }

    /// Waits until the log says `text`.
    fn until_logged(&self, text: &str) {
        let began = Instant::now();
        while !self.troubles().iter().any(|line| line.contains(text)) {
            assert!(began.elapsed() < PATIENCE, "nobody says {text}: {:#?}", self.troubles());
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Whether the log says that everything works, after the last trouble that it has said. Within its pause a cause is not
    /// said again, and then neither is its end.
    fn is_recovery_logged(&self) -> bool {
        let is_either = |line: &&String| line.contains("trying again") || line.contains("works again");
        self.troubles().iter().rfind(is_either).is_some_and(|line| line.contains("works again"))
    }

    /// Reads the feed as it grows.
    fn follow(&self) -> Follower {
        let mut socket = TcpStream::connect(self.served.at).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let target = "/_db_updates?feed=continuous&since=now&heartbeat=1000";
        write!(socket, "GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut follower = Follower(BufReader::new(socket));
        assert!(follower.line().starts_with("HTTP/1.1 200"));
        follower
    }

    /// Asserts the state while the store is away or locked: posts are refused within a minute, and feeds go on with heartbeats.
    fn is_out_of_work(&self, follower: &mut Follower) {
        let posted = self.begin_to_post();
        follower.until_heartbeat();
        let answer = answer_to(posted);
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        follower.until_heartbeat();
    }

    /// Asserts the state after recovery: posts are accepted, feeds have their rows, commands work, and the log says so.
    fn is_at_work(&self, follower: &mut Follower) {
        self.until_ready("\"status\":\"ok\"");
        assert!(self.post().starts_with("HTTP/1.1 201"));
        follower.until_row("late");
        // The log says so once everything works, which may be some seconds after the first row.
        let began = Instant::now();
        while !self.is_recovery_logged() {
            assert!(began.elapsed() < PATIENCE, "{:#?}", self.troubles());
            thread::sleep(Duration::from_millis(100));
        }
        let (code, said) = self.command(&["nodes"]);
        assert_eq!(code, Some(0), "{said}");
    }
}

/// The answer on `socket`. There is one, whatever the cluster does.
fn answer_to(mut socket: TcpStream) -> String {
    let mut answer = String::new();
    socket.set_read_timeout(Some(2 * PATIENCE)).unwrap();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

/// A client that reads a feed as it grows.
struct Follower(BufReader<TcpStream>);

impl Follower {
    /// The next line.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the feed has ended");
        line
    }

    /// Waits for the next heartbeat: a chunk of one empty line.
    fn until_heartbeat(&mut self) {
        while self.line() != "1\r\n" {}
        assert_eq!(self.line(), "\n");
    }

    /// Waits for a row about `name`.
    fn until_row(&mut self, name: &str) {
        while !self.line().contains(name) {}
    }

    /// Reads until the feed ends.
    fn until_end(mut self) {
        let mut rest = Vec::new();
        self.0.read_to_end(&mut rest).unwrap();
    }
}

/// Regression: `ready` asked for a read version only: it said yes while the storage was away and nothing could be done, hid that a
/// database was locked, and commands waited for ever.
pub(crate) async fn a_node_reports_its_state() {
    block_in_place(|| {
        let mut stage = Stage::start(Cluster::start_apart());
        let mut follower = stage.follow();
        assert!(stage.post().starts_with("HTTP/1.1 201"));
        follower.until_row("late");
        assert_eq!(stage.troubles(), [""; 0], "all is well");

        let uid = stage.cluster.lock();
        stage.until_ready("\"cause\":\"locked\"");
        let (code, said) = stage.command(&["nodes"]);
        assert!(code != Some(0) && said.contains("locked"), "{said}");
        stage.is_out_of_work(&mut follower);
        stage.cluster.unlock(&uid);
        stage.is_at_work(&mut follower);

        // Regression: posts meanwhile were not answered before the cluster was back. The outage is long enough for every attempt to
        // fail.
        for server in [1, 0] {
            let before = stage.troubles().len();
            stage.cluster.kill_server(server);
            stage.until_ready("\"cause\":\"away\"");
            stage.commands_give_up();
            stage.is_out_of_work(&mut follower);
            let troubles = stage.troubles().split_off(before);
            assert!(troubles.len() < 10, "they are few: {troubles:#?}");
            stage.cluster.restart_server(server);
            stage.is_at_work(&mut follower);
        }
        assert!(stage.served.stop(), "it ends in order");
    });
}

/// Regression: a node whose bus was wiped said that it was ready, answered that there were no databases, and logged 65 lines a second.
pub(crate) async fn a_node_of_a_wiped_bus_stops_its_roles() {
    block_in_place(|| {
        let stage = Stage::start(Cluster::start());
        let follower = stage.follow();
        assert!(stage.post().starts_with("HTTP/1.1 201"));
        stage.cluster.cli("writemode on; clearrange \"\" \\xff");
        stage.until_ready("\"cause\":\"gone\"");
        stage.until_logged("start it again");
        let live = stage.served.get("/_notibus/health/live");
        assert!(live.starts_with("HTTP/1.1 503"), "only a restart helps: {live}");
        follower.until_end();
        let (code, said) = stage.command(&["nodes"]);
        assert!(code != Some(0) && said.contains("there is no bus"), "{said}");
        for _ in 0..3 {
            assert!(stage.post().starts_with("HTTP/1.1 503"), "it records nothing in another bus");
            assert!(stage.served.get("/_db_updates").starts_with("HTTP/1.1 503"));
        }
        let kept = || stage.cluster.cli("getrange \"\" \\xff 1000");
        let left = kept();
        thread::sleep(Duration::from_secs(10));
        assert_eq!(kept(), left, "nothing is written any more into what is no bus");
        let troubles = stage.troubles();
        let said = troubles.iter().filter(|line| line.contains("start it again")).count();
        assert_eq!(said, 1, "{troubles:#?}");
        assert!(troubles.len() < 10, "they are few: {troubles:#?}");
        assert!(stage.served.stop(), "it ends in order");
    });
}

/// Regression: a damaged fold mark stopped its partition.
pub(crate) async fn a_node_whose_fold_marks_are_damaged_goes_on() {
    block_in_place(|| {
        let stage = Stage::start(Cluster::start());
        let mut follower = stage.follow();
        let partition =
            |number: u8| if number == 0 { r"\x14".to_owned() } else { format!(r"\x15\x{number:02x}") };
        let damage = (0..64).map(|number| format!(r"; set notibus\x15\x03{} x", partition(number)));
        stage.cluster.cli(&format!("writemode on{}", damage.collect::<String>()));
        assert!(stage.post().starts_with("HTTP/1.1 201"), "it is recorded");
        follower.until_row("late");
        stage.until_ready("\"status\":\"ok\"");
        assert!(stage.served.stop(), "it ends in order");
    });
}

/// What nobody can decode in the place of the newest topology entry keeps roles from their work: the node says what fails, and goes on once
/// it is mended.
pub(crate) async fn a_node_of_which_a_role_fails_tells_which() {
    block_in_place(|| {
        let stage = Stage::start(Cluster::start());
        let mut follower = stage.follow();
        let topology = format!(r"notibus\x15\x07\x01n\x00\x14\x33{}", r"\xff".repeat(12));
        stage.cluster.cli(&format!("writemode on; set {topology} x"));
        stage.until_ready("fold of a partition");
        assert!(stage.ready().contains("\"cause\":\"behind\""), "{}", stage.ready());
        follower.until_heartbeat();
        let (code, said) = stage.command(&["nodes"]);
        assert_eq!(code, Some(0), "{said}");
        thread::sleep(Duration::from_secs(5));
        let troubles = stage.troubles();
        let said = troubles.iter().filter(|line| line.contains("fold of a partition")).count();
        assert_eq!(said, 1, "{troubles:#?}");
        stage.cluster.cli(&format!("writemode on; clear {topology}"));
        stage.is_at_work(&mut follower);
        assert!(stage.served.stop(), "it ends in order");
    });
}

/// Regression: a node that was asked to stop while the cluster was away waited until it was back, and no further signal helped.
pub(crate) async fn everything_ends_without_the_cluster() {
    block_in_place(|| {
        let mut stage = Stage::start(Cluster::start());
        stage.cluster.kill_server(0);
        let _open = stage.begin_to_post();
        stage.until_ready("\"cause\":\"away\"");
        stage.commands_give_up();

        let began = Instant::now();
        stage.served.ask_to_stop();
        let Stage { served, folder, mut cluster, .. } = stage;
        assert_eq!(served.wait(), Some(1), "it did not end in order");
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        let log = fs::read_to_string(folder.path().join("log")).unwrap();
        assert!(log.contains("gave up "), "{log}");

        cluster.restart_server(0);
        cluster.wait_until_available();
        let mut stage = Stage::start(cluster);
        stage.cluster.kill_server(0);
        let _open = stage.begin_to_post();
        stage.until_ready("\"cause\":\"away\"");
        stage.served.ask_to_stop();
        thread::sleep(Duration::from_millis(500));
        let began = Instant::now();
        stage.served.ask_to_stop();
        assert_eq!(stage.served.wait(), Some(130));
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    });
}
