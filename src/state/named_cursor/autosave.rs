//! [`Autosave`]: saves the cursor of a durable subscriber on a timer.

use std::{
    future::ready,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;

use super::OpenCursor;
use crate::base::{
    cursor::Cursor,
    env::Env,
    error::{Error, Result},
    sequence::Sequence,
};

/// The default interval between saves of a durable subscription's cursor.
pub(crate) const SAVE_INTERVAL: Duration = Duration::from_secs(1);

/// The cursor of a durable subscriber, and the timer of its saves.
pub(crate) struct Autosave {
    cursor: OpenCursor,
    filter: u64,
    /// How often it is saved; never if that is [`Duration::MAX`].
    interval: Duration,
    env: Env,
    /// The time of the next save. If there is none, a save is due that the subscriber waits for, or the interval begins.
    timer: Option<BoxFuture<'static, ()>>,
    saving: Option<Saving>,
    /// Whether the subscriber's position is before the saved one, because its filter was replaced or it has expired.
    is_ahead: bool,
    /// The last expiry of the subscriber, until its next scan has begun.
    expiry: Option<Expiry>,
}

struct Expiry {
    horizon: Sequence,
    /// Whether the subscriber got `Expired`.
    is_given: bool,
}

struct Saving {
    save: BoxFuture<'static, (OpenCursor, Result<()>)>,
    /// Whether the subscriber's position has moved before the one that is being saved.
    is_outdated: bool,
}

impl Autosave {
    /// Saves `cursor` every `interval`, for a subscriber whose filter has the hash `filter`.
    pub fn new(cursor: OpenCursor, filter: u64, interval: Duration, env: &Env) -> Self {
        Self {
            cursor,
            filter,
            interval,
            env: env.clone(),
            timer: None,
            saving: None,
            is_ahead: false,
            expiry: None,
        }
    }

    /// Saves `position` if it is time, and wakes the task of `context` for the next save. Fails with
    /// [`Error::CursorLost`] if another subscriber has opened the cursor. Other failures are logged, and the next
    /// save repeats them; it fails with them while the subscriber has to wait for the save.
    pub fn poll(&mut self, context: &mut Context<'_>, position: impl FnOnce() -> Cursor) -> Result<()> {
        if self.saving.is_none() && (self.is_ahead || self.interval != Duration::MAX) {
            let timer = self.timer.get_or_insert_with(|| {
                if self.is_ahead { Box::pin(ready(())) } else { self.env.sleep(self.interval) }
            });
            if timer.as_mut().poll(context).is_pending() {
                return Ok(());
            }
            let (mut cursor, filter, position) =
                (self.cursor.clone(), self.filter, self.stored_as(position()));
            self.timer = None;
            let save = Box::pin(async move {
                let saved = save(&mut cursor, position, filter).await;
                (cursor, saved)
            });
            self.saving = Some(Saving { save, is_outdated: false });
        }
        let Some(saving) = &mut self.saving else { return Ok(()) };
        let Poll::Ready((cursor, saved)) = saving.save.as_mut().poll(context) else { return Ok(()) };
        if saved.is_ok() && !saving.is_outdated {
            self.is_ahead = false;
        }
        (self.saving, self.cursor) = (None, cursor);
        // Without this, the timer would wait for a poll that may not come before another event.
        let pause = match &saved {
            Ok(()) if self.is_ahead => Duration::ZERO,
            Err(_) if self.is_ahead => SAVE_INTERVAL,
            _ => self.interval,
        };
        let timer = self.timer.insert(self.env.sleep(pause));
        if timer.as_mut().poll(context).is_ready() {
            context.waker().wake_by_ref();
        }
        if let Err(error) = &saved
            && !matches!(error, Error::CursorLost { .. })
        {
            self.cursor.complain(error);
            return if self.is_ahead { saved } else { Ok(()) };
        }
        saved
    }

    /// From now on the subscriber has a filter with the hash `filter`. If the change has set its position back, this
    /// is saved at once.
    pub fn replace(&mut self, filter: u64, is_set_back: bool) {
        self.filter = filter;
        if is_set_back {
            self.set_back();
        }
    }

    /// The subscriber has expired below `horizon`, and its position is [`Cursor::NOTHING`]. This is saved before the subscriber gets
    /// `Expired`, for then it may forget what it knows, and end: the one that opens the cursor next has to expire again, even where the
    /// rows could still be read.
    pub fn expire(&mut self, horizon: Sequence) {
        self.expiry = Some(Expiry { horizon, is_given: false });
        self.set_back();
    }

    /// The horizon below which the subscriber has expired, if that is saved and it has not got `Expired`.
    pub fn take_expired(&mut self) -> Option<Sequence> {
        let expiry = self.expiry.as_mut().filter(|expiry| !self.is_ahead && !expiry.is_given)?;
        expiry.is_given = true;
        Some(expiry.horizon)
    }

    /// What to save for `position`; `None` if what is saved stays: a subscriber that was to begin with nothing has not begun.
    fn stored_as(&mut self, position: Cursor) -> Option<Cursor> {
        if position != Cursor::NOTHING {
            self.expiry.take_if(|expiry| expiry.is_given);
            return Some(position);
        }
        self.expiry.is_some().then_some(Cursor::EXPIRED)
    }

    fn set_back(&mut self) {
        self.is_ahead = true;
        self.timer = None;
        if let Some(saving) = &mut self.saving {
            saving.is_outdated = true;
        }
    }

    /// Whether the subscriber was set back, and that is not saved: rows delivered now would not come again to a
    /// subscriber that starts from the saved position.
    pub fn is_ahead(&self) -> bool {
        self.is_ahead
    }

    /// Saves `position` now.
    pub async fn save(&mut self, position: Cursor) -> Result<()> {
        if let Some(saving) = &mut self.saving {
            // Two saves at once would conflict, and the earlier position might win.
            (self.cursor, _) = saving.save.as_mut().await;
            self.saving = None;
        }
        let position = self.stored_as(position);
        save(&mut self.cursor, position, self.filter).await?;
        self.is_ahead = false;
        Ok(())
    }
}

async fn save(cursor: &mut OpenCursor, position: Option<Cursor>, filter: u64) -> Result<()> {
    match position {
        Some(position) => cursor.save(position, filter).await,
        None => cursor.verify().await,
    }
}
