//! What tests see of the inside of a bus: the decoders of all bytes from outside, what a judge of its commits needs to
//! [`inspect`] them, and, as long as these exist, the rows of groups and durable subscribers ([`rooms`]).

mod decoders;
pub mod inspect;
pub mod rooms;

pub use self::decoders::Decoder;
