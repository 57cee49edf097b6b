//! What tests see of the inside of a bus: the decoders of all bytes from outside.

mod decoders;

pub use self::decoders::Decoder;
