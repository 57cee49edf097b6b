//! `notibus groups`: lists and manages groups of durable consumers.

use std::time::{Duration, Instant};

use clap::Subcommand;
use notibus::{NodeOptions, Sequence, cursor::Start};
use serde_json::{Value, json};

use crate::{
    confirm::Confirm,
    failure::Failure,
    out,
    status::{feed_of, trouble},
    table::{self, duration, items, text, time},
    target::{Intent, Opened, Target, encoded, parse_name},
    topology::FeedName,
};

/// How often a replay asks whether consumers have worked on enough of what waits.
const REPLAY_PAUSE: Duration = Duration::from_millis(500);

/// What to do with groups.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    command: Command,
}

/// What can be done with groups.
#[derive(Debug, Subcommand)]
enum Command {
    /// Print the groups of all feeds: their members, and how each shard stands.
    List(Target),
    /// Create a group, from which consumers can be started. Nothing happens if it is there.
    Create {
        /// Which group.
        #[command(flatten)]
        of: Of,
        /// Where it starts: "now", "0" for all, or behind a sequence of 26 hexadecimal digits.
        #[arg(long, default_value = "now")]
        start: String,
        /// Delete it after this time without a living member. A janitor looks every ten minutes, and counts what it has seen, so it may
        /// take up to twenty minutes longer. Default: never.
        #[arg(long, value_parser = humantime::parse_duration)]
        expiry: Option<Duration>,
    },
    /// Print how far a group is behind in each shard.
    Lag(Of),
    /// Move a group to another position. Fails while members live, which takes up to 5 s to find out.
    Reset {
        /// The group.
        #[command(flatten)]
        of: Of,
        /// The position: "now", "0" for all, or behind a sequence of 26 hexadecimal digits.
        #[arg(long)]
        to: String,
        /// Reset even if members live: they start again from there.
        #[arg(long)]
        force: bool,
        /// Whether to ask first.
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Delete a group, with its dead letters. Fails while members live, which takes up to 5 s to find out.
    Delete {
        /// The group.
        #[command(flatten)]
        of: Of,
        /// Delete even if members live: they receive nothing any more.
        #[arg(long)]
        force: bool,
        /// Whether to ask first.
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Deliver rows again that a group has worked on already. Needs living consumers if they are more than a few hundred.
    Replay {
        /// The group.
        #[command(flatten)]
        of: Of,
        /// A glob on the names of databases, or on the ids of documents, as "tenant-7/*". Default: all.
        #[arg(long)]
        filter: Option<String>,
    },
    /// List or delete rows that a group could not work on. A program can replay them.
    #[command(subcommand)]
    DeadLetters(DeadLetters),
    /// Manage databases, or documents, for which a group's work has failed too often, and which wait while their shards go on.
    #[command(subcommand)]
    Parked(Parked),
}

/// What can be done with dead letters.
#[derive(Debug, Subcommand)]
enum DeadLetters {
    /// Print them.
    List(Of),
    /// Delete one, or all.
    Delete {
        /// The group.
        #[command(flatten)]
        of: Of,
        /// The dead letter of the row at this sequence of 26 hexadecimal digits.
        #[arg(long, conflicts_with = "all", required_unless_present = "all")]
        seq: Option<Sequence>,
        /// All of them.
        #[arg(long)]
        all: bool,
        /// Whether to ask first.
        #[command(flatten)]
        confirm: Confirm,
    },
}

/// What can be done with parked ids.
#[derive(Debug, Subcommand)]
enum Parked {
    /// Print them.
    List(Of),
    /// Try all of them again soon, whatever their pauses.
    Retry(Of),
    /// Drop the waiting row of one: its rows up to now are not worked on.
    Delete {
        /// The group.
        #[command(flatten)]
        of: Of,
        /// The name of the database, or the id of the document.
        #[arg(long)]
        id: String,
        /// Whether to ask first.
        #[command(flatten)]
        confirm: Confirm,
    },
}

/// Which group.
#[derive(Debug, clap::Args)]
struct Of {
    /// Its name.
    #[arg(value_parser = parse_name)]
    group: String,
    /// The feed that it follows: "notifications", or the instance of a database, 32 hexadecimal digits, for the changes of its
    /// documents.
    #[arg(long, env = "NOTIBUS_FEED", default_value = "notifications")]
    feed: FeedName,
    /// Where the bus is.
    #[command(flatten)]
    target: Target,
}

impl Of {
    /// The path of what is at `place` below the group.
    fn path(&self, place: &str) -> String {
        format!("/_notibus/groups/{}/{place}", encoded(&self.group))
    }

    /// The path from which `place` below the group is read.
    fn read_path(&self, place: &str) -> String {
        format!("{}?feed={}", self.path(place), self.feed)
    }

    /// The group, for people.
    fn name(&self) -> String {
        format!("group {} of the feed {}", self.group, self.feed)
    }

    /// Opens what it is in, to change something.
    async fn open(&self, timeout: Duration) -> Result<Opened, Failure> {
        self.target.open(Intent::Writes, timeout).await
    }

    /// Posts the request `body`, with the feed, to `place` below the group; `what` is the work.
    async fn post(
        &self,
        what: &str,
        place: &str,
        mut body: Value,
        timeout: Duration,
    ) -> Result<Value, Failure> {
        body["feed"] = self.feed.to_string().into();
        self.open(timeout).await?.post(what, &self.path(place), &body).await
    }

    /// Prints that something was done: an object, or `said`.
    fn done(&self, answer: &Value, said: &str) -> Result<(), Failure> {
        if self.target.json { out::line(&answer.to_string()) } else { out::line(said) }
    }
}

/// Asks before something is destroyed.
fn confirm(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Reset { of, to, confirm, .. } => {
            // A wrong argument is reported before the user is asked.
            let _: Start = to.parse()?;
            confirm.check(&format!("sets {} to {to}", of.name()))
        }
        Command::Delete { of, confirm, .. } => {
            confirm.check(&format!("deletes {}, with its checkpoints and dead letters", of.name()))
        }
        Command::DeadLetters(DeadLetters::Delete { of, seq, confirm, .. }) => {
            let which =
                seq.map_or_else(|| "all dead letters".to_owned(), |seq| format!("the dead letter {seq}"));
            confirm.check(&format!("deletes {which} of {}", of.name()))
        }
        Command::Parked(Parked::Delete { of, id, confirm }) => {
            confirm.check(&format!("drops what waits of {id:?} of {}", of.name()))
        }
        _ => Ok(()),
    }
}

/// Runs the command.
pub async fn run(args: Args, timeout: Duration) -> Result<(), Failure> {
    confirm(&args.command)?;
    // Unless it is forced, a command that moves or deletes a group finds out first whether members live.
    let watching =
        |force: bool| if force { timeout } else { timeout.saturating_add(NodeOptions::default().expiry) };
    match args.command {
        Command::List(target) => {
            let opened = target.open(Intent::Reads, timeout).await?;
            let groups = opened.get("/_notibus/groups").await?["groups"].take();
            list(&target, items(&groups))
        }
        Command::Create { of, start, expiry } => {
            let mut body = json!({ "name": of.group, "feed": of.feed.to_string(), "start": start });
            if let Some(expiry) = expiry {
                body["idle_expiry_ms"] = u64::try_from(expiry.as_millis()).unwrap_or(u64::MAX).into();
            }
            let what = "creating the group, which may have happened";
            let answer = of.open(timeout).await?.post(what, "/_notibus/groups", &body).await?;
            let is = if answer["created"] == true { "is created" } else { "exists already" };
            of.done(&answer, &format!("{} {is}", of.group))
        }
        Command::Lag(of) => {
            let opened = of.target.open(Intent::Reads, timeout).await?;
            let lag = opened.get(&of.read_path("lag")).await?["lag"].take();
            let header = ["SHARD", "OWNER", "CHECKPOINT", "BEHIND", "OLDEST"];
            table::print(of.target.json, items(&lag), &header, lag_cells, "no shard")
        }
        Command::Reset { of, to, force, .. } => {
            let what = "resetting the group, which may have happened";
            let body = json!({ "to": to, "force": force });
            let answer = of.post(what, "reset", body, watching(force)).await?;
            of.done(&answer, &format!("{} is set to {to}", of.group))
        }
        Command::Delete { of, force, .. } => {
            let what = "deleting the group, which may have happened";
            let answer = of.post(what, "delete", json!({ "force": force }), watching(force)).await?;
            of.done(&answer, &format!("{} is deleted", of.group))
        }
        Command::Replay { of, filter } => replay(&of, filter.as_deref(), timeout).await,
        Command::Parked(command) => parked(command, timeout).await,
        Command::DeadLetters(DeadLetters::List(of)) => {
            let opened = of.target.open(Intent::Reads, timeout).await?;
            let letters = opened.list(&of.read_path("dead_letters"), "dead_letters").await?;
            let header = ["SEQ", "SHARD", "ATTEMPTS", "LAST", "ERROR"];
            let cells = |it: &Value| {
                let [seq, shard, attempts, error] =
                    ["seq", "shard", "attempts", "error"].map(|name| text(&it[name]));
                vec![seq, shard, attempts, time(&it["at_ms"]), error]
            };
            table::print(of.target.json, &letters, &header, cells, "no dead letter")
        }
        Command::DeadLetters(DeadLetters::Delete { of, seq, all, .. }) => {
            let body = json!({ "seq": seq, "all": all });
            let what = "deleting dead letters, of which some may be gone";
            let answer = of.post(what, "dead_letters/delete", body, timeout).await?;
            of.done(&answer, if all { "all are deleted" } else { "it is deleted" })
        }
    }
}

/// Replays page after page. A page that waits for consumers does not count as progress.
async fn replay(of: &Of, filter: Option<&str>, timeout: Duration) -> Result<(), Failure> {
    let opened = of.open(timeout).await?;
    let (mut rows, mut after, mut moved) = (0, Value::Null, Instant::now());
    loop {
        let what = format!("replaying, after {rows} rows; only a few hundred can wait for consumers");
        let body = json!({ "feed": of.feed.to_string(), "filter": filter, "after": after });
        let mut answer = opened.post(&what, &of.path("replay"), &body).await?;
        rows += answer["rows"].as_u64().unwrap_or(0);
        let next = answer["next"].take();
        if next.is_null() {
            let said = format!("{rows} rows wait for another delivery");
            return of.done(&json!({ "ok": true, "rows": rows }), &said);
        }
        if next != after {
            (after, moved) = (next, Instant::now());
        } else if moved.elapsed() < timeout {
            tokio::time::sleep(REPLAY_PAUSE).await;
        } else {
            return Err(Failure::gave_up(&what, timeout));
        }
    }
}

/// Does what is asked for with parked ids.
async fn parked(command: Parked, timeout: Duration) -> Result<(), Failure> {
    match command {
        Parked::List(of) => {
            let opened = of.target.open(Intent::Reads, timeout).await?;
            let ids = opened.list(&of.read_path("parked"), "parked").await?;
            let header = ["ID", "SEQ", "SHARD", "ATTEMPTS", "LAST", "ERROR"];
            let cells = |it: &Value| {
                let [id, seq, shard, attempts, error] =
                    ["id", "seq", "shard", "attempts", "error"].map(|name| text(&it[name]));
                vec![id, seq, shard, attempts, time(&it["at_ms"]), error]
            };
            table::print(of.target.json, &ids, &header, cells, "nothing is parked")
        }
        Parked::Retry(of) => {
            let what = "asking for another try, which may have happened";
            let answer = of.post(what, "parked/retry", json!({}), timeout).await?;
            of.done(&answer, &format!("{} are tried again", text(&answer["ids"])))
        }
        Parked::Delete { of, id, .. } => {
            let what = "dropping what is parked, which may have happened";
            let answer = of.post(what, "parked/delete", json!({ "id": id }), timeout).await?;
            of.done(&answer, "it is dropped")
        }
    }
}

/// Prints groups; for people with what has gone wrong, a line for each shard.
fn list(target: &Target, groups: &[Value]) -> Result<(), Failure> {
    let header = ["GROUP", "FEED", "MEMBERS", "GENERATION", "START", "EXPIRES AFTER", "IDLE FOR", "TROUBLE"];
    let cells = |group: &Value| {
        vec![
            text(&group["name"]),
            feed_of(group),
            items(&group["members"]).len().to_string(),
            text(&group["generation"]),
            text(&group["start"]),
            group["idle_expiry_ms"].as_u64().map_or_else(|| "never".to_owned(), |ms| duration(&ms.into())),
            duration(&group["idle_ms"]),
            trouble(group),
        ]
    };
    table::print(target.json, groups, &header, cells, "no group")?;
    let mut troubles = table::Table::new(&["GROUP", "SHARD", "STATE", "ATTEMPTS", "LAST", "ERROR"]);
    let mut are_some = false;
    for group in groups {
        for shard in items(&group["shards"]).iter().filter(|shard| !shard["trouble"].is_null()) {
            let trouble = &shard["trouble"];
            let state = match (trouble["is_current"] == true, trouble["is_stuck"] == true) {
                (true, true) => "STUCK",
                (true, false) => "failing",
                (false, _) => "over",
            };
            let [name, shard] = [text(&group["name"]), text(&shard["shard"])];
            let [attempts, error] = [text(&trouble["attempts"]), text(&trouble["error"])];
            troubles.row([name, shard, state.to_owned(), attempts, time(&trouble["at_ms"]), error]);
            are_some = true;
        }
    }
    if are_some && !target.json { out::line(&format!("\n{}", troubles.text("").trim_end())) } else { Ok(()) }
}

/// How far a group is behind in a shard, for people.
fn lag_cells(lag: &Value) -> Vec<String> {
    let more = if lag["is_exact"] == true { "" } else { "+" };
    // A shard waits for those that it replaces.
    let at = if lag["checkpoint"].is_null() { "waits".to_owned() } else { text(&lag["checkpoint"]) };
    vec![
        text(&lag["shard"]),
        text(&lag["owner"]),
        at,
        format!("{}{more}", text(&lag["rows"])),
        duration(&lag["age_ms"]),
    ]
}
