//! The pump's tree: the only place that names every actor.
//!
//! The rule: heartbeat, settle, dispatch, claim start in this order, and a drain goes the other way, so that claiming stops first, the
//! last result is written before the instance leaves, and beating ends last. The failures this prevents: rows claimed with nobody to run
//! them, results with nobody to write them, and leases handed back while a result is still on its way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use actix::prelude::*;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use uuid::Uuid;

use crate::actor::claim::{ClaimActor, ClaimParts};
use crate::actor::dispatch::{DispatchActor, DispatchParts};
use crate::actor::heartbeat::{HeartbeatActor, HeartbeatParts};
use crate::actor::settle::{SettleActor, SettleParts};
use crate::delivery::InFlight;
use crate::instance::{Gate, InstanceId, InstanceIdentity};
use crate::message::{
    Account, AliveLockChanged, BeatNow, Drain, Evicted, Fence, GateChanged, Observe, Pause,
    RequestImmediatePoll, Resume, Settle, Unfence,
};
use crate::options::{Options, OptionsError};
use crate::port::{InstanceStore, WorkStore};
use crate::registry::{Exit, Group, Host, Placement, Registry, Spec, StartFailed};
use crate::runner::Runner;
use crate::work::Category;

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
    fn end(&self) -> bool {
        !self.ended.swap(true, Ordering::AcqRel)
    }

    fn is_ready(&self) -> bool {
        self.member.load(Ordering::Acquire) && !self.ended.load(Ordering::Acquire)
    }
}

/// Where news about the whole instance goes: it tells everyone concerned.
#[derive(Debug)]
struct WardenActor {
    readiness: Arc<Readiness>,
    fence: Vec<Recipient<Fence>>,
    unfence: Vec<Recipient<Unfence>>,
    evicted: Vec<Recipient<Evicted>>,
}

impl Actor for WardenActor {
    type Context = Context<Self>;
}

impl Handler<Fence> for WardenActor {
    type Result = ();

    fn handle(&mut self, fence: Fence, _: &mut Self::Context) {
        self.readiness.member.store(false, Ordering::Release);
        self.fence.iter().for_each(|recipient| recipient.do_send(fence));
    }
}

impl Handler<Unfence> for WardenActor {
    type Result = ();

    fn handle(&mut self, unfence: Unfence, _: &mut Self::Context) {
        self.readiness.member.store(true, Ordering::Release);
        self.unfence.iter().for_each(|recipient| recipient.do_send(unfence));
    }
}

impl Handler<Evicted> for WardenActor {
    type Result = ();

    fn handle(&mut self, evicted: Evicted, _: &mut Self::Context) {
        if self.readiness.end() {
            tracing::error!(instance = %evicted.0, "this instance was evicted: it claims, runs and writes nothing any more");
            self.evicted.iter().for_each(|recipient| recipient.do_send(evicted));
        }
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
        let ended = Arc::clone(&readiness);
        let registry = specs
            .group()
            .on_failure(move |child, exit| {
                ended.end();
                match exit {
                    Exit::Panicked(text) => tracing::error!(child, text, "an actor panicked"),
                    Exit::Stopped | Exit::ThreadGone => tracing::error!(child, "an actor ended"),
                }
            })
            .start(host, start_deadline)
            .await?;
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
        self.registry.addr()
    }

    /// Whoever takes this message.
    pub fn recipient<M>(&self) -> Option<Recipient<M>>
    where
        M: Message + Send + 'static,
        M::Result: Send,
    {
        self.registry.recipient()
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
        if let Some(recipient) = self.registry.recipient::<M>() {
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

/// The children, wired and not yet started.
struct Specs {
    warden: Spec<WardenActor>,
    heartbeat: Spec<HeartbeatActor>,
    settle: Spec<SettleActor>,
    dispatch: Spec<DispatchActor>,
    claim: Spec<ClaimActor>,
}

/// What every factory shares.
struct Wiring {
    options: Options,
    instance: InstanceId,
    in_flight: Arc<InFlight>,
    permits: Arc<Semaphore>,
    evicted: Recipient<Evicted>,
}

impl Specs {
    fn new(parts: EngineParts, readiness: &Arc<Readiness>) -> Self {
        // The warden is told about everyone, and everyone about the warden: its address comes first, its actor last.
        let links = Arc::new(std::sync::OnceLock::new());
        let warden = warden(Arc::clone(readiness), Arc::clone(&links));
        let options = parts.options;
        let most = (options.dispatch.max_in_flight as usize).min(options.settle.channel_capacity);
        let wiring = Arc::new(Wiring {
            instance: parts.identity.id,
            in_flight: Arc::default(),
            permits: Arc::new(Semaphore::new(most.max(1))),
            evicted: warden.addr().recipient(),
            options,
        });
        let accepts_work = wiring.options.claim.enabled && !parts.runners.is_empty();
        let unfence = warden.addr().recipient();
        let heartbeat =
            heartbeat(Arc::clone(&wiring), parts.identity, parts.instances, unfence, accepts_work);
        let wake = Arc::new(std::sync::OnceLock::new());
        let settle = settle(Arc::clone(&wiring), Arc::clone(&parts.work), Arc::clone(&wake));
        let mut categories: Vec<Category> = parts.runners.iter().map(|(category, _)| *category).collect();
        categories.sort_unstable();
        categories.dedup();
        let dispatch =
            dispatch(Arc::clone(&wiring), parts.runners, parts.handlers, settle.addr().recipient());
        let claim = claim(wiring, categories.into(), parts.work, dispatch.addr(), heartbeat.addr());
        // Set before anything starts; the factories read them when they run.
        let _ = wake.set(claim.addr().recipient());
        let _ = links.set(Links {
            fence: vec![claim.addr().recipient(), dispatch.addr().recipient(), settle.addr().recipient()],
            unfence: vec![settle.addr().recipient(), dispatch.addr().recipient(), claim.addr().recipient()],
            evicted: vec![
                claim.addr().recipient(),
                dispatch.addr().recipient(),
                settle.addr().recipient(),
                heartbeat.addr().recipient(),
            ],
        });
        Self { warden, heartbeat, settle, dispatch, claim }
    }

    fn group(self) -> Group {
        Group::new("workpump")
            .child(self.warden)
            .child(self.heartbeat)
            .child(self.settle)
            .child(self.dispatch)
            .child(self.claim)
    }
}

struct Links {
    fence: Vec<Recipient<Fence>>,
    unfence: Vec<Recipient<Unfence>>,
    evicted: Vec<Recipient<Evicted>>,
}

fn warden(readiness: Arc<Readiness>, links: Arc<std::sync::OnceLock<Links>>) -> Spec<WardenActor> {
    Spec::new("warden", move |_| {
        let links = links.get();
        WardenActor {
            readiness: Arc::clone(&readiness),
            fence: links.map(|links| links.fence.clone()).unwrap_or_default(),
            unfence: links.map(|links| links.unfence.clone()).unwrap_or_default(),
            evicted: links.map(|links| links.evicted.clone()).unwrap_or_default(),
        }
    })
    .on(Placement::Vital)
    .provides::<Fence>()
    .provides::<Unfence>()
    .provides::<Evicted>()
}

fn heartbeat(
    wiring: Arc<Wiring>,
    identity: InstanceIdentity,
    store: Arc<dyn InstanceStore>,
    unfence: Recipient<Unfence>,
    accepts_work: bool,
) -> Spec<HeartbeatActor> {
    Spec::new("heartbeat", move |cx| {
        // Without claims nothing depends on the membership, so the start need not wait for it.
        let ready = wiring.options.claim.enabled.then(|| cx.ready());
        let parts = HeartbeatParts {
            options: wiring.options.heartbeat.clone(),
            identity: identity.clone(),
            accepts_work,
            unfence: vec![unfence.clone()],
            evicted: wiring.evicted.clone(),
            progress: Box::new(move |progress| match (&ready, progress) {
                (Some(ready), Ok(())) => ready.ready(),
                (Some(ready), Err(problem)) => ready.problem(problem),
                (None, _) => {}
            }),
        };
        HeartbeatActor::new(parts, Arc::clone(&store))
    })
    .on(Placement::Vital)
    .provides::<BeatNow>()
    .provides::<AliveLockChanged>()
}

fn settle(
    wiring: Arc<Wiring>,
    store: Arc<dyn WorkStore>,
    wake: Arc<std::sync::OnceLock<Recipient<RequestImmediatePoll>>>,
) -> Spec<SettleActor> {
    Spec::new("settle", move |_| {
        let parts = SettleParts {
            options: wiring.options.settle.clone(),
            instance: wiring.instance,
            drain_deadline: drain_deadline(&wiring.options),
            wake: wake.get().cloned(),
            evicted: wiring.evicted.clone(),
            seed: seed(),
        };
        SettleActor::new(parts, Arc::clone(&store))
    })
    .provides::<Settle>()
}

fn dispatch(
    wiring: Arc<Wiring>,
    runners: Vec<(Category, Arc<dyn Runner>)>,
    handlers: Handle,
    settle: Recipient<Settle>,
) -> Spec<DispatchActor> {
    Spec::new("dispatch", move |_| {
        DispatchActor::new(DispatchParts {
            options: wiring.options.dispatch.clone(),
            instance: wiring.instance,
            runners: runners.clone(),
            handlers: handlers.clone(),
            in_flight: Arc::clone(&wiring.in_flight),
            settle: settle.clone(),
            seed: seed(),
        })
    })
}

fn claim(
    wiring: Arc<Wiring>,
    categories: Arc<[Category]>,
    store: Arc<dyn WorkStore>,
    dispatch: Addr<DispatchActor>,
    heartbeat: Addr<HeartbeatActor>,
) -> Spec<ClaimActor> {
    Spec::new("claim", move |_| {
        let parts = ClaimParts {
            options: wiring.options.clone(),
            instance: wiring.instance,
            categories: Arc::clone(&categories),
            permits: Arc::clone(&wiring.permits),
            in_flight: Arc::clone(&wiring.in_flight),
            dispatch: dispatch.clone().recipient(),
            hand_back: dispatch.clone().recipient(),
            beat_now: heartbeat.clone().recipient(),
            evicted: wiring.evicted.clone(),
            seed: seed(),
        };
        ClaimActor::new(parts, Arc::clone(&store))
    })
    .provides::<RequestImmediatePoll>()
    .provides::<GateChanged>()
    .provides::<Pause>()
    .provides::<Resume>()
}

/// What a drain of results may take, even when handlers get no time at all.
fn drain_deadline(options: &Options) -> Duration {
    Duration::from_secs(options.dispatch.drain_deadline_seconds.into()).max(Duration::from_secs(5))
}

/// A seed for jitter, taken at the edge so that everything inside can be repeated.
fn seed() -> u64 {
    Uuid::now_v7().as_u64_pair().1
}
