//! What a row costs in the engine: claim, dispatch and settle against a store that does nothing. Run with `--release`.
//!
//! Prints CPU time of the whole process per row, so that cores do not flatter it.

#![expect(clippy::print_stdout, reason = "printing is what it is for")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use uuid::Uuid;
use workpump_actors::instance::{InstanceId, InstanceIdentity};
use workpump_actors::options::Options;
use workpump_actors::port::{
    Beat, BeatAnswer, ClaimRequest, Claimed, InstanceStore, PortFuture, Renewal, RenewalStore, SettleItem,
    Settled, WorkStore,
};
use workpump_actors::runner::{Failure, Job, Runner};
use workpump_actors::testing::{FakeDirect, FakeSweep, claimed};
use workpump_actors::tree::{Engine, EngineParts};
use workpump_actors::work::{Category, ClaimEpoch, ClaimedWork, WorkKey};

/// Hands out prepared rows and counts what comes back.
struct Mill {
    rows: std::sync::Mutex<Vec<ClaimedWork>>,
    settled: AtomicUsize,
    flushes: AtomicU64,
    total: usize,
    done: Notify,
}

impl WorkStore for Mill {
    fn claim(&self, request: ClaimRequest) -> PortFuture<'_, Claimed> {
        let mut rows = self.rows.lock().expect("not poisoned");
        let at = rows.len().saturating_sub(request.max_rows as usize);
        let works = rows.split_off(at);
        Box::pin(async move { Ok(Claimed { works, has_more: false }) })
    }

    fn settle(&self, _: InstanceId, items: Vec<SettleItem>) -> PortFuture<'_, Settled> {
        let applied = items.len();
        self.flushes.fetch_add(1, Ordering::Relaxed);
        if self.settled.fetch_add(applied, Ordering::Relaxed) + applied == self.total {
            self.done.notify_one();
        }
        Box::pin(async move { Ok(Settled { applied, fenced: Vec::new() }) })
    }

    fn release_unheld(&self, _: InstanceId, _: Vec<(WorkKey, ClaimEpoch)>) -> PortFuture<'_, u64> {
        Box::pin(async { Ok(0) })
    }

    fn next_claimable_in(&self, _: InstanceId) -> PortFuture<'_, Option<Duration>> {
        Box::pin(async { Ok(None) })
    }
}

impl InstanceStore for Mill {
    fn schema_ready(&self) -> PortFuture<'_, bool> {
        Box::pin(async { Ok(true) })
    }

    fn beat(&self, _: Beat) -> PortFuture<'_, BeatAnswer> {
        Box::pin(async { Ok(BeatAnswer::Accepted) })
    }

    fn deregister(&self, _: InstanceId) -> PortFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}

impl RenewalStore for Mill {
    fn renew(
        &self,
        _: InstanceId,
        items: Vec<(WorkKey, ClaimEpoch)>,
        _: Duration,
    ) -> PortFuture<'_, Vec<Renewal>> {
        Box::pin(async move { Ok(vec![Renewal::Renewed; items.len()]) })
    }
}

struct Trivial {
    waits: bool,
    batch: usize,
}

impl Runner for Trivial {
    fn max_batch(&self) -> usize {
        self.batch
    }

    fn run(&self, _: Job) -> futures_util::future::BoxFuture<'static, Result<(), Failure>> {
        let waits = self.waits;
        Box::pin(async move {
            if waits {
                tokio::task::yield_now().await;
            }
            Ok(())
        })
    }

    fn run_batch(
        &self,
        jobs: Vec<Job>,
    ) -> futures_util::future::BoxFuture<'static, Vec<Result<(), Failure>>> {
        Box::pin(async move { jobs.iter().map(|_| Ok(())).collect() })
    }
}

/// User and system time of this process in seconds.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).unwrap_or_default();
    (ticks(11) + ticks(12)) / 100.0
}

fn measure(name: &str, rows: usize, streams: usize, runner: Trivial) {
    let ids: Vec<Uuid> = (0..streams).map(|_| Uuid::now_v7()).collect();
    let stream = |seq: usize| (streams > 0).then(|| ids[seq / 10 % streams]);
    let works = (0..rows).map(|seq| claimed(seq as i64, stream(seq))).collect();
    let mill = Arc::new(Mill {
        rows: std::sync::Mutex::new(works),
        settled: AtomicUsize::new(0),
        flushes: AtomicU64::new(0),
        total: rows,
        done: Notify::new(),
    });
    let handlers = tokio::runtime::Builder::new_multi_thread().worker_threads(4).build().expect("a runtime");
    let driver = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    driver.block_on(async {
        let before = cpu_seconds();
        let began = tokio::time::Instant::now();
        let engine = Engine::start(EngineParts {
            options: Options::default(),
            identity: InstanceIdentity {
                id: InstanceId::fresh(),
                service_name: "row cost".to_owned(),
                host_name: String::new(),
                process_id: 0,
            },
            work: Arc::clone(&mill) as _,
            doorbell: None,
            instances: Arc::clone(&mill) as _,
            sweep: FakeSweep::new(),
            watch: None,
            direct: None,
            route: Arc::new(FakeDirect::new()),
            renewals: Arc::clone(&mill) as _,
            runners: vec![(Category::Inbox, Arc::new(runner))],
            handlers: handlers.handle().clone(),
            users: workpump_actors::registry::Group::new("users"),
            start_deadline: Duration::from_secs(5),
        })
        .await
        .expect("starts");
        mill.done.notified().await;
        let micros = |seconds: f64| seconds * 1e6 / rows as f64;
        println!(
            "{name:<28} {:.2} us CPU and {:.2} us wall per row, {:.0} rows per flush",
            micros(cpu_seconds() - before),
            micros(began.elapsed().as_secs_f64()),
            rows as f64 / mill.flushes.load(Ordering::Relaxed) as f64
        );
        engine.drain().await;
    });
}

fn main() {
    let rows = 1_000_000;
    for _ in 0..2 {
        measure("unordered, never waits", rows, 0, Trivial { waits: false, batch: 1 });
        measure("1000 streams, never waits", rows, 1_000, Trivial { waits: false, batch: 1 });
        measure("unordered, waits once", rows, 0, Trivial { waits: true, batch: 1 });
        measure("unordered, batches of 100", rows, 0, Trivial { waits: false, batch: 100 });
    }
}
