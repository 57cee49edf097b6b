//! What tests see of the inside of a bus: the decoders of all bytes from outside, and what a judge of its commits needs to
//! [`inspect`] them.

mod decoders;
pub mod inspect;

pub use self::decoders::Decoder;
