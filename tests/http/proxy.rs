//! Runs the real nginx, configured as `docs/http.md` says, in front of the server. Without nginx, these tests are skipped, and say
//! so.

use std::{
    net::{SocketAddr, TcpListener},
    os::fd::OwnedFd,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use notibus::{
    EventKind,
    http::{ApiOptions, ServerOptions},
};

use crate::{
    client::{Connection, get},
    common::{db, until},
    fixture::{HttpFixture, row},
};

/// Returns the block of nginx's configuration in the documentation that contains `mark`.
fn documented(mark: &str) -> String {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/http.md")).unwrap();
    let blocks = page.split("```nginx\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    blocks.into_iter().find(|block| block.contains(mark)).expect("the page has it").to_owned()
}

/// A real nginx. Dropping it ends it.
struct Nginx {
    process: Child,
    /// The address that it listens on.
    at: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Nginx {
    /// Starts nginx in front of `server`. The text `outside` goes outside of servers, and `inside` goes into its own one. Returns
    /// `None` if there is no nginx.
    fn start(server: SocketAddr, outside: &str, inside: &str) -> Option<Self> {
        if Command::new("nginx").arg("-v").stderr(Stdio::null()).status().is_err() {
            println!("SKIPPED, not passed: there is no nginx");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().display();
        // nginx inherits the socket, as from an older nginx that it replaces, so nobody else can take the port meanwhile.
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = socket.local_addr().unwrap();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {place}/{name};\n"))
            .concat();
        let [outside, inside] = [outside, inside].map(|text| {
            text.replace("127.0.0.1:5985", &server.to_string())
                .replace("/var/cache/nginx", &place.to_string())
        });
        let configuration = format!(
            "user root root;\ndaemon off;\nworker_processes 1;\npid {place}/pid;\nerror_log {place}/log;\nevents {{}}\n\
             http {{\naccess_log off;\n{temporary}{outside}\nserver {{\nlisten {at};\n{inside}\n}}\n}}\n"
        );
        let file = folder.path().join("nginx.conf");
        std::fs::write(&file, &configuration).unwrap();
        let arguments = [Path::new("-c"), &file, Path::new("-p"), folder.path()];
        let tested = Command::new("nginx").arg("-t").args(arguments).output().unwrap();
        assert!(tested.status.success(), "{}\n{configuration}", String::from_utf8_lossy(&tested.stderr));
        // The socket takes connections from the first moment on.
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
        // nginx ends its workers if it gets a signal that it can handle.
        drop(Command::new("kill").args(["-TERM", &self.process.id().to_string()]).status());
        drop(self.process.wait());
    }
}

#[tokio::test]
async fn behind_nginx_rows_come_at_once_and_clients_have_their_own_addresses() {
    let options = ApiOptions::default().feeds_per_client_max(1);
    let proxies = vec!["127.0.0.1".parse().unwrap()];
    let limits = ServerOptions::default().is_public(true).proxies(proxies).hosts(notibus::http::Hosts::Any);
    let fixture = HttpFixture::with(options, limits, |api, _, _| {
        api.db_updates().merge(api.catalogue(api.recorded_databases()))
    })
    .await;
    let Some(nginx) = Nginx::start(fixture.at(), "", &documented("location / {")) else { return };
    // Each address has a feed of its own, and nobody gets another one by what it says about itself.
    let follow = async |address: &str, claimed: u32| {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(format!("{address}:0").parse().unwrap()).unwrap();
        let mut feed = Connection::over(socket.connect(nginx.at).await.unwrap());
        let target = "/_db_updates?feed=continuous&since=now&heartbeat=60000";
        let claimed = format!("X-Forwarded-For: 203.0.113.{claimed}");
        feed.send(&format!("GET {target} HTTP/1.1\r\nHost: db.example\r\n{claimed}\r\n\r\n")).await;
        (feed.head().await.status, feed)
    };
    let (status, mut feed) = follow("127.0.0.2", 1).await;
    assert_eq!(status, 200);
    let (status, _other) = follow("127.0.0.3", 1).await;
    assert_eq!(status, 200);
    assert_eq!(follow("127.0.0.2", 2).await.0, 429);
    // A buffer would hold the row back until it is full, and one row does not fill it.
    let created = fixture.event(&db("a/b", 1), EventKind::Created).await;
    assert_eq!(feed.chunk().await.unwrap(), row(&created, "created") + "\n");
    // nginx forwards the path unchanged.
    let info = get(nginx.at, "/a%2Fb").await;
    assert_eq!((info.head.status, &info.json()["db_name"]), (200, &"a/b".into()));
}

#[tokio::test]
async fn behind_nginx_equal_longpolls_are_one() {
    let options = ApiOptions::default().longpoll_max_age(Some(Duration::from_mins(1)));
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, _| {
        api.db_updates().merge(api.status()).merge(api.welcome())
    })
    .await;
    let (outside, inside) = (documented("proxy_cache_path"), documented("proxy_cache_lock"));
    let everything = format!(
        "{inside}\nlocation / {{ proxy_pass http://127.0.0.1:5985; proxy_set_header Host localhost; }}"
    );
    let Some(nginx) = Nginx::start(fixture.at(), &outside, &everything) else { return };
    let first = fixture.event(&db("a", 1), EventKind::Created).await;
    let target = format!("/_db_updates?feed=longpoll&since={}", first.sequence);
    let waiting: Vec<_> = (0..20)
        .map(|_| {
            let target = target.clone();
            let at = nginx.at;
            tokio::spawn(async move { get(at, &target).await })
        })
        .collect();
    until("the feed", async || {
        get(fixture.at(), "/_notibus/metrics").await.body.contains("\nnotibus_http_feeds 1\n")
    })
    .await;
    let second = fixture.event(&db("b", 1), EventKind::Created).await;
    for answer in waiting {
        let answer = answer.await.unwrap();
        assert_eq!(answer.head.status, 200, "{answer:?}");
        assert_eq!(
            (answer.rows(), answer.last_seq()),
            (vec![("b".to_owned(), "created".to_owned())], second.sequence.to_string())
        );
    }
    let metrics = get(fixture.at(), "/_notibus/metrics").await.body;
    let count = metrics.lines().find(|line| line.contains("route=\"/_db_updates\"")).unwrap();
    assert!(count.ends_with(" 1"), "one was passed on for all: {count}");
}
