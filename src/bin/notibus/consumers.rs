//! `notibus consumers`: lists and manages consumers.

use std::time::Duration;

use clap::Subcommand;
use notibus::cursor::Start;
use serde_json::{Value, json};

use crate::{
    target::{Intent, Target, encoded, parse_name},
    terminal::{self, Confirm, Failure, duration, items, text, time},
    topology::parse_feed,
};

/// What to do with consumers.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    command: Command,
}

/// What can be done with consumers.
#[derive(Debug, Subcommand)]
enum Command {
    /// Print all consumers: what they follow, their members, and what needs attention.
    List(Target),
    /// Print the state of a consumer, shard by shard, and describe what needs attention.
    Show(Of),
    /// Create a consumer. A program that runs a consumer creates the consumer itself. An existing consumer is left as it is.
    Create {
        /// Which consumer.
        #[command(flatten)]
        of: Of,
        /// The feed to follow: "notifications", or the instance of a database (32 hexadecimal digits), for the changes to its documents.
        #[arg(long, env = "NOTIBUS_FEED", default_value = "notifications", value_parser = parse_feed)]
        feed: String,
        /// A glob for the names of the wanted databases. Default: all.
        #[arg(long)]
        names: Option<String>,
        /// Where to start: "now", "0" for all, or after a sequence of 26 hexadecimal digits.
        #[arg(long, default_value = "now", value_parser = position)]
        start: String,
        /// Delete the consumer once it has had no member for this long. A janitor checks every ten minutes, and starts counting when it
        /// first finds no member, so deletion may take up to twenty minutes longer. Default: never.
        #[arg(long, value_parser = humantime::parse_duration)]
        expiry: Option<Duration>,
    },
    /// Move a consumer to another position. Fails while nodes are its members.
    Reset {
        /// The consumer.
        #[command(flatten)]
        of: Of,
        /// The position: "now", "0" for all, or after a sequence of 26 hexadecimal digits.
        #[arg(long, value_parser = position)]
        to: String,
        /// Reset even if nodes are members: they start again from the new position.
        #[arg(long)]
        force: bool,
        /// Whether to ask first.
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Delete a consumer. Fails while nodes are its members.
    Delete {
        /// The consumer.
        #[command(flatten)]
        of: Of,
        /// Delete even if nodes are members: they receive nothing more.
        #[arg(long)]
        force: bool,
        /// Whether to ask first.
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Stop the work of a consumer on all nodes, until it is resumed.
    Pause(Of),
    /// Resume a paused consumer.
    Resume(Of),
    /// Print how far behind a consumer is in each shard.
    Lag(Of),
    /// Show ids whose work failed, is stalled or takes long, or give up on one of them.
    #[command(subcommand)]
    Deferred(Deferred),
    /// Have ids worked on again, with their newest rows: as a retry, or as a replay.
    Again {
        /// The consumer.
        #[command(flatten)]
        of: Of,
        /// A glob for the names of databases, or for the ids of documents, such as "tenant-7/*".
        #[arg(long, default_value = "*")]
        filter: String,
        /// Only deferred ids: try them at once, without waiting for their pauses to end.
        #[arg(long)]
        deferred: bool,
        /// Whether to ask first, if the command is for all ids.
        #[command(flatten)]
        confirm: Confirm,
    },
}

/// What can be done with deferred ids.
#[derive(Debug, Subcommand)]
enum Deferred {
    /// Print deferred ids, with their errors, and when they will be tried again.
    List(Of),
    /// Give up on one id: its rows up to now are skipped, and later ones are worked on.
    Discard {
        /// The consumer.
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

/// Which consumer.
#[derive(Debug, clap::Args)]
struct Of {
    /// The name of the consumer.
    #[arg(value_parser = parse_name)]
    consumer: String,
    /// Where the bus is.
    #[command(flatten)]
    target: Target,
}

impl Of {
    /// Returns the path of `place` below the consumer.
    fn path(&self, place: &str) -> String {
        format!("/_notibus/consumers/{}{place}", encoded(&self.consumer))
    }

    async fn get(&self, timeout: Duration) -> Result<Value, Failure> {
        self.target.open(Intent::Reads, timeout).await?.get(&self.path("")).await
    }

    /// Posts `body` to `path`; `what` names the work. Prints the answer as an object, or the text that `said` makes of it.
    async fn post(
        &self,
        (what, path, body): (&str, &str, &Value),
        timeout: Duration,
        said: impl FnOnce(&Value) -> String,
    ) -> Result<(), Failure> {
        let answer = self.target.open(Intent::Writes, timeout).await?.post(what, path, body).await?;
        terminal::line(&if self.target.json { answer.to_string() } else { said(&answer) })
    }
}

/// Checks the text of a position, before the command asks or sends anything.
fn position(text: &str) -> Result<String, String> {
    let accepted = "say \"now\", \"0\" for all, or a sequence of 26 hexadecimal digits, to start after it";
    text.parse::<Start>().map(|_| text.to_owned()).map_err(|error| format!("{error}: {accepted}"))
}

/// Runs the command.
pub async fn run(args: Args, timeout: Duration) -> Result<(), Failure> {
    let (of, what, place, body, said) = match args.command {
        Command::List(target) => {
            let opened = target.open(Intent::Reads, timeout).await?;
            let consumers = opened.list("/_notibus/consumers?", "consumers").await?;
            let header = ["CONSUMER", "FEED", "FILTER", "MEMBERS", "START", "STATE"];
            return terminal::print(target.json, &consumers, &header, consumer_cells, "no consumer");
        }
        Command::Show(of) => return show(&of, timeout).await,
        Command::Lag(of) => {
            let lag = of.get(timeout).await?["lag"].take();
            let header = ["SHARD", "BEHIND", "OLDEST"];
            return terminal::print(of.target.json, items(&lag), &header, lag_cells, "no shard");
        }
        Command::Deferred(Deferred::List(of)) => {
            let opened = of.target.open(Intent::Reads, timeout).await?;
            let ids = opened.list(&format!("{}?", of.path("/deferred")), "deferred").await?;
            let header = ["ID", "SHARD", "ATTEMPTS", "NEXT IN", "LAST", "ERROR"];
            return terminal::print(of.target.json, &ids, &header, deferred_cells, "nothing is deferred");
        }
        Command::Create { of, feed, names, start, expiry } => {
            let expiry_ms = expiry.map(|expiry| u64::try_from(expiry.as_millis()).unwrap_or(u64::MAX));
            let body = json!({
                "name": of.consumer, "feed": feed, "names": names, "start": start, "expiry_ms": expiry_ms,
            });
            let is = |answer: &Value| if answer["created"] == true { "is created" } else { "exists already" };
            let said = |answer: &Value| format!("{} {}", of.consumer, is(answer));
            return of.post(("creating the consumer", "/_notibus/consumers", &body), timeout, said).await;
        }
        Command::Again { of, filter, deferred, confirm } => {
            if filter == "*" && !deferred {
                confirm.check(&format!("has consumer {} work on all ids again", of.consumer))?;
            }
            let body = json!({ "filter": filter, "deferred": deferred });
            let said = |answer: &Value| format!("{} ids are worked on again", text(&answer["ids"]));
            return of.post(("asking for work again", &of.path("/again"), &body), timeout, said).await;
        }
        Command::Reset { of, to, force, confirm } => {
            let name = &of.consumer;
            confirm.check(&format!("sets consumer {name} to {to}, and removes its deferred ids"))?;
            let (body, said) = (json!({ "to": to, "force": force }), format!("{name} is set to {to}"));
            (of, "resetting the consumer", "/reset", body, said)
        }
        Command::Delete { of, force, confirm } => {
            let name = &of.consumer;
            confirm.check(&format!("deletes consumer {name}, with its checkpoints"))?;
            let said = format!("{name} is deleted");
            (of, "deleting the consumer", "/delete", json!({ "force": force }), said)
        }
        Command::Pause(of) => {
            let said = format!("{} is paused", of.consumer);
            (of, "pausing the consumer", "/pause", json!({}), said)
        }
        Command::Resume(of) => {
            let said = format!("{} is resumed", of.consumer);
            (of, "resuming the consumer", "/resume", json!({}), said)
        }
        Command::Deferred(Deferred::Discard { of, id, confirm }) => {
            confirm.check(&format!("gives up the work of consumer {} on {id:?}", of.consumer))?;
            let said = format!("the work on {id} is given up");
            (of, "giving the work up", "/discard", json!({ "id": id }), said)
        }
    };
    of.post((what, &of.path(place), &body), timeout, |_| said).await
}

/// Prints a consumer, one line for each shard, and what needs attention.
async fn show(of: &Of, timeout: Duration) -> Result<(), Failure> {
    let shown = of.get(timeout).await?;
    if of.target.json {
        return terminal::line(&shown.to_string());
    }
    let consumer = &shown["consumer"];
    let expiry = consumer["expiry_ms"].as_u64();
    // The first generation of a consumer is 1.
    let resets = consumer["generation"].as_u64().unwrap_or(1) - 1;
    let lines = [
        format!("consumer       {}", text(&consumer["name"])),
        format!("feed           {}", feed_of(consumer)),
        format!("filter         {}", text(&consumer["filter"])),
        format!("start          {}", text(&consumer["start"])),
        format!("resets         {resets}"),
        format!("expires after  {}", expiry.map_or_else(|| "never".to_owned(), |ms| duration(&ms.into()))),
        format!("members        {}", items(&consumer["members"]).len()),
        format!("low watermark  {}", text(&consumer["low_watermark"])),
    ];
    let mut shards = terminal::Table::new(&["SHARD", "OWNER", "CHECKPOINT", "BEHIND", "OLDEST"]);
    for (shard, lag) in items(&consumer["shards"]).iter().zip(items(&shown["lag"])) {
        let [_, rows, age] = lag_cells(lag).try_into().expect("there are three cells");
        let [shard, owner, checkpoint] = ["shard", "owner", "checkpoint"].map(|name| text(&shard[name]));
        shards.row([shard, owner, checkpoint, rows, age]);
    }
    terminal::line(&format!("{}\n\n{}", lines.join("\n"), shards.text("no shard").trim_end()))?;
    let troubles = items(&shown["troubles"]);
    if troubles.is_empty() {
        return terminal::line("\nnothing needs attention");
    }
    let troubles = troubles.iter().map(|trouble| format!("\n- {}", text(trouble)));
    terminal::line(&format!("\nneeds attention:{}", troubles.collect::<String>()))
}

/// Returns the cells of a table row that shows a consumer.
fn consumer_cells(consumer: &Value) -> Vec<String> {
    vec![
        text(&consumer["name"]),
        feed_of(consumer),
        text(&consumer["filter"]),
        items(&consumer["members"]).len().to_string(),
        text(&consumer["start"]),
        state(consumer),
    ]
}

/// Returns which feed a consumer follows.
pub fn feed_of(consumer: &Value) -> String {
    consumer["instance"]
        .as_str()
        .map_or_else(|| "notifications".to_owned(), |of| format!("documents of {of}"))
}

/// Returns the state of a consumer in a word or two; `show` says more.
pub fn state(consumer: &Value) -> String {
    let has_members = !items(&consumer["members"]).is_empty();
    let states = [
        (consumer["is_paused"] == true, "paused"),
        (!has_members, "no member"),
        (items(&consumer["shards"]).iter().any(|shard| !shard["failing"].is_null()), "work fails"),
        (consumer["has_deferred"] == true, "ids deferred"),
    ];
    let found: Vec<_> = states.iter().filter(|(is, _)| *is).map(|(_, state)| *state).collect();
    if found.is_empty() { "works".to_owned() } else { found.join(", ") }
}

/// Returns the cells of a table row that shows how far behind a consumer is in a shard.
fn lag_cells(lag: &Value) -> Vec<String> {
    let more = if lag["is_exact"] == true { "" } else { "+" };
    vec![text(&lag["shard"]), format!("{}{more}", text(&lag["rows"])), duration(&lag["age_ms"])]
}

/// Returns the cells of a table row that shows a deferred id.
fn deferred_cells(it: &Value) -> Vec<String> {
    let [id, shard, attempts] = ["id", "shard", "attempts"].map(|name| text(&it[name]));
    let error = if it["is_again"] == true && it["error"] == "" {
        "asked for again".to_owned()
    } else {
        text(&it["error"])
    };
    let failed_at = if it["attempts"] == 0 { "-".to_owned() } else { time(&it["at_ms"]) };
    vec![id, shard, attempts, duration(&it["due_in_ms"]), failed_at, error]
}
