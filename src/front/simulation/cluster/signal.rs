//! Signals to processes.

use std::process::Command;

/// Sends a signal, such as `-KILL`, to a process. If there is none any more, nothing happens.
pub(super) fn signal(name: &str, process: u32) {
    let _ = Command::new("kill").args([name, &process.to_string()]).status();
}
