//! `notibus check` and `notibus backup`: check and copy the folder of a store.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use notibus::store::{Database, FolderReport};

use crate::Failure;

/// Which folder to check.
#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// The folder of a store.
    dir: PathBuf,
}

/// What to copy.
#[derive(Debug, clap::Args)]
pub struct BackupArgs {
    /// The folder of a store. Another process may have it open, and go on committing.
    dir: PathBuf,
    /// Where the copy goes: an empty or missing folder.
    to: PathBuf,
}

/// Reports the content of a folder, and its damage.
pub fn check(args: &CheckArgs) -> Result<(), Failure> {
    let report = Database::check_dir(existing(&args.dir)?)?;
    for damage in &report.damages {
        say(&format!("damaged: {damage}"))?;
    }
    if report.damages.is_empty() {
        return say(&format!("whole: {}", readable(&report)));
    }
    Err(Failure::Failed(format!(
        "{} is damaged at {} places; {}. Restore it from a copy, or save what is whole by `notibus export --salvage`",
        args.dir.display(),
        report.damages.len(),
        readable(&report)
    )))
}

/// Copies a folder.
pub fn backup(args: &BackupArgs) -> Result<(), Failure> {
    let report = Database::backup_dir(existing(&args.dir)?, &args.to)?;
    say(&format!("copied to {}: {}", args.to.display(), readable(&report)))
}

/// Returns the folder if it exists.
fn existing(dir: &Path) -> Result<&Path, Failure> {
    if dir.exists() {
        Ok(dir)
    } else {
        Err(Failure::BadInput(format!("there is no store at {}", dir.display())))
    }
}

/// Describes a folder for people.
fn readable(report: &FolderReport) -> String {
    let FolderReport { rows, version, torn_len, is_open, .. } = report;
    let open = if *is_open { "; another process has it open" } else { "" };
    let torn =
        if *torn_len > 0 { format!("; {torn_len} bytes behind the last commit") } else { String::new() };
    format!("{rows} rows at version {version}{torn}{open}")
}

/// Prints a line.
fn say(line: &str) -> Result<(), Failure> {
    writeln!(std::io::stdout(), "{line}").map_err(crate::out::failed)
}
