//! `notibus record`: records events of databases whose layer does not run in this process.

use std::{
    io::{BufRead, stdin},
    time::Duration,
};

use notibus::{DbInstance, EventKind};
use serde_json::{Value, json};

use crate::{
    target::{Intent, Opened, Target},
    terminal::{self, Failure},
};

/// How many events are recorded in one transaction.
const EVENTS_PER_REQUEST: usize = 1_000;

/// About how many bytes of lines go into one request, so that it fits into a transaction.
const LEN_PER_REQUEST: usize = 250_000;

/// What to record.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The name of the database; or "-" to read events from standard input, one per line, such as {"db":"a","type":"updated"}. Every
    /// thousand events are recorded in one transaction.
    db: String,
    /// The event: "created", "deleted", "updated" or `ddoc_updated`.
    #[arg(default_value = "updated")]
    kind: String,
    /// The design document that was written, for `ddoc_updated`.
    #[arg(long)]
    doc: Option<String>,
    /// The key that an earlier run of this command printed when it failed. What that run recorded in the last five minutes is not recorded
    /// again.
    #[arg(long, value_parser = parse_key)]
    repeats: Option<String>,
    /// Where to record.
    #[command(flatten)]
    target: Target,
}

/// The maximum length of the key of a command, to which each of its transactions adds a number.
const KEY_LEN_MAX: usize = 200;

/// Parses a key, which has to fit into a header.
fn parse_key(text: &str) -> Result<String, String> {
    let is_key = (1..=KEY_LEN_MAX).contains(&text.len())
        && text.chars().all(|it| it.is_ascii_alphanumeric() || it == '-');
    if is_key { Ok(text.to_owned()) } else { Err("a key consists of letters, digits and \"-\"".to_owned()) }
}

/// Records events, and counts what the command has recorded so far.
struct Recorder {
    opened: Opened,
    key: String,
    recorded: u64,
    transactions: u64,
}

pub async fn run(args: Args, timeout: Duration) -> Result<(), Failure> {
    if args.doc.is_some() && args.kind != EventKind::DdocUpdated.as_str() {
        let reason = "--doc goes with ddoc_updated: an event of another type has no design document";
        return Err(Failure::BadInput(reason.to_owned()));
    }
    let opened = args.target.open(Intent::Writes, timeout).await?;
    let key = args.repeats.unwrap_or_else(|| DbInstance::new().to_string());
    let mut recorder = Recorder { opened, key, recorded: 0, transactions: 0 };
    let done = if args.db == "-" {
        recorder.record_lines().await
    } else {
        let mut event = json!({ "db": args.db, "type": args.kind });
        if let Some(doc) = args.doc {
            event["doc"] = doc.into();
        }
        recorder.record(&[event]).await
    };
    let Recorder { key, recorded, .. } = recorder;
    done.map_err(|failure| match failure {
        failure @ Failure::BadInput(_) if recorded == 0 => failure,
        failure => failure.and(&format!(
            "{recorded} events were recorded before; to repeat the command without recording any of them twice, add --repeats {key} \
             within five minutes"
        )),
    })?;
    let text = if args.target.json {
        json!({ "recorded": recorded }).to_string()
    } else {
        format!("recorded {recorded} event{}", if recorded == 1 { "" } else { "s" })
    };
    terminal::line(&text)
}

/// Adds the first event's line number to the failure of a request, because the answer counts events. `lines` are the events' line numbers.
fn counted(failure: Failure, lines: &[usize]) -> Failure {
    let is_counted_so = lines.iter().copied().eq(1..=lines.len());
    match (failure, lines) {
        (failure @ Failure::BadInput(_), [first, ..]) if !is_counted_so => {
            failure.and(&format!("event 1 of this request is in line {first}, and empty lines are no events"))
        }
        (failure, _) => failure,
    }
}

impl Recorder {
    /// Records the events from standard input. Of the events before a bad line, only whole requests are recorded, so that a repeated
    /// command makes the same requests again.
    async fn record_lines(&mut self) -> Result<(), Failure> {
        let (mut events, mut lines, mut len) = (Vec::new(), Vec::new(), 0);
        for (number, line) in stdin().lock().lines().enumerate() {
            let line = line.map_err(|error| Failure::Failed(format!("standard input: {error}")))?;
            if !line.trim().is_empty() {
                let bad = |error| Failure::BadInput(format!("line {}: {error}", number + 1));
                events.push(serde_json::from_str::<Value>(&line).map_err(bad)?);
                lines.push(number + 1);
                len += line.len();
            }
            if events.len() == EVENTS_PER_REQUEST || len >= LEN_PER_REQUEST {
                self.record(&std::mem::take(&mut events))
                    .await
                    .map_err(|failure| counted(failure, &lines))?;
                lines.clear();
                len = 0;
            }
        }
        self.record(&events).await.map_err(|failure| counted(failure, &lines))
    }

    async fn record(&mut self, events: &[Value]) -> Result<(), Failure> {
        if events.is_empty() {
            return Ok(());
        }
        self.transactions += 1;
        let key = format!("{}/{}", self.key, self.transactions);
        let answer =
            self.opened.post_once("recording", "/_notibus/events", &Value::from(events), &key).await?;
        self.recorded += answer["recorded"].as_u64().unwrap_or_default();
        Ok(())
    }
}
