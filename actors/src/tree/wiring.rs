//! Who is told what: every actor, made and connected.
//!
//! The rule: all addresses exist before any actor runs, and each actor is given only the recipients it needs. The failure this prevents:
//! an actor that can reach everyone, and a start order that depends on who knows whom.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use actix::prelude::*;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::EngineParts;
use super::drain::Drainer;
use super::life::{Lives, Server};
use super::rebirth::Rebirth;
use crate::actor::claim::{ClaimActor, ClaimParts};
use crate::actor::dispatch::{DispatchActor, DispatchParts};
use crate::actor::heartbeat::{HeartbeatActor, HeartbeatParts};
use crate::actor::lease_renewal::{LeaseRenewalActor, LeaseRenewalParts};
use crate::actor::notify_gate::{Channels, GateSubscribers, NotifyGateActor, NotifyGateParts};
use crate::actor::settle::{SettleActor, SettleParts};
use crate::actor::stale_sweep::{StaleSweepActor, StaleSweepParts, Subscribers};
use crate::actor::warden::{CatchUp, Told, WardenActor};
use crate::lane::{Crew, CrewParts};
use crate::message::{
    AliveLockChanged, BeatNow, Evicted, ExtendLease, Fence, GateChanged, Pause, PingNow, ProbeNow,
    RequestImmediatePoll, Resume, SetHeartbeat, Settle, Subscribe, SubscribeToEvictions, SubscribeToGate,
    SweepNow, TrustProven, Unfence, Unsubscribe, WorkFreed,
};
use crate::options::{GateMode, Options};
use crate::policy::retry::RetryPolicy;
use crate::port::{
    DeathWatch, DirectConnector, Doorbell, InstanceStore, ProducersRoute, RenewalStore, SweepStore, WorkStore,
};
use crate::registry::{GaveUp, Group, Placement, Spec};
use crate::runner::Runner;
use crate::standing::Trust;
use crate::work::Category;

/// How long an actor may leave its mailbox unserved: none of them ever blocks, so a thread that does is broken. Peers notice a missing
/// beat after 65 s.
const VITAL_LIVENESS: Duration = Duration::from_secs(10);
const WORK_LIVENESS: Duration = Duration::from_secs(30);

/// How long the start waits for the gate where it has to be proven (`ListenNotify`): for several tries.
const PROVEN_WITHIN: Duration = Duration::from_secs(10);

/// The children, wired and not yet started.
pub(super) struct Specs {
    pub(super) lease_renewal: Spec<LeaseRenewalActor>,
    pub(super) warden: Spec<WardenActor>,
    pub(super) notify_gate: Spec<NotifyGateActor>,
    pub(super) heartbeat: Spec<HeartbeatActor>,
    pub(super) settle: Spec<SettleActor>,
    pub(super) dispatch: Spec<DispatchActor>,
    pub(super) stale_sweep: Spec<StaleSweepActor>,
    pub(super) claim: Spec<ClaimActor>,
}

/// What every factory shares.
struct Wiring {
    options: Options,
    /// The current one has the id and everything that belongs to it.
    lives: Arc<Lives>,
    permits: Arc<Semaphore>,
    evicted: Recipient<Evicted>,
    probe: Recipient<PingNow>,
    /// Set before anything starts; the factories read it when they run.
    wake: OnceLock<Recipient<RequestImmediatePoll>>,
    freed: OnceLock<Recipient<WorkFreed>>,
    gate_changed: OnceLock<Recipient<GateChanged>>,
}

impl Wiring {
    /// After a death of somebody who holds rows or passes them on: what was lost with it is handed back before the next claim.
    fn recover(&self, server: Server) {
        let life = self.lives.current();
        if life.succeeds(server) {
            life.standing.recover();
            if let Some(wake) = self.wake.get() {
                wake.do_send(RequestImmediatePoll);
            }
        }
    }
}

impl Specs {
    pub(super) fn new(parts: EngineParts, lives: Arc<Lives>) -> Self {
        // The warden is told about everyone, and everyone about the warden: its address comes first, its actor last.
        let links = Arc::new(OnceLock::new());
        let warden = warden(Arc::clone(&lives), Arc::clone(&links));
        let options = parts.options;
        let most = (options.dispatch.max_in_flight as usize).min(options.settle.channel_capacity);
        let wiring = Arc::new(Wiring {
            lives,
            permits: Arc::new(Semaphore::new(most.max(1))),
            evicted: warden.addr().recipient(),
            probe: warden.addr().recipient(),
            wake: OnceLock::new(),
            freed: OnceLock::new(),
            gate_changed: OnceLock::new(),
            options,
        });
        let mut categories: Vec<Category> = parts.runners.iter().map(|(category, _)| *category).collect();
        categories.sort_unstable();
        categories.dedup();
        let categories: Arc<[Category]> = categories.into();
        let accepts_work = wiring.options.claim.enabled && !categories.is_empty();
        let lease_renewal = lease_renewal(Arc::clone(&wiring), parts.renewals);
        let verdicts = (warden.addr().recipient(), warden.addr().recipient());
        let heartbeat =
            heartbeat(Arc::clone(&wiring), parts.instances, verdicts, accepts_work, Arc::clone(&categories));
        let notify_gate = notify_gate(Arc::clone(&wiring), parts.direct, parts.route, &heartbeat.addr());
        let settle = settle(Arc::clone(&wiring), Arc::clone(&parts.work));
        let neighbours = (settle.addr().recipient(), heartbeat.addr().recipient());
        let dispatch = dispatch(Arc::clone(&wiring), parts.runners, parts.handlers, neighbours);
        let stores = (parts.work, parts.doorbell);
        let claim = claim(Arc::clone(&wiring), categories, stores, dispatch.addr(), heartbeat.addr());
        let stale_sweep =
            stale_sweep(Arc::clone(&wiring), parts.sweep, parts.watch, claim.addr().recipient());
        // Set once, before anything starts; the factories read them when they run.
        let _ = wiring.wake.set(claim.addr().recipient());
        let _ = wiring.freed.set(claim.addr().recipient());
        let _ = wiring.gate_changed.set(claim.addr().recipient());
        let told = Told {
            fence: vec![
                claim.addr().recipient(),
                stale_sweep.addr().recipient(),
                dispatch.addr().recipient(),
                settle.addr().recipient(),
            ],
            unfence: vec![
                settle.addr().recipient(),
                dispatch.addr().recipient(),
                stale_sweep.addr().recipient(),
                claim.addr().recipient(),
            ],
            evicted: vec![
                claim.addr().recipient(),
                stale_sweep.addr().recipient(),
                dispatch.addr().recipient(),
                settle.addr().recipient(),
                lease_renewal.addr().recipient(),
                heartbeat.addr().recipient(),
                notify_gate.addr().recipient(),
            ],
            probe: vec![notify_gate.addr().recipient(), heartbeat.addr().recipient()],
            switched: vec![
                claim.addr().recipient(),
                heartbeat.addr().recipient(),
                notify_gate.addr().recipient(),
            ],
        };
        let rebirth = Arc::new(Rebirth {
            lives: Arc::clone(&wiring.lives),
            on_evicted: wiring.options.liveness.on_evicted,
            passers: vec![claim.addr().recipient(), dispatch.addr().recipient(), settle.addr().recipient()],
            patience: Duration::from_secs(wiring.options.dispatch.drain_deadline_seconds.into()),
            last: Mutex::default(),
        });
        let _ = links.set((told, rebirth));
        Self { lease_renewal, warden, notify_gate, heartbeat, settle, dispatch, stale_sweep, claim }
    }

    /// The tree. Users' actors start when the instance is a member and stop when the last handler has ended, so that handlers may use them.
    pub(super) fn group(self, users: Group, drainer: &Arc<Drainer>) -> Group {
        let last_words = || {
            let drainer = Arc::clone(drainer);
            move |gave_up: GaveUp| Arc::clone(&drainer).drain_without(gave_up.child)
        };
        let vital = Group::new("vital")
            .on(Placement::Vital)
            .child(self.lease_renewal)
            .child(self.warden)
            .child(self.notify_gate)
            .child(self.heartbeat)
            .last_words(last_words());
        let work = Group::new("work")
            .on(Placement::Work)
            .child(self.settle)
            .child(self.dispatch)
            .child(self.stale_sweep)
            .child(self.claim)
            .last_words(last_words());
        Group::new("workpump").group(vital).group(users).group(work)
    }
}

fn warden(lives: Arc<Lives>, links: Arc<OnceLock<(Told, Arc<Rebirth>)>>) -> Spec<WardenActor> {
    Spec::new("warden", move |cx| {
        let (life, registry) = (lives.current(), cx.registry());
        let (told, rebirth) = links.get().cloned().unzip();
        let after_eviction = move |instance| {
            let Some(rebirth) = &rebirth else { return };
            if let Some(old) = rebirth.lives.bury(instance) {
                registry.spawn(Arc::clone(rebirth).run(old, registry.clone()));
            }
        };
        WardenActor::new(
            life.instance(),
            Arc::clone(&life.standing),
            told.unwrap_or_default(),
            Box::new(after_eviction),
        )
    })
    .liveness(VITAL_LIVENESS)
    .provides::<CatchUp>()
    .provides::<Fence>()
    .provides::<Unfence>()
    .provides::<Evicted>()
    .provides::<PingNow>()
    .provides::<SetHeartbeat>()
}

fn notify_gate(
    wiring: Arc<Wiring>,
    connector: Option<Arc<dyn DirectConnector>>,
    route: Arc<dyn ProducersRoute>,
    heartbeat: &Addr<HeartbeatActor>,
) -> Spec<NotifyGateActor> {
    let heartbeat = heartbeat.clone();
    let (channels, gate_subscribers): (Arc<Channels>, Arc<GateSubscribers>) = Default::default();
    let required = wiring.options.gate.mode == GateMode::ListenNotify;
    let spec = Spec::new("notify_gate", move |cx| {
        // Later losses are borne: only the start depends on it.
        let (first, ready) = (cx.generation() == 1, cx.ready());
        let life = wiring.lives.current();
        let claim = wiring.gate_changed.get().cloned();
        NotifyGateActor::new(NotifyGateParts {
            gate: wiring.options.gate.clone(),
            heartbeat: wiring.options.heartbeat.clone(),
            instance: life.instance(),
            standing: Arc::clone(&life.standing),
            in_flight: Arc::clone(&life.in_flight),
            connector: connector.clone(),
            route: Arc::clone(&route),
            alive_lock: vec![heartbeat.clone().recipient()],
            trust: vec![heartbeat.clone().recipient()],
            gate_news: claim.into_iter().chain([heartbeat.clone().recipient()]).collect(),
            gate_subscribers: Arc::clone(&gate_subscribers),
            channels: Arc::clone(&channels),
            wake: wiring.wake.get().cloned(),
            must_be_proven: required && first,
            progress: Box::new(move |progress| match progress {
                Ok(()) => ready.ready(),
                Err(problem) => ready.problem(problem),
            }),
            seed: seed(),
        })
    })
    .liveness(VITAL_LIVENESS)
    .provides::<ProbeNow>()
    .provides::<SubscribeToGate>()
    .provides::<Subscribe>()
    .provides::<Unsubscribe>();
    if required { spec.ready_within(Some(PROVEN_WITHIN)) } else { spec }
}

fn lease_renewal(wiring: Arc<Wiring>, store: Arc<dyn RenewalStore>) -> Spec<LeaseRenewalActor> {
    Spec::new("lease_renewal", move |_| {
        let life = wiring.lives.current();
        let parts = LeaseRenewalParts {
            options: wiring.options.lease_renewal.clone(),
            instance: life.instance(),
            standing: Arc::clone(&life.standing),
            renewals: Arc::clone(&life.renewals),
            in_flight: Arc::clone(&life.in_flight),
            evicted: wiring.evicted.clone(),
            seed: seed(),
        };
        LeaseRenewalActor::new(parts, Arc::clone(&store))
    })
    .liveness(VITAL_LIVENESS)
    .provides::<ExtendLease>()
}

fn heartbeat(
    wiring: Arc<Wiring>,
    store: Arc<dyn InstanceStore>,
    (fence, unfence): (Recipient<Fence>, Recipient<Unfence>),
    accepts_work: bool,
    categories: Arc<[Category]>,
) -> Spec<HeartbeatActor> {
    Spec::new("heartbeat", move |cx| {
        // Without claims nothing depends on the membership, so the start need not wait for it. Nor does a restart: an outage of the
        // database is no crash.
        let first = cx.generation() == 1;
        let ready = (first && wiring.options.claim.enabled).then(|| cx.ready());
        let life = wiring.lives.current();
        let parts = HeartbeatParts {
            options: wiring.options.heartbeat.clone(),
            identity: life.identity.clone(),
            accepts_work,
            categories: Arc::clone(&categories),
            standing: Arc::clone(&life.standing),
            in_flight: Arc::clone(&life.in_flight),
            fence: fence.clone(),
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
    .ready_within(None)
    .liveness(VITAL_LIVENESS)
    .provides::<BeatNow>()
    .provides::<AliveLockChanged>()
    .provides::<TrustProven>()
}

fn settle(wiring: Arc<Wiring>, store: Arc<dyn WorkStore>) -> Spec<SettleActor> {
    Spec::new("settle", move |_| {
        wiring.recover(Server::Settle);
        let life = wiring.lives.current();
        let parts = SettleParts {
            options: wiring.options.settle.clone(),
            instance: life.instance(),
            standing: Arc::clone(&life.standing),
            backlog: Arc::clone(&life.backlog),
            probe: wiring.probe.clone(),
            drain_deadline: drain_deadline(&wiring.options),
            wake: wiring.freed.get().cloned(),
            evicted: wiring.evicted.clone(),
            seed: seed(),
        };
        SettleActor::new(parts, Arc::clone(&store))
    })
    .liveness(WORK_LIVENESS)
    .provides::<Settle>()
}

fn dispatch(
    wiring: Arc<Wiring>,
    runners: Vec<(Category, Arc<dyn Runner>)>,
    handlers: Handle,
    (settle, beat_now): (Recipient<Settle>, Recipient<BeatNow>),
) -> Spec<DispatchActor> {
    Spec::new("dispatch", move |_| {
        wiring.recover(Server::Dispatch);
        let life = wiring.lives.current();
        let crew = life.crew.get_or_init(|| {
            Crew::new(CrewParts {
                instance: life.instance(),
                trust: Trust::new(Arc::clone(&life.standing), Some(beat_now.clone())),
                runners: runners.clone(),
                handlers: handlers.clone(),
                threads: handlers.metrics().num_workers(),
                retry: RetryPolicy::new(&wiring.options.dispatch),
                in_flight: Arc::clone(&life.in_flight),
                seed: seed(),
            })
        });
        let drain_deadline = wiring.options.dispatch.drain_deadline_seconds;
        DispatchActor::new(DispatchParts {
            crew: Arc::clone(crew),
            standing: Arc::clone(&life.standing),
            renewals: Arc::clone(&life.renewals),
            settle: settle.clone(),
            probe: wiring.probe.clone(),
            on_fence: wiring.options.liveness.on_fence,
            drain_deadline: Duration::from_secs(drain_deadline.into()),
        })
    })
    .liveness(WORK_LIVENESS)
}

fn stale_sweep(
    wiring: Arc<Wiring>,
    sweep: Arc<dyn SweepStore>,
    watch: Option<Arc<dyn DeathWatch>>,
    wake: Recipient<RequestImmediatePoll>,
) -> Spec<StaleSweepActor> {
    let subscribers: Arc<Subscribers> = Arc::default();
    Spec::new("stale_sweep", move |_| {
        let life = wiring.lives.current();
        StaleSweepActor::new(StaleSweepParts {
            options: wiring.options.liveness.clone(),
            instance: life.instance(),
            standing: Arc::clone(&life.standing),
            sweep: Arc::clone(&sweep),
            watch: watch.clone(),
            wake: wake.clone(),
            evicted: wiring.evicted.clone(),
            subscribers: Arc::clone(&subscribers),
            seed: seed(),
        })
    })
    .liveness(WORK_LIVENESS)
    .provides::<SweepNow>()
    .provides::<SubscribeToEvictions>()
}

fn claim(
    wiring: Arc<Wiring>,
    categories: Arc<[Category]>,
    (store, doorbell): (Arc<dyn WorkStore>, Option<Arc<dyn Doorbell>>),
    dispatch: Addr<DispatchActor>,
    heartbeat: Addr<HeartbeatActor>,
) -> Spec<ClaimActor> {
    Spec::new("claim", move |_| {
        let life = wiring.lives.current();
        let parts = ClaimParts {
            options: wiring.options.clone(),
            instance: life.instance(),
            categories: Arc::clone(&categories),
            permits: Arc::clone(&wiring.permits),
            in_flight: Arc::clone(&life.in_flight),
            standing: Arc::clone(&life.standing),
            doorbell: doorbell.clone(),
            probe: wiring.probe.clone(),
            renewals: Arc::clone(&life.renewals),
            dispatch: dispatch.clone().recipient(),
            hand_back: dispatch.clone().recipient(),
            beat_now: heartbeat.clone().recipient(),
            evicted: wiring.evicted.clone(),
            seed: seed(),
        };
        ClaimActor::new(parts, Arc::clone(&store))
    })
    .liveness(WORK_LIVENESS)
    .provides::<RequestImmediatePoll>()
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
