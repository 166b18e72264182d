//! The poll cadence and the gate: what the seed promises, in virtual time.

use std::time::Duration;

use tokio::time::sleep;
use workpump_actors::instance::Gate;
use workpump_actors::message::{Observe, RequestImmediatePoll};
use workpump_actors::options::{ClaimOptions, Options};
use workpump_actors::port::StoreError;
use workpump_actors::testing::{ClaimRig, FakeStore, Op, Reply, Row, in_virtual_time, quiesce};

fn options(base: u64, max: u64, healthy: Option<u64>) -> Options {
    let mut options = Options::default();
    options.claim = ClaimOptions {
        polling_interval_milliseconds: base,
        polling_max_interval_milliseconds: max,
        notify_healthy_polling_interval_milliseconds: healthy,
        ..ClaimOptions::default()
    };
    options
}

fn signals_only() -> Options {
    let mut options = Options::default();
    options.claim.enable_safety_net_poll = false;
    options
}

async fn counter(rig: &ClaimRig, name: &str) -> u64 {
    rig.addr.send(Observe).await.expect("alive").counter(name)
}

#[test]
fn an_idle_claimer_follows_the_table_of_the_seed() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let _rig = ClaimRig::start_open(Options::default(), &store);
        store.called(Op::Claim, 10).await;
        assert_eq!(store.gaps(Op::Claim), [250, 500, 1_000, 2_000, 4_000, 8_000, 10_000, 10_000, 10_000]);
    });
}

#[test]
fn an_available_gate_without_a_healthy_interval_backs_off_from_the_base() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = ClaimRig::start(options(50, 2_000, None), &store);
        rig.set_gate(Gate::Available);
        rig.unfence();
        store.called(Op::Claim, 4).await;
        assert_eq!(store.gaps(Op::Claim), [50, 100, 200]);
    });
}

#[test]
fn an_unavailable_gate_pins_to_the_base() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = ClaimRig::start(options(100, 5_000, Some(1_000)), &store);
        rig.set_gate(Gate::Unavailable);
        rig.unfence();
        store.called(Op::Claim, 20).await;
        assert!(store.gaps(Op::Claim).iter().all(|gap| *gap == 100));
    });
}

#[test]
fn a_healthy_gate_waits_the_relaxed_interval() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = ClaimRig::start(Options::default(), &store);
        rig.set_gate(Gate::Available);
        rig.unfence();
        store.called(Op::Claim, 4).await;
        assert_eq!(store.gaps(Op::Claim), [5_000, 10_000, 10_000]);
    });
}

#[test]
fn a_flip_in_either_direction_wakes_once() {
    in_virtual_time(async {
        let hour = 3_600_000;
        let store = FakeStore::new();
        let rig = ClaimRig::start_open(options(hour, hour, None), &store);
        store.called(Op::Claim, 1).await;
        for (gate, claims) in [(Gate::Unavailable, 2), (Gate::Available, 3)] {
            rig.set_gate(gate);
            quiesce().await;
            sleep(Duration::from_mins(5)).await;
            assert_eq!(store.count(Op::Claim), claims);
        }
    });
}

#[test]
fn a_reconnect_counts_once_per_outage_and_the_startup_once() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.script(Op::Claim, Reply::Fail(StoreError::Unavailable("not yet".to_owned())));
        let rig = ClaimRig::start_open(Options::default(), &store);
        quiesce().await;
        assert_eq!(counter(&rig, "startup_catch_up").await, 0, "a failed claim catches nothing up");
        store.called(Op::Claim, 5).await;
        assert_eq!(counter(&rig, "startup_catch_up").await, 1);
        assert_eq!(counter(&rig, "reconnect_catch_up").await, 0);
        let flips = [
            (Gate::Available, 0),
            (Gate::Available, 0),
            (Gate::Unavailable, 0),
            (Gate::Unavailable, 0),
            (Gate::Available, 1),
            (Gate::Available, 1),
            (Gate::Unavailable, 1),
            (Gate::Available, 2),
        ];
        for (gate, expected) in flips {
            rig.set_gate(gate);
            assert_eq!(counter(&rig, "reconnect_catch_up").await, expected);
        }
        assert_eq!(counter(&rig, "startup_catch_up").await, 1);
    });
}

#[test]
fn the_same_state_again_is_no_flip() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = ClaimRig::start_open(options(3_600_000, 1, None), &store);
        store.called(Op::Claim, 1).await;
        rig.set_gate(Gate::Unconfigured);
        quiesce().await;
        quiesce().await;
        assert_eq!(store.count(Op::Claim), 1);
        assert_eq!(counter(&rig, "reconnect_catch_up").await, 0);
    });
}

#[test]
fn without_the_safety_net_a_healthy_gate_sleeps_until_a_signal() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = ClaimRig::start(signals_only(), &store);
        rig.set_gate(Gate::Available);
        rig.unfence();
        sleep(Duration::from_hours(24)).await;
        assert_eq!((store.count(Op::Claim), store.count(Op::NextDue)), (1, 1));
        rig.addr.do_send(RequestImmediatePoll);
        sleep(Duration::from_hours(24)).await;
        assert_eq!((store.count(Op::Claim), store.count(Op::NextDue)), (2, 2));
    });
}

#[test]
fn without_the_safety_net_a_row_is_claimed_when_it_comes_due() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert(Row { due_in: Duration::from_mins(90), ..Row::default() });
        let rig = ClaimRig::start(signals_only(), &store);
        rig.set_gate(Gate::Available);
        rig.unfence();
        store.called(Op::Claim, 2).await;
        assert_eq!(store.gaps(Op::Claim), [90 * 60_000]);
    });
}

#[test]
fn a_row_that_is_due_but_cannot_be_claimed_makes_no_hot_loop() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert(Row { category: workpump_actors::work::Category::Inbox, ..Row::default() });
        store.always(|call| match call {
            workpump_actors::testing::Call::Claim(_) => {
                Some(Reply::Fail(StoreError::Other { code: "XX000".to_owned(), message: "odd".to_owned() }))
            }
            _ => None,
        });
        let rig = ClaimRig::start(signals_only(), &store);
        rig.set_gate(Gate::Available);
        rig.unfence();
        sleep(Duration::from_mins(10)).await;
        assert!(store.count(Op::Claim) < 100, "{}", store.count(Op::Claim));
        assert!(store.count(Op::Claim) > 50, "{}", store.count(Op::Claim));
    });
}

#[test]
fn when_the_due_time_cannot_be_learnt_the_claimer_polls() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.script(Op::NextDue, Reply::Fail(StoreError::Unavailable("gone".to_owned())));
        let rig = ClaimRig::start(signals_only(), &store);
        rig.set_gate(Gate::Available);
        rig.unfence();
        store.called(Op::Claim, 2).await;
        assert_eq!(store.gaps(Op::Claim), [10_000]);
    });
}

#[test]
fn without_the_safety_net_an_unavailable_gate_polls_again_at_once() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = ClaimRig::start(signals_only(), &store);
        rig.set_gate(Gate::Available);
        rig.unfence();
        sleep(Duration::from_hours(1)).await;
        assert_eq!(store.count(Op::Claim), 1);
        rig.set_gate(Gate::Unavailable);
        store.called(Op::Claim, 6).await;
        assert!(store.gaps(Op::Claim)[1..].iter().all(|gap| *gap == 250));
    });
}

#[test]
fn the_deadline_is_one_per_cycle() {
    in_virtual_time(async {
        let store = FakeStore::new();
        for _ in 0..4 {
            store.script(Op::Claim, Reply::Slow(Duration::from_millis(90)));
        }
        let _rig = ClaimRig::start_open(options(100, 1, None), &store);
        store.called(Op::Claim, 5).await;
        assert_eq!(store.gaps(Op::Claim), [190, 190, 190, 190], "one wait, counted from the answer");
    });
}
