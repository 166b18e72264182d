//! Groups inside groups, and who can be found in a tree.

mod registry_common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::prelude::*;
use tokio::time::{Instant, sleep};
use workpump_actors::registry::{
    Backoff, ChildState, Exit, GaveUp, Group, Intensity, Registry, Restart, Spec, Strategy,
};
use workpump_actors::testing::in_virtual_time;

use registry_common::{
    Boom, History, Log, Note, Plan, Quit, Subject, Where, addr, at_most, info, millis, start, troubles,
};

fn well(name: &str, log: &Log) -> Spec<Subject> {
    Subject::spec(name, log, Plan::default())
}

/// The first death is the last.
fn never() -> Intensity {
    at_most(0)
}

/// a, then a group of b and c, then d.
fn nested(log: &Log, inner: impl FnOnce(Group) -> Group) -> Group {
    let group = Group::new("inner").child(well("b", log)).child(well("c", log)).intensity(never());
    Group::new("outer").child(well("a", log)).group(inner(group)).child(well("d", log))
}

#[test]
fn a_nested_group_starts_and_stops_in_its_place() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = start(nested(&log, |inner| inner)).await;
        assert!(registry.health().is_ready(), "{}", registry.health());
        let names: Vec<String> = registry.children().iter().map(|child| child.name.to_string()).collect();
        assert_eq!(names, ["outer", "a", "inner", "b", "c", "d"]);
        let inner = info(&registry, "inner");
        assert!(inner.is_group && inner.group.is_some_and(|parent| parent == "outer"));
        registry.shutdown().await;
        let all = ["start a", "start b", "start c", "start d", "stop d", "stop c", "stop b", "stop a"];
        assert_eq!(log.take(), all);
        assert!(registry.children().iter().all(|child| child.state == ChildState::Stopped));
    });
}

#[test]
fn a_nested_group_that_gives_up_takes_its_parent_with_it() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = start(nested(&log, |inner| inner)).await;
        let mut history = History::of(&registry);
        log.take();
        addr(&registry, "b").do_send(Boom(Where::Handler));
        let end = registry.terminated().await.expect_err("it was given up");
        let cause = "b was given up after 0 restarts: it panicked: panic in Handler";
        assert_eq!(end.to_string(), format!("inner was given up after 0 restarts: {cause}"));
        assert_eq!(log.take(), ["stop c", "stop d", "stop a"]);
        assert_eq!(registry.totals().gave_up, 2);
        let told = history.take();
        assert!(told.contains(&"b (life 1): given up after 0 restarts".to_owned()), "{told:?}");
        let states = ["b", "c", "inner"].map(|name| info(&registry, name).state);
        assert_eq!(states, [ChildState::Failed, ChildState::Stopped, ChildState::Failed]);
        registry.shutdown().await;
    });
}

#[test]
fn a_contained_group_that_gives_up_stays_down_and_the_others_go_on() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = start(nested(&log, Group::contained)).await;
        log.take();
        let (b, c) = (addr(&registry, "b"), addr(&registry, "c"));
        b.do_send(Boom(Where::Handler));
        sleep(Duration::from_mins(1)).await;
        assert_eq!(log.take(), ["stop c"]);
        assert!(!b.connected() && !c.connected());
        assert_eq!(troubles(&registry), ["b", "c"]);
        for name in ["a", "d"] {
            assert_eq!(addr(&registry, name).send(Note(1)).await, Ok(1));
        }
        assert_eq!(registry.remove("inner").await, Ok(0));
        assert!(registry.health().is_ready(), "what is gone troubles nobody: {}", registry.health());
        let again = Group::new("inner").child(well("b", &log));
        assert_eq!(registry.add_group("outer", again).await, Ok(()), "the names are free again");
        registry.shutdown().await;
        assert_eq!(registry.terminated().await, Ok(()));
    });
}

#[test]
fn a_group_that_is_restarted_as_a_whole_keeps_the_addresses_and_queues_of_its_children() {
    in_virtual_time(async {
        let log = Log::default();
        let pauses = Backoff { first: Duration::from_secs(1), ..Backoff::default() };
        let again = |inner: Group| inner.as_child(Restart::Permanent, at_most(2), pauses);
        let registry = start(nested(&log, again)).await;
        let (b, c) = (addr(&registry, "b"), addr(&registry, "c"));
        for life in 2..=3 {
            log.take();
            b.do_send(Boom(Where::Handler));
            let (to_b, to_c) = (b.send(Note(1)), c.send(Note(2)));
            assert_eq!(to_b.await, Ok(life));
            assert!(to_c.await.is_ok_and(|by| by == life || by == life - 1));
            let done = log.take();
            let starts: Vec<_> = done.iter().filter(|line| line.starts_with('s')).collect();
            assert_eq!(starts, ["stop c", "start b", "start c"]);
            assert_eq!(info(&registry, "inner").restarts, life - 1);
            assert!(registry.health().is_ready(), "{}", registry.health());
        }
        assert_eq!(addr(&registry, "a").send(Note(1)).await, Ok(1));
        b.do_send(Boom(Where::Handler));
        let end = registry.terminated().await.expect_err("a third time is too often");
        assert_eq!((&*end.child, end.restarts), ("inner", 2));
    });
}

#[test]
fn messages_wait_for_a_group_that_is_between_two_lives() {
    in_virtual_time(async {
        let log = Log::default();
        let pauses = Backoff { first: Duration::from_secs(4), jitter: 0.0, ..Backoff::default() };
        let again = |inner: Group| inner.as_child(Restart::Permanent, at_most(3), pauses);
        let registry = start(nested(&log, again)).await;
        let b = addr(&registry, "b");
        b.do_send(Boom(Where::Handler));
        b.do_send(Boom(Where::Handler));
        sleep(millis(100)).await;
        assert_eq!(info(&registry, "inner").state, ChildState::Waiting);
        assert!(!registry.health().is_ready());
        let begin = Instant::now();
        assert_eq!(addr(&registry, "c").send(Note(1)).await, Ok(3));
        assert_eq!(b.send(Note(2)).await, Ok(3));
        assert_eq!(begin.elapsed(), millis(3_900));
        registry.shutdown().await;
    });
}

#[test]
fn a_group_whose_restart_fails_is_tried_again_and_its_children_do_not_look_as_if_they_were_starting() {
    in_virtual_time(async {
        let log = Log::default();
        let plan = Plan { bad_start: Some(|life| life == 2), ..Plan::default() };
        let pauses = Backoff { first: Duration::from_secs(4), jitter: 0.0, ..Backoff::default() };
        let inner = Group::new("inner").child(Subject::spec("b", &log, plan)).intensity(never()).as_child(
            Restart::Permanent,
            at_most(3),
            pauses,
        );
        let registry = start(Group::new("outer").group(inner)).await;
        addr(&registry, "b").do_send(Boom(Where::Handler));
        sleep(Duration::from_secs(1)).await;
        let states = ["b", "inner"].map(|name| info(&registry, name).state);
        assert_eq!(states, [ChildState::Failed, ChildState::Waiting]);
        let last = info(&registry, "inner").last_exit.map(|exit| exit.to_string());
        assert_eq!(last.as_deref(), Some("b did not start: it panicked: a bad start"));
        assert_eq!(addr(&registry, "b").send(Note(1)).await, Ok(3));
        assert!(registry.health().is_ready(), "{}", registry.health());
        registry.shutdown().await;
    });
}

#[test]
fn a_death_of_a_nested_group_takes_along_who_depends_on_it() {
    in_virtual_time(async {
        let log = Log::default();
        let again = |inner: Group| inner.as_child(Restart::Permanent, at_most(2), Backoff::default());
        let registry = start(nested(&log, again).strategy(Strategy::RestForOne)).await;
        log.take();
        addr(&registry, "c").do_send(Boom(Where::Handler));
        sleep(Duration::from_secs(1)).await;
        assert_eq!(log.take(), ["stop b", "stop d", "start b", "start c", "start d"]);
        registry.shutdown().await;
    });
}

/// A tree of a and b whose last words are these, and what they were told.
async fn with_last_words<F>(log: &Log, say: impl Fn(GaveUp) -> F + Send + Sync + 'static) -> Registry
where
    F: Future<Output = ()> + Send + 'static,
{
    let group = Group::new("test").child(well("a", log)).child(well("b", log)).intensity(never());
    start(group.last_words(say)).await
}

#[test]
fn the_last_words_of_a_group_are_waited_for_while_the_others_live_and_nobody_is_restarted() {
    in_virtual_time(async {
        let log = Log::default();
        let (said, begin) = (Arc::new(Mutex::new(None)), Instant::now());
        let heard = Arc::clone(&said);
        let registry = with_last_words(&log, move |gave_up| {
            *heard.lock().expect("not poisoned") = Some(gave_up);
            sleep(Duration::from_secs(2))
        })
        .await;
        log.take();
        addr(&registry, "b").do_send(Boom(Where::Handler));
        sleep(Duration::from_secs(1)).await;
        assert_eq!(addr(&registry, "a").send(Note(1)).await, Ok(1), "a lives meanwhile");
        addr(&registry, "a").do_send(Quit);
        let end = registry.terminated().await.expect_err("it was given up");
        assert_eq!(begin.elapsed(), Duration::from_secs(2));
        assert_eq!(said.lock().expect("not poisoned").as_ref(), Some(&end));
        assert_eq!(end.exit, Exit::Panicked("panic in Handler".to_owned()));
        assert_eq!(log.take(), ["note 1 life 1 a", "stop a"]);
    });
}

#[test]
fn a_group_that_is_stopped_during_its_last_words_was_given_up_all_the_same() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = with_last_words(&log, |_| sleep(Duration::from_hours(1))).await;
        let begin = Instant::now();
        addr(&registry, "b").do_send(Boom(Where::Handler));
        sleep(Duration::from_secs(1)).await;
        registry.shutdown().await;
        assert_eq!(begin.elapsed(), Duration::from_secs(1), "whoever stops it need not hear them");
        assert!(registry.terminated().await.is_err());
    });
}

#[test]
fn last_words_that_panic_do_not_keep_the_group_from_stopping() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = with_last_words(&log, |_| async { panic!("speechless") }).await;
        addr(&registry, "b").do_send(Boom(Where::Handler));
        assert!(registry.terminated().await.is_err());
        let registry = with_last_words(&log, |gave_up| -> std::future::Ready<()> {
            panic!("speechless about {}", gave_up.child)
        })
        .await;
        addr(&registry, "b").do_send(Boom(Where::Handler));
        assert!(registry.terminated().await.is_err());
    });
}

#[test]
fn a_pause_that_ends_during_the_last_words_burns_no_time() {
    in_virtual_time(async {
        let log = Log::default();
        let pauses = Backoff { first: Duration::from_secs(1), ..Backoff::default() };
        let group = Group::new("test")
            .backoff(pauses)
            .child(well("a", &log))
            .child(well("b", &log).intensity(never()))
            .last_words(|_| sleep(Duration::from_secs(30)));
        let registry = start(group).await;
        for _ in 0..2 {
            addr(&registry, "a").do_send(Boom(Where::Handler));
        }
        sleep(millis(1)).await;
        addr(&registry, "b").do_send(Boom(Where::Handler));
        sleep(Duration::from_secs(10)).await;
        assert_eq!(info(&registry, "a").generation, 2, "nobody is restarted");
        assert!(registry.terminated().await.is_err());
    });
}

#[test]
fn a_lookup_that_is_not_clear_says_what_to_do() {
    struct Other;
    impl Actor for Other {
        type Context = Context<Self>;
    }
    in_virtual_time(async {
        let log = Log::default();
        let one = Group::new("test").child(well("a", &log)).child(well("b", &log).provides::<Note>());
        let registry = start(one).await;
        let several = registry.addr::<Subject>().expect_err("there are two").to_string();
        assert!(several.ends_with("Subject: ask for one by name (a, b)"), "{several}");
        let nobody = registry.addr::<Other>().expect_err("there is none").to_string();
        assert!(
            nobody.starts_with("no child of the registry is a ") && nobody.ends_with("Other"),
            "{nobody}"
        );
        let unnamed = registry.named::<Subject>("c").expect_err("there is none").to_string();
        assert!(unnamed.ends_with("Subject called c"), "{unnamed}");
        assert!(registry.named::<Other>("a").is_err(), "a is of another type");
        assert_eq!(registry.recipient::<Note>().expect("b").send(Note(1)).await, Ok(1));
        let unprovided = registry.recipient::<Quit>().expect_err("nobody says so").to_string();
        assert!(unprovided.contains("a provider of ") && unprovided.ends_with("Quit"), "{unprovided}");
        registry.remove("b").await.expect("it is there");
        assert_eq!(registry.addr::<Subject>().expect("only a is left"), addr(&registry, "a"));
        assert!(registry.recipient::<Note>().is_err(), "what b provided has gone with it");
        registry.shutdown().await;
    });
}
