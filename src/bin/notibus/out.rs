//! Standard output, whose reader may close it without a failure; standard error; and files.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::Path,
};

use crate::failure::Failure;

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

/// Prints a line on standard error. If standard error is a file on a full disk, the line is lost, and only the exit code remains.
pub fn notice(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Creates a file that only its owner may read: names of databases are nobody else's.
pub fn new_private_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}
