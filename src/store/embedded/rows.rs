//! [`Rows`]: a persistent ordered map, in which the engine keeps all rows, and the keys that were written lately.
//!
//! A clone takes constant time and shares everything. A change copies the nodes on its way that are shared, and
//! changes the others in place. It is a tree (B+): leaves have the rows, branches have separators and children, and
//! the rows of a node are [`Packed`] into one block.
//!
//! The reason for a tree of our own is what a change costs while somebody reads: the fold of a large store changes a
//! row here and a row there, each in a leaf of its own, and nearly each leaf is shared with a snapshot. If rows are
//! allocations with reference counts, the copy of a leaf touches each of them, and none is in the processor's cache.
//!
//! # Invariants
//!
//! 1. The keys of child `n` of a branch are below separator `n`, and not below separator `n - 1`.
//! 2. All leaves have the same depth. None is empty, except for the root.
//! 3. A leaf has at most [`LEAF_ROWS_MAX`] rows, and at most [`LEAF_LEN_MAX`] bytes unless one of its rows is large.

use std::{fmt, mem, sync::Arc};

use bytes::Bytes;
use smallvec::SmallVec;

use super::packed::{Packed, common_len};
use crate::store::KeyRange;

/// The most rows of a leaf.
const LEAF_ROWS_MAX: usize = 32;

/// The most bytes of keys and values of a leaf with several rows.
const LEAF_LEN_MAX: usize = 2_048;

/// The most children of a branch.
const CHILDREN_MAX: usize = 32;

/// A node with less than one in so many of its largest size is joined with a neighbour.
const SMALL: usize = 4;

/// A persistent ordered map.
#[derive(Clone, Default)]
pub(in crate::store) struct Rows {
    root: Node,
    len: usize,
}

#[derive(Clone)]
enum Node {
    Leaf(Arc<Packed>),
    Branch(Arc<Branch>),
}

#[derive(Clone)]
struct Branch {
    /// The separators, without values.
    separators: Packed,
    /// One more than separators.
    children: Vec<Node>,
}

/// The right half of a node that was too large, and the separator before it.
struct Split {
    separator: Vec<u8>,
    right: Node,
}

impl Rows {
    pub fn len(&self) -> usize {
        self.len
    }

    /// The value at `key`.
    pub fn get(&self, key: &[u8]) -> Option<&[u8]> {
        let mut node = &self.root;
        loop {
            match node {
                Node::Leaf(rows) => return rows.find(key).ok().map(|index| rows.value(index)),
                Node::Branch(branch) => node = &branch.children[branch.child_of(key)],
            }
        }
    }

    /// Puts what `change` makes of the value at `key` in its place; `None` is no row.
    pub fn change<V: AsRef<[u8]>>(&mut self, key: &[u8], change: impl FnOnce(Option<&[u8]>) -> Option<V>) {
        if let Some(Split { separator, right }) = self.root.change(key, change, &mut self.len) {
            let mut separators = Packed::default();
            separators.insert(0, &separator, &[]);
            let children = vec![mem::take(&mut self.root), right];
            self.root = Node::Branch(Arc::new(Branch { separators, children }));
        }
        while let Node::Branch(branch) = &self.root
            && branch.children.len() < 2
        {
            self.root = branch.children.first().cloned().unwrap_or_default();
        }
    }

    /// All rows.
    pub fn iter(&self) -> Range<'_> {
        self.seek(&[], None, false)
    }

    /// The rows of `range`, last first if `is_reverse`.
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
        f.debug_struct("Rows").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Default for Node {
    fn default() -> Self {
        Self::Leaf(Arc::default())
    }
}

impl Node {
    /// [`Rows::change`] below this node. Returns what no longer fits in it.
    fn change<V: AsRef<[u8]>>(
        &mut self,
        key: &[u8],
        change: impl FnOnce(Option<&[u8]>) -> Option<V>,
        len: &mut usize,
    ) -> Option<Split> {
        match self {
            Self::Leaf(rows) => {
                let rows = Arc::make_mut(rows);
                let found = rows.find(key);
                let value = change(found.ok().map(|index| rows.value(index)));
                match (found, value) {
                    (Ok(index), Some(value)) => rows.replace(index, value.as_ref()),
                    (Ok(index), None) => {
                        rows.remove(index);
                        *len -= 1;
                    }
                    (Err(index), Some(value)) => {
                        rows.insert(index, key, value.as_ref());
                        *len += 1;
                    }
                    (Err(_), None) => {}
                }
                let is_too_large =
                    rows.len() > LEAF_ROWS_MAX || rows.bytes_len() > LEAF_LEN_MAX && rows.len() > 1;
                is_too_large.then(|| split(rows, found.unwrap_or_else(|index| index)))
            }
            Self::Branch(branch) => {
                let branch = Arc::make_mut(branch);
                let (index, before) = (branch.child_of(key), *len);
                let Some(Split { separator, right }) = branch.children[index].change(key, change, len) else {
                    if *len < before {
                        branch.mend(index);
                    }
                    return None;
                };
                branch.separators.insert(index, &separator, &[]);
                branch.children.insert(index + 1, right);
                (branch.children.len() > CHILDREN_MAX).then(|| branch.split(index + 1))
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
            Self::Leaf(rows) => rows.len() < LEAF_ROWS_MAX / SMALL && rows.bytes_len() < LEAF_LEN_MAX / SMALL,
            Self::Branch(branch) => branch.children.len() < CHILDREN_MAX / SMALL,
        }
    }

    /// Whether this and `right`, its neighbour, are one node with room for more.
    fn can_join(&self, right: &Self) -> bool {
        let has_room = |sum: usize, max: usize| sum <= max - max / SMALL;
        match (self, right) {
            (Self::Leaf(a), Self::Leaf(b)) => {
                has_room(a.len() + b.len(), LEAF_ROWS_MAX)
                    && has_room(a.bytes_len() + b.bytes_len(), LEAF_LEN_MAX)
            }
            (Self::Branch(a), Self::Branch(b)) => has_room(a.children.len() + b.children.len(), CHILDREN_MAX),
            _ => false,
        }
    }

    /// Takes in `right`, its neighbour behind `separator`.
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

/// Splits the rows of a leaf, of which the one at `index` is new. If it is the last one, more will come behind it.
fn split(rows: &mut Packed, index: usize) -> Split {
    let last = rows.len() - 1;
    let right = rows.split_off(if index == last { last } else { rows.middle() });
    // The shortest key that tells the two apart.
    let (left, first) = (rows.key(rows.len() - 1), right.key(0));
    let common = common_len(left, first);
    Split { separator: first[..=common].to_vec(), right: Node::Leaf(Arc::new(right)) }
}

impl Branch {
    /// The index of the child in which `key` is.
    fn child_of(&self, key: &[u8]) -> usize {
        self.separators.find(key).map_or_else(|index| index, |index| index + 1)
    }

    /// Splits it, after the child at `index` was added.
    fn split(&mut self, index: usize) -> Split {
        let count = self.children.len();
        let middle = if index == count - 1 { count - 2 } else { count / 2 };
        let children = self.children.split_off(middle);
        let separators = self.separators.split_off(middle);
        let separator = self.separators.key(middle - 1).to_vec();
        self.separators.remove(middle - 1);
        Split { separator, right: Node::Branch(Arc::new(Self { separators, children })) }
    }

    /// Removes the child at `index` if it is empty, and joins it with a neighbour if it is small.
    fn mend(&mut self, index: usize) {
        let child = &self.children[index];
        if child.is_empty() {
            self.children.remove(index);
            if self.separators.len() > 0 {
                self.separators.remove(index.saturating_sub(1));
            }
        } else if child.is_small() {
            let pairs = [index.checked_sub(1), Some(index)].into_iter().flatten();
            let mut pairs = pairs.filter(|&left| left + 1 < self.children.len());
            if let Some(left) = pairs.find(|&left| self.children[left].can_join(&self.children[left + 1])) {
                let right = self.children.remove(left + 1);
                self.children[left].join(self.separators.key(left), &right);
                self.separators.remove(left);
            }
        }
    }
}

/// Rows of a range, in one direction.
pub(in crate::store) struct Range<'a> {
    /// The first key of the range if it is read in reverse, or else the one after its last; `None` if all is read.
    until: Option<Bytes>,
    is_reverse: bool,
    /// The branches down to the leaf, each with the index of the child.
    path: SmallVec<[(&'a Branch, usize); 6]>,
    /// The leaf, and how many of its rows are before the place of the reading.
    leaf: Option<(&'a Packed, usize)>,
}

impl<'a> Range<'a> {
    /// The next leaf in the direction, and the place at its nearer end.
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

    /// Checks the invariants below `node`, whose keys are at or after `low` and before `high`. Returns its depth.
    fn check(node: &Node, low: &[u8], high: Option<&[u8]>, is_root: bool) -> usize {
        match node {
            Node::Leaf(rows) => {
                assert!(is_root || rows.len() > 0, "an empty leaf");
                assert!(rows.len() <= LEAF_ROWS_MAX);
                assert!(rows.bytes_len() <= LEAF_LEN_MAX || rows.len() == 1);
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

    /// Compares `rows` with what they should be, whole and in both directions within `range`.
    fn compare(rows: &Rows, model: &Model, range: &KeyRange) {
        check(&rows.root, &[], None, true);
        assert_eq!(rows.len(), model.len());
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

    /// The key number `n`; some are long, so that leaves are full by their bytes.
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
            begin: u16, end: u16, at: u16,
        ) {
            let range = KeyRange::new(key(begin), key(end));
            let (mut rows, mut model) = (Rows::default(), Model::new());
            let mut kept = (rows.clone(), model.clone());
            for (index, (n, len)) in steps.iter().enumerate() {
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
            assert!(leaves < rows.len() / 4, "{leaves} leaves have {} rows", rows.len());
        }
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
