//! [`explore`]: every state that a small model can come into, breadth first, so that what breaks it is shown by as few steps as it
//! takes.
//!
//! It is a page instead of a library: the models need no more, and what they are driven by is private to the crate.

use std::{
    collections::{HashMap, VecDeque},
    fmt::Debug,
    hash::Hash,
};

/// A protocol at a small size.
pub(crate) trait Model {
    /// All that there is to know at a moment.
    type State: Clone + Eq + Hash + Debug;

    /// How it begins.
    fn start(&self) -> Self::State;

    /// What can happen in `state`, with a word for it, and what comes of it. What must never happen is an error.
    fn steps(&self, state: &Self::State) -> Vec<(String, Result<Self::State, String>)>;

    /// What must hold in every state.
    fn check(&self, state: &Self::State) -> Result<(), String>;
}

/// How many states there are; or the steps that lead to what must not be, and what that is.
pub(crate) fn explore<M: Model>(model: &M) -> Result<usize, (Vec<String>, String)> {
    let start = model.start();
    // Each state by its number, and how it was come to.
    let mut known = HashMap::from([(start.clone(), 0_usize)]);
    let mut ways: Vec<(usize, String)> = vec![(0, "it begins".to_owned())];
    let mut next = VecDeque::from([start]);
    let way_to = |ways: &[(usize, String)], mut number: usize| {
        let mut steps = Vec::new();
        while number > 0 {
            steps.push(ways[number].1.clone());
            number = ways[number].0;
        }
        steps.reverse();
        steps
    };
    while let Some(state) = next.pop_front() {
        let number = known[&state];
        model.check(&state).map_err(|reason| (way_to(&ways, number), reason))?;
        for (step, after) in model.steps(&state) {
            let after = after.map_err(|reason| {
                let mut steps = way_to(&ways, number);
                steps.push(step.clone());
                (steps, reason)
            })?;
            if !known.contains_key(&after) {
                known.insert(after.clone(), ways.len());
                ways.push((number, step));
                next.push_back(after);
            }
        }
    }
    Ok(known.len())
}
