//! [`explore`]: every state that a small model can reach, breadth first, so that the shortest steps show each
//! mistake.
//!
//! It is a page of code instead of a library: the models need no more, and they call private functions of the crate.

use std::{
    collections::{HashMap, VecDeque},
    fmt::Debug,
    hash::Hash,
};

/// A protocol at a small size.
pub(crate) trait Model {
    /// A state of the whole model.
    type State: Clone + Eq + Hash + Debug;

    /// The first state.
    fn start(&self) -> Self::State;

    /// The steps that can happen in `state`, each with a name and the next state. A step that must never happen is an
    /// error.
    fn steps(&self, state: &Self::State) -> Vec<(String, Result<Self::State, String>)>;

    /// What must hold in every state.
    fn check(&self, state: &Self::State) -> Result<(), String>;
}

/// How many states the model can reach; or the steps to a state that must not be, and what is wrong there.
pub(crate) fn explore<M: Model>(model: &M) -> Result<usize, (Vec<String>, String)> {
    let start = model.start();
    // Each state by its number, and the step that led to it.
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
