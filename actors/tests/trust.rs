//! Trust: an instance that cannot prove itself alive starts and writes nothing, and goes on with the next proof.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use workpump_actors::delivery::Delivery;
use workpump_actors::instance::AliveLock;
use workpump_actors::message::{AliveLockChanged, PingNow, Settle, TrustProven, Unfence};
use workpump_actors::options::{OnFence, Options};
use workpump_actors::policy::trust::SentBeat;
use workpump_actors::port::{StoreError, Verdict};
use workpump_actors::registry::Host;
use workpump_actors::runner::Runner;
use workpump_actors::standing::{Standing, Trust, Untrusted};
use workpump_actors::testing::{
    Call, ClaimRig, DirectOp, DispatchRig, FakeDirect, FakeStore, HeartbeatRig, Op, Reply, Row, SettleRig,
    claimed, deliver, engine_parts, in_virtual_time, quiesce, runner,
};
use workpump_actors::tree::Engine;
use workpump_actors::work::Category;

fn seconds(value: u64) -> Duration {
    Duration::from_secs(value)
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("connection refused".to_owned())
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

/// A member whose last proof is of now, so that trust ends in 4 s.
fn proven(standing: &Standing) {
    let lock = Some(standing.lock_session());
    standing.beat_accepted(SentBeat { sent_at: now(), lock, interval: seconds(60) });
}

fn inbox(runner: Arc<dyn Runner>) -> Vec<(Category, Arc<dyn Runner>)> {
    vec![(Category::Inbox, runner)]
}

/// Counts what was started; each runs for so long.
fn slow(started: &Arc<AtomicUsize>, time: Duration) -> Vec<(Category, Arc<dyn Runner>)> {
    let started = Arc::clone(started);
    inbox(runner(1, move |_| {
        started.fetch_add(1, Ordering::SeqCst);
        async move {
            sleep(time).await;
            Ok(())
        }
    }))
}

#[test]
fn no_handler_starts_after_the_end_of_trust_and_all_start_with_the_next_proof() {
    in_virtual_time(async {
        let started = Arc::new(AtomicUsize::new(0));
        let mut rig = DispatchRig::start(&Options::default(), slow(&started, Duration::ZERO));
        proven(&rig.standing);
        sleep(seconds(4)).await;
        rig.dispatch((0..10).map(|seq| claimed(seq, None)).collect());
        sleep(seconds(1)).await;
        assert_eq!(started.load(Ordering::SeqCst), 0);
        rig.probe.next().await;
        assert!(rig.standing.is_doubted());
        proven(&rig.standing);
        rig.addr.do_send(Unfence);
        quiesce().await;
        assert_eq!(started.load(Ordering::SeqCst), 10);
    });
}

#[test]
fn the_rest_of_a_stream_is_held_when_trust_ends_while_its_first_row_runs() {
    in_virtual_time(async {
        let started = Arc::new(AtomicUsize::new(0));
        let mut rig = DispatchRig::start(&Options::default(), slow(&started, seconds(5)));
        proven(&rig.standing);
        let stream = Some(uuid::Uuid::now_v7());
        rig.dispatch((0..3).map(|seq| claimed(seq, stream)).collect());
        sleep(seconds(30)).await;
        assert_eq!(started.load(Ordering::SeqCst), 1, "nobody fenced it: the start itself was refused");
        rig.probe.next().await;
        proven(&rig.standing);
        rig.addr.do_send(Unfence);
        quiesce().await;
        assert_eq!(started.load(Ordering::SeqCst), 2);
    });
}

#[test]
fn no_result_is_sent_after_the_end_of_trust_although_no_timer_has_rung() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = SettleRig::start(&Options::default(), &store);
        proven(&rig.standing);
        // The process was stopped here.
        sleep(seconds(4)).await;
        let permits = Arc::new(tokio::sync::Semaphore::new(1));
        let rows = deliver(vec![claimed(1, None)], &permits, &Arc::default(), seconds(300), seconds(30));
        let settlements = rows.into_iter().map(|row| row.settle(Verdict::Complete)).collect();
        rig.addr.do_send(Settle { settlements });
        sleep(seconds(60)).await;
        assert_eq!(store.count(Op::Settle), 0);
        rig.probe.next().await;
        proven(&rig.standing);
        rig.addr.do_send(Unfence);
        store.called(Op::Settle, 1).await;
    });
}

#[test]
fn with_work_in_hand_no_claim_is_sent_after_the_end_of_trust() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        quiesce().await;
        proven(&rig.standing);
        let permits = Arc::clone(&rig.permits);
        let work = deliver(vec![claimed(1, None)], &permits, &rig.in_flight, seconds(300), seconds(30));
        sleep(seconds(4)).await;
        let claims = store.count(Op::Claim);
        sleep(seconds(60)).await;
        assert_eq!(store.count(Op::Claim), claims);
        rig.probe.next().await;
        proven(&rig.standing);
        rig.addr.do_send(Unfence);
        quiesce().await;
        assert_eq!(store.count(Op::Claim), claims + 1);
        drop(work);
    });
}

#[test]
fn an_idle_instance_claims_without_trust_and_asks_for_the_proof_beside_a_claim_it_was_woken_for() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        quiesce().await;
        proven(&rig.standing);
        sleep(seconds(60)).await;
        rig.probe.take();
        let claims = store.count(Op::Claim);
        sleep(seconds(60)).await;
        assert!(store.count(Op::Claim) > claims, "the polls go on");
        assert!(rig.probe.take().is_empty(), "and cost no ping");
        store.script(Op::Claim, Reply::Slow(seconds(1)));
        rig.addr.do_send(workpump_actors::message::RequestImmediatePoll);
        quiesce().await;
        assert_eq!(rig.probe.take(), [PingNow], "while the claim is under way");
    });
}

#[test]
fn rows_that_were_claimed_are_worth_a_proof_at_once() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert(Row::default());
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        rig.dispatch.next().await;
        assert!(!rig.probe.take().is_empty());
    });
}

/// A heart with a lock that was declared, and one row in hand.
async fn busy_heart(options: &Options, store: &Arc<FakeStore>) -> (HeartbeatRig, Vec<Delivery>) {
    let mut rig = HeartbeatRig::start(options, store);
    rig.standing.new_lock_session();
    rig.addr.send(AliveLockChanged(AliveLock::Held)).await.expect("alive");
    rig.unfence.next().await;
    quiesce().await;
    let permits = Arc::new(tokio::sync::Semaphore::new(1));
    let work = deliver(vec![claimed(1, None)], &permits, &rig.in_flight, seconds(300), seconds(30));
    rig.addr.send(PingNow).await.expect("alive");
    (rig, work)
}

fn ping(rig: &HeartbeatRig) {
    let sent_at = now();
    rig.standing.pinged(rig.standing.lock_session(), sent_at);
    rig.addr.do_send(TrustProven { sent_at });
}

#[test]
fn answered_pings_keep_the_fence_away_and_a_missing_one_brings_it_four_seconds_after_the_last() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let (mut rig, _work) = busy_heart(&Options::default(), &store).await;
        for _ in 0..30 {
            sleep(seconds(1)).await;
            ping(&rig);
        }
        quiesce().await;
        let last = Instant::now();
        assert!(rig.fence.take().is_empty());
        store.always(|call| matches!(call, Call::Beat(_)).then(|| Reply::Fail(unavailable())));
        rig.fence.next().await;
        assert_eq!(last.elapsed(), seconds(4));
        ping(&rig);
        rig.unfence.expect_within(seconds(1)).await;
        rig.fence.expect_none(seconds(3)).await;
    });
}

#[test]
fn a_short_grace_fences_after_seven_tenths_of_it() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut options = Options::default();
        options.liveness.lock_loss_grace_seconds = 1;
        let (mut rig, _work) = busy_heart(&options, &store).await;
        ping(&rig);
        quiesce().await;
        store.always(|call| matches!(call, Call::Beat(_)).then_some(Reply::Hang));
        let last = Instant::now();
        rig.fence.next().await;
        assert_eq!(last.elapsed(), Duration::from_millis(700));
    });
}

#[test]
fn an_idle_instance_is_never_fenced_for_want_of_a_ping() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let (mut rig, work) = busy_heart(&Options::default(), &store).await;
        drop(work);
        sleep(Duration::from_hours(1)).await;
        assert!(rig.fence.take().is_empty());
    });
}

#[test]
fn an_instance_that_was_idle_and_gets_no_proof_for_its_first_work_is_fenced() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let (mut rig, work) = busy_heart(&Options::default(), &store).await;
        drop(work);
        sleep(seconds(30)).await;
        let permits = Arc::new(tokio::sync::Semaphore::new(1));
        let _work = deliver(vec![claimed(2, None)], &permits, &rig.in_flight, seconds(300), seconds(30));
        rig.addr.do_send(PingNow);
        let asked = Instant::now();
        rig.fence.next().await;
        assert_eq!(asked.elapsed(), seconds(4));
    });
}

#[test]
fn pings_cannot_carry_an_instance_whose_beats_fail_for_more_than_four_minutes() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let (mut rig, _work) = busy_heart(&Options::default(), &store).await;
        let last_beat = Instant::now();
        store.always(|call| matches!(call, Call::Beat(_)).then(|| Reply::Fail(unavailable())));
        for _ in 0..239 {
            sleep(seconds(1)).await;
            ping(&rig);
        }
        quiesce().await;
        assert!(rig.fence.take().is_empty());
        rig.fence.expect_within(seconds(2)).await;
        assert_eq!(last_beat.elapsed(), seconds(240));
        ping(&rig);
        rig.unfence.take();
        rig.unfence.expect_none(seconds(20)).await;
        store.recover();
        rig.unfence.expect_within(seconds(2)).await;
    });
}

#[test]
fn without_a_lock_beats_alone_carry_it_until_shortly_before_they_are_stale() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = HeartbeatRig::start(&Options::default(), &store);
        rig.unfence.next().await;
        let permits = Arc::new(tokio::sync::Semaphore::new(1));
        let _work = deliver(vec![claimed(1, None)], &permits, &rig.in_flight, seconds(300), seconds(30));
        rig.addr.do_send(PingNow);
        sleep(seconds(300)).await;
        assert!(rig.fence.take().is_empty());
        let last = store.times(Op::Beat).pop().expect("it beats");
        store.always(|call| matches!(call, Call::Beat(_)).then(|| Reply::Fail(unavailable())));
        rig.fence.next().await;
        store.recover();
        rig.unfence.expect_within(seconds(2)).await;
        let beats = store.times(Op::Beat);
        assert!(
            beats.iter().any(|at| *at == last + seconds(60)),
            "a beat goes out with the fence: {beats:?}"
        );
    });
}

#[test]
fn a_lock_that_was_lost_is_a_beat_at_once_and_then_one_a_second_until_twice_the_grace_has_passed() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let (mut rig, _work) = busy_heart(&Options::default(), &store).await;
        sleep(seconds(2)).await;
        let lost = store.count(Op::Beat);
        rig.addr.send(AliveLockChanged(AliveLock::NotHeld)).await.expect("alive");
        store.called(Op::Beat, lost + 12).await;
        let gaps = store.gaps(Op::Beat)[lost..].to_vec();
        assert_eq!(gaps[..10], [1_000; 10]);
        assert_eq!(gaps[10], 30_000);
        assert!(rig.fence.take().is_empty(), "a direct connection that is lost alone fences nobody");
    });
}

fn busy_engine_options() -> Options {
    let mut options = Options::default();
    options.claim.polling_max_interval_milliseconds = 250;
    options
}

#[test]
fn an_engine_cut_off_from_the_server_is_fenced_in_time_and_goes_on_when_it_is_back() {
    in_virtual_time(async {
        let (store, direct) = (FakeStore::new(), FakeDirect::new());
        let started = Arc::new(AtomicUsize::new(0));
        let mut parts = engine_parts(busy_engine_options(), &store, slow(&started, seconds(20)));
        parts.direct = Some(Arc::new(direct.clone()));
        parts.route = Arc::new(direct.clone());
        let engine = Engine::start_on(parts, Host::current()).await.expect("starts");
        store.insert(Row::default());
        engine.request_immediate_poll();
        sleep(seconds(10)).await;
        assert!(engine.is_ready() && engine.is_alive_lock_held());
        assert_eq!(started.load(Ordering::SeqCst), 1);
        let cut = Instant::now();
        // Claims have their limit in the store.
        store.always(|call| match call {
            Call::Beat(_) | Call::Settle(_) => Some(Reply::Hang),
            _ => Some(Reply::Fail(unavailable())),
        });
        direct.always(|_| Some(Reply::Hang));
        store.insert(Row::default());
        sleep(Duration::from_millis(4_100)).await;
        assert!(!engine.is_ready(), "fenced before the grace is over");
        sleep(seconds(30)).await;
        assert_eq!(store.count(Op::Settle), 0, "its result is kept");
        assert_eq!(started.load(Ordering::SeqCst), 1, "and nothing starts");
        store.recover();
        direct.recover();
        store.finished().await;
        assert_eq!(store.settled().len(), 2);
        assert_eq!(started.load(Ordering::SeqCst), 2, "the one that ran was kept");
        quiesce().await;
        assert!(engine.is_ready());
        assert!(cut.elapsed() < seconds(90), "{:?}", cut.elapsed());
        engine.drain().await;
    });
}

#[test]
fn a_fence_cancels_handlers_only_when_it_is_told_to() {
    in_virtual_time(async {
        for (on_fence, cancelled) in [(OnFence::Hold, false), (OnFence::Cancel, true)] {
            let mut options = Options::default();
            options.liveness.on_fence = on_fence;
            let runs = inbox(runner(1, |job| async move {
                job.cancel.cancelled().await;
                Err(workpump_actors::runner::Failure::retry("told to stop"))
            }));
            let mut rig = DispatchRig::start(&options, runs);
            let stream = Some(uuid::Uuid::now_v7());
            rig.dispatch((0..3).map(|seq| claimed(seq, stream)).collect());
            quiesce().await;
            rig.fence();
            sleep(seconds(1)).await;
            let settled: usize = rig.settle.take().iter().map(|settle| settle.settlements.len()).sum();
            assert_eq!(settled, if cancelled { 3 } else { 0 });
            assert_eq!(rig.in_flight.len(), if cancelled { 0 } else { 3 });
        }
    });
}

#[test]
fn the_lock_is_declared_by_the_first_beat_and_a_direct_connection_lost_alone_fences_nobody() {
    in_virtual_time(async {
        let (store, direct) = (FakeStore::new(), FakeDirect::new());
        let started = Arc::new(AtomicUsize::new(0));
        let mut parts = engine_parts(busy_engine_options(), &store, slow(&started, seconds(120)));
        parts.direct = Some(Arc::new(direct.clone()));
        parts.route = Arc::new(direct.clone());
        let engine = Engine::start_on(parts, Host::current()).await.expect("starts");
        store.insert(Row::default());
        engine.request_immediate_poll();
        sleep(seconds(5)).await;
        let declared =
            store.calls().iter().any(|call| matches!(call, Call::Beat(beat) if beat.lock_declared));
        assert!(declared);
        direct.always(|op| (op == DirectOp::Connect).then(|| Reply::Fail(unavailable())));
        direct.end_session();
        for _ in 0..100 {
            sleep(Duration::from_millis(500)).await;
            assert!(engine.is_ready(), "beats show that it is alive");
        }
        assert!(!engine.is_alive_lock_held());
        direct.recover();
        sleep(seconds(7)).await;
        assert!(engine.is_alive_lock_held() && engine.is_ready());
        engine.drain().await;
    });
}

#[test]
fn a_drain_beats_and_pings_until_the_last_handler_has_ended_and_lets_the_lock_go_last() {
    in_virtual_time(async {
        let (store, direct) = (FakeStore::new(), FakeDirect::new());
        let started = Arc::new(AtomicUsize::new(0));
        let mut options = busy_engine_options();
        options.dispatch.drain_deadline_seconds = 300;
        options.heartbeat.slow_interval_seconds = 10;
        let mut parts = engine_parts(options, &store, slow(&started, seconds(100)));
        let instance = parts.identity.id;
        parts.direct = Some(Arc::new(direct.clone()));
        parts.route = Arc::new(direct.clone());
        let engine = Arc::new(Engine::start_on(parts, Host::current()).await.expect("starts"));
        store.insert(Row::default());
        engine.request_immediate_poll();
        sleep(seconds(1)).await;
        let held_at_farewell = Arc::new(AtomicUsize::new(0));
        let (seen, server) = (Arc::clone(&held_at_farewell), direct.clone());
        store.always(move |call| {
            if matches!(call, Call::Deregister(_)) {
                seen.store(1 + usize::from(server.holds_lock(instance)), Ordering::SeqCst);
            }
            None
        });
        let report = engine.drain().await;
        assert_eq!((report.finished, report.settled, report.deregistered), (1, 1, true));
        assert!(store.count(Op::Beat) >= 10 && direct.count(DirectOp::Ping) >= 95);
        assert_eq!(held_at_farewell.load(Ordering::SeqCst), 2, "the lock was still held when it left");
        assert!(!direct.is_connected());
    });
}

#[test]
fn a_handler_gets_a_proof_by_a_beat_that_was_sent_after_it_asked() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = HeartbeatRig::start(&Options::default(), &store);
        store.called(Op::Beat, 1).await;
        quiesce().await;
        let trust = Trust::new(Arc::clone(&rig.standing), Some(rig.addr.clone().recipient()));
        sleep(Duration::from_millis(1)).await;
        assert_eq!(trust.prove().await, Ok(()));
        assert_eq!(store.count(Op::Beat), 2);
        sleep(Duration::from_millis(1)).await;
        let many = futures_util::future::join_all((0..100).map(|_| trust.prove())).await;
        assert!(many.iter().all(Result::is_ok));
        assert!(store.count(Op::Beat) <= 5, "many share one: {}", store.count(Op::Beat));
        store.always(|call| matches!(call, Call::Beat(_)).then_some(Reply::Hang));
        sleep(Duration::from_millis(1)).await;
        assert_eq!(trust.prove().await, Err(Untrusted::Unproven));
        store.recover();
        sleep(seconds(60)).await;
        store.evict(rig.identity.id);
        assert_eq!(trust.prove().await, Err(Untrusted::Evicted));
        assert_eq!(trust.prove().await, Err(Untrusted::Evicted));
    });
}
