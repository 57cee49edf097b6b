//! `notibus record`: records events of databases for which no layer runs in this process.

use std::io::{BufRead, stdin};

use serde_json::{Value, json};

use crate::{
    Failure,
    deadline::Deadline,
    target::{Intent, Opened, Target},
};

/// How many events are recorded in one transaction.
const EVENTS_PER_REQUEST: usize = 1_000;

/// What to record.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The name of the database; or "-" to read events from standard input, one per line, as {"db":"a","type":"updated"}. Each
    /// thousand is recorded in one transaction.
    db: String,
    /// The event: "created", "deleted", "updated" or `ddoc_updated`.
    #[arg(default_value = "updated")]
    kind: String,
    /// The design document that was written, for `ddoc_updated`.
    #[arg(long)]
    doc: Option<String>,
    /// Where to record.
    #[command(flatten)]
    target: Target,
}

pub async fn run(args: Args, deadline: Deadline) -> Result<(), Failure> {
    let opened = args.target.open(Intent::Writes, deadline).await?;
    let recorded = if args.db == "-" {
        record_lines(&opened).await?
    } else {
        let mut event = json!({ "db": args.db, "type": args.kind });
        if let Some(doc) = args.doc {
            event["doc"] = doc.into();
        }
        record(&opened, &[event]).await?
    };
    let text = if args.target.json {
        json!({ "recorded": recorded }).to_string()
    } else {
        format!("recorded {recorded} event{}", if recorded == 1 { "" } else { "s" })
    };
    crate::out::line(&text)
}

/// Records the events of standard input; returns how many. Events before a bad line are recorded.
async fn record_lines(opened: &Opened) -> Result<u64, Failure> {
    let (mut recorded, mut events) = (0, Vec::new());
    for (number, line) in stdin().lock().lines().enumerate() {
        let line = line.map_err(|error| Failure::Failed(format!("standard input: {error}")))?;
        if !line.trim().is_empty() {
            let event: Value = serde_json::from_str(&line).map_err(|error| {
                let before = recorded;
                Failure::BadInput(format!(
                    "line {}: {error}; {before} events before it were recorded",
                    number + 1
                ))
            })?;
            events.push(event);
        }
        if events.len() == EVENTS_PER_REQUEST {
            recorded += record(opened, &std::mem::take(&mut events)).await?;
        }
    }
    if events.is_empty() { Ok(recorded) } else { Ok(recorded + record(opened, &events).await?) }
}

/// Records `events` in one transaction; returns how many.
async fn record(opened: &Opened, events: &[Value]) -> Result<u64, Failure> {
    let answer = opened.post("/_notibus/events", &Value::from(events)).await?;
    Ok(answer["recorded"].as_u64().unwrap_or_default())
}
