//! The modes of the gate, and the gate in an engine: who reads it, how the claimer polls, what a start needs.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use workpump_actors::actor::claim::ClaimActor;
use workpump_actors::actor::notify_gate::NotifyGateActor;
use workpump_actors::instance::Gate;
use workpump_actors::message::{Observe, Subscribe, SubscribeToGate};
use workpump_actors::options::{GateMode, Options};
use workpump_actors::port::StoreError;
use workpump_actors::registry::Host;
use workpump_actors::testing::{
    Call, Crash, DirectOp, FakeDirect, FakeStore, GateRig, Op, Reply, TestProbe, engine_parts,
    in_virtual_time, quiesce, runner,
};
use workpump_actors::tree::{Engine, EngineParts, StartError};
use workpump_actors::work::Category;

const HOUR: Duration = Duration::from_hours(1);

fn options(mode: GateMode) -> Options {
    let mut options = Options::default();
    options.gate.mode = mode;
    options
}

fn parts(mode: GateMode, store: &Arc<FakeStore>, server: Option<&FakeDirect>) -> EngineParts {
    let runners = vec![(Category::Outbox, runner(1, |_| async { Ok(()) }))];
    let mut parts = engine_parts(options(mode), store, runners);
    if let Some(server) = server {
        parts.direct = Some(Arc::new(server.clone()));
        parts.route = Arc::new(server.clone());
    }
    parts
}

async fn engine(mode: GateMode, store: &Arc<FakeStore>, server: &FakeDirect) -> Engine {
    Engine::start_on(parts(mode, store, Some(server)), Host::current()).await.expect("starts")
}

async fn claimer(engine: &Engine, counter: &str) -> u64 {
    engine.addr::<ClaimActor>().expect("there is one").send(Observe).await.expect("alive").counter(counter)
}

fn beats(store: &FakeStore) -> Vec<Gate> {
    let beats = store.calls();
    beats.iter().filter_map(|call| if let Call::Beat(beat) = call { Some(beat.gate) } else { None }).collect()
}

#[test]
fn in_the_polling_mode_the_session_holds_the_lock_and_does_nothing_else() {
    in_virtual_time(async {
        let server = FakeDirect::new();
        let mut rig = GateRig::start(&options(GateMode::Polling), &server);
        rig.ready().await;
        let mut user = TestProbe::start();
        let asked = rig.addr.send(Subscribe { channel: "a".into(), to: user.recipient() }).await;
        assert_eq!(asked.expect("alive"), Ok(()));
        assert_eq!(rig.probe().await.gate, Gate::Unconfigured);
        server.end_session();
        sleep(HOUR).await;
        assert!(server.holds_lock(rig.instance));
        for op in [DirectOp::Listen, DirectOp::WorkChannel, DirectOp::Ring, DirectOp::Ping] {
            assert_eq!(server.count(op), 0, "{op:?}");
        }
        assert!(rig.gates().is_empty() && user.take().is_empty() && rig.wake.take().is_empty());
        let report = rig.standing.gate_report();
        assert_eq!(
            (report.gate, report.reason.as_deref()),
            (Gate::Unconfigured, Some("`gate.mode` is Polling"))
        );
    });
}

#[test]
fn without_a_direct_connection_there_is_no_gate_and_nobody_waits_for_one() {
    in_virtual_time(async {
        let mut rig = GateRig::unconnected(&options(GateMode::Auto));
        rig.ready().await;
        let mut subscriber = rig.subscriber();
        sleep(HOUR).await;
        assert_eq!(subscriber.take().len(), 1);
        assert!(rig.gates().is_empty());
        let report = rig.probe().await;
        assert_eq!(
            (report.gate, report.reason.as_deref()),
            (Gate::Unconfigured, Some("there is no direct connection"))
        );
    });
}

#[test]
fn where_notify_is_required_a_start_that_cannot_prove_it_fails_and_says_why() {
    in_virtual_time(async {
        let pooler = FakeDirect::new();
        let refused = || Reply::Fail(StoreError::NotDirect("start-up options are refused".to_owned()));
        pooler.always(move |op| (op == DirectOp::Connect).then(refused));
        let deaf = FakeDirect::new();
        deaf.set_deaf(true);
        let cut = FakeDirect::new();
        cut.always(|op| {
            (op == DirectOp::Ring).then(|| Reply::Fail(StoreError::Unavailable("pool exhausted".to_owned())))
        });
        for (server, why) in [
            (Some(&pooler), "not a direct connection: start-up options are refused"),
            (Some(&deaf), "pooler suspected: LISTEN accepted, nothing delivered"),
            (Some(&cut), "pool exhausted"),
            (None, "there is no direct connection"),
        ] {
            let (store, start) = (FakeStore::new(), Instant::now());
            let error =
                Engine::start_on(parts(GateMode::ListenNotify, &store, server), Host::current()).await;
            let error = error.err().unwrap_or_else(|| panic!("it started although {why}"));
            assert!(matches!(error, StartError::Child(_)), "{error:?}");
            assert!(error.to_string().contains("notify_gate") && error.to_string().contains(why), "{error}");
            assert!(start.elapsed() <= Duration::from_secs(15), "{:?}", start.elapsed());
            assert_eq!((store.count(Op::Beat), store.count(Op::Claim)), (0, 0), "nothing has begun");
            assert!(server.is_none_or(|server| !server.is_connected()), "and nothing is left");
        }
    });
}

#[test]
fn where_notify_is_required_a_start_waits_for_the_proof_and_bears_later_losses() {
    in_virtual_time(async {
        let (store, server) = (FakeStore::new(), FakeDirect::new());
        server.set_deaf(true);
        let healing = server.clone();
        actix::spawn(async move {
            sleep(Duration::from_secs(5)).await;
            healing.set_deaf(false);
        });
        let engine = engine(GateMode::ListenNotify, &store, &server).await;
        assert_eq!(engine.gate().gate, Gate::Available);
        server.always(|op| {
            (op == DirectOp::Connect).then(|| Reply::Fail(StoreError::Unavailable("gone".to_owned())))
        });
        server.end_session();
        sleep(Duration::from_mins(1)).await;
        assert!(engine.is_ready());
        assert_eq!(engine.gate().gate, Gate::Unavailable);
        server.recover();
        sleep(Duration::from_secs(10)).await;
        assert_eq!(engine.gate().gate, Gate::Available);
        engine.drain().await;
        assert_eq!(engine.gate().gate, Gate::Unavailable);
        assert_eq!(engine.probe_gate().await.gate, Gate::Unavailable, "what was known last");
    });
}

#[test]
fn a_start_is_one_catch_up_and_each_reconnect_is_another_one() {
    in_virtual_time(async {
        let (store, server) = (FakeStore::new(), FakeDirect::new());
        let engine = engine(GateMode::Auto, &store, &server).await;
        sleep(Duration::from_mins(1)).await;
        assert_eq!(claimer(&engine, "startup_catch_up").await, 1);
        assert_eq!(claimer(&engine, "reconnect_catch_up").await, 0);
        for outage in 1..=5 {
            sleep(Duration::from_secs(20)).await;
            server.script(DirectOp::Ring, Reply::Slow(Duration::from_millis(600)));
            let before = store.count(Op::Claim);
            server.end_session();
            sleep(Duration::from_millis(50)).await;
            assert_eq!(store.count(Op::Claim), before + 1, "one look when it closes");
            sleep(Duration::from_millis(500)).await;
            let closed = store.count(Op::Claim);
            sleep(Duration::from_millis(100)).await;
            assert_eq!(engine.gate().gate, Gate::Available);
            let opened = store.count(Op::Claim) - closed;
            assert!((1..=2).contains(&opened), "one when it opens, and a poll at most: {opened}");
            assert_eq!(claimer(&engine, "reconnect_catch_up").await, outage);
        }
        assert_eq!(claimer(&engine, "startup_catch_up").await, 1);
        engine.drain().await;
    });
}

#[test]
fn an_open_gate_is_polled_behind_rarely_and_a_closed_one_at_the_tight_base() {
    in_virtual_time(async {
        let (store, server) = (FakeStore::new(), FakeDirect::new());
        let engine = engine(GateMode::Auto, &store, &server).await;
        sleep(Duration::from_mins(1)).await;
        let before = store.count(Op::Claim);
        sleep(Duration::from_secs(100)).await;
        assert!((9..=11).contains(&(store.count(Op::Claim) - before)), "10 s at most");
        server.set_deaf(true);
        sleep(Duration::from_secs(40)).await;
        let before = store.count(Op::Claim);
        sleep(Duration::from_secs(100)).await;
        assert!((398..=402).contains(&(store.count(Op::Claim) - before)), "every 250 ms");
        engine.drain().await;
    });
}

#[test]
fn a_pooler_on_the_direct_url_is_named_work_is_polled_for_and_the_url_tried_every_minute() {
    in_virtual_time(async {
        let (store, server) = (FakeStore::new(), FakeDirect::new());
        let pooler = || Reply::Fail(StoreError::NotDirect("start-up options are refused".to_owned()));
        server.always(move |op| (op == DirectOp::Connect).then(pooler));
        let engine = engine(GateMode::Auto, &store, &server).await;
        let report = engine.gate();
        assert_eq!(report.gate, Gate::Unavailable);
        assert!(report.reason.is_some_and(|why| why.contains("past the pooler")));
        let before = (store.count(Op::Claim), server.count(DirectOp::Connect));
        sleep(HOUR).await;
        assert!(store.count(Op::Claim) - before.0 > 14_000, "the tight base");
        assert!((48..=80).contains(&(server.count(DirectOp::Connect) - before.1)));
        server.recover();
        sleep(Duration::from_secs(75)).await;
        assert_eq!(engine.gate().gate, Gate::Available);
        assert_eq!(claimer(&engine, "reconnect_catch_up").await, 1);
        engine.drain().await;
    });
}

#[test]
fn every_beat_says_how_the_gate_stands_and_a_change_is_a_beat() {
    in_virtual_time(async {
        let (store, server) = (FakeStore::new(), FakeDirect::new());
        let engine = engine(GateMode::Auto, &store, &server).await;
        quiesce().await;
        assert_eq!(beats(&store), [Gate::Available], "known before the first beat");
        sleep(Duration::from_secs(301)).await;
        let idle = beats(&store).len();
        assert_eq!(idle, 6, "one a minute");
        server.always(|op| {
            (op == DirectOp::Ring).then(|| Reply::Fail(StoreError::Unavailable("gone".to_owned())))
        });
        assert_eq!(engine.probe_gate().await.gate, Gate::Unavailable);
        quiesce().await;
        assert_eq!(beats(&store)[idle..], [Gate::Unavailable]);
        server.recover();
        sleep(Duration::from_secs(10)).await;
        assert_eq!(beats(&store)[idle..], [Gate::Unavailable, Gate::Available]);
        let account = engine.observe().await.into_iter().find(|account| account.name == "notify_gate");
        assert_eq!(account.expect("there is one").notes["gate"], "available");
        engine.drain().await;
    });
}

#[test]
fn users_find_the_gate_through_the_registry_and_stay_subscribed_over_a_re_incarnation() {
    in_virtual_time(async {
        let (store, server) = (FakeStore::new(), FakeDirect::new());
        let engine = engine(GateMode::Auto, &store, &server).await;
        let (mut gate, mut heard) = (TestProbe::start(), TestProbe::start());
        let subscribe = engine.recipient::<SubscribeToGate>().expect("it provides it");
        subscribe.send(SubscribeToGate(gate.recipient())).await.expect("alive");
        let listen = engine.recipient::<Subscribe>().expect("it provides it");
        let asked = listen.send(Subscribe { channel: "a".into(), to: heard.recipient() }).await;
        assert_eq!(asked.expect("alive"), Ok(()));
        quiesce().await;
        let told = |probe: &mut TestProbe<_>| {
            probe
                .take()
                .into_iter()
                .map(|workpump_actors::message::GateChanged(gate)| gate)
                .collect::<Vec<_>>()
        };
        assert_eq!((told(&mut gate), heard.take().len()), (vec![Gate::Available], 1));
        let first = engine.instance_id();
        store.evict(first);
        sleep(Duration::from_mins(3)).await;
        assert_ne!(engine.instance_id(), first);
        assert_eq!(engine.gate().gate, Gate::Available);
        assert_eq!((told(&mut gate), heard.take().len()), (vec![Gate::Unavailable, Gate::Available], 1));
        assert_eq!(server.channels(), ["a".to_owned(), FakeDirect::channel_of(engine.instance_id())]);
        engine.drain().await;
        assert_eq!(told(&mut gate), [Gate::Unavailable]);
    });
}

#[test]
fn the_gate_of_an_engine_is_closed_by_each_death_of_its_keeper_and_for_good_when_that_one_is_given_up() {
    in_virtual_time(async {
        let (store, server) = (FakeStore::new(), FakeDirect::new());
        let engine = engine(GateMode::Auto, &store, &server).await;
        let mut gate = TestProbe::start();
        let subscribe = engine.recipient::<SubscribeToGate>().expect("it provides it");
        subscribe.send(SubscribeToGate(gate.recipient())).await.expect("alive");
        let keeper = engine.addr::<NotifyGateActor>().expect("there is one");
        let crashing = async {
            loop {
                keeper.do_send(Crash);
                sleep(Duration::from_millis(900)).await;
            }
        };
        let gave_up = tokio::select! {
            ended = engine.terminated() => ended,
            () = crashing => unreachable!("it never ends"),
        };
        assert!(gave_up.is_err(), "it died too often");
        assert_eq!(engine.gate().gate, Gate::Unavailable);
        quiesce().await;
        let told: Vec<_> =
            gate.take().into_iter().map(|workpump_actors::message::GateChanged(gate)| gate).collect();
        assert!(told.len() >= 4 && told.last() == Some(&Gate::Unavailable), "{told:?}");
        assert!(told.windows(2).all(|pair| pair[0] != pair[1]), "{told:?}");
    });
}
