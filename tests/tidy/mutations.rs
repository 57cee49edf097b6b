//! The deliberate bugs still fit the code: the script that applies them, `tests/mutations/run`, takes too long to run every time.

use std::{fs, io, process::Command};

use super::root;

/// Returns the names of the deliberate bugs and their patches, in the order in which they are applied.
fn patches() -> Vec<(String, String)> {
    let files = fs::read_dir(root().join("tests/mutations")).unwrap().map(|file| file.unwrap().path());
    let patches = files.filter(|path| path.extension().is_some_and(|extension| extension == "patch"));
    let read = |path: std::path::PathBuf| {
        (path.file_stem().unwrap().to_str().unwrap().to_owned(), fs::read_to_string(&path).unwrap())
    };
    let mut patches: Vec<_> = patches.map(read).collect();
    patches.sort();
    assert!(patches.len() >= 70, "{}", patches.len());
    patches
}

#[test]
fn deliberate_bugs_fit_the_code_together() {
    let copy = tempfile::tempdir().unwrap();
    for (name, patch) in patches() {
        for file in patch.lines().filter_map(|line| line.strip_prefix("+++ b/")) {
            let to = copy.path().join(file);
            if !to.exists() {
                fs::create_dir_all(to.parent().unwrap()).unwrap();
                fs::copy(root().join(file), to).unwrap();
            }
        }
        let file = root().join(format!("tests/mutations/{name}.patch"));
        let applied =
            Command::new("patch").args(["-p1", "-f", "-F0", "-i"]).arg(file).current_dir(&copy).output();
        match applied {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                eprintln!("SKIPPED: there is no `patch`, so nobody knows whether the deliberate bugs fit");
                return;
            }
            applied => {
                let applied = applied.unwrap();
                let said = String::from_utf8_lossy(&applied.stdout);
                assert!(applied.status.success(), "{name}.patch does not fit any more:\n{said}");
            }
        }
    }
}

#[test]
fn each_deliberate_bug_has_its_switch_and_says_what_it_breaks() {
    for (name, patch) in patches() {
        let switch = format!("crate::is_on(\"{name}\")");
        assert!(patch.lines().any(|line| line.starts_with('+') && line.contains(&switch)), "{name}");
        let explanation = patch.split("\n\n").next().unwrap();
        assert!(
            explanation.ends_with('.') && !explanation.contains("--- "),
            "{name} does not say what it breaks"
        );
    }
}
