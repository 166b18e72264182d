//! What an engine does when one of its actors has ended, or when it is evicted at a bad moment.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::future::BoxFuture;
use tokio::time::{Instant, sleep};
use workpump_actors::instance::AliveLock;
use workpump_actors::message::AliveLockChanged;
use workpump_actors::options::Options;
use workpump_actors::registry::{EventKind, Host, Spec};
use workpump_actors::runner::{Failure, Job, Runner};
use workpump_actors::testing::{FakeStore, Op, Row, engine_parts, in_virtual_time, quiesce, runner};
use workpump_actors::tree::Engine;
use workpump_actors::work::Category;

/// Panics when it is asked for the size of its batches.
struct Bomb;

impl Runner for Bomb {
    fn max_batch(&self) -> usize {
        panic!("no size")
    }

    fn run(&self, _: Job) -> BoxFuture<'static, Result<(), Failure>> {
        Box::pin(async { Ok(()) })
    }
}

#[test]
fn a_runner_that_panics_when_it_is_asked_for_its_batch_size_fails_the_start() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert(Row::default());
        let parts = engine_parts(Options::default(), &store, vec![(Category::Inbox, Arc::new(Bomb) as _)]);
        let error = Engine::start_on(parts, Host::current()).await.expect_err("does not start").to_string();
        assert!(error.contains("dispatch") && error.contains("no size"), "{error}");
        assert_eq!(store.count(Op::Claim), 0);
    });
}

/// Kills an actor until it is given up.
async fn kill_for_good(engine: &Engine, child: &str) {
    let mut events = engine.registry().events();
    engine.registry().crash(child).expect("a child");
    loop {
        let event = events.recv().await.expect("the tree tells");
        match event.kind {
            EventKind::Ready if event.child == child => engine.registry().crash(child).expect("a child"),
            EventKind::GaveUp { .. } => return,
            _ => {}
        }
    }
}

#[test]
fn an_engine_whose_dispatcher_dies_too_often_leaves_in_good_order_and_says_so() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(5_000, &Row::default());
        let endless = runner(1, |_| std::future::pending());
        let parts = engine_parts(Options::default(), &store, vec![(Category::Inbox, endless)]);
        let engine = Engine::start_on(parts, Host::current()).await.expect("starts");
        assert!(engine.is_ready());
        kill_for_good(&engine, "dispatch").await;
        let gave_up = engine.terminated().await.expect_err("given up");
        assert_eq!(gave_up.child, "work");
        assert!(gave_up.to_string().contains("dispatch was given up after 10 restarts"), "{gave_up}");
        assert!(!engine.is_ready());
        assert!(engine.registry().health().to_string().contains("dispatch is Failed"));
        let claims = store.count(Op::Claim);
        sleep(Duration::from_mins(10)).await;
        assert_eq!(store.count(Op::Claim), claims);
        assert!(engine.drain().await.deregistered, "the report is that of the drain when it was given up");
        assert_eq!(store.leased(), 0, "leaving hands back what nobody can run");
    });
}

#[test]
fn an_engine_whose_claimer_dies_too_often_still_writes_what_runs() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(3, &Row::default());
        let slow = runner(1, |_| async {
            sleep(Duration::from_secs(45)).await;
            Ok(())
        });
        let parts = engine_parts(Options::default(), &store, vec![(Category::Inbox, slow)]);
        let engine = Engine::start_on(parts, Host::current()).await.expect("starts");
        store.called(Op::Claim, 1).await;
        quiesce().await;
        kill_for_good(&engine, "claim").await;
        engine.terminated().await.expect_err("given up");
        let report = engine.drain().await;
        assert_eq!((report.finished, report.abandoned, report.unsettled), (3, 0, 0), "{report:?}");
        assert_eq!(store.settled().len(), 3);
    });
}

#[test]
fn a_user_actor_that_dies_too_often_takes_readiness_with_it_and_nothing_else() {
    in_virtual_time(async {
        let store = FakeStore::new();
        let mut parts = engine_parts(
            Options::default(),
            &store,
            vec![(Category::Inbox, runner(1, |_| async { Ok(()) }))],
        );
        parts.users = parts.users.child(Spec::new("mailer", |_| Mailer));
        let engine = Engine::start_on(parts, Host::current()).await.expect("starts");
        engine.registry().addr::<Mailer>().expect("supervised");
        kill_for_good(&engine, "mailer").await;
        quiesce().await;
        assert!(!engine.is_ready());
        assert_eq!(engine.registry().health().troubles.len(), 1);
        store.insert(Row::default());
        engine.request_immediate_poll();
        store.called(Op::Settle, 1).await;
        let restarts = |name: &str| {
            let children = engine.registry().children();
            children.into_iter().find(|child| child.name == name).map(|child| child.restarts)
        };
        let pump = ["lease_renewal", "warden", "heartbeat", "settle", "dispatch", "claim"];
        assert_eq!(pump.map(restarts), [Some(0); 6]);
        assert!(engine.drain().await.deregistered);
    });
}

/// A user's actor.
struct Mailer;

impl Actor for Mailer {
    type Context = Context<Self>;
}

#[test]
fn an_eviction_during_a_drain_reaches_everyone() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert(Row::default());
        let patient = runner(1, |job: Job| async move {
            job.cancel.cancelled().await;
            Ok(())
        });
        let parts = engine_parts(Options::default(), &store, vec![(Category::Inbox, patient)]);
        let instance = parts.identity.id;
        let engine = Arc::new(Engine::start_on(parts, Host::current()).await.expect("starts"));
        store.called(Op::Claim, 1).await;
        quiesce().await;
        let before = Instant::now();
        let draining = Arc::clone(&engine);
        let drain = tokio::task::spawn_local(async move { draining.drain().await });
        sleep(Duration::from_secs(1)).await;
        store.evict(instance);
        engine.recipient::<AliveLockChanged>().expect("provided").do_send(AliveLockChanged(AliveLock::Held));
        let report = drain.await.expect("not aborted");
        assert!(before.elapsed() < Duration::from_secs(5), "{:?}", before.elapsed());
        assert!(!report.deregistered);
        assert!(store.settled().is_empty(), "nothing is written under a burnt id");
        assert_eq!(store.count(Op::Settle), 0);
    });
}
