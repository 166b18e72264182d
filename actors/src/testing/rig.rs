//! One actor at a time, with everything around it played by probes and the store in memory.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::fake::FakeStore;
use super::probe::TestProbe;
use crate::actor::claim::{ClaimActor, ClaimParts};
use crate::actor::dispatch::{DispatchActor, DispatchParts};
use crate::actor::heartbeat::{HeartbeatActor, HeartbeatParts};
use crate::actor::settle::{SettleActor, SettleParts};
use crate::delivery::{Delivery, InFlight, Lease};
use crate::instance::{InstanceId, InstanceIdentity};
use crate::message::{BeatNow, Dispatch, Evicted, HandBack, RequestImmediatePoll, Settle, Unfence};
use crate::options::Options;
use crate::policy::lease::LeaseWindow;
use crate::runner::Runner;
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
        runners,
        handlers: Handle::current(),
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
}

impl ClaimRig {
    /// Starts one, still fenced.
    pub fn start(options: Options, store: &Arc<FakeStore>) -> Self {
        let permits = Arc::new(Semaphore::new(options.dispatch.max_in_flight as usize));
        let in_flight: Arc<InFlight> = Arc::default();
        let (dispatch, hand_back) = (TestProbe::start(), TestProbe::start());
        let (beat_now, evicted) = (TestProbe::start(), TestProbe::start());
        let instance = InstanceId::fresh();
        let parts = ClaimParts {
            options,
            instance,
            categories: Category::ALL.into(),
            permits: Arc::clone(&permits),
            in_flight: Arc::clone(&in_flight),
            dispatch: dispatch.recipient(),
            hand_back: hand_back.recipient(),
            beat_now: beat_now.recipient(),
            evicted: evicted.recipient(),
            seed: 7,
        };
        let addr = ClaimActor::new(parts, Arc::clone(store) as _).start();
        Self { addr, permits, in_flight, dispatch, hand_back, beat_now, evicted, instance }
    }

    /// Starts one as after the first accepted heartbeat.
    pub fn start_open(options: Options, store: &Arc<FakeStore>) -> Self {
        let rig = Self::start(options, store);
        rig.addr.do_send(Unfence);
        rig
    }
}

/// A settling actor.
#[derive(Debug)]
pub struct SettleRig {
    /// The actor.
    pub addr: Addr<SettleActor>,
    /// Its wakes.
    pub wake: TestProbe<RequestImmediatePoll>,
    /// Its reports of eviction.
    pub evicted: TestProbe<Evicted>,
    /// Who it is.
    pub instance: InstanceId,
}

impl SettleRig {
    /// Starts one.
    pub fn start(options: &Options, store: &Arc<FakeStore>) -> Self {
        let (wake, evicted) = (TestProbe::start(), TestProbe::start());
        let instance = InstanceId::fresh();
        let parts = SettleParts {
            options: options.settle.clone(),
            instance,
            drain_deadline: Duration::from_secs(options.dispatch.drain_deadline_seconds.into()),
            wake: Some(wake.recipient()),
            evicted: evicted.recipient(),
            seed: 7,
        };
        let addr = SettleActor::new(parts, Arc::clone(store) as _).start();
        Self { addr, wake, evicted, instance }
    }
}

/// A dispatching actor.
#[derive(Debug)]
pub struct DispatchRig {
    /// The actor.
    pub addr: Addr<DispatchActor>,
    /// Its results.
    pub settle: TestProbe<Settle>,
    /// The permits of its rows.
    pub permits: Arc<Semaphore>,
    /// What is held.
    pub in_flight: Arc<InFlight>,
}

impl DispatchRig {
    /// Starts one whose handlers run on the current runtime.
    pub fn start(options: &Options, runners: Vec<(Category, Arc<dyn Runner>)>) -> Self {
        let settle = TestProbe::start();
        let in_flight: Arc<InFlight> = Arc::default();
        let parts = DispatchParts {
            options: options.dispatch.clone(),
            instance: InstanceId::fresh(),
            runners,
            handlers: Handle::current(),
            in_flight: Arc::clone(&in_flight),
            settle: settle.recipient(),
            seed: 7,
        };
        let permits = Arc::new(Semaphore::new(options.dispatch.max_in_flight as usize));
        Self { addr: DispatchActor::new(parts).start(), settle, permits, in_flight }
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
}

/// A heartbeat actor.
#[derive(Debug)]
pub struct HeartbeatRig {
    /// The actor.
    pub addr: Addr<HeartbeatActor>,
    /// Its news of membership.
    pub unfence: TestProbe<Unfence>,
    /// Its reports of eviction.
    pub evicted: TestProbe<Evicted>,
    /// Who it is.
    pub identity: InstanceIdentity,
}

impl HeartbeatRig {
    /// Starts one.
    pub fn start(options: &Options, store: &Arc<FakeStore>) -> Self {
        let (unfence, evicted) = (TestProbe::start(), TestProbe::start());
        let identity = identity();
        let parts = HeartbeatParts {
            options: options.heartbeat.clone(),
            identity: identity.clone(),
            accepts_work: true,
            unfence: vec![unfence.recipient()],
            evicted: evicted.recipient(),
            progress: Box::new(|_| {}),
        };
        let addr = HeartbeatActor::new(parts, Arc::clone(store) as _).start();
        Self { addr, unfence, evicted, identity }
    }
}
