//! The registry on threads of its own: panics wherever an actor can have them, threads that end, and whatever runtime it is used from.

mod real;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use actix::prelude::*;
use futures_util::stream;
use real::{
    Do, Log, Note, Point, Who, Worker, actor_threads, alone, exit_of, gate, in_real_time, started, taken,
    tireless_group, until_ready, wait_for, worker,
};
use workpump_actors::registry::{ChildState, GaveUp, Group, Host, Intensity, Placement, Registry, Restart};

/// Panics at one point of the first life.
fn once(point: Point) -> impl Fn(Point, u64) + Send + Sync + 'static {
    move |at, life| assert!(at != point || life != 1, "at {at:?}")
}

#[test]
fn a_panic_at_any_point_of_a_life_leads_to_the_next_one_with_its_queue() {
    in_real_time(async {
        let deeds: Vec<(&str, Do)> = vec![
            ("told to", Do::panic()),
            ("something that is not text", Do::this(|_, _| std::panic::panic_any(7_u8))),
            (
                "in a timer",
                Do::this(|_, ctx| {
                    ctx.run_later(std::time::Duration::from_millis(1), |_, _| panic!("in a timer"));
                }),
            ),
            (
                "in an interval",
                Do::this(|_, ctx| {
                    ctx.run_interval(std::time::Duration::from_millis(1), |_, _| panic!("in an interval"));
                }),
            ),
            (
                "in a future",
                Do::this(|act, ctx| {
                    ctx.spawn(async {}.into_actor(act).map(|(), _, _| panic!("in a future")));
                }),
            ),
            (
                "in a wait",
                Do::this(|act, ctx| {
                    ctx.wait(async {}.into_actor(act).map(|(), _, _| panic!("in a wait")));
                }),
            ),
            (
                "in a stream",
                Do::this(|_, ctx| {
                    ctx.add_stream(stream::iter([Item]));
                }),
            ),
        ];
        let registry = started(tireless_group().child(Worker::spec("it"))).await;
        let mut events = registry.events();
        let it = worker(&registry, "it");
        for (life, (text, deed)) in deeds.into_iter().enumerate() {
            it.do_send(deed);
            assert_eq!(exit_of(&mut events, "it").await, format!("it panicked: {text}"));
            assert_eq!(it.send(Who).await.expect("answers").0, life as u64 + 2);
        }
        assert_eq!(registry.totals().panics, 7);
        registry.shutdown().await;
    });
}

struct Item;

impl StreamHandler<Item> for Worker {
    fn handle(&mut self, _: Item, _: &mut Self::Context) {
        panic!("in a stream");
    }
}

#[test]
fn a_panic_in_started_stopping_stopped_drop_or_the_factory_of_a_restarted_actor_is_caught() {
    in_real_time(async {
        for point in [Point::Factory, Point::Started, Point::Stopping, Point::Stopped, Point::Dropped] {
            let second = move |at, life| assert!(at != point || life != 2, "at {at:?}");
            let registry = started(tireless_group().child(Worker::hooked("it", second))).await;
            let mut events = registry.events();
            let it = worker(&registry, "it");
            it.do_send(Do::panic());
            exit_of(&mut events, "it").await;
            if !matches!(point, Point::Factory | Point::Started) {
                it.do_send(Do::this(|_, ctx| ctx.stop()));
            }
            let prefix = if point == Point::Factory { "its factory panicked" } else { "it panicked" };
            assert_eq!(exit_of(&mut events, "it").await, format!("{prefix}: at {point:?}"));
            assert_eq!(it.send(Who).await.expect("answers").0, 3);
            registry.shutdown().await;
        }
    });
}

#[test]
fn a_poisoned_mutex_that_panics_the_clean_up_does_not_abort_the_process() {
    alone("a_poisoned_mutex_that_panics_the_clean_up_does_not_abort_the_process", || {
        in_real_time(async {
            let shared = Arc::new(Mutex::new(0));
            let of_hook = Arc::clone(&shared);
            let hook = move |at, _| {
                if matches!(at, Point::Stopping | Point::Stopped | Point::Dropped) {
                    *of_hook.lock().unwrap() += 1;
                }
            };
            let registry = started(tireless_group().child(Worker::hooked("it", hook))).await;
            let mut events = registry.events();
            let it = worker(&registry, "it");
            let poison = Arc::clone(&shared);
            it.do_send(Do::this(move |_, _| {
                let _held = poison.lock().unwrap();
                panic!("while it holds the lock");
            }));
            assert_eq!(exit_of(&mut events, "it").await, "it panicked: while it holds the lock");
            assert_eq!(it.send(Who).await.expect("answers").0, 2);
            // Now the thread ends under it: its clean-up panics, and so does its drop.
            it.do_send(Do::this(|_, _| {
                Arbiter::current().stop();
            }));
            assert_eq!(exit_of(&mut events, "it").await, "its thread ended");
            assert_eq!(it.send(Who).await.expect("answers").0, 3);
            registry.shutdown().await;
        });
    });
}

#[test]
fn a_panic_in_drop_while_the_threads_are_shut_down_is_survived() {
    in_real_time(async {
        let group = tireless_group()
            .child(Worker::hooked("first", |at, _| assert!(at != Point::Dropped, "dropped")))
            .child(
                Worker::hooked("second", |at, _| assert!(at != Point::Stopped, "stopped")).on(Placement::Own),
            )
            .child(Worker::spec("third"));
        let registry = started(group).await;
        registry.shutdown().await;
        assert_eq!(registry.terminated().await, Ok(()));
        let exits: Vec<_> = registry
            .children()
            .into_iter()
            .map(|child| child.last_exit.map(|exit| exit.to_string()))
            .collect();
        let said = |text: &str| Some(format!("it panicked: {text}"));
        assert_eq!(exits, [None, said("dropped"), said("stopped"), None]);
    });
}

struct Grenade;

impl Drop for Grenade {
    fn drop(&mut self) {
        panic!("a message panics while it is dropped");
    }
}

#[test]
fn a_message_that_panics_while_it_is_dropped_unread_does_not_hang_the_shutdown() {
    in_real_time(async {
        let registry = started(tireless_group().child(Worker::spec("it"))).await;
        let it = worker(&registry, "it");
        let (open, block) = gate();
        let (entered, inside) = tokio::sync::oneshot::channel();
        it.do_send(Do::this(move |_, ctx| {
            entered.send(()).expect("somebody waits");
            block();
            ctx.stop();
        }));
        for _ in 0..3 {
            let grenade = Grenade;
            it.do_send(Do::this(move |_, _| std::mem::forget(grenade)));
        }
        inside.await.expect("handled");
        registry.stop();
        let stopping = || registry.children()[1].state == ChildState::Stopping;
        wait_for("the stop", stopping).await;
        drop(open);
        registry.shutdown().await;
        assert_eq!(registry.totals().undelivered, 3);
        assert!(!it.connected());
    });
}

#[test]
fn last_words_that_panic_do_not_keep_a_group_from_stopping() {
    in_real_time(async {
        let never = Intensity { max_restarts: 0, ..Intensity::default() };
        for early in [true, false] {
            let group = Group::new("test").intensity(never).child(Worker::spec("it")).last_words(move |_| {
                assert!(!early, "before the future");
                async { panic!("in the future") }
            });
            let registry = started(group).await;
            worker(&registry, "it").do_send(Do::panic());
            let gave_up = registry.terminated().await.expect_err("gave up");
            assert_eq!(gave_up.to_string(), "it was given up after 0 restarts: it panicked: told to");
            registry.shutdown().await;
        }
    });
}

#[test]
fn an_actor_whose_thread_ends_goes_on_with_its_queue_on_another_and_so_do_its_neighbours() {
    in_real_time(async {
        let (log, neighbours) = (Log::default(), Log::default());
        let group = tireless_group()
            .child(Worker::logged("it", &log))
            .child(Worker::logged("neighbour", &neighbours))
            .child(Worker::spec("elsewhere").on(Placement::Vital));
        let registry = started(group).await;
        let mut events = registry.events();
        let (it, neighbour) = (worker(&registry, "it"), worker(&registry, "neighbour"));
        let before = it.send(Who).await.expect("answers").1;
        let queue = it.clone();
        it.do_send(Do::this(move |_, _| {
            // Queued while its thread is about to end.
            (0..100).for_each(|n| queue.do_send(Note(n)));
            Arbiter::current().stop();
        }));
        assert_eq!(exit_of(&mut events, "it").await, "its thread ended");
        let (life, after) = it.send(Who).await.expect("answers");
        assert!(life > 1 && before != after);
        let (life, beside) = neighbour.send(Who).await.expect("answers");
        assert!(life > 1 && beside == after);
        let notes: Vec<u32> = taken(&log).into_iter().map(|(_, value)| value).collect();
        assert_eq!(notes, (0..100).collect::<Vec<_>>());
        assert_eq!(worker(&registry, "elsewhere").send(Who).await.expect("answers").0, 1);
        registry.shutdown().await;
    });
}

#[test]
fn an_actor_that_stops_the_system_of_its_host_ends_the_tree_and_nobody_waits_for_ever() {
    in_real_time(async {
        let registry = started(tireless_group().child(Worker::spec("it"))).await;
        worker(&registry, "it").do_send(Do::this(|_, _| System::current().stop()));
        let gave_up: GaveUp = registry.terminated().await.expect_err("nobody asked for it");
        assert_eq!(gave_up.to_string(), "test was given up after 0 restarts: its thread ended");
        assert!(!registry.health().is_ready());
        registry.shutdown().await;
    });
}

async fn one_life() {
    let registry =
        started(tireless_group().child(Worker::spec("it")).child(Worker::spec("that").on(Placement::Own)))
            .await;
    let mut events = registry.events();
    let it = worker(&registry, "it");
    it.do_send(Do::panic());
    until_ready(&mut events, "it").await;
    assert_eq!(it.send(Who).await.expect("answers").0, 2);
    registry.add("test", Worker::spec("more")).await.expect("comes up");
    assert_eq!(registry.health().to_string(), "ready");
    registry.shutdown().await;
}

/// An executor of no runtime.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn a_registry_works_from_a_plain_thread_and_from_every_runtime() {
    real::quiet();
    block_on(one_life());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().expect("a runtime");
    runtime.block_on(async { tokio::spawn(one_life()).await.expect("no panic") });
    runtime.block_on(one_life());
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(one_life());
    System::new().block_on(one_life());
}

#[test]
fn a_registry_made_inside_an_actix_system_outlives_it() {
    real::quiet();
    let (send, receive) = std::sync::mpsc::channel();
    let outer = System::new();
    outer.block_on(async move {
        let registry: Registry = started(tireless_group().child(Worker::spec("it"))).await;
        send.send(registry).expect("somebody listens");
        System::current().stop();
    });
    outer.run().expect("stops");
    in_real_time(async {
        let registry = receive.recv().expect("sent");
        let it = worker(&registry, "it");
        it.do_send(Do::panic());
        assert_eq!(it.send(Who).await.expect("answers").0, 2);
        registry.shutdown().await;
    });
}

#[test]
fn a_host_that_is_the_current_system_ends_its_tree_when_the_system_stops() {
    real::quiet();
    let outer = System::new();
    let registry = outer.block_on(async {
        let registry = tireless_group()
            .child(Worker::spec("it"))
            .start(Host::current(), real::HANG)
            .await
            .expect("starts");
        System::current().stop();
        registry
    });
    outer.run().expect("stops");
    in_real_time(async {
        assert!(registry.terminated().await.is_err());
        registry.shutdown().await;
    });
}

#[test]
fn a_transient_child_whose_thread_dies_comes_back_and_one_that_has_finished_does_not() {
    in_real_time(async {
        let lives = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&lives);
        let spec = Worker::hooked("it", move |at, life| {
            once(Point::Factory)(at, 0);
            count.fetch_max(life, Ordering::Relaxed);
        });
        let registry =
            started(tireless_group().child(spec.restart(Restart::Transient).on(Placement::Own))).await;
        let (mut events, it) = (registry.events(), worker(&registry, "it"));
        it.do_send(Do::this(|_, _| {
            Arbiter::current().stop();
        }));
        assert_eq!(exit_of(&mut events, "it").await, "its thread ended");
        assert_eq!(it.send(Who).await.expect("answers").0, 2);
        it.do_send(Do::this(|_, ctx| ctx.stop()));
        wait_for("the end of the address", || !it.connected()).await;
        assert_eq!(lives.load(Ordering::Relaxed), 2);
        assert!(registry.health().is_ready());
        registry.shutdown().await;
    });
}

#[test]
fn a_shutdown_joins_every_thread_it_opened() {
    alone("a_shutdown_joins_every_thread_it_opened", || {
        in_real_time(async {
            for _ in 0..20 {
                let group = tireless_group()
                    .child(Worker::spec("own").on(Placement::Own))
                    .child(Worker::spec("vital").on(Placement::Vital))
                    .child(Worker::spec("shared").on(Placement::Shared("x")));
                let registry = started(group).await;
                assert_eq!(actor_threads(), 4);
                registry.shutdown().await;
                // The kernel takes a joined thread off its list a little later.
                wait_for("the end of every thread", || actor_threads() == 0).await;
            }
        });
    });
}
