#![no_main]
//! See `notibus::simulation::Decoder::Journal`.

use libfuzzer_sys::fuzz_target;
use notibus::simulation::Decoder;

fuzz_target!(|input: &[u8]| Decoder::Journal.run(input));
