//! Runs the real nginx, as `ops/nginx.conf` configures it, in front of the server. Without nginx, this test prints that it is skipped.

use std::{
    net::{SocketAddr, TcpListener},
    os::fd::OwnedFd,
    path::Path,
    process::{Child, Command, Stdio},
};

use notibus::{
    EventKind,
    http::{ApiOptions, ServerOptions},
};
use tokio::io::AsyncBufReadExt;

use crate::{
    common::{db, until},
    fixture::{HttpFixture, bearer, credentials, line, row, secret},
};

/// A real nginx process, which ends when this is dropped.
struct Nginx {
    process: Child,
    /// The address that nginx listens on.
    at: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Nginx {
    /// Starts nginx with the configuration of `ops/nginx.conf` in front of `server`. Returns `None` if there is no nginx, curl or
    /// openssl.
    fn start(server: SocketAddr) -> Option<Self> {
        for (command, version) in [("nginx", "-v"), ("curl", "--version"), ("openssl", "version")] {
            let run = Command::new(command).arg(version).stdout(Stdio::null()).stderr(Stdio::null()).status();
            if run.is_err() {
                println!("SKIPPED, not passed: there is no {command}");
                return None;
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().display();
        // nginx inherits the socket, as if from an older nginx that it replaces, so no other process can take the port first.
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = socket.local_addr().unwrap();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {place}/{name};\n"))
            .concat();
        let key = folder.path().join("key.pem");
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=db.example", "-days", "1"])
            .arg("-keyout")
            .arg(&key)
            .arg("-out")
            .arg(folder.path().join("cert.pem"))
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/ops/nginx.conf")).unwrap();
        let page = page
            .replace("127.0.0.1:5985", &server.to_string())
            .replace("listen 443 ssl", &format!("listen {at} ssl"))
            .replace("/etc/notibus", &place.to_string());
        let configuration = format!(
            "user root root;\ndaemon off;\nworker_processes 1;\npid {place}/pid;\nerror_log {place}/log;\nevents {{}}\n\
             http {{\naccess_log off;\n{temporary}{page}}}\n"
        );
        let file = folder.path().join("nginx.conf");
        std::fs::write(&file, &configuration).unwrap();
        let arguments = [Path::new("-c"), &file, Path::new("-p"), folder.path()];
        let tested = Command::new("nginx").arg("-t").args(arguments).output().unwrap();
        assert!(tested.status.success(), "{}\n{configuration}", String::from_utf8_lossy(&tested.stderr));
        // The socket already accepts connections, so there is no need to wait for nginx.
        let process = Command::new("nginx")
            .args(arguments)
            .env("NGINX", "0;")
            .stdin(OwnedFd::from(socket))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Some(Self { process, at, _folder: folder })
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // nginx ends its workers only on a signal that it can handle, so it must not be killed outright.
        drop(Command::new("kill").args(["-TERM", &self.process.id().to_string()]).status());
        drop(self.process.wait());
    }
}

#[tokio::test]
async fn behind_nginx_rows_come_at_once_over_tls_and_addresses_have_limits() {
    let options = ApiOptions::default().authorize(credentials(&[line("anna")]));
    let limits = ServerOptions::default().is_public(true).hosts(None);
    let fixture = HttpFixture::with(options, limits, |api, _, _| {
        let known = api.catalogue(api.recorded_databases()).merge(api.sessions());
        api.db_updates().merge(known)
    })
    .await;
    let Some(nginx) = Nginx::start(fixture.at()) else { return };
    let curl = |from: &str, arguments: &[&str]| {
        let mut command = tokio::process::Command::new("curl");
        command.args(["--silent", "--insecure", "--max-time", "20", "--interface", from]);
        command.args(arguments).stdout(Stdio::piped()).kill_on_drop(true);
        command
    };
    let token = bearer("anna").trim_end().to_owned();
    let at = |path: &str| format!("https://{}{path}", nginx.at);
    let status = async |from: &str, path: &str, more: &[&str]| {
        let target = at(path);
        let mut arguments = vec!["--output", "/dev/null", "--write-out", "%{http_code}", &target];
        arguments.extend(more);
        String::from_utf8(curl(from, &arguments).output().await.unwrap().stdout).unwrap()
    };
    // If nginx buffered the feed, this row would not arrive, because one row does not fill the buffer.
    let feed = at("/_db_updates?feed=continuous&since=now&heartbeat=60000");
    let mut following = curl("127.0.0.2", &["--no-buffer", "-H", &token, &feed]).spawn().unwrap();
    let mut lines = tokio::io::BufReader::new(following.stdout.take().unwrap()).lines();
    until("the feed", async || fixture.dispatcher.subscribers() > 0).await;
    let created = fixture.event(&db("a/b", 1), EventKind::Created).await;
    assert_eq!(lines.next_line().await.unwrap().unwrap(), row(&created, "created"));
    // nginx forwards the path unchanged, and log-ins set a cookie for TLS only.
    assert_eq!(status("127.0.0.3", "/a%2Fb", &["-H", &token]).await, "200");
    let form = format!("name=anna&password={}", secret("anna"));
    let target = at("/_session");
    let logged_in = curl("127.0.0.3", &["--include", "--data", &form, &target]).output().await.unwrap();
    let head = String::from_utf8(logged_in.stdout).unwrap().to_ascii_lowercase();
    assert!(head.contains("; samesite=strict; secure"), "{head}");
    // Each address has a rate for log-ins and another one for all requests; other addresses are not affected.
    let mut refused = 0;
    for _ in 0..30 {
        refused +=
            usize::from(status("127.0.0.4", "/_session", &["--data", "name=a&password=b"]).await == "429");
    }
    assert!(refused > 10, "{refused} of 30 log-ins were refused");
    assert_eq!(status("127.0.0.5", "/_session", &["--data", &form]).await, "200");
    // An address has a limit on connections.
    let mut feeds = Vec::new();
    for _ in 0..40 {
        feeds.push(curl("127.0.0.6", &["-H", &token, &feed]).spawn().unwrap());
    }
    until("the limit", async || status("127.0.0.6", "/_db_updates", &["-H", &token]).await == "429").await;
    assert_eq!(status("127.0.0.7", "/_db_updates", &["-H", &token]).await, "200");
    drop(feeds);
}
