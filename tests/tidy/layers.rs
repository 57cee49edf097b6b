//! Layers only use lower layers, siblings use each other only if the map lists the pair, and no files use each other in a circle.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use crate::{root, source, sources};

/// Layers whose folders are rooms of their own.
const WITH_ROOMS: [&str; 3] = ["front", "roles", "state"];

/// Returns the layer of a file, and its room in it: `src/roles/consumer/shard.rs` is in the room `consumer` of the layer `roles`.
fn place(file: &Path) -> (String, String) {
    let parts: Vec<_> =
        file.components().map(|part| part.as_os_str().to_str().expect("names are ASCII")).collect();
    let room = parts.get(1).copied().unwrap_or("mod.rs").trim_end_matches(".rs");
    (parts[0].trim_end_matches(".rs").to_owned(), room.to_owned())
}

fn map() -> String {
    fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap()
}

/// Returns the layers from the top, as they are in the first column of the map's table: `` | `roles` | … | ``.
fn layers() -> Vec<String> {
    let map = map();
    let section = map.split("\n## Layers").nth(1).expect("the map has a section on layers");
    let section = section.split("\n## ").next().unwrap();
    let names = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let names: Vec<_> = names.map(ToOwned::to_owned).collect();
    assert!(names.len() >= 5, "the layers were not found in the map");
    names
}

/// Returns the pairs of rooms in one layer where the first may use the second: `` `mirror` → `dispatcher` ``.
fn siblings() -> BTreeSet<(String, String)> {
    let map = map();
    let mut found = BTreeSet::new();
    for clause in map.lines().filter(|line| line.starts_with("- `") && line.contains("` → `")) {
        let (from, to) = clause.split_once(" → ").unwrap();
        let from = from.split('`').nth(1).unwrap();
        found.extend(to.split('`').skip(1).step_by(2).map(|to| (from.to_owned(), to.to_owned())));
    }
    assert!(found.len() > 5, "the pairs of siblings were not found in the map");
    found
}

fn uses() -> BTreeSet<(PathBuf, PathBuf)> {
    let src = root().join("src");
    let relative = |file: PathBuf| file.strip_prefix(&src).unwrap().to_owned();
    let found: BTreeSet<_> = source::Crate::parse(&src, "lib.rs")
        .uses()
        .into_iter()
        .map(|(from, to)| (relative(from), relative(to)))
        .collect();
    assert!(found.len() > 500, "only {} uses were found", found.len());
    found
}

#[test]
fn layers_only_look_down_and_siblings_where_it_is_said() {
    let layers = layers();
    let rank = |layer: &str| layers.iter().position(|known| known == layer);
    let siblings = siblings();
    let mut wrong = BTreeSet::new();
    let mut met = BTreeSet::new();
    for (from, to) in uses() {
        if from == Path::new("lib.rs") {
            continue;
        }
        let ((layer, room), (other_layer, other_room)) = (place(&from), place(&to));
        let (Some(above), Some(below)) = (rank(&layer), rank(&other_layer)) else {
            wrong.insert(format!("{} or {} is in no layer", from.display(), to.display()));
            continue;
        };
        let pair = (room.clone(), other_room.clone());
        let are_siblings = WITH_ROOMS.contains(&&*layer) && layer == other_layer && room != other_room;
        if above > below || (are_siblings && !siblings.contains(&pair)) {
            wrong.insert(format!("{} must not use {}", from.display(), to.display()));
        }
        if are_siblings {
            met.insert(pair);
        }
    }
    for (from, to) in siblings.difference(&met) {
        wrong.insert(format!("the map lets {from} use {to}, which it does not"));
    }
    assert!(wrong.is_empty(), "{}", wrong.into_iter().collect::<Vec<_>>().join("\n"));
}

/// Files that use each other in a circle can only be understood together.
#[test]
fn no_files_use_each_other_in_a_circle() {
    let program = root().join("src/bin/notibus");
    for uses in [uses(), source::Crate::parse(&program, "main.rs").uses()] {
        assert!(uses.len() > 20, "only {} uses were found", uses.len());
        refuse_circles(&uses);
    }
}

fn refuse_circles(uses: &BTreeSet<(PathBuf, PathBuf)>) {
    let mut lines = Vec::new();
    for circle in source::circles(uses) {
        let within: BTreeSet<_> = circle.iter().collect();
        lines.push(format!("a circle of {} files:", circle.len()));
        let pairs = uses.iter().filter(|(from, to)| within.contains(from) && within.contains(to));
        lines.extend(pairs.map(|(from, to)| format!("  {} uses {}", from.display(), to.display())));
    }
    assert!(lines.is_empty(), "{}", lines.join("\n"));
}

/// A store that knows its users cannot be read, tested or replaced without them.
#[test]
fn the_store_knows_nothing_of_the_bus() {
    for (path, text) in sources().into_iter().filter(|(path, _)| path.starts_with("src/store")) {
        let lowered = text.to_lowercase();
        for word in ["feed", "producer", "notifi", "shard", "tally"] {
            let begins_word = |at: usize| !lowered[..at].ends_with(char::is_alphanumeric);
            let found = lowered.match_indices(word).find(|(at, _)| begins_word(*at));
            assert_eq!(found, None, "{}", path.display());
        }
    }
}
