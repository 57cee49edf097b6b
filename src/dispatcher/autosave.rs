//! [`Autosave`]: has the cursor of a durable subscriber saved on a timer.

use std::{
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;

use crate::{
    cursor::Cursor,
    env::Env,
    error::{Error, Result},
    named_cursor::OpenCursor,
};

/// The cursor of a durable subscriber, and when it is saved.
pub(super) struct Autosave {
    /// The cursor in the store.
    cursor: OpenCursor,
    /// The hash of the filter of the subscriber.
    filter: u64,
    /// How often it is saved; never if that is [`Duration::MAX`].
    interval: Duration,
    /// Time.
    env: Env,
    /// Completes when it is time.
    timer: Option<BoxFuture<'static, ()>>,
    /// A save that is under way.
    saving: Option<BoxFuture<'static, (OpenCursor, Result<()>)>>,
}

impl Autosave {
    /// Saves `cursor` every `interval`, for a subscriber whose filter has the hash `filter`.
    pub fn new(cursor: OpenCursor, filter: u64, interval: Duration, env: &Env) -> Self {
        Self { cursor, filter, interval, env: env.clone(), timer: None, saving: None }
    }

    /// Saves `position` if it is time, and wakes the task of `context` when it will be. Fails with [`Error::CursorLost`] if
    /// another has opened the cursor; other failures are logged, and the next save makes them good.
    pub fn poll(&mut self, context: &mut Context<'_>, position: impl FnOnce() -> Cursor) -> Result<()> {
        if self.saving.is_none() && self.interval != Duration::MAX {
            let timer = self.timer.get_or_insert_with(|| self.env.sleep(self.interval));
            if timer.as_mut().poll(context).is_pending() {
                return Ok(());
            }
            let (mut cursor, filter, position) = (self.cursor.clone(), self.filter, position());
            self.timer = None;
            self.saving = Some(Box::pin(async move {
                let saved = save(&mut cursor, position, filter).await;
                (cursor, saved)
            }));
        }
        let Some(saving) = &mut self.saving else { return Ok(()) };
        let Poll::Ready((cursor, saved)) = saving.as_mut().poll(context) else { return Ok(()) };
        (self.saving, self.cursor) = (None, cursor);
        // Another poll would set it, but may not come before something else happens.
        let timer = self.timer.insert(self.env.sleep(self.interval));
        if timer.as_mut().poll(context).is_ready() {
            context.waker().wake_by_ref();
        }
        match saved {
            Err(error @ Error::CursorLost { .. }) => Err(error),
            Err(error) => {
                self.cursor.complain(&error);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// The subscriber wants something else from now on: what a filter with the hash `filter` does.
    pub fn replace(&mut self, filter: u64) {
        self.filter = filter;
    }

    /// Saves `position` now.
    pub async fn save(&mut self, position: Cursor) -> Result<()> {
        if let Some(saving) = &mut self.saving {
            // Two at once would conflict, and the earlier position might win.
            (self.cursor, _) = saving.as_mut().await;
            self.saving = None;
        }
        save(&mut self.cursor, position, self.filter).await
    }

    /// The cursor in the store, which is saved here no more.
    pub fn into_cursor(self) -> OpenCursor {
        self.cursor
    }
}

/// Saves `position` in `cursor`. One who has expired, and whose next scan has not begun, saves nothing: whoever starts again is to
/// be told that as well.
async fn save(cursor: &mut OpenCursor, position: Cursor, filter: u64) -> Result<()> {
    if position == Cursor::NOTHING { cursor.verify().await } else { cursor.save_for(position, filter).await }
}
