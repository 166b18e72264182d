//! How often a dead child comes back, after which pauses, and what happens when it dies too often.

mod registry_common;

use std::time::Duration;

use tokio::time::{Instant, sleep};
use workpump_actors::registry::{ChildState, EventKind, Exit, Group, Registry, Restart};
use workpump_actors::testing::in_virtual_time;

use registry_common::{
    Boom, History, Lines, Log, Note, Plan, Quit, Subject, Where, addr, info, millis, start, troubles,
};

/// Runs a child `loops` that dies for ever, until the tree has given up; checks everything that is to be seen of it.
fn gives_up_after_ten(plan: Plan, life: Duration, cause: &str) {
    in_virtual_time(async {
        let lines = Lines::catch();
        let log = Log::default();
        let group = Group::new("test")
            .child(Subject::spec("well", &Log::default(), Plan::default()))
            .child(Subject::spec("loops", &log, plan));
        let registry = start(group).await;
        let mut history = History::of(&registry);
        let begin = Instant::now();
        addr(&registry, "loops").do_send(Boom(Where::Handler));
        let end = registry.terminated().await.expect_err("it was given up");
        assert_eq!((&*end.child, end.restarts), ("loops", 10));
        assert_eq!(end.exit.to_string(), cause);
        let events = history.events();
        let pauses: Vec<Duration> = events
            .iter()
            .filter_map(|event| match event.kind {
                EventKind::RestartIn { delay } => Some(delay),
                _ => None,
            })
            .collect();
        documented_pauses(&pauses);
        let whole: Duration = pauses.iter().sum::<Duration>() + life * 10;
        let took = begin.elapsed();
        assert!(took >= whole && took < whole + millis(100), "{took:?} for {whole:?} of pauses and lives");
        let gave_up = EventKind::GaveUp { restarts: 10 };
        assert_eq!(events.iter().filter(|event| event.kind == gave_up && event.child == "loops").count(), 1);
        assert_eq!(log.take().iter().filter(|line| *line == "start loops").count(), 11);
        told_once_each(&registry, &lines);
        registry.shutdown().await;
    });
}

/// At once, 100 ms doubling to 5 s, each ±20 %.
fn documented_pauses(pauses: &[Duration]) {
    let expected = [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0];
    assert_eq!(pauses.len(), expected.len(), "{pauses:?}");
    for (pause, expected) in pauses.iter().zip(expected) {
        let part = pause.as_secs_f64() - expected;
        assert!(part.abs() <= expected * 0.2 + 1e-6, "{pause:?} instead of about {expected} s");
    }
    assert!(pauses.iter().any(|pause| pause.subsec_millis() % 100 != 0), "without jitter: {pauses:?}");
}

/// One warn line and one count for each restart; one error line for the end; health names who it was.
fn told_once_each(registry: &Registry, lines: &Lines) {
    let warned = lines.of("WARN");
    assert_eq!(warned.len(), 10, "{warned:#?}");
    for (number, line) in warned.iter().enumerate() {
        let (name, count) = ("child=\"loops\"", format!("restarts={}", number + 1));
        assert!(line.contains(name) && line.contains(&count) && line.contains("cause="), "{line}");
    }
    let errors = lines.of("ERROR");
    assert_eq!(errors.len(), 1, "{errors:#?}");
    assert!(errors[0].contains("child=\"loops\""), "{}", errors[0]);
    let totals = registry.totals();
    assert_eq!((totals.restarts, totals.panics, totals.gave_up), (10, 11, 1));
    let loops = info(registry, "loops");
    assert_eq!((loops.state, loops.restarts), (ChildState::Failed, 10));
    assert!(troubles(registry).contains(&"loops".to_owned()), "{}", registry.health());
    assert!(registry.health().to_string().contains("loops is Failed, because it panicked"));
    assert_eq!(info(registry, "well").restarts, 0);
}

#[test]
fn an_actor_that_always_fails_in_its_start_is_given_up_after_ten_tries_with_growing_pauses() {
    let plan = Plan { bad_start: Some(|life| life > 1), ..Plan::default() };
    gives_up_after_ten(plan, Duration::ZERO, "it panicked: a bad start");
}

#[test]
fn an_actor_that_starts_well_and_dies_a_second_later_is_given_up_too() {
    let plan = Plan { dies_after: Some(Duration::from_secs(1)), ..Plan::default() };
    gives_up_after_ten(plan, Duration::from_secs(1), "it panicked: its time had come");
}

#[test]
fn one_of_six_that_loops_costs_its_siblings_nothing() {
    in_virtual_time(async {
        let log = Log::default();
        let plan = |name: &str| match name {
            "c" => Plan { dies_after: Some(Duration::from_secs(1)), ..Plan::default() },
            _ => Plan::default(),
        };
        let names = ["a", "b", "c", "d", "e", "f"];
        let group = names
            .iter()
            .fold(Group::new("test"), |group, name| group.child(Subject::spec(name, &log, plan(name))));
        let registry = start(group).await;
        assert!(registry.health().is_ready(), "{}", registry.health());
        sleep(Duration::from_secs(12)).await;
        for name in names {
            let child = info(&registry, name);
            if name == "c" {
                assert!(child.restarts >= 5, "{child:?}");
            } else {
                assert_eq!((child.restarts, child.generation, child.state), (0, 1, ChildState::Ready));
                assert_eq!(addr(&registry, name).send(Note(1)).await, Ok(1));
            }
        }
        assert_eq!(registry.totals().gave_up, 0);
        registry.shutdown().await;
    });
}

#[test]
fn an_actor_that_dies_rarely_is_restarted_for_ever_and_each_time_at_once() {
    in_virtual_time(async {
        let plan = Plan { dies_after: Some(Duration::from_mins(2)), ..Plan::default() };
        let registry = start(Group::new("test").child(Subject::spec("it", &Log::default(), plan))).await;
        let mut history = History::of(&registry);
        sleep(Duration::from_mins(101)).await;
        let events = history.events();
        let at_once = EventKind::RestartIn { delay: Duration::ZERO };
        assert_eq!(events.iter().filter(|event| event.kind == at_once).count(), 50);
        assert_eq!(registry.totals().restarts, 50);
        assert!(registry.health().is_ready());
        registry.shutdown().await;
    });
}

/// What becomes of a child of this kind that stops by itself, or panics.
fn ends(restart: Restart, by: impl FnOnce(&Registry)) -> (ChildState, u64, u64, Option<Exit>) {
    in_virtual_time(async {
        let spec = Subject::spec("it", &Log::default(), Plan::default()).restart(restart);
        let sibling = Subject::spec("sibling", &Log::default(), Plan::default());
        let registry = start(Group::new("test").child(spec).child(sibling)).await;
        by(&registry);
        sleep(millis(1)).await;
        let it = info(&registry, "it");
        assert_eq!(addr(&registry, "sibling").send(Note(1)).await, Ok(1), "the others go on");
        let ready = matches!(it.state, ChildState::Ready | ChildState::Finished);
        assert_eq!(registry.health().is_ready(), ready, "{}", registry.health());
        assert_eq!(addr(&registry, "it").connected(), it.state == ChildState::Ready);
        registry.shutdown().await;
        (it.state, it.generation, it.restarts, it.last_exit)
    })
}

fn quits(registry: &Registry) {
    addr(registry, "it").do_send(Quit);
}

fn panics(registry: &Registry) {
    addr(registry, "it").do_send(Boom(Where::Handler));
}

fn panicked() -> Exit {
    Exit::Panicked("panic in Handler".to_owned())
}

#[test]
fn a_permanent_child_comes_back_from_any_end() {
    assert_eq!(ends(Restart::Permanent, quits), (ChildState::Ready, 2, 1, Some(Exit::Stopped)));
    assert_eq!(ends(Restart::Permanent, panics), (ChildState::Ready, 2, 1, Some(panicked())));
}

#[test]
fn a_transient_child_comes_back_from_a_bad_end_only() {
    assert_eq!(ends(Restart::Transient, quits), (ChildState::Finished, 1, 0, Some(Exit::Stopped)));
    assert_eq!(ends(Restart::Transient, panics), (ChildState::Ready, 2, 1, Some(panicked())));
}

#[test]
fn a_temporary_child_never_comes_back() {
    assert_eq!(ends(Restart::Temporary, quits), (ChildState::Finished, 1, 0, Some(Exit::Stopped)));
    assert_eq!(ends(Restart::Temporary, panics), (ChildState::Failed, 1, 0, Some(panicked())));
}

#[test]
fn a_child_that_has_ended_for_good_cannot_be_restarted_and_says_what_to_do() {
    in_virtual_time(async {
        let spec = Subject::spec("it", &Log::default(), Plan::default()).restart(Restart::Temporary);
        let registry = start(Group::new("test").child(spec)).await;
        quits(&registry);
        sleep(millis(1)).await;
        let error = registry.restart("it").await.expect_err("over").to_string();
        assert_eq!(error, "it has ended for good: remove it, and add it again");
        assert_eq!(registry.remove("it").await, Ok(0));
        registry.shutdown().await;
    });
}

#[test]
fn a_life_that_is_not_ready_in_time_is_ended_and_counts_as_a_death() {
    in_virtual_time(async {
        let log = Log::default();
        let plan = Plan { slow_start: Duration::from_secs(2), ..Plan::default() };
        let spec = Subject::spec("slow", &log, plan.clone()).ready_within(Duration::from_secs(3));
        let registry = start(Group::new("test").child(spec)).await;
        registry.remove("slow").await.expect("it is there");
        let late = Subject::spec("late", &log, plan).ready_within(Duration::from_secs(1));
        let begin = Instant::now();
        let failed = registry.add("test", late).await.expect_err("it needs two seconds");
        assert_eq!(failed.to_string(), "late did not start: it was not ready in time");
        assert_eq!(begin.elapsed(), Duration::from_secs(1));
        assert!(registry.health().is_ready(), "{}", registry.health());
        assert_eq!(log.take(), ["start slow", "stop slow", "start late"]);
        registry.shutdown().await;
    });
}

#[test]
fn a_restart_that_is_not_ready_in_time_says_why_and_is_tried_again() {
    in_virtual_time(async {
        let spec = workpump_actors::registry::Spec::new("shy", |cx| {
            let life = cx.generation();
            let ready = cx.ready();
            ready.problem(format!("no database in life {life}"));
            if life != 2 {
                ready.ready();
            }
            Subject::make(cx, &Log::default(), &Plan::default())
        })
        .ready_within(Duration::from_secs(1));
        let registry = start(Group::new("test").child(spec)).await;
        let shy = addr(&registry, "shy");
        shy.do_send(Boom(Where::Handler));
        sleep(millis(500)).await;
        assert_eq!(registry.health().to_string(), "shy is Starting, because it panicked: panic in Handler");
        sleep(millis(1_000)).await;
        let known = info(&registry, "shy");
        assert_eq!((known.generation, known.restarts, known.state), (3, 2, ChildState::Ready));
        assert_eq!(known.last_exit, Some(Exit::NotReady(Some("no database in life 2".to_owned()))));
        assert_eq!(shy.send(Note(1)).await, Ok(3));
        registry.shutdown().await;
    });
}
