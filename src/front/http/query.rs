//! [`Query`] holds the parameters of a feed, from the query string and the headers of a request.
//!
//! Unknown parameters are refused, as are those given twice, because ignoring one would produce a wrong answer: `limt=1` would return all
//! rows. Parameters that CouchDB accepts in any letter case are accepted in any letter case here, too. Names that begin with `_` are
//! allowed: clients add them to bypass caches.

use std::{collections::BTreeSet, time::Duration};

use axum::http::HeaderMap;

use super::{ApiOptions, Failure};
use crate::base::{
    cursor::{Cursor, Start},
    event::{EventKind, Kinds},
    filter::Filter,
};

/// The minimum `heartbeat`, unless [`ApiOptions::heartbeat_max`] is shorter.
const HEARTBEAT_MIN: Duration = Duration::from_millis(100);

/// How a feed is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Sends the existing rows.
    Normal,
    /// Sends the existing rows. If there are none, the feed waits for the first.
    Longpoll,
    /// Sends the existing rows, and then new ones, one row per line.
    Continuous,
    /// Sends the existing rows, and then new ones, as server-sent events.
    EventSource,
}

/// What the rows of a feed are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Topic {
    /// Databases: `_db_updates`.
    Databases,
    /// The documents of one database: `_changes`.
    Documents,
}

/// The parameters of a feed.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "they are parameters that are true or false")]
pub(super) struct Query {
    pub mode: Mode,
    pub start: Start,
    /// The maximum number of rows that the client wants.
    pub limit: u64,
    /// Whether the newest rows come first.
    pub descending: bool,
    /// How long the feed may go without rows before it ends.
    pub timeout: Duration,
    /// How long the feed may go without data before it sends a heartbeat. A feed with heartbeats does not end by itself.
    pub heartbeat: Option<Duration>,
    /// Whether heartbeats of a continuous feed report how far the feed has come.
    pub progress: bool,
    /// The kinds of events that the client wants.
    pub types: Kinds,
    /// The databases that the client wants; `None` for all.
    pub names: Option<Filter>,
    /// Whether rows list all leaves of a document, rather than only the winning one.
    pub all_leaves: bool,
    pub include_docs: bool,
    pub filter: Option<String>,
    /// A JSON array of document ids.
    pub doc_ids: Option<String>,
    /// Whether documents come with their conflicts.
    pub conflicts: bool,
    /// Whether documents come with their attachments.
    pub attachments: bool,
    /// Parameters for a filter of the layer.
    pub rest: Vec<(String, String)>,
}

impl Query {
    /// Reads the query string `text` and the `headers`. Fails with 400 if a parameter is wrong.
    pub fn parse(
        text: &str,
        headers: &HeaderMap,
        options: &ApiOptions,
        topic: Topic,
    ) -> Result<Self, Failure> {
        let mut query = Self {
            mode: Mode::Normal,
            start: Cursor::BEGINNING.into(),
            limit: u64::MAX,
            descending: false,
            timeout: options.timeout_max,
            heartbeat: None,
            progress: false,
            types: [EventKind::Created, EventKind::Deleted, EventKind::Updated].into_iter().collect(),
            names: None,
            all_leaves: false,
            include_docs: false,
            filter: None,
            doc_ids: None,
            conflicts: false,
            attachments: false,
            rest: Vec::new(),
        };
        let mut taken = BTreeSet::new();
        for (key, value) in form_urlencoded::parse(text.as_bytes()) {
            let known = key.to_ascii_lowercase();
            if !query.take(&known, &value, options, topic)? {
                query.rest.push((key.into_owned(), value.into_owned()));
            } else if let Some(known) = taken.replace(known) {
                return Err(Failure::bad_request(format!("The parameter {known} is given twice.")));
            }
        }
        if taken.contains("since") && taken.contains("last-event-id") {
            return Err(Failure::bad_request(
                "`since` and `last-event-id` contradict each other: leave one out.",
            ));
        }
        query.check()?;
        if query.descending {
            // A feed in descending order ends by itself, so it needs no heartbeats.
            query.heartbeat = None;
        }
        // A client that lost its connection requests the same URL again, with the last event in a header.
        if query.mode == Mode::EventSource
            && let Some(last) = headers.get("last-event-id").filter(|last| !last.is_empty())
        {
            if headers.get_all("last-event-id").iter().count() > 1 {
                return Err(Failure::bad_request("There are several Last-Event-ID headers."));
            }
            query.start_at(last.to_str().unwrap_or("?"))?;
        }
        Ok(query)
    }

    /// Reads a parameter. Returns false if feeds on this topic have no parameter with that name.
    fn take(&mut self, key: &str, value: &str, options: &ApiOptions, topic: Topic) -> Result<bool, Failure> {
        match (key, topic) {
            ("feed", _) => self.mode = mode(value, topic)?,
            ("since" | "last-event-id", _) => self.start_at(value)?,
            ("limit", _) => self.limit = integer(key, value)?,
            ("descending", _) => self.descending = truth(key, value)?,
            ("timeout", _) => {
                self.timeout = Duration::from_millis(integer(key, value)?).min(options.timeout_max);
            }
            ("heartbeat", _) => self.heartbeat = heartbeat(value, options)?,
            ("progress", _) => self.progress = truth(key, value)?,
            ("types", Topic::Databases) => self.types = types(value)?,
            ("names", Topic::Databases) => self.names = Some(Filter::glob(value)?),
            ("style", Topic::Documents) => {
                self.all_leaves = match value {
                    "main_only" => false,
                    "all_docs" => true,
                    _ => return Err(Failure::bad_request("`style` must be main_only or all_docs.")),
                }
            }
            ("include_docs", Topic::Documents) => self.include_docs = truth(key, value)?,
            ("conflicts", Topic::Documents) => self.conflicts = truth(key, value)?,
            ("attachments", Topic::Documents) => self.attachments = truth(key, value)?,
            ("att_encoding_info", Topic::Documents) => {
                if truth(key, value)? {
                    return Err(Failure::bad_request("`att_encoding_info` is not supported."));
                }
            }
            ("filter", Topic::Documents) => {
                self.filter = Some(value.to_owned()).filter(|filter| !filter.is_empty());
            }
            ("doc_ids", Topic::Documents) => self.doc_ids = Some(value.to_owned()),
            // This has no effect: every row has its position anyway, not only every nth row.
            ("seq_interval", Topic::Documents) => {
                if !natural(value).is_ok_and(|interval| interval > 0) {
                    return Err(Failure::bad_request("invalid_seq_interval"));
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Reads the value of `since`, which may be quoted as JSON.
    fn start_at(&mut self, value: &str) -> Result<(), Failure> {
        let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
        self.start = match value {
            "" => Cursor::BEGINNING.into(),
            value => value
                .parse()
                .map_err(|_| Failure::bad_request("Malformed sequence supplied in 'since' parameter."))?,
        };
        Ok(())
    }

    /// Fails if the parameters contradict each other, or if one is unknown.
    fn check(&self) -> Result<(), Failure> {
        let is_bound = !matches!(self.start, Start::Now) && self.start != Cursor::BEGINNING.into();
        if self.descending && is_bound {
            // With such a `since`, CouchDB returns all rows.
            return Err(Failure::bad_request(
                "With `descending`, `since` must be 0 or now: the feed has all rows.",
            ));
        }
        // A filter of the layer may know parameters that the routers do not know.
        let is_odd = |(key, _): &&(String, String)| self.filter.is_none() && !key.starts_with('_');
        match self.rest.iter().find(is_odd) {
            None => Ok(()),
            Some((key, _)) => Err(Failure::bad_request(format!("This feed has no parameter `{key}`."))),
        }
    }
}

/// Reads `input` as the query string and the headers of a request, one per line, for tests.
#[cfg(feature = "test-util")]
pub(crate) fn decode_query(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let mut lines = text.split('\n');
    let query = lines.next().unwrap_or_default();
    let headers = lines.filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.parse::<axum::http::HeaderName>().ok()?, value.parse().ok()?))
    });
    let (headers, options) = (headers.collect(), ApiOptions::default());
    for topic in [Topic::Databases, Topic::Documents] {
        drop(Query::parse(query, &headers, &options, topic));
    }
}

/// Reads the value of `feed`.
fn mode(value: &str, topic: Topic) -> Result<Mode, Failure> {
    match value {
        // CouchDB accepts `live` for documents only.
        "live" if topic == Topic::Documents => Ok(Mode::Continuous),
        "normal" => Ok(Mode::Normal),
        "longpoll" => Ok(Mode::Longpoll),
        "continuous" => Ok(Mode::Continuous),
        "eventsource" => Ok(Mode::EventSource),
        _ => {
            let live = if topic == Topic::Documents { "live, " } else { "" };
            let reason = format!("Supported `feed` types: normal, continuous, {live}longpoll, eventsource");
            Err(Failure::bad_request(reason))
        }
    }
}

/// Reads a boolean value.
fn truth(key: &str, value: &str) -> Result<bool, Failure> {
    match value {
        _ if value.eq_ignore_ascii_case("true") => Ok(true),
        _ if value.eq_ignore_ascii_case("false") => Ok(false),
        _ => Err(Failure::bad_request(format!("`{key}` must be true or false."))),
    }
}

/// Reads a non-negative integer. A number that is too large becomes the maximum. Fails for any other value; the error is `true` for a
/// negative integer.
fn natural(value: &str) -> Result<u64, bool> {
    let is_integer = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_integer(value) {
        return Ok(value.parse().unwrap_or(u64::MAX));
    }
    Err(value.strip_prefix('-').is_some_and(is_integer))
}

/// Does the same as [`natural`], but fails with CouchDB's messages.
fn integer(key: &str, value: &str) -> Result<u64, Failure> {
    natural(value).map_err(|is_negative| {
        let what = if is_negative { "value" } else { "parameter" };
        Failure::bad_request(format!("The {key} {what} should be a non-negative integer"))
    })
}

/// Reads the value of `heartbeat`, and clamps it to the limits of the server. Zero means no heartbeat, because heartbeats without a pause
/// are of no use.
fn heartbeat(value: &str, options: &ApiOptions) -> Result<Option<Duration>, Failure> {
    let bounded = |interval: Duration| interval.max(HEARTBEAT_MIN).min(options.heartbeat_max);
    match value {
        "true" => Ok(Some(bounded(Duration::from_mins(1)))),
        "false" => Ok(None),
        value => {
            let interval = natural(value).map_err(|is_negative| {
                Failure::bad_request(if is_negative {
                    "The heartbeat value should be a positive integer (in milliseconds)."
                } else {
                    "Invalid heartbeat value. Expecting a positive integer value (in milliseconds)."
                })
            })?;
            Ok((interval > 0).then(|| bounded(Duration::from_millis(interval))))
        }
    }
}

fn types(value: &str) -> Result<Kinds, Failure> {
    let all = [EventKind::Created, EventKind::Deleted, EventKind::Updated, EventKind::DdocUpdated];
    let known = |name: &str| all.into_iter().find(|kind| kind.as_str() == name);
    value.split(',').map(|name| known(name.trim())).collect::<Option<Kinds>>().ok_or_else(|| {
        let all = all.map(EventKind::as_str).join(", ");
        Failure::bad_request(format!("`types` must be a comma-separated list of these: {all}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::encoding::Sequence;

    fn parse_of(text: &str, topic: Topic) -> Result<Query, Failure> {
        Query::parse(text, &HeaderMap::new(), &ApiOptions::default(), topic)
    }

    fn parse(text: &str) -> Result<Query, Failure> {
        parse_of(text, Topic::Databases)
    }

    #[test]
    fn defaults_are_those_of_couchdb() {
        let query = parse("_nonce=1").unwrap();
        assert_eq!(query.mode, Mode::Normal);
        assert_eq!(query.start, Cursor::BEGINNING.into());
        assert_eq!((query.limit, query.timeout, query.heartbeat), (u64::MAX, Duration::from_mins(1), None));
        assert!(query.types.contains(EventKind::Deleted) && !query.types.contains(EventKind::DdocUpdated));
    }

    #[test]
    fn values_are_read_and_capped() {
        let sequence = format!("{}", Sequence::MAX);
        let query = parse(&format!(
            "feed=continuous&since=%22{sequence}%22&limit=99999999999999999999&timeout=70000&heartbeat=true&types=updated,%20ddoc_updated"
        ))
        .unwrap();
        assert_eq!(query.mode, Mode::Continuous);
        assert_eq!(query.start, Sequence::MAX.into());
        assert_eq!((query.limit, query.timeout), (u64::MAX, Duration::from_mins(1)));
        assert_eq!(query.heartbeat, Some(Duration::from_mins(1)));
        assert_eq!(query.types, Kinds::from_iter([EventKind::Updated, EventKind::DdocUpdated]));
        assert_eq!(parse("heartbeat=0").unwrap().heartbeat, None);
        // Regression: a client could request a thousand heartbeats a second.
        assert_eq!(parse("heartbeat=1").unwrap().heartbeat, Some(Duration::from_millis(100)));
        assert_eq!(parse("since=now").unwrap().start, Start::Now);
        assert_eq!(parse("since=").unwrap().start, Cursor::BEGINNING.into());
        assert_eq!(parse(&format!("last-event-id={sequence}")).unwrap().start, Sequence::MAX.into());
        assert!(parse("names=shop/*").unwrap().names.is_some());
    }

    #[test]
    fn the_last_event_is_newer_than_the_address() {
        let last = Sequence::MAX.to_string();
        let headers = HeaderMap::from_iter([("last-event-id".parse().unwrap(), last.parse().unwrap())]);
        let options = ApiOptions::default();
        let query = |text| Query::parse(text, &headers, &options, Topic::Databases).unwrap().start;
        assert_eq!(query("feed=eventsource&since=now"), Sequence::MAX.into());
        assert_eq!(query("feed=continuous&since=now"), Start::Now);
    }
}
