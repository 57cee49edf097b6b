#![no_main]
//! See `notibus::simulation::Decoder::Texts`.

use libfuzzer_sys::fuzz_target;
use notibus::simulation::Decoder;

fuzz_target!(|input: &[u8]| Decoder::Texts.run(input));
