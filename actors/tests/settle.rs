//! Settling: how results are batched, and what becomes of those that cannot be written.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::sleep;
use uuid::Uuid;
use workpump_actors::delivery::{Delivery, InFlight, Settlement};
use workpump_actors::message::{Account, Drain, Evicted, Observe, Settle};
use workpump_actors::options::{Options, SettleOptions};
use workpump_actors::port::{ClaimRequest, StoreError, Verdict, WorkStore};
use workpump_actors::testing::{
    Call, FakeStore, Op, Reply, Row, SettleRig, deliver, in_virtual_time, quiesce,
};
use workpump_actors::work::{Category, FailureReason, WorkKey};

struct Bench {
    store: Arc<FakeStore>,
    rig: SettleRig,
    permits: Arc<Semaphore>,
    in_flight: Arc<InFlight>,
}

fn options(settle: SettleOptions) -> Options {
    let mut options = Options::default();
    options.settle = settle;
    options
}

impl Bench {
    fn new(settle: SettleOptions) -> Self {
        let store = FakeStore::new();
        let rig = SettleRig::start(&options(settle), &store);
        Self { store, rig, permits: Arc::new(Semaphore::new(1_000)), in_flight: Arc::default() }
    }

    /// Claims `count` fresh rows and settles them all the same way.
    async fn results(&self, count: usize, verdict: &Verdict) -> Vec<Settlement> {
        self.results_of(count, &Row::default(), verdict).await
    }

    async fn results_of(&self, count: usize, row: &Row, verdict: &Verdict) -> Vec<Settlement> {
        self.claim(count, row).await.into_iter().map(|delivery| delivery.settle(verdict.clone())).collect()
    }

    async fn claim(&self, count: usize, row: &Row) -> Vec<Delivery> {
        self.store.insert_many(count, row);
        let request = ClaimRequest {
            instance: self.rig.instance,
            max_rows: count as u32,
            max_bytes: u64::MAX,
            lease: Duration::from_mins(5),
            partition_count: 1,
            stream_run: 1_000,
            categories: Category::ALL.into(),
        };
        let claimed = self.store.claim(request).await.expect("claimed");
        assert_eq!(claimed.works.len(), count);
        let lease = Duration::from_mins(5);
        deliver(claimed.works, &self.permits, &self.in_flight, lease, lease / 10)
    }

    fn send(&self, settlements: Vec<Settlement>) {
        self.rig.addr.do_send(Settle { settlements });
    }

    fn flushes(&self) -> Vec<usize> {
        self.store
            .calls()
            .iter()
            .filter_map(|call| match call {
                Call::Settle(items) => Some(items.len()),
                _ => None,
            })
            .collect()
    }

    async fn account(&self) -> Account {
        self.rig.addr.send(Observe).await.expect("alive")
    }

    fn assert_all_permits_are_back(&self) {
        assert_eq!(self.permits.available_permits(), 1_000);
        assert!(self.in_flight.is_empty());
    }
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("gone".to_owned())
}

fn rejected() -> StoreError {
    StoreError::Rejected { code: "22021".to_owned(), message: "bad byte".to_owned() }
}

#[test]
fn a_lone_result_is_written_at_the_end_of_the_window() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        bench.send(bench.results(1, &Verdict::Complete).await);
        quiesce().await;
        assert_eq!(bench.store.count(Op::Settle), 0);
        sleep(Duration::from_millis(11)).await;
        assert_eq!(bench.flushes(), [1]);
        assert_eq!(bench.store.times(Op::Settle), [Duration::from_millis(10)]);
        bench.assert_all_permits_are_back();
    });
}

#[test]
fn the_threshold_ends_the_wait() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions {
            immediate_flush_threshold: 5,
            coalesce_window_milliseconds: 5_000,
            ..SettleOptions::default()
        });
        for settlement in bench.results(10, &Verdict::Complete).await {
            bench.send(vec![settlement]);
        }
        quiesce().await;
        assert_eq!(bench.flushes(), [5, 5]);
    });
}

#[test]
fn a_threshold_of_one_writes_the_first_result_at_once() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions {
            immediate_flush_threshold: 1,
            coalesce_window_milliseconds: 5_000,
            ..SettleOptions::default()
        });
        bench.send(bench.results(1, &Verdict::Complete).await);
        quiesce().await;
        assert_eq!(bench.flushes(), [1]);
    });
}

#[test]
fn no_batch_is_larger_than_the_limit_and_order_is_kept() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions { max_batch_size: 3, ..SettleOptions::default() });
        let results = bench.results(8, &Verdict::Complete).await;
        let order: Vec<WorkKey> = results.iter().map(Settlement::key).collect();
        bench.send(results);
        sleep(Duration::from_millis(20)).await;
        assert_eq!(bench.flushes(), [3, 3, 2]);
        let written: Vec<WorkKey> = bench.store.settled().iter().map(|(key, ..)| *key).collect();
        assert_eq!(written, order);
        bench.assert_all_permits_are_back();
    });
}

#[test]
fn one_flush_is_under_way_at_a_time_and_what_comes_meanwhile_goes_next() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        bench.store.script(Op::Settle, Reply::Slow(Duration::from_secs(2)));
        bench.send(bench.results(1, &Verdict::Complete).await);
        sleep(Duration::from_millis(11)).await;
        for _ in 0..3 {
            bench.send(bench.results(4, &Verdict::Complete).await);
            sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(bench.flushes(), [1]);
        assert_eq!(bench.permits.available_permits(), 1_000 - 13, "a permit returns when the row is written");
        sleep(Duration::from_secs(2)).await;
        assert_eq!(bench.flushes(), [1, 12]);
        bench.assert_all_permits_are_back();
    });
}

#[test]
fn a_failed_flush_is_tried_again_with_the_same_rows() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        bench.store.script(Op::Settle, Reply::Fail(unavailable()));
        bench.store.script(Op::Settle, Reply::Fail(StoreError::Contended("deadlock".to_owned())));
        bench.send(bench.results(3, &Verdict::Complete).await);
        sleep(Duration::from_millis(15)).await;
        bench.send(bench.results(1, &Verdict::Complete).await);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(bench.flushes(), [3, 3, 3, 1], "the pause is not cut short by news");
        let gaps = bench.store.gaps(Op::Settle);
        assert!((40..=60).contains(&gaps[0]) && (80..=120).contains(&gaps[1]), "{gaps:?}");
        let account = bench.account().await;
        assert_eq!((account.counter("applied"), account.counter("errors")), (4, 2));
        bench.assert_all_permits_are_back();
    });
}

#[test]
fn an_outage_is_waited_out_with_a_capped_pause() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        bench.store.always(|call| matches!(call, Call::Settle(_)).then(|| Reply::Fail(unavailable())));
        bench.send(bench.results(2, &Verdict::Complete).await);
        sleep(Duration::from_mins(4)).await;
        assert!(bench.store.gaps(Op::Settle).iter().all(|gap| *gap <= 6_000));
        bench.store.recover();
        sleep(Duration::from_secs(7)).await;
        assert_eq!(bench.account().await.counter("applied"), 2);
        bench.assert_all_permits_are_back();
    });
}

#[test]
fn an_outage_longer_than_the_leases_costs_a_log_line_a_counter_and_no_permit() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        bench.store.always(|call| matches!(call, Call::Settle(_)).then(|| Reply::Fail(unavailable())));
        bench.send(bench.results(2, &Verdict::Complete).await);
        sleep(Duration::from_mins(6)).await;
        let account = bench.account().await;
        assert_eq!((account.counter("lease_ended"), account.counter("waiting")), (2, 0));
        bench.assert_all_permits_are_back();
    });
}

#[test]
fn a_result_that_comes_after_the_end_of_its_lease_is_still_offered_once() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        let results = bench.results(1, &Verdict::Complete).await;
        sleep(Duration::from_mins(6)).await;
        bench.send(results);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(bench.flushes(), [1]);
        assert_eq!(bench.account().await.counter("applied"), 1, "nobody had claimed the row meanwhile");
    });
}

#[test]
fn a_flush_without_an_answer_is_given_up_and_tried_again() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        bench.store.script(Op::Settle, Reply::Hang);
        bench.send(bench.results(1, &Verdict::Complete).await);
        sleep(Duration::from_secs(31)).await;
        assert_eq!(bench.account().await.counter("applied"), 1);
    });
}

#[test]
fn results_written_by_a_try_whose_answer_was_lost_are_unclear_and_not_fenced() {
    in_virtual_time(async {
        let client = StoreError::Other { code: "client".to_owned(), message: "cut".to_owned() };
        for error in [unavailable(), client] {
            let bench = Bench::new(SettleOptions::default());
            bench.store.script(Op::Settle, Reply::Lose(error));
            bench.send(bench.results(3, &Verdict::Complete).await);
            sleep(Duration::from_secs(1)).await;
            let account = bench.account().await;
            assert_eq!((account.counter("unclear"), account.counter("fenced")), (3, 0));
            assert_eq!(bench.store.unfinished(), 0);
            bench.assert_all_permits_are_back();
        }
    });
}

#[test]
fn one_poisonous_result_is_isolated_and_the_others_are_written() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        let mut results = bench.results(32, &Verdict::Complete).await;
        let poison = Verdict::DeadLetter { reason: FailureReason::Unknown, error: "poison".to_owned() };
        results.insert(13, bench.results(1, &poison).await.remove(0));
        bench.store.always(|call| match call {
            Call::Settle(items)
                if items.iter().any(|item| matches!(item.verdict, Verdict::DeadLetter { .. })) =>
            {
                Some(Reply::Fail(rejected()))
            }
            _ => None,
        });
        bench.send(results);
        sleep(Duration::from_secs(1)).await;
        let account = bench.account().await;
        assert_eq!((account.counter("applied"), account.counter("poisoned")), (32, 1));
        assert!(account.counter("flushes") < 16, "{}", account.counter("flushes"));
        assert_eq!(bench.store.unfinished(), 1);
        bench.assert_all_permits_are_back();
    });
}

#[test]
fn fenced_results_are_counted_and_cost_no_permit() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        let results = bench.results(2, &Verdict::Complete).await;
        bench.store.release_unheld(bench.rig.instance, Vec::new()).await.expect("released");
        bench.send(results);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(bench.account().await.counter("fenced"), 2);
        assert_eq!(bench.flushes(), [2], "a fenced result is not tried again");
        bench.assert_all_permits_are_back();
    });
}

#[test]
fn a_release_that_the_failure_before_it_has_made_already_is_no_error() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        let mut rows = bench.claim(3, &Row::of_stream(Uuid::now_v7())).await.into_iter();
        let failure = Verdict::Retry {
            after: Duration::from_secs(30),
            reason: FailureReason::Unknown,
            error: "no".to_owned(),
        };
        let mut settlements = vec![rows.next().expect("a row").settle(failure)];
        settlements.extend(rows.map(|row| row.settle(Verdict::Release)));
        bench.send(settlements);
        sleep(Duration::from_secs(1)).await;
        let account = bench.account().await;
        assert_eq!((account.counter("applied"), account.counter("fenced")), (1, 0));
        bench.assert_all_permits_are_back();
    });
}

#[test]
fn a_flush_that_frees_work_wakes_the_claimer_and_others_do_not() {
    in_virtual_time(async {
        let retry = |after| Verdict::Retry {
            after: Duration::from_secs(after),
            reason: FailureReason::Unknown,
            error: String::new(),
        };
        for (verdict, wakes) in [(Verdict::Complete, 0), (retry(30), 1), (retry(0), 1), (Verdict::Release, 1)]
        {
            let mut bench = Bench::new(SettleOptions::default());
            bench.send(bench.results(2, &verdict).await);
            sleep(Duration::from_millis(50)).await;
            assert_eq!(bench.rig.wake.take().len(), wakes, "{verdict:?}");
        }
    });
}

#[test]
fn a_fence_holds_results_and_its_end_writes_them() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        bench.rig.fence();
        bench.send(bench.results(3, &Verdict::Complete).await);
        sleep(Duration::from_mins(1)).await;
        assert_eq!(bench.store.count(Op::Settle), 0);
        assert_eq!(bench.permits.available_permits(), 997);
        bench.rig.unfence();
        quiesce().await;
        assert_eq!(bench.flushes(), [3]);
        bench.assert_all_permits_are_back();
    });
}

#[test]
fn an_evicted_instance_discards_its_results_and_says_so() {
    in_virtual_time(async {
        let mut bench = Bench::new(SettleOptions { max_batch_size: 2, ..SettleOptions::default() });
        let results = bench.results(5, &Verdict::Complete).await;
        bench.store.evict(bench.rig.instance);
        bench.send(results);
        sleep(Duration::from_mins(1)).await;
        assert_eq!(bench.rig.evicted.take(), [Evicted(bench.rig.instance)]);
        assert_eq!(bench.flushes(), [2], "nothing more is sent under a burnt id");
        assert_eq!(bench.account().await.counter("discarded"), 5);
        bench.assert_all_permits_are_back();
    });
}

#[test]
fn a_drain_writes_everything_without_waiting_for_the_window() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions {
            coalesce_window_milliseconds: 60_000,
            max_batch_size: 4,
            ..SettleOptions::default()
        });
        bench.store.script(Op::Settle, Reply::Slow(Duration::from_secs(1)));
        bench.send(bench.results(10, &Verdict::Complete).await);
        let drained = bench.rig.addr.send(Drain).await.expect("alive");
        assert_eq!((drained.settled, drained.unsettled), (10, 0));
        assert_eq!(bench.flushes(), [4, 4, 2]);
        bench.assert_all_permits_are_back();
    });
}

#[test]
fn results_queued_behind_a_flush_are_part_of_the_drain() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        bench.store.script(Op::Settle, Reply::Slow(Duration::from_secs(3)));
        bench.send(bench.results(1, &Verdict::Complete).await);
        sleep(Duration::from_millis(20)).await;
        bench.send(bench.results(7, &Verdict::Complete).await);
        let drained = bench.rig.addr.send(Drain).await.expect("alive");
        assert_eq!((drained.settled, drained.unsettled), (8, 0));
    });
}

#[test]
fn a_drain_ends_although_the_database_never_answers() {
    in_virtual_time(async {
        let bench = Bench::new(SettleOptions::default());
        bench.store.always(|call| matches!(call, Call::Settle(_)).then_some(Reply::Hang));
        bench.send(bench.results(3, &Verdict::Complete).await);
        let before = tokio::time::Instant::now();
        let drained = bench.rig.addr.send(Drain).await.expect("alive");
        assert_eq!((drained.settled, drained.unsettled), (0, 3));
        assert_eq!(before.elapsed(), Duration::from_secs(30));
        sleep(Duration::from_secs(1)).await;
        bench.assert_all_permits_are_back();
        let again = bench.rig.addr.send(Drain).await.expect("alive");
        assert_eq!(again, drained, "whoever asks again gets the account of the whole drain");
    });
}
