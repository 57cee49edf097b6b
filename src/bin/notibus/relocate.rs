//! `notibus export` and `notibus import`: move a bus to another store.

use std::{
    fs::File,
    io::{BufReader, BufWriter, Write},
    path::PathBuf,
};

use notibus::Bus;

use crate::{Failure, store::Store};

/// What to write to a file.
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// From where, and to which file.
    #[command(flatten)]
    args: Args,
    /// Write what is whole of a damaged folder. Rows may be missing then, and old ones may be there.
    #[arg(long)]
    salvage: bool,
}

/// What to bring into a store.
#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// From which file, and to where.
    #[command(flatten)]
    args: Args,
}

/// What to move.
#[derive(Debug, clap::Args)]
struct Args {
    /// The file that holds the bus.
    file: PathBuf,
    /// The store: "dir:PATH" or "fdb:FILE".
    #[arg(long)]
    store: Store,
    /// What the keys of the bus start with.
    #[arg(long, default_value = "notibus")]
    prefix: String,
}

impl Args {
    /// A failure of the file.
    fn fail(&self, error: &std::io::Error) -> Failure {
        Failure::BadInput(format!("{}: {error}", self.file.display()))
    }
}

/// Writes the bus to a file, which must not exist.
pub async fn export(ExportArgs { args, salvage }: ExportArgs) -> Result<(), Failure> {
    let db = if salvage { args.store.salvage()? } else { args.store.open_to_read().await?.at_rest()? };
    let bus = Bus::open_existing(&db, args.prefix.as_bytes()).await?;
    let file = File::create_new(&args.file).map_err(|error| args.fail(&error))?;
    let exported = async {
        let rows = bus.export(&mut BufWriter::new(&file)).await?;
        file.sync_all().map_err(|error| args.fail(&error))?;
        Ok(rows)
    };
    match exported.await {
        Ok(rows) => say(&format!("exported {rows} rows; no process may write to this bus any more")),
        Err(failure) => {
            // What is not whole must not be taken for an export.
            std::fs::remove_file(&args.file).map_err(|error| args.fail(&error))?;
            Err(failure)
        }
    }
}

/// Brings the bus of a file into a store.
pub async fn import(ImportArgs { args }: ImportArgs) -> Result<(), Failure> {
    let file = File::open(&args.file).map_err(|error| args.fail(&error))?;
    let db = args.store.open().await?;
    Bus::import(&db, args.prefix.as_bytes(), &mut BufReader::new(file)).await?;
    let bus = Bus::open_existing(&db, args.prefix.as_bytes()).await?;
    say(&format!("imported; the incarnation is {} now", bus.incarnation().0))
}

/// Prints a line.
fn say(line: &str) -> Result<(), Failure> {
    writeln!(std::io::stdout(), "{line}")
        .map_err(|error| Failure::Failed(format!("standard output: {error}")))
}
