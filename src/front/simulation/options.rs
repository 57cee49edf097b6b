//! [`Options`] of a simulation.

use std::time::Duration;

use super::part::Part;

/// The options of a simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// How many nodes there are, besides a producer and, in most worlds, an operator. Default: 2 to 4, as the seed draws.
    pub nodes: Option<usize>,
    /// How long faults strike, in the time of the world. Default: 4 to 15 s, as the seed draws.
    pub chaos: Option<Duration>,
    /// A factor on the rates of faults that the seed draws; 0 for none. Default: 1.
    pub intensity: f64,
    /// Whether to keep the trace. Default: false.
    pub trace: bool,
    /// Parts of the seed's world to leave out, to find which ones a failure needs. Default: none.
    pub without: Vec<Part>,
    /// Whether to keep the rows of the store at the end of the faults. Default: false.
    pub rows: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nodes: None,
            chaos: None,
            intensity: 1.0,
            trace: false,
            without: Vec::new(),
            rows: false,
        }
    }
}
