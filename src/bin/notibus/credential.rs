//! `notibus credential`: makes the lines by which `notibus serve` knows who may ask.

use std::io::Read;

use notibus::http::Credentials;

use crate::Failure;

/// The longest secret, in bytes.
const SECRET_LEN_MAX: u64 = 1_024;

/// What to make. The secret is read from standard input, so that it is seen in no list of processes.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// A line for a name with a password.
    Password {
        /// The name.
        name: String,
    },
    /// A line for a bearer token, which has to be long and random, as of `openssl rand -hex 32`.
    Token,
}

/// Prints the line.
pub fn run(command: &Command) -> Result<(), Failure> {
    let mut secret = String::new();
    std::io::stdin()
        .take(SECRET_LEN_MAX + 1)
        .read_to_string(&mut secret)
        .map_err(|error| Failure::BadInput(format!("standard input: {error}")))?;
    if secret.len() as u64 > SECRET_LEN_MAX {
        return Err(Failure::BadInput(format!("the secret has more than {SECRET_LEN_MAX} bytes")));
    }
    let secret = secret.trim_end_matches(['\n', '\r']);
    let line = match command {
        Command::Password { name } => Credentials::password(name, secret)?,
        Command::Token => Credentials::token(secret)?,
    };
    println!("{line}");
    Ok(())
}
