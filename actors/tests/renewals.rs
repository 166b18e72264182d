//! The renewer by itself: batches, limits, refusals, and deaths in the middle of a flush.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::Actor;
use common::{inbox, results, rows};
use tokio::time::sleep;
use uuid::Uuid;
use workpump_actors::actor::lease_renewal::{LeaseRenewalActor, LeaseRenewalParts};
use workpump_actors::delivery::{Delivery, ExtendError, LeaseHandle};
use workpump_actors::instance::InstanceId;
use workpump_actors::message::{Account, Drain, Evicted, ExtendLease, Fence, Observe};
use workpump_actors::options::Options;
use workpump_actors::port::{PortFuture, Renewal, RenewalStore, StoreError, Verdict, WorkStore};
use workpump_actors::runner::Job;
use workpump_actors::testing::{
    Call, Crash, DispatchRig, FakeStore, Op, RenewalRig, Reply, Row, TestProbe, in_virtual_time, quiesce,
    runner,
};
use workpump_actors::work::{ClaimEpoch, WorkKey};

const SECOND: Duration = Duration::from_secs(1);

async fn account(rig: &RenewalRig) -> Account {
    rig.addr.send(Observe).await.expect("alive")
}

/// What each flush held.
fn flushes(store: &FakeStore) -> Vec<Vec<WorkKey>> {
    let keys = |items: Vec<(WorkKey, ClaimEpoch)>| items.into_iter().map(|(key, _)| key).collect();
    let flush = |call| if let Call::Renew(items, _) = call { Some(keys(items)) } else { None };
    store.calls().into_iter().filter_map(flush).collect()
}

fn sizes(store: &FakeStore) -> Vec<usize> {
    flushes(store).iter().map(Vec::len).collect()
}

/// Asks for the renewal of this row, as a user would. The answer is the number of seconds until the new deadline.
fn extend(
    rig: &RenewalRig,
    lease: &Arc<LeaseHandle>,
) -> impl Future<Output = Result<u64, ExtendError>> + use<> {
    let (key, epoch) = (lease.key(), lease.epoch());
    // On its way before anybody waits for the answer.
    let answer = actix::spawn(rig.addr.send(ExtendLease { key, epoch }));
    async move {
        let deadline = answer.await.expect("not cancelled").expect("alive")?;
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        Ok(left.as_millis().div_ceil(1_000) as u64)
    }
}

fn leases(rows: &[Delivery]) -> Vec<Arc<LeaseHandle>> {
    rows.iter().map(|row| Arc::clone(row.lease())).collect()
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("away".to_owned())
}

#[test]
fn requests_are_gathered_for_a_window_and_sent_at_once_at_the_threshold_and_at_the_size() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = RenewalRig::start(&Options::default(), &store);
        let rows = rig.claim(500, &Row::default()).await;
        let leases = leases(&rows);
        let first: Vec<_> = leases[..3].iter().map(|lease| extend(&rig, lease)).collect();
        sleep(Duration::from_millis(199)).await;
        assert_eq!(store.count(Op::Renew), 0);
        sleep(Duration::from_millis(2)).await;
        assert_eq!(sizes(&store), [3]);
        let more: Vec<_> = leases[3..103].iter().map(|lease| extend(&rig, lease)).collect();
        quiesce().await;
        assert_eq!(sizes(&store), [3, 100], "the threshold");
        let many: Vec<_> = leases[103..].iter().map(|lease| extend(&rig, lease)).collect();
        quiesce().await;
        assert!(sizes(&store).iter().all(|size| *size <= 200), "{:?}", sizes(&store));
        sleep(SECOND).await;
        assert_eq!(sizes(&store).iter().sum::<usize>(), 500);
        for answer in first.into_iter().chain(more).chain(many) {
            assert!(answer.await.is_ok());
        }
        assert_eq!(account(&rig).await.counter("renewed"), 500);
        drop(rows);
    });
}

#[test]
fn whoever_asks_waits_for_room() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut options = Options::default();
        options.lease_renewal.channel_capacity = 2;
        options.lease_renewal.max_batch_size = 2;
        let rig = RenewalRig::start(&options, &store);
        let rows = rig.claim(5, &Row::default()).await;
        store.script(Op::Renew, Reply::Slow(SECOND / 2));
        let answers: Vec<_> = leases(&rows).iter().map(|lease| extend(&rig, lease)).collect();
        quiesce().await;
        assert_eq!(account(&rig).await.counter("requests"), 4, "two on their way, two that wait");
        for answer in answers {
            assert_eq!(answer.await, Ok(270));
        }
        assert_eq!(sizes(&store), [2, 2, 1]);
    });
}

#[test]
fn a_run_goes_whole_and_a_batch_is_not_much_larger_than_it_may_be() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut options = Options::default();
        options.lease_renewal.max_batch_size = 5;
        let rig = RenewalRig::start(&options, &store);
        let mut asked = Vec::new();
        let mut kept = Vec::new();
        for length in [3, 4, 1, 8] {
            let rows = rig.claim(length, &Row::of_stream(Uuid::now_v7())).await;
            asked.push(extend(&rig, rows[0].lease()));
            kept.push(rows);
        }
        sleep(SECOND).await;
        assert_eq!(sizes(&store), [4, 4, 8], "3 and 1 fit together");
        for rows in &kept {
            assert!(rows.iter().all(|row| store.lease_left(row.work().key) > Some(299 * SECOND)));
            let used: Vec<u32> = rows.iter().map(|row| row.lease().renewals_used()).collect();
            assert!(
                used[0] == 1 && used[1..].iter().all(|used| *used == 0),
                "only the row that was asked for: {used:?}"
            );
        }
        for answer in asked {
            assert_eq!(answer.await, Ok(270));
        }
    });
}

#[test]
fn the_cap_is_never_passed_however_many_ask() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = RenewalRig::start(&Options::default(), &store);
        let rows = rig.claim(1, &Row::default()).await;
        let mut refused = 0;
        for _ in 0..4 {
            let asked: Vec<_> = (0..3).map(|_| extend(&rig, rows[0].lease())).collect();
            for answer in asked {
                refused += u32::from(answer.await == Err(ExtendError::AtCap { renewals: 6 }));
            }
        }
        // Three that ask at once are one renewal.
        assert_eq!((store.count(Op::Renew), rows[0].lease().renewals_used(), refused), (4, 4, 0));
        for _ in 0..4 {
            refused +=
                u32::from(extend(&rig, rows[0].lease()).await == Err(ExtendError::AtCap { renewals: 6 }));
        }
        assert_eq!((store.count(Op::Renew), rows[0].lease().renewals_used(), refused), (6, 6, 2));
    });
}

#[test]
fn a_reservation_that_is_dropped_is_given_back_and_a_row_that_is_gone_is_refused() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = RenewalRig::start(&Options::default(), &store);
        let mut rows = rig.claim(1, &Row::default()).await;
        let lease = Arc::clone(rows[0].lease());
        let reserved: Vec<_> = (0..6).map(|_| lease.try_extend_deadline().expect("below the cap")).collect();
        assert!(matches!(lease.try_extend_deadline(), Err(ExtendError::AtCap { renewals: 6 })));
        drop(reserved);
        assert_eq!(lease.renewals_used(), 0);
        assert_eq!(extend(&rig, &lease).await, Ok(270));
        drop(rows.remove(0).settle(Verdict::Complete));
        assert!(matches!(lease.try_extend_deadline(), Err(ExtendError::Lost)));
        // Nobody holds it any more, so the database is asked, by the epoch.
        assert_eq!(extend(&rig, &lease).await, Ok(270));
        assert_eq!(account(&rig).await.counter("unknown_handles"), 1);
        store.steal(lease.key());
        assert_eq!(extend(&rig, &lease).await, Err(ExtendError::Lost));
    });
}

#[test]
fn what_was_on_its_way_when_the_renewer_died_is_sent_again_and_counts_once() {
    in_virtual_time(async {
        for reply in [Reply::Hang, Reply::Slow(5 * SECOND)] {
            let store = FakeStore::new();
            let mut rig = RenewalRig::start(&Options::default(), &store);
            let rows = rig.claim(3, &Row::default()).await;
            let asked = futures_util::future::join_all(rows.iter().map(|row| row.lease().extend()));
            store.script(Op::Renew, reply);
            let (answers, ()) = tokio::join!(asked, async {
                store.called(Op::Renew, 1).await;
                rig.restart().await;
            });
            assert!(answers.iter().all(Result::is_ok), "{answers:?}");
            assert_eq!(sizes(&store), [3, 3]);
            assert!(rows.iter().all(|row| row.lease().renewals_used() == 1));
            sleep(10 * SECOND).await;
            assert!(rows.iter().all(|row| row.lease().renewals_used() == 1), "a late answer is nobody's");
        }
    });
}

#[test]
fn what_kills_renewer_after_renewer_is_given_up() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = RenewalRig::start(&Options::default(), &store);
        let rows = rig.claim(1, &Row::default()).await;
        for _ in 0..3 {
            store.script(Op::Renew, Reply::Hang);
        }
        let lease = Arc::clone(rows[0].lease());
        let (answer, ()) = tokio::join!(lease.extend(), async {
            for deaths in 1..=3 {
                store.called(Op::Renew, deaths).await;
                rig.restart().await;
            }
        });
        assert!(matches!(answer, Err(ExtendError::Unknown(_))), "{answer:?}");
        assert_eq!((lease.renewals_used(), account(&rig).await.counter("deadly")), (0, 1));
        assert!(lease.extend().await.is_ok(), "the next one is served");
    });
}

#[test]
fn an_error_is_no_loss() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = RenewalRig::start(&Options::default(), &store);
        let rows = rig.claim(2, &Row::default()).await;
        for error in [unavailable(), StoreError::Contended("busy".to_owned()), unavailable()] {
            store.script(Op::Renew, Reply::Fail(error));
        }
        store.script(Op::Renew, Reply::Lose(unavailable()));
        let (first, second) = tokio::join!(rows[0].lease().extend(), rows[1].lease().extend());
        assert!(first.is_ok() && second.is_ok());
        assert_eq!((store.count(Op::Renew), rows[0].lease().renewals_used()), (5, 1));
    });
}

#[test]
fn an_eviction_ends_all_renewing_and_is_told() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = RenewalRig::start(&Options::default(), &store);
        let rows = rig.claim(2, &Row::default()).await;
        store.evict(rig.instance);
        assert!(matches!(rows[0].lease().extend().await, Err(ExtendError::Unknown(_))));
        assert_eq!(rig.evicted.next().await, Evicted(rig.instance));
        assert!(rig.standing.is_evicted());
        assert!(matches!(rows[1].lease().extend().await, Err(ExtendError::Unknown(_))));
        rig.restart().await;
        assert!(matches!(rows[1].lease().extend().await, Err(ExtendError::Unknown(_))));
        assert_eq!(store.count(Op::Renew), 1);
    });
}

#[test]
fn a_drain_answers_whoever_still_waits() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = RenewalRig::start(&Options::default(), &store);
        let rows = rig.claim(1, &Row::default()).await;
        store.script(Op::Renew, Reply::Hang);
        let (answer, ()) = tokio::join!(rows[0].lease().extend(), async {
            store.called(Op::Renew, 1).await;
            rig.addr.send(Drain).await.expect("alive");
        });
        assert!(matches!(answer, Err(ExtendError::Unknown(_))));
        assert_eq!(rows[0].lease().renewals_used(), 0);
    });
}

#[test]
fn a_result_that_is_not_written_yet_keeps_its_lease_and_those_of_its_run() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = RenewalRig::start(&Options::default(), &store);
        let mut rows = rig.claim(3, &Row::of_stream(Uuid::now_v7())).await;
        let unwritten = rows.remove(0).settle(Verdict::Complete);
        assert!(rows[0].lease().extend().await.is_ok(), "or it would wait for the lock of the one before it");
        assert_eq!(sizes(&store), [3]);
        drop(unwritten);
        let item = (rows[0].work().key, rows[0].work().epoch);
        assert!(store.release_unheld(rig.instance, vec![item]).await.is_ok());
        assert!(rows[0].lease().extend().await.is_ok());
        assert!(store.lease_left(rows[1].work().key).is_none(), "somebody has handed it back");
        assert_eq!(sizes(&store), [3, 2]);
        assert_eq!(account(&rig).await.counter("lost"), 1);
    });
}

/// Renews whatever it is asked to.
#[derive(Default)]
struct Generous(Mutex<Vec<usize>>);

impl RenewalStore for Generous {
    fn renew(
        &self,
        _: InstanceId,
        items: Vec<(WorkKey, ClaimEpoch)>,
        _: Duration,
    ) -> PortFuture<'_, Vec<Renewal>> {
        self.0.lock().expect("not poisoned").push(items.len());
        Box::pin(async move { Ok(vec![Renewal::Renewed; items.len()]) })
    }
}

/// A renewer for the rows of a dispatcher.
fn renewer(rig: &DispatchRig) -> Arc<Generous> {
    let store: Arc<Generous> = Arc::default();
    let parts = LeaseRenewalParts {
        options: Options::default().lease_renewal,
        instance: InstanceId::fresh(),
        standing: Arc::clone(&rig.standing),
        renewals: Arc::clone(&rig.renewals),
        in_flight: Arc::clone(&rig.in_flight),
        evicted: TestProbe::start().recipient(),
        seed: 7,
    };
    LeaseRenewalActor::new(parts, Arc::clone(&store) as _).start();
    store
}

#[test]
fn rows_that_wait_behind_nobody_are_not_renewed_and_go_back_at_their_deadline() {
    in_virtual_time(async {
        let mut rig = DispatchRig::start(&Options::default(), inbox(common::done()));
        let store = renewer(&rig);
        rig.fence();
        rig.addr.send(Fence).await.expect("alive");
        rig.dispatch_renewed(rows(Some(Uuid::now_v7()), 0..2));
        rig.dispatch_renewed(rows(None, 2..4));
        sleep(269 * SECOND).await;
        assert!(results(&mut rig).is_empty());
        sleep(2 * SECOND).await;
        let verdicts: Vec<_> = results(&mut rig).into_iter().map(|(_, verdict)| verdict).collect();
        assert_eq!(verdicts, [Verdict::Release, Verdict::Release, Verdict::Release, Verdict::Release]);
        assert!(store.0.lock().expect("not poisoned").is_empty());
    });
}

#[test]
fn a_row_that_starts_late_in_its_lease_is_renewed_at_once() {
    in_virtual_time(async {
        let long = runner(1, |job: Job| async move {
            tokio::select! {
                () = sleep(100 * SECOND) => Ok(()),
                () = job.cancel.cancelled() => Err(workpump_actors::runner::Failure::retry("stopped")),
            }
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(long));
        let store = renewer(&rig);
        rig.fence();
        rig.addr.send(Fence).await.expect("alive");
        rig.dispatch_renewed(rows(None, 0..3));
        sleep(269 * SECOND).await;
        rig.unfence();
        sleep(101 * SECOND).await;
        let verdicts: Vec<_> = results(&mut rig).into_iter().map(|(_, verdict)| verdict).collect();
        assert_eq!(verdicts, [Verdict::Complete, Verdict::Complete, Verdict::Complete]);
        assert_eq!(*store.0.lock().expect("not poisoned"), [3]);
    });
}

#[test]
fn a_batch_of_rows_in_one_call_is_renewed_row_by_row_and_only_the_lost_one_is_dropped() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = RenewalRig::start(&Options::default(), &store);
        let rows = rig.claim(3, &Row::default()).await;
        store.steal(rows[1].work().key);
        let (first, second, third) =
            tokio::join!(rows[0].lease().extend(), rows[1].lease().extend(), rows[2].lease().extend());
        assert!(first.is_ok() && third.is_ok());
        assert_eq!(second, Err(ExtendError::Lost));
        assert_eq!(sizes(&store), [3]);
        let now = tokio::time::Instant::now();
        assert!(rows[1].lease().deadline() <= now && rows[0].lease().deadline() > now);
        rig.addr.do_send(Crash);
    });
}
