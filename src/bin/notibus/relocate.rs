//! `notibus export` and `notibus import`: move a bus to another store.

use std::{
    fs::File,
    io::{self, BufReader, BufWriter, Read, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use notibus::{
    Bus,
    relocation::{ExportOptions, Exported},
};

use crate::{
    deadline::{Deadline, Moves},
    failure::Failure,
    out::{notice, private_file},
    store::{self, Store},
};

/// How long it may take to find out whether nodes live.
const WATCH_MAX: Duration = Duration::from_mins(1);

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

/// Where the bus is.
#[derive(Debug, clap::Args)]
struct At {
    /// The store: "dir:PATH" or "fdb:FILE".
    #[arg(long)]
    store: Store,
    /// The prefix of the bus's keys.
    #[arg(long, default_value = "notibus")]
    prefix: String,
}

fn fail(file: &Path, error: &io::Error) -> Failure {
    Failure::BadInput(format!("{}: {error}", file.display()))
}

/// Whether standard input or output is meant.
fn is_standard(file: &Path) -> bool {
    file == Path::new("-")
}

/// Writes the bus to a file, or to standard output.
pub async fn export(args: ExportArgs, deadline: Deadline) -> Result<(), Failure> {
    let At { store, prefix } = &args.at;
    let reading = store.open_to_read(deadline).await?;
    let db = if args.while_running {
        reading.now()
    } else {
        reading.at_rest("export what it has now by --while-running")?
    };
    let bus = deadline.of("opening the bus", Bus::open_existing(&db, prefix.as_bytes())).await?;
    // No other process has the folder open, so all nodes that it lists are dead.
    let while_running = args.while_running || matches!(store, Store::Dir(_));
    let options = ExportOptions::default().while_running(while_running);
    let deadline = if while_running { deadline } else { deadline.and(WATCH_MAX) };
    let moves = Moves::default();
    if is_standard(&args.file) {
        let mut out = BufWriter::new(moves.of(io::stdout()));
        let exported = deadline.of_moving("exporting", &moves, bus.export(&mut out, options)).await?;
        notice(&report(&exported));
        return Ok(());
    }
    let file = private_file(&args.file, true).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => fail(&args.file, &error).and("name a new file, or remove this one"),
        _ => fail(&args.file, &error),
    })?;
    let exported = async {
        let exported = bus.export(&mut BufWriter::new(moves.of(&file)), options).await?;
        file.sync_all().map_err(|error| fail(&args.file, &error))?;
        Ok::<_, Failure>(exported)
    };
    match deadline.of_moving("exporting", &moves, exported).await {
        Ok(exported) => say(&report(&exported)),
        Err(failure) => {
            // A partial file must not be taken for an export.
            std::fs::remove_file(&args.file).map_err(|error| fail(&args.file, &error))?;
            Err(failure)
        }
    }
}

/// Describes what an export contains, and what not.
fn report(exported: &Exported) -> String {
    let held = exported.held.iter().map(|(what, count)| format!("  {count} {what}\n"));
    format!(
        "exported {} rows:\n{}left out: {}\nno process may write to this bus any more",
        exported.rows,
        held.collect::<String>(),
        Exported::LEFT_OUT.join("; ")
    )
}

/// Brings the bus of a file, or of standard input, into a store.
pub async fn import(args: ImportArgs, deadline: Deadline) -> Result<(), Failure> {
    let (store, prefix) = (&args.at.store, args.at.prefix.as_bytes());
    let path = &args.file;
    let file: Box<dyn Read> = if is_standard(path) {
        Box::new(io::stdin())
    } else {
        Box::new(File::open(path).map_err(|error| fail(path, &error))?)
    };
    let new_folder = store.new_folder();
    let imported = async {
        let db = store.open(deadline).await?;
        let what = "importing; a part of it may be stored: the next import removes that, and begins again";
        let moves = Moves::default();
        let mut input = BufReader::new(moves.of(file));
        let imported = Bus::import(&db, prefix, &mut input);
        deadline.and(WATCH_MAX).of_moving(what, &moves, imported).await?;
        Ok::<_, Failure>(db)
    };
    let db = match (imported.await, new_folder) {
        (Err(failure), Some(folder)) => {
            store::close();
            folder.remove();
            return Err(failure);
        }
        (imported, _) => imported?,
    };
    let bus = deadline.of("opening the bus", Bus::open_existing(&db, prefix)).await?;
    say(&format!("imported; the incarnation is {} now", bus.incarnation().0))
}

fn say(line: &str) -> Result<(), Failure> {
    writeln!(io::stdout(), "{line}").map_err(crate::out::failed)
}
