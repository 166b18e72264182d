//! The pump's tree: the only place that names every actor.
//!
//! ```text
//! workpump
//! ├── vital   lease_renewal, warden, notify_gate, heartbeat   on the vital thread
//! ├── users   whatever users supervise                        contained: when it is given up, the pump goes on, and is not ready
//! └── work    settle, dispatch, stale_sweep, claim            on the work thread
//! ```
//!
//! The rule: they start in this order, and a drain goes the other way, so that claiming stops first, the last result is written before
//! the instance leaves, and renewing and beating end last. An actor that dies is replaced, and what must outlive it lives outside of it; one that
//! dies too often ends the engine, after a drain of what can still be drained. The failures this prevents: rows claimed with nobody to
//! run them, results with nobody to write them, and leases handed back while a result is still on its way.

mod drain;
mod life;
mod rebirth;
mod wiring;

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::runtime::Handle;

use crate::actor::warden::CatchUp;
use crate::instance::{AliveLock, InstanceId, InstanceIdentity};
use crate::message::{Account, Drain, GateReport, Observe, ProbeNow, RequestImmediatePoll};
use crate::options::{Options, OptionsError};
use crate::port::{
    DeathWatch, DirectConnector, Doorbell, InstanceStore, ProducersRoute, RenewalStore, SweepStore, WorkStore,
};
use crate::registry::{GaveUp, Group, Host, Name, Registry, StartFailed};
use crate::runner::Runner;
use crate::work::Category;

use drain::Drainer;
use life::Lives;
use wiring::Specs;

pub use crate::message::Drained as DrainReport;

/// What an engine is made of.
pub struct EngineParts {
    /// The knobs.
    pub options: Options,
    /// Who this instance is. The id must be fresh.
    pub identity: InstanceIdentity,
    /// The work tables.
    pub work: Arc<dyn WorkStore>,
    /// Wakes the instance when work arrives. `None`: nobody rings, and it polls.
    pub doorbell: Option<Arc<dyn Doorbell>>,
    /// The membership table.
    pub instances: Arc<dyn InstanceStore>,
    /// Opens the direct session. `None`: there is none, and beats alone show that the instance is alive.
    pub direct: Option<Arc<dyn DirectConnector>>,
    /// Rings as producers do: proves that NOTIFY reaches the direct session.
    pub route: Arc<dyn ProducersRoute>,
    /// Keeps leases.
    pub renewals: Arc<dyn RenewalStore>,
    /// The backstop that finds dead peers, and hands back what they held.
    pub sweep: Arc<dyn SweepStore>,
    /// The death watch; none where there is no direct connection.
    pub watch: Option<Arc<dyn DeathWatch>>,
    /// Who runs what; the last one given for a category counts. Only categories named here are claimed.
    pub runners: Vec<(Category, Arc<dyn Runner>)>,
    /// The runtime on which runners run.
    pub handlers: Handle,
    /// Users' own actors.
    pub users: Group,
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

/// A running engine. Dropping it without [`Engine::drain`] ends its actors where they stand.
#[derive(Debug)]
pub struct Engine {
    registry: Registry,
    lives: Arc<Lives>,
    drainer: Arc<Drainer>,
    observed: Vec<Recipient<Observe>>,
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
        let lives = Lives::new(parts.identity.clone(), &parts.options);
        let (start_deadline, mut parts) = (parts.start_deadline, parts);
        let users = std::mem::replace(&mut parts.users, Group::new("users"));
        let drain_deadline = Duration::from_secs(parts.options.dispatch.drain_deadline_seconds.into());
        let specs = Specs::new(parts, Arc::clone(&lives));
        let (lease_renewal, notify_gate) = (specs.lease_renewal.addr(), specs.notify_gate.addr());
        let (heartbeat, settle) = (specs.heartbeat.addr(), specs.settle.addr());
        let (dispatch, stale_sweep) = (specs.dispatch.addr(), specs.stale_sweep.addr());
        let claim = specs.claim.addr();
        let in_order: Vec<(Name, Recipient<Drain>)> = vec![
            ("claim".into(), claim.clone().recipient()),
            ("stale_sweep".into(), stale_sweep.clone().recipient()),
            ("dispatch".into(), dispatch.clone().recipient()),
            ("settle".into(), settle.clone().recipient()),
            ("lease_renewal".into(), lease_renewal.clone().recipient()),
            ("heartbeat".into(), heartbeat.clone().recipient()),
            // The lock goes when the instance has left.
            ("notify_gate".into(), notify_gate.clone().recipient()),
        ];
        let drainer = Drainer::new(in_order, drain_deadline);
        let registry = specs.group(users, &drainer).start(host, start_deadline).await?;
        // The first beat's news may still be on its way; an engine that has started is ready. Should the warden have ended, it is not.
        if let Ok(warden) = registry.recipient::<CatchUp>() {
            let _ = warden.send(CatchUp).await;
        }
        let observed = vec![
            lease_renewal.recipient(),
            notify_gate.recipient(),
            heartbeat.recipient(),
            settle.recipient(),
            dispatch.recipient(),
            stale_sweep.recipient(),
            claim.recipient(),
        ];
        Ok(Self { registry, lives, drainer, observed })
    }

    /// The tree of actors: addresses, health, events. For users' own actors and for whoever watches.
    pub fn registry(&self) -> &Registry {
        &self.registry
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

    /// What is known of the notify gate. Asks nobody.
    pub fn gate(&self) -> GateReport {
        self.lives.current().standing.gate_report()
    }

    /// Proves now that NOTIFY reaches this instance, and says how it went. Once the engine has ended: what was known last.
    pub async fn probe_gate(&self) -> GateReport {
        if let Ok(gate) = self.registry.recipient::<ProbeNow>()
            && let Ok(report) = gate.send(ProbeNow).await
        {
            return report;
        }
        self.gate()
    }

    /// Whether it is a member and works, and every actor with it: false before the first accepted heartbeat, while fenced, while an actor
    /// is being restarted or was given up, from an eviction to the first accepted heartbeat under the next id, and for good after a drain.
    /// [`Registry::health`] says who is not well.
    pub fn is_ready(&self) -> bool {
        let standing = &self.lives.current().standing;
        !standing.is_fenced() && !standing.is_over() && self.registry.health().is_ready()
    }

    /// The id it is known by now. Another one after an eviction; no id is used twice.
    pub fn instance_id(&self) -> InstanceId {
        self.lives.current().instance()
    }

    /// Whether its session holds its alive-lock, as far as it knows.
    pub fn is_alive_lock_held(&self) -> bool {
        self.lives.current().standing.alive_lock() == AliveLock::Held
    }

    /// Resolves when the tree has ended: well after a drain, with an error when an actor of the pump was given up.
    ///
    /// # Errors
    ///
    /// When an actor of the pump died too often.
    pub async fn terminated(&self) -> Result<(), GaveUp> {
        self.registry.terminated().await
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
        self.lives.current().standing.drain();
        if let Some(draining) = self.drainer.begin() {
            // On the host: whoever asked for it may go away meanwhile.
            self.registry.spawn(draining.run(None));
        }
        let report = self.drainer.report().await;
        self.registry.shutdown().await;
        report
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
