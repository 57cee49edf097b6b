//! The commands in the README and on the pages work: the blocks of a page that are marked `sh`, in their order, on a fresh folder.
//!
//! `cargo run --release -- …` runs the command as it was built for the tests, and likewise the examples. `serve` runs in the background on
//! a port of its own, and targets that cargo checks elsewhere (`cargo test`, `cargo bench`) only have to exist. A block that cannot be run
//! in a test, because it takes a cluster, hours or the network, is marked `sh no-run`. The Rust code in the README and the guide is run as
//! doc tests.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Stdio},
};

/// The maximum number of blocks that are not run, over all pages.
const NOT_RUN_MAX: usize = 3;

/// The pages whose blocks are run.
const RUN: [&str; 9] = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/guide/backup.md",
    "docs/guide/relocation.md",
    "docs/http.md",
    "docs/operations.md",
    "docs/foundationdb.md",
    "docs/performance.md",
    "docs/testing.md",
];

/// Shell functions that replace commands in the blocks, which follow this text.
const PRELUDE: &str = r#"
set -euo pipefail
umask 022
served=""
AT=""
end() {
    [ -z "$served" ] || { kill -TERM "$served"; wait "$served" || true; }
    served=""
}
trap end EXIT
notibus() {
    if [ "${1:-}" = serve ]; then
        end
        # The server before may have left its address there.
        : >serve.log
        # One that is reached from elsewhere says so by its address, which nobody in a test has to know.
        command "$NOTIBUS" "${@//0.0.0.0:5985/0.0.0.0:0}" >serve.log 2>serve.err </dev/null &
        served=$!
        while ! grep -q 'listening on' serve.log; do
            kill -0 "$served" 2>/dev/null || { cat serve.err >&2; return 1; }
            sleep 0.05
        done
        AT=$(sed -n 's,.*http://,,p' serve.log)
        AT=${AT/0.0.0.0/127.0.0.1}
    else
        # An export needs a bus at rest. The page says that the server has ended by then.
        [ "${1:-}" != export ] || end
        command "$NOTIBUS" "${@//localhost:5985/$AT}"
    fi
}
mv() {
    # The page says that the node is stopped before its folder is moved.
    end
    command mv "$@"
}
cargo() {
    case "$1" in
    run)
        local example=""
        while [ "$1" != -- ]; do
            [ "$1" != --example ] || example=$2
            shift
        done
        shift
        if [ -n "$example" ]; then
            # `cargo test` builds it; a test that is run alone finds none.
            local built=${NOTIBUS%/*}/examples/$example
            [ -x "$built" ] || (cd "$ROOT" && command cargo build --quiet --example "$example")
            "$built" "$@"
        else
            notibus "$@"
        fi
        ;;
    test | check | bench | build) ;;
    *)
        echo "a page says: cargo $*" >&2
        return 1
        ;;
    esac
}
curl() {
    # One that goes on forever is given some time to have something to show; if not, it is not as the page says.
    case "$*" in
    *feed=continuous*)
        command curl -sS --no-buffer -m 3 "${@//localhost:5985/$AT}" >>followed || [ $? = 28 ]
        ;;
    *)
        command curl -sS --fail-with-body "${@//localhost:5985/$AT}"
        ;;
    esac
}
"#;

struct Block<'a> {
    /// The text after the opening fence.
    mark: &'a str,
    line: usize,
    text: String,
}

fn blocks(page: &str) -> Vec<Block<'_>> {
    let (mut blocks, mut open) = (Vec::new(), None::<Block<'_>>);
    for (number, line) in page.lines().enumerate() {
        match (line.trim_start().strip_prefix("```"), &mut open) {
            (Some(mark), None) => {
                open = Some(Block { mark: mark.trim(), line: number + 1, text: String::new() });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(block)) => block.text.extend([line, "\n"]),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "the last block ends");
    blocks
}

fn page(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// Runs the blocks of a page, and then `check`, in a fresh folder.
fn run(path: &str, check: &str) {
    if Command::new("curl").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED, not passed: {path} needs curl");
        return;
    }
    let page = page(path);
    let mut script = PRELUDE.to_owned();
    for block in blocks(&page).iter().filter(|block| block.mark == "sh") {
        let named = format!("echo '== {path}, line {}' >&2\n", block.line);
        script.extend([named, block.text.clone()]);
    }
    let folder = tempfile::tempdir().unwrap();
    symlink(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples"), folder.path().join("examples")).unwrap();
    let output = Command::new("bash")
        .args(["-c", &format!("{script}\nfor job in $(jobs -p); do [ \"$job\" = \"$served\" ] || wait \"$job\"; done\n{check}\n")])
        .current_dir(&folder)
        .env("NOTIBUS", env!("CARGO_BIN_EXE_notibus"))
        .env("ROOT", env!("CARGO_MANIFEST_DIR"))
        .env("NOTIBUS_LISTEN", "127.0.0.1:0")
        .env_remove("NOTIBUS_CREDENTIALS")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{path}: {:?}\n{}{}", output.status, said[0], said[1]);
}

#[test]
fn the_readme_works_as_it_is_typed() {
    run("README.md", "grep -q '\"db_name\":\"shop/orders\".*\"type\":\"created\"' followed");
}

#[test]
fn the_page_of_http_works_as_it_is_typed() {
    // The last server of the page accepts clients with credentials, and no others.
    run(
        "docs/http.md",
        "curl -H \"Authorization: Bearer $(cat indexer.secret)\" localhost:5985/_db_updates | grep -q shop/orders",
    );
}

#[test]
fn the_page_of_operations_works_as_it_is_typed() {
    run("docs/operations.md", "notibus consumers list --url http://localhost:5985 | grep -q mailer");
}

/// The events that a page records are there after its last block: in the copy that replaced the folder, or in the other store.
#[test]
fn the_pages_of_backups_and_moves_work_as_they_are_typed() {
    let recorded =
        "curl 'localhost:5985/_db_updates?since=0&feed=longpoll&timeout=10000' | grep -q shop/orders";
    for path in ["docs/guide/backup.md", "docs/guide/relocation.md"] {
        run(path, recorded);
    }
}

/// Most commands on these pages are tests and benchmarks, which only need to exist.
#[test]
fn the_pages_for_contributors_work_as_they_are_typed() {
    for path in ["CONTRIBUTING.md", "docs/foundationdb.md", "docs/performance.md", "docs/testing.md"] {
        run(path, "true");
    }
}

/// Few blocks are not run, and no block escapes because it lacks a mark.
#[test]
fn blocks_say_what_they_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages = vec![root.join("README.md"), root.join("CONTRIBUTING.md"), root.join("ops/README.md")];
    for folder in ["docs", "docs/guide"] {
        let found = fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
        pages.extend(found.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    }
    let manifest = page("Cargo.toml");
    let mut not_run = 0;
    for path in pages {
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        for block in blocks(&page(&name)) {
            assert!(!block.mark.is_empty(), "{name}, line {}: of what kind is it?", block.line);
            let is_run = match block.mark {
                "sh" => RUN.contains(&&*name),
                // A trial in tests/clients runs these.
                "sh mini_couch" => name == "docs/http.md",
                mark => mark == "sh no-run" || !mark.starts_with("sh"),
            };
            assert!(is_run, "{name}, line {}: no test runs it", block.line);
            not_run += usize::from(block.mark == "sh no-run");
            // Even commands that are not run must name existing targets and features.
            let words: Vec<_> = block.text.split_whitespace().collect();
            for pair in words.windows(2).filter(|_| block.mark.starts_with("sh")) {
                let is_there = match pair[0] {
                    "--test" => ["tests/NAME.rs", "tests/NAME/main.rs"]
                        .iter()
                        .any(|place| root.join(place.replace("NAME", pair[1])).exists()),
                    "--bench" => root.join(format!("benches/{}.rs", pair[1])).exists(),
                    "--example" => ["examples/NAME.rs", "examples/NAME/main.rs"]
                        .iter()
                        .any(|place| root.join(place.replace("NAME", pair[1])).exists()),
                    "--features" => {
                        pair[1].split(',').all(|feature| manifest.contains(&format!("\n{feature} = [")))
                    }
                    _ => true,
                };
                assert!(is_there, "{name}, line {}: {} {}", block.line, pair[0], pair[1]);
            }
        }
    }
    assert!(not_run <= NOT_RUN_MAX, "{not_run} blocks are not run");
}
