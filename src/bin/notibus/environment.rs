//! Every option is also read from the environment.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command, CommandFactory, builder::BoolishValueParser};

use crate::Cli;

/// Options of which one rules out the other.
const EITHER: [&str; 2] = ["store", "url"];

/// The command with its subcommands, whose options are read from the environment where `line` does not have them: `--some-option` as
/// `NOTIBUS_SOME_OPTION`. If `line` says by one of [`EITHER`] what to ask, the environment has no say in it by the other.
pub fn command(line: impl IntoIterator<Item = OsString>) -> Command {
    let line: Vec<_> = line.into_iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let is_given = |name: &str| {
        let option = format!("--{name}");
        line.iter().any(|word| {
            word.strip_prefix(&option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        })
    };
    with_environment(Cli::command(), EITHER.iter().any(|name| is_given(name)))
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

fn variable(option: &str) -> String {
    format!("NOTIBUS_{}", option.replace('-', "_").to_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(command: &Command) -> Vec<(String, Option<OsString>)> {
        let own = command
            .get_arguments()
            .filter_map(|arg| Some((arg.get_long()?.to_owned(), arg.get_env()?.to_owned().into())));
        own.chain(command.get_subcommands().flat_map(options)).collect()
    }

    #[test]
    fn every_option_has_a_variable_and_none_has_that_of_the_credentials() {
        let command = command([]);
        command.clone().debug_assert();
        let named = options(&command);
        for (option, env) in &named {
            let env = env.clone().unwrap_or_default();
            let expected = if option == "credentials" {
                "NOTIBUS_CREDENTIALS_FILE".to_owned()
            } else {
                variable(option)
            };
            assert_eq!(env.to_str(), Some(&*expected));
        }
        for option in ["store", "url", "json", "deadline", "cors-origin", "yes", "watch", "listen"] {
            assert!(named.iter().any(|(name, _)| name == option), "{option}");
        }
        let count = |command: &Command| count(command);
        assert_eq!(named.len(), count(&command), "each one");
    }

    /// How many options there are, besides `--help` and `--version`.
    fn count(command: &Command) -> usize {
        let own = command.get_arguments().filter(|arg| arg.get_long().is_some());
        own.count() + command.get_subcommands().map(count).sum::<usize>()
    }

    #[test]
    fn the_line_says_what_to_ask() {
        let of = |line: &[&str]| {
            let named = options(&command(line.iter().map(OsString::from)));
            named.iter().filter(|(name, _)| EITHER.contains(&&**name)).count()
        };
        assert!(of(&["status"]) > 2);
        assert_eq!(of(&["status", "--url=http://localhost"]), 0);
    }
}
