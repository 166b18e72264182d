//! Children that come, go and are restarted by hand while a tree runs.

mod registry_common;

use std::time::Duration;

use actix::prelude::*;
use tokio::time::{Instant, sleep};
use workpump_actors::registry::{ChildState, Exit, Group, Registry, Restart, Spec, StartFailed, Strategy};
use workpump_actors::testing::in_virtual_time;

use registry_common::{Boom, History, Log, Note, Plan, Subject, Where, addr, at_most, info, millis, start};

fn well(name: &str, log: &Log) -> Spec<Subject> {
    Subject::spec(name, log, Plan::default())
}

fn slow(name: &str, log: &Log, seconds: u64) -> Spec<Subject> {
    Subject::spec(name, log, Plan { slow_start: Duration::from_secs(seconds), ..Plan::default() })
}

fn bad(name: &str, log: &Log) -> Spec<Subject> {
    Subject::spec(name, log, Plan { bad_start: Some(|_| true), ..Plan::default() })
}

async fn with_a(log: &Log) -> Registry {
    start(Group::new("test").child(well("a", log).provides::<Note>())).await
}

fn names(registry: &Registry) -> Vec<String> {
    registry.children().iter().map(|child| child.name.to_string()).collect()
}

#[test]
fn a_child_that_is_added_is_ready_when_the_call_returns_and_lives_under_the_rules_of_its_group() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = with_a(&log).await;
        let begin = Instant::now();
        assert_eq!(registry.add("test", slow("b", &log, 2)).await, Ok(()));
        assert_eq!(begin.elapsed(), Duration::from_secs(2));
        let b = addr(&registry, "b");
        b.do_send(Boom(Where::Handler));
        assert_eq!(b.send(Note(1)).await, Ok(2));
        registry.shutdown().await;
        let did = log.take();
        assert_eq!(did[did.len() - 2..], ["stop b", "stop a"], "added last, stopped first");
    });
}

#[test]
fn a_child_that_cannot_be_added_leaves_no_trace_and_disturbs_nobody() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = with_a(&log).await;
        let failed = registry.add("test", bad("b", &log)).await.expect_err("it panics").to_string();
        assert_eq!(failed, "b did not start: it panicked: a bad start");
        let duplicate = registry.add("test", well("a", &log)).await;
        assert_eq!(duplicate, Err(StartFailed::DuplicateName("a".into())));
        let nowhere = registry.add("nowhere", well("b", &log)).await.expect_err("no such group");
        assert_eq!(nowhere.to_string(), "there is no running group called nowhere");
        let conflict = registry.add("test", well("b", &log).provides::<Note>()).await;
        assert!(matches!(conflict, Err(StartFailed::DuplicateProvider { .. })), "{conflict:?}");
        let never = workpump_actors::registry::Intensity { within: millis(1), ..at_most(10) };
        let unreachable = registry.add("test", well("b", &log).intensity(never)).await;
        assert!(matches!(unreachable, Err(StartFailed::Policy { .. })), "{unreachable:?}");
        assert_eq!(names(&registry), ["test", "a"]);
        assert!(registry.health().is_ready() && registry.named::<Subject>("b").is_err());
        assert_eq!(addr(&registry, "a").send(Note(1)).await, Ok(1));
        assert_eq!(registry.add("test", well("b", &log)).await, Ok(()), "the name is free");
        registry.shutdown().await;
    });
}

#[test]
fn two_children_that_are_both_too_late_fail_each_at_its_time() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = with_a(&log).await;
        let late = |name, seconds| slow(name, &log, 60).ready_within(Duration::from_secs(seconds));
        let begin = Instant::now();
        let adding = async |name, seconds| {
            let failed = registry.add("test", late(name, seconds)).await.expect_err("it is late");
            (failed.to_string(), begin.elapsed().as_secs())
        };
        let (b, c, d) = tokio::join!(adding("b", 1), adding("c", 1), adding("d", 2));
        assert_eq!(b, ("b did not start: it was not ready in time".to_owned(), 1));
        assert_eq!(c, ("c did not start: it was not ready in time".to_owned(), 1));
        assert_eq!(d, ("d did not start: it was not ready in time".to_owned(), 2));
        assert_eq!(addr(&registry, "a").send(Note(1)).await, Ok(1));
        registry.shutdown().await;
    });
}

#[test]
fn a_child_that_fails_after_a_wave_caught_it_unready_was_not_added_either() {
    in_virtual_time(async {
        let log = Log::default();
        let all = Group::new("test").strategy(Strategy::OneForAll).child(well("a", &log));
        let registry = start(all).await;
        let later_bad =
            Plan { slow_start: Duration::from_secs(2), bad_start: Some(|life| life == 2), ..Plan::default() };
        let adding = registry.add("test", Subject::spec("b", &log, later_bad));
        let dying = async {
            sleep(Duration::from_secs(1)).await;
            addr(&registry, "a").do_send(Boom(Where::Handler));
        };
        let (added, ()) = tokio::join!(adding, dying);
        assert_eq!(added.expect_err("it failed").to_string(), "b did not start: it panicked: a bad start");
        assert_eq!(names(&registry), ["test", "a"]);
        assert!(registry.health().is_ready(), "{}", registry.health());
        registry.shutdown().await;
    });
}

#[test]
fn a_group_is_added_and_removed_as_a_whole() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = with_a(&log).await;
        log.take();
        let deep = |name: &str| Group::new(name).child(well("c", &log));
        let inner = || Group::new("inner").child(well("b", &log)).group(deep("deep"));
        assert_eq!(registry.add_group("test", inner()).await, Ok(()));
        assert_eq!(names(&registry), ["test", "a", "inner", "b", "deep", "c"]);
        assert_eq!(registry.add("deep", well("d", &log)).await, Ok(()));
        assert_eq!(registry.remove("inner").await, Ok(0));
        assert_eq!(log.take(), ["start b", "start c", "start d", "stop d", "stop c", "stop b"]);
        assert_eq!(names(&registry), ["test", "a"]);
        let failing = Group::new("inner").child(well("b", &log)).child(bad("x", &log));
        let failed = registry.add_group("test", failing).await.expect_err("x panics").to_string();
        assert_eq!(failed, "x did not start: it panicked: a bad start");
        let duplicate = Group::new("inner").child(well("b", &log)).child(well("a", &log));
        let refused = registry.add_group("test", duplicate).await;
        assert_eq!(refused, Err(StartFailed::DuplicateName("a".into())));
        assert_eq!(names(&registry), ["test", "a"]);
        assert_eq!(registry.add_group("test", inner()).await, Ok(()), "all names are free again");
        registry.shutdown().await;
    });
}

#[test]
fn a_removed_child_closes_its_address_counts_what_it_never_heard_and_frees_its_name() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = with_a(&log).await;
        registry.add("test", well("b", &log)).await.expect("added");
        let (b, mut history) = (addr(&registry, "b"), History::of(&registry));
        let removing = registry.remove("b");
        let sending = async {
            let held = [b.send(registry_common::Quit).await.is_ok(), b.send(Note(1)).await.is_ok()];
            assert!(!held[1]);
        };
        let (removed, ()) = tokio::join!(removing, sending);
        assert_eq!(removed.map(|undelivered| undelivered <= 1), Ok(true));
        assert_eq!(b.send(Note(2)).await, Err(MailboxError::Closed));
        assert!(history.take().iter().any(|line| line.starts_with("b (life 1): closed with")));
        assert_eq!(registry.remove("b").await, Err(StartFailed::NoSuchChild("b".into())));
        assert_eq!(registry.add("test", well("b", &log)).await, Ok(()));
        assert_eq!(addr(&registry, "b").send(Note(3)).await, Ok(1));
        registry.shutdown().await;
    });
}

#[test]
fn what_waits_for_a_child_in_its_pause_is_counted_when_it_is_removed() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = with_a(&log).await;
        let a = addr(&registry, "a");
        a.do_send(Boom(Where::Handler));
        a.do_send(Boom(Where::Handler));
        sleep(millis(10)).await;
        assert_eq!(info(&registry, "a").state, ChildState::Waiting);
        let waiting: Vec<_> = (0..3).map(|number| a.send(Note(number))).collect();
        assert_eq!(registry.remove("a").await, Ok(3));
        for answer in waiting {
            assert_eq!(answer.await, Err(MailboxError::Closed));
        }
        assert_eq!(registry.totals().undelivered, 3);
        sleep(Duration::from_mins(1)).await;
        assert_eq!(names(&registry), ["test"]);
        registry.shutdown().await;
    });
}

#[test]
fn a_child_that_has_finished_is_removed_without_being_told_of_again() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = with_a(&log).await;
        registry.add("test", well("job", &log).restart(Restart::Temporary)).await.expect("added");
        addr(&registry, "job").do_send(registry_common::Quit);
        sleep(millis(1)).await;
        assert_eq!(info(&registry, "job").state, ChildState::Finished);
        let mut history = History::of(&registry);
        assert_eq!(registry.remove("job").await, Ok(0));
        assert_eq!(history.take(), [""; 0]);
        assert_eq!(names(&registry), ["test", "a"]);
        registry.shutdown().await;
    });
}

#[test]
fn everybody_who_asks_for_the_same_thing_gets_the_answer() {
    in_virtual_time(async {
        let log = Log::default();
        let drains = Plan { drain: Duration::from_secs(1), ..Plan::default() };
        let group = Group::new("test").child(Subject::spec("a", &log, drains));
        let registry = start(group).await;
        let restarted = tokio::join!(registry.restart("a"), registry.restart("a"));
        assert_eq!(restarted, (Ok(()), Ok(())));
        let removed = tokio::join!(registry.remove("a"), registry.remove("a"), registry.restart("a"));
        assert_eq!(removed, (Ok(0), Ok(0), Err(StartFailed::NoSuchChild("a".into()))));
        registry.shutdown().await;
    });
}

#[test]
fn a_removal_that_waits_for_its_turn_is_answered_even_if_the_child_dies_meanwhile() {
    in_virtual_time(async {
        let log = Log::default();
        let drains = Plan { drain: Duration::from_secs(2), ..Plan::default() };
        let group = Group::new("test")
            .strategy(Strategy::RestForOne)
            .child(well("a", &log))
            .child(Subject::spec("b", &log, drains));
        let registry = start(group).await;
        let removing_a = async {
            sleep(millis(10)).await;
            registry.remove("a").await
        };
        let dying = async {
            sleep(millis(20)).await;
            addr(&registry, "a").do_send(Boom(Where::Handler));
        };
        let (b, a, ()) = tokio::join!(registry.remove("b"), removing_a, dying);
        assert_eq!((a, b), (Ok(0), Ok(0)));
        assert_eq!(names(&registry), ["test"]);
        assert_eq!(registry.totals().restarts, 0, "it was to go anyway");
        registry.shutdown().await;
    });
}

#[test]
fn whoever_waits_for_a_start_in_a_group_that_stops_is_told() {
    in_virtual_time(async {
        let log = Log::default();
        let inner = Group::new("inner").child(well("b", &log)).intensity(at_most(0)).contained();
        let registry = start(Group::new("test").child(well("a", &log)).group(inner)).await;
        let dying = async {
            sleep(Duration::from_secs(1)).await;
            addr(&registry, "b").do_send(Boom(Where::Handler));
        };
        let (added, ()) = tokio::join!(registry.add("inner", slow("c", &log, 5)), dying);
        assert_eq!(added, Err(StartFailed::NoSuchGroup("inner".into())));
        assert_eq!(names(&registry), ["test", "a", "inner", "b"], "c was not added");
        registry.shutdown().await;
    });
}

#[test]
fn a_restart_by_hand_ends_a_pause_and_keeps_the_queue() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = with_a(&log).await;
        let (a, begin) = (addr(&registry, "a"), Instant::now());
        a.do_send(Boom(Where::Handler));
        a.do_send(Boom(Where::Handler));
        sleep(millis(10)).await;
        let queued = a.send(Note(1));
        assert_eq!(registry.restart("a").await, Ok(()));
        assert_eq!(queued.await, Ok(3));
        assert_eq!(begin.elapsed(), millis(10));
        assert_eq!(info(&registry, "a").restarts, 2);
        registry.shutdown().await;
    });
}

#[test]
fn a_restart_by_hand_that_fails_says_so_and_the_policy_goes_on() {
    in_virtual_time(async {
        let log = Log::default();
        let plan = Plan { bad_start: Some(|life| life == 2), ..Plan::default() };
        let registry = start(Group::new("test").child(Subject::spec("a", &log, plan))).await;
        let failed = registry.restart("a").await.expect_err("life 2 fails").to_string();
        assert_eq!(failed, "a did not start: it panicked: a bad start");
        assert_eq!(addr(&registry, "a").send(Note(1)).await, Ok(3));
        assert_eq!(info(&registry, "a").last_exit, Some(Exit::Panicked("a bad start".to_owned())));
        assert_eq!(registry.restart("x").await, Err(StartFailed::NoSuchChild("x".into())));
        registry.shutdown().await;
    });
}

#[test]
fn a_group_is_restarted_by_hand_with_its_addresses() {
    in_virtual_time(async {
        let log = Log::default();
        let inner = Group::new("inner").child(well("b", &log)).child(well("c", &log));
        let registry = start(Group::new("test").child(well("a", &log)).group(inner)).await;
        log.take();
        let b = addr(&registry, "b");
        assert_eq!(registry.restart("inner").await, Ok(()));
        assert_eq!(log.take(), ["stop c", "stop b", "start b", "start c"]);
        assert_eq!(b.send(Note(1)).await, Ok(2));
        assert!(registry.health().is_ready(), "{}", registry.health());
        registry.shutdown().await;
    });
}
