//! The registry by itself: order, all or nothing, and what becomes of an actor that panics.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::prelude::*;
use tokio::time::sleep;
use workpump_actors::registry::{Group, Host, Placement, Spec};
use workpump_actors::testing::in_virtual_time;

type Log = Arc<Mutex<Vec<String>>>;

#[derive(Message)]
#[rtype(result = "u32")]
struct Ask(u32);

#[derive(Message)]
#[rtype(result = "()")]
struct Panic;

/// Notes its life; the number makes each a type of its own.
struct Child<const N: usize> {
    log: Log,
    slow: Duration,
    panics: bool,
}

impl<const N: usize> Child<N> {
    fn spec(log: &Log) -> Spec<Self> {
        Self::with(log, Duration::ZERO, false)
    }

    fn with(log: &Log, slow: Duration, panics: bool) -> Spec<Self> {
        let log = Arc::clone(log);
        let names = ["first", "second", "third"];
        Spec::new(names[N], move |_| Self { log: Arc::clone(&log), slow, panics })
    }

    fn note(&self, what: &str) {
        self.log.lock().expect("not poisoned").push(format!("{what} {N}"));
    }
}

impl<const N: usize> Actor for Child<N> {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        assert!(!self.panics, "no start");
        self.note("start");
        ctx.wait(sleep(self.slow).into_actor(self));
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        self.note("stop");
    }
}

impl<const N: usize> Handler<Ask> for Child<N> {
    type Result = u32;

    fn handle(&mut self, Ask(value): Ask, _: &mut Self::Context) -> u32 {
        value + 1
    }
}

impl<const N: usize> Handler<Panic> for Child<N> {
    type Result = ();

    fn handle(&mut self, _: Panic, _: &mut Self::Context) {
        panic!("told to");
    }
}

fn take(log: &Log) -> Vec<String> {
    std::mem::take(&mut log.lock().expect("not poisoned"))
}

#[test]
fn children_start_in_order_each_when_the_one_before_is_ready_and_stop_in_reverse() {
    in_virtual_time(async {
        let log = Log::default();
        let group = Group::new("test")
            .child(Child::<0>::with(&log, Duration::from_secs(1), false))
            .child(Child::<1>::spec(&log).on(Placement::Vital))
            .child(Child::<2>::spec(&log));
        let before = tokio::time::Instant::now();
        let registry = group.start(Host::current(), Duration::from_secs(5)).await.expect("starts");
        assert_eq!(before.elapsed(), Duration::from_secs(1));
        assert_eq!(take(&log), ["start 0", "start 1", "start 2"]);
        registry.shutdown().await;
        assert_eq!(take(&log), ["stop 2", "stop 1", "stop 0"]);
        registry.shutdown().await;
        assert!(take(&log).is_empty());
    });
}

#[test]
fn an_address_is_good_before_its_actor_runs() {
    in_virtual_time(async {
        let log = Log::default();
        let spec = Child::<0>::spec(&log).provides::<Ask>();
        let early = spec.addr().send(Ask(1));
        let registry = Group::new("test")
            .child(spec)
            .start(Host::current(), Duration::from_secs(5))
            .await
            .expect("starts");
        assert_eq!(early.await, Ok(2));
        assert_eq!(registry.addr::<Child<0>>().expect("known").send(Ask(5)).await, Ok(6));
        assert_eq!(registry.recipient::<Ask>().expect("provided").send(Ask(6)).await, Ok(7));
        assert!(registry.addr::<Child<1>>().is_err());
        assert!(registry.recipient::<Panic>().is_err(), "only what was declared is provided");
        registry.shutdown().await;
        let never_started = Child::<1>::spec(&log);
        let orphan = never_started.addr();
        drop(never_started);
        assert_eq!(orphan.send(Ask(1)).await, Err(MailboxError::Closed));
    });
}

#[test]
fn a_child_that_panics_in_its_start_fails_the_start_and_stops_the_others() {
    in_virtual_time(async {
        let log = Log::default();
        let group = Group::new("test")
            .child(Child::<0>::spec(&log))
            .child(Child::<1>::with(&log, Duration::ZERO, true))
            .child(Child::<2>::spec(&log));
        let failed = group.start(Host::current(), Duration::from_secs(5)).await.expect_err("panics");
        assert_eq!(failed.to_string(), "second did not start: it panicked: no start");
        assert_eq!(take(&log), ["start 0", "stop 0"]);
    });
}

#[test]
fn a_child_that_is_never_ready_fails_the_start_at_the_deadline_with_its_last_word() {
    in_virtual_time(async {
        let log = Log::default();
        let inner = Arc::clone(&log);
        let shy = Spec::new("shy", move |cx| {
            cx.ready().problem("no database");
            Child::<1> { log: Arc::clone(&inner), slow: Duration::ZERO, panics: false }
        });
        let group = Group::new("test").child(Child::<0>::spec(&log)).child(shy);
        let failed = group.start(Host::current(), Duration::from_secs(5)).await.expect_err("never ready");
        assert_eq!(failed.to_string(), "shy did not start: not ready within 5000 ms: no database");
        assert_eq!(take(&log), ["start 0", "start 1", "stop 1", "stop 0"]);
    });
}
