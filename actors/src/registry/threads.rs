//! The arbiters of one host, opened when they are needed and replaced when they are lost.

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use actix::Arbiter;
use actix_rt::ArbiterHandle;
use tokio::time::Instant;

use super::child::Report;
use super::{Exit, Placement, lock};

/// How long the threads may take to end before they are left behind.
const END_PATIENCE: Duration = Duration::from_secs(2);

thread_local! {
    /// Dropped when everything on the thread was.
    static HELD: Cell<Option<Sender<()>>> = const { Cell::new(None) };
}

/// Who shares a thread.
type Key = (Placement, u64);

/// The open threads.
#[derive(Clone, Debug, Default)]
pub(super) struct Threads(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    open: HashMap<Key, Thread>,
    /// Told to end, or ended by themselves.
    ending: Vec<Thread>,
    /// Given up because something on them never came back.
    abandoned: Vec<Thread>,
    opened: u64,
}

#[derive(Debug)]
struct Thread {
    number: u64,
    arbiter: Arbiter,
    pong: Arc<AtomicU64>,
    /// Disconnects when the thread is about to end.
    gone: Receiver<()>,
    /// The lives that were begun here.
    riders: Vec<Weak<Report>>,
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
        arbiter.spawn_fn(move || HELD.set(Some(held)));
        Ok(Self { number, arbiter, pong: Arc::default(), gone, riders: Vec::new() })
    }

    /// A seat for this life.
    fn seat(&mut self, report: &Arc<Report>) -> Seat {
        self.riders.retain(|rider| rider.strong_count() > 0);
        self.riders.push(Arc::downgrade(report));
        Seat { arbiter: self.arbiter.handle(), thread: Some(self.number), pong: Arc::clone(&self.pong) }
    }

    fn has_ended(&self) -> bool {
        self.gone.try_recv() == Err(TryRecvError::Disconnected)
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
    /// Joins threads that have ended meanwhile.
    fn tidy(&mut self) {
        for list in [&mut self.ending, &mut self.abandoned] {
            for ended in list.extract_if(.., |thread| thread.has_ended()) {
                ended.end(Duration::ZERO);
            }
        }
    }
}

impl Threads {
    /// A seat for this life on the thread of this placement, which is opened if it is not there or has ended.
    pub(super) fn seat(&self, placement: Placement, child: u64, report: &Arc<Report>) -> io::Result<Seat> {
        let key = (placement, if placement == Placement::Own { child } else { 0 });
        let mut inner = lock(&self.0);
        inner.tidy();
        if let Some(thread) = inner.open.get_mut(&key)
            && thread.arbiter.alive()
        {
            return Ok(thread.seat(report));
        }
        inner.opened += 1;
        let mut thread = Thread::open(inner.opened)?;
        let seat = thread.seat(report);
        let ended = inner.open.insert(key, thread);
        inner.ending.extend(ended);
        Ok(seat)
    }

    /// Gives up the thread of this seat, and all who live there: they have to go on elsewhere, whoever blocked it. Whatever wakes up there
    /// finds it stopping.
    pub(super) fn abandon(&self, seat: &Seat) {
        let riders = {
            let mut inner = lock(&self.0);
            let mut open = inner.open.iter();
            let key = open.find(|(_, thread)| Some(thread.number) == seat.thread).map(|(key, _)| *key);
            let Some(mut thread) = key.and_then(|key| inner.open.remove(&key)) else { return };
            thread.arbiter.stop();
            let riders = std::mem::take(&mut thread.riders);
            inner.abandoned.push(thread);
            riders
        };
        for rider in riders.iter().filter_map(Weak::upgrade) {
            rider.exit(Exit::ThreadGone);
        }
    }

    /// Ends the thread that was this child's own.
    pub(super) fn release_own(&self, child: u64) {
        let mut inner = lock(&self.0);
        if let Some(thread) = inner.open.remove(&(Placement::Own, child)) {
            thread.arbiter.stop();
            inner.ending.push(thread);
        }
    }

    /// Ends all threads. Those that are blocked are left behind.
    pub(super) fn end(&self) {
        let Inner { open, ending, abandoned, .. } = std::mem::take(&mut *lock(&self.0));
        for thread in open.values() {
            thread.arbiter.stop();
        }
        let deadline = Instant::now() + END_PATIENCE;
        for thread in open.into_values().chain(ending) {
            thread.end(deadline.saturating_duration_since(Instant::now()));
        }
        for thread in abandoned {
            thread.end(Duration::ZERO);
        }
    }
}
