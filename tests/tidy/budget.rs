//! Size is a feature: each room of the library has a budget of lines, and so have the tests of whole worlds, the catalogue of keys and the
//! pages. A change that raises a number in this file says why in its commit.
//!
//! `cargo test --test tidy budgets -- --nocapture` prints the table.

use std::{collections::BTreeSet, fs, path::Path};

use crate::{root, sources};

/// The line limit of each room. A file belongs to the longest of these paths that its own path begins with.
const ROOMS: [(&str, usize); 21] = [
    ("src", 175),
    ("src/base", 3_805),
    ("src/store", 1_405),
    ("src/store/embedded", 5_820),
    ("src/store/fdb", 865),
    ("src/store/testing", 1_060),
    ("src/state", 3_090),
    ("src/state/keys", 2_645),
    ("src/state/feed", 1_955),
    ("src/state/membership", 2_480),
    ("src/roles", 200),
    ("src/roles/producer", 545),
    ("src/roles/notifier", 1_990),
    ("src/roles/dispatcher", 3_605),
    ("src/roles/janitor", 765),
    ("src/roles/changes", 880),
    ("src/roles/consumer", 6_490),
    ("src/bus", 1_430),
    ("src/bus/relocation", 635),
    ("src/front", 6_505),
    ("src/bin", 2_380),
];

/// The line limit of all of `src`.
const SRC_LINES: usize = 48_680;

/// The file limit of `src`.
const SRC_FILES: usize = 215;

/// The line limit of `tests/simulation`.
const SIMULATION_LINES: usize = 10_460;

/// The row limit of the catalogue of keys.
const KEY_FAMILIES: usize = 28;

/// The word limit of the pages, without the figures, which a script writes.
const WORDS: usize = 16_000;

/// The lines of Rust files, and how many of them are for tests only.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    files: usize,
    lines: usize,
    tests: usize,
}

impl Size {
    fn of<'a>(files: impl Iterator<Item = (&'a Path, &'a str)>, test_files: &BTreeSet<String>) -> Self {
        let mut size = Self::default();
        for (path, text) in files {
            let lines = text.lines().count();
            size.files += 1;
            size.lines += lines;
            let is_test = test_files.contains(&path.with_extension("").display().to_string());
            size.tests += if is_test { lines } else { test_lines(text) };
        }
        size
    }
}

/// The number of lines in a file's test-only modules.
fn test_lines(text: &str) -> usize {
    let is_begin = |lines: &[&str]| {
        lines[0].starts_with("#[cfg(") && lines[0].contains("test") && {
            lines[1].starts_with("mod ") && lines[1].ends_with('{')
        }
    };
    let lines: Vec<_> = text.lines().collect();
    let begins = (0..lines.len().saturating_sub(1)).filter(|&at| is_begin(&lines[at..]));
    begins.map(|at| lines[at..].iter().position(|line| *line == "}").map_or(0, |end| end + 1)).sum()
}

/// The test-only files, without their extensions: modules that are declared under `#[cfg(test)]`.
fn test_files<'a>(files: impl Iterator<Item = (&'a Path, &'a str)>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (path, text) in files {
        let is_root = path.file_name().is_some_and(|name| name == "mod.rs");
        let folder = if is_root { path.parent().unwrap().to_owned() } else { path.with_extension("") };
        for declared in text.split("#[cfg(test)]\nmod ").skip(1) {
            if let Some((name, _)) = declared.split_once(";\n").filter(|(name, _)| !name.contains([' ', '{']))
            {
                found.insert(folder.join(name).display().to_string());
            }
        }
    }
    found
}

/// Counts the words of the hand-written pages below `folder`.
fn words(folder: &Path) -> usize {
    let mut words = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            words += self::words(&path);
        } else if path.extension().is_some_and(|extension| extension == "md") && !path.ends_with("figures.md")
        {
            words += fs::read_to_string(&path).unwrap().split_whitespace().count();
        }
    }
    words
}

#[test]
fn budgets_hold() {
    let sources = sources();
    let files = || sources.iter().map(|(path, text)| (path.as_path(), text.as_str()));
    let tests = test_files(files());
    let mut over = Vec::new();
    let mut row = |what: &str, of: &str, number: usize, budget: usize| {
        println!("{what:<24} {number:>6} of {budget:>6} {of}");
        if number > budget {
            over.push(format!("{what} has {number} {of}, its budget is {budget}"));
        }
    };
    for (room, budget) in ROOMS {
        let in_room = |path: &Path| {
            let rooms = ROOMS.iter().filter(|(other, _)| path.starts_with(other));
            rooms.max_by_key(|(other, _)| other.len()).is_some_and(|(other, _)| *other == room)
        };
        let size = Size::of(files().filter(|(path, _)| in_room(path)), &tests);
        row(room, &format!("lines, {} of tests, in {} files", size.tests, size.files), size.lines, budget);
    }
    let src = Size::of(files().filter(|(path, _)| path.starts_with("src")), &tests);
    row("all of src", &format!("lines, {} of tests", src.tests), src.lines, SRC_LINES);
    row("all of src", "files", src.files, SRC_FILES);
    let simulation = files().filter(|(path, _)| path.starts_with("tests/simulation"));
    row("tests/simulation", "lines", Size::of(simulation, &tests).lines, SIMULATION_LINES);
    let catalogue = fs::read_to_string(root().join("src/state/keys/mod.rs")).unwrap();
    let is_family = |line: &&str| {
        let number = line.strip_prefix("//! | ").and_then(|rest| rest.split(' ').next());
        number.is_some_and(|number| number.parse::<u16>().is_ok())
    };
    row("src/state/keys", "key families", catalogue.lines().filter(is_family).count(), KEY_FAMILIES);
    let pages = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "ops/README.md"];
    let front = pages.iter().map(|page| fs::read_to_string(root().join(page)).unwrap());
    let front: usize = front.map(|text| text.split_whitespace().count()).sum();
    row("pages", "words", words(&root().join("docs")) + front, WORDS);
    assert!(over.is_empty(), "over budget:\n{}", over.join("\n"));
}
