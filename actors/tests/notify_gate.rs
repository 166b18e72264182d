//! The direct session: when it is opened, what it holds and hears, when it pings, and what of it is told.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::sync::Semaphore;
use tokio::time::sleep;
use workpump_actors::actor::notify_gate::{Channels, NotifyGateActor, NotifyGateParts};
use workpump_actors::delivery::{Delivery, InFlight};
use workpump_actors::instance::{AliveLock, InstanceId};
use workpump_actors::message::{
    Account, AliveLockChanged, Drain, Evicted, Observe, PingNow, RequestImmediatePoll, TrustProven,
};
use workpump_actors::options::{GateOptions, HeartbeatOptions, LivenessSourceMode};
use workpump_actors::policy::trust::{SentBeat, TrustRule};
use workpump_actors::port::{DirectConnector, StoreError};
use workpump_actors::standing::Standing;
use workpump_actors::testing::{
    Crash, DirectOp, FakeDirect, Reply, TestProbe, claimed, deliver, in_virtual_time, quiesce,
};

/// A keeper of the session with everything around it.
struct Gate {
    addr: Addr<NotifyGateActor>,
    server: FakeDirect,
    instance: InstanceId,
    standing: Arc<Standing>,
    in_flight: Arc<InFlight>,
    lock: TestProbe<AliveLockChanged>,
    trust: TestProbe<TrustProven>,
    channels: Arc<Channels>,
    wake: TestProbe<RequestImmediatePoll>,
    ready: TestProbe<RequestImmediatePoll>,
    heartbeat: HeartbeatOptions,
    connected: bool,
}

impl Gate {
    fn start(server: FakeDirect) -> Self {
        Self::with(server, HeartbeatOptions::default(), Duration::from_secs(5), true)
    }

    fn with(server: FakeDirect, heartbeat: HeartbeatOptions, grace: Duration, connected: bool) -> Self {
        let mut gate = Self {
            addr: NotifyGateActor::create(|_| NotifyGateActor::new(nothing())),
            server,
            instance: InstanceId::fresh(),
            standing: Arc::new(Standing::new(TrustRule::new(grace))),
            in_flight: Arc::default(),
            lock: TestProbe::start(),
            trust: TestProbe::start(),
            channels: Arc::default(),
            wake: TestProbe::start(),
            ready: TestProbe::start(),
            heartbeat,
            connected,
        };
        gate.begin();
        gate
    }

    fn begin(&mut self) {
        let ready = self.ready.recipient();
        let parts = NotifyGateParts {
            gate: GateOptions::default(),
            route: Arc::new(self.server.clone()),
            gate_news: Vec::new(),
            gate_subscribers: Arc::default(),
            must_be_proven: false,
            heartbeat: self.heartbeat.clone(),
            instance: self.instance,
            standing: Arc::clone(&self.standing),
            in_flight: Arc::clone(&self.in_flight),
            connector: self.connected.then(|| Arc::new(self.server.clone()) as Arc<dyn DirectConnector>),
            alive_lock: vec![self.lock.recipient()],
            trust: vec![self.trust.recipient()],
            channels: Arc::clone(&self.channels),
            wake: Some(self.wake.recipient()),
            progress: Box::new(move |progress| {
                if progress.is_ok() {
                    ready.do_send(RequestImmediatePoll);
                }
            }),
            seed: 7,
        };
        self.addr = NotifyGateActor::new(parts).start();
    }

    fn work(&self) -> Vec<Delivery> {
        let permits = Arc::new(Semaphore::new(1));
        let (lease, grace) = (Duration::from_mins(5), Duration::from_secs(30));
        deliver(vec![claimed(1, None)], &permits, &self.in_flight, lease, grace)
    }

    fn beat(&self) {
        let sent_at = tokio::time::Instant::now().into_std();
        let lock = Some(self.standing.lock_session());
        self.standing.beat_accepted(SentBeat { sent_at, lock, interval: Duration::from_mins(1) });
    }

    async fn account(&self) -> Account {
        self.addr.send(Observe).await.expect("alive")
    }

    fn locks(&mut self) -> Vec<AliveLock> {
        self.lock.take().into_iter().map(|AliveLockChanged(lock)| lock).collect()
    }
}

fn nothing() -> NotifyGateParts {
    NotifyGateParts {
        gate: GateOptions::default(),
        route: Arc::new(FakeDirect::new()),
        gate_news: Vec::new(),
        gate_subscribers: Arc::default(),
        must_be_proven: false,
        heartbeat: HeartbeatOptions::default(),
        instance: InstanceId::fresh(),
        standing: Arc::default(),
        in_flight: Arc::default(),
        connector: None,
        alive_lock: Vec::new(),
        trust: Vec::new(),
        channels: Arc::default(),
        wake: None,
        progress: Box::new(|_| {}),
        seed: 0,
    }
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("connection refused".to_owned())
}

const HOUR: Duration = Duration::from_hours(1);

#[test]
fn it_listens_to_its_own_channel_takes_the_lock_and_then_is_ready() {
    in_virtual_time(async {
        let mut gate = Gate::start(FakeDirect::new());
        gate.ready.next().await;
        assert!(gate.server.holds_lock(gate.instance));
        assert_eq!(gate.server.channels(), [FakeDirect::channel_of(gate.instance)]);
        assert_eq!(gate.locks(), [AliveLock::Held]);
        assert_eq!(gate.server.times(DirectOp::ClaimLock), [Duration::ZERO]);
        assert!(gate.wake.take().is_empty(), "a claim follows the start anyway");
    });
}

#[test]
fn whatever_is_rung_on_its_channel_wakes_the_claimer_and_a_flood_is_few_wakes() {
    in_virtual_time(async {
        let mut gate = Gate::start(FakeDirect::new());
        gate.ready.next().await;
        let channel = FakeDirect::channel_of(gate.instance);
        for payload in ["orphan", "membership", "outbox"] {
            assert!(gate.server.ring(&channel, payload));
            gate.wake.next().await;
        }
        quiesce().await;
        gate.wake.take();
        for _ in 0..5_000 {
            gate.server.ring(&channel, "orphan");
        }
        quiesce().await;
        let wakes = gate.wake.take().len();
        assert!((1..=100).contains(&wakes), "{wakes}");
        assert_eq!(gate.account().await.counter("rings"), 5_003);
    });
}

#[test]
fn an_idle_instance_pings_nobody() {
    in_virtual_time(async {
        let mut gate = Gate::start(FakeDirect::new());
        gate.ready.next().await;
        gate.beat();
        sleep(HOUR).await;
        assert_eq!(gate.server.count(DirectOp::Ping), 0);
        assert_eq!(gate.server.count(DirectOp::Connect), 1);
    });
}

#[test]
fn it_pings_five_times_in_a_grace_while_there_is_work_and_stops_with_it() {
    in_virtual_time(async {
        for (grace, pause) in [(1, 200), (5, 1_000), (60, 1_000)] {
            let heartbeat = HeartbeatOptions::default();
            let mut gate = Gate::with(FakeDirect::new(), heartbeat, Duration::from_secs(grace), true);
            gate.ready.next().await;
            gate.beat();
            let work = gate.work();
            gate.addr.do_send(PingNow);
            sleep(Duration::from_millis(pause * 9 + 1)).await;
            let pings = gate.server.times(DirectOp::Ping);
            let gaps: Vec<_> =
                pings.windows(2).map(|pair| pair[1].saturating_sub(pair[0]).as_millis()).collect();
            assert_eq!(gaps, [u128::from(pause); 9]);
            assert_eq!(gate.trust.take().len(), 10);
            drop(work);
            sleep(HOUR).await;
            assert_eq!(gate.server.count(DirectOp::Ping), 10);
        }
    });
}

#[test]
fn many_calls_for_a_proof_are_one_ping_while_trust_stands_and_a_ping_each_time_it_does_not() {
    in_virtual_time(async {
        let mut gate = Gate::start(FakeDirect::new());
        gate.ready.next().await;
        gate.beat();
        let _work = gate.work();
        for _ in 0..100 {
            gate.addr.do_send(PingNow);
        }
        quiesce().await;
        assert_eq!(gate.server.count(DirectOp::Ping), 1);
        gate.server.always(|op| (op == DirectOp::Ping).then_some(Reply::Hang));
        sleep(Duration::from_millis(4_100)).await;
        assert!(!gate.standing.is_trusted(tokio::time::Instant::now().into_std()));
        gate.server.recover();
        let before = gate.server.count(DirectOp::Ping);
        gate.addr.do_send(PingNow);
        quiesce().await;
        assert_eq!(gate.server.count(DirectOp::Ping), before, "one is under way");
        sleep(Duration::from_secs(10)).await;
        assert!(gate.server.count(DirectOp::Ping) > before);
        assert!(
            gate.standing.is_trusted(tokio::time::Instant::now().into_std()) || gate.trust.take().len() > 1
        );
    });
}

#[test]
fn trust_counts_from_when_the_ping_was_sent() {
    in_virtual_time(async {
        let mut gate = Gate::start(FakeDirect::new());
        gate.ready.next().await;
        gate.beat();
        let start = tokio::time::Instant::now();
        let _work = gate.work();
        sleep(Duration::from_secs(2)).await;
        gate.server.script(DirectOp::Ping, Reply::Slow(Duration::from_secs(3)));
        gate.server.script(DirectOp::Ping, Reply::Hang);
        gate.addr.do_send(PingNow);
        let proven = gate.trust.next().await;
        assert_eq!(start.elapsed(), Duration::from_secs(5), "its answer was slow");
        assert_eq!(proven.sent_at, (start + Duration::from_secs(2)).into_std());
        quiesce().await;
        assert_eq!(gate.server.count(DirectOp::Ping), 2, "the next one was due long before");
        assert_eq!(gate.standing.trust_until(), Some((start + Duration::from_secs(6)).into_std()));
    });
}

#[test]
fn a_lost_session_is_told_at_once_and_everything_is_set_up_again_once() {
    in_virtual_time(async {
        let mut gate = Gate::start(FakeDirect::new());
        gate.ready.next().await;
        sleep(Duration::from_mins(1)).await;
        gate.lock.take();
        gate.server.end_session();
        sleep(Duration::from_millis(1)).await;
        assert_eq!(gate.locks(), [AliveLock::NotHeld, AliveLock::Held]);
        assert_eq!(gate.server.sessions(), 2);
        assert_eq!(gate.server.count(DirectOp::Listen), 2);
        assert_eq!(gate.server.count(DirectOp::ClaimLock), 2);
        assert!(gate.wake.take().is_empty(), "the change of the gate is a look, and there is one");
        assert!(gate.server.ring(&FakeDirect::channel_of(gate.instance), "orphan"));
        quiesce().await;
        assert_eq!(gate.wake.take().len(), 1, "heard once");
    });
}

#[test]
fn it_reconnects_with_a_growing_pause_that_is_capped_and_spread() {
    in_virtual_time(async {
        let server = FakeDirect::new();
        server.always(|op| (op == DirectOp::Connect).then(|| Reply::Fail(unavailable())));
        let mut gate = Gate::start(server.clone());
        gate.ready.next().await;
        assert_eq!(gate.locks(), [AliveLock::NotHeld]);
        server.called(DirectOp::Connect, 12).await;
        let times = server.times(DirectOp::Connect);
        let mut bare = [100, 200, 400, 800, 1_600, 3_200, 3_750, 3_750, 3_750, 3_750, 3_750].into_iter();
        for pair in times.windows(2) {
            let (gap, bare) = (
                pair[1].saturating_sub(pair[0]).as_millis() as f64,
                f64::from(bare.next().expect("11 gaps")),
            );
            assert!((bare * 0.79..=bare * 1.21).contains(&gap), "{gap} for {bare}");
        }
        server.recover();
        sleep(Duration::from_secs(7)).await;
        assert!(server.holds_lock(gate.instance));
        sleep(Duration::from_secs(30)).await;
        server.end_session();
        let lost = server.count(DirectOp::Connect);
        sleep(Duration::from_millis(1)).await;
        assert_eq!(
            server.count(DirectOp::Connect),
            lost + 1,
            "after a good session the first try is at once"
        );
    });
}

#[test]
fn a_session_that_ends_right_away_again_and_again_is_not_reopened_in_a_hot_loop() {
    in_virtual_time(async {
        let gate = Gate::start(FakeDirect::new());
        for _ in 0..600 {
            gate.server.end_session();
            sleep(Duration::from_millis(100)).await;
        }
        let sessions = gate.server.sessions();
        assert!(sessions < 40, "{sessions} sessions in a minute");
    });
}

#[test]
fn a_refused_lock_is_asked_for_again_from_50_ms_to_a_second_until_it_is_held() {
    in_virtual_time(async {
        let server = FakeDirect::new();
        let mut gate = Gate::start(server.clone());
        gate.ready.next().await;
        gate.lock.take();
        server.take_lock(gate.instance);
        server.end_session();
        server.called(DirectOp::ClaimLock, 9).await;
        let times = server.times(DirectOp::ClaimLock);
        let gaps: Vec<_> =
            times.windows(2).skip(1).map(|pair| pair[1].saturating_sub(pair[0]).as_millis()).collect();
        assert_eq!(gaps, [50, 100, 200, 400, 800, 1_000, 1_000]);
        server.free_lock(gate.instance);
        sleep(Duration::from_millis(1_001)).await;
        assert!(server.holds_lock(gate.instance));
        let told = gate.locks();
        assert_eq!(told.last(), Some(&AliveLock::Held));
        assert!(!told[..told.len() - 1].contains(&AliveLock::Held));
        assert_eq!(server.sessions(), 2, "the session is kept meanwhile");
    });
}

#[test]
fn an_older_schema_without_the_functions_costs_no_session_and_is_asked_again() {
    in_virtual_time(async {
        let missing =
            || StoreError::Other { code: "42883".to_owned(), message: "no such function".to_owned() };
        let server = FakeDirect::new();
        for _ in 0..3 {
            server.script(DirectOp::ClaimLock, Reply::Fail(missing()));
            server.script(DirectOp::WorkChannel, Reply::Fail(missing()));
        }
        let mut gate = Gate::start(server.clone());
        gate.ready.next().await;
        assert_eq!(gate.locks(), [AliveLock::NotHeld]);
        sleep(Duration::from_secs(10)).await;
        assert_eq!(gate.locks(), [AliveLock::Held]);
        assert_eq!((server.sessions(), server.channels().len()), (1, 1));
    });
}

#[test]
fn a_pooler_is_no_source_for_the_lock_and_is_asked_again_rarely() {
    in_virtual_time(async {
        let server = FakeDirect::new();
        let pooler = || Reply::Fail(StoreError::NotDirect("start-up options are refused".to_owned()));
        server.always(move |op| (op == DirectOp::Connect).then(pooler));
        let mut gate = Gate::start(server.clone());
        gate.ready.next().await;
        assert_eq!(gate.locks(), [AliveLock::NoSource]);
        sleep(HOUR).await;
        assert!((48..=80).contains(&server.count(DirectOp::Connect)), "{}", server.count(DirectOp::Connect));
        assert_eq!(gate.account().await.state, "no direct connection: a pooler answers");
    });
}

#[test]
fn nobody_waits_for_a_server_that_does_not_answer() {
    in_virtual_time(async {
        let server = FakeDirect::new();
        server.script(DirectOp::Connect, Reply::Hang);
        let start = tokio::time::Instant::now();
        let mut gate = Gate::start(server.clone());
        gate.ready.next().await;
        assert_eq!(start.elapsed(), Duration::from_secs(3));
        sleep(Duration::from_secs(20)).await;
        assert!(server.holds_lock(gate.instance), "and the call is given up and made again");
    });
}

#[test]
fn the_table_only_mode_and_a_disabled_heartbeat_take_no_lock_but_listen() {
    in_virtual_time(async {
        let table_only = HeartbeatOptions {
            liveness_source_mode: LivenessSourceMode::HeartbeatTableOnly,
            ..HeartbeatOptions::default()
        };
        let disabled = HeartbeatOptions { enabled: false, ..HeartbeatOptions::default() };
        for heartbeat in [table_only, disabled] {
            let mut gate = Gate::with(FakeDirect::new(), heartbeat, Duration::from_secs(5), true);
            gate.ready.next().await;
            let _work = gate.work();
            gate.addr.do_send(PingNow);
            sleep(HOUR).await;
            assert_eq!(gate.server.count(DirectOp::ClaimLock), 0);
            assert_eq!(gate.server.count(DirectOp::Ping), 0, "it would prove nothing");
            assert_eq!(gate.server.channels().len(), 1);
            assert!(gate.locks().is_empty());
        }
    });
}

#[test]
fn without_a_connector_it_is_ready_and_does_nothing() {
    in_virtual_time(async {
        let mut gate =
            Gate::with(FakeDirect::new(), HeartbeatOptions::default(), Duration::from_secs(5), false);
        gate.ready.next().await;
        gate.addr.do_send(PingNow);
        sleep(HOUR).await;
        assert_eq!(gate.server.count(DirectOp::Connect), 0);
        assert_eq!(gate.account().await.state, "no direct connection");
    });
}

#[test]
fn a_drain_gives_the_lock_back_and_ends_the_session() {
    in_virtual_time(async {
        let mut gate = Gate::start(FakeDirect::new());
        gate.ready.next().await;
        gate.lock.take();
        gate.addr.send(Drain).await.expect("alive");
        assert_eq!(gate.server.count(DirectOp::ReleaseLock), 1);
        assert!(!gate.server.is_connected());
        quiesce().await;
        assert_eq!(gate.locks(), [AliveLock::NotHeld]);
        sleep(HOUR).await;
        assert_eq!(gate.server.count(DirectOp::Connect), 1);
    });
}

#[test]
fn an_evicted_instance_lets_go_of_its_lock_and_another_ones_eviction_changes_nothing() {
    in_virtual_time(async {
        let mut gate = Gate::start(FakeDirect::new());
        gate.ready.next().await;
        gate.addr.do_send(Evicted(InstanceId::fresh()));
        quiesce().await;
        assert!(gate.server.holds_lock(gate.instance));
        gate.addr.do_send(Evicted(gate.instance));
        sleep(HOUR).await;
        assert!(!gate.server.is_connected());
        assert_eq!(gate.server.count(DirectOp::Connect), 1);
    });
}

#[test]
fn the_next_life_of_the_actor_says_that_the_lock_is_lost_and_takes_it_again() {
    in_virtual_time(async {
        let mut gate = Gate::start(FakeDirect::new());
        gate.ready.next().await;
        gate.standing.set_alive_lock(AliveLock::Held);
        gate.lock.take();
        let _work = gate.work();
        // The old one dies with its session.
        gate.addr.do_send(Crash);
        while gate.addr.connected() {
            tokio::task::yield_now().await;
        }
        assert!(!gate.server.is_connected());
        gate.begin();
        quiesce().await;
        let told = gate.locks();
        assert_eq!((told.first(), told.last()), (Some(&AliveLock::NotHeld), Some(&AliveLock::Held)));
        assert!(gate.server.count(DirectOp::Ping) >= 1, "there is work in hand");
        assert!(gate.server.holds_lock(gate.instance));
    });
}
