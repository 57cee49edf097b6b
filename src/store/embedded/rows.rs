//! [`Rows`]: a persistent ordered map, in which the engine keeps all rows.
//!
//! A clone takes constant time and shares everything. A change copies the shared nodes on its path, and changes unshared nodes in place.
//! The map is a B+ tree: leaves hold the rows, branches hold separators and children, and the rows of a node are [`Packed`] into one block.
//!
//! The store has its own tree because of what a change costs while a reader holds a snapshot: the fold of a large store changes single rows
//! that are far apart, each in a different leaf, and nearly every leaf is shared with a snapshot. If every row were an allocation with a
//! reference count, copying a leaf would touch all of them, and none would be in the processor's cache.
//!
//! # Invariants
//!
//! 1. The keys of child `n` of a branch are below separator `n`, and not below separator `n - 1`.
//! 2. All leaves have the same depth. None is empty, except for the root.
//! 3. A leaf has at most [`LEAF_ROWS_MAX`] rows, and at most [`leaf_len_max`] bytes unless one of its rows is large.
//! 4. A node that becomes less than half full is joined with a neighbour if the two together fill at most three quarters of a node, so that
//!    a few remaining rows do not take many nodes.

use std::{fmt, mem, sync::Arc};

use bytes::Bytes;
use smallvec::SmallVec;

use super::packed::{Packed, common_len};
use crate::store::KeyRange;

/// The maximum number of rows in a leaf.
const LEAF_ROWS_MAX: usize = 32;

/// The maximum number of bytes of keys and values in a leaf with several rows, unless its keys share a long prefix.
const LEAF_LEN_MAX: usize = 2_048;

/// A leaf may have this many bytes for each byte of the prefix that its keys share, because the separator after it repeats the prefix.
const SEPARATED_LEN_MIN: usize = 8;

/// The maximum number of children of a branch.
const CHILDREN_MAX: usize = 32;

/// Returns the maximum number of bytes in a leaf whose keys all begin with the same `common` bytes.
fn leaf_len_max(common: usize) -> usize {
    LEAF_LEN_MAX.max(SEPARATED_LEN_MIN * common)
}

/// Whether a node of size `len` should be joined with a neighbour.
fn is_small(len: usize, max: usize) -> bool {
    len < max / 2
}

/// Whether a node that was joined from two has room for more rows.
fn has_room(len: usize, max: usize) -> bool {
    len <= max - max / 4
}

/// A persistent ordered map.
#[derive(Clone, Default)]
pub(in crate::store) struct Rows {
    root: Node,
}

#[derive(Clone)]
enum Node {
    Leaf(Arc<Packed>),
    Branch(Arc<Branch>),
}

#[derive(Clone)]
struct Branch {
    /// The separators, stored as rows without values.
    separators: Packed,
    /// The children, one more than there are separators.
    children: Vec<Node>,
}

/// The effect of a change on a node.
enum Changed {
    /// The node kept its size, or grew within its limits.
    Fits,
    /// The node became smaller, and may be empty.
    Shrunk,
    /// The node became too large and was split. These are its right half and the separator before it.
    Split { separator: Vec<u8>, right: Node },
}

impl Rows {
    /// Returns the value at `key`.
    pub fn get(&self, key: &[u8]) -> Option<&[u8]> {
        let mut node = &self.root;
        loop {
            match node {
                Node::Leaf(rows) => return rows.find(key).ok().map(|index| rows.value(index)),
                Node::Branch(branch) => node = &branch.children[branch.child_of(key)],
            }
        }
    }

    /// Replaces the value at `key` with what `change` returns for it. `None` stands for no row.
    pub fn change<V: AsRef<[u8]>>(&mut self, key: &[u8], change: impl FnOnce(Option<&[u8]>) -> Option<V>) {
        match self.root.change(key, change) {
            Changed::Fits => {}
            Changed::Shrunk => self.lower(),
            Changed::Split { separator, right } => {
                let mut separators = Packed::default();
                separators.insert(0, &separator, &[]);
                let children = vec![mem::take(&mut self.root), right];
                self.root = Node::Branch(Arc::new(Branch { separators, children }));
            }
        }
    }

    /// Removes the rows of `range`. The cost depends only on the two ends of the range: nodes between them are dropped whole.
    pub fn remove_range(&mut self, range: &KeyRange) {
        if !range.is_empty() {
            self.root.remove_range(range);
            self.lower();
        }
    }

    /// Removes branches with fewer than two children from the top of the tree.
    fn lower(&mut self) {
        while let Node::Branch(branch) = &self.root
            && branch.children.len() < 2
        {
            self.root = branch.children.first().cloned().unwrap_or_default();
        }
    }

    /// Iterates over all rows.
    pub fn iter(&self) -> Range<'_> {
        self.seek(&[], None, false)
    }

    /// Iterates over the rows of `range`, in reverse order if `is_reverse`.
    pub fn range(&self, range: &KeyRange, is_reverse: bool) -> Range<'_> {
        let (from, until) = if is_reverse { (&range.end, &range.begin) } else { (&range.begin, &range.end) };
        self.seek(from, Some(until.clone()), is_reverse)
    }

    fn seek(&self, from: &[u8], until: Option<Bytes>, is_reverse: bool) -> Range<'_> {
        let mut found = Range { until, is_reverse, path: SmallVec::new(), leaf: None };
        let mut node = &self.root;
        loop {
            match node {
                Node::Leaf(rows) => {
                    found.leaf = Some((rows, rows.rank(from)));
                    return found;
                }
                Node::Branch(branch) => {
                    let index = if is_reverse { branch.separators.rank(from) } else { branch.child_of(from) };
                    found.path.push((branch, index));
                    node = &branch.children[index];
                }
            }
        }
    }
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rows").finish_non_exhaustive()
    }
}

impl Default for Node {
    fn default() -> Self {
        Self::Leaf(Arc::default())
    }
}

impl Node {
    /// Does [`Rows::change`] in the subtree of this node.
    fn change<V: AsRef<[u8]>>(
        &mut self,
        key: &[u8],
        change: impl FnOnce(Option<&[u8]>) -> Option<V>,
    ) -> Changed {
        match self {
            Self::Leaf(rows) => {
                let rows = Arc::make_mut(rows);
                let (found, before) = (rows.find(key), rows.bytes_len());
                let value = change(found.ok().map(|index| rows.value(index)));
                match (found, value) {
                    (Ok(index), Some(value)) => rows.replace(index, value.as_ref()),
                    (Ok(index), None) => rows.remove(index),
                    (Err(index), Some(value)) => rows.insert(index, key, value.as_ref()),
                    (Err(_), None) => {}
                }
                let is_too_large = rows.len() > LEAF_ROWS_MAX
                    || rows.len() > 1 && rows.bytes_len() > leaf_len_max(rows.common_len());
                if is_too_large {
                    split(rows, found.unwrap_or_else(|index| index))
                } else if rows.bytes_len() < before || rows.len() == 0 {
                    Changed::Shrunk
                } else {
                    Changed::Fits
                }
            }
            Self::Branch(branch) => {
                let branch = Arc::make_mut(branch);
                let index = branch.child_of(key);
                match branch.children[index].change(key, change) {
                    Changed::Fits => Changed::Fits,
                    Changed::Shrunk => {
                        if !branch.drop_if_empty(index) {
                            branch.join_if_small(index);
                        }
                        Changed::Shrunk
                    }
                    Changed::Split { separator, right } => {
                        branch.separators.insert(index, &separator, &[]);
                        branch.children.insert(index + 1, right);
                        if branch.children.len() > CHILDREN_MAX {
                            branch.split(index + 1)
                        } else {
                            Changed::Fits
                        }
                    }
                }
            }
        }
    }

    /// Does [`Rows::remove_range`] in the subtree of this node.
    fn remove_range(&mut self, range: &KeyRange) {
        match self {
            Self::Leaf(rows) => {
                let rows = Arc::make_mut(rows);
                rows.remove_all(rows.rank(&range.begin)..rows.rank(&range.end));
            }
            Self::Branch(branch) => {
                let branch = Arc::make_mut(branch);
                let (first, last) = (branch.child_of(&range.begin), branch.separators.rank(&range.end));
                branch.children[first].remove_range(range);
                if first < last {
                    branch.children[last].remove_range(range);
                    branch.children.drain(first + 1..last);
                    branch.separators.remove_all(first + 1..last);
                    branch.drop_if_empty(first + 1);
                }
                branch.drop_if_empty(first);
                for index in [first + 1, first] {
                    if index < branch.children.len() {
                        branch.join_if_small(index);
                    }
                }
            }
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Leaf(rows) => rows.len() == 0,
            Self::Branch(branch) => branch.children.is_empty(),
        }
    }

    fn is_small(&self) -> bool {
        match self {
            Self::Leaf(rows) => {
                is_small(rows.len(), LEAF_ROWS_MAX)
                    && is_small(rows.bytes_len(), leaf_len_max(rows.common_len()))
            }
            Self::Branch(branch) => is_small(branch.children.len(), CHILDREN_MAX),
        }
    }

    /// Whether this node and its neighbour `right` fit into one node with room to spare. Neither of them is empty.
    fn can_join(&self, right: &Self) -> bool {
        match (self, right) {
            (Self::Leaf(a), Self::Leaf(b)) => {
                let common = || common_len(a.key(0), b.key(b.len() - 1));
                has_room(a.len() + b.len(), LEAF_ROWS_MAX)
                    && has_room(a.bytes_len() + b.bytes_len(), leaf_len_max(common()))
            }
            (Self::Branch(a), Self::Branch(b)) => has_room(a.children.len() + b.children.len(), CHILDREN_MAX),
            _ => false,
        }
    }

    /// Appends the content of `right`, the neighbour of this node. `separator` is the key between the two.
    fn join(&mut self, separator: &[u8], right: &Self) {
        match (self, right) {
            (Self::Leaf(a), Self::Leaf(b)) => Arc::make_mut(a).append_all(b),
            (Self::Branch(a), Self::Branch(b)) => {
                let a = Arc::make_mut(a);
                a.separators.insert(a.separators.len(), separator, &[]);
                a.separators.append_all(&b.separators);
                a.children.extend_from_slice(&b.children);
            }
            _ => unreachable!("neighbours have the same depth"),
        }
    }
}

/// Splits a leaf whose row at `index` was just written. If this is the last row, more are likely to follow, so only this row is split off.
fn split(rows: &mut Packed, index: usize) -> Changed {
    let last = rows.len() - 1;
    let right = rows.split_off(if index == last { last } else { rows.middle() });
    // The shortest key that separates the two leaves.
    let (left, first) = (rows.key(rows.len() - 1), right.key(0));
    let common = common_len(left, first);
    Changed::Split { separator: first[..=common].to_vec(), right: Node::Leaf(Arc::new(right)) }
}

impl Branch {
    fn child_of(&self, key: &[u8]) -> usize {
        self.separators.find(key).map_or_else(|index| index, |index| index + 1)
    }

    /// Splits the branch after the child at `index` was added.
    fn split(&mut self, index: usize) -> Changed {
        let count = self.children.len();
        let middle = if index == count - 1 { count - 2 } else { count / 2 };
        let children = self.children.split_off(middle);
        let separators = self.separators.split_off(middle);
        let separator = self.separators.key(middle - 1).to_vec();
        self.separators.remove(middle - 1);
        Changed::Split { separator, right: Node::Branch(Arc::new(Self { separators, children })) }
    }

    /// Removes the child at `index` if it is empty. Returns whether it was empty.
    fn drop_if_empty(&mut self, index: usize) -> bool {
        let is_empty = self.children[index].is_empty();
        if is_empty {
            self.children.remove(index);
            if self.separators.len() > 0 {
                self.separators.remove(index.saturating_sub(1));
            }
        }
        is_empty
    }

    /// Joins the child at `index` with a neighbour if it is small.
    fn join_if_small(&mut self, index: usize) {
        if !self.children[index].is_small() {
            return;
        }
        let pairs = [index.checked_sub(1), Some(index)].into_iter().flatten();
        let mut pairs = pairs.filter(|&left| left + 1 < self.children.len());
        if let Some(left) = pairs.find(|&left| self.children[left].can_join(&self.children[left + 1])) {
            let right = self.children.remove(left + 1);
            self.children[left].join(self.separators.key(left), &right);
            self.separators.remove(left);
        }
    }
}

/// Iterates over the rows of a range, in one direction.
pub(in crate::store) struct Range<'a> {
    /// Where the iteration ends: in reverse order the first key of the range, otherwise the key after its last one; `None` if all rows are
    /// read.
    until: Option<Bytes>,
    is_reverse: bool,
    /// The branches on the path to the leaf, each with the index of the child on that path.
    path: SmallVec<[(&'a Branch, usize); 6]>,
    /// The leaf, and how many of its rows are before the current position.
    leaf: Option<(&'a Packed, usize)>,
}

impl<'a> Range<'a> {
    /// Moves to the next leaf in the direction of the iteration. Returns it with the position at its nearer end.
    fn turn(&mut self) -> Option<(&'a Packed, usize)> {
        let mut node = loop {
            let (branch, index) = self.path.last_mut()?;
            let next = if self.is_reverse { index.checked_sub(1) } else { Some(*index + 1) };
            match next.and_then(|next| Some((next, branch.children.get(next)?))) {
                Some((next, child)) => {
                    *index = next;
                    break child;
                }
                None => _ = self.path.pop(),
            }
        };
        loop {
            match node {
                Node::Leaf(rows) => return Some((rows, if self.is_reverse { rows.len() } else { 0 })),
                Node::Branch(branch) => {
                    let index = if self.is_reverse { branch.children.len() - 1 } else { 0 };
                    self.path.push((branch, index));
                    node = &branch.children[index];
                }
            }
        }
    }
}

impl<'a> Iterator for Range<'a> {
    /// The key and the value.
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let (rows, place) = self.leaf?;
            let index = if self.is_reverse { place.checked_sub(1) } else { Some(place) };
            let Some(index) = index.filter(|&index| index < rows.len()) else {
                self.leaf = self.turn();
                continue;
            };
            let key = rows.key(index);
            let is_within = match &self.until {
                None => true,
                Some(until) if self.is_reverse => key >= &until[..],
                Some(until) => key < &until[..],
            };
            self.leaf = is_within.then_some((rows, if self.is_reverse { index } else { index + 1 }));
            return is_within.then(|| (key, rows.value(index)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Checks the invariants below `node`, whose keys must be at or after `low` and before `high`. Returns the depth of the node.
    fn check(node: &Node, low: &[u8], high: Option<&[u8]>, is_root: bool) -> usize {
        match node {
            Node::Leaf(rows) => {
                assert!(is_root || rows.len() > 0, "an empty leaf");
                assert!(rows.len() <= LEAF_ROWS_MAX);
                assert!(rows.bytes_len() <= leaf_len_max(rows.common_len()) || rows.len() == 1);
                let keys: Vec<_> = (0..rows.len()).map(|index| rows.key(index)).collect();
                assert!(keys.is_sorted_by(|a, b| a < b));
                assert!(keys.iter().all(|key| *key >= low && high.is_none_or(|high| *key < high)));
                0
            }
            Node::Branch(branch) => {
                let Branch { separators, children } = &**branch;
                assert!(children.len() >= if is_root { 2 } else { 1 } && children.len() <= CHILDREN_MAX);
                assert_eq!(separators.len() + 1, children.len());
                let depths = children.iter().enumerate().map(|(index, child)| {
                    let low = index.checked_sub(1).map_or(low, |before| separators.key(before));
                    let high = (index < separators.len()).then(|| separators.key(index)).or(high);
                    check(child, low, high, false)
                });
                let depths: Vec<_> = depths.collect();
                assert!(depths.iter().all(|depth| *depth == depths[0]), "leaves of different depths");
                depths[0] + 1
            }
        }
    }

    type Model = BTreeMap<Vec<u8>, Vec<u8>>;

    /// Compares `rows` with `model`: all rows, and those of `range` in both directions.
    fn compare(rows: &Rows, model: &Model, range: &KeyRange) {
        check(&rows.root, &[], None, true);
        assert!(rows.iter().eq(model.iter().map(|(k, v)| (&k[..], &v[..]))));
        let expected: Vec<_> =
            model.iter().filter(|(key, _)| range.contains(key)).map(|(k, v)| (&k[..], &v[..])).collect();
        assert_eq!(rows.range(range, false).collect::<Vec<_>>(), expected);
        let mut found: Vec<_> = rows.range(range, true).collect();
        found.reverse();
        assert_eq!(found, expected);
    }

    fn all() -> KeyRange {
        KeyRange::new(&b""[..], &b"\xff"[..])
    }

    /// Returns key number `n`. Some keys are long, so that some leaves have too many bytes before they have too many rows.
    fn key(n: u16) -> Vec<u8> {
        let mut key = format!("{:05}", n % 700).into_bytes();
        key.resize(5 + usize::from(n % 7) * usize::from(n % 5) * 9, b'x');
        key
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn it_is_an_ordered_map_and_its_clones_stay_as_they_are(
            steps in prop::collection::vec((any::<u16>(), prop::option::weighted(0.6, 0..400_usize)), 1..1_500),
            clears in prop::collection::btree_map(0..1_500_usize, (any::<u16>(), any::<u16>()), 0..8),
            begin: u16, end: u16, at: u16,
        ) {
            let range = KeyRange::new(key(begin), key(end));
            let (mut rows, mut model) = (Rows::default(), Model::new());
            let mut kept = (rows.clone(), model.clone());
            for (index, (n, len)) in steps.iter().enumerate() {
                if let Some((a, b)) = clears.get(&index) {
                    let cleared = KeyRange::new(key(*a.min(b)), key(*a.max(b)));
                    rows.remove_range(&cleared);
                    model.retain(|key, _| !cleared.contains(key));
                    compare(&rows, &model, &range);
                }
                let key = key(*n);
                let value = len.map(|len| vec![*n as u8; len]);
                rows.change(&key, |old| {
                    assert_eq!(old, model.get(&key).map(|value| &value[..]));
                    value.clone()
                });
                match value {
                    Some(value) => _ = model.insert(key.clone(), value),
                    None => _ = model.remove(&key),
                }
                prop_assert_eq!(rows.get(&key), model.get(&key).map(|value| &value[..]));
                if index % (1 + usize::from(at % 90)) == 0 {
                    compare(&kept.0, &kept.1, &range);
                    kept = (rows.clone(), model.clone());
                }
            }
            compare(&kept.0, &kept.1, &all());
            compare(&rows, &model, &range);
            for key in model.keys().cloned().collect::<Vec<_>>() {
                rows.change(&key, |_| None::<&[u8]>);
            }
            compare(&rows, &Model::new(), &all());
        }
    }

    #[test]
    fn many_rows_in_any_order_keep_the_tree_full_and_leave_nothing_behind() {
        let number = |n: u64| n.to_be_bytes();
        for stride in [1, 7_919, 19_997 - 1] {
            let (mut rows, mut model) = (Rows::default(), Model::new());
            let order = || (0..19_997_u64).map(|n| n * stride % 19_997);
            for n in order() {
                rows.change(&number(n), |_| Some([7; 40]));
                model.insert(number(n).to_vec(), vec![7; 40]);
            }
            compare(&rows, &model, &all());
            for n in order().filter(|n| n % 20 > 0) {
                rows.change(&number(n), |_| None::<&[u8]>);
                model.remove(&number(n)[..]);
            }
            compare(&rows, &model, &all());
            let leaves = leaves(&rows.root);
            assert!(leaves < model.len() / 8, "{leaves} leaves have {} rows", model.len());
        }
    }

    /// Regression: leaves with a few large rows, and leaves whose values became short, were never joined.
    #[test]
    fn rows_that_become_short_are_joined() {
        let number = |n: u32| n.to_be_bytes();
        let mut rows = Rows::default();
        for n in 0..3_000 {
            rows.change(&number(n), |_| Some([7; 600]));
        }
        let before = leaves(&rows.root);
        for n in 0..3_000 {
            rows.change(&number(n), |_| Some([7; 4]));
        }
        let after = leaves(&rows.root);
        assert!(before >= 1_000 && after < 300, "{before} leaves became {after}");
    }

    /// Regression: each row with a key of 10 kB had a leaf of its own, and therefore a separator as long as the key.
    #[test]
    fn separators_are_short_beside_the_keys_that_they_separate() {
        let key = |n: u32| [&[7; 5_000][..], &n.to_be_bytes()].concat();
        let (mut rows, mut keys) = (Rows::default(), 0);
        for n in 0..1_000_u32 {
            rows.change(&key(n * 367 % 1_000), |_| Some([]));
            keys += key(n).len();
        }
        check(&rows.root, &[], None, true);
        let separators = separators_len(&rows.root);
        assert!(separators * 3 < keys, "{separators} bytes of separators, {keys} of keys");
        // A key that begins differently ends the common prefix.
        rows.change(b"a", |_| Some([]));
        assert!((0..1_000).all(|n| rows.get(&key(n)).is_some()) && rows.get(b"a").is_some());
    }

    fn separators_len(node: &Node) -> usize {
        match node {
            Node::Leaf(_) => 0,
            Node::Branch(branch) => {
                branch.separators.bytes_len() + branch.children.iter().map(separators_len).sum::<usize>()
            }
        }
    }

    /// Removing a range reads none of its rows, so rows that a snapshot shares stay shared.
    #[test]
    fn a_removed_range_costs_its_ends() {
        let number = |n: u32| n.to_be_bytes();
        let mut rows = Rows::default();
        for n in 0..20_000 {
            rows.change(&number(n), |_| Some([7; 40]));
        }
        let before = rows.clone();
        rows.remove_range(&KeyRange::new(number(100).to_vec(), number(19_900).to_vec()));
        assert_eq!((rows.iter().count(), before.iter().count()), (200, 20_000));
        check(&rows.root, &[], None, true);
        assert!(leaves(&rows.root) < 20);
        rows.remove_range(&all());
        assert!(matches!(&rows.root, Node::Leaf(leaf) if leaf.len() == 0));
    }

    fn leaves(node: &Node) -> usize {
        match node {
            Node::Leaf(_) => 1,
            Node::Branch(branch) => branch.children.iter().map(leaves).sum(),
        }
    }

    #[test]
    fn an_inverted_range_has_no_rows() {
        let mut rows = Rows::default();
        for n in 0..100_u8 {
            rows.change(&[n], |_| Some([]));
        }
        let inverted = KeyRange::new(&[80][..], &[20][..]);
        assert_eq!(rows.range(&inverted, false).count() + rows.range(&inverted, true).count(), 0);
    }
}
