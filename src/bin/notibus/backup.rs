//! The commands that work on a whole store: `notibus check` and `notibus backup` for a folder, `notibus export` and `notibus import` to
//! move a bus to another store, and `notibus incarnation`, which shows and raises the first byte of a bus's sequences.

use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use notibus::{
    Bus, event,
    relocation::{ExportOptions, Exported},
    store::{FolderReport, Store},
};
use serde_json::{Value, json};

use crate::{
    store::{At, StoreAddress},
    target::{Intent, Target, maybe_done},
    terminal::{self, Failure, new_private_file, notice, within},
};

/// Which folder to check.
#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// The folder of a store, as DIR or dir:DIR.
    #[arg(value_parser = parse_dir)]
    dir: PathBuf,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

/// What to copy.
#[derive(Debug, clap::Args)]
pub struct BackupArgs {
    /// The folder of a store, as DIR or dir:DIR. Another process may have it open, and keep committing.
    #[arg(value_parser = parse_dir)]
    dir: PathBuf,
    /// Where the copy goes: an empty or missing folder.
    #[arg(value_parser = parse_dir)]
    to: PathBuf,
}

/// Parses a folder, given as DIR or dir:DIR. A folder whose own name begins with "dir:" has to be given as "./dir:…".
fn parse_dir(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("dir:").unwrap_or(text) {
        "" => Err("it does not name a folder".to_owned()),
        "memory" => {
            Err("a store in memory has no folder; a folder with that name is \"./memory\"".to_owned())
        }
        path if text.starts_with("fdb:") => Err(format!("{path} is a cluster, not a folder")),
        path => Ok(path.into()),
    }
}

/// Prints what is in a folder, and where it is damaged.
pub fn check(args: &CheckArgs) -> Result<(), Failure> {
    StoreAddress::Dir(args.dir.clone()).check_exists()?;
    let report = Store::check_dir(&args.dir)?;
    let damages: Vec<_> = report.damages.iter().map(ToString::to_string).collect();
    if args.json {
        let FolderReport { rows, version, torn_len, is_open, .. } = &report;
        terminal::line(
            &json!({ "rows": rows, "version": version, "torn_len": torn_len, "is_open": is_open, "damages": damages })
                .to_string(),
        )?;
    } else {
        damages.iter().try_for_each(|damage| terminal::line(&format!("damaged: {damage}")))?;
    }
    if damages.is_empty() {
        return if args.json { Ok(()) } else { terminal::line(&format!("whole: {}", readable(&report))) };
    }
    Err(Failure::BadInput(format!(
        "{} is damaged in {} places; {}. Restore it from a copy",
        args.dir.display(),
        report.damages.len(),
        readable(&report)
    )))
}

/// Copies a folder.
pub fn backup(args: &BackupArgs) -> Result<(), Failure> {
    StoreAddress::Dir(args.dir.clone()).check_exists()?;
    let report = Store::backup_dir(&args.dir, &args.to)?;
    terminal::line(&format!("copied to {}: {}", args.to.display(), readable(&report)))
}

/// Returns a human-readable description of a folder.
fn readable(report: &FolderReport) -> String {
    let FolderReport { rows, version, torn_len, is_open, .. } = report;
    let open = if *is_open { "; another process has it open" } else { "" };
    let torn =
        if *torn_len > 0 { format!("; {torn_len} bytes after the last commit") } else { String::new() };
    format!("{rows} rows at version {version}{torn}{open}")
}

/// What to write to a file.
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// The file, which must not exist; "-" for standard output.
    file: PathBuf,
    /// Where the bus is.
    #[command(flatten)]
    at: At,
    /// Export even if nodes are alive, or another process has the folder open. The export has the state of one moment.
    #[arg(long)]
    while_running: bool,
}

/// What to import.
#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// The file; "-" for standard input.
    file: PathBuf,
    /// Where to import the bus.
    #[command(flatten)]
    at: At,
}

fn fail(file: &Path, error: &io::Error) -> Failure {
    Failure::BadInput(format!("{}: {error}", file.display()))
}

/// Whether `file` means standard input or output.
fn is_standard(file: &Path) -> bool {
    file == Path::new("-")
}

/// Writes the bus to a file, or to standard output.
pub async fn export(args: ExportArgs, timeout: Duration) -> Result<(), Failure> {
    let At { store, prefix } = &args.at;
    let instead = (!args.while_running).then_some("export its current state with --while-running");
    let db = store.open_to_read(timeout, instead).await?;
    let bus = within(timeout, "opening the bus", Bus::open_existing(&db, prefix.as_bytes())).await?;
    // No other process has the folder open, so all nodes that it lists are dead.
    let while_running = args.while_running || matches!(store, StoreAddress::Dir(_));
    let options = ExportOptions::default().while_running(while_running);
    if is_standard(&args.file) {
        let exported = bus.export(&mut BufWriter::new(io::stdout()), options).await?;
        notice(&report(&exported));
        return Ok(());
    }
    let file = new_private_file(&args.file).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            fail(&args.file, &error).and("name a new file, or remove the existing one")
        }
        _ => fail(&args.file, &error),
    })?;
    let exported = async {
        let exported = bus.export(&mut BufWriter::new(&file), options).await?;
        file.sync_all().map_err(|error| fail(&args.file, &error))?;
        Ok::<_, Failure>(exported)
    };
    match exported.await {
        Ok(exported) => terminal::line(&report(&exported)),
        Err(failure) => {
            // A partial file must not be mistaken for an export.
            fs::remove_file(&args.file).map_err(|error| fail(&args.file, &error))?;
            Err(failure)
        }
    }
}

/// Describes what an export contains and what it leaves out.
fn report(exported: &Exported) -> String {
    let held = exported.held.iter().map(|(what, count)| format!("  {count} {what}\n"));
    format!(
        "exported {} rows:\n{}left out: {}\nwhat is written to this bus from now on is not in the file",
        exported.rows,
        held.collect::<String>(),
        Exported::LEFT_OUT.join("; ")
    )
}

/// Imports the bus in a file, or from standard input, into a store.
pub async fn import(args: ImportArgs, timeout: Duration) -> Result<(), Failure> {
    let (store, prefix) = (&args.at.store, args.at.prefix.as_bytes());
    let path = &args.file;
    let file: Box<dyn Read> = if is_standard(path) {
        Box::new(io::stdin())
    } else {
        Box::new(File::open(path).map_err(|error| fail(path, &error))?)
    };
    let mut file = BufReader::new(file);
    // If the file is not an export, no store is created for it.
    let mut begin = Vec::new();
    let len = Exported::BEGIN.len() as u64;
    file.by_ref().take(len).read_to_end(&mut begin).map_err(|error| fail(path, &error))?;
    if begin != Exported::BEGIN {
        return Err(Failure::BadInput(format!("{} is not an export", path.display())));
    }
    let db = store.open(timeout).await?;
    // A partly imported bus cannot be opened, and the next import starts over, so nothing is removed after a failure.
    Bus::import(&db, prefix, &mut begin.chain(file)).await?;
    let incarnation = Bus::open_existing(&db, prefix).await?.incarnation();
    terminal::line(&format!("imported; the incarnation is {} now", incarnation.0))
}

const INCARNATION: &str = "/_notibus/incarnation";

const RAISING: &str = "raising the incarnation";

/// How long it may take to find out whether nodes are alive.
const WATCH_MAX: Duration = Duration::from_mins(1);

/// What to do with the incarnation.
#[derive(Debug, clap::Subcommand)]
pub enum Incarnation {
    /// Print the incarnation. Nothing is changed.
    Show(Target),
    /// Raise the incarnation by one, after an older state of the whole store was restored: until you do, nothing is folded. Nodes may be
    /// running; they join again. Refused if the store is not older than its rows.
    Raise {
        /// The bus.
        #[command(flatten)]
        target: Target,
        /// The current incarnation: if it was already raised from this one, nothing is changed.
        #[arg(long)]
        from: u8,
        /// Raise the incarnation even though the store is later than all of its rows. Use this if a copy was restored into a store with
        /// later versions and no node has run since: otherwise, positions from the lost time would not expire. Listed nodes are watched
        /// first, and none may be alive.
        #[arg(long)]
        force: bool,
    },
}

/// Runs `command`, and prints the incarnation.
pub async fn incarnation(command: Incarnation, timeout: Duration) -> Result<(), Failure> {
    let (target, answer) = match command {
        Incarnation::Show(target) => {
            let answer = target.open(Intent::Reads, timeout).await?.get(INCARNATION).await?;
            (target, answer)
        }
        Incarnation::Raise { target, from, force: true } => {
            let answer = force(&target, from, timeout).await?;
            (target, answer)
        }
        Incarnation::Raise { target, from, force: false } => {
            let opened = target.open(Intent::Writes, timeout).await?;
            let answer = opened.post(RAISING, INCARNATION, &json!({ "from": from })).await?;
            (target, answer)
        }
    };
    if target.json {
        return terminal::line(&answer.to_string());
    }
    terminal::line(&format!("the incarnation is {}", answer["incarnation"]))
}

/// Raises the incarnation in a store on which no node is alive.
async fn force(target: &Target, from: u8, timeout: Duration) -> Result<Value, Failure> {
    let Some((store, prefix)) = target.store()? else {
        let reason = "--force is for a store on which no node runs: name it with --store";
        return Err(Failure::BadInput(reason.to_owned()));
    };
    store.check_exists()?;
    let db = store.open(timeout).await?;
    let raise = Bus::raise_incarnation(&db, prefix.as_bytes(), event::Incarnation(from), true);
    let watched = if matches!(store, StoreAddress::Dir(_)) { Duration::ZERO } else { WATCH_MAX };
    let raised = within(timeout.saturating_add(watched), &maybe_done(RAISING), raise).await?;
    Ok(json!({ "incarnation": raised.0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_named_as_other_commands_name_stores() {
        for text in ["data", "dir:data"] {
            assert_eq!(parse_dir(text), Ok("data".into()));
        }
        assert_eq!(parse_dir("./dir:data"), Ok("./dir:data".into()));
        for bad in ["", "dir:", "memory", "fdb:fdb.cluster"] {
            assert!(parse_dir(bad).is_err(), "{bad}");
        }
    }
}
