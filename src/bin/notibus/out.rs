//! Standard output, whose reader may close it without a failure; standard error; and files.

use std::{
    fs::{File, OpenOptions},
    io::{self, Stderr, Write},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use tracing_subscriber::fmt::writer::OptionalWriter;

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

/// Whether the last line of the process is printed.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Prints why the process ends. Nothing is logged afterwards, because failures of ending roles are of no interest.
pub fn last_notice(text: &str) {
    IS_OVER.store(true, Ordering::Relaxed);
    notice(text);
}

/// Where lines of the log go.
pub fn log() -> OptionalWriter<Stderr> {
    if IS_OVER.load(Ordering::Relaxed) { OptionalWriter::none() } else { OptionalWriter::some(io::stderr()) }
}

/// Creates a file, or empties one unless it `must_be_new`. Only its owner may read it: names of databases are nobody else's.
pub fn private_file(path: &Path, must_be_new: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).create_new(must_be_new);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(path)?;
    // It may have been there, with other permissions; or it is a device, whose permissions are not ours.
    #[cfg(unix)]
    if file.metadata()?.is_file() {
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    }
    Ok(file)
}
