#![no_main]
//! See `notibus::test_util::Decoder::Query`.

use libfuzzer_sys::fuzz_target;
use notibus::test_util::Decoder;

fuzz_target!(|input: &[u8]| Decoder::Query.run(input));
