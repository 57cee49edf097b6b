//! What tests see of the inside of a bus: the decoders of all bytes from outside, and what a judge of its commits needs to
//! [`inspect`] them; and the division of work among nodes, for a [`pool`] of a test's own.

mod decoders;
pub mod inspect;
pub mod pool;

pub use self::decoders::Decoder;
