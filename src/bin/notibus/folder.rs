//! `notibus check` and `notibus backup`: check and copy the folder of a store.

use std::path::PathBuf;

use notibus::store::{Database, FolderReport};
use serde_json::json;

use crate::{failure::Failure, out, store::Store};

/// Which folder to check.
#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// The folder of a store, as DIR or dir:DIR.
    #[arg(value_parser = parse_dir)]
    dir: PathBuf,
    /// Print for programs: a JSON object.
    #[arg(long)]
    json: bool,
}

/// What to copy.
#[derive(Debug, clap::Args)]
pub struct BackupArgs {
    /// The folder of a store, as DIR or dir:DIR. Another process may have it open, and go on committing.
    #[arg(value_parser = parse_dir)]
    dir: PathBuf,
    /// Where the copy goes: an empty or missing folder.
    #[arg(value_parser = parse_dir)]
    to: PathBuf,
}

/// Reads the name of a folder, which other commands write as a store. One whose name begins so is "./dir:…".
fn parse_dir(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("dir:").unwrap_or(text) {
        "" => Err("it names no folder".to_owned()),
        "memory" => {
            Err("what is in memory is in no folder; a folder of that name is \"./memory\"".to_owned())
        }
        path if text.starts_with("fdb:") => Err(format!("{path} is a cluster, and no folder")),
        path => Ok(path.into()),
    }
}

/// Says what is in a folder, and where it is damaged.
pub fn check(args: &CheckArgs) -> Result<(), Failure> {
    Store::Dir(args.dir.clone()).check_exists()?;
    let report = Database::check_dir(&args.dir)?;
    let damages: Vec<_> = report.damages.iter().map(ToString::to_string).collect();
    if args.json {
        let FolderReport { rows, version, torn_len, is_open, .. } = &report;
        out::line(
            &json!({ "rows": rows, "version": version, "torn_len": torn_len, "is_open": is_open, "damages": damages })
                .to_string(),
        )?;
    } else {
        damages.iter().try_for_each(|damage| out::line(&format!("damaged: {damage}")))?;
    }
    if damages.is_empty() {
        return if args.json { Ok(()) } else { out::line(&format!("whole: {}", readable(&report))) };
    }
    Err(Failure::BadInput(format!(
        "{} is damaged at {} places; {}. Restore it from a copy",
        args.dir.display(),
        report.damages.len(),
        readable(&report)
    )))
}

/// Copies a folder.
pub fn backup(args: &BackupArgs) -> Result<(), Failure> {
    Store::Dir(args.dir.clone()).check_exists()?;
    let report = Database::backup_dir(&args.dir, &args.to)?;
    out::line(&format!("copied to {}: {}", args.to.display(), readable(&report)))
}

/// Describes a folder for people.
fn readable(report: &FolderReport) -> String {
    let FolderReport { rows, version, torn_len, is_open, .. } = report;
    let open = if *is_open { "; another process has it open" } else { "" };
    let torn =
        if *torn_len > 0 { format!("; {torn_len} bytes after the last commit") } else { String::new() };
    format!("{rows} rows at version {version}{torn}{open}")
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
