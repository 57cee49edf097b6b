//! `notibus incarnation`: shows and raises the incarnation of a bus, the first byte of its sequences.

use std::time::Duration;

use notibus::{Bus, event::Incarnation};
use serde_json::{Value, json};

use crate::{
    failure::{Failure, within},
    out,
    store::Store,
    target::{Intent, Target},
};

const PATH: &str = "/_notibus/incarnation";

const RAISING: &str = "raising the incarnation, which may have happened";

/// How long it may take to find out whether nodes live.
const WATCH_MAX: Duration = Duration::from_mins(1);

/// What to do with the incarnation.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Print it. It changes nothing.
    Show(Target),
    /// Raise it by one, after an older state of the whole store was restored: until then nothing is folded. Nodes may run, and join
    /// again. Refused if the store is not older than its rows.
    Raise {
        /// The bus.
        #[command(flatten)]
        target: Target,
        /// The present incarnation: if it was raised from there already, nothing is changed.
        #[arg(long)]
        from: u8,
        /// Raise it although the store is later than all of its rows, because a copy was restored into a store of later versions, and no
        /// node has run since: what readers saw of the lost time would not expire otherwise. Listed nodes are watched first, and none may
        /// live.
        #[arg(long)]
        force: bool,
    },
}

/// Runs `command`, and prints the incarnation.
pub async fn run(command: Command, timeout: Duration) -> Result<(), Failure> {
    let (target, answer) = match command {
        Command::Show(target) => {
            let answer = target.open(Intent::Reads, timeout).await?.get(PATH).await?;
            (target, answer)
        }
        Command::Raise { target, from, force: true } => {
            let answer = force(&target, from, timeout).await?;
            (target, answer)
        }
        Command::Raise { target, from, force: false } => {
            let opened = target.open(Intent::Writes, timeout).await?;
            let answer = opened.post(RAISING, PATH, &json!({ "from": from })).await?;
            (target, answer)
        }
    };
    if target.json {
        return out::line(&answer.to_string());
    }
    out::line(&format!("the incarnation is {}", answer["incarnation"]))
}

/// Raises the incarnation of a store on which no node lives.
async fn force(target: &Target, from: u8, timeout: Duration) -> Result<Value, Failure> {
    let Some((store, prefix)) = target.store()? else {
        let reason = "--force is for a store on which no node runs: name it by --store";
        return Err(Failure::BadInput(reason.to_owned()));
    };
    store.check_exists()?;
    let db = store.open(timeout).await?;
    let raise = Bus::raise_incarnation(&db, prefix.as_bytes(), Incarnation(from), true);
    let watched = if matches!(store, Store::Dir(_)) { Duration::ZERO } else { WATCH_MAX };
    let raised = within(timeout.saturating_add(watched), RAISING, raise).await?;
    Ok(json!({ "incarnation": raised.0 }))
}
