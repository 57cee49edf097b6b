//! `--store` and `--url`: where a command reads, a store or a running node.
//!
//! Both are asked the same requests. For a store, the routes of the node answer within this process, so that a command prints the
//! same for both.

use std::{
    fmt::Write as _,
    io::{self, Read, Write as _},
    net::{TcpStream, ToSocketAddrs},
    str::FromStr,
    time::Duration,
};

use notibus::{
    Bus, Dispatcher, DispatcherOptions,
    http::{
        Api, ApiOptions,
        axum::{self, Router, body::Body},
    },
};
use serde_json::Value;
use tower_service::Service;

use crate::{deadline::Deadline, failure::Failure, store::Store};

/// Holds a name with a password, or a token, for `--url`: every user of the machine can see a command line.
const VARIABLE: &str = "NOTIBUS_AUTH";

/// The header that says which requests are the same one.
const KEY_HEADER: &str = "Idempotency-Key";

/// Where to read.
#[derive(Debug, Clone, clap::Args)]
#[command(group(clap::ArgGroup::new("place").required(true).args(["store", "url"])))]
pub struct Target {
    /// The store: "memory", "dir:PATH" or "fdb:FILE".
    #[arg(long)]
    store: Option<Store>,
    /// A running node, such as `http://127.0.0.1:5985`. The environment variable `NOTIBUS_AUTH` has the credentials: "name:password", or a
    /// token.
    #[arg(long)]
    url: Option<Url>,
    /// What the keys of the bus start with, in a store.
    #[arg(long, default_value = "notibus")]
    prefix: String,
    /// Print for programs: a JSON object a line.
    #[arg(long)]
    pub json: bool,
}

/// What a command does to what it asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// It reads: another process may have the folder open.
    Reads,
    /// It waits for what comes, which nobody may write to a folder of another process.
    Follows,
    /// It changes something.
    Writes,
}

/// The address of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url(String);

impl FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rest = text.strip_prefix("http://").ok_or("it does not begin with \"http://\"")?;
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.is_empty() || rest.contains(['/', '@', '?', '#', ' ']) {
            return Err(format!("{rest:?} is no host with a port; {VARIABLE} says who asks"));
        }
        let has_port = rest.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        Ok(Self(if has_port { rest.to_owned() } else { format!("{rest}:5985") }))
    }
}

/// An opened target. Each request has the whole deadline.
pub struct Opened {
    endpoint: Endpoint,
    deadline: Deadline,
}

enum Endpoint {
    Node(Url),
    /// The routes of a bus in this process.
    Bus {
        router: Router,
        /// The routes read its position.
        _dispatcher: Dispatcher,
    },
}

struct Ask<'a> {
    /// The work, for the message if there is no answer.
    what: &'a str,
    path: &'a str,
    /// What is posted, if anything is.
    body: Option<Vec<u8>>,
    /// By which a node knows that it has done the same request already.
    key: Option<&'a str>,
}

impl Target {
    /// Whether it is a running node.
    pub fn is_node(&self) -> bool {
        self.url.is_some()
    }

    /// Opens it.
    pub async fn open(&self, intent: Intent, deadline: Deadline) -> Result<Opened, Failure> {
        let store = match (&self.store, &self.url) {
            (_, Some(url)) => return Ok(Opened { endpoint: Endpoint::Node(url.clone()), deadline }),
            (Some(store), None) => store,
            (None, None) => unreachable!("one of them is required"),
        };
        let db = match intent {
            Intent::Writes => {
                // Opening a folder would make one.
                store.check_exists()?;
                store.open(deadline).await?
            }
            Intent::Reads => store.open_to_read(deadline).await?.now(),
            // Nothing new would ever be seen.
            Intent::Follows => store.open_to_read(deadline).await?.at_rest("follow its node by --url")?,
        };
        let open = async {
            let bus = Bus::open_existing(&db, self.prefix.as_bytes()).await?;
            let dispatcher = bus.dispatcher(DispatcherOptions::default()).await?;
            let api = Api::start(&bus, &dispatcher, ApiOptions::default())?;
            Ok::<_, Failure>(Endpoint::Bus { router: api.administration(), _dispatcher: dispatcher })
        };
        let endpoint = deadline.of("opening the bus", open).await?;
        Ok(Opened { endpoint, deadline })
    }
}

impl Opened {
    /// What is at `path`.
    pub async fn get(&self, path: &str) -> Result<Value, Failure> {
        self.ask(Ask { what: "reading", path, body: None, key: None }).await
    }

    /// The answer to `body`, posted to `path`. A failure without an answer names `what`, the work.
    pub async fn post(&self, what: &str, path: &str, body: &Value) -> Result<Value, Failure> {
        self.ask(Ask { what, path, body: Some(body.to_string().into_bytes()), key: None }).await
    }

    /// [`Opened::post`] of what is done only once under `key`.
    pub async fn post_once(&self, what: &str, path: &str, body: &Value, key: &str) -> Result<Value, Failure> {
        self.ask(Ask { what, path, body: Some(body.to_string().into_bytes()), key: Some(key) }).await
    }

    /// All elements of the list `name` at `path`, which has parameters already, page by page.
    pub async fn list(&self, path: &str, name: &str) -> Result<Vec<Value>, Failure> {
        let (mut all, mut after) = (Vec::new(), String::new());
        loop {
            let mut page = self.get(&format!("{path}{after}")).await?;
            if let Value::Array(items) = page[name].take() {
                all.extend(items);
            }
            after = match &page["next"] {
                Value::String(next) => format!("&after={}", encoded(next)),
                Value::Object(next) => next.iter().fold(String::new(), |after, (name, value)| {
                    after + "&" + name + "=" + &encoded(value.as_str().unwrap_or_default())
                }),
                _ => return Ok(all),
            };
        }
    }

    /// The answer to a request, which must have succeeded.
    async fn ask(&self, ask: Ask<'_>) -> Result<Value, Failure> {
        let (deadline, what) = (self.deadline, ask.what);
        let answer = async {
            match &self.endpoint {
                Endpoint::Node(url) => {
                    let request = Request::of(&url.0, &ask);
                    let asked = tokio::task::spawn_blocking(move || request.over_tcp(deadline)).await;
                    asked.map_err(|ended| Failure::Failed(format!("the request: {ended}")))?
                }
                Endpoint::Bus { router, .. } => within(router.clone(), ask).await,
            }
        };
        let (status, answer) = deadline.of(what, answer).await?;
        let value: Value = serde_json::from_slice(&answer).unwrap_or(Value::Null);
        if (200..300).contains(&status) {
            return Ok(value);
        }
        let reason =
            value["reason"].as_str().map_or_else(|| format!("the answer was {status}"), ToOwned::to_owned);
        Err(match status {
            401 | 403 => Failure::BadInput(format!("{reason} ({VARIABLE} says who asks)")),
            // What is in its way now may be gone later.
            409 | 429 => Failure::Failed(reason),
            400..500 => Failure::BadInput(reason),
            _ => Failure::Failed(reason),
        })
    }
}

/// `text` as a part of a path, or the value of a parameter.
pub fn encoded(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut encoded, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'~' => encoded.push(byte.into()),
            _ => write!(encoded, "%{byte:02X}").expect("a string takes everything"),
        }
        encoded
    })
}

/// The name of something, which is part of a path.
pub fn parse_name(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("the name is empty".to_owned()) } else { Ok(text.to_owned()) }
}

async fn within(mut router: Router, Ask { path, body, key, .. }: Ask<'_>) -> Result<(u16, Vec<u8>), Failure> {
    let method = if body.is_some() { "POST" } else { "GET" };
    let mut request = axum::http::Request::builder().method(method).uri(path);
    if let Some(key) = key {
        request = request.header(KEY_HEADER, key);
    }
    let request = request.body(Body::from(body.unwrap_or_default()));
    let request = request.map_err(|error| Failure::BadInput(format!("{path}: {error}")))?;
    let response = router.call(request).await.unwrap_or_else(|never| match never {});
    let status = response.status().as_u16();
    let body = axum::body::to_bytes(response.into_body(), usize::MAX).await;
    Ok((status, body.map_err(|error| Failure::Failed(error.to_string()))?.to_vec()))
}

/// A request to a node, as bytes.
struct Request {
    host: String,
    /// The work, and where it is asked for.
    what: String,
    place: String,
    bytes: Vec<u8>,
}

impl Request {
    fn of(host: &str, Ask { what, path, body, key }: &Ask<'_>) -> Self {
        let method = if body.is_some() { "POST" } else { "GET" };
        let authorization = match std::env::var(VARIABLE) {
            Err(_) => String::new(),
            // A variable that is set to nothing is as good as none.
            Ok(nobody) if nobody.is_empty() => String::new(),
            Ok(name) if name.contains(':') => {
                format!("Authorization: Basic {}\r\n", base64(name.as_bytes()))
            }
            Ok(token) => format!("Authorization: Bearer {token}\r\n"),
        };
        let key = key.map_or_else(String::new, |key| format!("{KEY_HEADER}: {key}\r\n"));
        let body = body.as_deref().unwrap_or_default();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{authorization}{key}Content-Length: {}\r\n\r\n",
            body.len()
        );
        Self {
            host: host.to_owned(),
            what: (*what).to_owned(),
            place: format!("http://{host}{path}"),
            bytes: [head.as_bytes(), body].concat(),
        }
    }

    /// Sends it, and reads the answer; the connection ends then.
    fn over_tcp(&self, deadline: Deadline) -> Result<(u16, Vec<u8>), Failure> {
        let Self { host, what, place, bytes } = self;
        // A socket takes no limit of zero.
        let limit = deadline.0.max(Duration::from_millis(1));
        let failed = |error: io::Error| Failure::Failed(format!("{place}: {error}"));
        let address = host.to_socket_addrs().map_err(failed)?.next();
        let address = address.ok_or_else(|| Failure::Failed(format!("{host} has no address")))?;
        let mut socket = TcpStream::connect_timeout(&address, limit).map_err(failed)?;
        socket
            .set_read_timeout(Some(limit))
            .and_then(|()| socket.set_write_timeout(Some(limit)))
            .map_err(failed)?;
        // From here on the node may have done what it was asked for.
        let lost = |error: io::Error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => deadline.gave_up(what),
            _ => Failure::Failed(format!("{what}: {place}: {error}")),
        };
        socket.write_all(bytes).map_err(lost)?;
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).map_err(lost)?;
        parse(&answer).ok_or_else(|| Failure::Failed(format!("{what}: {place}: this is no answer of a node")))
    }
}

/// Status and body of an answer.
fn parse(answer: &[u8]) -> Option<(u16, Vec<u8>)> {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&answer[..end]).ok()?;
    let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    Some((status, answer[end + 4..].to_vec()))
}

/// Encodes `bytes` for HTTP basic authentication.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = bytes.chunks(3).flat_map(|chunk| {
        let bits =
            chunk.iter().fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
        (0..4).map(move |place| {
            if place > chunk.len() { '=' } else { DIGITS[(bits >> (18 - 6 * place) & 63) as usize].into() }
        })
    });
    digits.collect()
}

#[cfg(test)]
mod tests {
    use notibus::{
        BusOptions,
        store::{
            Database,
            testing::{CommitFault, Faults, Gate},
        },
    };
    use serde_json::json;

    use super::*;

    /// Regression: once it was opened, a command waited for its store as long as that took; then it said that nothing could be reached,
    /// although the work may have been done.
    #[tokio::test(start_paused = true)]
    async fn a_request_without_an_answer_is_given_up_and_named() {
        let faults = Faults::new(&Database::memory());
        let bus = Bus::open(&faults.database(), BusOptions::default()).await.unwrap();
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let api = Api::start(&bus, &dispatcher, ApiOptions::default()).unwrap();
        let endpoint = Endpoint::Bus { router: api.administration(), _dispatcher: dispatcher };
        let opened = Opened { endpoint, deadline: Deadline(Duration::from_secs(10)) };
        faults.plan_commits(|_| Some(CommitFault::Hold(Gate::default())));
        let events = json!([{ "db": "a", "type": "updated" }]);
        match opened.post("recording, which may have happened", "/_notibus/events", &events).await {
            Err(Failure::Failed(reason)) => {
                assert!(
                    reason.starts_with("gave up recording, which may have happened, after 10s"),
                    "{reason}"
                );
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn urls_are_hosts_with_ports() {
        assert_eq!("http://localhost/".parse(), Ok(Url("localhost:5985".to_owned())));
        assert_eq!("http://[::1]:80".parse(), Ok(Url("[::1]:80".to_owned())));
        for bad in ["localhost:5985", "https://localhost", "http://", "http://a:b@c", "http://a/b"] {
            assert!(bad.parse::<Url>().is_err(), "{bad}");
        }
    }

    #[test]
    fn names_are_one_part_of_a_path() {
        assert_eq!(encoded("a/b c.\u{e4}?"), "a%2Fb%20c%2E%C3%A4%3F");
        assert!(parse_name("").is_err());
    }

    #[test]
    fn answers_are_read() {
        assert_eq!(parse(b"HTTP/1.1 201 Created\r\nA: b\r\n\r\n{}"), Some((201, b"{}".to_vec())));
        assert_eq!(parse(b"SSH-2.0-OpenSSH\r\n\r\n"), None);
        for (plain, coded) in
            [("", ""), ("a", "YQ=="), ("ab", "YWI="), ("abc", "YWJj"), ("anna:s", "YW5uYTpz")]
        {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
    }
}
