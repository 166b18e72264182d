//! The beating actor dies and the next one goes on, and never registers an instance that was evicted or has left.

use std::time::Duration;

use tokio::time::sleep;
use workpump_actors::instance::AliveLock;
use workpump_actors::message::{AliveLockChanged, BeatNow, Drain, Observe};
use workpump_actors::options::Options;
use workpump_actors::port::StoreError;
use workpump_actors::testing::{Call, FakeStore, HeartbeatRig, Op, Reply, in_virtual_time, quiesce};

#[test]
fn the_next_heart_beats_at_once_and_says_that_the_instance_is_a_member() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = HeartbeatRig::start(&Options::default(), &store);
        rig.unfence.next().await;
        store.script(Op::Beat, Reply::Hang);
        store.called(Op::Beat, 2).await;
        rig.restart().await;
        quiesce().await;
        assert_eq!(store.times(Op::Beat), [0, 30, 30].map(Duration::from_secs));
        assert_eq!(store.count(Op::Schema), 1, "the schema was there");
        assert_eq!(rig.unfence.take().len(), 1);
        sleep(Duration::from_secs(61)).await;
        assert_eq!(store.gaps(Op::Beat)[2..], [30_000, 30_000]);
    });
}

#[test]
fn a_heart_that_dies_before_the_schema_is_there_leaves_the_wait_to_the_next() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.set_schema(false);
        let mut rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Schema, 2).await;
        rig.restart().await;
        sleep(Duration::from_secs(10)).await;
        assert_eq!(store.count(Op::Beat), 0);
        store.set_schema(true);
        rig.unfence.next().await;
    });
}

#[test]
fn an_evicted_instance_never_beats_again_also_after_a_restart() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        quiesce().await;
        // The one that was to hear it died of it.
        rig.standing.evict();
        rig.restart().await;
        rig.addr.do_send(BeatNow);
        sleep(Duration::from_hours(1)).await;
        assert_eq!(store.count(Op::Beat), 1);
        assert_eq!(rig.addr.send(Observe).await.expect("alive").state, "evicted");
        assert!(!rig.addr.send(Drain).await.expect("alive").deregistered);
        assert_eq!(store.count(Op::Deregister), 0);
    });
}

#[test]
fn an_instance_that_has_left_never_registers_again() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        quiesce().await;
        assert!(rig.addr.send(Drain).await.expect("alive").deregistered);
        rig.restart().await;
        rig.addr.do_send(BeatNow);
        sleep(Duration::from_hours(1)).await;
        assert!(!store.is_member(rig.identity.id));
        assert_eq!((store.count(Op::Beat), store.count(Op::Deregister)), (1, 1));
        assert!(rig.addr.send(Drain).await.expect("alive").deregistered, "the account of the whole drain");
        assert_eq!(store.count(Op::Deregister), 1);
    });
}

#[test]
fn a_heart_that_dies_while_the_instance_leaves_has_the_next_one_finish_it() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        quiesce().await;
        store.script(Op::Deregister, Reply::Hang);
        let first = tokio::task::spawn_local(rig.addr.send(Drain));
        store.called(Op::Deregister, 1).await;
        rig.restart().await;
        assert!(first.await.expect("not aborted").is_err(), "whoever asked learns of the death");
        sleep(Duration::from_mins(5)).await;
        assert_eq!(store.count(Op::Beat), 1, "it waits to be asked, and does not beat");
        assert!(rig.addr.send(Drain).await.expect("alive").deregistered);
        assert!(!store.is_member(rig.identity.id));
        assert!(matches!(store.calls().last(), Some(Call::Deregister(_))));
    });
}

#[test]
fn leaving_that_failed_is_tried_again_when_it_is_asked_for_again() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        quiesce().await;
        store.script(Op::Deregister, Reply::Fail(StoreError::Unavailable("away".to_owned())));
        assert!(!rig.addr.send(Drain).await.expect("alive").deregistered);
        assert!(rig.addr.send(Drain).await.expect("alive").deregistered);
    });
}

#[test]
fn the_next_heart_beats_on_while_the_others_are_drained() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        rig.standing.drain();
        rig.restart().await;
        sleep(Duration::from_secs(61)).await;
        assert!(store.count(Op::Beat) >= 4, "{}", store.count(Op::Beat));
        assert!(rig.addr.send(Drain).await.expect("alive").deregistered);
    });
}

#[test]
fn the_alive_lock_is_known_after_a_restart() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        rig.addr.send(AliveLockChanged(AliveLock::Held)).await.expect("alive");
        store.called(Op::Beat, 2).await;
        quiesce().await;
        rig.restart().await;
        quiesce().await;
        let Some(Call::Beat(beat)) = store.calls().pop() else { panic!("it beats at once") };
        assert!(beat.lock_declared);
        assert_eq!(beat.interval, Duration::from_mins(1));
        sleep(Duration::from_secs(125)).await;
        assert_eq!(store.gaps(Op::Beat)[2..], [60_000, 60_000]);
    });
}
