//! A private FoundationDB cluster for tests: real `fdbserver` processes on loopback, in a temporary folder.
//!
//! `NOTIBUS_FDBSERVER` and `NOTIBUS_FDBCLI` name the programs; otherwise they are looked up on the path. If there are none, the tests that
//! need them report that they were skipped.
//!
//! Each server is the child of a shell that waits for its standard input to end. However the test process ends, that pipe
//! closes, and the shell stops the server by its process id.

#![allow(clippy::unwrap_used, dead_code, reason = "a test fails by panicking, and uses a part of it")]

use std::{
    env, fs,
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// How long to wait for a server.
const PATIENCE: Duration = Duration::from_mins(3);

/// Starts a server, notes its process id, and stops it once the standard input ends.
const GUARD: &str =
    r#"pidfile=$1; shift; "$@" >/dev/null 2>&1 & echo $! >"$pidfile"; cat >/dev/null; kill -KILL $!; wait"#;

/// A running cluster. Dropping it stops its processes.
pub struct Cluster {
    servers: Vec<Server>,
    folder: TempDir,
    programs: Programs,
}

struct Server {
    port: u16,
    class: &'static str,
    /// The shell that stops the server.
    guard: Child,
}

/// Where FoundationDB's programs are.
#[derive(Clone)]
struct Programs {
    server: PathBuf,
    /// The command-line client.
    cli: PathBuf,
}

impl Programs {
    /// Finds the programs, or returns which one is missing.
    fn find() -> Result<Self, String> {
        let find = |name: &str, variable: &str| {
            if let Some(path) = env::var_os(variable) {
                let path = PathBuf::from(path);
                return if path.is_file() { Ok(path) } else { Err(format!("{variable} names no file")) };
            }
            let folders = env::var_os("PATH").unwrap_or_default();
            let found =
                env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file());
            found.ok_or_else(|| format!("there is no {name} on the path, and {variable} is not set"))
        };
        Ok(Self { server: find("fdbserver", "NOTIBUS_FDBSERVER")?, cli: find("fdbcli", "NOTIBUS_FDBCLI")? })
    }
}

/// Returns whether the programs are missing, and prints which ones.
pub fn is_missing() -> bool {
    let missing = Programs::find().err();
    if let Some(missing) = &missing {
        eprintln!("SKIPPED, not passed: every test that needs FoundationDB: {missing}");
    }
    missing.is_some()
}

impl Cluster {
    /// Starts a cluster of one process. The programs must not be missing.
    pub fn start() -> Self {
        Self::start_of(&["unset"])
    }

    /// Starts a cluster of two processes: the second one keeps the data, the first one does everything else.
    pub fn start_apart() -> Self {
        Self::start_of(&["transaction", "storage"])
    }

    /// Starts a cluster with a process of each of these classes, of which the first is the coordinator.
    fn start_of(classes: &[&'static str]) -> Self {
        let programs = Programs::find().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        fs::write(folder.path().join("fdb.cluster"), format!("notibus:test@127.0.0.1:{port}\n")).unwrap();
        let mut cluster = Self { servers: Vec::new(), folder, programs };
        cluster.start_server(port, classes[0]);
        for class in &classes[1..] {
            cluster.start_server(free_port(), class);
        }
        if classes.len() > 1 {
            // All servers must have joined before one of them is chosen to store the data.
            thread::sleep(Duration::from_secs(3));
        }
        // On a busy machine the first attempt can give up before the server listens.
        let started = Instant::now();
        while !cluster.cli("configure new single ssd").contains("Database created")
            && !cluster.cli("status minimal").contains("The database is available")
        {
            assert!(started.elapsed() < PATIENCE, "the cluster cannot be configured");
        }
        cluster.wait_until_available();
        cluster
    }

    /// Returns the path of the cluster file.
    pub fn file(&self) -> PathBuf {
        self.folder.path().join("fdb.cluster")
    }

    /// Starts another server, which joins the cluster.
    pub fn add_server(&mut self) {
        self.start_server(free_port(), "unset");
    }

    /// Returns the address of server number `number`.
    pub fn address(&self, number: usize) -> String {
        format!("127.0.0.1:{}", self.servers[number].port)
    }

    /// Returns the process ids of the servers.
    pub fn ids(&self) -> Vec<u32> {
        let id = |server: &Server| {
            let file = self.folder.path().join(server.port.to_string()).join("pid");
            fs::read_to_string(file).unwrap().trim().parse().unwrap()
        };
        self.servers.iter().map(id).collect()
    }

    /// Kills server number `number` at once, as a crash would.
    pub fn kill_server(&mut self, number: usize) {
        let server = &mut self.servers[number];
        // The guard kills it when its standard input ends.
        drop(server.guard.stdin.take());
        server.guard.wait().unwrap();
    }

    /// Starts server number `number` again, on its old data.
    pub fn restart_server(&mut self, number: usize) {
        let Server { port, class, .. } = self.servers[number];
        let server = self.spawn(port, class);
        self.servers[number] = server;
    }

    fn start_server(&mut self, port: u16, class: &'static str) {
        let server = self.spawn(port, class);
        self.servers.push(server);
    }

    fn spawn(&self, port: u16, class: &'static str) -> Server {
        let folder = self.folder.path().join(port.to_string());
        fs::create_dir_all(&folder).unwrap();
        let guard = Command::new("sh")
            .args(["-c", GUARD, "guard"])
            .arg(folder.join("pid"))
            .arg(&self.programs.server)
            .args(["--public-address", &format!("127.0.0.1:{port}")])
            .arg("--cluster-file")
            .arg(self.file())
            .arg("--datadir")
            .arg(folder.join("data"))
            .arg("--logdir")
            .arg(folder.join("log"))
            .args(["--class", class])
            .args(["--memory", "4GiB", "--cache-memory", "512MiB"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Server { port, class, guard }
    }

    /// Runs a command of `fdbcli` and returns what it printed.
    pub fn cli(&self, command: &str) -> String {
        let output = Command::new(&self.programs.cli)
            .arg("-C")
            .arg(self.file())
            .args(["--timeout", "60", "--exec", command])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Locks the database; returns the id that unlocks it.
    pub fn lock(&self) -> String {
        let answer = self.cli("lock");
        let uid = answer.split_once("lockUID: ").expect("it is locked").1;
        uid.lines().next().unwrap().trim().to_owned()
    }

    /// Unlocks the database. The command prints a word that must be entered to confirm.
    pub fn unlock(&self, uid: &str) {
        let mut command = Command::new(&self.programs.cli);
        command.arg("-C").arg(self.file()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut cli = command.spawn().unwrap();
        let mut input = cli.stdin.take().unwrap();
        let mut lines = BufReader::new(cli.stdout.take().unwrap()).lines().map_while(Result::ok);
        writeln!(input, "unlock {uid}").unwrap();
        lines.find(|line| line.contains("dangerous")).unwrap();
        let word = lines.next().unwrap();
        writeln!(input, "{}", word.rsplit(' ').next().unwrap()).unwrap();
        drop(input);
        assert!(lines.any(|line| line.contains("unlocked")), "it is unlocked");
        cli.wait().unwrap();
    }

    /// Waits until the cluster accepts transactions.
    pub fn wait_until_available(&self) {
        let started = Instant::now();
        loop {
            let status = self.cli("status minimal");
            if status.contains("The database is available") {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "the cluster is not available: {status}");
            thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for server in &mut self.servers {
            drop(server.guard.stdin.take());
            // The server may have been killed before.
            let _ = server.guard.wait();
        }
    }
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns a port that no process uses.
fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}
