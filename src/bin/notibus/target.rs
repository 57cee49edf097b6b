//! `--store` and `--url`: what a command works on, a store or a running node.
//!
//! Both get the same requests. For a store, the routes of a node answer within this process, so that a command prints the same for both.

use std::{error::Error, io::ErrorKind, str::FromStr, time::Duration};

use base64ct::{Base64, Encoding};
use clap::builder::BoolishValueParser;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use notibus::{
    Bus, Dispatcher, DispatcherOptions,
    http::{
        Api, ApiOptions,
        axum::{
            Router,
            body::{Body, to_bytes},
            http::{HeaderValue, Request, Response, header, request::Builder},
        },
    },
};
use serde_json::Value;
use tokio::net::TcpStream;
use tower_service::Service;

use crate::{
    store::StoreAddress,
    terminal::{Failure, within},
};

/// The environment variable with a secret, or a name and its secret, for `--url`. This is not an option of the command, because every user
/// of the machine can see command lines.
const VARIABLE: &str = "NOTIBUS_AUTH";

/// The header that identifies repeated requests.
const KEY_HEADER: &str = "idempotency-key";

/// Which bus to use.
#[derive(Debug, Clone, clap::Args)]
#[command(group(clap::ArgGroup::new("place").required(true).multiple(true).args(["store", "url"])))]
pub struct Target {
    /// The store: "dir:FOLDER" or "fdb:FILE".
    #[arg(long, env = "NOTIBUS_STORE")]
    store: Option<StoreAddress>,
    /// A running node, such as `http://127.0.0.1:5985`. The environment variable `NOTIBUS_AUTH` has the credentials: a secret, or
    /// "name:secret".
    #[arg(long, env = "NOTIBUS_URL")]
    url: Option<Url>,
    /// The prefix of the bus's keys in a store.
    #[arg(long, env = "NOTIBUS_PREFIX", default_value = "notibus")]
    prefix: String,
    /// Print one JSON object per line.
    #[arg(long, env = "NOTIBUS_JSON", value_parser = BoolishValueParser::new())]
    pub json: bool,
}

/// What a command does with its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// The command reads: another process may have the folder open.
    Reads,
    /// The command waits for new rows, and would never see any in a folder that another process has open.
    Follows,
    /// The command changes something.
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
            return Err(format!("{rest:?} is not a host with a port; {VARIABLE} has the credentials"));
        }
        let has_port = rest.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        Ok(Self(if has_port { rest.to_owned() } else { format!("{rest}:5985") }))
    }
}

/// An opened target. The timeout applies to each request separately.
pub struct Opened {
    endpoint: Endpoint,
    timeout: Duration,
}

enum Endpoint {
    Node(Url),
    /// The routes of a bus in this process.
    Bus {
        router: Router,
        /// Kept because the routes read its position.
        _dispatcher: Dispatcher,
    },
}

impl Target {
    /// Returns the store or the node to use. An option on the command line takes precedence over the environment.
    fn place(&self) -> Result<(Option<&StoreAddress>, Option<&Url>), Failure> {
        let is_on_line = |option| std::env::args().any(|word| word.split('=').next() == Some(option));
        match (&self.store, &self.url) {
            (Some(store), Some(url)) => match (is_on_line("--store"), is_on_line("--url")) {
                (true, false) => Ok((Some(store), None)),
                (false, true) => Ok((None, Some(url))),
                _ => Err(Failure::BadInput(
                    "--store and --url exclude each other: give one of them".to_owned(),
                )),
            },
            (store, url) => Ok((store.as_ref(), url.as_ref())),
        }
    }

    /// Returns the store and the prefix of the bus, unless the target is a node.
    pub fn store(&self) -> Result<Option<(&StoreAddress, &str)>, Failure> {
        Ok(match self.place()? {
            (Some(store), None) => Some((store, &self.prefix)),
            _ => None,
        })
    }

    /// Whether the target is a folder, whose rows are those of one moment.
    pub fn is_folder(&self) -> Result<bool, Failure> {
        Ok(matches!(self.place()?, (Some(StoreAddress::Dir(_)), None)))
    }

    /// Opens the bus if the target is a store, or returns a client if the target is a node.
    pub async fn open(&self, intent: Intent, timeout: Duration) -> Result<Opened, Failure> {
        let store = match self.place()? {
            (_, Some(url)) => return Ok(Opened { endpoint: Endpoint::Node(url.clone()), timeout }),
            (store, None) => store.expect("one of them is required"),
        };
        let db = match intent {
            Intent::Writes => {
                // Opening a folder without a store would create one.
                store.check_exists()?;
                store.open(timeout).await?
            }
            Intent::Reads => store.open_to_read(timeout, None).await?,
            // A copy of an open folder never shows anything new.
            Intent::Follows => store.open_to_read(timeout, Some("follow its node with --url")).await?,
        };
        let open = async {
            let bus = Bus::open_existing(&db, self.prefix.as_bytes()).await?;
            let dispatcher = bus.dispatcher(DispatcherOptions::default()).await?;
            let api = Api::start(&bus, &dispatcher, ApiOptions::default())?;
            Ok::<_, Failure>(Endpoint::Bus { router: api.administration(), _dispatcher: dispatcher })
        };
        let endpoint = within(timeout, "opening the bus", open).await?;
        Ok(Opened { endpoint, timeout })
    }
}

impl Opened {
    /// Whether the target is a running node.
    pub fn is_node(&self) -> bool {
        matches!(self.endpoint, Endpoint::Node(_))
    }

    /// Requests `path`, and returns the answer.
    pub async fn get(&self, path: &str) -> Result<Value, Failure> {
        self.ask("reading", Request::get(path), Body::empty()).await
    }

    /// Posts `body` to `path`, and returns the answer. Without an answer, the failure says that the work `what` may have happened.
    pub async fn post(&self, what: &str, path: &str, body: &Value) -> Result<Value, Failure> {
        self.ask(&maybe_done(what), Request::post(path), body.to_string().into()).await
    }

    /// Does the same as [`Opened::post`], for work that the node does only once under `key`.
    pub async fn post_once(&self, what: &str, path: &str, body: &Value, key: &str) -> Result<Value, Failure> {
        self.ask(&maybe_done(what), Request::post(path).header(KEY_HEADER, key), body.to_string().into())
            .await
    }

    /// Reads all elements of the list `name` at `path`, page by page. `path` must already have a `?`.
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

    /// Sends a request, and returns the answer. Fails if the request does not succeed.
    async fn ask(&self, what: &str, request: Builder, body: Body) -> Result<Value, Failure> {
        let request = request.body(body).map_err(|error| Failure::BadInput(error.to_string()))?;
        let answered = async {
            let response = match &self.endpoint {
                Endpoint::Node(url) => url.ask(what, request).await?,
                Endpoint::Bus { router, .. } => {
                    router.clone().call(request).await.unwrap_or_else(|never| match never {})
                }
            };
            let status = response.status().as_u16();
            let body = to_bytes(response.into_body(), usize::MAX).await;
            Ok::<_, Failure>((status, body.map_err(|error| Failure::Failed(format!("{what}: {error}")))?))
        };
        let (status, answer) = within(self.timeout, what, answered).await?;
        let value: Value = serde_json::from_slice(&answer).unwrap_or(Value::Null);
        if (200..300).contains(&status) {
            return Ok(value);
        }
        let reason =
            value["reason"].as_str().map_or_else(|| format!("the answer was {status}"), ToOwned::to_owned);
        Err(match status {
            401 | 403 => Failure::BadInput(format!("{reason} ({VARIABLE} has the credentials)")),
            // Trying again later may help.
            409 | 429 => Failure::Failed(reason),
            400..500 => Failure::BadInput(reason),
            _ => Failure::Failed(reason),
        })
    }
}

impl Url {
    /// Sends a request to the node, on a connection that ends with the answer. A failure to get an answer names `what`.
    async fn ask(&self, what: &str, mut request: Request<Body>) -> Result<Response<Body>, Failure> {
        let Self(host) = self;
        let headers = request.headers_mut();
        let text = |text: String| {
            HeaderValue::try_from(text)
                .map_err(|_| Failure::BadInput(format!("{VARIABLE} has a control character")))
        };
        headers.insert(header::HOST, text(host.clone())?);
        // An empty variable counts as not set.
        if let Some(who) = std::env::var(VARIABLE).ok().filter(|who| !who.is_empty()) {
            let basic = || format!("Basic {}", Base64::encode_string(who.as_bytes()));
            let authorization = if who.contains(':') { basic() } else { format!("Bearer {who}") };
            headers.insert(header::AUTHORIZATION, text(authorization)?);
        }
        let socket = TcpStream::connect(host).await.map_err(|error| {
            let hint = if error.kind() == ErrorKind::ConnectionRefused {
                "; does `notibus serve` run there?"
            } else {
                ""
            };
            Failure::Failed(format!("http://{host} cannot be reached: {error}{hint}"))
        })?;
        let lost = |error: hyper::Error| {
            let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
            Failure::Failed(format!("{what}: http://{host} did not answer as a node does: {error}{cause}"))
        };
        let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await.map_err(lost)?;
        tokio::spawn(connection);
        Ok(sender.send_request(request).await.map_err(lost)?.map(Body::new))
    }
}

/// Describes the work `what` for a failure without an answer: the work may have happened.
pub fn maybe_done(what: &str) -> String {
    format!("{what}, which may have happened")
}

/// Encodes `text` as a path segment or the value of a parameter, even dots, because the segments `.` and `..` have a special meaning.
pub fn encoded(text: &str) -> String {
    let encoded: String = form_urlencoded::byte_serialize(text.as_bytes()).collect();
    encoded.replace('+', "%20").replace('.', "%2E")
}

/// Parses a name that becomes a segment of a path, so it must not be empty.
pub fn parse_name(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("the name is empty".to_owned()) } else { Ok(text.to_owned()) }
}

#[cfg(test)]
mod tests {
    use notibus::{
        BusOptions,
        store::{
            Store,
            testing::{CommitFault, Faults, Gate},
        },
    };
    use serde_json::json;

    use super::*;

    /// Regression: once its store was open, a command waited for the store without a time limit, and then said that nothing could be
    /// reached, although the work may have been done.
    #[tokio::test(start_paused = true)]
    async fn a_request_without_an_answer_is_given_up_and_named() {
        let faults = Faults::new(&Store::memory());
        let bus = Bus::open(&faults.store(), BusOptions::default()).await.unwrap();
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let api = Api::start(&bus, &dispatcher, ApiOptions::default()).unwrap();
        let endpoint = Endpoint::Bus { router: api.administration(), _dispatcher: dispatcher };
        let opened = Opened { endpoint, timeout: Duration::from_secs(10) };
        faults.plan_commits(|_| Some(CommitFault::Hold(Gate::default())));
        let events = json!([{ "db": "a", "type": "updated" }]);
        match opened.post("recording", "/_notibus/events", &events).await {
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
}
