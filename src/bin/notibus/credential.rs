//! `notibus credential`: prints lines for the credentials file of `notibus serve`.

use std::io::{self, IsTerminal, Read};

use console::Term;
use notibus::http::{Credentials, Grant};

use crate::failure::Failure;

/// The longest secret, in bytes.
const SECRET_LEN_MAX: u64 = 1_024;

/// What to make. The secret is read from standard input, so that no list of processes shows it; a terminal does not show it either.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// A line for a name with a password.
    Password {
        /// The name.
        name: String,
        /// Their rights.
        #[command(flatten)]
        grant: Granted,
    },
    /// A line for a bearer token, which has to be long and random, for instance from `openssl rand -hex 32`.
    Token {
        /// The name of its owner, for logs and limits.
        #[arg(long)]
        name: Option<String>,
        /// Their rights.
        #[command(flatten)]
        grant: Granted,
    },
}

/// The rights of a credential: all, if none are given.
#[derive(Debug, clap::Args)]
pub struct Granted {
    /// A role: `_admin`, `_db_updates`, `_events`, `_metrics`, or one of a layer's; can be given more than once.
    #[arg(long = "role")]
    roles: Vec<String>,
    /// A database whose changes they may read, or a prefix of names and a `*`; can be given more than once.
    #[arg(long = "reads")]
    reads: Vec<String>,
}

impl Granted {
    /// The text of the rights at the end of the line.
    fn text(&self) -> Result<String, Failure> {
        let grant = Grant { roles: self.roles.clone(), reads: self.reads.clone() };
        grant.check()?;
        Ok(if grant == Grant::default() { String::new() } else { format!(" {grant}") })
    }
}

/// Prints the line.
pub fn run(command: &Command) -> Result<(), Failure> {
    let secret = secret()?;
    let secret = secret.trim_end_matches(['\n', '\r']);
    let line = match command {
        Command::Password { name, grant } => Credentials::password(name, secret)? + &grant.text()?,
        Command::Token { name, grant } => Credentials::token(name.as_deref(), secret)? + &grant.text()?,
    };
    println!("{line}");
    Ok(())
}

/// The secret: what somebody types, which the terminal does not show, or all of standard input.
fn secret() -> Result<String, Failure> {
    let unreadable = |error: io::Error| Failure::BadInput(format!("standard input: {error}"));
    let mut secret = String::new();
    if io::stdin().is_terminal() && io::stderr().is_terminal() {
        eprint!("Secret: ");
        secret = Term::stderr().read_secure_line().map_err(unreadable)?;
    } else {
        io::stdin().take(SECRET_LEN_MAX + 1).read_to_string(&mut secret).map_err(unreadable)?;
    }
    if secret.len() as u64 > SECRET_LEN_MAX {
        return Err(Failure::BadInput(format!("the secret has more than {SECRET_LEN_MAX} bytes")));
    }
    Ok(secret)
}
