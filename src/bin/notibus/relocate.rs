//! `notibus export` and `notibus import`: move a bus to another store.

use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use notibus::{
    Bus,
    relocation::{ExportOptions, Exported},
};

use crate::{
    failure::{Failure, within},
    out::{self, new_private_file, notice},
    store::{self, At, Store},
};

/// What to write to a file.
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// The file, which must not exist; "-" for standard output.
    file: PathBuf,
    /// Where the bus is.
    #[command(flatten)]
    at: At,
    /// Export although nodes live, or another process has the folder open. The export has the state of one moment.
    #[arg(long)]
    while_running: bool,
}

/// What to import.
#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// The file; "-" for standard input.
    file: PathBuf,
    /// Where to import it.
    #[command(flatten)]
    at: At,
}

fn fail(file: &Path, error: &io::Error) -> Failure {
    Failure::BadInput(format!("{}: {error}", file.display()))
}

/// Whether standard input or output is meant.
fn is_standard(file: &Path) -> bool {
    file == Path::new("-")
}

/// Writes the bus to a file, or to standard output.
pub async fn export(args: ExportArgs, timeout: Duration) -> Result<(), Failure> {
    let At { store, prefix } = &args.at;
    let reading = store.open_to_read(timeout).await?;
    let db = if args.while_running {
        reading.now()
    } else {
        reading.at_rest("export what it has now by --while-running")?
    };
    let bus = within(timeout, "opening the bus", Bus::open_existing(&db, prefix.as_bytes())).await?;
    // No other process has the folder open, so all nodes that it lists are dead.
    let while_running = args.while_running || matches!(store, Store::Dir(_));
    let options = ExportOptions::default().while_running(while_running);
    if is_standard(&args.file) {
        let exported = bus.export(&mut BufWriter::new(io::stdout()), options).await?;
        notice(&report(&exported));
        return Ok(());
    }
    let file = new_private_file(&args.file).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => fail(&args.file, &error).and("name a new file, or remove this one"),
        _ => fail(&args.file, &error),
    })?;
    let exported = async {
        let exported = bus.export(&mut BufWriter::new(&file), options).await?;
        file.sync_all().map_err(|error| fail(&args.file, &error))?;
        Ok::<_, Failure>(exported)
    };
    match exported.await {
        Ok(exported) => out::line(&report(&exported)),
        Err(failure) => {
            // A partial file must not be taken for an export.
            fs::remove_file(&args.file).map_err(|error| fail(&args.file, &error))?;
            Err(failure)
        }
    }
}

/// Describes what an export contains, and what not.
fn report(exported: &Exported) -> String {
    let held = exported.held.iter().map(|(what, count)| format!("  {count} {what}\n"));
    format!(
        "exported {} rows:\n{}left out: {}\nwhat is written to this bus from now on is not in the file",
        exported.rows,
        held.collect::<String>(),
        Exported::LEFT_OUT.join("; ")
    )
}

/// Brings the bus of a file, or of standard input, into a store.
pub async fn import(args: ImportArgs, timeout: Duration) -> Result<(), Failure> {
    let (store, prefix) = (&args.at.store, args.at.prefix.as_bytes());
    let path = &args.file;
    let file: Box<dyn Read> = if is_standard(path) {
        Box::new(io::stdin())
    } else {
        Box::new(File::open(path).map_err(|error| fail(path, &error))?)
    };
    let imported = async {
        let db = store.open(timeout).await?;
        Bus::import(&db, prefix, &mut BufReader::new(file)).await?;
        Ok::<_, Failure>(Bus::open_existing(&db, prefix).await?.incarnation())
    };
    // A part of a bus cannot be opened, and the next import begins again, so nothing is removed here.
    let incarnation = imported.await.map_err(store::explained)?;
    out::line(&format!("imported; the incarnation is {} now", incarnation.0))
}
