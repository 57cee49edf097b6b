//! Standard output. A reader that has gone is no failure.

use std::io::{self, Write};

use crate::Failure;

/// Prints a line.
pub fn line(text: &str) -> Result<(), Failure> {
    writeln!(io::stdout(), "{text}").map_err(failed)
}

/// Why standard output could not be written.
#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
pub fn failed(error: io::Error) -> Failure {
    match error.kind() {
        // For instance with `| head`.
        io::ErrorKind::BrokenPipe => Failure::Closed,
        _ => Failure::Failed(format!("standard output: {error}")),
    }
}
