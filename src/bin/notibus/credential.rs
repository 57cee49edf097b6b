//! `notibus credential`: makes a random secret, and its line for the credentials file of `notibus serve`.

use notibus::http::{Credentials, Grant};

use crate::failure::Failure;

/// Whose secret to make. The line goes to standard output, and the secret to standard error: it is shown only this once.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The name.
    name: String,
    /// Their roles, separated by commas: `_admin`, `_db_updates`, `_events`, `_metrics`, or roles of a layer. Without roles and `--reads`
    /// they may do everything.
    #[arg(long, value_delimiter = ',')]
    roles: Vec<String>,
    /// The databases whose changes they may read, separated by commas: names, or prefixes of names and a `*`.
    #[arg(long, value_delimiter = ',')]
    reads: Vec<String>,
}

/// Prints the line and the secret.
pub fn run(args: Args) -> Result<(), Failure> {
    let grant = Grant { roles: args.roles, reads: args.reads };
    grant.check()?;
    let space = if grant == Grant::default() { "" } else { " " };
    let secret = Credentials::new_secret()?;
    println!("{}{space}{grant}", Credentials::line(&args.name, &secret)?);
    eprintln!("{secret}");
    Ok(())
}
