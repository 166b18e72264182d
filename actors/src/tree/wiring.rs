//! Who is told what: every actor, made and connected.
//!
//! The rule: all addresses exist before any actor runs, and each actor is given only the recipients it needs. The failure this prevents:
//! an actor that can reach everyone, and a start order that depends on who knows whom.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use actix::prelude::*;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::{EngineParts, Readiness};
use crate::actor::claim::{ClaimActor, ClaimParts};
use crate::actor::dispatch::{DispatchActor, DispatchParts};
use crate::actor::heartbeat::{HeartbeatActor, HeartbeatParts};
use crate::actor::settle::{Backlog, SettleActor, SettleParts};
use crate::delivery::InFlight;
use crate::instance::{InstanceId, InstanceIdentity};
use crate::lane::{Crew, CrewParts};
use crate::message::{
    AliveLockChanged, BeatNow, Evicted, Fence, GateChanged, Pause, RequestImmediatePoll, Resume, Settle,
    Unfence,
};
use crate::options::Options;
use crate::policy::retry::RetryPolicy;
use crate::port::{InstanceStore, WorkStore};
use crate::registry::{Group, Placement, Spec};
use crate::runner::Runner;
use crate::standing::Standing;
use crate::work::Category;

/// Where news about the whole instance goes: it tells everyone concerned.
#[derive(Debug)]
struct WardenActor {
    instance: InstanceId,
    readiness: Arc<Readiness>,
    fence: Vec<Recipient<Fence>>,
    unfence: Vec<Recipient<Unfence>>,
    evicted: Vec<Recipient<Evicted>>,
    standing: Arc<Standing>,
}

impl Actor for WardenActor {
    type Context = Context<Self>;

    /// Says again what its predecessor may have died of saying.
    fn started(&mut self, _: &mut Self::Context) {
        let member = !self.standing.is_fenced();
        self.readiness.member.store(member, Ordering::Release);
        if member {
            self.unfence.iter().for_each(|recipient| recipient.do_send(Unfence));
        } else {
            self.fence.iter().for_each(|recipient| recipient.do_send(Fence));
        }
        if self.standing.is_evicted() {
            self.readiness.end();
            self.evicted.iter().for_each(|recipient| recipient.do_send(Evicted(self.instance)));
        }
    }
}

/// Answered when everything that was sent to the warden before has been seen to.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct CatchUp;

impl Handler<CatchUp> for WardenActor {
    type Result = ();

    fn handle(&mut self, _: CatchUp, _: &mut Self::Context) {}
}

impl Handler<Fence> for WardenActor {
    type Result = ();

    fn handle(&mut self, fence: Fence, _: &mut Self::Context) {
        self.standing.fence();
        self.readiness.member.store(false, Ordering::Release);
        self.fence.iter().for_each(|recipient| recipient.do_send(fence));
    }
}

impl Handler<Unfence> for WardenActor {
    type Result = ();

    fn handle(&mut self, unfence: Unfence, _: &mut Self::Context) {
        self.standing.unfence();
        self.readiness.member.store(true, Ordering::Release);
        self.unfence.iter().for_each(|recipient| recipient.do_send(unfence));
    }
}

impl Handler<Evicted> for WardenActor {
    type Result = ();

    fn handle(&mut self, evicted: Evicted, _: &mut Self::Context) {
        self.standing.evict();
        self.readiness.end();
        // Everyone is told once, also during a drain and after the end of an actor.
        if self.standing.must_tell_eviction() {
            self.evicted.iter().for_each(|recipient| recipient.do_send(evicted));
            tracing::error!(instance = %evicted.0, "this instance was evicted: it claims, runs and writes nothing any more");
        }
    }
}

/// The children, wired and not yet started.
pub(super) struct Specs {
    warden: Spec<WardenActor>,
    pub(super) heartbeat: Spec<HeartbeatActor>,
    pub(super) settle: Spec<SettleActor>,
    pub(super) dispatch: Spec<DispatchActor>,
    pub(super) claim: Spec<ClaimActor>,
}

/// What every factory shares.
struct Wiring {
    options: Options,
    instance: InstanceId,
    standing: Arc<Standing>,
    backlog: Arc<Backlog>,
    /// Made when dispatching starts: runners are asked for their limits, which may panic.
    crew: OnceLock<Arc<Crew>>,
    in_flight: Arc<InFlight>,
    permits: Arc<Semaphore>,
    evicted: Recipient<Evicted>,
}

impl Specs {
    pub(super) fn new(parts: EngineParts, readiness: &Arc<Readiness>) -> Self {
        // The warden is told about everyone, and everyone about the warden: its address comes first, its actor last.
        let links = Arc::new(OnceLock::new());
        let standing: Arc<Standing> = Arc::default();
        let warden =
            warden(parts.identity.id, Arc::clone(readiness), Arc::clone(&standing), Arc::clone(&links));
        let options = parts.options;
        let most = (options.dispatch.max_in_flight as usize).min(options.settle.channel_capacity);
        let wiring = Arc::new(Wiring {
            instance: parts.identity.id,
            standing,
            backlog: Arc::default(),
            crew: OnceLock::new(),
            in_flight: Arc::default(),
            permits: Arc::new(Semaphore::new(most.max(1))),
            evicted: warden.addr().recipient(),
            options,
        });
        let accepts_work = wiring.options.claim.enabled && !parts.runners.is_empty();
        let unfence = warden.addr().recipient();
        let heartbeat =
            heartbeat(Arc::clone(&wiring), parts.identity, parts.instances, unfence, accepts_work);
        let wake = Arc::new(OnceLock::new());
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

    pub(super) fn group(self) -> Group {
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

fn warden(
    instance: InstanceId,
    readiness: Arc<Readiness>,
    standing: Arc<Standing>,
    links: Arc<OnceLock<Links>>,
) -> Spec<WardenActor> {
    Spec::new("warden", move |_| {
        let links = links.get();
        WardenActor {
            instance,
            readiness: Arc::clone(&readiness),
            fence: links.map(|links| links.fence.clone()).unwrap_or_default(),
            unfence: links.map(|links| links.unfence.clone()).unwrap_or_default(),
            evicted: links.map(|links| links.evicted.clone()).unwrap_or_default(),
            standing: Arc::clone(&standing),
        }
    })
    .on(Placement::Vital)
    .provides::<CatchUp>()
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
            standing: Arc::clone(&wiring.standing),
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
    wake: Arc<OnceLock<Recipient<RequestImmediatePoll>>>,
) -> Spec<SettleActor> {
    Spec::new("settle", move |_| {
        let parts = SettleParts {
            options: wiring.options.settle.clone(),
            instance: wiring.instance,
            standing: Arc::clone(&wiring.standing),
            backlog: Arc::clone(&wiring.backlog),
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
        let crew = wiring.crew.get_or_init(|| {
            Crew::new(CrewParts {
                instance: wiring.instance,
                runners: runners.clone(),
                handlers: handlers.clone(),
                threads: handlers.metrics().num_workers(),
                retry: RetryPolicy::new(&wiring.options.dispatch),
                in_flight: Arc::clone(&wiring.in_flight),
                seed: seed(),
            })
        });
        let drain_deadline = wiring.options.dispatch.drain_deadline_seconds;
        DispatchActor::new(DispatchParts {
            crew: Arc::clone(crew),
            standing: Arc::clone(&wiring.standing),
            settle: settle.clone(),
            drain_deadline: Duration::from_secs(drain_deadline.into()),
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
            standing: Arc::clone(&wiring.standing),
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
