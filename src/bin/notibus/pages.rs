//! `notibus completions` and `notibus man`: files that packages install beside the command.

use std::{fs, io, path::PathBuf};

use clap::Command;
use clap_complete::Shell;

use crate::{environment, failure::Failure, out};

/// Which script to print.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// Where to write manual pages.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// The folder, which is made if need be. Without it, the page of `notibus` itself is printed.
    folder: Option<PathBuf>,
}

/// Prints a script for `command`.
pub fn completions(args: &CompletionsArgs, command: Command) -> Result<(), Failure> {
    // The script is made in memory first, because a failure to print it would panic.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut environment::command(command, []), "notibus", &mut script);
    io::Write::write_all(&mut io::stdout(), &script).map_err(out::failed)
}

/// Writes manual pages of `command`.
pub fn man(args: &ManArgs, command: Command) -> Result<(), Failure> {
    match &args.folder {
        None => clap_mangen::Man::new(environment::command(command, []))
            .render(&mut io::stdout())
            .map_err(out::failed),
        Some(folder) => fs::create_dir_all(folder)
            .and_then(|()| clap_mangen::generate_to(environment::command(command, []), folder))
            .map_err(|error| Failure::BadInput(format!("{}: {error}", folder.display()))),
    }
}
