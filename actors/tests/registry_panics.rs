//! A panic, wherever it happens, costs one message and one incarnation, and nothing else.

mod registry_common;

use std::sync::{Arc, Mutex};

use actix::prelude::*;
use tokio::time::sleep;
use workpump_actors::registry::{EventKind, Exit, Group, Guard, Panicked, Spec};
use workpump_actors::testing::in_virtual_time;

use registry_common::{
    Arm, Boom, BoomInAtomic, BoomInFuture, HalfAChange, Halves, History, Log, Note, Plan, Subject, Where,
    addr, at_most, info, millis, start,
};

/// Sends a poison between other messages. All but the poison arrive, in order, and a fresh incarnation takes over.
fn only_the_poison_is_lost(text: &str, poison: impl FnOnce(&Addr<Subject>)) -> Vec<String> {
    in_virtual_time(async {
        let log = Log::default();
        let registry = start(Group::new("test").child(Subject::spec("it", &log, Plan::default()))).await;
        let (it, mut history) = (addr(&registry, "it"), History::of(&registry));
        it.do_send(Note(1));
        poison(&it);
        for number in 2..5 {
            it.do_send(Note(number));
        }
        sleep(millis(50)).await;
        assert_eq!(it.send(Note(5)).await, Ok(2), "the same address reaches the second life");
        assert_eq!(addr(&registry, "it"), it);
        let did = log.take();
        let notes: Vec<&str> = did.iter().filter_map(|line| line.strip_prefix("note ")).collect();
        let numbers: Vec<&str> = notes.iter().map(|note| &note[..1]).collect();
        assert_eq!(numbers, ["1", "2", "3", "4", "5"], "none lost, none twice, in order");
        assert_eq!(did.iter().filter(|line| *line == "start it").count(), 2);
        assert_eq!(
            history.take(),
            [
                format!("it (life 1): it panicked: {text}").as_str(),
                "it (life 1): comes back in 0 ms",
                "it (life 2): started",
                "it (life 2): ready"
            ]
        );
        let (totals, it) = (registry.totals(), info(&registry, "it"));
        assert_eq!((totals.panics, totals.restarts, it.restarts, it.generation), (1, 1, 1, 2));
        registry.shutdown().await;
        did
    })
}

fn never_stopped(did: &[String]) {
    assert!(!did.iter().any(|line| line.starts_with("stop")), "no clean-up on a broken actor: {did:?}");
}

#[test]
fn a_panic_in_a_handler_costs_its_message_and_the_queue_goes_to_the_next_life() {
    let did = only_the_poison_is_lost("panic in Handler", |it| it.do_send(Boom(Where::Handler)));
    let lived = ["note 1 life 1", "note 2 life 2", "note 3 life 2", "note 4 life 2"];
    assert!(lived.iter().all(|line| did.contains(&format!("{line} it"))), "{did:?}");
    never_stopped(&did);
}

#[test]
fn a_panic_in_a_message_to_itself_is_survived() {
    never_stopped(&only_the_poison_is_lost("panic in Handler", |it| it.do_send(Boom(Where::Notify))));
}

#[test]
fn a_panic_in_an_interval_is_survived() {
    never_stopped(&only_the_poison_is_lost("panic in Interval", |it| it.do_send(Boom(Where::Interval))));
}

#[test]
fn a_panic_in_a_timer_is_survived() {
    never_stopped(&only_the_poison_is_lost("panic in Later", |it| it.do_send(Boom(Where::Later))));
}

#[test]
fn a_panic_in_a_spawned_future_is_survived() {
    never_stopped(&only_the_poison_is_lost("panic in Spawned", |it| it.do_send(Boom(Where::Spawned))));
}

#[test]
fn a_panic_in_a_stream_handler_is_survived() {
    never_stopped(&only_the_poison_is_lost("panic in Stream", |it| it.do_send(Boom(Where::Stream))));
}

#[test]
fn a_panic_in_an_actor_future_of_an_answer_is_survived() {
    never_stopped(&only_the_poison_is_lost("panic in the future", |it| it.do_send(BoomInFuture)));
}

#[test]
fn a_panic_in_an_atomic_response_is_survived_and_those_behind_it_waited_for_it() {
    let did = only_the_poison_is_lost("panic in the atomic response", |it| it.do_send(BoomInAtomic));
    assert!(did.contains(&"note 2 life 2 it".to_owned()), "{did:?}");
    never_stopped(&did);
}

#[test]
fn a_panic_in_stopping_is_survived() {
    never_stopped(&only_the_poison_is_lost("panic in Stopping", |it| it.do_send(Boom(Where::Stopping))));
}

#[test]
fn a_panic_in_stopped_is_survived_and_does_not_run_it_twice() {
    let did = only_the_poison_is_lost("panic in Stopped", |it| it.do_send(Boom(Where::Stopped)));
    assert_eq!(did.iter().filter(|line| *line == "stop it").count(), 1);
}

#[test]
fn a_panic_in_drop_is_survived() {
    only_the_poison_is_lost("panic in Drop", |it| it.do_send(Boom(Where::Drop)));
}

#[test]
fn a_panic_in_drop_after_a_panic_in_a_handler_is_survived_and_the_first_one_is_the_cause() {
    let poison = |it: &Addr<Subject>| it.do_send(Boom(Where::HandlerAndDrop));
    never_stopped(&only_the_poison_is_lost("panic in HandlerAndDrop", poison));
}

/// The second life fails at birth; the third answers what was sent before the first died.
fn a_bad_birth(plan: Plan, exit: &Exit) {
    in_virtual_time(async {
        let log = Log::default();
        let registry = start(Group::new("test").child(Subject::spec("it", &log, plan))).await;
        let (it, mut history) = (addr(&registry, "it"), History::of(&registry));
        it.do_send(Boom(Where::Handler));
        let answers = [it.send(Note(1)), it.send(Note(2))];
        for answer in answers {
            assert_eq!(answer.await, Ok(3));
        }
        never_stopped(&log.take());
        let second = history.events().into_iter().filter(|event| event.generation == 2);
        let exits: Vec<EventKind> =
            second.map(|event| event.kind).filter(|kind| matches!(kind, EventKind::Exited { .. })).collect();
        assert_eq!(exits, [EventKind::Exited { exit: exit.clone() }]);
        assert_eq!((registry.totals().panics, registry.totals().restarts), (2, 2));
        registry.shutdown().await;
    });
}

#[test]
fn a_panic_in_started_of_a_later_life_is_tried_again() {
    let plan = Plan { bad_start: Some(|life| life == 2), ..Plan::default() };
    a_bad_birth(plan, &Exit::Panicked("a bad start".to_owned()));
}

#[test]
fn a_panic_in_the_factory_of_a_later_life_is_tried_again() {
    let plan = Plan { bad_factory: Some(|life| life == 2), ..Plan::default() };
    a_bad_birth(plan, &Exit::FactoryPanicked("a bad factory".to_owned()));
}

#[test]
fn a_panic_in_the_clean_up_of_an_actor_that_was_asked_to_stop_keeps_nobody_from_going_on() {
    in_virtual_time(async {
        for place in [Where::Stopping, Where::Stopped, Where::Drop] {
            let log = Log::default();
            let group = ["a", "b", "c"].iter().fold(Group::new("test"), |group, name| {
                group.child(Subject::spec(name, &log, Plan::default()))
            });
            let registry = start(group).await;
            let (b, mut history) = (addr(&registry, "b"), History::of(&registry));
            assert_eq!(b.send(Arm(place)).await, Ok(()));
            assert_eq!(registry.restart("b").await, Ok(()));
            assert_eq!(history.take()[0], format!("b (life 1): it panicked: panic in {place:?}"));
            assert_eq!(b.send(Arm(place)).await, Ok(()));
            log.take();
            registry.shutdown().await;
            let stops = log.take();
            assert_eq!(
                (stops.first(), stops.last()),
                (Some(&"stop c".to_owned()), Some(&"stop a".to_owned()))
            );
            assert_eq!((registry.totals().panics, registry.totals().restarts), (2, 0));
        }
    });
}

#[test]
fn an_actor_that_panics_while_it_drains_is_told_of_and_not_counted_as_a_restart() {
    in_virtual_time(async {
        let log = Log::default();
        let make = {
            let log = log.clone();
            move |cx: &mut _| Subject::make(cx, &log, &Plan { drain: millis(10), ..Plan::default() })
        };
        let registry = start(Group::new("test").child(Spec::new("it", make))).await;
        let (it, mut history) = (addr(&registry, "it"), History::of(&registry));
        let restarting = registry.restart("it");
        let poison = async {
            sleep(millis(5)).await;
            it.do_send(Boom(Where::Handler));
            it.do_send(Note(1));
        };
        let (restarted, ()) = tokio::join!(restarting, poison);
        assert_eq!(restarted, Ok(()));
        assert_eq!(it.send(Note(2)).await, Ok(2));
        assert_eq!(log.take(), ["start it", "drain it", "start it", "note 1 life 2 it", "note 2 life 2 it"]);
        assert_eq!(
            history.take(),
            [
                "it (life 1): it panicked: panic in Handler",
                "it (life 1): stopped",
                "it (life 2): started",
                "it (life 2): ready"
            ]
        );
        assert_eq!((registry.totals().panics, registry.totals().restarts), (1, 0));
        registry.shutdown().await;
    });
}

#[test]
fn a_poisoned_mutex_in_stopped_does_not_end_the_process() {
    struct Holder(Arc<Mutex<u32>>);
    impl Actor for Holder {
        type Context = Context<Self>;
        fn stopped(&mut self, _: &mut Self::Context) {
            *self.0.lock().expect("not poisoned") += 1;
        }
    }
    impl Handler<Boom> for Holder {
        type Result = ();
        fn handle(&mut self, _: Boom, _: &mut Self::Context) {
            let _held = self.0.lock().expect("not poisoned");
            panic!("with the lock held");
        }
    }
    in_virtual_time(async {
        let shared = Arc::default();
        let spec = Spec::new("holder", move |_| Holder(Arc::clone(&shared)));
        let registry = start(Group::new("test").child(spec)).await;
        let holder = registry.addr::<Holder>().expect("known");
        assert_eq!(holder.send(Boom(Where::Handler)).await, Err(MailboxError::Closed));
        sleep(millis(1)).await;
        registry.shutdown().await;
        assert_eq!(registry.totals().panics, 2, "one in the handler, one in `stopped()` of the next life");
    });
}

#[test]
fn a_panic_between_two_changes_is_not_seen_by_the_next_message() {
    in_virtual_time(async {
        let registry =
            start(Group::new("test").child(Subject::spec("it", &Log::default(), Plan::default()))).await;
        let it = addr(&registry, "it");
        let (change, look) = (it.send(HalfAChange), it.send(Halves));
        assert_eq!(change.await, Err(MailboxError::Closed), "whoever waits for the poison learns of it");
        assert_eq!(look.await, Ok((0, 0)));
        registry.shutdown().await;
    });
}

#[test]
fn a_hundred_queued_messages_survive_ten_panics_among_them() {
    in_virtual_time(async {
        let log = Log::default();
        let spec = Subject::spec("it", &log, Plan::default()).intensity(at_most(10));
        let registry = start(Group::new("test").child(spec)).await;
        let it = addr(&registry, "it");
        for number in 0..100 {
            if number % 10 == 5 {
                it.do_send(Boom(Where::Handler));
            }
            it.do_send(Note(number));
        }
        assert_eq!(it.send(Note(100)).await, Ok(11));
        let notes: Vec<u32> = log
            .take()
            .iter()
            .filter_map(|line| line.strip_prefix("note ")?.split(' ').next()?.parse().ok())
            .collect();
        assert_eq!(notes, (0..=100).collect::<Vec<u32>>());
        registry.shutdown().await;
    });
}

#[test]
fn a_panic_in_a_guarded_future_is_an_error_and_an_event_and_a_count_and_no_restart() {
    #[derive(Message)]
    #[rtype(result = "Result<u32, Panicked>")]
    struct Divide(u32);
    struct Divider(Guard);
    impl Actor for Divider {
        type Context = Context<Self>;
    }
    impl Handler<Divide> for Divider {
        type Result = ResponseFuture<Result<u32, Panicked>>;
        fn handle(&mut self, Divide(by): Divide, _: &mut Self::Context) -> Self::Result {
            Box::pin(self.0.guarded(async move { 12_u32.checked_div(by).expect("a divisor") }))
        }
    }
    in_virtual_time(async {
        let registry = start(Group::new("test").child(Spec::new("divider", |cx| Divider(cx.guard())))).await;
        let (divider, mut history) = (registry.addr::<Divider>().expect("known"), History::of(&registry));
        assert_eq!(divider.send(Divide(0)).await, Ok(Err(Panicked("a divisor".to_owned()))));
        assert_eq!(divider.send(Divide(3)).await, Ok(Ok(4)));
        assert_eq!(history.take(), ["divider (life 1): a future beside it panicked: a divisor"]);
        let totals = registry.totals();
        assert_eq!((totals.panics_beside, totals.panics, totals.restarts), (1, 0, 0));
        registry.shutdown().await;
    });
}
