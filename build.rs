//! With the feature `foundationdb`: finds the client library, and says what to install where there is none.

use std::{env, path::Path};

/// Where the client library is usually installed.
const FOLDERS: [&str; 5] =
    ["/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/local/lib"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=FDB_CLIENT_LIB_PATH");
    if env::var_os("CARGO_FEATURE_FOUNDATIONDB").is_none() {
        return;
    }
    let given = env::var("FDB_CLIENT_LIB_PATH").ok();
    let folders = given.iter().map(String::as_str).chain(FOLDERS);
    let has_library = |folder: &&str| {
        ["libfdb_c.so", "libfdb_c.dylib"].iter().any(|name| Path::new(folder).join(name).exists())
    };
    match folders.into_iter().find(has_library) {
        // Not every linker looks in all of them by itself.
        Some(folder) => println!("cargo::rustc-link-search=native={folder}"),
        None => println!(
            "cargo::warning=the feature `foundationdb` needs the FoundationDB client library libfdb_c, 7.1 or newer, to link: \
             install the package foundationdb-clients of the FoundationDB release, or name the folder that holds libfdb_c \
             in FDB_CLIENT_LIB_PATH (see docs/foundationdb.md)"
        ),
    }
}
