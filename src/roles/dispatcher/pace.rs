//! [`Pace`]: limits how often a subscriber gets deliveries. They come in rounds, which begin at least the pace apart.

use std::{
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::future::BoxFuture;

use crate::base::env::Env;

pub(super) struct Pace {
    every: Duration,
    env: Env,
    began: Option<Duration>,
    /// Completes when the next round may begin; `None` if it may begin now.
    pause: Option<BoxFuture<'static, ()>>,
}

impl Pace {
    /// Allows a round every `every`. The first may begin at once.
    pub fn new(every: Duration, env: &Env) -> Self {
        Self { every, env: env.clone(), began: None, pause: None }
    }

    /// Completes when a round may begin.
    pub fn poll_open(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(context));
            self.pause = None;
        }
        Poll::Ready(())
    }

    pub fn begin(&mut self) {
        self.began.get_or_insert_with(|| self.env.now());
    }

    /// Ends the present round, if there is one.
    pub fn end(&mut self) {
        let Some(began) = self.began.take() else { return };
        let left = began.saturating_add(self.every).saturating_sub(self.env.now());
        self.pause = (!left.is_zero()).then(|| self.env.sleep(left));
    }
}
