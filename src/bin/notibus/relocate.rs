//! `notibus export` and `notibus import`: move a bus to another store.

use std::{
    fs::File,
    io::{BufReader, BufWriter, Write},
    path::PathBuf,
};

use notibus::Bus;

use crate::{
    Failure,
    deadline::{Deadline, Moves},
    store::Store,
};

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
pub async fn export(ExportArgs { args, salvage }: ExportArgs, deadline: Deadline) -> Result<(), Failure> {
    let db = if salvage { args.store.salvage()? } else { args.store.open_to_read().await?.at_rest()? };
    let what = "exporting";
    let bus = deadline.of(what, Bus::open_existing(&db, args.prefix.as_bytes())).await?;
    let file = File::create_new(&args.file).map_err(|error| args.fail(&error))?;
    let moves = Moves::default();
    let exported = async {
        let rows = bus.export(&mut BufWriter::new(moves.of(&file))).await?;
        file.sync_all().map_err(|error| args.fail(&error))?;
        Ok::<_, Failure>(rows)
    };
    match deadline.of_moving(what, &moves, exported).await {
        Ok(rows) => say(&format!("exported {rows} rows; no process may write to this bus any more")),
        Err(failure) => {
            // What is not whole must not be taken for an export.
            std::fs::remove_file(&args.file).map_err(|error| args.fail(&error))?;
            Err(failure)
        }
    }
}

/// Brings the bus of a file into a store.
pub async fn import(ImportArgs { args }: ImportArgs, deadline: Deadline) -> Result<(), Failure> {
    let file = File::open(&args.file).map_err(|error| args.fail(&error))?;
    let db = args.store.open().await?;
    let what = "importing, of which a part may be there: the next import forgets that";
    let (moves, prefix) = (Moves::default(), args.prefix.as_bytes());
    let mut input = BufReader::new(moves.of(file));
    deadline.of_moving(what, &moves, Bus::import(&db, prefix, &mut input)).await?;
    let bus = deadline.of(what, Bus::open_existing(&db, prefix)).await?;
    say(&format!("imported; the incarnation is {} now", bus.incarnation().0))
}

/// Prints a line.
fn say(line: &str) -> Result<(), Failure> {
    writeln!(std::io::stdout(), "{line}").map_err(crate::out::failed)
}
