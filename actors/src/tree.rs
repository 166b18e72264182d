//! The pump's tree: the only place that names every actor.
//!
//! The rule: heartbeat, settle, dispatch, claim start in this order, and a drain goes the other way, so that claiming stops first, the
//! last result is written before the instance leaves, and beating ends last. The failures this prevents: rows claimed with nobody to run
//! them, results with nobody to write them, and leases handed back while a result is still on its way.

mod wiring;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use actix::prelude::*;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::instance::{Gate, InstanceIdentity};
use crate::message::{Account, Drain, GateChanged, Observe, RequestImmediatePoll};
use crate::options::{Options, OptionsError};
use crate::port::{InstanceStore, WorkStore};
use crate::registry::{Host, Registry, StartFailed};
use crate::runner::Runner;
use crate::work::Category;

use wiring::{CatchUp, Specs};

pub use crate::message::Drained as DrainReport;

/// What an engine is made of.
pub struct EngineParts {
    /// The knobs.
    pub options: Options,
    /// Who this instance is. The id must be fresh.
    pub identity: InstanceIdentity,
    /// The work tables.
    pub work: Arc<dyn WorkStore>,
    /// The membership table.
    pub instances: Arc<dyn InstanceStore>,
    /// Who runs what; the last one given for a category counts. Only categories named here are claimed.
    pub runners: Vec<(Category, Arc<dyn Runner>)>,
    /// The runtime on which runners run.
    pub handlers: Handle,
    /// How long the start may take.
    pub start_deadline: Duration,
}

impl std::fmt::Debug for EngineParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineParts").field("identity", &self.identity).finish_non_exhaustive()
    }
}

/// Why an engine did not start. Nothing is left running.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The options cannot work.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The threads for the actors could not be started.
    #[error("cannot start threads")]
    Threads(#[from] std::io::Error),
    /// An actor did not become ready.
    #[error(transparent)]
    Child(#[from] StartFailed),
}

/// Whether the engine does its work.
#[derive(Debug, Default)]
struct Readiness {
    member: AtomicBool,
    ended: AtomicBool,
}

impl Readiness {
    fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    fn is_ready(&self) -> bool {
        self.member.load(Ordering::Acquire) && !self.ended.load(Ordering::Acquire)
    }
}

/// A running engine. Dropping it without [`Engine::drain`] ends its actors where they stand.
#[derive(Debug)]
pub struct Engine {
    registry: Arc<Registry>,
    readiness: Arc<Readiness>,
    draining: AtomicBool,
    report: Arc<watch::Sender<Option<DrainReport>>>,
    observed: Vec<Recipient<Observe>>,
    drained: Vec<Recipient<Drain>>,
}

impl Engine {
    /// Starts everything, in order, on threads of its own. Needs no particular runtime.
    pub async fn start(parts: EngineParts) -> Result<Self, StartError> {
        let host = Host::own("workpump").await?;
        Self::start_on(parts, host).await
    }

    /// Starts everything on this host.
    pub async fn start_on(parts: EngineParts, host: Host) -> Result<Self, StartError> {
        if let Err(error) = parts.options.validate() {
            host.close().await;
            return Err(error.into());
        }
        let readiness = Arc::new(Readiness::default());
        let start_deadline = parts.start_deadline;
        let specs = Specs::new(parts, &readiness);
        let (heartbeat, settle, dispatch, claim) =
            (specs.heartbeat.addr(), specs.settle.addr(), specs.dispatch.addr(), specs.claim.addr());
        let registry = specs.group().start(host, start_deadline).await?;
        // The first beat's news may still be on its way; an engine that has started is ready. Should the warden have ended, it is not.
        if let Ok(warden) = registry.recipient::<CatchUp>() {
            let _ = warden.send(CatchUp).await;
        }
        Ok(Self {
            registry: Arc::new(registry),
            readiness,
            draining: AtomicBool::new(false),
            report: Arc::new(watch::Sender::new(None)),
            observed: vec![
                heartbeat.clone().recipient(),
                settle.clone().recipient(),
                dispatch.clone().recipient(),
                claim.clone().recipient(),
            ],
            drained: vec![claim.recipient(), dispatch.recipient(), settle.recipient(), heartbeat.recipient()],
        })
    }

    /// The address of an actor of the tree.
    pub fn addr<A: Actor>(&self) -> Option<Addr<A>> {
        self.registry.addr().ok()
    }

    /// Whoever takes this message.
    pub fn recipient<M>(&self) -> Option<Recipient<M>>
    where
        M: Message + Send + 'static,
        M::Result: Send,
    {
        self.registry.recipient().ok()
    }

    /// Claims now, at any depth of backoff.
    pub fn request_immediate_poll(&self) {
        self.tell(RequestImmediatePoll);
    }

    /// Tells whether NOTIFY reaches this instance.
    pub fn gate_changed(&self, gate: Gate) {
        self.tell(GateChanged(gate));
    }

    /// Whether it is a member and works: false before the first accepted heartbeat, while fenced, and for good after an eviction, a drain
    /// or the end of an actor.
    pub fn is_ready(&self) -> bool {
        self.readiness.is_ready()
    }

    /// What every actor says of itself, in start order. An actor that has ended says nothing.
    pub async fn observe(&self) -> Vec<Account> {
        let mut accounts = Vec::with_capacity(self.observed.len());
        for recipient in &self.observed {
            accounts.extend(recipient.send(Observe).await.ok());
        }
        accounts
    }

    /// Stops claiming, hands back what was not started, waits for what runs, writes every result, leaves the membership, and ends the
    /// actors and their threads. A second call waits for the first and gives its report. Needs no particular runtime.
    pub async fn drain(&self) -> DrainReport {
        self.readiness.end();
        let mut report = self.report.subscribe();
        if !self.draining.swap(true, Ordering::AcqRel) {
            self.drain_actors();
        }
        let report =
            report.wait_for(Option::is_some).await.map_or(None, |report| *report).unwrap_or_default();
        self.registry.shutdown().await;
        report
    }

    /// Drains one actor after the other, on the host: whoever asked for it may go away meanwhile.
    fn drain_actors(&self) {
        let drain = Draining { so_far: DrainReport::default(), report: Arc::clone(&self.report) };
        let actors = self.drained.clone();
        self.registry.spawn(async move {
            let mut drain = drain;
            for actor in actors {
                // An actor that has ended has nothing left to drain.
                if let Ok(drained) = actor.send(Drain).await {
                    drain.so_far += drained;
                }
            }
        });
    }

    fn tell<M>(&self, message: M)
    where
        M: Message<Result = ()> + Send + 'static,
    {
        if let Ok(recipient) = self.registry.recipient::<M>() {
            recipient.do_send(message);
        }
    }
}

/// A drain under way. Reports when it is dropped, so that a host that ends early leaves nobody waiting.
struct Draining {
    so_far: DrainReport,
    report: Arc<watch::Sender<Option<DrainReport>>>,
}

impl Drop for Draining {
    fn drop(&mut self) {
        self.report.send_replace(Some(self.so_far));
    }
}
