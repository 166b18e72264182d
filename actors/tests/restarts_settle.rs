//! The settling actor dies and the next one goes on: what is not written yet stands in the backlog.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};
use workpump_actors::delivery::{InFlight, Settlement};
use workpump_actors::message::{Account, Drain, Drained, Observe, Settle};
use workpump_actors::options::Options;
use workpump_actors::port::{ClaimRequest, SettleItem, StoreError, Verdict, WorkStore};
use workpump_actors::testing::{
    Call, Crash, FakeStore, Op, Reply, Row, SettleRig, deliver, in_virtual_time, quiesce,
};
use workpump_actors::work::{Category, WorkKey};

struct Bench {
    store: Arc<FakeStore>,
    rig: SettleRig,
    permits: Arc<Semaphore>,
    in_flight: Arc<InFlight>,
}

impl Bench {
    fn new() -> Self {
        let store = FakeStore::new();
        let rig = SettleRig::start(&Options::default(), &store);
        Self { store, rig, permits: Arc::new(Semaphore::new(1_000)), in_flight: Arc::default() }
    }

    /// Claims so many fresh rows and completes them.
    async fn results(&self, count: usize) -> Vec<Settlement> {
        self.store.insert_many(count, &Row::default());
        let lease = Duration::from_mins(5);
        let request = ClaimRequest {
            instance: self.rig.instance,
            max_rows: count as u32,
            max_bytes: u64::MAX,
            lease,
            partition_count: 1,
            stream_run: 1_000,
            categories: Category::ALL.into(),
        };
        let works = self.store.claim(request).await.expect("claimed").works;
        assert_eq!(works.len(), count);
        let deliveries = deliver(works, &self.permits, &self.in_flight, lease, lease / 10);
        deliveries.into_iter().map(|delivery| delivery.settle(Verdict::Complete)).collect()
    }

    /// Has so many results written. Returns their keys.
    async fn send(&self, count: usize) -> Vec<WorkKey> {
        let settlements = self.results(count).await;
        let keys = settlements.iter().map(Settlement::key).collect();
        self.rig.addr.send(Settle { settlements }).await.expect("alive");
        keys
    }

    async fn account(&self) -> Account {
        self.rig.addr.send(Observe).await.expect("alive")
    }

    /// What each flush held.
    fn flushes(&self) -> Vec<Vec<WorkKey>> {
        let keys = |items: Vec<SettleItem>| items.iter().map(|item| item.key).collect();
        let flush = |call| if let Call::Settle(items) = call { Some(keys(items)) } else { None };
        self.store.calls().into_iter().filter_map(flush).collect()
    }

    fn assert_everything_is_written_once(&self, rows: usize) {
        assert_eq!((self.store.unfinished(), self.store.settled().len()), (0, rows));
        assert_eq!(self.permits.available_permits(), 1_000);
        assert!(self.in_flight.is_empty());
    }
}

#[test]
fn results_that_wait_are_written_by_the_next_writer() {
    in_virtual_time(async {
        let mut bench = Bench::new();
        bench.send(3).await;
        bench.rig.restart().await;
        bench.send(2).await;
        sleep(Duration::from_secs(1)).await;
        assert_eq!(bench.flushes().len(), 1);
        bench.assert_everything_is_written_once(5);
        assert_eq!(bench.account().await.counter("applied"), 5);
    });
}

#[test]
fn a_batch_whose_writer_died_comes_first_and_alone() {
    in_virtual_time(async {
        let mut bench = Bench::new();
        bench.store.script(Op::Settle, Reply::Hang);
        let old = bench.send(3).await;
        bench.store.called(Op::Settle, 1).await;
        let new = bench.send(2).await;
        bench.rig.restart().await;
        sleep(Duration::from_secs(1)).await;
        assert_eq!(bench.flushes(), [old.clone(), old, new]);
        bench.assert_everything_is_written_once(5);
    });
}

#[test]
fn a_batch_that_was_written_before_its_writer_died_is_unclear_and_not_lost() {
    in_virtual_time(async {
        let mut bench = Bench::new();
        bench.store.script(Op::Settle, Reply::Hang);
        bench.send(3).await;
        bench.store.called(Op::Settle, 1).await;
        let Some(Call::Settle(items)) = bench.store.calls().pop() else { panic!("a flush is under way") };
        bench.store.settle(bench.rig.instance, items).await.expect("carried out, and nobody told of it");
        bench.rig.restart().await;
        sleep(Duration::from_secs(1)).await;
        bench.assert_everything_is_written_once(3);
        let account = bench.account().await;
        assert_eq!((account.counter("unclear"), account.counter("fenced")), (3, 0));
    });
}

#[test]
fn a_batch_that_waits_to_be_tried_again_is_tried_by_the_next_writer() {
    in_virtual_time(async {
        let mut bench = Bench::new();
        bench.store.script(Op::Settle, Reply::Fail(StoreError::Unavailable("away".to_owned())));
        let old = bench.send(3).await;
        bench.store.called(Op::Settle, 1).await;
        quiesce().await;
        let new = bench.send(1).await;
        bench.rig.restart().await;
        sleep(Duration::from_secs(1)).await;
        assert_eq!(bench.flushes(), [old.clone(), old, new]);
        bench.assert_everything_is_written_once(4);
    });
}

#[test]
fn a_batch_during_whose_flush_three_writers_died_is_given_up_and_the_others_are_written() {
    in_virtual_time(async {
        let mut bench = Bench::new();
        let deadly = bench.send(2).await;
        let worst = deadly[0];
        bench.store.always(move |call| match call {
            Call::Settle(items) if items.iter().any(|item| item.key == worst) => Some(Reply::Hang),
            _ => None,
        });
        for deaths in 1..=3 {
            bench.store.called(Op::Settle, deaths).await;
            assert_eq!(bench.in_flight.len(), 2);
            bench.rig.restart().await;
        }
        let later = bench.send(2).await;
        sleep(Duration::from_secs(1)).await;
        assert_eq!(bench.flushes()[3..], [later]);
        assert_eq!(bench.account().await.counter("deadly"), 2);
        assert_eq!((bench.store.settled().len(), bench.store.leased()), (2, 2));
        assert!(bench.in_flight.is_empty(), "a recovery may hand them back");
    });
}

#[test]
fn results_in_a_writer_that_panics_are_kept() {
    in_virtual_time(async {
        let mut bench = Bench::new();
        bench.send(3).await;
        bench.rig.addr.do_send(Crash);
        bench.rig.restart().await;
        sleep(Duration::from_secs(1)).await;
        bench.assert_everything_is_written_once(3);
    });
}

#[test]
fn a_restarted_writer_writes_nothing_while_the_instance_is_fenced() {
    in_virtual_time(async {
        let mut bench = Bench::new();
        bench.send(2).await;
        // The one that was to hear it died of it.
        bench.rig.standing.fence();
        bench.rig.restart().await;
        bench.send(2).await;
        sleep(Duration::from_mins(1)).await;
        assert!(bench.flushes().is_empty());
        bench.rig.unfence();
        sleep(Duration::from_secs(1)).await;
        bench.assert_everything_is_written_once(4);
    });
}

#[test]
fn a_writer_made_after_an_eviction_gives_everything_up() {
    in_virtual_time(async {
        let mut bench = Bench::new();
        bench.send(2).await;
        bench.rig.standing.evict();
        bench.rig.restart().await;
        bench.send(1).await;
        sleep(Duration::from_mins(1)).await;
        assert!(bench.flushes().is_empty());
        assert!(bench.in_flight.is_empty());
        assert_eq!(bench.account().await.counter("discarded"), 3);
    });
}

#[test]
fn a_drain_asked_for_again_writes_what_is_left_and_gives_the_whole_account() {
    in_virtual_time(async {
        let mut bench = Bench::new();
        bench.send(300).await;
        bench.store.called(Op::Settle, 1).await;
        quiesce().await;
        bench.store.script(Op::Settle, Reply::Slow(Duration::from_secs(1)));
        bench.send(400).await;
        let first = tokio::task::spawn_local(bench.rig.addr.send(Drain));
        sleep(Duration::from_millis(500)).await;
        bench.rig.restart().await;
        assert!(first.await.expect("not aborted").is_err(), "whoever asked learns of the death");
        let again = bench.rig.addr.send(Drain).await.expect("alive");
        assert_eq!(again, Drained { settled: 400, ..Drained::default() });
        bench.assert_everything_is_written_once(700);
    });
}

#[test]
fn a_writer_that_dies_in_a_drain_leaves_its_task_and_its_deadline_to_the_next() {
    in_virtual_time(async {
        let mut bench = Bench::new();
        bench.store.always(|call| matches!(call, Call::Settle(_)).then_some(Reply::Hang));
        bench.send(3).await;
        let before = Instant::now();
        let first = tokio::task::spawn_local(bench.rig.addr.send(Drain));
        sleep(Duration::from_secs(10)).await;
        bench.rig.restart().await;
        assert!(first.await.expect("not aborted").is_err(), "whoever asked learns of the death");
        let report = bench.rig.addr.send(Drain).await.expect("alive");
        assert_eq!((report.settled, report.unsettled), (0, 3));
        assert_eq!(before.elapsed(), Duration::from_secs(30));
        bench.store.recover();
        bench.rig.restart().await;
        sleep(Duration::from_secs(1)).await;
        assert!(bench.store.settled().is_empty(), "a drained writer writes nothing, also after a restart");
    });
}
