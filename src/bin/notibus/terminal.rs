//! What a command prints and asks at a terminal: why it failed, with its exit code; questions before it destroys something; and lines and
//! tables for human readers, or one object per line for programs.

use std::{
    fmt::Write as _,
    fs::{File, OpenOptions},
    io::{self, IsTerminal, Write as _},
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use notibus::store::OpenCause;
use serde_json::Value;

/// Why a command failed. The kind determines the exit code.
#[derive(Debug)]
pub enum Failure {
    /// The input or an argument is wrong: exit code 2.
    BadInput(String),
    /// The work failed, or its result is wrong: exit code 1.
    Failed(String),
    /// The store takes no more writes, or cannot be opened because of its disk: exit code 3.
    StoreFailed(String),
    /// The reader of the output is gone: exit code 0, because that is the reader's choice.
    Closed,
}

impl From<notibus::Error> for Failure {
    fn from(error: notibus::Error) -> Self {
        use notibus::Error;
        match error {
            Error::Open { cause: OpenCause::SystemFailed, .. } => Self::StoreFailed(error.to_string()),
            Error::Open { cause: OpenCause::InUse, .. } => Self::Failed(error.to_string())
                .and("stop that process, or use its node with --url if the command has that option"),
            Error::Open { cause: OpenCause::Unreachable, .. } => Self::Failed(error.to_string()),
            Error::Invalid { .. }
            | Error::Open { .. }
            | Error::ConfigMismatch { .. }
            | Error::OtherFormat { .. }
            | Error::UnknownScheme { .. }
            | Error::NoFeed { .. }
            | Error::NoShard { .. }
            | Error::NoConsumer { .. }
            | Error::BusInUse { .. }
            | Error::Expired { .. }
            | Error::OlderThanRows { .. }
            | Error::Corrupt { .. } => Self::BadInput(error.to_string()),
            error => Self::Failed(error.to_string()),
        }
    }
}

impl Failure {
    /// Returns the same failure with `more` added to its reason.
    pub fn and(self, more: &str) -> Self {
        let and = |reason: String| format!("{reason}; {more}");
        match self {
            Self::BadInput(reason) => Self::BadInput(and(reason)),
            Self::Failed(reason) => Self::Failed(and(reason)),
            Self::StoreFailed(reason) => Self::StoreFailed(and(reason)),
            Self::Closed => Self::Closed,
        }
    }

    /// Returns the failure for work `what` that took longer than `timeout`.
    pub fn gave_up(what: &str, timeout: Duration) -> Self {
        Self::Failed(format!(
            "gave up {what}, after {}. Check that the store answers (a cluster: `fdbcli --exec status`); --timeout sets a longer limit",
            humantime::format_duration(timeout)
        ))
    }
}

/// Returns the result of `work`. Work that takes longer than `timeout` is dropped, and the failure names `what`.
pub async fn within<T, E: Into<Failure>>(
    timeout: Duration,
    what: &str,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, Failure> {
    let done = tokio::time::timeout(timeout, work).await;
    done.map_err(|_| Failure::gave_up(what, timeout))?.map_err(Into::into)
}

/// `--yes`: without it, a command asks before it destroys something.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Confirm {
    /// Do it without asking. Without this option, the command is refused if there is no terminal to ask at.
    #[arg(long)]
    yes: bool,
}

impl Confirm {
    /// Fails unless the user confirms that `what` should happen.
    pub fn check(self, what: &str) -> Result<(), Failure> {
        if self.yes {
            return Ok(());
        }
        if !io::stdin().is_terminal() {
            return Err(Failure::BadInput(format!("{what}: this cannot be undone; confirm it with --yes")));
        }
        let mut err = io::stderr();
        let asked = write!(err, "{what}: this cannot be undone. Continue? [y/N] ").and_then(|()| err.flush());
        asked.map_err(|error| Failure::Failed(format!("standard error: {error}")))?;
        let mut answer = String::new();
        io::stdin()
            .read_line(&mut answer)
            .map_err(|error| Failure::Failed(format!("standard input: {error}")))?;
        match answer.trim() {
            "y" | "Y" | "yes" => Ok(()),
            _ => Err(Failure::BadInput("nothing was changed".to_owned())),
        }
    }
}

/// Prints a line.
pub fn line(text: &str) -> Result<(), Failure> {
    writeln!(io::stdout(), "{text}").map_err(failed)
}

/// Converts an error from writing to standard output into a [`Failure`].
#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
pub fn failed(error: io::Error) -> Failure {
    match error.kind() {
        // For example, with `| head`.
        io::ErrorKind::BrokenPipe => Failure::Closed,
        _ => Failure::Failed(format!("standard output: {error}")),
    }
}

/// Prints a line on standard error. If standard error is a file on a full disk, the line is lost, and only the exit code remains.
pub fn notice(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Creates a file that only its owner may read, because the names of databases are private.
pub fn new_private_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// A table for human readers.
pub struct Table {
    /// The header and the rows.
    lines: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with this header.
    pub fn new(header: &[&str]) -> Self {
        Self { lines: vec![header.iter().map(|&name| name.to_owned()).collect()] }
    }

    /// Adds a row, which must have as many cells as the header.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.lines.push(cells.into_iter().map(|cell| clean(&cell)).collect());
    }

    /// Returns the table as text, or `empty` if it has no rows.
    pub fn text(&self, empty: &str) -> String {
        if self.lines.len() == 1 {
            return format!("{empty}\n");
        }
        let widths: Vec<_> = (0..self.lines[0].len())
            .map(|column| self.lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
            .collect();
        let mut text = String::new();
        for line in &self.lines {
            let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
            writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())
                .expect("a string takes everything");
        }
        text
    }
}

/// Prints `values`: one object per line if `json`, else a table with `header` and the rows that `row` makes of the values, or `empty` if
/// there are none.
pub fn print(
    json: bool,
    values: &[Value],
    header: &[&str],
    row: impl Fn(&Value) -> Vec<String>,
    empty: &str,
) -> Result<(), Failure> {
    if json {
        return values.iter().try_for_each(|value| line(&value.to_string()));
    }
    let mut table = Table::new(header);
    for value in values {
        table.row(row(value));
    }
    line(table.text(empty).trim_end())
}

/// Replaces control characters: names that others chose must not forge a line, or move the cursor of a terminal.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Returns a value as text: a string without its quotes, and null as a dash.
pub fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => clean(text),
        value => value.to_string(),
    }
}

/// Returns the elements of an array; none for any other value.
pub fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Formats a wall-clock time, given in milliseconds since 1970.
pub fn time(ms: &Value) -> String {
    let Some(ms) = ms.as_u64() else { return "-".to_owned() };
    UNIX_EPOCH.checked_add(Duration::from_millis(ms)).map_or_else(
        || "?".to_owned(),
        |time: SystemTime| humantime::format_rfc3339_seconds(time).to_string(),
    )
}

/// Formats a duration, given in milliseconds.
pub fn duration(ms: &Value) -> String {
    ms.as_u64().map_or_else(
        || "-".to_owned(),
        |ms| humantime::format_duration(Duration::from_millis(ms)).to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_others_stay_in_their_cells() {
        let mut table = Table::new(&["DB", "N"]);
        assert_eq!(table.text("none"), "none\n");
        table.row(["a\nb\x1b[2J".to_owned(), "1".to_owned()]);
        assert_eq!(table.text("none"), "DB       N\na\u{fffd}b\u{fffd}[2J  1\n");
    }
}
