//! The switch for the deliberate mistakes in a copy of the code; this file becomes a module of the copy.

use std::{env, sync::LazyLock};

/// The mistake that is in the program, if any: the name of a deliberate bug, or the number of a mutant.
static SWITCHED_ON: LazyLock<String> = LazyLock::new(|| env::var("NOTIBUS_MUTATION").unwrap_or_default());

/// Whether the deliberate bug `name` is in the program.
pub(crate) fn is_on(name: &str) -> bool {
    *SWITCHED_ON == name
}

/// The number of the mutant that is in the program; 0 for none.
pub(crate) fn mutant() -> u32 {
    static NUMBER: LazyLock<u32> = LazyLock::new(|| SWITCHED_ON.parse().unwrap_or(0));
    *NUMBER
}
