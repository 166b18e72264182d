//! Claiming: when the first claim goes, what wakes it, how much it takes, and what errors do.

use std::time::Duration;

use tokio::time::sleep;
use uuid::Uuid;
use workpump_actors::instance::{AliveLock, Gate};
use workpump_actors::message::{AliveLockChanged, Drain, Observe, Pause, RequestImmediatePoll, Resume};
use workpump_actors::options::{OnEvicted, Options};
use workpump_actors::port::StoreError;
use workpump_actors::registry::Host;
use workpump_actors::testing::{
    Call, ClaimRig, FakeStore, Op, Reply, Row, engine_parts, in_virtual_time, quiesce, runner,
};
use workpump_actors::tree::Engine;
use workpump_actors::work::Category;

fn millis(value: u64) -> Duration {
    Duration::from_millis(value)
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("connection refused".to_owned())
}

#[test]
fn the_first_claim_comes_after_the_first_accepted_heartbeat() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.script(Op::Beat, Reply::Slow(millis(700)));
        let runners = vec![(Category::Inbox, runner(1, |_| async { Ok(()) }))];
        let engine = Engine::start_on(engine_parts(Options::default(), &store, runners), Host::current())
            .await
            .expect("starts");
        store.called(Op::Claim, 1).await;
        assert_eq!(store.times(Op::Beat)[0], Duration::ZERO);
        assert!(store.times(Op::Claim)[0] >= millis(700));
        let order: Vec<_> = store.calls().into_iter().take(3).collect();
        assert!(matches!(order[..], [Call::Schema, Call::Beat(_), Call::Claim(_)]), "{order:?}");
        engine.drain().await;
    });
}

#[test]
fn a_schema_that_is_not_there_yet_holds_every_statement_back() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.set_schema(false);
        let runners = vec![(Category::Inbox, runner(1, |_| async { Ok(()) }))];
        let parts = engine_parts(Options::default(), &store, runners);
        let starting = tokio::task::spawn_local(Engine::start_on(parts, Host::current()));
        sleep(Duration::from_secs(5)).await;
        assert!(store.count(Op::Schema) > 3);
        assert_eq!((store.count(Op::Beat), store.count(Op::Claim)), (0, 0));
        store.set_schema(true);
        let engine = starting.await.expect("not aborted").expect("starts");
        store.called(Op::Claim, 1).await;
        engine.drain().await;
    });
}

#[test]
fn claims_go_on_without_any_signal() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let _rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 3).await;
        assert_eq!(store.gaps(Op::Claim), [250, 500]);
    });
}

#[test]
fn a_wake_beats_any_depth_of_backoff() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = ClaimRig::start_open(Options::default(), &store);
        sleep(Duration::from_mins(1)).await;
        let before = store.count(Op::Claim);
        rig.addr.send(RequestImmediatePoll).await.expect("alive");
        quiesce().await;
        assert_eq!(store.count(Op::Claim), before + 1);
    });
}

#[test]
fn a_hundred_wakes_during_a_claim_cause_one_follow_up() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.script(Op::Claim, Reply::Slow(Duration::from_secs(2)));
        let rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 1).await;
        for _ in 0..100 {
            rig.addr.do_send(RequestImmediatePoll);
        }
        sleep(millis(2_001)).await;
        assert_eq!(store.count(Op::Claim), 2);
        sleep(millis(200)).await;
        assert_eq!(store.count(Op::Claim), 2);
    });
}

#[test]
fn a_disabled_claimer_sends_no_statement_at_all() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut options = Options::default();
        options.claim.enabled = false;
        options.claim.enable_safety_net_poll = false;
        let rig = ClaimRig::start_open(options, &store);
        rig.addr.do_send(RequestImmediatePoll);
        rig.set_gate(Gate::Available);
        sleep(Duration::from_mins(10)).await;
        assert!(store.calls().is_empty());
        assert_eq!(rig.addr.send(Observe).await.expect("alive").state, "disabled");
    });
}

#[test]
fn without_a_heartbeat_nothing_is_claimed() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut options = Options::default();
        options.heartbeat.enabled = false;
        let runners = vec![(Category::Inbox, runner(1, |_| async { Ok(()) }))];
        let engine =
            Engine::start_on(engine_parts(options, &store, runners), Host::current()).await.expect("starts");
        sleep(Duration::from_mins(10)).await;
        assert!(store.calls().is_empty(), "{:?}", store.calls());
        assert!(!engine.is_ready());
        assert!(!engine.drain().await.deregistered);
        assert!(store.calls().is_empty());
    });
}

#[test]
fn it_never_asks_for_more_rows_than_it_has_permits() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(10, &Row::default());
        let mut options = Options::default();
        options.dispatch.max_in_flight = 4;
        let mut rig = ClaimRig::start_open(options, &store);
        let first = rig.dispatch.next().await;
        assert_eq!(first.deliveries.len(), 4);
        sleep(Duration::from_mins(1)).await;
        assert_eq!(store.count(Op::Claim), 1, "nothing is claimed without a permit");
        assert_eq!(rig.permits.available_permits(), 0);
        let mut deliveries = first.deliveries;
        drop(deliveries.split_off(1));
        let second = rig.dispatch.next().await;
        assert_eq!(second.deliveries.len(), 3);
        let asked: Vec<_> = store
            .calls()
            .iter()
            .filter_map(|call| match call {
                Call::Claim(request) => Some(request.max_rows),
                _ => None,
            })
            .collect();
        assert_eq!(asked, [4, 3]);
    });
}

#[test]
fn a_claim_that_comes_back_full_is_followed_by_another_at_once() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(25, &Row::default());
        let mut options = Options::default();
        options.claim.max_streams_per_batch = 10;
        let mut rig = ClaimRig::start_open(options, &store);
        let mut held = Vec::new();
        for expected in [10, 10, 5] {
            let batch = rig.dispatch.next().await;
            assert_eq!(batch.deliveries.len(), expected);
            held.push(batch);
        }
        assert_eq!(store.gaps(Op::Claim), [0, 0]);
        assert_eq!(rig.in_flight.len(), 25);
        assert_eq!(rig.permits.available_permits(), 2_000 - 25);
        drop(held);
        assert_eq!((rig.in_flight.len(), rig.permits.available_permits()), (0, 2_000));
    });
}

#[test]
fn permits_that_brought_no_row_come_back() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 5).await;
        quiesce().await;
        assert_eq!(rig.permits.available_permits(), 2_000);
        store.always(|_| Some(Reply::Fail(unavailable())));
        store.called(Op::ReleaseUnheld, 3).await;
        quiesce().await;
        assert_eq!(rig.permits.available_permits(), 2_000);
    });
}

#[test]
fn a_wake_while_it_waits_for_permits_is_served_by_the_claim_that_follows() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(3, &Row::default());
        let mut options = Options::default();
        options.dispatch.max_in_flight = 2;
        let mut rig = ClaimRig::start_open(options, &store);
        let held = rig.dispatch.next().await;
        for _ in 0..10 {
            rig.addr.send(RequestImmediatePoll).await.expect("alive");
        }
        quiesce().await;
        assert_eq!(store.count(Op::Claim), 1);
        drop(held);
        assert_eq!(rig.dispatch.next().await.deliveries.len(), 1);
        quiesce().await;
        assert_eq!(store.count(Op::Claim), 2);
    });
}

#[test]
fn a_fence_and_a_pause_stop_claims_and_their_end_resumes_them_at_once() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 4).await;
        rig.addr.send(Pause).await.expect("alive");
        sleep(Duration::from_mins(1)).await;
        assert_eq!(store.count(Op::Claim), 4);
        rig.addr.send(Resume).await.expect("alive");
        quiesce().await;
        assert_eq!(store.count(Op::Claim), 5);
        rig.fence();
        rig.addr.send(RequestImmediatePoll).await.expect("alive");
        sleep(Duration::from_mins(1)).await;
        assert_eq!(store.count(Op::Claim), 5);
        rig.unfence();
        quiesce().await;
        assert_eq!(store.count(Op::Claim), 6);
    });
}

#[test]
fn a_pause_and_a_resume_in_one_breath_never_make_two_claims_overlap() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.always(|call| matches!(call, Call::Claim(_)).then(|| Reply::Slow(millis(40))));
        let mut options = Options::default();
        options.claim.polling_interval_milliseconds = 50;
        options.claim.polling_max_interval_milliseconds = 0;
        options.dispatch.max_in_flight = 5_000;
        let rig = ClaimRig::start_open(options, &store);
        for _ in 0..200 {
            rig.addr.do_send(Pause);
            sleep(millis(67)).await;
            rig.addr.do_send(Resume);
            rig.addr.do_send(Pause);
            rig.addr.do_send(Resume);
            sleep(millis(17)).await;
        }
        let gaps = store.gaps(Op::Claim);
        assert!(gaps.iter().all(|gap| *gap >= 40), "{gaps:?}");
        rig.addr.do_send(Pause);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(rig.permits.available_permits(), 5_000);
    });
}

#[test]
fn rows_that_arrive_after_the_drain_began_are_handed_back_and_not_run() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(3, &Row::default());
        store.script(Op::Claim, Reply::Slow(Duration::from_secs(2)));
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 1).await;
        rig.addr.send(Drain).await.expect("alive");
        assert_eq!(rig.hand_back.take().iter().map(|back| back.deliveries.len()).sum::<usize>(), 3);
        assert!(rig.dispatch.take().is_empty());
        sleep(Duration::from_mins(1)).await;
        assert_eq!(store.count(Op::Claim), 1);
        assert_eq!(rig.permits.available_permits(), 2_000);
    });
}

#[test]
fn a_drain_does_not_wait_for_ever_for_a_claim_that_hangs() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.script(Op::Claim, Reply::Hang);
        let rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 1).await;
        let before = tokio::time::Instant::now();
        rig.addr.send(Drain).await.expect("alive");
        assert_eq!(before.elapsed(), Duration::from_secs(10));
    });
}

#[test]
fn only_categories_with_a_runner_are_claimed() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let foreign = store.insert(Row { category: Category::Outbox, ..Row::default() });
        store.insert(Row::of_stream(Uuid::now_v7()));
        let runners = vec![(Category::Inbox, runner(1, |_| async { Ok(()) }))];
        let engine = Engine::start_on(engine_parts(Options::default(), &store, runners), Host::current())
            .await
            .expect("starts");
        sleep(Duration::from_secs(5)).await;
        assert_eq!(store.unfinished(), 1);
        assert_eq!(store.attempts(foreign), Some(0));
        engine.drain().await;
    });
}

#[test]
fn a_request_says_what_the_options_say() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut options = Options::default();
        options.claim.max_streams_per_batch = 77;
        options.claim.max_batch_megabytes = 3;
        options.claim.lease_seconds = 120;
        options.claim.partition_count = 11;
        options.dispatch.stream_run = 5;
        let rig = ClaimRig::start_open(options, &store);
        store.called(Op::Claim, 1).await;
        let Some(Call::Claim(request)) = store.calls().into_iter().next() else { panic!("a claim") };
        assert_eq!(request.instance, rig.instance);
        assert_eq!((request.max_rows, request.max_bytes), (77, 3 << 20));
        assert_eq!((request.lease, request.partition_count), (Duration::from_mins(2), 11));
        assert_eq!((request.stream_run, request.categories.len()), (5, 4));
    });
}

#[test]
fn an_engine_that_is_evicted_stops_everything_and_is_not_ready() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let runners = vec![(
            Category::Inbox,
            runner(1, |job| async move {
                job.cancel.cancelled().await;
                Ok(())
            }),
        )];
        let mut options = Options::default();
        options.liveness.on_evicted = OnEvicted::Stop;
        let parts = engine_parts(options, &store, runners);
        let instance = parts.identity.id;
        let engine = Engine::start_on(parts, Host::current()).await.expect("starts");
        quiesce().await;
        assert!(engine.is_ready());
        store.insert(Row::default());
        engine.request_immediate_poll();
        store.called(Op::Claim, 2).await;
        store.evict(instance);
        if let Some(lock) = engine.recipient::<AliveLockChanged>() {
            lock.do_send(AliveLockChanged(AliveLock::Held));
        }
        quiesce().await;
        assert!(!engine.is_ready());
        let calls = store.calls().len();
        sleep(Duration::from_mins(10)).await;
        assert_eq!(store.calls().len(), calls, "nothing is sent under a burnt id");
        assert!(store.settled().is_empty());
        assert!(!engine.drain().await.deregistered);
    });
}
