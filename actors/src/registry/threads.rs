//! The arbiters of one host, opened when they are needed and replaced when they are lost.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::Arbiter;
use actix_rt::ArbiterHandle;

use super::{Placement, lock};

/// How long a thread may take to end before it is left behind.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// Who shares a thread.
type Key = (Placement, u64);

/// The open threads.
#[derive(Clone, Debug, Default)]
pub(super) struct Threads(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    open: HashMap<Key, Thread>,
    /// Given up because something on them never came back.
    abandoned: Vec<Thread>,
    opened: u64,
}

#[derive(Debug)]
struct Thread {
    number: u64,
    arbiter: Arbiter,
    pong: Arc<AtomicU64>,
    /// Disconnects when everything on the thread was dropped: it is about to end.
    gone: Receiver<()>,
}

/// A place on a thread.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    arbiter: ArbiterHandle,
    /// The number of the thread; none if it cannot be replaced.
    thread: Option<u64>,
    pong: Arc<AtomicU64>,
}

impl Seat {
    pub(super) fn fixed(arbiter: ArbiterHandle) -> Self {
        Self { arbiter, thread: None, pong: Arc::default() }
    }

    /// Runs something there. Returns whether the thread still takes it.
    pub(super) fn run(&self, work: impl FnOnce() + Send + 'static) -> bool {
        self.arbiter.spawn_fn(work)
    }

    /// Asks the thread for a sign of life.
    pub(super) fn ping(&self) {
        let pong = Arc::clone(&self.pong);
        // A thread that has ended shows no sign of life.
        let _ = self.arbiter.spawn_fn(move || {
            pong.fetch_add(1, Ordering::AcqRel);
        });
    }

    /// How many signs of life it gave.
    pub(super) fn pongs(&self) -> u64 {
        self.pong.load(Ordering::Acquire)
    }
}

impl Thread {
    fn open(number: u64) -> io::Result<Self> {
        let arbiter = Arbiter::try_new()?;
        let (held, gone) = channel::<()>();
        arbiter.spawn(async move {
            let _held = held;
            std::future::pending::<()>().await;
        });
        Ok(Self { number, arbiter, pong: Arc::default(), gone })
    }

    fn seat(&self) -> Seat {
        Seat { arbiter: self.arbiter.handle(), thread: Some(self.number), pong: Arc::clone(&self.pong) }
    }

    /// Ends the thread if it can within `patience`.
    fn end(self, patience: Duration) {
        self.arbiter.stop();
        if self.gone.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            tracing::error!("a thread of the actors is blocked and is left behind");
        } else if self.arbiter.join().is_err() {
            tracing::error!("an actor thread panicked");
        }
    }
}

impl Inner {
    /// Forgets threads that have ended meanwhile.
    fn tidy(&mut self) {
        let (ended, blocked): (Vec<_>, Vec<_>) = std::mem::take(&mut self.abandoned)
            .into_iter()
            .partition(|thread| thread.gone.try_recv() == Err(TryRecvError::Disconnected));
        self.abandoned = blocked;
        for thread in ended {
            thread.end(Duration::ZERO);
        }
    }
}

impl Threads {
    /// A seat on the thread of this placement, which is opened if it is not there or has ended.
    pub(super) fn seat(&self, placement: Placement, child: u64) -> io::Result<Seat> {
        let key = (placement, if placement == Placement::Own { child } else { 0 });
        let mut inner = lock(&self.0);
        inner.tidy();
        if let Some(thread) = inner.open.get(&key)
            && thread.arbiter.alive()
        {
            return Ok(thread.seat());
        }
        inner.opened += 1;
        let thread = Thread::open(inner.opened)?;
        let seat = thread.seat();
        let ended = inner.open.insert(key, thread);
        inner.abandoned.extend(ended);
        Ok(seat)
    }

    /// Gives up the thread of this seat. Whatever wakes up there finds it stopping.
    pub(super) fn abandon(&self, seat: &Seat) {
        let mut inner = lock(&self.0);
        let key =
            inner.open.iter().find(|(_, thread)| Some(thread.number) == seat.thread).map(|(key, _)| *key);
        if let Some(thread) = key.and_then(|key| inner.open.remove(&key)) {
            thread.arbiter.stop();
            inner.abandoned.push(thread);
        }
    }

    /// Ends the thread that was this child's own.
    pub(super) fn release_own(&self, child: u64) {
        let mut inner = lock(&self.0);
        if let Some(thread) = inner.open.remove(&(Placement::Own, child)) {
            thread.arbiter.stop();
            inner.abandoned.push(thread);
        }
    }

    /// Ends all threads. Those that are blocked are left behind.
    pub(super) fn end(&self) {
        let (open, abandoned) = {
            let mut inner = lock(&self.0);
            (std::mem::take(&mut inner.open), std::mem::take(&mut inner.abandoned))
        };
        for thread in open.values() {
            thread.arbiter.stop();
        }
        for thread in open.into_values() {
            thread.end(END_PATIENCE);
        }
        for thread in abandoned {
            thread.end(Duration::ZERO);
        }
    }
}
