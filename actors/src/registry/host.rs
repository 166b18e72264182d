//! The threads actors live on.
//!
//! The rule: a host owns a `System` of its own, on a thread of its own, and joins all its threads when it closes. The failures this
//! prevents: a library that works only under one kind of runtime, and threads that outlive it.

use std::io;
use std::sync::Mutex;
use std::thread::{self, JoinHandle};

use actix::{Arbiter, System};
use actix_rt::ArbiterHandle;
use tokio::sync::{oneshot, watch};

use super::Placement;
use super::lock;

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
    vital: ArbiterHandle,
    work: ArbiterHandle,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Closes when the thread is about to end.
    gone: watch::Receiver<()>,
}

impl Host {
    /// A system of its own, with a vital and a work thread. Needs no particular runtime.
    pub async fn own(name: &str) -> io::Result<Self> {
        let (opened, opening) = oneshot::channel();
        let (alive, gone) = watch::channel(());
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _alive = alive;
            live(opened);
        })?;
        match opening.await {
            Ok(Ok((system, vital, work))) => {
                let main = system.arbiter().clone();
                Ok(Self {
                    main,
                    own: Some(Own { system, vital, work, thread: Mutex::new(Some(thread)), gone }),
                })
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::Error::other("the system thread ended before it was ready")),
        }
    }

    /// The current thread for everything; it must run an actix system. For tests in virtual time.
    ///
    /// # Panics
    ///
    /// When no actix system runs on this thread.
    pub fn current() -> Self {
        Self { main: Arbiter::current(), own: None }
    }

    /// Runs a future on the host's main thread. Returns whether it still can.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) -> bool {
        self.main.spawn(future)
    }

    pub(super) fn arbiter(&self, placement: Placement) -> &ArbiterHandle {
        match (&self.own, placement) {
            (Some(own), Placement::Vital) => &own.vital,
            (Some(own), Placement::Work) => &own.work,
            (None, _) | (_, Placement::Current) => &self.main,
        }
    }

    /// Ends the threads and waits until they are gone. A second call finds nothing to do.
    pub async fn close(&self) {
        let Some(own) = &self.own else { return };
        own.system.stop();
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
        if let Some(own) = &self.own {
            own.system.stop();
        }
    }
}

type Opened = oneshot::Sender<io::Result<(System, ArbiterHandle, ArbiterHandle)>>;

/// The life of a system thread.
fn live(opened: Opened) {
    let runner = System::new();
    let arbiters = Arbiter::try_new().and_then(|vital| Ok((vital, Arbiter::try_new()?)));
    let (vital, work) = match arbiters {
        Ok(arbiters) => arbiters,
        Err(error) => {
            // Whoever asked may be gone; then nobody misses the answer.
            let _ = opened.send(Err(error));
            return;
        }
    };
    let _ = opened.send(Ok((System::current(), vital.handle(), work.handle())));
    if let Err(error) = runner.run() {
        tracing::error!(%error, "the actor system failed");
    }
    for arbiter in [work, vital] {
        arbiter.stop();
        if arbiter.join().is_err() {
            tracing::error!("an actor thread panicked");
        }
    }
}
