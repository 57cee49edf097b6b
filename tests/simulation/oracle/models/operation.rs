//! [`Operation`]: what the oracle knows of a call of an operator.

use notibus::group::GroupName;

/// A call by which an operator resets or deletes a group.
#[derive(Debug)]
pub(crate) struct Operation {
    pub group: GroupName,
    pub is_forced: bool,
    /// Whether it has done that.
    pub is_done: bool,
}
