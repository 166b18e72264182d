//! One actor at a time, with everything around it played by probes and the store in memory.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::crash::end;
use super::fake::FakeStore;
use super::fake_peers::{FakeDeathWatch, FakeSweep};
use super::probe::TestProbe;
use crate::actor::claim::{ClaimActor, ClaimParts};
use crate::actor::dispatch::{DispatchActor, DispatchParts};
use crate::actor::heartbeat::{HeartbeatActor, HeartbeatParts};
use crate::actor::settle::{SettleActor, SettleParts};
use crate::delivery::{Delivery, InFlight, Lease};
use crate::instance::{InstanceId, InstanceIdentity};
use crate::lane::{Crew, CrewParts};
use crate::message::{BeatNow, Dispatch, Evicted, Fence, HandBack, RequestImmediatePoll, Settle, Unfence};
use crate::options::Options;
use crate::policy::lease::LeaseWindow;
use crate::policy::retry::RetryPolicy;
use crate::registry::Group;
use crate::runner::Runner;
use crate::standing::Standing;
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
        instances: Arc::clone(store) as _,
        sweep: FakeSweep::new(),
        watch: Some(FakeDeathWatch::new()),
        runners,
        handlers: Handle::current(),
        users: Group::new("users").contained(),
        start_deadline: Duration::from_secs(10),
    }
}

/// Takes rows in hand as a claim at this moment would.
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
    let lease = Lease::new(LeaseWindow::new(tokio::time::Instant::now().into_std(), lease, grace));
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
    /// Its reports of eviction.
    pub evicted: TestProbe<Evicted>,
    /// Who it is.
    pub instance: InstanceId,
    parts: ClaimParts,
    store: Arc<FakeStore>,
}

impl ClaimRig {
    /// Starts one, still fenced.
    pub fn start(options: Options, store: &Arc<FakeStore>) -> Self {
        let permits = Arc::new(Semaphore::new(options.dispatch.max_in_flight as usize));
        let in_flight: Arc<InFlight> = Arc::default();
        let standing: Arc<Standing> = Arc::default();
        let (dispatch, hand_back) = (TestProbe::start(), TestProbe::start());
        let (beat_now, evicted) = (TestProbe::start(), TestProbe::start());
        let instance = InstanceId::fresh();
        let parts = ClaimParts {
            options,
            instance,
            categories: Category::ALL.into(),
            permits: Arc::clone(&permits),
            in_flight: Arc::clone(&in_flight),
            standing: Arc::clone(&standing),
            dispatch: dispatch.recipient(),
            hand_back: hand_back.recipient(),
            beat_now: beat_now.recipient(),
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
            evicted,
            instance,
            parts,
            store,
        }
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
    pub wake: TestProbe<RequestImmediatePoll>,
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
        let (wake, evicted) = (TestProbe::start(), TestProbe::start());
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
            evicted: evicted.recipient(),
            seed: 7,
        };
        let store = Arc::clone(store);
        let addr = SettleActor::new(parts.clone(), Arc::clone(&store) as _).start();
        Self { addr, standing, wake, evicted, instance, parts, store }
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
    /// The permits of its rows.
    pub permits: Arc<Semaphore>,
    /// What is held.
    pub in_flight: Arc<InFlight>,
    parts: DispatchParts,
}

impl DispatchRig {
    /// Starts one as after the first accepted heartbeat, whose handlers run on the current runtime.
    pub fn start(options: &Options, runners: Vec<(Category, Arc<dyn Runner>)>) -> Self {
        let settle = TestProbe::start();
        let in_flight: Arc<InFlight> = Arc::default();
        let standing: Arc<Standing> = Arc::default();
        standing.unfence();
        let handlers = Handle::current();
        let crew = Crew::new(CrewParts {
            instance: InstanceId::fresh(),
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
            settle: settle.recipient(),
            drain_deadline: Duration::from_secs(options.dispatch.drain_deadline_seconds.into()),
        };
        let permits = Arc::new(Semaphore::new(options.dispatch.max_in_flight as usize));
        let addr = DispatchActor::new(parts.clone()).start();
        Self { addr, standing, settle, permits, in_flight, parts }
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

/// A heartbeat actor.
#[derive(Debug)]
pub struct HeartbeatRig {
    /// The actor.
    pub addr: Addr<HeartbeatActor>,
    /// What is known about the instance.
    pub standing: Arc<Standing>,
    /// Its news of membership.
    pub unfence: TestProbe<Unfence>,
    /// Its reports of eviction.
    pub evicted: TestProbe<Evicted>,
    /// Who it is.
    pub identity: InstanceIdentity,
    options: Options,
    store: Arc<FakeStore>,
}

impl HeartbeatRig {
    /// Starts one.
    pub fn start(options: &Options, store: &Arc<FakeStore>) -> Self {
        let (unfence, evicted) = (TestProbe::start(), TestProbe::start());
        let (identity, standing, options) = (identity(), Arc::default(), options.clone());
        let store = Arc::clone(store);
        let parts = heartbeat_parts(&options, &identity, &standing, &unfence, &evicted);
        let addr = HeartbeatActor::new(parts, Arc::clone(&store) as _).start();
        Self { addr, standing, unfence, evicted, identity, options, store }
    }

    /// Ends this incarnation where it stands and starts the next.
    pub async fn restart(&mut self) {
        end(&self.addr).await;
        let parts =
            heartbeat_parts(&self.options, &self.identity, &self.standing, &self.unfence, &self.evicted);
        self.addr = HeartbeatActor::new(parts, Arc::clone(&self.store) as _).start();
    }
}

fn heartbeat_parts(
    options: &Options,
    identity: &InstanceIdentity,
    standing: &Arc<Standing>,
    unfence: &TestProbe<Unfence>,
    evicted: &TestProbe<Evicted>,
) -> HeartbeatParts {
    HeartbeatParts {
        options: options.heartbeat.clone(),
        identity: identity.clone(),
        accepts_work: true,
        standing: Arc::clone(standing),
        unfence: vec![unfence.recipient()],
        evicted: evicted.recipient(),
        progress: Box::new(|_| {}),
    }
}
