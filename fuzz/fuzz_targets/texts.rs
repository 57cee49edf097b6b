#![no_main]
//! See `notibus::test_util::Decoder::Texts`.

use libfuzzer_sys::fuzz_target;
use notibus::test_util::Decoder;

fuzz_target!(|input: &[u8]| Decoder::Texts.run(input));
