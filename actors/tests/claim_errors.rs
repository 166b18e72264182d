//! Claiming when the store fails: backoff, lost answers and their recovery, and eviction.

use std::time::Duration;

use tokio::time::sleep;
use workpump_actors::message::{Evicted, RequestImmediatePoll};
use workpump_actors::options::Options;
use workpump_actors::port::StoreError;
use workpump_actors::testing::{Call, ClaimRig, FakeStore, Op, Reply, Row, in_virtual_time};

fn unavailable() -> StoreError {
    StoreError::Unavailable("connection refused".to_owned())
}

#[test]
fn any_work_resets_the_backoff_and_an_error_counts_as_empty() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let _rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 3).await;
        store.script(Op::Claim, Reply::Fail(StoreError::Schema("too new".to_owned())));
        store.called(Op::Claim, 5).await;
        assert_eq!(store.gaps(Op::Claim), [250, 500, 1_000, 2_000]);
        store.insert(Row::default());
        store.called(Op::Claim, 8).await;
        assert_eq!(store.gaps(Op::Claim)[4..], [4_000, 250, 250]);
    });
}

#[test]
fn a_lost_answer_is_followed_by_a_recovery_before_the_next_claim() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(3, &Row::default());
        store.script(Op::Claim, Reply::Lose(unavailable()));
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        let batch = rig.dispatch.next().await;
        assert_eq!(batch.deliveries.len(), 3, "the rows of the lost answer came back");
        assert!(batch.deliveries.iter().all(|row| row.work().attempts == 1), "their attempt was refunded");
        let order: Vec<_> = store.calls();
        assert!(matches!(order[..], [Call::Claim(_), Call::ReleaseUnheld(_), Call::Claim(_)]), "{order:?}");
        sleep(Duration::from_mins(5)).await;
        let recoveries = store.times(Op::ReleaseUnheld);
        let late = recoveries.iter().filter(|at| **at >= Duration::from_secs(30)).count();
        assert_eq!(
            late, 1,
            "until one came when the lost claim could not be carried out any more: {recoveries:?}"
        );
        assert!(recoveries.len() > 3);
    });
}

#[test]
fn a_lost_claim_that_is_carried_out_late_is_recovered_too() {
    in_virtual_time(async {
        let client = StoreError::Other { code: "client".to_owned(), message: "cut".to_owned() };
        for error in [unavailable(), client] {
            let store = FakeStore::new();
            store.script(Op::Claim, Reply::Fail(error));
            let mut rig = ClaimRig::start_open(Options::default(), &store);
            store.called(Op::Claim, 3).await;
            store.insert_many(3, &Row::default());
            let Some(Call::Claim(lost)) = store.calls().into_iter().next() else { panic!("a claim") };
            let late = workpump_actors::port::WorkStore::claim(&*store, lost).await.expect("carried out");
            assert_eq!(late.works.len(), 3);
            let batch = rig.dispatch.next().await;
            assert_eq!(batch.deliveries.len(), 3);
            assert!(
                batch.deliveries.iter().all(|row| row.work().attempts == 1),
                "their attempt was refunded"
            );
        }
    });
}

#[test]
fn a_recovery_names_what_is_still_held() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(2, &Row::default());
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        let batch = rig.dispatch.next().await;
        store.script(Op::Claim, Reply::Fail(unavailable()));
        store.script(Op::ReleaseUnheld, Reply::Fail(unavailable()));
        store.called(Op::ReleaseUnheld, 2).await;
        let calls = store.calls();
        let held = calls.iter().rev().find_map(|call| match call {
            Call::ReleaseUnheld(held) => Some(held.len()),
            _ => None,
        });
        assert_eq!(held, Some(2));
        store.called(Op::Claim, 4).await;
        assert_eq!(store.leased(), 2, "held rows stay leased");
        drop(batch);
    });
}

#[test]
fn contention_is_retried_almost_at_once_and_then_by_the_cadence() {
    in_virtual_time(async {
        let store = FakeStore::new();
        for _ in 0..5 {
            store.script(Op::Claim, Reply::Fail(StoreError::Contended("deadlock".to_owned())));
        }
        let _rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 6).await;
        let gaps = store.gaps(Op::Claim);
        assert!(gaps[..3].iter().all(|gap| (5..=26).contains(gap)), "{gaps:?}");
        assert_eq!(gaps[3], 250);
    });
}

#[test]
fn an_instance_the_store_does_not_know_asks_for_a_beat() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.members_only();
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        rig.beat_now.next().await;
        store.called(Op::Claim, 3).await;
        assert_eq!(store.gaps(Op::Claim), [250, 500]);
    });
}

#[test]
fn an_evicted_claimer_says_so_once_and_never_claims_again() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 1).await;
        store.evict(rig.instance);
        assert_eq!(rig.evicted.next().await, Evicted(rig.instance));
        let before = store.count(Op::Claim);
        rig.unfence();
        rig.addr.do_send(RequestImmediatePoll);
        sleep(Duration::from_mins(10)).await;
        assert_eq!(store.count(Op::Claim), before);
        assert!(rig.evicted.take().is_empty());
        assert_eq!(rig.permits.available_permits(), Options::default().dispatch.max_in_flight as usize);
    });
}
