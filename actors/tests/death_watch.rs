//! The death watch: a death is judged a grace later, by a judge that is sure of itself, and everything else is no death.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use workpump_actors::instance::{AliveLock, InstanceId};
use workpump_actors::message::{Evicted, EvictionReason, PeerEvicted};
use workpump_actors::options::Options;
use workpump_actors::port::{StoreError, SuspectVerdict};
use workpump_actors::testing::{SweepRig, in_virtual_time, quiesce};

fn seconds(value: u64) -> Duration {
    Duration::from_secs(value)
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("connection refused".to_owned())
}

/// When watches began, in whole seconds, and which had a census.
fn watches(rig: &SweepRig) -> Vec<(u64, bool)> {
    rig.watch.watches().into_iter().map(|(at, _, census)| (at.as_secs(), census)).collect()
}

#[test]
fn it_watches_all_the_time_twenty_seconds_a_call_and_counts_the_members_after_thirty_seconds_of_its_own_lock()
{
    in_virtual_time(async {
        let rig = SweepRig::start_open(&Options::default());
        sleep(seconds(95)).await;
        assert_eq!(watches(&rig), [(0, false), (20, false), (30, true), (50, true), (70, true), (90, true)]);
        assert_eq!(rig.account().await.state, "watching");
    });
}

#[test]
fn a_death_is_judged_after_the_grace_and_followed_by_the_release_and_a_claim() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&Options::default());
        sleep(seconds(15)).await;
        let peer = InstanceId::fresh();
        let died = Instant::now();
        rig.sweep.leave_rows(10);
        rig.watch.die(peer);
        quiesce().await;
        assert_eq!(rig.account().await.state, "suspecting");
        rig.wake.expect_within(seconds(6)).await;
        assert!(died.elapsed() >= seconds(5) && died.elapsed() < Duration::from_millis(5_200));
        assert_eq!(rig.told.take(), [PeerEvicted { instance: peer, reason: EvictionReason::AliveLockLost }]);
        assert_eq!(rig.sweep.rows_left(), 0);
        let account = rig.account().await;
        assert_eq!((account.counter("evicted"), account.counter("false_alarms")), (1, 0));
        assert_eq!(account.state, "watching", "at once again");
    });
}

#[test]
fn the_grace_is_an_option() {
    in_virtual_time(async {
        let mut options = Options::default();
        options.liveness.lock_loss_grace_seconds = 1;
        let mut rig = SweepRig::start_open(&options);
        quiesce().await;
        let died = Instant::now();
        rig.watch.die(InstanceId::fresh());
        rig.told.expect_within(seconds(2)).await;
        assert!(died.elapsed() >= seconds(1) && died.elapsed() < Duration::from_millis(1_200));
    });
}

#[test]
fn who_has_its_lock_again_or_has_beaten_is_left_alone() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&Options::default());
        for verdict in [SuspectVerdict::Alive, SuspectVerdict::Beaten] {
            rig.watch.judge_next(Ok(verdict));
            rig.watch.die(InstanceId::fresh());
            sleep(seconds(6)).await;
        }
        assert!(rig.told.take().is_empty());
        let account = rig.account().await;
        assert_eq!((account.counter("suspects"), account.counter("false_alarms")), (2, 2));
    });
}

#[test]
fn a_verdict_that_is_not_due_yet_is_asked_for_again() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&Options::default());
        (0..3).for_each(|_| rig.watch.judge_next(Ok(SuspectVerdict::Early)));
        rig.watch.die(InstanceId::fresh());
        rig.told.expect_within(seconds(6)).await;
        assert_eq!(rig.watch.judged().len(), 4);
    });
}

#[test]
fn two_deaths_at_once_are_both_found() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&Options::default());
        sleep(seconds(40)).await;
        rig.watch.die(InstanceId::fresh());
        rig.watch.suspect(InstanceId::fresh());
        sleep(seconds(11)).await;
        assert_eq!(rig.told.take().len(), 2, "the second by the census right after the first verdict");
    });
}

#[test]
fn a_suspicion_is_dropped_when_the_judge_loses_its_own_lock_meanwhile() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&Options::default());
        rig.watch.die(InstanceId::fresh());
        sleep(seconds(2)).await;
        // A restart of the server: everybody's lock goes, this one's comes back first.
        rig.standing.set_alive_lock(AliveLock::NotHeld);
        rig.standing.set_alive_lock(AliveLock::Held);
        sleep(seconds(20)).await;
        assert!(rig.watch.judged().is_empty() && rig.told.take().is_empty());
        let census: Vec<_> = rig.watch.watches().into_iter().filter(|(_, _, census)| *census).collect();
        assert!(census.is_empty(), "{census:?}");
        sleep(seconds(11)).await;
        assert!(rig.watch.watches().last().is_some_and(|(_, _, census)| *census));
    });
}

#[test]
fn who_holds_no_lock_judges_nobody() {
    in_virtual_time(async {
        let mut rig = SweepRig::start(&Options::default());
        rig.unfence();
        rig.watch.die(InstanceId::fresh());
        rig.watch.suspect(InstanceId::fresh());
        sleep(seconds(120)).await;
        assert!(rig.watch.judged().is_empty() && rig.told.take().is_empty());
        assert!(rig.watch.watches().iter().all(|(_, _, census)| !census));
        assert!(rig.watch.watches().len() < 10, "{:?}", rig.watch.watches());
    });
}

#[test]
fn a_suspicion_does_not_survive_a_fence_but_a_census_finds_the_dead_again() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&Options::default());
        sleep(seconds(40)).await;
        let peer = InstanceId::fresh();
        rig.watch.die(peer);
        sleep(seconds(1)).await;
        rig.fence();
        sleep(seconds(30)).await;
        assert!(rig.watch.judged().is_empty());
        rig.watch.suspect(peer);
        rig.unfence();
        sleep(seconds(6)).await;
        assert_eq!(rig.told.take().len(), 1);
    });
}

#[test]
fn an_error_takes_the_suspicion_along_and_is_backed_off() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&Options::default());
        rig.watch.judge_next(Err(unavailable()));
        rig.watch.die(InstanceId::fresh());
        sleep(seconds(8)).await;
        assert_eq!((rig.watch.judged().len(), rig.told.take().len()), (1, 0));
        (0..20).for_each(|_| rig.watch.fail_next(unavailable()));
        let before = rig.watch.watches().len();
        sleep(seconds(120)).await;
        let tries = rig.watch.watches().len() - before;
        assert!((6..=14).contains(&tries), "{tries} tries in two minutes");
        assert!(rig.account().await.counter("watch_errors") >= 7);
    });
}

#[test]
fn behind_a_pooler_it_asks_once_a_minute_and_sweeps_as_ever() {
    in_virtual_time(async {
        let rig = SweepRig::start_open(&Options::default());
        (0..100).for_each(|_| rig.watch.fail_next(StoreError::NotDirect("a pooler".to_owned())));
        sleep(seconds(600)).await;
        assert!((10..=12).contains(&rig.watch.watches().len()), "{}", rig.watch.watches().len());
        assert!(rig.sweep.sweeps().len() >= 8);
    });
}

#[test]
fn a_judge_that_was_evicted_says_so() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&Options::default());
        rig.watch.judge_next(Err(StoreError::Evicted(rig.instance)));
        rig.watch.die(InstanceId::fresh());
        sleep(seconds(6)).await;
        assert_eq!(rig.evicted.take(), [Evicted(rig.instance)]);
    });
}

#[test]
fn a_successor_finds_by_census_whom_its_predecessor_suspected() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&Options::default());
        sleep(seconds(40)).await;
        let peer = InstanceId::fresh();
        rig.watch.die(peer);
        sleep(seconds(2)).await;
        rig.watch.suspect(peer);
        rig.restart().await;
        sleep(seconds(6)).await;
        assert_eq!(rig.told.take().len(), 1);
        assert!(rig.watch.watches().last().is_some_and(|(_, _, census)| *census));
    });
}

#[test]
fn whom_a_verdict_has_evicted_is_told_although_the_actor_died_before_the_answer() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&Options::default());
        sleep(seconds(40)).await;
        rig.watch.set_delay(seconds(2));
        rig.watch.die(InstanceId::fresh());
        while rig.watch.judged().is_empty() {
            sleep(Duration::from_millis(100)).await;
        }
        rig.restart().await;
        sleep(seconds(5)).await;
        assert_eq!(rig.told.take().len(), 1);
    });
}

#[test]
fn a_release_of_many_rows_does_not_hold_up_the_watch() {
    in_virtual_time(async {
        let mut rig = SweepRig::start_open(&Options::default());
        rig.sweep.leave_rows(1_000);
        rig.sweep.set_locked(true);
        rig.addr.do_send(workpump_actors::message::SweepNow);
        sleep(seconds(1)).await;
        let died = Instant::now();
        rig.watch.die(InstanceId::fresh());
        rig.told.expect_within(seconds(6)).await;
        assert!(died.elapsed() < Duration::from_millis(5_200));
    });
}
