//! One actor at a time, with everything around it played by probes and the store in memory.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::crash::end;
use super::fake::FakeStore;
use super::fake_direct::FakeDirect;
use super::fake_peers::{FakeDeathWatch, FakeSweep};
use super::probe::TestProbe;
use crate::actor::claim::{ClaimActor, ClaimParts};
use crate::actor::dispatch::{DispatchActor, DispatchParts};
use crate::actor::settle::{SettleActor, SettleParts};
use crate::delivery::{Delivery, InFlight, Lease, Renewals};
use crate::instance::{Gate, InstanceId, InstanceIdentity};
use crate::lane::{Crew, CrewParts};
use crate::message::{
    BeatNow, Dispatch, Evicted, Fence, GateChanged, HandBack, PingNow, Settle, Unfence, WorkFreed,
};
use crate::options::Options;
use crate::policy::lease::LeaseTerms;
use crate::policy::retry::RetryPolicy;
use crate::port::Doorbell;
use crate::registry::Group;
use crate::runner::Runner;
use crate::standing::{Standing, Trust};
use crate::tree::EngineParts;
use crate::work::{Category, ClaimedWork};

/// A fresh identity.
pub fn identity() -> InstanceIdentity {
    InstanceIdentity {
        id: InstanceId::fresh(),
        service_name: "test".to_owned(),
        host_name: "here".to_owned(),
        process_id: 1,
    }
}

/// The parts of an engine on this store whose handlers run on the current runtime.
pub fn engine_parts(
    options: Options,
    store: &Arc<FakeStore>,
    runners: Vec<(Category, Arc<dyn Runner>)>,
) -> EngineParts {
    EngineParts {
        options,
        identity: identity(),
        work: Arc::clone(store) as _,
        doorbell: None,
        instances: Arc::clone(store) as _,
        sweep: FakeSweep::new(),
        watch: Some(FakeDeathWatch::new()),
        direct: None,
        route: Arc::new(FakeDirect::new()),
        renewals: Arc::clone(store) as _,
        runners,
        handlers: Handle::current(),
        users: Group::new("users").contained(),
        start_deadline: Duration::from_secs(10),
    }
}

/// Takes rows in hand as a claim at this moment would, under leases that are never renewed.
///
/// # Panics
///
/// When there are fewer permits than rows.
pub fn deliver(
    works: Vec<ClaimedWork>,
    permits: &Arc<Semaphore>,
    in_flight: &Arc<InFlight>,
    lease: Duration,
    grace: Duration,
) -> Vec<Delivery> {
    let terms = LeaseTerms { lease, grace, max_renewals: 0 };
    deliver_under(works, permits, in_flight, &Renewals::new(terms, 1))
}

/// Takes rows in hand as a claim at this moment would, under leases that are renewed here.
///
/// # Panics
///
/// When there are fewer permits than rows.
pub fn deliver_under(
    works: Vec<ClaimedWork>,
    permits: &Arc<Semaphore>,
    in_flight: &Arc<InFlight>,
    renewals: &Arc<Renewals>,
) -> Vec<Delivery> {
    let lease = Lease::new(crate::clock::now(), renewals);
    works
        .into_iter()
        .map(|work| {
            let permit = Arc::clone(permits).try_acquire_owned().expect("a permit for every row");
            Delivery::new(work, permit, in_flight, &lease)
        })
        .collect()
}

/// A claiming actor.
#[derive(Debug)]
pub struct ClaimRig {
    /// The actor.
    pub addr: Addr<ClaimActor>,
    /// The permits it takes.
    pub permits: Arc<Semaphore>,
    /// What it holds.
    pub in_flight: Arc<InFlight>,
    /// What is known about the instance.
    pub standing: Arc<Standing>,
    /// What it wants run.
    pub dispatch: TestProbe<Dispatch>,
    /// What it hands back.
    pub hand_back: TestProbe<HandBack>,
    /// Its calls for a beat.
    pub beat_now: TestProbe<BeatNow>,
    /// Its calls for a proof.
    pub probe: TestProbe<PingNow>,
    /// Its reports of eviction.
    pub evicted: TestProbe<Evicted>,
    /// Who it is.
    pub instance: InstanceId,
    parts: ClaimParts,
    store: Arc<FakeStore>,
}

impl ClaimRig {
    /// Starts one, still fenced. Nobody rings it.
    pub fn start(options: Options, store: &Arc<FakeStore>) -> Self {
        Self::start_with(options, store, None)
    }

    /// Starts one as after the first accepted heartbeat, with an available gate, and armed by this store.
    pub fn start_with_bell(options: Options, store: &Arc<FakeStore>) -> Self {
        let rig = Self::start_with(options, store, Some(Arc::clone(store) as _));
        rig.set_gate(Gate::Available);
        rig.unfence();
        rig
    }

    fn start_with(options: Options, store: &Arc<FakeStore>, doorbell: Option<Arc<dyn Doorbell>>) -> Self {
        let permits = Arc::new(Semaphore::new(options.dispatch.max_in_flight as usize));
        let in_flight: Arc<InFlight> = Arc::default();
        let standing: Arc<Standing> = Arc::default();
        let (dispatch, hand_back) = (TestProbe::start(), TestProbe::start());
        let (beat_now, evicted, probe) = (TestProbe::start(), TestProbe::start(), TestProbe::start());
        let instance = InstanceId::fresh();
        let renewals = Renewals::new(LeaseTerms::new(&options), options.lease_renewal.channel_capacity);
        let parts = ClaimParts {
            options,
            instance,
            categories: Category::ALL.into(),
            permits: Arc::clone(&permits),
            in_flight: Arc::clone(&in_flight),
            renewals,
            standing: Arc::clone(&standing),
            doorbell,
            dispatch: dispatch.recipient(),
            hand_back: hand_back.recipient(),
            beat_now: beat_now.recipient(),
            probe: probe.recipient(),
            evicted: evicted.recipient(),
            seed: 7,
        };
        let store = Arc::clone(store);
        let addr = ClaimActor::new(parts.clone(), Arc::clone(&store) as _).start();
        Self {
            addr,
            permits,
            in_flight,
            standing,
            dispatch,
            hand_back,
            beat_now,
            probe,
            evicted,
            instance,
            parts,
            store,
        }
    }

    /// The gate changes, as its keeper notes and tells it.
    pub fn set_gate(&self, gate: Gate) {
        self.standing.set_gate(self.standing.keep_gate(), gate, None);
        self.addr.do_send(GateChanged(gate));
    }

    /// Starts one as after the first accepted heartbeat.
    pub fn start_open(options: Options, store: &Arc<FakeStore>) -> Self {
        let rig = Self::start(options, store);
        rig.unfence();
        rig
    }

    /// Fences it, as the tree does.
    pub fn fence(&self) {
        self.standing.fence();
        self.addr.do_send(Fence);
    }

    /// Opens it, as the tree does.
    pub fn unfence(&self) {
        self.standing.unfence();
        self.addr.do_send(Unfence);
    }

    /// Ends this incarnation where it stands and starts the next.
    pub async fn restart(&mut self) {
        end(&self.addr).await;
        self.addr = ClaimActor::new(self.parts.clone(), Arc::clone(&self.store) as _).start();
    }
}

/// A settling actor.
#[derive(Debug)]
pub struct SettleRig {
    /// The actor.
    pub addr: Addr<SettleActor>,
    /// What is known about the instance.
    pub standing: Arc<Standing>,
    /// Its wakes.
    pub wake: TestProbe<WorkFreed>,
    /// Its calls for a proof.
    pub probe: TestProbe<PingNow>,
    /// Its reports of eviction.
    pub evicted: TestProbe<Evicted>,
    /// Who it is.
    pub instance: InstanceId,
    parts: SettleParts,
    store: Arc<FakeStore>,
}

impl SettleRig {
    /// Starts one as after the first accepted heartbeat.
    pub fn start(options: &Options, store: &Arc<FakeStore>) -> Self {
        let (wake, evicted, probe) = (TestProbe::start(), TestProbe::start(), TestProbe::start());
        let instance = InstanceId::fresh();
        let standing: Arc<Standing> = Arc::default();
        standing.unfence();
        let parts = SettleParts {
            options: options.settle.clone(),
            instance,
            standing: Arc::clone(&standing),
            backlog: Arc::default(),
            drain_deadline: Duration::from_secs(options.dispatch.drain_deadline_seconds.into()),
            wake: Some(wake.recipient()),
            probe: probe.recipient(),
            evicted: evicted.recipient(),
            seed: 7,
        };
        let store = Arc::clone(store);
        let addr = SettleActor::new(parts.clone(), Arc::clone(&store) as _).start();
        Self { addr, standing, wake, probe, evicted, instance, parts, store }
    }

    /// Fences it, as the tree does.
    pub fn fence(&self) {
        self.standing.fence();
        self.addr.do_send(Fence);
    }

    /// Opens it, as the tree does.
    pub fn unfence(&self) {
        self.standing.unfence();
        self.addr.do_send(Unfence);
    }

    /// Ends this incarnation where it stands and starts the next.
    pub async fn restart(&mut self) {
        end(&self.addr).await;
        self.addr = SettleActor::new(self.parts.clone(), Arc::clone(&self.store) as _).start();
    }
}

/// A dispatching actor.
#[derive(Debug)]
pub struct DispatchRig {
    /// The actor.
    pub addr: Addr<DispatchActor>,
    /// What is known about the instance.
    pub standing: Arc<Standing>,
    /// Its results.
    pub settle: TestProbe<Settle>,
    /// Its calls for a proof.
    pub probe: TestProbe<PingNow>,
    /// Who it is.
    pub instance: InstanceId,
    /// The permits of its rows.
    pub permits: Arc<Semaphore>,
    /// What is held.
    pub in_flight: Arc<InFlight>,
    /// The renewals it asks for: only rows that were dispatched by [`DispatchRig::dispatch_renewed`] are ever due.
    pub renewals: Arc<Renewals>,
    parts: DispatchParts,
}

impl DispatchRig {
    /// Starts one as after the first accepted heartbeat, whose handlers run on the current runtime.
    pub fn start(options: &Options, runners: Vec<(Category, Arc<dyn Runner>)>) -> Self {
        let (settle, probe) = (TestProbe::start(), TestProbe::start());
        let instance = InstanceId::fresh();
        let in_flight: Arc<InFlight> = Arc::default();
        let standing: Arc<Standing> = Arc::default();
        standing.unfence();
        let handlers = Handle::current();
        let renewals = Renewals::new(LeaseTerms::new(options), options.lease_renewal.channel_capacity);
        let crew = Crew::new(CrewParts {
            instance,
            trust: Trust::new(Arc::clone(&standing), None),
            runners,
            threads: handlers.metrics().num_workers(),
            handlers,
            retry: RetryPolicy::new(&options.dispatch),
            in_flight: Arc::clone(&in_flight),
            seed: 7,
        });
        let parts = DispatchParts {
            crew,
            standing: Arc::clone(&standing),
            renewals: Arc::clone(&renewals),
            settle: settle.recipient(),
            probe: probe.recipient(),
            on_fence: options.liveness.on_fence,
            drain_deadline: Duration::from_secs(options.dispatch.drain_deadline_seconds.into()),
        };
        let permits = Arc::new(Semaphore::new(options.dispatch.max_in_flight as usize));
        let addr = DispatchActor::new(parts.clone()).start();
        Self { addr, standing, settle, probe, instance, permits, in_flight, renewals, parts }
    }

    /// Has these rows run under a lease of 300 s with 30 s of grace.
    pub fn dispatch(&self, works: Vec<ClaimedWork>) {
        self.dispatch_for(works, Duration::from_mins(5));
    }

    /// Has these rows run under a lease of this length, with a tenth of it as grace.
    pub fn dispatch_for(&self, works: Vec<ClaimedWork>, lease: Duration) {
        let deliveries = deliver(works, &self.permits, &self.in_flight, lease, lease / 10);
        self.addr.do_send(Dispatch { deliveries });
    }

    /// Has these rows run under leases that are renewed.
    pub fn dispatch_renewed(&self, works: Vec<ClaimedWork>) {
        let deliveries = deliver_under(works, &self.permits, &self.in_flight, &self.renewals);
        self.addr.do_send(Dispatch { deliveries });
    }

    /// Fences it, as the tree does.
    pub fn fence(&self) {
        self.standing.fence();
        self.addr.do_send(Fence);
    }

    /// Opens it, as the tree does.
    pub fn unfence(&self) {
        self.standing.unfence();
        self.addr.do_send(Unfence);
    }

    /// Ends this incarnation where it stands.
    pub async fn end(&self) {
        end(&self.addr).await;
    }

    /// Ends this incarnation where it stands and starts the next.
    pub async fn restart(&mut self) {
        self.end().await;
        self.addr = DispatchActor::new(self.parts.clone()).start();
    }
}
