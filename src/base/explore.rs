//! [`explore`]: every state that a small model can reach, breadth first, so that the shortest steps show each mistake. A model
//! checker (`stateright`) does it; here models get a way to say what is wrong, and with which step.

use std::{
    fmt::{self, Debug},
    hash::Hash,
};

use stateright::{Checker, Property};

/// A protocol at a small size.
pub(crate) trait Model: Send + Sync + 'static {
    type State: Clone + Eq + Hash + Debug + Send + Sync;

    fn start(&self) -> Self::State;

    /// The steps that can happen in `state`, each with a name and the next state. A step that must never happen is an
    /// error.
    fn steps(&self, state: &Self::State) -> Vec<(String, Result<Self::State, String>)>;

    /// What must hold in every state.
    fn check(&self, state: &Self::State) -> Result<(), String>;
}

/// A model as the checker wants it. A state is an error if the step to it must never happen.
struct Checked<M>(M);

/// A step with the state that it leads to.
#[derive(Clone, PartialEq)]
struct Step<S> {
    name: String,
    to: Result<S, String>,
}

impl<S> Debug for Step<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl<M: Model> Checked<M> {
    fn check(&self, state: &Result<M::State, String>) -> Result<(), String> {
        self.0.check(state.as_ref().map_err(Clone::clone)?)
    }
}

impl<M: Model> stateright::Model for Checked<M> {
    type State = Result<M::State, String>;
    type Action = Step<M::State>;

    fn init_states(&self) -> Vec<Self::State> {
        vec![Ok(self.0.start())]
    }

    fn actions(&self, state: &Self::State, actions: &mut Vec<Self::Action>) {
        let steps = state.as_ref().map(|state| self.0.steps(state)).unwrap_or_default();
        actions.extend(steps.into_iter().map(|(name, to)| Step { name, to }));
    }

    fn next_state(&self, _: &Self::State, action: Self::Action) -> Option<Self::State> {
        Some(action.to)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("promised", |model, state| model.check(state).is_ok())]
    }
}

/// How many states the model can reach; or the steps to a state that must not be, and what is wrong there.
pub(crate) fn explore<M: Model>(model: M) -> Result<usize, (Vec<String>, String)> {
    let checker = stateright::Model::checker(Checked(model)).spawn_bfs().join();
    let Some(way) = checker.discovery("promised") else {
        return Ok(checker.unique_state_count());
    };
    let wrong = checker.model().check(way.last_state()).expect_err("the checker has found what is wrong");
    Err((way.into_actions().into_iter().map(|step| step.name).collect(), wrong))
}
