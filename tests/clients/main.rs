//! Existing clients of CouchDB against `examples/mini_couch`: each creates, updates and deletes databases and documents, and must see
//! exactly these changes in the feeds. Those that follow `_db_updates` do so on `notibus serve`, too.
//!
//! Each trial is a script beside this file, in the language of its client; one runs the commands in docs/http.md. Each runs on a server of
//! its own: this program, run again as the example's `main`, so that the server is never an outdated build. The clients are installed by
//! `tests/clients/install`; if they are missing, their trials are shown as ignored, not as passed.

#![allow(clippy::unwrap_used, reason = "a trial fails by panicking")]

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Seek},
    net::TcpListener,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Trial};
use notibus::http::Credentials;

mod live_page;
#[path = "../../examples/mini_couch/main.rs"]
mod mini_couch;

/// Set in the process that runs as the server.
const SERVE: &str = "NOTIBUS_SERVE_MINI_COUCH";

/// How long a script may run.
const SCRIPT_LIMIT: Duration = Duration::from_mins(2);

/// How long the server may take to end.
const END_LIMIT: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    if std::env::var_os(SERVE).is_some() {
        return mini_couch::main().map_or_else(
            |error| {
                eprintln!("{error}");
                ExitCode::FAILURE
            },
            |()| ExitCode::SUCCESS,
        );
    }
    let node = Runtime::new("npm", "node", "node_modules/follow");
    let python = Runtime::new("python", "python/bin/python", "python/bin/python");
    let has_curl = Command::new("curl").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !has_curl {
        println!("SKIPPED, not passed: what a page tells to type needs curl");
    }
    let shell = Runtime { command: "bash".into(), is_installed: has_curl };
    let go = Runtime::new("go", "session_kivik/kivik", "session_kivik/kivik");
    let trials = vec![
        shell.trial("as_typed.sh"),
        node.trial("nano.js"),
        node.trial("eventsource.js"),
        node.trial("pouchdb.js"),
        node.trial("ibm_cloudant.js"),
        node.trial("session.js"),
        node.trial("follow.js"),
        node.trial("changes_stream.js"),
        node.trial_in_browser("browser.js"),
        live_page::trial(),
        python.trial("cloudant_updates.py"),
        python.trial("pycouchdb_updates.py"),
        python.trial("session_updates.py"),
        go.trial("session_kivik/main.go"),
        node.trial_on_serve("serve_updates.js"),
        python.trial_on_serve("serve_updates.py"),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Runs scripts of one kind.
struct Runtime {
    command: PathBuf,
    /// Whether the clients for this runtime are installed.
    is_installed: bool,
}

impl Runtime {
    /// Makes the runtime `command` for the clients from `origin`, which count as installed if `witness` exists.
    fn new(origin: &str, command: &str, witness: &str) -> Self {
        let installed = clients();
        let is_installed =
            installed.join(format!("{origin}.installed")).exists() && installed.join(witness).exists();
        if !is_installed {
            println!("SKIPPED, not passed: the clients of {origin} are not there; run tests/clients/install");
        }
        let own = installed.join(command);
        let command = if own.exists() { own } else { command.into() };
        Self { command, is_installed }
    }

    fn trial(&self, script: &'static str) -> Trial {
        let command = self.command.clone();
        let trial = Trial::test(script, move || {
            let server = Server::mini_couch(script.starts_with("session"), None);
            run(Command::new(command), script, server, Stdio::null());
            Ok(())
        });
        trial.with_ignored_flag(!self.is_installed)
    }

    /// Makes the trial that runs `script` on `notibus serve`, where anna is the admin.
    fn trial_on_serve(&self, script: &'static str) -> Trial {
        let (command, notibus) = (self.command.clone(), option_env!("CARGO_BIN_EXE_notibus"));
        if notibus.is_none() {
            println!("SKIPPED, not passed: clients on `notibus serve` need the feature `cli`");
        }
        let trial = Trial::test(script, move || {
            let mut command = Command::new(command);
            command.env("NOTIBUS_SECRET", SECRET);
            run(command, script, Server::notibus(notibus.expect("it is not ignored")), Stdio::null());
            Ok(())
        });
        trial.with_ignored_flag(!self.is_installed || notibus.is_none())
    }

    /// Makes the trial that runs `script`, which shows a page of another origin in a browser.
    fn trial_in_browser(&self, script: &'static str) -> Trial {
        let (command, browser) = (self.command.clone(), browser());
        if browser.is_none() {
            println!(
                "SKIPPED, not passed: there is no browser; install chromium-headless-shell, or set NOTIBUS_BROWSER"
            );
        }
        let is_ignored = !self.is_installed || browser.is_none();
        let trial = Trial::test(script, move || {
            // The page's origin must be known before the server starts, so the port is reserved until the page is served.
            let page = TcpListener::bind("127.0.0.1:0").unwrap();
            let origin = format!("http://{}", page.local_addr().unwrap());
            let mut command = Command::new(command);
            command.env("NOTIBUS_BROWSER", browser.unwrap_or_default());
            let server = Server::mini_couch(false, Some(&origin));
            run(command, script, server, OwnedFd::from(page).into());
            Ok(())
        });
        trial.with_ignored_flag(is_ignored)
    }
}

/// Finds a headless browser, if one is installed.
fn browser() -> Option<PathBuf> {
    let set = std::env::var_os("NOTIBUS_BROWSER").map(PathBuf::from);
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let names = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"];
    let found = std::env::split_paths(&folders)
        .flat_map(|folder| names.map(|name| folder.join(name)))
        .find(|file| file.exists());
    set.or(found)
}

/// Returns the folder of the installed clients.
fn clients() -> PathBuf {
    let temporary = Path::new(env!("CARGO_TARGET_TMPDIR"));
    temporary.parent().expect("it lies in the target folder").join("clients")
}

/// Runs `script` on `server`, with this standard input.
fn run(mut command: Command, script: &str, server: Server, stdin: Stdio) {
    let mut output = tempfile::tempfile().unwrap();
    let mut process = command
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(script))
        .arg(&server.address)
        .env("NODE_PATH", clients().join("node_modules"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(stdin)
        .stdout(output.try_clone().unwrap())
        .stderr(output.try_clone().unwrap())
        .spawn()
        .unwrap();
    let status = end_of(&mut process, SCRIPT_LIMIT);
    let ended = status.is_some_and(|status| status.success());
    assert!(ended, "{script} ended with {status:?}:\n{}", text(&mut output));
    server.end();
}

/// Waits until `process` ends; kills it after `limit`.
fn end_of(process: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if let Some(status) = process.try_wait().unwrap() {
            return Some(status);
        }
        thread::sleep(Duration::from_millis(10));
    }
    process.kill().unwrap();
    process.wait().unwrap();
    None
}

fn text(file: &mut File) -> String {
    let mut text = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut text).unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

/// The secret of anna, which clients send as her password.
const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// A server, in memory. Dropping it kills it.
struct Server {
    process: Child,
    /// The address on which the server listens.
    address: String,
}

impl Server {
    /// Starts the example on a free port. If it `has_accounts`, there is a user anna with [`SECRET`]. Pages of `origin` may use the server.
    fn mini_couch(has_accounts: bool, origin: Option<&str>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        if has_accounts {
            command.env("MINI_COUCH_CREDENTIALS", Credentials::line("anna", SECRET).unwrap());
        }
        if let Some(origin) = origin {
            command.env("MINI_COUCH_ORIGIN", origin);
        }
        command.arg("127.0.0.1:0").env(SERVE, "1");
        Self::start(command)
    }

    /// Starts the command `notibus serve` on a free port. Its admin is anna with [`SECRET`].
    fn notibus(notibus: &str) -> Self {
        let mut command = Command::new(notibus);
        command.args(["serve", "--store", "memory", "--listen", "127.0.0.1:0"]);
        command.env("NOTIBUS_CREDENTIALS", Credentials::line("anna", SECRET).unwrap());
        Self::start(command)
    }

    fn start(mut command: Command) -> Self {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit(' ').next().unwrap().to_owned();
        Self { process, address }
    }

    /// Ends the server by closing its input and by a signal; it must end cleanly.
    fn end(mut self) {
        drop(self.process.stdin.take());
        let _ = Command::new("kill").arg(self.process.id().to_string()).status();
        let status = end_of(&mut self.process, END_LIMIT);
        assert!(status.is_some_and(|status| status.success()), "the server ended with {status:?}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
