//! [`FencingToken`]: orders the consumers of a shard, for effects outside of the store.

use std::fmt;

use crate::{base::encoding::Incarnation, state::keys::ShardId};

/// Distinguishes a newer consumer from an older one outside of the store: a consumer that has lost its shard without knowing it has a
/// smaller token than its successor.
///
/// It grows with each acquisition of the shard's lease, each reset of the group, each reshard and each move of the bus. Of
/// two batches with rows of one id, the later one never has the smaller token, unless the group was deleted and created in between.
/// Its text has a fixed length, and sorts as the token does.
///
/// # Recipe
///
/// Effects in the same store need no token: [`GroupBatch::checkpoint_in`](super::GroupBatch::checkpoint_in) makes them exactly-once. In
/// another database, keep the token and the sequence beside what a database's rows change, and change all three together, only forward:
///
/// ```sql
/// UPDATE mirror SET value = :value, token = :token, seq = :seq
///  WHERE db = :name AND (token < :token OR token = :token AND seq < :seq)
/// ```
///
/// If no row is updated, a newer consumer was here, or this consumer has worked on this row before. Both are fine, so go on. An object
/// store can do the same with a conditional write. A queue or a mail server cannot be fenced, and gets some messages twice.
///
/// - A **newer consumer** writes the last row of the one before once more, and a **reset** to an earlier position has its rows written again,
///   because both bring a greater token. So `value` has to follow from the row alone: an effect that adds, such as a counter, needs
///   `token <= :token AND seq < :seq` instead, and a reset does not repeat it.
/// - A **replay** ([`Group::replay`](super::Group::replay)) gives a row again with the sequence that it has in `mirror` already, mostly by
///   the same consumer. For it to write the row again, ask for `seq <= :seq`; or first set `seq` to the least sequence, 26 zeros, where it is
///   wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken {
    /// The number of moves of the bus.
    incarnation: Incarnation,
    /// How often the position of the group was set.
    generation: u64,
    /// The shard. Its successors have greater ids.
    shard: ShardId,
    /// How often the lease was acquired.
    epoch: u64,
}

impl FencingToken {
    pub(super) fn new(incarnation: Incarnation, generation: u64, shard: ShardId, epoch: u64) -> Self {
        Self { incarnation, generation, shard, epoch }
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { incarnation, generation, shard, epoch } = self;
        write!(f, "{:02x}{generation:016x}{:016x}{epoch:016x}", incarnation.0, shard.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_sort_as_their_texts_do() {
        let token = |incarnation, generation, shard, epoch| {
            FencingToken::new(Incarnation(incarnation), generation, ShardId(shard), epoch)
        };
        let tokens =
            [token(0, 1, 1, 9), token(0, 1, 3, 1), token(0, 2, 1, 10), token(0, 10, 1, 1), token(1, 1, 1, 1)];
        assert!(tokens.is_sorted_by(|a, b| a < b));
        assert!(tokens.map(|token| token.to_string()).is_sorted_by(|a, b| a < b));
        assert_eq!(tokens[0].to_string().len(), 50);
    }
}
