//! [`Wakeful`]: a future of the client that always wakes its last poller.
//!
//! The client's futures check whether their result has arrived, and then register the waker. If the result arrives between these two steps,
//! it wakes the waker of the previous poll. A task that is polled with one waker and then with another (moved between tasks, or polled
//! within `join_all`, `select!` and the like) is then never woken again. The first poll has no such gap: it sets the callback last, and if
//! the result has already arrived, the callback fires at once.
//!
//! The remedy is to poll once more after registering: this finds a result that arrived before, and a later result wakes the new waker.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

/// A future that is polled again whenever it has just registered its waker.
pub(super) struct Wakeful<F>(pub F);

impl<F: Future + Unpin> Future for Wakeful<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let inner = &mut self.0;
        match Pin::new(&mut *inner).poll(context) {
            Poll::Pending => Pin::new(inner).poll(context),
            ready @ Poll::Ready(_) => ready,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        task::{Wake, Waker},
    };

    use futures_util::task::AtomicWaker;

    use super::*;

    /// Counts how many times it is woken.
    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Behaves like the client's future. The result arrives during poll number `comes_in`, after that poll has checked for it and before it
    /// has registered the waker.
    struct Racing {
        polls: usize,
        comes_in: usize,
        is_there: bool,
        waker: AtomicWaker,
    }

    impl Future for Racing {
        type Output = ();

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
            self.polls += 1;
            if self.is_there {
                return Poll::Ready(());
            }
            if self.polls == self.comes_in {
                self.is_there = true;
                self.waker.wake();
            }
            self.waker.register(context.waker());
            Poll::Pending
        }
    }

    fn racing(comes_in: usize) -> Racing {
        Racing { polls: 0, comes_in, is_there: false, waker: AtomicWaker::new() }
    }

    /// Regression: about one in a thousand reads that were moved to another task waited forever.
    #[test]
    fn a_result_that_comes_while_another_waker_registers_is_not_lost() {
        let counts = [Arc::new(Count::default()), Arc::new(Count::default())];
        let wakers = counts.clone().map(Waker::from);
        let poll = |future: &mut (dyn Future<Output = ()> + Unpin), waker: &Waker| {
            Pin::new(future).poll(&mut Context::from_waker(waker))
        };

        let mut bare = racing(2);
        assert!(poll(&mut bare, &wakers[0]).is_pending());
        assert!(poll(&mut bare, &wakers[1]).is_pending());
        assert_eq!(counts[1].0.load(Ordering::Relaxed), 0, "this is how the client loses it");

        for comes_in in 2..6 {
            let mut mended = Wakeful(racing(comes_in));
            for last in [0, 1].into_iter().cycle() {
                let woken = || counts[last].0.load(Ordering::Relaxed);
                let before = woken();
                if poll(&mut mended, &wakers[last]).is_ready() {
                    break;
                }
                assert!(
                    !mended.0.is_there || woken() > before,
                    "it is there, and the last waker is not woken"
                );
            }
        }
    }
}
