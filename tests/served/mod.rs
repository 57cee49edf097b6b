//! Runs `notibus serve` as a process, with a minimal client; and fills folders for commands.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use notibus::{Bus, BusOptions, Db, DbInstance, StartOptions, store::Store};

/// How long a test waits for an expected event.
pub const LIMIT: Duration = Duration::from_mins(1);

/// `notibus serve` as a process.
pub struct Served {
    child: Child,
    /// The address that it listens on.
    pub at: SocketAddr,
}

pub fn notibus() -> Command {
    Command::new(env!("CARGO_BIN_EXE_notibus"))
}

/// Runs `notibus credential` with these arguments. Returns the line and the secret.
pub fn credential(arguments: &[&str]) -> Option<(String, String)> {
    let output = notibus().arg("credential").args(arguments).output().unwrap();
    let [line, secret] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    output.status.success().then(|| (line, secret.trim_end().to_owned()))
}

/// Makes a bus in `folder` with a row for each of 60 databases, of which every third is deleted. Returns the folder as a store.
pub fn filled(folder: &Path) -> String {
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let store = Store::open_dir(folder).unwrap();
        let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
        let (running, producer) = (bus.start(StartOptions::default()).await.unwrap(), bus.producer());
        for number in 0..600_u16 {
            let db = Db::new(
                format!("db-{}", number % 60).parse().unwrap(),
                DbInstance([(number % 60) as u8; 16]),
            );
            let record = async |tx| {
                match number {
                    0..60 => producer.created(&tx, &db),
                    540.. if number % 3 == 0 => producer.deleted(&tx, &db),
                    _ => producer.updated(&tx, &db),
                }
                Ok(())
            };
            store.run(record).await.unwrap();
        }
        while !bus.is_drained().await.unwrap() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        running.shutdown().await.unwrap();
    });
    format!("dir:{}", folder.display())
}

impl Served {
    /// Starts the process with these additional arguments, and waits until it listens.
    pub fn start(arguments: &[&str], credentials: Option<&str>) -> Self {
        Self::start_logging(arguments, credentials, Stdio::inherit())
    }

    /// Like [`Served::start`], but the process writes its log to `log`.
    pub fn start_logging(arguments: &[&str], credentials: Option<&str>, log: Stdio) -> Self {
        Self::start_by(notibus(), arguments, credentials, log)
    }

    /// Like [`Served::start_logging`], but with this command.
    pub fn start_by(mut command: Command, arguments: &[&str], credentials: Option<&str>, log: Stdio) -> Self {
        command.args(["serve", "--listen", "127.0.0.1:0"]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        match credentials {
            Some(credentials) => command.env("NOTIBUS_CREDENTIALS", credentials),
            None => command.env_remove("NOTIBUS_CREDENTIALS"),
        };
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let at =
            line.trim().strip_prefix("notibus: listening on http://").expect("it listens").parse().unwrap();
        Self { child, at }
    }

    /// Returns the id of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a request. Returns the whole answer as text, from the status line on.
    pub fn ask(&self, request: &str) -> String {
        self.try_ask(request).unwrap()
    }

    /// Like [`Served::ask`], but for a process that may end before it answers.
    pub fn try_ask(&self, request: &str) -> std::io::Result<String> {
        let mut socket = TcpStream::connect(self.at)?;
        socket.set_read_timeout(Some(LIMIT))?;
        socket.write_all(request.as_bytes())?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Sends a request without a body, and returns the whole answer.
    pub fn get(&self, target: &str) -> String {
        self.ask(&format!("GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    }

    /// Returns the value of a metric without labels.
    pub fn metric(&self, name: &str) -> u64 {
        let metrics = self.get("/_notibus/metrics");
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap();
        line.trim().parse().unwrap()
    }

    /// Waits until a metric without labels has fallen to `value`.
    pub fn until_metric(&self, name: &str, value: u64) {
        let began = Instant::now();
        loop {
            let now = self.metric(name);
            if now <= value {
                return;
            }
            assert!(began.elapsed() < LIMIT, "{name} stays at {now}, and does not come down to {value}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until a metric without labels has not changed for half a second, and returns its value.
    pub fn settled(&self, name: &str) -> u64 {
        let (mut value, mut since) = (self.metric(name), Instant::now());
        while since.elapsed() < Duration::from_millis(500) {
            std::thread::sleep(Duration::from_millis(20));
            let now = self.metric(name);
            if now != value {
                (value, since) = (now, Instant::now());
            }
        }
        value
    }

    /// Asks the process to stop.
    #[cfg(unix)]
    pub fn ask_to_stop(&self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    }

    /// Waits until the process has ended. Returns its exit code.
    pub fn wait(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }

    /// Asks the process to stop, and waits until it has ended. Returns whether it ended with success.
    #[cfg(unix)]
    pub fn stop(mut self) -> bool {
        self.ask_to_stop();
        let asked = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.success();
            }
            assert!(asked.elapsed() < LIMIT, "the process does not stop");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
