//! A connection within a process: two ends, with room for so many bytes in each direction.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

struct Way {
    bytes: VecDeque<u8>,
    /// The most bytes under way.
    room: usize,
    /// Whether an end is gone.
    is_closed: bool,
    /// The task that waits for bytes.
    reader: Option<Waker>,
    /// The task that waits for room.
    writer: Option<Waker>,
}

/// One direction, shared by its ends.
#[derive(Clone)]
struct Shared(Arc<Mutex<Way>>);

impl Shared {
    fn new(room: usize) -> Self {
        let way = Way { bytes: VecDeque::new(), room, is_closed: false, reader: None, writer: None };
        Self(Arc::new(Mutex::new(way)))
    }

    fn way(&self) -> MutexGuard<'_, Way> {
        self.0.lock()
    }

    /// Ends the direction: no bytes are given or taken any more.
    fn close(&self) {
        let mut way = self.way();
        way.is_closed = true;
        let wakers = [way.reader.take(), way.writer.take()];
        drop(way);
        wakers.into_iter().flatten().for_each(Waker::wake);
    }

    /// Takes some bytes; none at the end.
    fn poll_take(&self, context: &mut Context<'_>, most: usize) -> Poll<Vec<u8>> {
        let mut way = self.way();
        if way.bytes.is_empty() && !way.is_closed {
            way.reader = Some(context.waker().clone());
            return Poll::Pending;
        }
        let count = most.min(way.bytes.len());
        let taken = way.bytes.drain(..count).collect();
        let waker = way.writer.take();
        drop(way);
        waker.into_iter().for_each(Waker::wake);
        Poll::Ready(taken)
    }

    fn poll_give(&self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut way = self.way();
        if way.is_closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let count = bytes.len().min(way.room.saturating_sub(way.bytes.len()));
        if count == 0 && !bytes.is_empty() {
            way.writer = Some(context.waker().clone());
            return Poll::Pending;
        }
        way.bytes.extend(&bytes[..count]);
        let waker = way.reader.take();
        drop(way);
        waker.into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(count))
    }
}

/// An end of a connection, which is cut off when it is dropped.
pub(super) struct End {
    incoming: Shared,
    outgoing: Shared,
}

/// A connection with room for `room` bytes in each direction.
pub(super) fn connect(room: usize) -> (End, End) {
    let (there, back) = (Shared::new(room), Shared::new(room));
    let client = End { incoming: back.clone(), outgoing: there.clone() };
    (client, End { incoming: there, outgoing: back })
}

impl End {
    /// The next bytes, at most `most`; none at the end.
    pub async fn take(&mut self, most: usize) -> Vec<u8> {
        std::future::poll_fn(|context| self.incoming.poll_take(context, most)).await
    }

    /// Sends all of `bytes`; fails if the other end is gone.
    pub async fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = std::future::poll_fn(|context| self.outgoing.poll_give(context, bytes)).await?;
            bytes = &bytes[count..];
        }
        Ok(())
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.incoming.close();
        self.outgoing.close();
    }
}

impl AsyncRead for End {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let taken = ready!(self.incoming.poll_take(context, buffer.remaining()));
        buffer.put_slice(&taken);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.outgoing.poll_give(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The reader still takes the bytes that were sent before.
        self.outgoing.close();
        Poll::Ready(Ok(()))
    }
}
