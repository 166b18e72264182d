//! The claiming actor dies and the next one goes on: what nobody holds is handed back, what is held is left alone, and what the instance
//! was told stays told.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use workpump_actors::delivery::Delivery;
use workpump_actors::instance::Gate;
use workpump_actors::message::{Account, Drain, Observe, Pause, RequestImmediatePoll, Resume};
use workpump_actors::options::Options;
use workpump_actors::port::{ClaimRequest, StoreError, WorkStore};
use workpump_actors::testing::{Call, ClaimRig, FakeStore, Op, Reply, Row, in_virtual_time, quiesce};
use workpump_actors::work::{Category, ClaimEpoch, WorkKey};

/// What every recovery so far said was held, sorted.
fn recoveries(store: &FakeStore) -> Vec<Vec<(WorkKey, ClaimEpoch)>> {
    let held = |call| if let Call::ReleaseUnheld(held) = call { Some(held) } else { None };
    let mut recoveries: Vec<_> = store.calls().into_iter().filter_map(held).collect();
    for held in &mut recoveries {
        held.sort();
    }
    recoveries
}

/// Everything that was to be run so far.
fn dispatched(rig: &mut ClaimRig) -> Vec<Delivery> {
    rig.dispatch.take().into_iter().flat_map(|dispatch| dispatch.deliveries).collect()
}

fn names(deliveries: &[Delivery]) -> Vec<(WorkKey, ClaimEpoch)> {
    let mut names: Vec<_> =
        deliveries.iter().map(|delivery| (delivery.work().key, delivery.work().epoch)).collect();
    names.sort();
    names
}

async fn account(rig: &ClaimRig) -> Account {
    rig.addr.send(Observe).await.expect("alive")
}

async fn claim_unseen(rig: &ClaimRig, store: &Arc<FakeStore>) -> usize {
    let request = ClaimRequest {
        instance: rig.instance,
        max_rows: 100,
        max_bytes: u64::MAX,
        lease: Duration::from_mins(5),
        partition_count: 1,
        stream_run: 100,
        categories: Category::ALL.into(),
    };
    store.claim(request).await.expect("claimed").works.len()
}

#[test]
fn the_first_claimer_recovers_nothing() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(3, &Row::default());
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        sleep(Duration::from_mins(1)).await;
        assert_eq!(dispatched(&mut rig).len(), 3);
        assert_eq!(store.count(Op::ReleaseUnheld), 0);
    });
}

#[test]
fn the_next_claimer_hands_back_exactly_what_nobody_holds_before_it_claims() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(5, &Row::default());
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 1).await;
        quiesce().await;
        let mut held = dispatched(&mut rig);
        let lost = held.split_off(3);
        let lost_keys: Vec<_> = names(&lost).into_iter().map(|(key, _)| key).collect();
        drop(lost);
        let before = store.calls().len();
        rig.restart().await;
        quiesce().await;
        let calls = store.calls().split_off(before);
        assert!(matches!(&calls[..], [Call::ReleaseUnheld(_), Call::Claim(_), ..]), "{calls:?}");
        assert_eq!(recoveries(&store)[0], names(&held));
        assert_eq!(account(&rig).await.counter("recovered"), 2);
        let again = dispatched(&mut rig);
        let again_keys: Vec<_> = names(&again).into_iter().map(|(key, _)| key).collect();
        assert_eq!(again_keys, lost_keys, "what is lost comes again, what is held does not");
        assert!(again.iter().all(|delivery| delivery.work().attempts == 1), "the attempt is refunded");
    });
}

#[test]
fn a_claim_of_a_dead_claimer_that_is_carried_out_late_is_found() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 1).await;
        rig.restart().await;
        sleep(Duration::from_secs(9)).await;
        store.insert_many(4, &Row::default());
        assert_eq!(claim_unseen(&rig, &store).await, 4);
        rig.addr.do_send(RequestImmediatePoll);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(account(&rig).await.counter("recovered"), 4);
        assert_eq!(dispatched(&mut rig).len(), 4);
        sleep(Duration::from_mins(1)).await;
        let settled_down = store.count(Op::ReleaseUnheld);
        sleep(Duration::from_mins(10)).await;
        assert_eq!(store.count(Op::ReleaseUnheld), settled_down, "after its time no claim can be lost");
    });
}

#[test]
fn a_claimer_that_lives_recovers_once_when_another_actor_has_died() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(4, &Row::default());
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 1).await;
        quiesce().await;
        let mut held = dispatched(&mut rig);
        drop(held.split_off(1));
        rig.standing.recover();
        rig.addr.do_send(RequestImmediatePoll);
        sleep(Duration::from_mins(1)).await;
        assert_eq!(recoveries(&store), [names(&held)]);
        assert_eq!(dispatched(&mut rig).len(), 3);
    });
}

#[test]
fn a_recovery_that_fails_is_tried_again_although_no_signal_comes() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(2, &Row::default());
        let mut options = Options::default();
        options.claim.enable_safety_net_poll = false;
        let mut rig = ClaimRig::start_open(options, &store);
        rig.set_gate(Gate::Available);
        sleep(Duration::from_secs(1)).await;
        drop(dispatched(&mut rig));
        store.script(Op::ReleaseUnheld, Reply::Fail(StoreError::Unavailable("away".to_owned())));
        rig.standing.recover();
        rig.addr.do_send(RequestImmediatePoll);
        sleep(Duration::from_mins(1)).await;
        assert_eq!(recoveries(&store).len(), 2);
        assert_eq!(dispatched(&mut rig).len(), 2);
    });
}

#[test]
fn a_fence_and_a_pause_hold_across_a_restart_and_so_do_their_ends() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = ClaimRig::start(Options::default(), &store);
        rig.restart().await;
        sleep(Duration::from_mins(1)).await;
        assert!(store.calls().is_empty(), "not a member yet");
        // The one that was to hear it died of it.
        rig.standing.unfence();
        rig.restart().await;
        store.called(Op::Claim, 1).await;
        rig.addr.send(Pause).await.expect("alive");
        rig.restart().await;
        assert_eq!(account(&rig).await.state, "paused");
        rig.addr.send(Resume).await.expect("alive");
        quiesce().await;
        assert_eq!(store.count(Op::Claim), 2);
        rig.standing.fence();
        rig.restart().await;
        rig.addr.do_send(RequestImmediatePoll);
        sleep(Duration::from_mins(1)).await;
        assert_eq!(store.count(Op::Claim), 2);
    });
}

#[test]
fn an_unfence_that_is_outdated_when_it_is_heard_claims_nothing() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = ClaimRig::start(Options::default(), &store);
        rig.unfence();
        rig.fence();
        sleep(Duration::from_mins(1)).await;
        assert!(store.calls().is_empty());
    });
}

#[test]
fn the_gate_is_known_after_a_restart() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut options = Options::default();
        options.claim.polling_max_interval_milliseconds = 5_000;
        let mut rig = ClaimRig::start_open(options, &store);
        rig.set_gate(Gate::Available);
        quiesce().await;
        rig.restart().await;
        quiesce().await;
        let before = store.count(Op::Claim);
        sleep(Duration::from_millis(15_100)).await;
        assert_eq!(store.count(Op::Claim) - before, 3, "at the relaxed interval of 5 s");
    });
}

#[test]
fn a_drained_claimer_stays_drained_and_answers_again() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.script(Op::Claim, Reply::Hang);
        let mut rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 1).await;
        let first = tokio::task::spawn_local(rig.addr.send(Drain));
        quiesce().await;
        rig.restart().await;
        assert!(first.await.expect("not aborted").is_err(), "whoever asked learns of the death");
        rig.addr.send(Drain).await.expect("alive");
        rig.addr.do_send(RequestImmediatePoll);
        rig.unfence();
        sleep(Duration::from_mins(10)).await;
        assert_eq!((store.count(Op::Claim), store.count(Op::ReleaseUnheld)), (1, 0));
        assert_eq!(rig.permits.available_permits(), Options::default().dispatch.max_in_flight as usize);
    });
}

#[test]
fn an_evicted_or_draining_instance_claims_nothing_after_a_restart() {
    in_virtual_time(async {
        for end in [workpump_actors::standing::Standing::evict, workpump_actors::standing::Standing::drain] {
            let store = FakeStore::new();
            let mut rig = ClaimRig::start_open(Options::default(), &store);
            store.called(Op::Claim, 1).await;
            end(&rig.standing);
            rig.restart().await;
            rig.unfence();
            sleep(Duration::from_mins(10)).await;
            assert_eq!(store.count(Op::Claim), 1);
        }
    });
}
