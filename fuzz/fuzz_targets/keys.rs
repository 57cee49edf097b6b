#![no_main]
//! See `notibus::test_util::Decoder::Keys`.

use libfuzzer_sys::fuzz_target;
use notibus::test_util::Decoder;

fuzz_target!(|input: &[u8]| Decoder::Keys.run(input));
