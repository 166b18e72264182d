//! Who is restarted with whom, in which order, and how long a stop may take.

mod registry_common;

use std::time::Duration;

use tokio::time::{Instant, sleep};
use workpump_actors::registry::{Backoff, ChildState, Group, Registry, Spec, Strategy};
use workpump_actors::testing::in_virtual_time;

use registry_common::{Boom, History, Lines, Log, Note, Plan, Subject, Where, addr, info, millis, start};

/// Children a to d, each with this plan.
fn four(log: &Log, strategy: Strategy, plan: &Plan) -> Group {
    ["a", "b", "c", "d"].iter().fold(Group::new("test").strategy(strategy), |group, name| {
        group.child(Subject::spec(name, log, plan.clone()))
    })
}

/// What happens when b panics, twice: the second time there is a pause.
fn after_two_deaths_of_b(strategy: Strategy, plan: &Plan) -> (Vec<String>, Vec<String>) {
    in_virtual_time(async {
        let log = Log::default();
        let registry = start(four(&log, strategy, plan)).await;
        log.take();
        let mut lived = Vec::new();
        for _ in 0..2 {
            addr(&registry, "b").do_send(Boom(Where::Handler));
            sleep(Duration::from_secs(20)).await;
            assert!(registry.health().is_ready(), "{}", registry.health());
            lived.push(log.take());
        }
        let counts = ["a", "b", "c", "d"].map(|name| info(&registry, name).restarts);
        assert_eq!(counts, [0, 2, 0, 0], "only the one that died counts a restart");
        registry.shutdown().await;
        assert_eq!(log.take().last().map(String::as_str), Some("stop a"));
        let second = lived.pop().expect("two");
        (lived.pop().expect("two"), second)
    })
}

#[test]
fn one_for_one_restarts_nobody_else() {
    let (first, second) = after_two_deaths_of_b(Strategy::OneForOne, &Plan::default());
    assert_eq!(first, ["start b"]);
    assert_eq!(second, ["start b"]);
}

#[test]
fn rest_for_one_stops_those_behind_in_reverse_and_starts_all_of_them_in_order() {
    let (first, second) = after_two_deaths_of_b(Strategy::RestForOne, &Plan::default());
    assert_eq!(first, ["stop d", "stop c", "start b", "start c", "start d"]);
    assert_eq!(second, first);
}

#[test]
fn one_for_all_stops_everybody_in_reverse_and_starts_everybody_in_order() {
    let (first, second) = after_two_deaths_of_b(Strategy::OneForAll, &Plan::default());
    let expected = ["stop d", "stop c", "stop a", "start a", "start b", "start c", "start d"];
    assert_eq!(first, expected);
    assert_eq!(second, expected);
}

#[test]
fn a_wave_waits_for_slow_stops_and_slow_starts_without_burning_time() {
    let plan = Plan { slow_start: Duration::from_secs(1), drain: millis(50), ..Plan::default() };
    let (first, second) = after_two_deaths_of_b(Strategy::RestForOne, &plan);
    let expected = ["drain d", "stop d", "drain c", "stop c", "start b", "start c", "start d"];
    assert_eq!(first, expected);
    assert_eq!(second, expected);
    let (first, _) = after_two_deaths_of_b(Strategy::OneForAll, &plan);
    assert_eq!(first[6..], ["start a", "start b", "start c", "start d"]);
}

#[test]
fn in_parallel_everybody_starts_and_stops_at_once_and_the_slowest_decides() {
    in_virtual_time(async {
        let log = Log::default();
        let plan = |seconds| Plan {
            slow_start: Duration::from_secs(seconds),
            drain: Duration::from_secs(seconds),
            ..Plan::default()
        };
        let group = Group::new("test")
            .in_parallel()
            .child(Subject::spec("a", &log, plan(1)))
            .child(Subject::spec("b", &log, plan(3)))
            .child(Subject::spec("c", &log, plan(2)));
        let begin = Instant::now();
        let registry = start(group).await;
        assert_eq!(begin.elapsed(), Duration::from_secs(3));
        assert_eq!(log.take(), ["start a", "start b", "start c"]);
        registry.shutdown().await;
        assert_eq!(begin.elapsed(), Duration::from_secs(6));
        assert_eq!(log.take(), ["drain c", "drain b", "drain a", "stop a", "stop c", "stop b"]);
    });
}

#[test]
fn in_parallel_one_for_all_starts_only_when_everybody_has_stopped() {
    in_virtual_time(async {
        let log = Log::default();
        let slow = Plan { drain: millis(50), ..Plan::default() };
        let group = Group::new("test")
            .in_parallel()
            .strategy(Strategy::OneForAll)
            .child(Subject::spec("a", &log, Plan::default()))
            .child(Subject::spec("b", &log, Plan::default()))
            .child(Subject::spec("c", &log, slow));
        let registry = start(group).await;
        log.take();
        addr(&registry, "a").do_send(Boom(Where::Handler));
        sleep(Duration::from_secs(1)).await;
        assert_eq!(log.take(), ["drain c", "stop b", "stop c", "start a", "start b", "start c"]);
        registry.shutdown().await;
    });
}

#[test]
fn an_actor_may_go_on_when_asked_to_stop_and_drain_with_its_neighbours_alive() {
    in_virtual_time(async {
        let log = Log::default();
        let plan = Plan { drain: millis(50), ..Plan::default() };
        let registry = start(four(&log, Strategy::OneForOne, &plan)).await;
        log.take();
        let begin = Instant::now();
        registry.shutdown().await;
        assert_eq!(begin.elapsed(), millis(200));
        assert_eq!(
            log.take(),
            ["drain d", "stop d", "drain c", "stop c", "drain b", "stop b", "drain a", "stop a"]
        );
    });
}

#[test]
fn an_actor_that_never_stops_is_ended_at_its_deadline_and_the_others_are_stopped_after_it() {
    in_virtual_time(async {
        let log = Log::default();
        let never = Plan { never_stops: true, ..Plan::default() };
        let group = Group::new("test")
            .child(Subject::spec("a", &log, Plan::default()))
            .child(Subject::spec("b", &log, never.clone()).stop_within(Duration::from_secs(3)))
            .child(Subject::spec("c", &log, never).stop_within(Duration::ZERO));
        let registry = start(group).await;
        let (begin, mut history) = (Instant::now(), History::of(&registry));
        registry.shutdown().await;
        assert_eq!(begin.elapsed(), Duration::from_secs(3));
        let log = log.take();
        assert_eq!(log, ["start a", "start b", "start c", "stop a"], "nobody starts again to be ended");
        assert_eq!(
            history.take()[..4],
            ["c (life 1): stopped", "b (life 1): it was stuck", "b (life 1): stopped", "a (life 1): stopped"]
        );
    });
}

#[test]
fn a_stop_without_limit_is_waited_for() {
    in_virtual_time(async {
        let log = Log::default();
        let plan = Plan { drain: Duration::from_hours(1), ..Plan::default() };
        let spec = Subject::spec("it", &log, plan).stop_within(Duration::MAX);
        let registry = start(Group::new("test").child(spec)).await;
        let begin = Instant::now();
        registry.shutdown().await;
        assert_eq!(begin.elapsed(), Duration::from_hours(1));
        assert_eq!(log.take(), ["start it", "drain it", "stop it"]);
    });
}

/// Children a, which takes ten seconds for each life but the first, b, and c.
async fn with_a_slow_restarter(log: &Log, strategy: Strategy) -> Registry {
    let of_a = log.clone();
    let slow_later = Spec::new("a", move |cx| {
        let slow_start = if cx.generation() == 1 { Duration::ZERO } else { Duration::from_secs(10) };
        Subject::make(cx, &of_a, &Plan { slow_start, ..Plan::default() })
    });
    let group = Group::new("test")
        .strategy(strategy)
        .child(slow_later)
        .child(Subject::spec("b", log, Plan::default()))
        .child(Subject::spec("c", log, Plan::default()));
    start(group).await
}

#[test]
fn a_death_is_handled_at_once_while_a_sibling_is_starting() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = with_a_slow_restarter(&log, Strategy::OneForOne).await;
        addr(&registry, "a").do_send(Boom(Where::Handler));
        sleep(Duration::from_secs(1)).await;
        assert_eq!(info(&registry, "a").state, ChildState::Starting);
        let begin = Instant::now();
        addr(&registry, "b").do_send(Boom(Where::Handler));
        assert_eq!(addr(&registry, "b").send(Note(1)).await, Ok(2));
        assert_eq!(addr(&registry, "c").send(Note(1)).await, Ok(1));
        assert_eq!(begin.elapsed(), Duration::ZERO);
        registry.shutdown().await;
    });
}

#[test]
fn a_death_is_handled_at_once_while_a_sibling_waits_out_its_pause() {
    in_virtual_time(async {
        let log = Log::default();
        let calm = Backoff { first: Duration::from_secs(5), ..Backoff::default() };
        let registry = start(four(&log, Strategy::OneForOne, &Plan::default()).backoff(calm)).await;
        for _ in 0..2 {
            addr(&registry, "a").do_send(Boom(Where::Handler));
        }
        sleep(Duration::from_secs(1)).await;
        assert_eq!(info(&registry, "a").state, ChildState::Waiting);
        let begin = Instant::now();
        addr(&registry, "b").do_send(Boom(Where::Handler));
        assert_eq!(addr(&registry, "b").send(Note(1)).await, Ok(2));
        assert_eq!(begin.elapsed(), Duration::ZERO);
        registry.shutdown().await;
    });
}

#[test]
fn in_a_wave_those_behind_a_slow_starter_wait_for_it_and_a_second_death_begins_it_anew() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = with_a_slow_restarter(&log, Strategy::OneForAll).await;
        log.take();
        addr(&registry, "c").do_send(Boom(Where::Handler));
        sleep(Duration::from_secs(9)).await;
        assert_eq!(log.take(), ["stop b", "stop a", "start a"], "b and c wait for a");
        sleep(Duration::from_secs(2)).await;
        assert_eq!(log.take(), ["start b", "start c"]);
        registry.shutdown().await;
    });
}

#[test]
fn a_child_that_is_restarted_by_hand_leaves_its_siblings_alone_and_is_not_counted() {
    in_virtual_time(async {
        let lines = Lines::catch();
        let log = Log::default();
        let plan = Plan { drain: millis(50), ..Plan::default() };
        let registry = start(four(&log, Strategy::OneForOne, &plan)).await;
        let mut history = History::of(&registry);
        log.take();
        let b = addr(&registry, "b");
        assert_eq!(registry.restart("b").await, Ok(()));
        assert_eq!(b.send(Note(1)).await, Ok(2));
        assert_eq!(log.take(), ["drain b", "stop b", "start b", "note 1 life 2 b"]);
        let told = ["b (life 1): stopped", "b (life 2): started", "b (life 2): ready"];
        assert_eq!(history.take(), told);
        assert_eq!((info(&registry, "b").restarts, registry.totals().restarts), (0, 0));
        assert_eq!(lines.of("WARN"), [""; 0]);
        registry.shutdown().await;
    });
}

#[test]
fn a_restart_by_hand_does_not_wait_for_a_neighbour_that_drains() {
    in_virtual_time(async {
        let log = Log::default();
        let slow = Plan { drain: Duration::from_secs(4), ..Plan::default() };
        let group = Group::new("test")
            .child(Subject::spec("a", &log, Plan::default()))
            .child(Subject::spec("b", &log, slow));
        let registry = start(group).await;
        let begin = Instant::now();
        let slow = registry.restart("b");
        let quick = async {
            sleep(millis(10)).await;
            registry.restart("a").await.map(|()| begin.elapsed())
        };
        assert_eq!(tokio::join!(slow, quick), (Ok(()), Ok(millis(10))));
        registry.shutdown().await;
    });
}

#[test]
fn a_restart_by_hand_takes_along_those_who_depend_on_the_child() {
    in_virtual_time(async {
        let log = Log::default();
        let registry = start(four(&log, Strategy::RestForOne, &Plan::default())).await;
        log.take();
        assert_eq!(registry.restart("c").await, Ok(()));
        sleep(millis(1)).await;
        assert_eq!(log.take(), ["stop d", "stop c", "start c", "start d"]);
        registry.shutdown().await;
    });
}
