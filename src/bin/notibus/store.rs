//! `--store`: which store to use.

use std::{path::PathBuf, str::FromStr};

use notibus::{Result, store::Database};

/// Which store to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Store {
    /// In memory; gone when the process ends.
    Memory,
    /// In a folder.
    Dir(PathBuf),
}

impl Store {
    /// Opens the store.
    pub fn open(&self) -> Result<Database> {
        match self {
            Self::Memory => Ok(Database::memory()),
            Self::Dir(path) => Database::open_dir(path),
        }
    }
}

impl FromStr for Store {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "memory" => Ok(Self::Memory),
            Some(("dir", path)) if !path.is_empty() => Ok(Self::Dir(path.into())),
            _ => Err(format!("{text:?} is neither \"memory\" nor \"dir:PATH\"")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_are_told_apart() {
        assert_eq!("memory".parse(), Ok(Store::Memory));
        assert_eq!("dir:a:b".parse(), Ok(Store::Dir("a:b".into())));
        for bad in ["", "dir:", "dir", "disk:x", "memory:x"] {
            assert!(bad.parse::<Store>().is_err(), "{bad}");
        }
    }
}
