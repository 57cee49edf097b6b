//! Keeps the house in order: layers only use lower layers, files have one purpose and state it, and nothing is left undone.
//!
//! The layers are read from the table in `ARCHITECTURE.md`, so that the page and the code cannot drift apart.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod budget;
mod layers;
mod mutations;
mod source;

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The line limit of a file.
const LINES_MAX: usize = 800;

/// Folders with Rust code.
const FOLDERS: [&str; 4] = ["src", "tests", "benches", "examples"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns all Rust files of the project with their text, by path from its root.
fn sources() -> Vec<(PathBuf, String)> {
    fn collect(folder: &Path, found: &mut Vec<(PathBuf, String)>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path.strip_prefix(root()).unwrap().to_owned(), text));
            }
        }
    }
    let mut found = Vec::new();
    for folder in FOLDERS {
        collect(&root().join(folder), &mut found);
    }
    assert!(found.len() > 30, "only {} files were found", found.len());
    found
}

#[test]
fn files_are_small_and_say_what_they_are() {
    for (path, text) in sources() {
        let lines = text.lines().count();
        assert!(lines <= LINES_MAX, "{} has {lines} lines", path.display());
        assert!(text.starts_with("//!"), "{} does not open with //!", path.display());
    }
}

#[test]
fn nothing_is_left_undone() {
    // Assembled here, so that the test does not find its own file.
    let marks = ["TO", "FIX", "XX"].iter().zip(["DO", "ME", "X"]).map(|(a, b)| format!("{a}{b}"));
    let marks: Vec<_> = marks.chain(["todo", "unimplemented"].map(|name| format!("{name}!("))).collect();
    let skipped = format!("#[{}", "ignore");
    for (path, text) in sources() {
        for mark in marks.iter().chain([&skipped]) {
            assert!(!text.contains(mark.as_str()), "{} has {mark}", path.display());
        }
    }
}

#[test]
fn exceptions_from_lints_say_why() {
    // Assembled here, so that the test does not find its own file.
    let forms = ["allow", "expect"].map(|lint| format!("[{lint}("));
    for (path, text) in sources() {
        for (place, _) in forms.iter().flat_map(|form| text.match_indices(form.as_str())) {
            let end = place + text[place..].find(")]").unwrap();
            assert!(
                text[place..end].contains("reason ="),
                "{} has an exception without a reason",
                path.display()
            );
        }
    }
}

/// The glossary has one word for each thing; it has replaced the words listed here.
#[test]
fn words_that_were_replaced_are_gone() {
    // Assembled here, so that the test does not find its own file.
    let gone = [
        ("an", "ew"),
        ("gla", "nce"),
        ("sight", "ing"),
        ("sigh", "tings"),
        ("put ", "down"),
        ("puts ", "down"),
        ("who", "ever"),
        ("who", "m"),
        ("to", "ld"),
        ("deal", "er"),
        ("keep", "er"),
        ("se", "at"),
        ("surround", "ings"),
        ("clos", "ings"),
        ("arriv", "als"),
        ("wi", "sh"),
        ("wi", "shes"),
        ("walk", "er"),
        ("he", "art"),
        ("stand", "ing"),
        ("look ", "interval"),
        ("for ", "ever"),
    ];
    let gone = gone.map(|(begin, end)| format!("{begin}{end}"));
    // Names have underscores between their words.
    let named =
        |(path, text): (PathBuf, String)| (path.display().to_string(), text.to_lowercase().replace('_', " "));
    for (path, text) in sources().into_iter().chain(pages()).map(named) {
        for word in &gone {
            let is_word = |at: usize| {
                let letter = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
                !letter(text[..at].chars().next_back()) && !letter(text[at + word.len()..].chars().next())
            };
            assert!(!text.match_indices(word.as_str()).any(|(at, _)| is_word(at)), "{path} has {word:?}");
        }
    }
}

/// These type names say nothing, or stood for several things. A world is a simulated bus, and nothing else.
#[test]
fn names_of_types_that_were_replaced_are_gone() {
    const GONE: [&str; 7] = ["Form", "Look", "Looks", "Place", "Right", "Seen", "World"];
    for (path, text) in sources() {
        let is_the_world = path == Path::new("tests/simulation/world.rs");
        for line in text.lines() {
            let mut words = line.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
            // Types within traits have the names that their traits give them.
            let is_type = |word: &str| ["struct", "enum", "trait", "type"].contains(&word);
            if line.starts_with(' ') || !words.any(is_type) {
                continue;
            }
            let name = words.next().unwrap_or_default();
            let is_gone = GONE.contains(&name) && !(is_the_world && name == "World");
            assert!(!is_gone, "{}: {name}", path.display());
        }
    }
}

/// Returns all pages with their text, by path from the root.
fn pages() -> Vec<(PathBuf, String)> {
    let folders = ["", "docs", "docs/guide"].map(|folder| root().join(folder));
    let entries = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap());
    let paths = entries.map(|entry| entry.unwrap().path());
    let pages = paths.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let pages: Vec<_> = pages.map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect();
    assert!(pages.len() > 8, "only {} pages were found", pages.len());
    pages
}

#[test]
fn the_front_pages_are_short() {
    for (page, lines_max) in [("README.md", 130), ("ARCHITECTURE.md", 160)] {
        let lines = fs::read_to_string(root().join(page)).unwrap().lines().count();
        assert!(lines <= lines_max, "{page} has {lines} lines, at most {lines_max}: the rest goes to docs/");
    }
}

#[test]
fn links_between_pages_lead_somewhere() {
    let mut wrong = Vec::new();
    for (path, text) in pages() {
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.starts_with("http") {
                continue;
            }
            let (file, section) = target.split_once('#').unwrap_or((target, ""));
            let file = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            let heading = |line: &str| {
                let title = line.trim_start_matches('#').trim().to_lowercase();
                line.starts_with('#') && title.replace(' ', "-") == section
            };
            let leads =
                fs::read_to_string(&file).is_ok_and(|text| section.is_empty() || text.lines().any(heading));
            if !leads {
                wrong.push(format!("{}: {target}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "links that lead nowhere:\n{}", wrong.join("\n"));
}

/// Each file and module that the map names exists.
#[test]
fn what_the_map_names_is_there() {
    let map = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let quoted = map.split('`').skip(1).step_by(2);
    let named: Vec<_> = quoted.filter(|text| text.contains('/') && !text.contains(' ')).collect();
    assert!(named.len() > 20, "only {} places were found", named.len());
    let is_there = |place: &&&str| root().join(place).exists() || root().join("src").join(place).exists();
    let missing: Vec<_> = named.iter().filter(|place| !is_there(place)).collect();
    assert!(missing.is_empty(), "the map names what is not there: {missing:?}");
}

#[test]
fn tests_that_pages_name_are_there() {
    let code: String = sources().into_iter().map(|(_, text)| text).collect();
    let mut missing = Vec::new();
    for (path, text) in pages() {
        for name in text.split('`').skip(1).step_by(2) {
            // Tests in a folder are named with their file.
            let name = name.rsplit("::").next().expect("there is always a last one");
            let is_of_words = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
            if is_of_words && name.matches('_').count() >= 3 && !code.contains(name) {
                missing.push(format!("{}: {name}", path.display()));
            }
        }
    }
    assert!(missing.is_empty(), "there are no such tests: {missing:?}");
}

/// Each line of the table of differences from CouchDB names a test, with its file.
#[test]
fn each_difference_from_couchdb_names_a_test() {
    let text = fs::read_to_string(root().join("docs/couchdb.md")).unwrap();
    let is_line = |line: &&str| line.starts_with("| ") && !line.ends_with("| test |");
    let lines: Vec<_> = text.lines().filter(is_line).collect();
    assert!(lines.len() > 25, "the table is there");
    for line in lines {
        let cell = line.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        for name in cell.split(", ") {
            let (file, case) = name.trim_matches('`').split_once("::").unwrap_or_else(|| panic!("{line}"));
            let places = [format!("tests/http/{file}.rs"), format!("tests/{file}.rs")];
            let source = places.iter().find_map(|place| fs::read_to_string(root().join(place)).ok());
            assert!(source.is_some_and(|text| text.contains(&format!("fn {case}()"))), "{line}");
        }
    }
}

/// A program that users build, or get as an image, contains no test code.
#[test]
fn users_get_nothing_of_tests() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let features = manifest.split("\n[features]\n").nth(1).unwrap().split("\n[").next().unwrap();
    let default = features.lines().find(|line| line.starts_with("default = ")).unwrap();
    let image = fs::read_to_string(root().join("ops/Dockerfile")).unwrap();
    let image = image.lines().find(|line| line.starts_with("ARG FEATURES=")).unwrap();
    assert!(!default.contains("test-util") && !image.contains("test-util"), "users get `test-util`");
}
