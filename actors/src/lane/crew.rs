//! Who runs the lanes, what they may do now, and what has become of the rows in hand.
//!
//! The rule: every row taken in hand leaves it exactly once: settled, expired, or given up, and each way is counted. The failure this
//! prevents: a drain that waits for rows nobody has, and rows that vanish without a trace.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use futures_util::future::AbortHandle;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::actor::now;
use crate::delivery::{Delivery, InFlight, Running};
use crate::instance::InstanceId;
use crate::lock;
use crate::policy::retry::RetryPolicy;
use crate::port::Verdict;
use crate::runner::{Failure, Runner};
use crate::standing::Trust;
use crate::work::{Category, FailureReason};

use super::desk::Desk;
use super::lease_book::LeaseBook;
use super::yard::Yard;

/// What the crew may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Mode {
    /// Start rows.
    Run,
    /// Start nothing for now.
    Held,
    /// Start nothing any more; hand back what was not started.
    Draining,
    /// Start nothing and write nothing any more.
    Dead,
}

/// Whether a row may start.
#[expect(
    clippy::large_enum_variant,
    reason = "returned and taken apart at once; a box would cost an allocation per row"
)]
pub(crate) enum Admission {
    /// Yes.
    Run(Delivery),
    /// No: it was settled without being run.
    Settled,
    /// No: its deadline has passed. It was handed back, and the rows behind it must not run either.
    Expired,
}

/// A counter that several threads add to.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What the crew has counted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) completed: Counter,
    pub(crate) retried: Counter,
    pub(crate) dead_lettered: Counter,
    pub(crate) panicked: Counter,
    pub(crate) released: Counter,
    pub(crate) late: Counter,
    /// Not started before their deadline, and handed back.
    pub(crate) unstarted: Counter,
    /// Not started before their lease ended.
    pub(crate) expired: Counter,
    pub(crate) abandoned: Counter,
    /// Ended with their lease.
    pub(crate) aborted: Counter,
    pub(crate) overlapping: Counter,
    /// Rows taken in hand to be run.
    pub(crate) accepted: Counter,
    /// Results passed on.
    pub(crate) fetched: Counter,
    /// Handlers told to stop.
    pub(crate) cancelled: Counter,
}

impl Counters {
    /// Handlers that came to an end.
    pub(crate) fn finished(&self) -> u64 {
        self.completed.get() + self.retried.get() + self.dead_lettered.get()
    }
}

/// What had become of rows when a drain began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrainBegan {
    pub(crate) released: u64,
    pub(crate) finished: u64,
}

/// Who runs rows of a category, and how many in one call.
type Hand = (Arc<dyn Runner>, usize);

/// What a crew is made of.
pub(crate) struct CrewParts {
    pub(crate) instance: InstanceId,
    pub(crate) trust: Trust,
    pub(crate) runners: Vec<(Category, Arc<dyn Runner>)>,
    pub(crate) handlers: Handle,
    pub(crate) threads: usize,
    pub(crate) retry: RetryPolicy,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) seed: u64,
}

/// Runs rows on the handler runtime. Made once: it goes on while the actor in front of it is replaced.
pub(crate) struct Crew {
    instance: InstanceId,
    trust: Trust,
    runners: [Option<Hand>; 4],
    handlers: Handle,
    pub(super) threads: usize,
    retry: RetryPolicy,
    pub(super) in_flight: Arc<InFlight>,
    rng: Mutex<SmallRng>,
    mode: AtomicU8,
    pub(super) yard: Mutex<Yard>,
    pub(super) in_hand: AtomicUsize,
    idle: Notify,
    desk: Desk,
    leases: LeaseBook,
    drain_began: OnceLock<DrainBegan>,
    drain_end: OnceLock<Instant>,
    tasks: Mutex<HashMap<u64, AbortHandle>>,
    pub(crate) counters: Counters,
}

impl Crew {
    /// Asks the runners how much they take, here and never again: user code that panics while rows are accepted would leave lanes behind
    /// that nobody runs.
    pub(crate) fn new(parts: CrewParts) -> Arc<Self> {
        let mut runners = [const { None }; 4];
        for (category, runner) in parts.runners {
            let limit = runner.max_batch().max(1);
            runners[category as usize] = Some((runner, limit));
        }
        Arc::new(Self {
            instance: parts.instance,
            trust: parts.trust,
            runners,
            handlers: parts.handlers,
            threads: parts.threads.max(1),
            retry: parts.retry,
            in_flight: parts.in_flight,
            rng: Mutex::new(SmallRng::seed_from_u64(parts.seed)),
            mode: AtomicU8::new(Mode::Run as u8),
            yard: Mutex::default(),
            in_hand: AtomicUsize::new(0),
            idle: Notify::new(),
            desk: Desk::default(),
            leases: LeaseBook::default(),
            drain_began: OnceLock::new(),
            drain_end: OnceLock::new(),
            tasks: Mutex::default(),
            counters: Counters::default(),
        })
    }

    pub(crate) fn instance(&self) -> InstanceId {
        self.instance
    }

    /// For handlers.
    pub(crate) fn trust(&self) -> Trust {
        self.trust.clone()
    }

    /// Whether a row may start now as far as trust goes. Asked before each start: a process that was stopped finds out here.
    pub(crate) fn is_trusted(&self) -> bool {
        self.trust.standing().is_trusted(now())
    }

    /// Starts nothing more, unless trust was proven meanwhile, and calls for whoever can see to it.
    pub(crate) fn hold_untrusted(&self) {
        {
            let _yard = lock(&self.yard);
            if self.mode() == Mode::Run && !self.is_trusted() {
                self.mode.store(Mode::Held as u8, Ordering::Release);
            }
        }
        self.desk.call();
    }

    pub(crate) fn runner(&self, category: Category) -> Option<&Arc<dyn Runner>> {
        self.runners[category as usize].as_ref().map(|(runner, _)| runner)
    }

    pub(super) fn batch_limit(&self, category: Category) -> usize {
        self.runners[category as usize].as_ref().map_or(1, |(_, limit)| *limit)
    }

    pub(crate) fn handlers(&self) -> &Handle {
        &self.handlers
    }

    pub(crate) fn desk(&self) -> &Desk {
        &self.desk
    }

    pub(crate) fn leases(&self) -> &LeaseBook {
        &self.leases
    }

    /// A drain begins, or goes on under another lead. To be called before anything is done for it.
    pub(crate) fn begin_drain(&self) -> DrainBegan {
        *self.drain_began.get_or_init(|| DrainBegan {
            released: self.counters.released.get(),
            finished: self.counters.finished(),
        })
    }

    /// When the drain has to end, counted from when this was asked first.
    pub(crate) fn drain_end(&self, patience: Duration) -> Instant {
        *self.drain_end.get_or_init(|| Instant::now() + patience)
    }

    pub(crate) fn tasks(&self) -> &Mutex<HashMap<u64, AbortHandle>> {
        &self.tasks
    }

    /// Rows handed over and not yet finished with.
    pub(crate) fn in_hand(&self) -> usize {
        self.in_hand.load(Ordering::Acquire)
    }

    pub(crate) fn mode(&self) -> Mode {
        match self.mode.load(Ordering::Acquire) {
            0 => Mode::Run,
            1 => Mode::Held,
            2 => Mode::Draining,
            _ => Mode::Dead,
        }
    }

    /// Changes what the crew may do. There is no way back from draining, and none from dead.
    pub(crate) fn set_mode(self: &Arc<Self>, mode: Mode) {
        {
            let _yard = lock(&self.yard);
            if self.mode() >= Mode::Draining && mode < self.mode() {
                return;
            }
            self.mode.store(mode as u8, Ordering::Release);
        }
        self.hire();
    }

    pub(crate) fn may_start(delivery: &Delivery) -> bool {
        delivery.lease().window().may_start(Instant::now().into_std())
    }

    /// Whether this row may start now.
    pub(crate) fn admit(&self, delivery: Delivery) -> Admission {
        if !Self::may_start(&delivery) {
            self.give_back([delivery]);
            return Admission::Expired;
        }
        match self.retry.before_run(delivery.work().attempts, delivery.work().crash_count) {
            Some(verdict) => {
                self.counters.dead_lettered.add(1);
                self.desk.put(delivery.settle(verdict));
                self.done(1);
                Admission::Settled
            }
            None => Admission::Run(delivery),
        }
    }

    /// What the answer of a handler means for its row.
    pub(crate) fn judge(&self, running: &Running, result: Result<(), Failure>) -> Verdict {
        if !running.window().may_start(Instant::now().into_std()) {
            self.counters.late.add(1);
        }
        let Err(mut failure) = result else {
            self.counters.completed.add(1);
            return Verdict::Complete;
        };
        if let Failure::Retry { reason, .. } = &mut failure {
            match reason {
                FailureReason::Panic => self.counters.panicked.add(1),
                FailureReason::Unknown if running.was_cancelled() => *reason = FailureReason::LeaseExpired,
                _ => {}
            }
        }
        let unit = lock(&self.rng).random::<f64>();
        let verdict = self.retry.judge(running.category, running.attempts, failure, unit);
        match verdict {
            Verdict::Retry { .. } => self.counters.retried.add(1),
            _ => self.counters.dead_lettered.add(1),
        }
        verdict
    }

    /// Hands rows back.
    pub(crate) fn release(&self, rows: impl IntoIterator<Item = Delivery>) {
        let settlements: Vec<_> = rows.into_iter().map(|row| row.settle(Verdict::Release)).collect();
        let count = settlements.len();
        if count > 0 {
            self.counters.released.add(count as u64);
            self.desk.put_all(settlements);
            self.desk.ring();
            self.done(count);
        }
    }

    /// Hands back rows that shall not start any more, with their attempt refunded. Only those whose lease has ended are dropped: the
    /// database has taken them back by itself. The failure this prevents: healthy rows that never ran and end as dead letters, because
    /// every lease that ran out was charged.
    pub(crate) fn give_back(&self, rows: impl IntoIterator<Item = Delivery>) {
        let now = Instant::now().into_std();
        let (ended, leased): (Vec<_>, Vec<_>) =
            rows.into_iter().partition(|row| row.lease().window().has_ended(now));
        self.counters.unstarted.add(leased.len() as u64);
        self.counters.expired.add(ended.len() as u64);
        self.done(ended.len());
        drop(ended);
        self.release(leased);
    }

    pub(super) fn forget(&self, rows: impl IntoIterator<Item = Delivery>) {
        self.give_up(rows.into_iter().count());
    }

    /// Rows were dropped without an answer.
    pub(crate) fn give_up(&self, count: usize) {
        self.counters.abandoned.add(count as u64);
        self.done(count);
    }

    /// Rows are finished with. Their settlements must be on the desk by now.
    pub(crate) fn done(&self, count: usize) {
        if count > 0
            && self.in_hand.fetch_sub(count, Ordering::AcqRel) == count
            && self.mode() >= Mode::Draining
        {
            self.idle.notify_one();
        }
    }

    /// Waits until nothing is in hand.
    pub(crate) async fn idle(&self) {
        while self.in_hand() > 0 {
            self.idle.notified().await;
        }
    }

    /// Ends every handler that is waiting for something. One that blocks its thread cannot be ended.
    pub(crate) fn abort_tasks(&self) {
        for (_, task) in lock(&self.tasks).drain() {
            task.abort();
        }
    }
}
