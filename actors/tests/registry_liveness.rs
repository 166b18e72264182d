//! Actors that do not come back: blocked threads, waits without an end, stops that never finish, and a process that was only asleep.
#![allow(clippy::print_stdout, reason = "what was measured is worth reading")]

mod real;

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use actix::prelude::*;
use real::{
    Do, Forever, HANG, Log, Note, Point, Who, Worker, alone, exit_of, gate, in_real_time, is_alone,
    spawn_alone, started, taken, tireless_group, until, wait_for, worker,
};
use tokio::time::Instant;
use workpump_actors::registry::{EventKind, Exit, Host, Placement};

/// Long enough that a busy machine does not look like a blocked thread.
const LIMIT: Duration = Duration::from_secs(1);

/// Blocks a thread with no way to call it back, as user code may.
#[expect(clippy::disallowed_methods, reason = "the very thing to be survived")]
fn sleep_on_the_thread(time: Duration) {
    std::thread::sleep(time);
}

#[test]
fn a_handler_that_blocks_its_thread_too_long_is_bypassed_and_its_successor_serves_the_queue_in_order() {
    in_real_time(async {
        let log = Log::default();
        let group = tireless_group().child(Worker::logged("it", &log).liveness(LIMIT));
        let registry = started(group).await;
        let (mut events, it) = (registry.events(), worker(&registry, "it"));
        let before = it.send(Who).await.expect("answers").1;
        it.do_send(Do::this(|_, _| sleep_on_the_thread(5 * LIMIT)));
        (0..500).for_each(|n| it.do_send(Note(n)));
        until(&mut events, "it", |kind| *kind == EventKind::Unresponsive).await;
        assert_eq!(exit_of(&mut events, "it").await, "it was stuck");
        let (life, after) = it.send(Who).await.expect("answers");
        assert!(life >= 2 && before != after);
        let expected: Vec<u32> = (0..500).collect();
        let notes: Vec<u32> =
            taken(&log).into_iter().map(|(life, value)| if life > 1 { value } else { 9_999 }).collect();
        assert_eq!(notes, expected);
        registry.shutdown().await;
    });
}

#[test]
fn a_bypassed_life_that_wakes_up_handles_nothing_more() {
    in_real_time(async {
        let (log, dropped) = (Log::default(), Arc::new(AtomicBool::new(false)));
        let seen = Arc::clone(&dropped);
        let hook = move |at, life| {
            if (at, life) == (Point::Dropped, 1) {
                seen.store(true, Ordering::Release);
            }
        };
        let group = tireless_group().child(Worker::with("it", &log, hook).liveness(LIMIT));
        let registry = started(group).await;
        let (mut events, it) = (registry.events(), worker(&registry, "it"));
        let (open, block) = gate();
        it.do_send(Do::this(move |_, ctx| {
            ctx.run_interval(Duration::from_micros(1), |act, _| {
                act.log.lock().expect("whole").push((act.life, 0));
            });
            block();
        }));
        exit_of(&mut events, "it").await;
        // The successor waits, so that the messages lie there when the old life wakes up.
        it.send(Who).await.expect("answers");
        let (go_on, hold) = gate();
        it.do_send(Do::this(move |_, _| hold()));
        (0..100).for_each(|n| it.do_send(Note(n)));
        drop(open);
        wait_for("the end of the old life", || dropped.load(Ordering::Acquire)).await;
        assert_eq!(taken(&log), []);
        drop(go_on);
        it.send(Who).await.expect("answers");
        assert_eq!(taken(&log).len(), 100);
        registry.shutdown().await;
    });
}

#[test]
fn the_neighbours_of_an_actor_that_blocks_for_ever_come_back_although_they_set_no_limit() {
    in_real_time(async {
        let log = Log::default();
        let group = tireless_group()
            .child(Worker::logged("neighbour", &log))
            .child(Worker::spec("it").liveness(LIMIT))
            .child(Worker::spec("elsewhere").on(Placement::Vital));
        let registry = started(group).await;
        let (it, neighbour) = (worker(&registry, "it"), worker(&registry, "neighbour"));
        let (open, block) = gate();
        it.do_send(Do::this(move |_, _| block()));
        (0..100).for_each(|n| neighbour.do_send(Note(n)));
        let (life, there) = neighbour.send(Who).await.expect("answers");
        assert!(life >= 1);
        assert_eq!(it.send(Who).await.expect("answers").1, neighbour.send(Who).await.expect("answers").1);
        let notes: Vec<u32> = taken(&log).into_iter().map(|(_, value)| value).collect();
        assert_eq!(notes, (0..100).collect::<Vec<_>>(), "on {there:?}");
        assert_eq!(neighbour.send(Who).await.expect("answers").0, 2);
        assert_eq!(worker(&registry, "elsewhere").send(Who).await.expect("answers").0, 1);
        registry.shutdown().await;
        drop(open);
    });
}

#[test]
fn an_answer_that_never_comes_is_caught_while_the_thread_and_the_neighbours_stay() {
    in_real_time(async {
        let group =
            tireless_group().child(Worker::spec("it").liveness(LIMIT)).child(Worker::spec("neighbour"));
        let registry = started(group).await;
        let (mut events, it, neighbour) =
            (registry.events(), worker(&registry, "it"), worker(&registry, "neighbour"));
        let here = it.send(Who).await.expect("answers").1;
        let stuck = it.send(Forever);
        until(&mut events, "it", |kind| *kind == EventKind::Unresponsive).await;
        assert_eq!(stuck.await, Err(MailboxError::Closed));
        assert_eq!(it.send(Who).await, Ok((2, here)));
        assert_eq!(neighbour.send(Who).await, Ok((1, here)));
        registry.shutdown().await;
    });
}

#[test]
fn an_actor_that_blocks_its_thread_in_its_start_costs_one_start_and_not_the_thread_of_the_next() {
    in_real_time(async {
        let (open, block) = gate();
        let hook = move |at, life| {
            if (at, life) == (Point::Started, 2) {
                block();
            }
        };
        let group = tireless_group()
            .child(Worker::hooked("it", hook).ready_within(2 * LIMIT))
            .child(Worker::spec("neighbour"));
        let registry = started(group).await;
        let (mut events, it) = (registry.events(), worker(&registry, "it"));
        it.do_send(Do::panic());
        assert_eq!(exit_of(&mut events, "it").await, "it panicked: told to");
        assert_eq!(exit_of(&mut events, "it").await, "it was not ready in time");
        let (life, there) = it.send(Who).await.expect("answers");
        assert_eq!(life, 3, "the thread was given up at the first try");
        assert_eq!(worker(&registry, "neighbour").send(Who).await, Ok((2, there)));
        registry.shutdown().await;
        drop(open);
    });
}

#[test]
fn an_actor_that_is_stuck_in_its_stop_does_not_hang_the_shutdown() {
    in_real_time(async {
        let within = Duration::from_millis(300);
        let (open, block) = gate();
        let stuck = move |at, _| {
            if at == Point::Stopping {
                block();
            }
        };
        let mut group = tireless_group();
        for name in ["a", "b", "c", "d", "e"] {
            group = group.child(Worker::spec(name));
        }
        let group = group.child(Worker::hooked("it", stuck).stop_within(within));
        let registry = started(group).await;
        let before = Instant::now();
        registry.shutdown().await;
        // The neighbours, with 5 s each to stop, do not wait one by one: their thread is known to be gone.
        println!("measured: shut down in {:?} with an actor stuck in its stop", before.elapsed());
        assert!(before.elapsed() < Duration::from_secs(10), "{:?}", before.elapsed());
        let last = registry.children().pop().expect("known");
        assert_eq!((&*last.name, last.last_exit), ("it", Some(Exit::Stuck)));
        drop(open);
    });
}

#[test]
fn a_process_ends_although_an_actor_never_stops() {
    alone("a_process_ends_although_an_actor_never_stops", || {
        in_real_time(async {
            let never = |at, _| {
                if at == Point::Stopping {
                    sleep_on_the_thread(100 * HANG);
                }
            };
            let group =
                tireless_group().child(Worker::hooked("it", never).stop_within(LIMIT).on(Placement::Own));
            started(group).await.shutdown().await;
        });
    });
}

#[test]
fn an_actor_that_says_continue_for_ever_is_ended_at_its_deadline_and_leaves_no_thread_behind() {
    struct Stubborn;

    impl Actor for Stubborn {
        type Context = Context<Self>;

        fn stopping(&mut self, _: &mut Self::Context) -> Running {
            Running::Continue
        }
    }

    in_real_time(async {
        let spec = workpump_actors::registry::Spec::new("it", |_| Stubborn).stop_within(LIMIT);
        let registry = started(tireless_group().child(spec)).await;
        registry.shutdown().await;
        assert_eq!(registry.children().pop().expect("known").last_exit, Some(Exit::Stuck));
    });
}

#[test]
fn a_process_that_was_stopped_and_continued_bypasses_nobody() {
    const NAME: &str = "a_process_that_was_stopped_and_continued_bypasses_nobody";
    if is_alone() {
        return in_real_time(sleeper());
    }
    let mut child = spawn_alone(NAME);
    let mut said = std::io::BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    while !line.contains("watched") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut said, &mut line).expect("reads") > 0, "it has ended");
    }
    let signal = |which: &str| {
        let status = Command::new("sh").args(["-c", &format!("kill -{which} {}", child.id())]).status();
        assert!(status.expect("runs").success());
    };
    for _ in 0..3 {
        signal("STOP");
        sleep_on_the_thread(2 * LIMIT);
        signal("CONT");
        sleep_on_the_thread(LIMIT / 3);
    }
    signal("USR1");
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut said, &mut rest).expect("reads");
    assert!(child.wait().expect("ends").success(), "{rest}");
    assert!(rest.contains("bypassed 0, restarts 0"), "{rest}");
}

/// Watched actors on all kinds of threads, until a signal.
async fn sleeper() {
    let group = tireless_group()
        .child(Worker::spec("a").liveness(LIMIT).on(Placement::Vital))
        .child(Worker::spec("b").liveness(LIMIT))
        .child(Worker::spec("c").liveness(LIMIT).on(Placement::Own));
    let host = Host::own("test-system").await.expect("a host");
    let registry = group.start(host, HANG).await.expect("starts");
    let kind = tokio::signal::unix::SignalKind::user_defined1();
    let mut signal = tokio::signal::unix::signal(kind).expect("a handler");
    println!("watched");
    signal.recv().await;
    let totals = registry.totals();
    println!("bypassed {}, restarts {}", totals.bypassed, totals.restarts);
    registry.shutdown().await;
}
