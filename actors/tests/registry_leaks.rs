//! What is left after a thousand lives of a tree: nothing.
//!
//! Each test runs in a process of its own, since threads, descriptors and memory are counted for the whole process.
#![allow(clippy::print_stdout, reason = "what was measured is worth reading")]

mod real;

use std::time::Duration;

use actix::prelude::*;
use real::{
    Do, Who, Worker, actor_threads, alone, gate, in_real_time, started, tireless_group, wait_for, worker,
};
use workpump_actors::registry::{Group, Placement, Registry, Spec};

const CYCLES: usize = 1_000;

/// Cycles after which everything that is allocated once has been.
const WARM: usize = 200;

/// Growth of the resident memory over 800 cycles that is taken for noise: less than 2 KiB for each.
const NOISE_KIB: u64 = 1_600;

fn tree() -> Group {
    tireless_group()
        .child(Worker::spec("vital").on(Placement::Vital))
        .child(Worker::spec("work"))
        .child(Worker::spec("shared").on(Placement::Shared("x")))
        .child(Worker::spec("own").on(Placement::Own))
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").expect("Linux").count()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("Linux").count()
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("VmRSS")).expect("Linux");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
}

/// Runs the cycle again and again and looks at what is left.
async fn leaves_nothing_behind(what: &str, cycle: impl AsyncFn()) {
    cycle().await;
    let before = (threads(), descriptors());
    let mut warm = 0;
    for n in 1..=CYCLES {
        cycle().await;
        if n == WARM {
            warm = resident_kib();
        }
    }
    // The kernel takes a joined thread off its list a little later.
    wait_for("the end of the last threads", || actor_threads() == 0).await;
    wait_for("the threads and descriptors of the beginning", || (threads(), descriptors()) == before).await;
    let resident = resident_kib();
    println!(
        "measured: {what}: {} threads and {} descriptors before and after, {warm} KiB after {WARM} cycles, {resident} KiB after {CYCLES}",
        before.0, before.1
    );
    assert!(resident < warm + NOISE_KIB, "from {warm} to {resident} KiB");
}

async fn all_answer(registry: &Registry) {
    for name in ["vital", "work", "shared", "own"] {
        worker(registry, name).send(Who).await.expect("answers");
    }
}

#[test]
fn a_thousand_starts_and_stops_leave_nothing_behind() {
    alone("a_thousand_starts_and_stops_leave_nothing_behind", || {
        in_real_time(leaves_nothing_behind("start and stop", async || {
            let registry = started(tree()).await;
            all_answer(&registry).await;
            registry.shutdown().await;
        }));
    });
}

#[test]
fn a_thousand_trees_in_which_a_child_panics_leave_nothing_behind() {
    alone("a_thousand_trees_in_which_a_child_panics_leave_nothing_behind", || {
        in_real_time(leaves_nothing_behind("with a panic", async || {
            let registry = started(tree()).await;
            for name in ["own", "work"] {
                worker(&registry, name).do_send(Do::panic());
            }
            all_answer(&registry).await;
            assert_eq!(registry.totals().panics, 2);
            registry.shutdown().await;
        }));
    });
}

#[test]
fn a_thousand_trees_whose_thread_ends_under_a_child_leave_nothing_behind() {
    alone("a_thousand_trees_whose_thread_ends_under_a_child_leave_nothing_behind", || {
        in_real_time(leaves_nothing_behind("with an arbiter that stops", async || {
            let registry = started(tree()).await;
            let mut events = registry.events();
            worker(&registry, "own").do_send(Do::this(|_, _| {
                Arbiter::current().stop();
            }));
            real::exit_of(&mut events, "own").await;
            all_answer(&registry).await;
            registry.shutdown().await;
        }));
    });
}

#[test]
fn a_thousand_trees_that_are_dropped_instead_of_shut_down_leave_nothing_behind() {
    alone("a_thousand_trees_that_are_dropped_instead_of_shut_down_leave_nothing_behind", || {
        in_real_time(leaves_nothing_behind("dropped", async || {
            let registry = started(tree()).await;
            all_answer(&registry).await;
            drop(registry);
            wait_for("the end of the threads", || actor_threads() == 0).await;
        }));
    });
}

#[test]
fn a_start_that_fails_or_is_given_up_leaves_nothing_behind() {
    alone("a_start_that_fails_or_is_given_up_leaves_nothing_behind", || {
        in_real_time(async {
            for _ in 0..50 {
                let broken = Worker::hooked("broken", |_, _| panic!("never")).on(Placement::Own);
                let host = workpump_actors::registry::Host::own("test-system").await.expect("a host");
                tree().child(broken).start(host, real::HANG).await.expect_err("one is broken");
                wait_for("the end of the threads", || actor_threads() == 0).await;
                // Whoever starts it does not wait for the end of the start.
                let (open, block) = gate();
                let slow = Worker::hooked("slow", move |_, _| block()).on(Placement::Own);
                let host = workpump_actors::registry::Host::own("test-system").await.expect("a host");
                let start = tree().child(slow).start(host, real::HANG);
                assert!(tokio::time::timeout(Duration::from_millis(5), start).await.is_err());
                drop(open);
                wait_for("the end of the threads", || actor_threads() == 0).await;
            }
        });
    });
}

struct Stuck(Box<dyn Fn()>);

impl Actor for Stuck {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        // Only when it is ready.
        ctx.run_later(Duration::from_millis(1), |act, _| act.0());
    }
}

#[test]
fn a_dropped_registry_ends_its_threads_although_a_stuck_actor_still_holds_a_handle() {
    alone("a_dropped_registry_ends_its_threads_although_a_stuck_actor_still_holds_a_handle", || {
        in_real_time(async {
            // A factory's handle does not own the tree; this actor keeps it, and never comes back.
            let (open, block) = gate();
            let (say, mut said) = tokio::sync::mpsc::unbounded_channel();
            let spec = Spec::new("own", move |cx| {
                let (registry, say, block) = (cx.registry(), say.clone(), block.clone());
                Stuck(Box::new(move || {
                    say.send(registry.children().len()).expect("somebody waits");
                    block();
                }))
            });
            let spec = spec.on(Placement::Own).stop_within(Duration::from_millis(100));
            let registry = started(tireless_group().child(spec).child(Worker::spec("work"))).await;
            assert_eq!(said.recv().await, Some(3));
            drop(registry);
            wait_for("the end of all threads but the blocked one", || actor_threads() == 1).await;
            drop(open);
            wait_for("the end of the last", || actor_threads() == 0).await;
        });
    });
}

#[test]
fn children_that_come_and_go_leave_nothing_behind() {
    alone("children_that_come_and_go_leave_nothing_behind", || {
        in_real_time(async {
            let registry = started(tree()).await;
            let before = threads();
            for n in 0..CYCLES {
                let spec =
                    Worker::spec("guest").on(if n % 2 == 0 { Placement::Own } else { Placement::Work });
                registry.add("test", spec).await.expect("comes up");
                worker(&registry, "guest").send(Who).await.expect("answers");
                assert_eq!(registry.remove("guest").await, Ok(0));
            }
            wait_for("the threads of the beginning", || threads() == before).await;
            assert_eq!(registry.children().len(), 5);
            registry.shutdown().await;
        });
    });
}
