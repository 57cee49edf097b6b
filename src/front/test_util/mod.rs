//! Access to the internals of a bus for tests: the decoders of all bytes from outside; functions to [`inspect`] the rows that a bus
//! commits; and the division of work among nodes, for a [`pool`] of a test's own.

mod decoders;
pub mod inspect;
pub mod pool;

pub use self::decoders::Decoder;
