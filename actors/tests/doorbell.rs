//! The doorbell: how the claimer falls asleep, what wakes it, and what it passes on, in virtual time.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use workpump_actors::instance::Gate;
use workpump_actors::message::{Drain, Observe, Pause, RequestImmediatePoll, Resume, Unfence, WorkFreed};
use workpump_actors::options::Options;
use workpump_actors::port::{ArmMode, StoreError};
use workpump_actors::testing::{Call, ClaimRig, FakeStore, Op, Reply, Row, in_virtual_time, quiesce};

fn millis(value: u64) -> Duration {
    Duration::from_millis(value)
}

fn signals_only() -> Options {
    let mut options = Options::default();
    options.claim.enable_safety_net_poll = false;
    options
}

/// The statements so far, a letter each: claim, arm, disarm, pass, next due.
fn letters(store: &FakeStore) -> String {
    let letter = |call| match call {
        Call::Claim(_) => 'c',
        Call::Arm(ArmMode::Idle, _) => 'a',
        Call::Arm(ArmMode::Full, _) => 'f',
        Call::Disarm => 'd',
        Call::Pass => 'p',
        Call::NextDue => 'n',
        _ => '?',
    };
    store.calls().into_iter().map(letter).collect()
}

/// What came since a number of statements.
fn since(store: &FakeStore, before: usize) -> String {
    letters(store).split_off(before)
}

async fn ring(rig: &ClaimRig) {
    rig.addr.send(RequestImmediatePoll).await.expect("alive");
}

/// Starts one and lets it fall asleep.
async fn asleep(options: Options) -> (Arc<FakeStore>, ClaimRig, usize) {
    let store = FakeStore::new();
    let rig = ClaimRig::start_with_bell(options, &store);
    sleep(millis(100)).await;
    assert_eq!(store.armed(), Some(ArmMode::Idle));
    let before = store.calls().len();
    (store, rig, before)
}

#[test]
fn it_looks_lingers_looks_arms_and_looks_once_more_before_it_sleeps() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let _rig = ClaimRig::start_with_bell(Options::default(), &store);
        sleep(Duration::from_secs(4)).await;
        assert_eq!(letters(&store), "ccac");
        assert_eq!(store.gaps(Op::Claim), [2, 0], "one linger");
    });
}

#[test]
fn a_safety_poll_that_finds_nothing_is_one_claim_and_stays_armed() {
    in_virtual_time(async {
        let (store, _rig, before) = asleep(Options::default()).await;
        sleep(Duration::from_mins(10)).await;
        let polls = since(&store, before);
        assert!(polls.chars().all(|letter| letter == 'c'), "{polls}");
        // 5 s once, then every 10 s: the cadence of the seed, to which the looks before a sleep do not count.
        assert_eq!(store.gaps(Op::Claim)[2..5], [5_000, 10_000, 10_000]);
        assert!((60..=61).contains(&polls.len()), "{}", polls.len());
    });
}

#[test]
fn a_ring_is_answered_with_a_claim_and_a_second_look_and_the_lock_stays_while_rows_are_few() {
    in_virtual_time(async {
        for rows in [1, 9] {
            let (store, mut rig, before) = asleep(Options::default()).await;
            store.insert_many(rows, &Row::default());
            let at = tokio::time::Instant::now();
            ring(&rig).await;
            let held = rig.dispatch.next().await;
            assert_eq!((held.deliveries.len(), at.elapsed()), (rows, Duration::ZERO));
            sleep(millis(100)).await;
            assert_eq!(since(&store, before), "cc", "{rows} rows");
            assert_eq!(store.armed(), Some(ArmMode::Idle));
        }
    });
}

#[test]
fn many_rows_wake_it_up_and_it_arms_once_when_it_falls_asleep() {
    in_virtual_time(async {
        let (store, rig, before) = asleep(Options::default()).await;
        store.insert_many(10, &Row::default());
        ring(&rig).await;
        sleep(millis(100)).await;
        assert_eq!(since(&store, before), "cdcac");
        assert_eq!(store.armed(), Some(ArmMode::Idle));
    });
}

#[test]
fn rows_that_take_the_last_permit_wake_it_up() {
    in_virtual_time(async {
        let mut options = Options::default();
        options.dispatch.max_in_flight = 2;
        let (store, mut rig, before) = asleep(options).await;
        store.insert_many(2, &Row::default());
        ring(&rig).await;
        let _held = rig.dispatch.next().await;
        quiesce().await;
        assert_eq!(since(&store, before), "cd", "there may be more");
    });
}

/// One row for each ring, so many of them at this distance.
async fn rows_with_a_ring_each(apart: Duration, rings: usize) -> (Arc<FakeStore>, String) {
    let (store, rig, before) = asleep(Options::default()).await;
    for _ in 0..rings {
        store.insert(Row::default());
        ring(&rig).await;
        sleep(apart).await;
    }
    let statements = since(&store, before);
    (store, statements)
}

#[test]
fn the_third_ring_within_fifty_milliseconds_wakes_it_up_if_it_brings_rows() {
    in_virtual_time(async {
        let (store, statements) = rows_with_a_ring_each(millis(20), 2).await;
        assert_eq!((&*statements, store.armed()), ("cccc", Some(ArmMode::Idle)));
        let (_, statements) = rows_with_a_ring_each(millis(20), 3).await;
        assert_eq!(statements, "cccccdcac", "awake, and asleep again");
        // Spread out, they never do.
        let (store, statements) = rows_with_a_ring_each(millis(26), 100).await;
        assert_eq!((statements, store.armed()), ("cc".repeat(100), Some(ArmMode::Idle)));
    });
}

#[test]
fn what_was_written_here_is_looked_behind_once_and_twice_if_a_ring_found_nothing_before() {
    in_virtual_time(async {
        let (store, mut rig, before) = asleep(Options::default()).await;
        store.insert(Row::default());
        ring(&rig).await;
        let held = rig.dispatch.next().await;
        sleep(millis(100)).await;
        assert_eq!(since(&store, before), "cc");
        rig.addr.send(WorkFreed).await.expect("alive");
        sleep(millis(100)).await;
        assert_eq!(since(&store, before), "ccc", "nothing rang behind it");
        // Something is stored behind the row in hand. Another claim may weigh its stream when it becomes claimable.
        ring(&rig).await;
        sleep(millis(100)).await;
        assert_eq!(since(&store, before), "ccccc");
        rig.addr.send(WorkFreed).await.expect("alive");
        quiesce().await;
        assert_eq!(since(&store, before), "cccccc");
        store.insert(Row::default());
        let at = tokio::time::Instant::now();
        assert_eq!(rig.dispatch.next().await.deliveries.len(), 1);
        assert_eq!(at.elapsed(), millis(2), "found by the second look");
        drop(held);
        sleep(millis(100)).await;
        let before = store.calls().len();
        for looks in ["c", "cc"] {
            rig.addr.send(WorkFreed).await.expect("alive");
            sleep(millis(100)).await;
            assert_eq!(since(&store, before), looks, "nothing is behind anything any more");
        }
        assert_eq!(store.armed(), Some(ArmMode::Idle));
    });
}

#[test]
fn what_was_written_during_the_linger_is_looked_behind_at_once_and_the_second_look_still_comes() {
    in_virtual_time(async {
        for during_the_claim in [false, true] {
            let (store, mut rig, before) = asleep(signals_only()).await;
            store.insert(Row::default());
            if during_the_claim {
                store.script(Op::Claim, Reply::Slow(millis(1)));
            }
            ring(&rig).await;
            if !during_the_claim {
                rig.dispatch.next().await;
            }
            rig.addr.send(WorkFreed).await.expect("alive");
            quiesce().await;
            sleep(millis(1)).await;
            quiesce().await;
            assert_eq!(since(&store, before), "cc");
            store.insert(Row::default());
            sleep(millis(50)).await;
            // The third one finds the row, and is followed by one look more.
            assert_eq!(since(&store, before), "ccccn", "{during_the_claim}");
        }
    });
}

#[test]
fn a_proof_that_nobody_waited_for_is_no_look() {
    in_virtual_time(async {
        let (store, rig, before) = asleep(Options::default()).await;
        rig.addr.send(Unfence).await.expect("alive");
        sleep(millis(100)).await;
        assert_eq!(since(&store, before), "");
    });
}

#[test]
fn a_ring_in_vain_costs_two_claims_and_stays_armed() {
    in_virtual_time(async {
        let (store, rig, before) = asleep(Options::default()).await;
        ring(&rig).await;
        sleep(millis(100)).await;
        assert_eq!(since(&store, before), "cc");
        assert_eq!(store.armed(), Some(ArmMode::Idle));
    });
}

#[test]
fn a_row_behind_the_lock_of_another_claim_is_found_by_the_second_look() {
    in_virtual_time(async {
        let (store, mut rig, before) = asleep(signals_only()).await;
        ring(&rig).await;
        quiesce().await;
        store.insert(Row::default());
        assert_eq!(rig.dispatch.next().await.deliveries.len(), 1);
        assert_eq!(&since(&store, before)[..2], "cc");
    });
}

#[test]
fn a_hundred_rings_during_a_claim_cause_one_follow_up() {
    in_virtual_time(async {
        let (store, rig, _) = asleep(Options::default()).await;
        let before = store.count(Op::Claim);
        store.script(Op::Claim, Reply::Slow(Duration::from_secs(1)));
        ring(&rig).await;
        quiesce().await;
        for _ in 0..100 {
            ring(&rig).await;
        }
        sleep(millis(1_001)).await;
        assert_eq!(store.count(Op::Claim), before + 2);
    });
}

#[test]
fn waits_for_the_lock_grow_up_to_the_tight_base_with_a_claim_after_each() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.set_producers_at_work(true);
        let mut rig = ClaimRig::start_with_bell(Options::default(), &store);
        sleep(Duration::from_mins(1)).await;
        let waits: Vec<u128> = store
            .calls()
            .iter()
            .filter_map(|call| match call {
                Call::Arm(_, wait) => Some(wait.as_millis()),
                _ => None,
            })
            .collect();
        assert_eq!(waits[..7], [5, 10, 20, 40, 80, 160, 250]);
        assert!(waits[7..].iter().all(|wait| *wait == 250));
        assert!(waits.len() < 260, "four statements a second and as many claims: {}", waits.len());
        // What commits meanwhile waits for the end of one slice at most.
        store.insert(Row::default());
        let at = tokio::time::Instant::now();
        rig.dispatch.next().await;
        assert!(at.elapsed() <= millis(250), "{:?}", at.elapsed());
        // After rows the waits are short again.
        let before = store.calls().len();
        sleep(millis(20)).await;
        let next = store.calls().into_iter().skip(before).find_map(|call| match call {
            Call::Arm(_, wait) => Some(wait),
            _ => None,
        });
        assert_eq!(next, Some(millis(5)));
        store.set_producers_at_work(false);
        sleep(millis(20)).await;
        assert_eq!(store.armed(), Some(ArmMode::Idle));
        let before = store.calls().len();
        sleep(Duration::from_secs(4)).await;
        assert_eq!(since(&store, before), "");
    });
}

#[test]
fn a_row_that_was_stored_while_the_lock_was_waited_for_is_found_by_the_look_after_it() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.set_producers_at_work(true);
        let mut rig = ClaimRig::start_with_bell(signals_only(), &store);
        store.called(Op::Arm, 5).await;
        store.insert(Row::default());
        store.set_producers_at_work(false);
        assert_eq!(rig.dispatch.next().await.deliveries.len(), 1, "nobody rang");
    });
}

#[test]
fn the_end_of_the_session_that_holds_the_lock_is_a_claim_and_another_lock_at_once() {
    in_virtual_time(async {
        let (store, mut rig, before) = asleep(signals_only()).await;
        store.insert(Row::default());
        let at = tokio::time::Instant::now();
        store.end_claim_session();
        assert_eq!(rig.dispatch.next().await.deliveries.len(), 1);
        assert_eq!(at.elapsed(), Duration::ZERO);
        sleep(millis(100)).await;
        assert_eq!(since(&store, before), "ccacn", "on the next session");
        assert_eq!(store.armed(), Some(ArmMode::Idle));
        let account = rig.addr.send(Observe).await.expect("alive");
        assert_eq!((account.counter("arms"), account.counter("arm_losses")), (2, 1));
    });
}

#[test]
fn without_an_available_gate_nobody_arms() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let rig = ClaimRig::start_with_bell(Options::default(), &store);
        rig.set_gate(Gate::Unconfigured);
        sleep(Duration::from_mins(1)).await;
        rig.set_gate(Gate::Unavailable);
        sleep(Duration::from_mins(1)).await;
        assert_eq!(store.armed(), None);
        assert!(store.count(Op::Arm) <= 1, "before it heard");
        let before = store.count(Op::Arm);
        rig.set_gate(Gate::Available);
        sleep(millis(100)).await;
        assert_eq!((store.count(Op::Arm), store.armed()), (before + 1, Some(ArmMode::Idle)));
    });
}

#[test]
fn a_gate_that_is_lost_ends_the_sleep_and_gives_the_lock_back() {
    in_virtual_time(async {
        for gate in [Gate::Unavailable, Gate::Unconfigured] {
            let (store, rig, before) = asleep(signals_only()).await;
            rig.set_gate(gate);
            sleep(millis(600)).await;
            assert_eq!(store.armed(), None);
            let after = since(&store, before);
            assert!(after.starts_with("dcc") && !after.contains('a'), "it polls at the tight base: {after}");
        }
    });
}

#[test]
fn a_drain_a_fence_and_an_eviction_give_the_lock_back() {
    in_virtual_time(async {
        for stop in ["drain", "fence", "evict"] {
            let (store, rig, before) = asleep(Options::default()).await;
            match stop {
                "drain" => drop(rig.addr.send(Drain).await.expect("alive")),
                "fence" => rig.fence(),
                _ => rig.addr.do_send(workpump_actors::message::Evicted(rig.instance)),
            }
            sleep(Duration::from_mins(1)).await;
            assert_eq!(store.armed(), None, "{stop}");
            // Who drains may have been rung and not looked yet.
            assert_eq!(since(&store, before), if stop == "drain" { "pd" } else { "d" }, "{stop}");
            if stop == "fence" {
                rig.unfence();
                sleep(millis(100)).await;
                assert_eq!(store.armed(), Some(ArmMode::Idle));
            }
        }
    });
}

#[test]
fn a_paused_instance_is_armed_as_a_full_one_and_passes_on_what_it_does_not_take() {
    in_virtual_time(async {
        let (store, rig, before) = asleep(Options::default()).await;
        rig.addr.send(Pause).await.expect("alive");
        sleep(Duration::from_mins(1)).await;
        assert_eq!((store.armed(), &*since(&store, before)), (Some(ArmMode::Full), "fp"));
        ring(&rig).await;
        quiesce().await;
        assert_eq!(since(&store, before), "fpp");
        rig.addr.send(Resume).await.expect("alive");
        sleep(millis(100)).await;
        assert_eq!((store.armed(), &*since(&store, before)), (Some(ArmMode::Idle), "fppccac"));
        rig.addr.send(Pause).await.expect("alive");
        rig.fence();
        sleep(millis(100)).await;
        assert_eq!(store.armed(), None, "who may not be a member is sent nothing");
    });
}

#[test]
fn the_next_claimer_gives_back_what_the_one_before_it_held() {
    in_virtual_time(async {
        let (store, mut rig, before) = asleep(signals_only()).await;
        rig.restart().await;
        sleep(millis(100)).await;
        let after: String = since(&store, before).chars().filter(|letter| *letter != '?').collect();
        assert!(after.starts_with("dccac"), "{after}");
        assert_eq!(store.armed(), Some(ArmMode::Idle));
    });
}

#[test]
fn a_claimer_that_cannot_arm_polls_as_without_a_gate() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.always(|call| {
            matches!(call, Call::Arm(..)).then(|| Reply::Fail(StoreError::NotDirect("a pooler".to_owned())))
        });
        let _rig = ClaimRig::start_with_bell(signals_only(), &store);
        sleep(Duration::from_secs(50)).await;
        assert_eq!(store.count(Op::Arm), 1, "a pooler is asked once a minute");
        assert!(store.count(Op::Claim) > 8, "{}", store.count(Op::Claim));
        store.recover();
        sleep(Duration::from_secs(30)).await;
        assert_eq!(store.armed(), Some(ArmMode::Idle));
    });
}

#[test]
fn an_outage_while_it_arms_makes_no_hot_loop() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.always(|call| {
            matches!(call, Call::Arm(..))
                .then(|| Reply::Fail(StoreError::Unavailable("connection refused".to_owned())))
        });
        let _rig = ClaimRig::start_with_bell(Options::default(), &store);
        sleep(Duration::from_mins(1)).await;
        assert!(store.calls().len() < 60, "{}", store.calls().len());
        store.always(|_| Some(Reply::Fail(StoreError::Unavailable("connection refused".to_owned()))));
        let before = store.calls().len();
        sleep(Duration::from_mins(1)).await;
        assert!(store.calls().len() - before < 60, "{}", since(&store, before));
    });
}

#[test]
fn what_waits_behind_a_run_is_looked_for_when_it_is_written() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = ClaimRig::start_with_bell(signals_only(), &store);
        store.insert(Row::of_stream(uuid::Uuid::now_v7()));
        ring(&rig).await;
        let dispatch = rig.dispatch.next().await;
        let done = dispatch.deliveries.into_iter().next().expect("one row");
        let settlement = done.settle(workpump_actors::port::Verdict::Complete);
        assert!(settlement.frees_work(Gate::Available), "the row behind it has rung already, in vain");
    });
}

#[test]
fn what_waits_behind_a_run_that_was_claimed_before_anybody_could_ring_is_looked_for_too() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut rig = ClaimRig::start_with_bell(signals_only(), &store);
        rig.set_gate(Gate::Unavailable);
        store.insert(Row::of_stream(uuid::Uuid::now_v7()));
        let dispatch = rig.dispatch.next().await;
        let running = dispatch.deliveries.into_iter().next().expect("one row");
        rig.set_gate(Gate::Available);
        sleep(millis(100)).await;
        assert_eq!(store.armed(), Some(ArmMode::Idle), "asleep, and the handler still runs");
        let settlement = running.settle(workpump_actors::port::Verdict::Complete);
        assert!(settlement.frees_work(Gate::Available));
        assert!(!settlement.frees_work(Gate::Unavailable), "it polls");
    });
}

#[test]
fn a_ring_whose_claim_fails_is_not_lost_however_rarely_it_polls() {
    let mut hourly = Options::default();
    hourly.claim.polling_interval_milliseconds = 3_600_000;
    hourly.claim.polling_max_interval_milliseconds = 3_600_000;
    let errors: [fn() -> StoreError; 3] = [
        || StoreError::Contended("canceling statement due to lock timeout".to_owned()),
        || StoreError::Unavailable("connection refused".to_owned()),
        || StoreError::Other { code: "XX000".to_owned(), message: "internal error".to_owned() },
    ];
    for (options, error) in
        [signals_only(), hourly].iter().flat_map(|options| errors.map(|error| (options, error)))
    {
        let options = options.clone();
        in_virtual_time(async move {
            let (store, mut rig, _) = asleep(options).await;
            store.always(move |call| matches!(call, Call::Claim(_)).then(|| Reply::Fail(error())));
            store.insert(Row::default());
            ring(&rig).await;
            sleep(Duration::from_mins(1)).await;
            store.recover();
            let recovered = tokio::time::Instant::now();
            assert_eq!(rig.dispatch.next().await.deliveries.len(), 1);
            assert!(recovered.elapsed() <= Duration::from_secs(10), "{}: {:?}", error(), recovered.elapsed());
        });
    }
}

#[test]
fn a_sleeper_without_polls_looks_again_before_a_lease_that_a_peer_took_meanwhile_can_end() {
    in_virtual_time(async {
        let (store, _rig, before) = asleep(signals_only()).await;
        assert_eq!(letters(&store), "ccacn", "the due time is asked for when it is armed");
        sleep(Duration::from_mins(15)).await;
        assert_eq!(since(&store, before), "cncncncncncn", "twice a lease");
    });
}

#[test]
fn a_row_for_later_that_is_stored_while_it_sleeps_is_taken_when_it_is_due() {
    in_virtual_time(async {
        let (store, mut rig, before) = asleep(signals_only()).await;
        let at = tokio::time::Instant::now();
        store.insert(Row { due_in: Duration::from_secs(40), ..Row::default() });
        ring(&rig).await;
        rig.dispatch.next().await;
        assert_eq!(at.elapsed(), Duration::from_secs(40));
        assert_eq!(&since(&store, before)[..4], "ccnc");
    });
}

/// Two permits, both in use.
async fn full(mut options: Options) -> (Arc<FakeStore>, ClaimRig, workpump_actors::message::Dispatch) {
    let store = FakeStore::new();
    store.insert_many(2, &Row::default());
    options.dispatch.max_in_flight = 2;
    let mut rig = ClaimRig::start_with_bell(options, &store);
    let held = rig.dispatch.next().await;
    assert_eq!(held.deliveries.len(), 2);
    (store, rig, held)
}

#[test]
fn a_full_instance_arms_and_passes_one_ring_on_and_each_that_comes() {
    in_virtual_time(async {
        let (store, rig, held) = full(Options::default()).await;
        sleep(millis(19)).await;
        assert_eq!(letters(&store), "c", "a moment without permits is not worth a word");
        sleep(Duration::from_mins(1)).await;
        assert_eq!((&*letters(&store), store.armed()), ("cfp", Some(ArmMode::Full)));
        for rings in ["cfpp", "cfppp"] {
            ring(&rig).await;
            sleep(millis(50)).await;
            assert_eq!(letters(&store), rings);
        }
        drop(held);
        sleep(millis(100)).await;
        assert_eq!((&*letters(&store), store.armed()), ("cfpppccac", Some(ArmMode::Idle)));
    });
}

#[test]
fn a_storm_of_rings_is_passed_on_fifty_times_a_second() {
    in_virtual_time(async {
        let (store, rig, _held) = full(Options::default()).await;
        sleep(millis(100)).await;
        let before = store.count(Op::Pass);
        for _ in 0..1_000 {
            ring(&rig).await;
            sleep(millis(1)).await;
        }
        let passed = store.count(Op::Pass) - before;
        assert!((48..=52).contains(&passed), "{passed}");
        let before = store.count(Op::Pass);
        sleep(Duration::from_mins(1)).await;
        assert!(store.count(Op::Pass) - before <= 1, "the last one, and no more");
    });
}

#[test]
fn a_full_instance_among_sleepers_that_do_not_poll_passes_on_when_something_is_due() {
    in_virtual_time(async {
        let (store, _rig, _held) = full(signals_only()).await;
        sleep(Duration::from_secs(20)).await;
        let passed = store.count(Op::Pass);
        assert!((4..=5).contains(&passed), "every healthy interval: {passed}");
        let at = Duration::from_millis(2_500);
        store.insert(Row { due_in: at, ..Row::default() });
        sleep(Duration::from_secs(6)).await;
        let times = store.times(Op::Pass);
        assert!(times.windows(2).any(|pair| pair[1].saturating_sub(pair[0]) < millis(4_900)), "{times:?}");
    });
}

#[test]
fn a_full_instance_whose_session_ends_arms_and_passes_again() {
    in_virtual_time(async {
        let (store, _rig, _held) = full(Options::default()).await;
        sleep(millis(100)).await;
        store.end_claim_session();
        sleep(millis(100)).await;
        assert_eq!((&*letters(&store), store.armed()), ("cfpfp", Some(ArmMode::Full)));
    });
}

#[test]
fn while_producers_are_at_work_a_full_instance_passes_on_after_each_wait() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.set_producers_at_work(true);
        store.insert_many(2, &Row::default());
        let mut options = Options::default();
        options.dispatch.max_in_flight = 2;
        let mut rig = ClaimRig::start_with_bell(options, &store);
        let _held = rig.dispatch.next().await;
        sleep(Duration::from_secs(10)).await;
        let passed = store.count(Op::Pass);
        assert!(store.count(Op::Arm) - passed <= 1, "one is under way at most");
        assert!((10..60).contains(&passed), "{passed}");
    });
}
