//! The whole engine: starting, working, draining, and leaving nothing behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use uuid::Uuid;
use workpump_actors::message::{Account, Fence, Unfence};
use workpump_actors::options::Options;
use workpump_actors::port::{StoreError, Verdict};
use workpump_actors::registry::Host;
use workpump_actors::runner::{Failure, Job, Runner};
use workpump_actors::testing::{
    Call, FakeStore, Op, Reply, Row, engine_parts, in_virtual_time, quiesce, runner,
};
use workpump_actors::tree::{Engine, StartError};
use workpump_actors::work::Category;

async fn start(store: &Arc<FakeStore>, runner: Arc<dyn Runner>) -> Engine {
    start_with(Options::default(), store, runner).await
}

async fn start_with(options: Options, store: &Arc<FakeStore>, runner: Arc<dyn Runner>) -> Engine {
    let parts = engine_parts(options, store, vec![(Category::Inbox, runner)]);
    Engine::start_on(parts, Host::current()).await.expect("starts")
}

fn sleepy(duration: Duration) -> Arc<dyn Runner> {
    runner(1, move |_| async move {
        sleep(duration).await;
        Ok(())
    })
}

fn account(accounts: &[Account], name: &str) -> Account {
    accounts.iter().find(|account| account.name == name).cloned().expect("an account")
}

#[test]
fn work_flows_from_the_table_through_the_handler_and_back() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.members_only();
        let stream = Uuid::now_v7();
        let keys = store.insert_many(500, &Row::of_stream(stream));
        store.insert_many(2_500, &Row::default());
        let engine = start(&store, runner(1, |_| async { Ok(()) })).await;
        store.finished().await;
        let order: Vec<_> =
            store.settled().iter().map(|(key, ..)| *key).filter(|key| keys.contains(key)).collect();
        assert_eq!(order, keys, "a stream is settled in order");
        assert!(store.settled().iter().all(|(.., verdict)| *verdict == Verdict::Complete));
        quiesce().await;
        let accounts = engine.observe().await;
        assert_eq!(
            accounts.iter().map(|account| account.name).collect::<Vec<_>>(),
            ["lease_renewal", "notify_gate", "heartbeat", "settle", "dispatch", "stale_sweep", "claim"]
        );
        let claim = account(&accounts, "claim");
        assert_eq!((claim.counter("rows"), claim.counter("in_flight")), (3_000, 0));
        assert_eq!(claim.counter("free_permits"), 2_000);
        assert_eq!(account(&accounts, "settle").counter("applied"), 3_000);
        engine.drain().await;
    });
}

#[test]
fn a_stream_longer_than_a_run_goes_on_as_soon_as_its_run_is_written() {
    in_virtual_time(async {
        for (stream_run, max_in_flight) in [(10, 1_000), (1, 1_000), (100, 7)] {
            let store = FakeStore::new();
            let keys = store.insert_many(300, &Row::of_stream(Uuid::now_v7()));
            let mut options = Options::default();
            options.dispatch.stream_run = stream_run;
            options.dispatch.max_in_flight = max_in_flight;
            let before = Instant::now();
            let engine = start_with(options, &store, runner(1, |_| async { Ok(()) })).await;
            store.finished().await;
            assert!(before.elapsed() < Duration::from_secs(8), "{stream_run}: {:?}", before.elapsed());
            assert_eq!(store.settled().iter().map(|(key, ..)| *key).collect::<Vec<_>>(), keys);
            let claims = store.count(Op::Claim);
            assert!(claims <= 2 * 300 / stream_run.min(max_in_flight) as usize + 2, "{stream_run}: {claims}");
            engine.drain().await;
        }
    });
}

#[test]
fn a_run_that_left_nothing_behind_wakes_nobody() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(99, &Row::of_stream(Uuid::now_v7()));
        let engine = start(&store, runner(1, |_| async { Ok(()) })).await;
        store.finished().await;
        store.called(Op::Claim, 3).await;
        assert_eq!(store.gaps(Op::Claim)[..2], [250, 250]);
        engine.drain().await;
    });
}

#[test]
fn a_row_that_fails_comes_back_after_its_pause_and_ends_as_a_dead_letter() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let key = store.insert(Row::default());
        let engine = start(&store, runner(1, |_| async { Err(Failure::retry("no route")) })).await;
        store.finished().await;
        let Some(Verdict::DeadLetter { error, .. }) = store.verdict(key) else { panic!("a dead letter") };
        assert_eq!(error, "no route");
        assert_eq!(store.attempts(key), Some(10));
        engine.drain().await;
    });
}

#[test]
fn a_drain_hands_back_what_was_not_started_and_waits_for_what_was() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let keys = store.insert_many(5, &Row::of_stream(Uuid::now_v7()));
        let single = store.insert(Row::default());
        let engine = start(&store, sleepy(Duration::from_secs(5))).await;
        store.called(Op::Claim, 1).await;
        quiesce().await;
        let before = Instant::now();
        let report = engine.drain().await;
        assert!(before.elapsed() < Duration::from_secs(6));
        assert_eq!((report.released, report.finished, report.abandoned), (4, 2, 0));
        assert_eq!((report.settled + report.unsettled, report.deregistered), (6, true));
        assert_eq!(store.verdict(keys[0]), Some(Verdict::Complete));
        assert_eq!(store.verdict(single), Some(Verdict::Complete));
        assert_eq!(store.attempts(keys[1]), Some(0), "the attempt was refunded");
        assert_eq!(store.leased(), 0);
        assert!(matches!(store.calls().last(), Some(Call::Deregister(_))), "the last write is to leave");
        assert!(!engine.is_ready());
    });
}

#[test]
fn a_drain_cancels_handlers_and_then_abandons_those_that_do_not_listen() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let listened = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&listened);
        let deaf = Arc::new(());
        let held = Arc::clone(&deaf);
        let mixed = runner(1, move |job: Job| {
            let (count, held) = (Arc::clone(&count), Arc::clone(&held));
            async move {
                if job.work.seq == 0 {
                    std::future::pending::<()>().await;
                }
                job.cancel.cancelled().await;
                count.fetch_add(1, Ordering::Relaxed);
                drop(held);
                Err(Failure::retry("told to stop"))
            }
        });
        store.insert_many(3, &Row::default());
        let engine = start(&store, mixed).await;
        store.called(Op::Claim, 1).await;
        quiesce().await;
        let before = Instant::now();
        let report = engine.drain().await;
        assert_eq!(before.elapsed(), Duration::from_secs(30));
        assert_eq!((report.finished, report.abandoned), (2, 1));
        assert_eq!(listened.load(Ordering::Relaxed), 2);
        assert_eq!(store.count(Op::Deregister), 1);
        assert_eq!(store.leased(), 0, "leaving hands back the lease of the abandoned row");
        drop(engine);
        quiesce().await;
        assert_eq!(Arc::strong_count(&deaf), 1, "the abandoned handler was ended and its runner is gone");
    });
}

#[test]
fn a_drain_deadline_of_zero_waits_for_nobody() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(3, &Row::default());
        let mut options = Options::default();
        options.dispatch.drain_deadline_seconds = 0;
        let engine = start_with(options, &store, sleepy(Duration::from_hours(1))).await;
        store.called(Op::Claim, 1).await;
        quiesce().await;
        let before = Instant::now();
        let report = engine.drain().await;
        assert_eq!((report.abandoned, report.deregistered), (3, true));
        assert!(before.elapsed() < Duration::from_millis(100));
    });
}

#[test]
fn a_second_drain_gives_the_same_report() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(3, &Row::default());
        let engine = start(&store, sleepy(Duration::from_secs(3))).await;
        store.called(Op::Claim, 1).await;
        quiesce().await;
        let (one, two) = futures_util::future::join(engine.drain(), engine.drain()).await;
        assert_eq!(one, two);
        assert_eq!(engine.drain().await, one);
        assert_eq!((one.finished, store.count(Op::Deregister)), (3, 1));
    });
}

#[test]
fn all_permits_are_back_after_failures_panics_and_retries() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(200, &Row::default());
        for _ in 0..10 {
            store.insert_many(10, &Row::of_stream(Uuid::now_v7()));
        }
        let wild = runner(1, |job: Job| async move {
            match (job.work.seq + i64::from(job.work.attempts)) % 5 {
                0 => Err(Failure::retry("no")),
                1 => panic!("wild"),
                2 => Err(Failure::permanent("never")),
                _ => {
                    sleep(Duration::from_millis(5)).await;
                    Ok(())
                }
            }
        });
        let engine = start(&store, wild).await;
        store.finished().await;
        sleep(Duration::from_secs(1)).await;
        let claim = account(&engine.observe().await, "claim");
        assert_eq!((claim.counter("free_permits"), claim.counter("in_flight")), (2_000, 0));
        engine.drain().await;
        assert_eq!(store.leased(), 0);
    });
}

#[test]
fn a_database_that_goes_away_and_comes_back_loses_nothing() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.members_only();
        let engine = start(&store, sleepy(Duration::from_millis(20))).await;
        for round in 0..5 {
            store.insert_many(300, &Row::of_stream(Uuid::now_v7()));
            store.insert_many(100, &Row::default());
            sleep(Duration::from_millis(100 * round)).await;
            store.always(|call| match call {
                Call::Beat(_) | Call::Schema | Call::Deregister(_) => None,
                Call::Claim(_) => Some(Reply::Lose(StoreError::Unavailable("cut".to_owned()))),
                _ => Some(Reply::Fail(StoreError::Unavailable("cut".to_owned()))),
            });
            sleep(Duration::from_secs(20)).await;
            store.recover();
        }
        store.finished().await;
        assert!(
            store.settled().iter().filter(|(.., verdict)| *verdict == Verdict::Complete).count() == 2_000
        );
        engine.drain().await;
    });
}

#[test]
fn a_start_without_a_database_names_the_child_and_the_cause() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.always(|_| Some(Reply::Fail(StoreError::Unavailable("connection refused".to_owned()))));
        let parts = engine_parts(Options::default(), &store, Vec::new());
        let error = Engine::start_on(parts, Host::current()).await.expect_err("no database");
        assert_eq!(
            error.to_string(),
            "heartbeat did not start: not ready within 10000 ms: database unavailable: connection refused"
        );
        let calls = store.calls().len();
        sleep(Duration::from_mins(5)).await;
        assert_eq!(store.calls().len(), calls, "nothing is left running");
    });
}

#[test]
fn an_engine_that_may_not_claim_starts_without_a_database() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.always(|_| Some(Reply::Fail(StoreError::Unavailable("connection refused".to_owned()))));
        let mut options = Options::default();
        options.claim.enabled = false;
        let engine = start_with(options, &store, runner(1, |_| async { Ok(()) })).await;
        assert!(!engine.is_ready());
        store.recover();
        sleep(Duration::from_mins(1)).await;
        assert!(engine.is_ready());
        assert_eq!(store.count(Op::Claim), 0);
        assert!(engine.drain().await.deregistered);
    });
}

#[test]
fn a_drain_whose_caller_went_away_goes_on_and_reports_to_the_next() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(3, &Row::default());
        let engine = start(&store, sleepy(Duration::from_secs(10))).await;
        store.called(Op::Claim, 1).await;
        quiesce().await;
        assert!(tokio::time::timeout(Duration::from_secs(2), engine.drain()).await.is_err());
        sleep(Duration::from_secs(20)).await;
        assert_eq!(store.count(Op::Deregister), 1);
        let report = engine.drain().await;
        assert_eq!((report.finished, report.settled, report.deregistered), (3, 3, true));
    });
}

#[test]
fn options_that_cannot_work_start_nothing() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut options = Options::default();
        options.dispatch.max_in_flight = 0;
        let parts = engine_parts(options, &store, Vec::new());
        let error = Engine::start_on(parts, Host::current()).await.expect_err("refused");
        assert!(matches!(error, StartError::Options(_)));
        assert!(store.calls().is_empty());
    });
}

#[test]
fn a_fence_makes_the_engine_unready_and_stops_everything_until_it_ends() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let engine = start(&store, runner(1, |_| async { Ok(()) })).await;
        quiesce().await;
        assert!(engine.is_ready());
        engine.recipient::<Fence>().expect("provided").do_send(Fence);
        quiesce().await;
        assert!(!engine.is_ready());
        store.insert_many(3, &Row::default());
        engine.request_immediate_poll();
        sleep(Duration::from_mins(1)).await;
        assert_eq!(store.unfinished(), 3);
        engine.recipient::<Unfence>().expect("provided").do_send(Unfence);
        store.finished().await;
        assert!(engine.is_ready());
        engine.drain().await;
    });
}
