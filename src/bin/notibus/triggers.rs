//! `notibus triggers`: lists and manages triggers, and the databases that they have parked.

use std::time::Duration;

use clap::Subcommand;
use notibus::DbName;
use serde_json::{Value, json};

use crate::{
    confirm::Confirm,
    failure::Failure,
    out,
    table::{self, items, text, time},
    target::{Intent, Target, encoded, parse_name},
};

/// What to do with triggers.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    command: Command,
}

/// What can be done with triggers.
#[derive(Debug, Subcommand)]
enum Command {
    /// Print all triggers, and how many databases each has parked; or the parked databases of one, and why.
    List {
        /// Of which trigger.
        #[arg(value_parser = parse_name)]
        trigger: Option<String>,
        /// Where the bus is.
        #[command(flatten)]
        target: Target,
    },
    /// Try parked databases again: within about 10 s if the trigger runs, else when it is started.
    Retry {
        /// Of which trigger.
        #[arg(value_parser = parse_name)]
        trigger: String,
        /// Only this database.
        #[arg(long)]
        db: Option<DbName>,
        /// Where the bus is.
        #[command(flatten)]
        target: Target,
    },
    /// Delete all stored state of a trigger: at its next start it begins with all databases.
    Reset {
        /// Which trigger. One that runs ends.
        #[arg(value_parser = parse_name)]
        trigger: String,
        /// Whether to ask first.
        #[command(flatten)]
        confirm: Confirm,
        /// Where it is.
        #[command(flatten)]
        target: Target,
    },
}

/// Lists triggers, or manages them.
pub async fn run(args: Args, timeout: Duration) -> Result<(), Failure> {
    if let Command::Reset { trigger, confirm, .. } = &args.command {
        confirm
            .check(&format!("forgets all that is kept of trigger {trigger}: it begins with all databases"))?;
    }
    match args.command {
        Command::List { trigger: None, target } => {
            let opened = target.open(Intent::Reads, timeout).await?;
            let triggers = opened.get("/_notibus/triggers").await?["triggers"].take();
            let header = ["TRIGGER", "POSITION", "PARKED"];
            let cells = |trigger: &Value| {
                let more = if trigger["parked_is_exact"] == false { "+" } else { "" };
                let parked = format!("{}{more}", text(&trigger["parked"]));
                vec![text(&trigger["trigger"]), text(&trigger["position"]), parked]
            };
            table::print(target.json, items(&triggers), &header, cells, "no trigger")
        }
        Command::List { trigger: Some(trigger), target } => {
            let opened = target.open(Intent::Reads, timeout).await?;
            let path = format!("/_notibus/triggers/{}?", encoded(&trigger));
            let parked = opened.list(&path, "databases").await?;
            let header = ["DB", "INSTANCE", "WORK", "ATTEMPTS", "LAST", "RETRY", "ERROR"];
            table::print(target.json, &parked, &header, cells, "nothing is parked")
        }
        Command::Retry { trigger, db, target } => {
            let opened = target.open(Intent::Writes, timeout).await?;
            let body = db.map_or_else(|| json!({}), |db| json!({ "db": db }));
            let what = "asking for another try, which may have happened for some";
            let path = format!("/_notibus/triggers/{}/retry", encoded(&trigger));
            let answer = opened.post(what, &path, &body).await?;
            let said = format!("{} are tried again", text(&answer["databases"]));
            out::line(&if target.json { answer.to_string() } else { said })
        }
        Command::Reset { trigger, target, .. } => {
            let opened = target.open(Intent::Writes, timeout).await?;
            let path = format!("/_notibus/triggers/{}/reset", encoded(&trigger));
            let what = "resetting the trigger, some of which may be done";
            let answer = opened.post(what, &path, &json!({})).await?;
            out::line(&if target.json { answer.to_string() } else { format!("{trigger} is reset") })
        }
    }
}

/// A parked database for people.
fn cells(parked: &Value) -> Vec<String> {
    let what = if parked["is_gone"] == true { "its deletion" } else { "its work" };
    let retry = if parked["is_asked"] == true { "soon" } else { "-" };
    let [db, instance, attempts, error] =
        ["db", "instance", "attempts", "error"].map(|name| text(&parked[name]));
    vec![db, instance, what.to_owned(), attempts, time(&parked["at_ms"]), retry.to_owned(), error]
}
