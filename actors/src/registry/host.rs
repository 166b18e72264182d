//! The threads actors live on.
//!
//! The rule: a host owns a `System` of its own, on a thread of its own, opens a thread for a placement when the first actor needs it,
//! replaces one that has ended or is blocked, and joins its threads when it closes. The failures this prevents: a library that works only
//! under one kind of runtime, actors that die with a thread, and threads that outlive their owner.

use std::io;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use actix::{Arbiter, System};
use actix_rt::ArbiterHandle;
use tokio::sync::{oneshot, watch};

use super::child::Report;
use super::lock;
use super::threads::{Seat, Threads};

/// Where an actor lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// On the thread that nothing else may delay.
    Vital,
    /// On the thread of the daily work. The default.
    #[default]
    Work,
    /// On the thread of this name, which it shares with whoever else is placed there.
    Shared(&'static str),
    /// On a thread of its own: for an actor that blocks or computes for long.
    Own,
    /// On the thread of the supervisors. On a host of its own that is a bad place for an actor; see [`Host::current`].
    Current,
}

/// Threads for actors.
#[derive(Debug)]
pub struct Host {
    /// The arbiter that made the host, or the one of its own system.
    main: ArbiterHandle,
    own: Option<Own>,
}

#[derive(Debug)]
struct Own {
    system: System,
    threads: Threads,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Closes when the thread is about to end.
    gone: watch::Receiver<()>,
}

impl Host {
    /// A system of its own, with its own threads. Needs no particular runtime.
    ///
    /// # Errors
    ///
    /// When the thread cannot be started.
    pub async fn own(name: &str) -> io::Result<Self> {
        let (opened, opening) = oneshot::channel();
        let (alive, gone) = watch::channel(());
        let threads = Threads::default();
        let of_system = threads.clone();
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _alive = alive;
            live(opened, &of_system);
        })?;
        let system =
            opening.await.map_err(|_| io::Error::other("the system thread ended before it was ready"))?;
        let main = system.arbiter().clone();
        Ok(Self { main, own: Some(Own { system, threads, thread: Mutex::new(Some(thread)), gone }) })
    }

    /// The current thread for everything; it must run an actix system. For tests in virtual time.
    ///
    /// # Panics
    ///
    /// When no actix system runs on this thread.
    pub fn current() -> Self {
        Self { main: Arbiter::current(), own: None }
    }

    /// Runs a future on the host's main thread, where the supervisors live. Returns whether it still can.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) -> bool {
        self.main.spawn(future)
    }

    /// A seat for one incarnation. Must be called on the main thread. `child` tells apart who has a thread of its own.
    pub(super) fn seat(&self, placement: Placement, child: u64, report: &Arc<Report>) -> io::Result<Seat> {
        match &self.own {
            Some(own) if placement != Placement::Current => own.threads.seat(placement, child, report),
            _ => Ok(Seat::fixed(self.main.clone())),
        }
    }

    /// Gives up a thread that is blocked, and all who live there. The next seat of its placement is on another one.
    pub(super) fn abandon(&self, seat: &Seat) {
        if let Some(own) = &self.own {
            own.threads.abandon(seat);
        }
    }

    /// Ends the thread that was this child's own.
    pub(super) fn release_own(&self, child: u64) {
        if let Some(own) = &self.own {
            own.threads.release_own(child);
        }
    }

    /// Tells the threads to end and does not wait for them.
    pub(super) fn stop(&self) {
        if let Some(own) = &self.own {
            own.system.stop();
        }
    }

    /// Ends the threads and waits until they are gone. A second call finds nothing to do. On a thread of the host itself it cannot wait.
    pub async fn close(&self) {
        let Some(own) = &self.own else { return };
        own.system.stop();
        if System::try_current().is_some_and(|system| system.id() == own.system.id()) {
            return;
        }
        // The only news is that the sender is gone: the thread is about to end.
        let _ = own.gone.clone().changed().await;
        if let Some(thread) = lock(&own.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("the system thread panicked");
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The life of a system thread.
fn live(opened: oneshot::Sender<System>, threads: &Threads) {
    let runner = System::new();
    // Whoever asked may be gone; then the host was never made, and nobody will stop this system.
    if opened.send(System::current()).is_ok()
        && let Err(error) = runner.run()
    {
        tracing::error!(%error, "the actor system failed");
    }
    threads.end();
}
