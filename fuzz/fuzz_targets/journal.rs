#![no_main]
//! See `disk::open_with_file`.

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/disk/mod.rs"]
mod disk;

fuzz_target!(|input: &[u8]| disk::open_with_file(input));
