//! Several actors that start and stop together.

use std::any::TypeId;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::incarnation::Exit;
use super::lock;
use super::spec::{AnySpec, Book, Child, Launched};
use super::{Host, Spec};

/// How long a child may take to stop before it is ended without being asked.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// A child did not come up, so nothing did.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{child} did not start: {cause}")]
pub struct StartFailed {
    /// Which one.
    pub child: &'static str,
    /// The last thing known about why.
    pub cause: String,
}

type OnFailure = Arc<dyn Fn(&'static str, &Exit) + Send + Sync>;

/// Actors to be started in this order and stopped in the reverse one.
pub struct Group {
    name: &'static str,
    specs: Vec<Box<dyn AnySpec>>,
    book: Book,
    on_failure: Option<OnFailure>,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("name", &self.name)
            .field("children", &self.specs.len())
            .finish_non_exhaustive()
    }
}

impl Group {
    /// An empty group.
    pub fn new(name: &'static str) -> Self {
        Self { name, specs: Vec::new(), book: Book::default(), on_failure: None }
    }

    /// One more child, started after those before it.
    #[must_use]
    pub fn child<A: Actor<Context = Context<A>>>(mut self, spec: Spec<A>) -> Self {
        spec.write_into(&mut self.book);
        self.specs.push(Box::new(spec));
        self
    }

    /// What to do when a started child ends without being asked to.
    #[must_use]
    pub fn on_failure(mut self, told: impl Fn(&'static str, &Exit) + Send + Sync + 'static) -> Self {
        self.on_failure = Some(Arc::new(told));
        self
    }

    /// Starts all children, each when the one before it is ready. All or nothing, within `deadline`.
    ///
    /// Needs no particular runtime: the work is done on the host.
    pub async fn start(self, host: Host, deadline: Duration) -> Result<Registry, StartFailed> {
        let Self { name, specs, book, on_failure } = self;
        let host = Arc::new(host);
        let (done, doing) = oneshot::channel();
        let on_host = Arc::clone(&host);
        host.spawn(async move {
            let started = bring_up(specs, &on_host, deadline).await;
            if let Err(Ok(children)) = done.send(started) {
                // Whoever asked is gone.
                stop_all(&children).await;
            }
        });
        match doing.await {
            Ok(Ok(children)) => {
                let (closing, _) = watch::channel(false);
                let registry = Registry { host, children: Arc::new(children), book, closing };
                registry.watch(on_failure);
                Ok(registry)
            }
            Ok(Err(failed)) => {
                host.close().await;
                Err(failed)
            }
            Err(_) => Err(StartFailed { child: name, cause: "the host ended during the start".to_owned() }),
        }
    }
}

async fn bring_up(
    specs: Vec<Box<dyn AnySpec>>,
    host: &Host,
    deadline: Duration,
) -> Result<Vec<Child>, StartFailed> {
    let until = Instant::now() + deadline;
    let mut started = Vec::with_capacity(specs.len());
    for spec in specs {
        let Launched { child, mut ready, progress } = spec.launch(host);
        let mut exit = child.exit.clone();
        let cause = tokio::select! {
            biased;
            answer = timeout_at(until, &mut ready) => match answer {
                Ok(Ok(())) => None,
                Ok(Err(_)) => Some("it ended before it was ready".to_owned()),
                Err(_) => {
                    let waited = format!("not ready within {} ms", deadline.as_millis());
                    Some(progress.last_problem().map_or(waited.clone(), |problem| format!("{waited}: {problem}")))
                }
            },
            exit = exit.wait_for(Option::is_some) => Some(match exit.as_deref() {
                Ok(Some(Exit::Panicked(text))) => format!("it panicked: {text}"),
                _ => progress.last_problem().unwrap_or_else(|| "it ended before it was ready".to_owned()),
            }),
        };
        let name = child.name;
        started.push(child);
        if let Some(cause) = cause {
            stop_all(&started).await;
            return Err(StartFailed { child: name, cause });
        }
    }
    Ok(started)
}

/// Stops children in reverse order, each before the next.
async fn stop_all(children: &[Child]) {
    for child in children.iter().rev() {
        if let Some(stop) = lock(&child.stop).take() {
            // It may have ended by itself.
            let _ = stop.send(());
        }
        let mut exit = child.exit.clone();
        let gone = async move { exit.wait_for(Option::is_some).await.map(drop) };
        if timeout(STOP_GRACE, gone).await.is_ok() {
            continue;
        }
        tracing::warn!(child = child.name, "did not stop in time and is ended");
        if let Some(kill) = lock(&child.kill).take() {
            let _ = kill.send(());
        }
    }
}

/// A running group.
pub struct Registry {
    host: Arc<Host>,
    children: Arc<Vec<Child>>,
    book: Book,
    closing: watch::Sender<bool>,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("children", &self.children).finish_non_exhaustive()
    }
}

impl Registry {
    /// The address of the child of this type.
    pub fn addr<A: Actor>(&self) -> Option<Addr<A>> {
        self.book.addrs.get(&TypeId::of::<A>())?.downcast_ref::<Addr<A>>().cloned()
    }

    /// The child that declared to provide this message.
    pub fn recipient<M>(&self) -> Option<Recipient<M>>
    where
        M: Message + Send + 'static,
        M::Result: Send,
    {
        self.book.recipients.get(&TypeId::of::<M>())?.downcast_ref::<Recipient<M>>().cloned()
    }

    /// Runs a future on the host's main thread. Returns whether it still can.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) -> bool {
        self.host.spawn(future)
    }

    /// Stops all children in reverse order, then the host, and waits until its threads are gone. A second call does the same again and
    /// finds little to do. Needs no particular runtime.
    pub async fn shutdown(&self) {
        self.closing.send_replace(true);
        let (done, doing) = oneshot::channel();
        let children = Arc::clone(&self.children);
        self.host.spawn(async move {
            stop_all(&children).await;
            // Whoever asked may be gone.
            let _ = done.send(());
        });
        // No answer means that the host has ended already, and its actors with it.
        let _ = doing.await;
        self.host.close().await;
    }

    fn watch(&self, on_failure: Option<OnFailure>) {
        let Some(on_failure) = on_failure else { return };
        for child in self.children.iter() {
            let (name, mut exit, closing) = (child.name, child.exit.clone(), self.closing.subscribe());
            let on_failure = Arc::clone(&on_failure);
            self.host.spawn(async move {
                if let Ok(exit) = exit.wait_for(Option::is_some).await
                    && let Some(exit) = exit.as_ref()
                    && !*closing.borrow()
                {
                    on_failure(name, exit);
                }
            });
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.closing.send_replace(true);
        for child in self.children.iter().rev() {
            if let Some(stop) = lock(&child.stop).take() {
                let _ = stop.send(());
            }
        }
    }
}
