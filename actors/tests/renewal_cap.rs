//! Leases over time: how long a handler keeps its row, what that costs of its renewals, and how it ends.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use uuid::Uuid;
use workpump_actors::Engine;
use workpump_actors::delivery::ExtendError;
use workpump_actors::message::{Account, ExtendLease};
use workpump_actors::options::Options;
use workpump_actors::port::{StoreError, Verdict};
use workpump_actors::registry::Host;
use workpump_actors::runner::{Job, Runner};
use workpump_actors::testing::{
    Call, Crash, FakeStore, Op, Reply, Row, engine_parts, in_virtual_time, quiesce, runner, suspend,
};
use workpump_actors::work::{Category, ClaimEpoch, WorkKey};

const MINUTE: Duration = Duration::from_mins(1);
const SECOND: Duration = Duration::from_secs(1);

async fn start_with(store: &Arc<FakeStore>, options: Options, runner: Arc<dyn Runner>) -> Engine {
    let parts = engine_parts(options, store, vec![(Category::Inbox, runner)]);
    Engine::start_on(parts, Host::current()).await.expect("starts")
}

async fn start(store: &Arc<FakeStore>, runner: Arc<dyn Runner>) -> Engine {
    start_with(store, Options::default(), runner).await
}

async fn account(engine: &Engine, name: &str) -> Account {
    engine.observe().await.into_iter().find(|account| account.name == name).expect("an account")
}

/// What handlers went through: the row, its attempt, what happened, and after how many seconds of it.
type Log = Arc<Mutex<Vec<(i64, u32, &'static str, u64)>>>;

/// Runs for a time and does not care about its cancellation, but notes it.
fn stubborn(lasts: impl Fn(&Job) -> Duration + Send + Sync + 'static) -> (Log, Arc<dyn Runner>) {
    let log = Log::default();
    let noted = Arc::clone(&log);
    let runner = runner(1, move |job: Job| {
        let (log, lasts) = (Arc::clone(&noted), lasts(&job));
        async move {
            let (began, seq, attempts) = (Instant::now(), job.work.seq, job.work.attempts);
            let note = |what, at: Duration| {
                log.lock().expect("not poisoned").push((seq, attempts, what, at.as_secs()));
            };
            let done = sleep(lasts);
            tokio::pin!(done);
            tokio::select! {
                () = &mut done => {}
                () = job.cancel.cancelled() => {
                    note("cancelled", began.elapsed());
                    done.await;
                }
            }
            note("done", began.elapsed());
            Ok(())
        }
    });
    (log, runner)
}

fn notes(log: &Log) -> Vec<(i64, u32, &'static str, u64)> {
    log.lock().expect("not poisoned").clone()
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("away".to_owned())
}

#[test]
fn a_handler_of_28_minutes_keeps_its_lease() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let key = store.insert(Row::default());
        let (log, handler) = stubborn(|_| 28 * MINUTE);
        let engine = start(&store, handler).await;
        store.finished().await;
        assert_eq!(notes(&log), [(0, 1, "done", 28 * 60)]);
        assert_eq!((store.attempts(key), store.count(Op::Renew)), (Some(1), 6));
        let renewal = account(&engine, "lease_renewal").await;
        assert_eq!((renewal.counter("renewed"), renewal.counter("lost")), (6, 0));
        engine.drain().await;
    });
}

#[test]
fn a_handler_of_30_minutes_is_told_to_stop_at_28_and_a_half_and_its_row_is_issued_again() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let key = store.insert(Row::default());
        let (log, handler) =
            stubborn(|job| if job.work.attempts == 1 { 30 * MINUTE } else { Duration::from_millis(1) });
        let engine = start(&store, handler).await;
        store.finished().await;
        // Six renewals, each up to a coalescing window later than it was due. The lease ends with the grace, and the handler with it.
        let notes = notes(&log);
        let (_, _, what, at) = notes[0];
        assert!(what == "cancelled" && (28 * 60 + 30..=28 * 60 + 32).contains(&at), "{notes:?}");
        assert_eq!(notes[1..], [(0, 2, "done", 0)], "the first never came to its end");
        assert_eq!((store.attempts(key), store.count(Op::Renew)), (Some(2), 6), "the seventh is not sent");
        let dispatch = account(&engine, "dispatch").await;
        assert_eq!(
            (dispatch.counter("cancelled_at_deadline"), dispatch.counter("aborted_at_lease_end")),
            (1, 1)
        );
        engine.drain().await;
    });
}

#[test]
fn without_renewals_a_handler_has_the_lease_minus_the_grace() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert(Row::default());
        let (log, handler) = stubborn(|job| if job.work.attempts == 1 { 5 * MINUTE } else { Duration::ZERO });
        let mut options = Options::default();
        options.lease_renewal.max_renewals_per_work = 0;
        let engine = start_with(&store, options, handler).await;
        store.finished().await;
        assert_eq!(notes(&log)[0], (0, 1, "cancelled", 270));
        assert_eq!(store.count(Op::Renew), 0);
        engine.drain().await;
    });
}

#[test]
fn a_row_that_is_done_before_its_renewal_goes_out_is_skipped() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert(Row::default());
        // Asked for at 240 s, sent 200 ms later.
        let (_, handler) = stubborn(|_| Duration::from_millis(240_100));
        let engine = start(&store, handler).await;
        store.finished().await;
        sleep(SECOND).await;
        let renewal = account(&engine, "lease_renewal").await;
        assert_eq!((renewal.counter("requests"), renewal.counter("skipped")), (1, 1));
        assert_eq!(store.count(Op::Renew), 0);
        engine.drain().await;
    });
}

#[test]
fn an_outage_burns_no_renewal_and_a_handler_is_told_to_stop_only_at_its_deadline() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let key = store.insert(Row::default());
        let (log, handler) = stubborn(|_| 28 * MINUTE);
        let engine = start(&store, handler).await;
        // Ten errors for each renewal.
        for renewal in 1..=6_u64 {
            sleep(Duration::from_secs(230)).await;
            for _ in 0..10 {
                store.script(Op::Renew, Reply::Fail(unavailable()));
            }
            store.called(Op::Renew, renewal as usize * 11).await;
        }
        store.finished().await;
        assert_eq!(notes(&log), [(0, 1, "done", 28 * 60)]);
        assert_eq!(store.attempts(key), Some(1));
        let renewal = account(&engine, "lease_renewal").await;
        assert_eq!((renewal.counter("renewed"), renewal.counter("failed_flushes")), (6, 60));
        engine.drain().await;
    });
}

#[test]
fn when_no_answer_comes_until_the_deadline_the_handler_is_told_to_stop() {
    in_virtual_time(async {
        for reply in [|| Reply::Fail(unavailable()), || Reply::Hang] {
            let store = FakeStore::new();
            store.insert(Row::default());
            let (log, handler) =
                stubborn(|job| if job.work.attempts == 1 { 5 * MINUTE } else { Duration::ZERO });
            store.always(move |call| matches!(call, Call::Renew(..)).then(reply));
            let engine = start(&store, handler).await;
            store.finished().await;
            assert_eq!(notes(&log)[0], (0, 1, "cancelled", 270));
            assert!((2..30).contains(&store.count(Op::Renew)), "{}", store.count(Op::Renew));
            sleep(30 * SECOND).await;
            assert!(
                account(&engine, "lease_renewal").await.counter("too_late")
                    + account(&engine, "lease_renewal").await.counter("skipped")
                    >= 1
            );
            engine.drain().await;
        }
    });
}

#[test]
fn a_slow_answer_does_not_lengthen_the_lease() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert(Row::default());
        let (log, handler) =
            stubborn(|job| if job.work.attempts == 1 { 30 * MINUTE } else { Duration::ZERO });
        let mut options = Options::default();
        options.lease_renewal.max_renewals_per_work = 1;
        store.script(Op::Renew, Reply::Slow(8 * SECOND));
        let engine = start_with(&store, options, handler).await;
        store.finished().await;
        // 240 s, the coalescing window, and 270 s from there: not from the answer.
        assert_eq!(notes(&log)[0], (0, 1, "cancelled", 510));
        engine.drain().await;
    });
}

#[test]
fn a_lost_lease_stops_its_handler_at_once_and_its_result_is_dropped() {
    in_virtual_time(async {
        for obeys in [true, false] {
            let store = FakeStore::new();
            let key = store.insert(Row::default());
            let told: Arc<Mutex<Duration>> = Arc::default();
            let log = Arc::clone(&told);
            let handler = runner(1, move |job: Job| {
                let noted = Arc::clone(&log);
                async move {
                    let began = Instant::now();
                    job.cancel.cancelled().await;
                    *noted.lock().expect("not poisoned") = began.elapsed();
                    if !obeys {
                        std::future::pending::<()>().await;
                    }
                    Ok(())
                }
            });
            let engine = start(&store, handler).await;
            store.called(Op::Claim, 1).await;
            sleep(SECOND).await;
            store.steal(key);
            sleep(240 * SECOND).await;
            let dispatch = account(&engine, "dispatch").await;
            assert_eq!(dispatch.counter("in_hand"), 0, "obeys: {obeys}");
            let how = if obeys { "lost_while_running" } else { "aborted_at_lease_end" };
            assert_eq!(dispatch.counter(how), 1);
            let told = *told.lock().expect("not poisoned");
            assert_eq!(told.as_millis() / 10, 24_020, "with the answer, not at the next look");
            assert_eq!(account(&engine, "claim").await.counter("free_permits"), 2_000);
            assert_eq!(store.count(Op::Settle), 0);
            assert_eq!(account(&engine, "lease_renewal").await.counter("lost"), 1);
            engine.drain().await;
        }
    });
}

#[test]
fn rows_behind_a_lost_one_are_not_run() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let stream = Uuid::now_v7();
        let keys = store.insert_many(3, &Row::of_stream(stream));
        let (log, handler) = stubborn(|_| 250 * SECOND);
        let engine = start(&store, handler).await;
        store.called(Op::Claim, 1).await;
        sleep(SECOND).await;
        store.steal(keys[0]);
        sleep(245 * SECOND).await;
        assert!(
            notes(&log).iter().all(|(seq, _, what, _)| (*seq, *what) == (0, "cancelled")),
            "{:?}",
            notes(&log)
        );
        assert_eq!(store.attempts(keys[1]), Some(0), "handed back, and not charged");
        engine.drain().await;
    });
}

#[test]
fn a_lock_of_an_outsider_delays_a_renewal_and_nothing_is_lost() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let key = store.insert(Row::default());
        let (log, handler) = stubborn(|_| 10 * MINUTE);
        let engine = start(&store, handler).await;
        sleep(239 * SECOND).await;
        store.set_locked(key, true);
        sleep(20 * SECOND).await;
        store.set_locked(key, false);
        store.finished().await;
        assert_eq!(notes(&log), [(0, 1, "done", 600)]);
        let renewal = account(&engine, "lease_renewal").await;
        assert_eq!(renewal.counter("renewed"), 2);
        assert!((20..60).contains(&renewal.counter("locked")), "{}", renewal.counter("locked"));
        engine.drain().await;
    });
}

#[test]
fn rows_that_wait_behind_a_long_one_keep_their_leases_and_all_their_renewals() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let keys = store.insert_many(4, &Row::of_stream(Uuid::now_v7()));
        let (log, handler) = stubborn(|_| 24 * MINUTE);
        let engine = start(&store, handler).await;
        store.finished().await;
        let done: Vec<_> = (0..4).map(|seq| (seq, 1, "done", 24 * 60)).collect();
        assert_eq!(notes(&log), done, "each has six renewals of its own");
        assert!(keys.iter().all(|key| store.attempts(*key) == Some(1)));
        assert!(
            store
                .settled()
                .iter()
                .all(|(_, epoch, verdict)| (*epoch, verdict) == (ClaimEpoch(1), &Verdict::Complete))
        );
        for call in store.calls() {
            if let Call::Renew(items, _) = call {
                let first = keys.iter().position(|key| *key == items[0].0).expect("one of them");
                let whole: Vec<_> = keys[first..].iter().map(|key| (*key, ClaimEpoch(1))).collect();
                assert_eq!(items, whole, "the run goes together");
            }
        }
        engine.drain().await;
    });
}

#[test]
fn a_locked_row_further_back_does_not_hold_up_the_one_that_runs() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let keys = store.insert_many(4, &Row::of_stream(Uuid::now_v7()));
        let (log, handler) = stubborn(|job| if job.work.seq == 0 { 10 * MINUTE } else { SECOND });
        let engine = start(&store, handler).await;
        sleep(239 * SECOND).await;
        store.set_locked(keys[2], true);
        sleep(20 * SECOND).await;
        assert!(
            store.lease_left(keys[0]) > Some(270 * SECOND) && store.lease_left(keys[1]) > Some(270 * SECOND)
        );
        assert!(
            store.lease_left(keys[2]) < Some(60 * SECOND) && store.lease_left(keys[3]) < Some(60 * SECOND)
        );
        store.set_locked(keys[2], false);
        sleep(SECOND).await;
        assert!(store.lease_left(keys[3]) > Some(270 * SECOND));
        store.finished().await;
        let done: Vec<_> = (0..4).map(|seq| (seq, 1, "done", if seq == 0 { 600 } else { 1 })).collect();
        assert_eq!(notes(&log), done);
        engine.drain().await;
    });
}

#[test]
fn a_row_that_only_keeps_a_locked_one_company_gains_no_time_by_it() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let keys = store.insert_many(2, &Row::of_stream(Uuid::now_v7()));
        let (log, handler) =
            stubborn(|job| if job.work.attempts == 1 { 30 * MINUTE } else { Duration::ZERO });
        let mut options = Options::default();
        options.lease_renewal.max_renewals_per_work = 1;
        let engine = start_with(&store, options, handler).await;
        sleep(239 * SECOND).await;
        store.set_locked(keys[1], true);
        sleep(26 * SECOND).await;
        store.set_locked(keys[1], false);
        sleep(6 * MINUTE).await;
        assert!(store.count(Op::Renew) > 20, "asked again and again");
        // Renewed once, at 240 s, although it went along each time.
        assert_eq!(notes(&log)[0], (0, 1, "cancelled", 510));
        engine.drain().await;
    });
}

#[test]
fn a_row_that_stays_locked_is_handed_back_with_those_behind_it_and_the_one_that_runs_goes_on() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let keys = store.insert_many(4, &Row::of_stream(Uuid::now_v7()));
        let (log, handler) = stubborn(|job| if job.work.seq == 0 { 10 * MINUTE } else { SECOND });
        let engine = start(&store, handler).await;
        store.called(Op::Claim, 1).await;
        store.set_locked(keys[2], true);
        sleep(275 * SECOND).await;
        assert_eq!(store.attempts(keys[2]), Some(0), "handed back at its deadline");
        assert_eq!(account(&engine, "dispatch").await.counter("in_hand"), 2);
        store.finished().await;
        let done: Vec<_> = (0..4).map(|seq| (seq, 1, "done", if seq == 0 { 600 } else { 1 })).collect();
        assert_eq!(notes(&log), done);
        engine.drain().await;
    });
}

#[test]
fn users_may_extend_and_are_told_the_deadline_the_cap_and_a_loss() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let key = store.insert(Row::default());
        let thief = Arc::clone(&store);
        let seen: Arc<Mutex<Vec<Result<u64, ExtendError>>>> = Arc::default();
        let told = Arc::clone(&seen);
        let handler = runner(1, move |job: Job| {
            let (told, store) = (Arc::clone(&told), Arc::clone(&thief));
            async move {
                let began = Instant::now();
                let tell = |answer: Result<Instant, ExtendError>| {
                    told.lock().expect("not poisoned").push(answer.map(|at| (at - began).as_secs()));
                };
                tell(Ok(job.lease.deadline()));
                sleep(100 * SECOND).await;
                tell(job.lease.extend().await);
                tell(job.lease.extend().await);
                tell(job.lease.extend().await);
                tell(Ok(job.lease.deadline()));
                store.steal(job.work.key);
                Ok(())
            }
        });
        let mut options = Options::default();
        options.lease_renewal.max_renewals_per_work = 2;
        let engine = start_with(&store, options, handler).await;
        sleep(110 * SECOND).await;
        let seen = seen.lock().expect("not poisoned").clone();
        assert_eq!(seen, [Ok(270), Ok(370), Ok(370), Err(ExtendError::AtCap { renewals: 2 }), Ok(370)]);
        assert_eq!(store.count(Op::Renew), 2);
        // By message: a claim that nobody holds is renewed by its epoch, and refused when it is somebody else's.
        let renewer = engine.recipient::<ExtendLease>().expect("a renewer");
        let answer = renewer.send(ExtendLease { key, epoch: ClaimEpoch(1) }).await.expect("alive");
        assert_eq!(answer, Err(ExtendError::Lost));
        let renewal = account(&engine, "lease_renewal").await;
        assert_eq!((renewal.counter("unknown_handles"), renewal.counter("refused_at_cap")), (1, 1));
        engine.drain().await;
    });
}

#[test]
fn a_resume_after_a_suspend_is_noticed_before_anything_is_started() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let stream = Uuid::now_v7();
        let keys: Vec<WorkKey> = store.insert_many(2, &Row::of_stream(stream));
        let (log, handler) = stubborn(|job| if job.work.attempts == 1 { 20 * SECOND } else { SECOND });
        let engine = start(&store, handler).await;
        store.called(Op::Claim, 1).await;
        sleep(10 * SECOND).await;
        // Every timer stands still; the database's clock would not, so the lease is over there too.
        suspend(10 * MINUTE);
        sleep(11 * SECOND).await;
        assert_eq!(
            notes(&log),
            [(0, 1, "cancelled", 10)],
            "told within a second, then dropped; the next is not started"
        );
        assert!(keys.iter().all(|key| store.verdict(*key).is_none()));
        engine.drain().await;
    });
}

#[test]
fn renewing_goes_on_during_a_drain_and_a_fence_and_over_deaths_of_everybody() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let key = store.insert(Row::default());
        let (log, handler) = stubborn(|_| 25 * MINUTE);
        let mut options = Options::default();
        options.dispatch.drain_deadline_seconds = 1_800;
        let engine = start_with(&store, options, handler).await;
        store.called(Op::Claim, 1).await;
        sleep(2 * MINUTE).await;
        let renewer =
            engine.addr::<workpump_actors::actor::lease_renewal::LeaseRenewalActor>().expect("a renewer");
        let dispatch =
            engine.addr::<workpump_actors::actor::dispatch::DispatchActor>().expect("a dispatcher");
        for _ in 0..3 {
            sleep(3 * MINUTE).await;
            renewer.do_send(Crash);
            dispatch.do_send(Crash);
        }
        engine.drain().await;
        assert_eq!(notes(&log), [(0, 1, "done", 25 * 60)]);
        assert_eq!((store.attempts(key), store.verdict(key)), (Some(1), Some(Verdict::Complete)));
        assert_eq!(store.count(Op::Renew), 6);
        quiesce().await;
    });
}
