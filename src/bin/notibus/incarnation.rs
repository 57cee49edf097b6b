//! `notibus incarnation`: shows and raises the incarnation of a bus, the first byte of its sequences.

use std::time::Duration;

use notibus::{Bus, event::Incarnation};

use crate::{
    failure::{Failure, within},
    out,
    store::{At, Store},
};

/// How long it may take to find out whether nodes live.
const WATCH_MAX: Duration = Duration::from_mins(1);

/// What to do with the incarnation.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Print it. It changes nothing.
    Show(At),
    /// Raise it by one, after the whole store was restored to another cluster and before any process opens the bus. Listed
    /// nodes are watched first, and removed together with all leases.
    Raise {
        /// The bus.
        #[command(flatten)]
        at: At,
        /// The present incarnation: if it was raised from there already, nothing is changed.
        #[arg(long)]
        from: u8,
        /// Do not watch whether nodes live.
        #[arg(long)]
        force: bool,
    },
}

/// Runs `command`, and prints the incarnation.
pub async fn run(command: Command, timeout: Duration) -> Result<(), Failure> {
    let incarnation = match command {
        Command::Show(At { store, prefix }) => {
            let db = store.open_to_read(timeout).await?.now();
            within(timeout, "reading the incarnation", Bus::stored_incarnation(&db, prefix.as_bytes()))
                .await?
        }
        Command::Raise { at: At { store, prefix }, from, force } => {
            store.check_exists()?;
            // No other process can have the folder open now, so all nodes that it lists are dead.
            let force = force || matches!(store, Store::Dir(_));
            let db = store.open(timeout).await?;
            let raise = Bus::raise_incarnation(&db, prefix.as_bytes(), Incarnation(from), force);
            let what = "raising the incarnation, which may have happened";
            let watched = if force { Duration::ZERO } else { WATCH_MAX };
            within(timeout.saturating_add(watched), what, raise).await?
        }
    };
    out::line(&format!("the incarnation is {}", incarnation.0))
}
