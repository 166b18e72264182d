//! What a tree tells about itself: events, health, totals, log lines, and the same as messages.

mod registry_common;

use std::time::Duration;

use actix::prelude::*;
use tokio::time::{sleep, timeout};
use workpump_actors::registry::{
    AskHealth, AskTotals, ChildState, EventKind, Exit, Group, RegistryActor, Restart, RestartChild, Spec,
    StartChild, StopChild, Subscribe, SupervisorEvent, WhichChildren,
};
use workpump_actors::testing::{TestProbe, in_virtual_time, quiesce};

use registry_common::{
    Boom, History, Lines, Log, Note, Plan, Quit, Subject, Where, addr, at_most, info, millis, start,
};

fn well(name: &str) -> Spec<Subject> {
    Subject::spec(name, &Log::default(), Plan::default())
}

#[test]
fn the_events_of_a_life_come_in_order_to_everybody_who_listens() {
    in_virtual_time(async {
        let registry = start(Group::new("test").child(well("a"))).await;
        let (mut first, mut second) = (History::of(&registry), History::of(&registry));
        let mut probe = TestProbe::<SupervisorEvent>::start();
        registry.subscribe(probe.recipient());
        addr(&registry, "a").do_send(Boom(Where::Handler));
        sleep(millis(1)).await;
        registry.shutdown().await;
        let told = first.take();
        assert_eq!(
            told,
            [
                "a (life 1): it panicked: panic in Handler",
                "a (life 1): comes back in 0 ms",
                "a (life 2): started",
                "a (life 2): ready",
                "a (life 2): stopped",
                "a (life 2): closed with 0 messages undelivered"
            ]
        );
        assert_eq!(second.take(), told);
        quiesce().await;
        assert_eq!(probe.take().iter().map(ToString::to_string).collect::<Vec<_>>(), told);
    });
}

#[test]
fn a_subscribed_child_hears_on_after_its_own_restart_and_a_closed_listener_is_let_go() {
    in_virtual_time(async {
        let (mut probe, spec) = TestProbe::<SupervisorEvent>::child("listener");
        let registry = start(Group::new("test").child(spec).child(well("a"))).await;
        registry.subscribe(probe.recipient());
        registry.crash("listener").expect("it is there");
        let exit = EventKind::Exited { exit: Exit::Panicked("crashed on demand".to_owned()) };
        assert_eq!(probe.expect_within(Duration::from_secs(1)).await.kind, exit);
        sleep(millis(1)).await;
        assert_eq!(probe.take().len(), 3, "comes back, started, ready");
        addr(&registry, "a").do_send(Boom(Where::Handler));
        assert_eq!(probe.expect_within(Duration::from_secs(1)).await.child, "a");
        registry.remove("listener").await.expect("it is there");
        sleep(millis(1)).await;
        probe.take();
        addr(&registry, "a").do_send(Boom(Where::Handler));
        probe.expect_none(Duration::from_secs(1)).await;
        registry.shutdown().await;
    });
}

#[test]
fn a_slow_listener_loses_the_oldest_events_and_is_told_how_many() {
    in_virtual_time(async {
        let registry = start(Group::new("test").child(well("a"))).await;
        let mut events = registry.events();
        for _ in 0..400 {
            registry.restart("a").await.expect("restarts");
        }
        let lagged = events.try_recv().expect_err("1 200 events for a place of 1 024").to_string();
        assert_eq!(lagged, "channel lagged by 176");
        registry.shutdown().await;
    });
}

#[test]
fn health_names_who_is_not_well_and_why_until_it_is() {
    in_virtual_time(async {
        let log = Log::default();
        let plan = Plan { slow_start: Duration::from_secs(1), ..Plan::default() };
        let registry = start(Group::new("test").child(Subject::spec("a", &log, plan)).child(well("b"))).await;
        assert_eq!(registry.health().to_string(), "ready");
        addr(&registry, "a").do_send(Boom(Where::Handler));
        sleep(millis(100)).await;
        let health = registry.health();
        assert!(!health.is_ready());
        assert_eq!(health.to_string(), "a is Starting, because it panicked: panic in Handler");
        sleep(Duration::from_secs(1)).await;
        addr(&registry, "a").do_send(Boom(Where::Handler));
        sleep(millis(10)).await;
        assert_eq!(registry.health().to_string(), "a is Waiting, because it panicked: panic in Handler");
        sleep(Duration::from_secs(2)).await;
        assert!(registry.health().is_ready(), "{}", registry.health());
        registry.shutdown().await;
        assert_eq!(registry.health().troubles.len(), 2, "a tree that has ended is not ready");
    });
}

#[test]
fn a_tree_that_has_ended_well_says_so_to_everybody_who_waits() {
    in_virtual_time(async {
        let registry = start(Group::new("test").child(well("a"))).await;
        assert!(timeout(Duration::from_hours(1), registry.terminated()).await.is_err(), "it runs");
        let (first, second) = (registry.clone(), registry.clone());
        let ended = tokio::join!(first.terminated(), second.terminated(), registry.shutdown());
        assert_eq!(ended, (Ok(()), Ok(()), ()));
    });
}

#[test]
fn the_last_child_that_finishes_leaves_a_tree_that_runs_and_is_well() {
    in_virtual_time(async {
        let registry = start(Group::new("test").child(well("job").restart(Restart::Transient))).await;
        addr(&registry, "job").do_send(Quit);
        assert!(timeout(Duration::from_secs(1), registry.terminated()).await.is_err());
        assert!(registry.health().is_ready(), "{}", registry.health());
        registry.shutdown().await;
        assert_eq!(info(&registry, "job").state, ChildState::Finished);
    });
}

#[test]
fn a_failure_that_is_not_answered_by_a_restart_is_an_error_line() {
    in_virtual_time(async {
        let lines = Lines::catch();
        let registry = start(Group::new("test").child(well("once").restart(Restart::Temporary))).await;
        addr(&registry, "once").do_send(Boom(Where::Handler));
        sleep(millis(1)).await;
        let errors = lines.of("ERROR");
        assert_eq!((errors.len(), lines.of("WARN").len()), (1, 0), "{errors:?}");
        assert!(errors[0].contains("child=\"once\"") && errors[0].contains("panic in Handler"), "{errors:?}");
        assert_eq!((registry.totals().panics, registry.totals().restarts), (1, 0));
        registry.shutdown().await;
    });
}

#[test]
fn a_tree_in_good_order_logs_no_warning_from_start_to_end() {
    in_virtual_time(async {
        let lines = Lines::catch();
        let drains = Plan { drain: Duration::from_secs(1), ..Plan::default() };
        let inner = Group::new("inner").child(Subject::spec("b", &Log::default(), drains));
        let registry = start(Group::new("test").child(well("a")).group(inner)).await;
        registry.restart("b").await.expect("restarts");
        registry.add("inner", well("c")).await.expect("added");
        registry.remove("c").await.expect("removed");
        registry.shutdown().await;
        assert_eq!((lines.of("WARN"), lines.of("ERROR")), (Vec::new(), Vec::new()));
    });
}

#[test]
fn the_registry_answers_as_an_actor_too() {
    in_virtual_time(async {
        let registry = start(Group::new("test").child(RegistryActor::spec()).child(well("a"))).await;
        let asked = registry.addr::<RegistryActor>().expect("it is a child");
        let children = asked.send(WhichChildren).await.expect("answered");
        assert_eq!(children, registry.children());
        assert!(asked.send(AskHealth).await.expect("answered").is_ready());
        let mut probe = TestProbe::<SupervisorEvent>::start();
        asked.send(Subscribe(probe.recipient())).await.expect("answered");
        assert_eq!(asked.send(RestartChild("a".to_owned())).await, Ok(Ok(())));
        assert_eq!(probe.expect_within(Duration::from_secs(1)).await.kind, EventKind::Stopped);
        let new = StartChild { group: "test".to_owned(), spec: well("b") };
        assert_eq!(asked.send(new).await, Ok(Ok(())));
        assert_eq!(addr(&registry, "b").send(Note(1)).await, Ok(1));
        assert_eq!(asked.send(StopChild("b".to_owned())).await, Ok(Ok(0)));
        let unknown = asked.send(StopChild("b".to_owned())).await.expect("answered");
        assert_eq!(unknown.expect_err("it is gone").to_string(), "there is no child called b");
        addr(&registry, "a").do_send(Boom(Where::Handler));
        sleep(millis(1)).await;
        assert_eq!(asked.send(AskTotals).await, Ok(registry.totals()));
        assert_eq!(registry.totals().restarts, 1);
        let provided = registry.recipient::<StopChild>().expect("provided");
        assert_eq!(provided.send(StopChild("registry".to_owned())).await, Ok(Ok(0)), "even itself");
        assert!(registry.addr::<RegistryActor>().is_err());
        registry.shutdown().await;
    });
}

#[test]
fn a_crash_on_demand_is_a_panic_between_two_messages() {
    in_virtual_time(async {
        let log = Log::default();
        let spec = Subject::spec("a", &log, Plan::default()).intensity(at_most(1));
        let registry = start(Group::new("test").child(spec)).await;
        registry.crash("a").expect("it is there");
        sleep(millis(1)).await;
        assert_eq!(addr(&registry, "a").send(Note(1)).await, Ok(2));
        assert!(registry.crash("b").is_err());
        registry.crash("a").expect("it is there");
        let end = registry.terminated().await.expect_err("once was allowed");
        assert_eq!(end.to_string(), "a was given up after 1 restarts: it panicked: crashed on demand");
    });
}

#[test]
fn an_actor_that_leaves_its_mailbox_unserved_is_bypassed_and_told_of() {
    #[derive(Message)]
    #[rtype(result = "u64")]
    struct Which;
    struct Dreamer(u64);
    impl Actor for Dreamer {
        type Context = Context<Self>;
    }
    impl Handler<Which> for Dreamer {
        type Result = u64;
        fn handle(&mut self, _: Which, ctx: &mut Self::Context) -> u64 {
            if self.0 == 1 {
                ctx.wait(std::future::pending::<()>().into_actor(self));
            }
            self.0
        }
    }
    in_virtual_time(async {
        let spec = Spec::new("dreamer", |cx| Dreamer(cx.generation())).liveness(Duration::from_secs(2));
        let registry = start(Group::new("test").child(spec).child(well("a"))).await;
        sleep(Duration::from_mins(10)).await;
        assert_eq!(registry.totals().bypassed, 0, "an actor that has nothing to do is not stuck");
        let (dreamer, mut history) = (registry.addr::<Dreamer>().expect("known"), History::of(&registry));
        assert_eq!(dreamer.send(Which).await, Ok(1));
        assert_eq!(dreamer.send(Which).await, Ok(2));
        assert_eq!(
            history.take(),
            [
                "dreamer (life 1): does not serve its mailbox and is bypassed",
                "dreamer (life 1): it was stuck",
                "dreamer (life 1): comes back in 0 ms",
                "dreamer (life 2): started",
                "dreamer (life 2): ready"
            ]
        );
        assert_eq!((registry.totals().bypassed, registry.totals().restarts), (1, 1));
        registry.shutdown().await;
    });
}
