//! [`moved`]: a future that moves from task to task.

use std::{
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
};

/// Polls `future` with `polls` wakers before the last one, as if it moved from task to task.
pub(crate) async fn moved<T>(future: impl Future<Output = T>, polls: u32) -> T {
    let mut future = std::pin::pin!(future);
    for _ in 0..polls {
        let waker = Waker::from(Arc::new(Deaf));
        if let Poll::Ready(answer) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return answer;
        }
    }
    future.await
}

/// A waker that does nothing.
struct Deaf;

impl Wake for Deaf {
    fn wake(self: Arc<Self>) {}
}
