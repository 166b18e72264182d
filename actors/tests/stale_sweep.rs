//! The backstop sweep and the release: at the right time, never itself, never in one breath, and never in doubt.

use std::time::Duration;

use tokio::time::sleep;
use workpump_actors::instance::InstanceId;
use workpump_actors::message::{
    Drain, Drained, Evicted, EvictionReason, PeerEvicted, SubscribeToEvictions, SweepNow,
};
use workpump_actors::options::Options;
use workpump_actors::port::StoreError;
use workpump_actors::testing::{SweepRig, TestProbe, in_virtual_time, quiesce};

fn seconds(value: u64) -> Duration {
    Duration::from_secs(value)
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("connection refused".to_owned())
}

/// Sweeps only: nobody watches.
fn no_watch() -> Options {
    let mut options = Options::default();
    options.liveness.death_watch = false;
    options
}

fn gaps(times: &[Duration]) -> Vec<f64> {
    times.windows(2).map(|pair| pair[1].saturating_sub(pair[0]).as_secs_f64()).collect()
}

#[test]
fn it_sweeps_soon_after_the_start_and_then_every_minute_give_or_take_a_fifth() {
    in_virtual_time(async {
        let rig = SweepRig::start_open(&no_watch());
        sleep(seconds(3_600)).await;
        let sweeps = rig.sweep.sweeps();
        assert!(sweeps[0] <= seconds(8), "{:?}", sweeps[0]);
        let gaps = gaps(&sweeps);
        assert!(gaps.iter().all(|gap| (48.0..=72.1).contains(gap)), "{gaps:?}");
        assert!(
            gaps.iter().any(|gap| *gap < 55.0) && gaps.iter().any(|gap| *gap > 65.0),
            "no spread: {gaps:?}"
        );
        assert!((50..=75).contains(&sweeps.len()), "{}", sweeps.len());
        assert!(rig.watch.watches().is_empty(), "switched off");
        assert_eq!(rig.account().await.state, "sweeping only");
    });
}

#[test]
fn the_interval_is_an_option() {
    in_virtual_time(async {
        let mut options = no_watch();
        options.liveness.stale_sweep_interval_seconds = 5;
        let rig = SweepRig::start_open(&options);
        sleep(seconds(100)).await;
        assert!((16..=26).contains(&rig.sweep.sweeps().len()), "{:?}", rig.sweep.sweeps());
    });
}

#[test]
fn before_the_first_beat_and_while_fenced_it_judges_nobody() {
    in_virtual_time(async {
        let rig = SweepRig::start(&Options::default());
        rig.addr.do_send(SweepNow);
        sleep(seconds(600)).await;
        assert!(rig.sweep.sweeps().is_empty() && rig.watch.watches().is_empty());
        assert_eq!(rig.account().await.state, "fenced");
        rig.unfence();
        quiesce().await;
        assert_eq!(rig.sweep.sweeps().len(), 1, "what was asked for is done as soon as it may be");
        rig.fence();
        sleep(seconds(600)).await;
        assert_eq!(rig.sweep.sweeps().len(), 1);
        rig.unfence();
        sleep(seconds(80)).await;
        assert!((2..=3).contains(&rig.sweep.sweeps().len()), "no burst: {:?}", rig.sweep.sweeps());
    });
}

#[test]
fn whom_a_sweep_finds_is_told_and_what_he_held_comes_back_in_passes_until_nothing_is_left() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&no_watch());
        let peer = InstanceId::fresh();
        rig.sweep.go_stale(rig.instance, 0);
        rig.sweep.go_stale(peer, 10_500);
        rig.addr.do_send(SweepNow);
        sleep(seconds(5)).await;
        assert_eq!(rig.told.take(), [PeerEvicted { instance: peer, reason: EvictionReason::StaleHeartbeat }]);
        let rows: Vec<u64> = rig.sweep.passes().iter().map(|(_, rows)| *rows).collect();
        assert_eq!(rows.iter().sum::<u64>(), 10_500);
        assert!(rows[0] <= 1_000 && rows[1..].iter().all(|rows| *rows <= 250), "{rows:?}");
        assert_eq!(rig.wake.take().len(), rows.len(), "each pass made rows claimable");
        let account = rig.account().await;
        assert_eq!((account.counter("evicted"), account.counter("released")), (1, 10_500));
        let before = rig.sweep.passes().len();
        sleep(seconds(40)).await;
        assert_eq!(rig.sweep.passes().len(), before, "nothing left, nothing done");
    });
}

#[test]
fn what_another_one_left_unfinished_is_gone_on_with() {
    in_virtual_time(async {
        let rig = SweepRig::start_open(&no_watch());
        rig.sweep.leave_rows(2_500);
        sleep(seconds(10)).await;
        assert_eq!(rig.sweep.rows_left(), 0);
        assert_eq!(rig.account().await.counter("evicted"), 0);
    });
}

#[test]
fn rows_that_somebody_has_locked_are_asked_for_ever_more_rarely_and_come_back_in_the_end() {
    in_virtual_time(async {
        let rig = SweepRig::start_open(&no_watch());
        rig.sweep.leave_rows(10);
        rig.sweep.set_locked(true);
        sleep(seconds(300)).await;
        let vain = rig.sweep.passes().len();
        assert!((10..=30).contains(&vain), "{vain} passes in five minutes");
        rig.sweep.set_locked(false);
        sleep(seconds(31)).await;
        assert_eq!(rig.sweep.rows_left(), 0);
    });
}

#[test]
fn while_another_one_sweeps_it_does_nothing_and_waits_for_its_next_turn() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&no_watch());
        rig.sweep.set_busy(true);
        rig.sweep.go_stale(InstanceId::fresh(), 5);
        sleep(seconds(20)).await;
        assert_eq!(rig.sweep.sweeps().len(), 1);
        assert!(rig.told.take().is_empty() && rig.account().await.last_error.is_none());
    });
}

#[test]
fn an_error_is_backed_off_and_never_ends_the_loop() {
    in_virtual_time(async {
        let rig = SweepRig::start_open(&no_watch());
        (0..40).for_each(|_| rig.sweep.fail_next(unavailable()));
        sleep(seconds(120)).await;
        let tries = rig.sweep.sweeps().len();
        assert!((6..=14).contains(&tries), "{tries} tries in two minutes");
        sleep(seconds(1_200)).await;
        let account = rig.account().await;
        assert_eq!(account.counter("errors"), 40);
        assert!(account.last_success_seconds_ago.is_some_and(|ago| ago < 80.0));
    });
}

#[test]
fn the_word_of_the_database_that_it_is_evicted_itself_is_passed_on() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&no_watch());
        rig.sweep.fail_next(StoreError::Evicted(rig.instance));
        rig.sweep.fail_next(StoreError::Evicted(rig.instance));
        rig.addr.do_send(SweepNow);
        quiesce().await;
        assert_eq!(rig.evicted.take(), [Evicted(rig.instance)]);
        rig.standing.evict();
        rig.addr.do_send(Evicted(rig.instance));
        let sweeps = rig.sweep.sweeps().len();
        sleep(seconds(600)).await;
        assert_eq!(rig.sweep.sweeps().len(), sweeps);
        assert_eq!(rig.account().await.state, "stopped");
    });
}

#[test]
fn a_drain_ends_everything_at_once_even_a_release() {
    in_virtual_time(async {
        let rig = SweepRig::start_open(&Options::default());
        rig.sweep.leave_rows(1_000_000);
        rig.sweep.set_locked(true);
        rig.addr.do_send(SweepNow);
        quiesce().await;
        rig.standing.drain();
        assert_eq!(rig.addr.send(Drain).await, Ok(Drained::default()));
        assert_eq!(rig.addr.send(Drain).await, Ok(Drained::default()), "also when asked again");
        let (sweeps, passes, watches) =
            (rig.sweep.sweeps().len(), rig.sweep.passes().len(), rig.watch.watches().len());
        rig.addr.do_send(SweepNow);
        sleep(seconds(600)).await;
        assert_eq!(
            (rig.sweep.sweeps().len(), rig.sweep.passes().len(), rig.watch.watches().len()),
            (sweeps, passes, watches)
        );
    });
}

#[test]
fn a_successor_goes_on_with_the_release_and_tells_the_same_subscribers() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&no_watch());
        rig.sweep.leave_rows(5_000);
        rig.sweep.set_locked(true);
        rig.addr.do_send(SweepNow);
        quiesce().await;
        rig.restart().await;
        rig.addr.do_send(SubscribeToEvictions(rig.told.recipient()));
        rig.sweep.set_locked(false);
        rig.sweep.go_stale(InstanceId::fresh(), 0);
        sleep(seconds(15)).await;
        assert_eq!(rig.sweep.rows_left(), 0);
        assert_eq!(rig.told.take().len(), 1, "asking twice is asking once");
    });
}

#[test]
fn whom_a_sweep_has_evicted_is_told_although_the_actor_died_before_the_answer() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&no_watch());
        let peer = InstanceId::fresh();
        rig.sweep.set_delay(seconds(2));
        rig.sweep.go_stale(peer, 0);
        rig.addr.do_send(SweepNow);
        quiesce().await;
        assert_eq!(rig.sweep.sweeps().len(), 1, "under way");
        rig.restart().await;
        sleep(seconds(15)).await;
        assert_eq!(rig.told.take(), [PeerEvicted { instance: peer, reason: EvictionReason::StaleHeartbeat }]);
    });
}

#[test]
fn whoever_has_ended_is_forgotten_and_the_others_are_told() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&no_watch());
        let (first, second) = (TestProbe::<PeerEvicted>::start(), TestProbe::<PeerEvicted>::start());
        rig.addr.do_send(SubscribeToEvictions(first.recipient()));
        rig.addr.do_send(SubscribeToEvictions(second.recipient()));
        drop(first);
        rig.sweep.go_stale(InstanceId::fresh(), 0);
        rig.addr.do_send(SweepNow);
        quiesce().await;
        let mut second = second;
        assert_eq!((rig.told.take().len(), second.take().len()), (1, 1));
    });
}
