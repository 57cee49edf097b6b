//! How commands print what they list: for people a table with a header, for programs an object a line.

use std::{
    fmt::Write as _,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::Value;

use crate::{failure::Failure, out};

/// A table for people.
pub struct Table {
    /// The header, and the rows.
    lines: Vec<Vec<String>>,
}

impl Table {
    /// A table with this header.
    pub fn new(header: &[&str]) -> Self {
        Self { lines: vec![header.iter().map(|&name| name.to_owned()).collect()] }
    }

    /// Adds a row, which has as many cells as the header.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        // What others have called something may not forge a line, or move the cursor of a terminal.
        let clean =
            |cell: String| cell.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        self.lines.push(cells.into_iter().map(clean).collect());
    }

    /// The table as text, or `empty` if it has no rows.
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

/// Prints `values`, each as an object a line if `json`, else as a table with `header`, whose rows are what `row` makes of them; or
/// `empty` if there are none.
pub fn print(
    json: bool,
    values: &[Value],
    header: &[&str],
    row: impl Fn(&Value) -> Vec<String>,
    empty: &str,
) -> Result<(), Failure> {
    if json {
        return values.iter().try_for_each(|value| out::line(&value.to_string()));
    }
    let mut table = Table::new(header);
    for value in values {
        table.row(row(value));
    }
    out::line(table.text(empty).trim_end())
}

/// A value as text: a string without its quotes, and what is not there as a dash.
pub fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

/// The elements of an array; none of anything else.
pub fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A wall-clock time, of milliseconds since 1970.
pub fn time(ms: &Value) -> String {
    let Some(ms) = ms.as_u64() else { return "-".to_owned() };
    UNIX_EPOCH.checked_add(Duration::from_millis(ms)).map_or_else(
        || "?".to_owned(),
        |time: SystemTime| humantime::format_rfc3339_seconds(time).to_string(),
    )
}

/// A duration, of milliseconds.
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
