//! What an engine does when one of its actors has ended, or when it is evicted at a bad moment.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::{Instant, sleep};
use workpump_actors::actor::dispatch::DispatchActor;
use workpump_actors::instance::AliveLock;
use workpump_actors::message::AliveLockChanged;
use workpump_actors::options::Options;
use workpump_actors::registry::Host;
use workpump_actors::runner::{Failure, Job, Runner};
use workpump_actors::testing::{Crash, FakeStore, Op, Row, engine_parts, in_virtual_time, quiesce, runner};
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

#[test]
fn an_engine_whose_dispatcher_has_ended_claims_nothing_any_more() {
    in_virtual_time(async {
        let store = FakeStore::new();
        store.insert_many(5_000, &Row::default());
        let endless = runner(1, |_| std::future::pending());
        let parts = engine_parts(Options::default(), &store, vec![(Category::Inbox, endless)]);
        let engine = Engine::start_on(parts, Host::current()).await.expect("starts");
        engine.addr::<DispatchActor>().expect("provided").do_send(Crash);
        quiesce().await;
        assert!(!engine.is_ready());
        assert!(store.count(Op::Claim) <= 2, "{}", store.count(Op::Claim));
        let claims = store.count(Op::Claim);
        engine.request_immediate_poll();
        sleep(Duration::from_mins(10)).await;
        assert_eq!(store.count(Op::Claim), claims);
        engine.drain().await;
        assert_eq!(store.leased(), 0, "leaving hands back what nobody can run");
    });
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
