//! The kill-switch of the heartbeat at run time, and what an instance that is not ready says of itself.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use workpump_actors::message::{BeatNow, Fence, SetHeartbeat};
use workpump_actors::options::Options;
use workpump_actors::registry::Host;
use workpump_actors::runner::Runner;
use workpump_actors::testing::{
    FakeDirect, FakeStore, Op, Reply, Row, engine_parts, in_virtual_time, quiesce, runner,
};
use workpump_actors::tree::Engine;
use workpump_actors::work::Category;

fn seconds(value: u64) -> Duration {
    Duration::from_secs(value)
}

fn options() -> Options {
    let mut options = Options::default();
    options.claim.polling_max_interval_milliseconds = 250;
    options
}

/// Handlers that take so long.
fn handlers(time: Duration) -> Vec<(Category, Arc<dyn Runner>)> {
    let run = runner(1, move |_| async move {
        sleep(time).await;
        Ok(())
    });
    vec![(Category::Inbox, run)]
}

/// An engine with a direct session on this store.
async fn start(options: Options, store: &Arc<FakeStore>, time: Duration) -> (Engine, FakeDirect) {
    store.members_only();
    let direct = FakeDirect::new();
    let mut parts = engine_parts(options, store, handlers(time));
    parts.direct = Some(Arc::new(direct.clone()));
    let engine = Engine::start_on(parts, Host::current()).await.expect("starts");
    quiesce().await;
    (engine, direct)
}

fn why(engine: &Engine) -> String {
    let why = engine.not_ready_because();
    assert_eq!(why.is_none(), engine.is_ready());
    why.unwrap_or_default()
}

const OFF: &str = "its heartbeat is disabled (`heartbeat.enabled`)";

#[test]
fn switched_off_it_neither_beats_nor_claims_nor_holds_its_lock() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let (engine, direct) = start(options(), &store, Duration::ZERO).await;
        let me = engine.instance_id();
        assert!(engine.is_ready() && direct.holds_lock(me));
        engine.set_heartbeat(false);
        assert_eq!(why(&engine), OFF, "at once");
        quiesce().await;
        assert!(!direct.holds_lock(me) && direct.is_connected(), "it still listens");
        let (beats, claims) = (store.count(Op::Beat), store.count(Op::Claim));
        store.insert(Row::default());
        engine.request_immediate_poll();
        engine.recipient::<BeatNow>().expect("the heartbeat").do_send(BeatNow);
        // An outage of the direct session changes nothing.
        direct.end_session();
        sleep(Duration::from_hours(1)).await;
        assert_eq!((store.count(Op::Beat), store.count(Op::Claim)), (beats, claims));
        assert!(!direct.holds_lock(me) && direct.is_connected());
        assert_eq!(why(&engine), OFF);
        assert!(engine.drain().await.deregistered, "it leaves in good order all the same");
    });
}

#[test]
fn switched_on_again_it_goes_on_under_its_id_at_once() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let (engine, direct) = start(options(), &store, Duration::ZERO).await;
        let me = engine.instance_id();
        for _ in 0..3 {
            engine.set_heartbeat(false);
            sleep(seconds(90)).await;
            let beats = store.count(Op::Beat);
            store.insert(Row::default());
            engine.set_heartbeat(true);
            quiesce().await;
            assert!(store.count(Op::Beat) > beats && direct.holds_lock(me));
            store.finished().await;
            assert!(engine.is_ready());
        }
        assert_eq!(engine.instance_id(), me);
        engine.drain().await;
    });
}

#[test]
fn what_is_in_hand_goes_on_until_trust_ends_and_is_then_fenced() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let (engine, _direct) = start(options(), &store, seconds(30)).await;
        store.insert(Row::default());
        engine.request_immediate_poll();
        sleep(seconds(1)).await;
        engine.set_heartbeat(false);
        sleep(seconds(3)).await;
        assert_eq!(why(&engine), OFF, "still trusted by what peers last heard");
        sleep(Duration::from_secs(90)).await;
        let fenced = format!("{OFF}; it is fenced: it cannot prove that its leases are its own");
        assert_eq!(why(&engine), fenced);
        assert!(store.settled().is_empty(), "peers may have the row by now");
        engine.set_heartbeat(true);
        store.finished().await;
        assert!(engine.is_ready());
        engine.drain().await;
    });
}

#[test]
fn evicted_while_it_is_off_it_stays_stopped_until_it_is_on_and_comes_back_under_a_fresh_id() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let (engine, direct) = start(options(), &store, seconds(60)).await;
        let first = engine.instance_id();
        store.insert(Row::default());
        engine.request_immediate_poll();
        sleep(seconds(1)).await;
        engine.set_heartbeat(false);
        store.evict(first);
        // It hears of it from a renewal or never; here from a peer's mouth.
        let evicted = engine.recipient::<workpump_actors::message::Evicted>().expect("the warden");
        evicted.do_send(workpump_actors::message::Evicted(first));
        sleep(Duration::from_hours(1)).await;
        assert_eq!(engine.instance_id(), first);
        assert!(
            why(&engine).starts_with("it was evicted, and has no fresh id yet; its heartbeat is disabled")
        );
        engine.set_heartbeat(true);
        sleep(seconds(5)).await;
        let second = engine.instance_id();
        assert_ne!(first, second);
        assert!(engine.is_ready() && store.is_member(second) && direct.holds_lock(second));
        engine.drain().await;
    });
}

#[test]
fn evicted_without_hearing_of_it_the_first_beat_after_the_switch_tells() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let (engine, _direct) = start(options(), &store, Duration::ZERO).await;
        let first = engine.instance_id();
        engine.set_heartbeat(false);
        store.evict(first);
        sleep(seconds(600)).await;
        assert_eq!(engine.instance_id(), first);
        engine.set_heartbeat(true);
        sleep(seconds(5)).await;
        assert_ne!(engine.instance_id(), first);
        assert!(engine.is_ready());
        engine.drain().await;
    });
}

#[test]
fn disabled_from_the_start_it_can_be_switched_on() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut options = options();
        options.heartbeat.enabled = false;
        let (engine, direct) = start(options, &store, Duration::ZERO).await;
        store.insert(Row::default());
        sleep(seconds(600)).await;
        assert!(store.calls().is_empty(), "{:?}", store.calls());
        engine.recipient::<SetHeartbeat>().expect("the warden").do_send(SetHeartbeat(true));
        store.finished().await;
        assert!(engine.is_ready() && direct.holds_lock(engine.instance_id()));
        engine.drain().await;
    });
}

#[test]
fn the_switch_outlives_the_actors() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let (engine, direct) = start(options(), &store, Duration::ZERO).await;
        let me = engine.instance_id();
        engine.set_heartbeat(false);
        quiesce().await;
        let (beats, claims) = (store.count(Op::Beat), store.count(Op::Claim));
        store.insert(Row::default());
        for actor in ["warden", "heartbeat", "notify_gate", "claim"] {
            engine.registry().restart(actor).await.expect("restarts");
            sleep(seconds(100)).await;
            assert_eq!((store.count(Op::Beat), store.count(Op::Claim)), (beats, claims), "{actor}");
            assert!(!direct.holds_lock(me), "{actor}");
        }
        engine.set_heartbeat(true);
        store.finished().await;
        assert!(engine.is_ready() && direct.holds_lock(me));
        engine.drain().await;
    });
}

#[test]
fn a_beat_and_a_lock_that_were_under_way_at_the_switch_undo_nothing() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let (engine, direct) = start(options(), &store, Duration::ZERO).await;
        let me = engine.instance_id();
        store.script(Op::Beat, Reply::Slow(seconds(3)));
        direct.script(workpump_actors::testing::DirectOp::ClaimLock, Reply::Slow(seconds(2)));
        direct.end_session();
        sleep(seconds(1)).await;
        engine.set_heartbeat(false);
        quiesce().await;
        let beats = store.count(Op::Beat);
        sleep(seconds(600)).await;
        assert_eq!(store.count(Op::Beat), beats);
        assert!(!direct.holds_lock(me));
        assert_eq!(why(&engine), OFF);
        engine.drain().await;
    });
}

#[test]
fn every_reason_is_named_and_a_ready_instance_names_none() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut options = options();
        options.claim.enabled = false;
        let (engine, _direct) = start(options, &store, Duration::ZERO).await;
        sleep(seconds(1)).await;
        assert_eq!(why(&engine), "", "whoever wants no claims is ready without them");
        engine.recipient::<Fence>().expect("the warden").do_send(Fence);
        quiesce().await;
        assert_eq!(
            why(&engine),
            "it is fenced: it cannot prove that its leases are its own; claims are disabled (`claim.enabled`)"
        );
        // The second restart comes after a pause.
        for _ in 0..2 {
            engine.registry().crash("settle").expect("it is there");
            quiesce().await;
        }
        assert!(why(&engine).contains("settle is "), "{}", why(&engine));
        let account = engine.observe().await.into_iter().find(|account| account.name == "claim");
        assert_eq!(account.expect("it answers").state, "disabled");
        engine.drain().await;
        assert!(why(&engine).starts_with("it is draining"), "{}", why(&engine));
    });
}
