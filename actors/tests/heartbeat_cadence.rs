//! The heartbeat: when it beats, what it declares, and when it never beats again.

use std::time::Duration;

use tokio::time::sleep;
use workpump_actors::instance::AliveLock;
use workpump_actors::message::{AliveLockChanged, BeatNow, Drain, Observe};
use workpump_actors::options::{LivenessSourceMode, Options};
use workpump_actors::port::{Beat, StoreError};
use workpump_actors::registry::Host;
use workpump_actors::testing::{
    Call, FakeStore, HeartbeatRig, Op, Reply, engine_parts, in_virtual_time, quiesce, runner,
};
use workpump_actors::tree::Engine;
use workpump_actors::work::Category;

fn seconds(value: u64) -> Duration {
    Duration::from_secs(value)
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("connection refused".to_owned())
}

fn beats(store: &FakeStore) -> Vec<Beat> {
    store
        .calls()
        .into_iter()
        .filter_map(|call| match call {
            Call::Beat(beat) => Some(beat),
            _ => None,
        })
        .collect()
}

fn table_only() -> Options {
    let mut options = Options::default();
    options.heartbeat.liveness_source_mode = LivenessSourceMode::HeartbeatTableOnly;
    options
}

async fn tell(rig: &HeartbeatRig, lock: AliveLock) {
    rig.addr.send(AliveLockChanged(lock)).await.expect("alive");
}

#[test]
fn it_beats_every_thirty_seconds_without_a_source_for_the_lock() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let _rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 4).await;
        assert_eq!(store.gaps(Op::Beat), [30_000, 30_000, 30_000]);
    });
}

#[test]
fn it_beats_slowly_while_the_lock_is_held_and_fast_when_it_is_not() {
    in_virtual_time(async {
        for (lock, gap) in [(AliveLock::Held, 60_000), (AliveLock::NotHeld, 30_000)] {
            let store = FakeStore::new();
            let rig = HeartbeatRig::start(&Options::default(), &store);
            tell(&rig, lock).await;
            sleep(seconds(301)).await;
            let gaps = store.gaps(Op::Beat);
            assert!(gaps.iter().skip(1).all(|other| *other == gap), "{gaps:?}");
            let last = beats(&store).pop().expect("beats");
            assert_eq!(last.interval.as_millis(), gap);
            assert_eq!(last.lock_declared, lock == AliveLock::Held);
        }
    });
}

#[test]
fn the_table_only_mode_beats_fast_and_declares_nothing_although_the_lock_is_held() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = HeartbeatRig::start(&table_only(), &store);
        sleep(seconds(10)).await;
        tell(&rig, AliveLock::Held).await;
        store.called(Op::Beat, 4).await;
        assert_eq!(store.gaps(Op::Beat), [30_000, 30_000, 30_000]);
        assert!(beats(&store).iter().all(|beat| !beat.lock_declared && beat.interval == seconds(30)));
    });
}

#[test]
fn a_lost_lock_beats_at_once_then_every_second_for_twice_the_grace_and_then_fast() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = HeartbeatRig::start(&Options::default(), &store);
        sleep(seconds(1)).await;
        tell(&rig, AliveLock::Held).await;
        sleep(seconds(20)).await;
        tell(&rig, AliveLock::NotHeld).await;
        store.called(Op::Beat, 14).await;
        let gaps = store.gaps(Op::Beat);
        assert_eq!(gaps[..2], [1_000, 20_000]);
        assert_eq!(gaps[2..12], [1_000; 10]);
        assert_eq!(gaps[12..], [30_000]);
        let declared: Vec<_> = beats(&store).iter().map(|beat| beat.lock_declared).collect();
        assert_eq!(declared[..3], [false, true, false]);
        assert!(beats(&store)[2..].iter().all(|beat| beat.interval == seconds(30)), "as peers are told");
    });
}

#[test]
fn a_gained_lock_beats_at_once_and_then_slowly() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = HeartbeatRig::start(&Options::default(), &store);
        sleep(seconds(70)).await;
        tell(&rig, AliveLock::Held).await;
        store.called(Op::Beat, 6).await;
        assert_eq!(store.gaps(Op::Beat), [30_000, 30_000, 10_000, 60_000, 60_000]);
    });
}

#[test]
fn a_lock_that_changes_during_a_beat_is_declared_right_after_it() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.script(Op::Beat, Reply::Slow(seconds(3)));
        let rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        tell(&rig, AliveLock::Held).await;
        store.called(Op::Beat, 3).await;
        assert_eq!(store.gaps(Op::Beat), [3_000, 60_000]);
    });
}

#[test]
fn a_slow_answer_does_not_delay_the_next_beat_and_never_bursts() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.script(Op::Beat, Reply::Slow(seconds(9)));
        let _rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 3).await;
        assert_eq!(store.gaps(Op::Beat), [30_000, 30_000]);
    });
}

#[test]
fn a_beat_without_an_answer_is_given_up_and_sent_again() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.script(Op::Beat, Reply::Hang);
        let mut rig = HeartbeatRig::start(&Options::default(), &store);
        rig.unfence.next().await;
        assert_eq!(store.gaps(Op::Beat), [10_250]);
        let account = rig.addr.send(Observe).await.expect("alive");
        assert_eq!(account.last_error.as_deref(), Some("database unavailable: no answer within 10000 ms"));
    });
}

#[test]
fn errors_are_retried_with_a_pause_that_doubles_up_to_the_cadence_and_never_end_the_loop() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let _rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        store.always(|call| matches!(call, Call::Beat(_)).then(|| Reply::Fail(unavailable())));
        store.called(Op::Beat, 12).await;
        assert_eq!(
            store.gaps(Op::Beat),
            [30_000, 250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000]
        );
        store.recover();
        store.called(Op::Beat, 14).await;
        store.always(|call| matches!(call, Call::Beat(_)).then(|| Reply::Fail(unavailable())));
        store.called(Op::Beat, 17).await;
        assert_eq!(store.gaps(Op::Beat)[14..], [250, 500], "one good beat resets the pause");
    });
}

#[test]
fn it_waits_for_the_schema_with_a_capped_pause() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.set_schema(false);
        store.script(Op::Schema, Reply::Fail(unavailable()));
        let mut rig = HeartbeatRig::start(&Options::default(), &store);
        sleep(seconds(30)).await;
        assert_eq!(store.count(Op::Beat), 0);
        assert_eq!(store.gaps(Op::Schema)[..7], [250, 500, 1_000, 2_000, 4_000, 5_000, 5_000]);
        store.set_schema(true);
        rig.unfence.next().await;
        assert_eq!(store.count(Op::Beat), 1);
        let asked = store.count(Op::Schema);
        sleep(seconds(300)).await;
        assert_eq!(store.count(Op::Schema), asked, "the schema is asked for once it is there no more");
    });
}

#[test]
fn only_the_first_accepted_beat_opens_the_fence() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.script(Op::Beat, Reply::Fail(unavailable()));
        let mut rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        quiesce().await;
        assert!(rig.unfence.take().is_empty());
        sleep(seconds(100)).await;
        assert_eq!(rig.unfence.take().len(), 1);
    });
}

#[test]
fn an_evicted_instance_says_so_once_and_never_beats_again() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        store.evict(rig.identity.id);
        assert_eq!(rig.evicted.next().await.0, rig.identity.id);
        rig.addr.do_send(BeatNow);
        tell(&rig, AliveLock::Held).await;
        sleep(seconds(3_600)).await;
        assert_eq!(store.count(Op::Beat), 2);
        assert!(rig.evicted.take().is_empty());
        let drained = rig.addr.send(Drain).await.expect("alive");
        assert!(!drained.deregistered);
        assert_eq!(store.count(Op::Deregister), 0);
    });
}

#[test]
fn a_disabled_heartbeat_sends_nothing_at_all() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut options = Options::default();
        options.heartbeat.enabled = false;
        let rig = HeartbeatRig::start(&options, &store);
        rig.addr.do_send(BeatNow);
        tell(&rig, AliveLock::Held).await;
        sleep(seconds(3_600)).await;
        assert!(!rig.addr.send(Drain).await.expect("alive").deregistered);
        assert!(store.calls().is_empty());
    });
}

#[test]
fn a_drain_deregisters_and_ends_the_beats() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 2).await;
        assert!(rig.addr.send(Drain).await.expect("alive").deregistered);
        assert!(!store.is_member(rig.identity.id));
        rig.addr.do_send(BeatNow);
        sleep(seconds(3_600)).await;
        assert_eq!((store.count(Op::Beat), store.count(Op::Deregister)), (2, 1));
    });
}

#[test]
fn a_beat_under_way_cannot_register_an_instance_that_has_left() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        store.script(Op::Beat, Reply::Slow(seconds(5)));
        store.called(Op::Beat, 2).await;
        assert!(rig.addr.send(Drain).await.expect("alive").deregistered);
        sleep(seconds(60)).await;
        assert!(!store.is_member(rig.identity.id));
        assert!(matches!(store.calls().last(), Some(Call::Deregister(_))));
    });
}

#[test]
fn a_drain_answers_although_the_database_does_not() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        quiesce().await;
        store.script(Op::Deregister, Reply::Hang);
        let before = tokio::time::Instant::now();
        assert!(!rig.addr.send(Drain).await.expect("alive").deregistered);
        assert_eq!(before.elapsed(), seconds(10));
    });
}

/// Peers ring it for these and for no other.
#[test]
fn beats_declare_what_the_engine_runs_in_order() {
    in_virtual_time(async {
        let runs = |some: &[Category]| {
            some.iter().map(|category| (*category, runner(1, |_| async { Ok(()) }))).collect::<Vec<_>>()
        };
        let (reversed, nothing) = ([Category::Receptor, Category::Inbox, Category::Outbox], []);
        for (some, expected, accepts) in [
            (&reversed[..], &[Category::Outbox, Category::Inbox, Category::Receptor][..], true),
            (&nothing[..], &[][..], false),
        ] {
            let store = FakeStore::new();
            let parts = engine_parts(Options::default(), &store, runs(some));
            let engine = Engine::start_on(parts, Host::current()).await.expect("starts");
            store.called(Op::Beat, 1).await;
            let beat = beats(&store).remove(0);
            assert_eq!((&*beat.categories, beat.accepts_work), (expected, accepts));
            engine.drain().await;
        }
    });
}

#[test]
fn the_identity_is_passed_through() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        let beat = beats(&store).remove(0);
        assert_eq!(beat.identity.id, rig.identity.id);
        assert_eq!(
            (beat.identity.service_name.as_str(), beat.identity.host_name.as_str(), beat.identity.process_id),
            ("test", "here", 1)
        );
        assert!(beat.accepts_work);
        assert_eq!(*beat.categories, [Category::Outbox, Category::Inbox]);
    });
}
