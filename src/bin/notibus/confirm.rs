//! `--yes`: what destroys something asks before it does.

use std::io::{self, IsTerminal, Write};

use crate::failure::Failure;

/// Whether to ask.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Confirm {
    /// Do it without asking. Without a terminal to ask at it is refused otherwise.
    #[arg(long)]
    yes: bool,
}

impl Confirm {
    /// Fails unless it is wanted that `what` happens.
    pub fn check(self, what: &str) -> Result<(), Failure> {
        if self.yes {
            return Ok(());
        }
        if !io::stdin().is_terminal() {
            return Err(Failure::BadInput(format!(
                "{what}: this cannot be undone; --yes says that it is meant"
            )));
        }
        let mut err = io::stderr();
        let asked = write!(err, "{what}: this cannot be undone. Go on? [y/N] ").and_then(|()| err.flush());
        asked.map_err(|error| Failure::Failed(format!("standard error: {error}")))?;
        let mut answer = String::new();
        io::stdin()
            .read_line(&mut answer)
            .map_err(|error| Failure::Failed(format!("standard input: {error}")))?;
        match answer.trim() {
            "y" | "Y" | "yes" => Ok(()),
            _ => Err(Failure::BadInput("nothing was changed".to_owned())),
        }
    }
}
