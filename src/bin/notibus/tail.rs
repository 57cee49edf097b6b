//! `notibus tail`: prints the rows of the notification feed.

use std::time::Duration;

use notibus::cursor::Start;
use serde_json::Value;

use crate::{
    target::{Intent, Opened, Target, encoded},
    terminal::{self, Failure, items, text, time},
};

/// The maximum time that a request waits for a row. This is less than the time that a command waits for an answer.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// How to print a feed.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where the bus is.
    #[command(flatten)]
    target: Target,
    /// Print the rows after this position: a sequence of 26 hexadecimal digits, "0" for all, or "now".
    #[arg(long, default_value = "0")]
    since: String,
    /// Continue with future rows, until interrupted. This only reads: events appear once a notifier has folded them.
    #[arg(long)]
    follow: bool,
}

/// Prints the rows.
pub async fn run(args: Args, timeout: Duration) -> Result<(), Failure> {
    // A malformed position is reported before anything is opened.
    let _: Start = args.since.parse()?;
    let intent = if args.follow { Intent::Follows } else { Intent::Reads };
    let opened = args.target.open(intent, timeout).await?;
    print(&args, &opened, timeout).await
}

/// Prints rows page by page.
async fn print(args: &Args, opened: &Opened, timeout: Duration) -> Result<(), Failure> {
    let (mut since, mut is_first) = (args.since.clone(), true);
    let wait = WAIT_MAX.min(timeout / 2).as_millis().max(1);
    loop {
        // The first request does not wait for rows, so that "now" is when the command began.
        let waiting = if args.follow && !is_first { format!("&timeout={wait}") } else { String::new() };
        let path = format!("/_notibus/feeds/notifications/rows?since={}{waiting}", encoded(&since));
        let page = opened.get(&path).await?;
        let rows = items(&page["rows"]);
        if is_first && !args.target.json {
            match (rows.is_empty(), args.follow) {
                (true, false) => return terminal::line("no row"),
                _ => terminal::line(&format!("{:26}  {:20}  {:32}  DB", "SEQ", "WRITTEN", "KINDS"))?,
            }
        }
        for row in rows {
            terminal::line(&if args.target.json { row.to_string() } else { line(row) })?;
        }
        if page["more"] != true && !args.follow {
            return Ok(());
        }
        (since, is_first) = (text(&page["next"]), false);
    }
}

fn line(row: &Value) -> String {
    let kinds: Vec<_> = items(&row["kinds"]).iter().map(text).collect();
    let name = text(&row["db"]);
    let gone = if row["deleted_at"].is_null() { "" } else { "  (deleted)" };
    format!("{:26}  {:20}  {:32}  {name}{gone}", text(&row["seq"]), time(&row["written_ms"]), kinds.join(","))
}
