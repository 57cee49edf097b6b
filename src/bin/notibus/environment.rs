//! Every option is also read from the environment.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command, builder::BoolishValueParser};

/// Options of which one rules out the other.
pub const EITHER: [&str; 2] = ["store", "url"];

/// `command` with its subcommands, whose options are read from the environment where `line` does not have them: `--some-option` as
/// `NOTIBUS_SOME_OPTION`. If `line` says by one of [`EITHER`] what to ask, the environment has no say in it by the other.
pub fn command(command: Command, line: impl IntoIterator<Item = OsString>) -> Command {
    let line: Vec<_> = line.into_iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let is_given = |name: &str| {
        let option = format!("--{name}");
        line.iter().any(|word| {
            word.strip_prefix(&option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        })
    };
    with_environment(command, EITHER.iter().any(|name| is_given(name)))
}

/// `command`, and all below it, with their variables; those of [`EITHER`] only unless the line says what to ask.
fn with_environment(command: Command, says_what_to_ask: bool) -> Command {
    let named = |arg: Arg| {
        let is_out = says_what_to_ask && EITHER.contains(&arg.get_id().as_str());
        // People write a flag in a variable as 1, yes or true.
        let arg = match arg.get_action() {
            ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
            _ => arg,
        };
        match arg.get_long().map(variable) {
            // It is made once, and needed for as long as the process runs.
            Some(name) if arg.get_env().is_none() && !is_out => arg.env(&*name.leak()).hide_env_values(true),
            _ => arg.hide_env_values(true),
        }
    };
    command.mut_args(named).mut_subcommands(|below| with_environment(below, says_what_to_ask))
}

pub fn variable(option: &str) -> String {
    format!("NOTIBUS_{}", option.replace('-', "_").to_uppercase())
}
