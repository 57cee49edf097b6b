#![no_main]
//! See `notibus::simulation::Decoder::Values`.

use libfuzzer_sys::fuzz_target;
use notibus::simulation::Decoder;

fuzz_target!(|input: &[u8]| Decoder::Values.run(input));
