//! [`Query`]: what the query string and the headers of a request ask of a feed.

use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};

use super::{ApiOptions, Failure};
use crate::{
    cursor::{Cursor, Start},
    event::{EventKind, Kinds},
};

/// How a feed is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// What there is.
    Normal,
    /// What there is; if it is nothing, what comes first.
    Longpoll,
    /// What there is and what comes, a row a line.
    Continuous,
    /// What there is and what comes, as server-sent events.
    EventSource,
}

/// What is asked of a feed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Query {
    /// How it is sent.
    pub mode: Mode,
    /// Where it starts.
    pub start: Start,
    /// The most rows.
    pub limit: u64,
    /// Newest first.
    pub descending: bool,
    /// After how long without rows it ends.
    pub timeout: Duration,
    /// After how long without anything a heartbeat is sent; with it the feed does not end by itself.
    pub heartbeat: Option<Duration>,
    /// Which kinds of events of databases are wanted.
    pub types: Kinds,
    /// All leaves of documents.
    pub all_leaves: bool,
    /// Documents, too.
    pub include_docs: bool,
    /// The name of a filter.
    pub filter: Option<String>,
    /// Ids of documents, as JSON.
    pub doc_ids: Option<String>,
}

impl Query {
    /// What is asked for by the query string `text` and `headers`. Fails with 400. What is unknown is ignored, as by CouchDB.
    pub fn parse(text: &str, headers: &HeaderMap, options: &ApiOptions) -> Result<Self, Failure> {
        let mut query = Self {
            mode: Mode::Normal,
            start: Cursor::NOTHING.into(),
            limit: u64::MAX,
            descending: false,
            timeout: options.timeout_max,
            heartbeat: None,
            types: [EventKind::Created, EventKind::Deleted, EventKind::Updated].into_iter().collect(),
            all_leaves: false,
            include_docs: false,
            filter: None,
            doc_ids: None,
        };
        for (key, value) in form_urlencoded::parse(text.as_bytes()) {
            let value = &*value;
            match &*key {
                "feed" => query.mode = mode(value)?,
                "since" => query.start = start(value)?,
                "limit" => query.limit = integer("limit", value)?,
                "descending" => query.descending = value == "true",
                "timeout" => {
                    query.timeout =
                        Duration::from_millis(integer("timeout", value)?).min(options.timeout_max);
                }
                "heartbeat" => query.heartbeat = heartbeat(value, options)?,
                "types" => query.types = types(value)?,
                "style" => query.all_leaves = value == "all_docs",
                "include_docs" => query.include_docs = value == "true",
                "filter" if !value.is_empty() => query.filter = Some(value.to_owned()),
                "doc_ids" => query.doc_ids = Some(value.to_owned()),
                _ => {}
            }
        }
        // A client that has lost its connection asks again for the same address.
        if query.mode == Mode::EventSource
            && let Some(last) = headers.get("last-event-id").filter(|last| !last.is_empty())
        {
            query.start = start(last.to_str().unwrap_or("?"))?;
        }
        Ok(query)
    }
}

/// The value of `feed`.
fn mode(value: &str) -> Result<Mode, Failure> {
    match value {
        "normal" => Ok(Mode::Normal),
        "longpoll" => Ok(Mode::Longpoll),
        "continuous" => Ok(Mode::Continuous),
        "eventsource" => Ok(Mode::EventSource),
        _ => Err(Failure::bad_request("Supported `feed` types: normal, continuous, longpoll, eventsource")),
    }
}

/// The value of `since`, which may be quoted as JSON.
fn start(value: &str) -> Result<Start, Failure> {
    let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
    if value.is_empty() {
        return Ok(Cursor::NOTHING.into());
    }
    value.parse().map_err(|_| Failure::bad_request("Malformed sequence supplied in 'since' parameter."))
}

/// A non-negative integer. What is too large to matter is as large as can be.
pub(super) fn integer(key: &str, value: &str) -> Result<u64, Failure> {
    if value.is_empty() || !value.bytes().all(|byte| byte.is_ascii_digit()) {
        let reason = format!("`{key}` has to be a non-negative integer.");
        return Err(Failure::new(StatusCode::BAD_REQUEST, "invalid_integer", reason));
    }
    Ok(value.parse().unwrap_or(u64::MAX))
}

/// The value of `heartbeat`. Zero is none: a heartbeat without a pause would be no use to anybody.
fn heartbeat(value: &str, options: &ApiOptions) -> Result<Option<Duration>, Failure> {
    let most = options.heartbeat_max;
    match value {
        "true" => Ok(Some(Duration::from_mins(1).min(most))),
        "false" => Ok(None),
        value => {
            let interval = integer("heartbeat", value)?;
            Ok((interval > 0).then(|| Duration::from_millis(interval).min(most)))
        }
    }
}

/// The value of `types`.
fn types(value: &str) -> Result<Kinds, Failure> {
    let all = [EventKind::Created, EventKind::Deleted, EventKind::Updated, EventKind::DdocUpdated];
    let known = |name: &str| all.into_iter().find(|kind| kind.as_str() == name);
    value.split(',').map(|name| known(name.trim())).collect::<Option<Kinds>>().ok_or_else(|| {
        let all = all.map(EventKind::as_str).join(", ");
        Failure::bad_request(format!("`types` has to be a list of these, with commas: {all}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encoding::Sequence;

    fn parse(text: &str) -> Result<Query, Failure> {
        Query::parse(text, &HeaderMap::new(), &ApiOptions::default())
    }

    #[test]
    fn defaults_are_those_of_couchdb() {
        let query = parse("unknown=1").unwrap();
        assert_eq!(query.mode, Mode::Normal);
        assert_eq!(query.start, Cursor::NOTHING.into());
        assert_eq!((query.limit, query.timeout, query.heartbeat), (u64::MAX, Duration::from_mins(1), None));
        assert!(query.types.contains(EventKind::Deleted) && !query.types.contains(EventKind::DdocUpdated));
    }

    #[test]
    fn values_are_read_and_capped() {
        let sequence = format!("{}", Sequence::MAX);
        let query = parse(&format!(
            "feed=continuous&since=%22{sequence}%22&limit=99999999999999999999&timeout=70000&heartbeat=true&types=updated,%20ddoc_updated&descending=true"
        ))
        .unwrap();
        assert_eq!(query.mode, Mode::Continuous);
        assert_eq!(query.start, Sequence::MAX.into());
        assert_eq!((query.limit, query.timeout), (u64::MAX, Duration::from_mins(1)));
        assert_eq!(query.heartbeat, Some(Duration::from_mins(1)));
        assert_eq!(query.types, Kinds::from_iter([EventKind::Updated, EventKind::DdocUpdated]));
        assert!(query.descending);
        assert_eq!(parse("heartbeat=0").unwrap().heartbeat, None);
        assert_eq!(parse("since=now").unwrap().start, Start::Now);
        assert_eq!(parse("since=").unwrap().start, Cursor::NOTHING.into());
    }

    #[test]
    fn bad_values_are_named() {
        for (bad, named) in [
            ("feed=live", "eventsource"),
            ("limit=-1", "limit"),
            ("timeout=x", "timeout"),
            ("heartbeat=", "heartbeat"),
            ("types=", "ddoc_updated"),
            ("types=created,", "ddoc_updated"),
            ("since=garbage", "Malformed sequence supplied in 'since' parameter."),
        ] {
            let failure = parse(bad).unwrap_err();
            assert_eq!(failure.status(), StatusCode::BAD_REQUEST);
            assert!(format!("{failure:?}").contains(named), "{bad}: {failure:?}");
        }
    }

    #[test]
    fn the_last_event_is_newer_than_the_address() {
        let last = Sequence::MAX.to_string();
        let headers = HeaderMap::from_iter([("last-event-id".parse().unwrap(), last.parse().unwrap())]);
        let query = |text| Query::parse(text, &headers, &ApiOptions::default()).unwrap().start;
        assert_eq!(query("feed=eventsource&since=now"), Sequence::MAX.into());
        assert_eq!(query("feed=continuous&since=now"), Start::Now);
    }
}
