//! Who runs the lanes: one queue, a few workers, one lane per order key.
//!
//! The rule: an order key is in one place only. While a lane of it runs, rows claimed later wait behind it, even when they come from a
//! newer claim of the very same row. The failure this prevents: a retry that overlaps the first attempt because only the lease, and not
//! the code, had ended.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures_util::future::AbortHandle;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::delivery::{Delivery, InFlight, Running};
use crate::instance::InstanceId;
use crate::lock;
use crate::policy::retry::RetryPolicy;
use crate::port::Verdict;
use crate::runner::{Failure, Runner};
use crate::work::{Category, FailureReason, OrderKey};

use super::desk::Desk;
use super::unit::{Lane, Unit};
use super::worker;

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
    /// No: its deadline has passed; its lease will run out.
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
    pub(crate) expired: Counter,
    pub(crate) abandoned: Counter,
    pub(crate) overlapping: Counter,
}

impl Counters {
    /// Handlers that came to an end.
    pub(crate) fn finished(&self) -> u64 {
        self.completed.get() + self.retried.get() + self.dead_lettered.get()
    }
}

/// What a crew is made of.
pub(crate) struct CrewParts {
    pub(crate) instance: InstanceId,
    pub(crate) runners: Vec<(Category, Arc<dyn Runner>)>,
    pub(crate) handlers: Handle,
    pub(crate) threads: usize,
    pub(crate) retry: RetryPolicy,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) seed: u64,
}

/// Runs rows on the handler runtime.
pub(crate) struct Crew {
    instance: InstanceId,
    runners: [Option<Arc<dyn Runner>>; 4],
    handlers: Handle,
    threads: usize,
    retry: RetryPolicy,
    in_flight: Arc<InFlight>,
    rng: Mutex<SmallRng>,
    mode: AtomicU8,
    yard: Mutex<Yard>,
    in_hand: AtomicUsize,
    idle: Notify,
    desk: Desk,
    tasks: Mutex<HashMap<u64, AbortHandle>>,
    pub(crate) counters: Counters,
}

#[derive(Default)]
struct Yard {
    queue: VecDeque<Unit>,
    lanes: HashMap<OrderKey, ActiveLane>,
    /// Unordered rows whose older claim is still running here.
    parked: Vec<Delivery>,
    workers: usize,
    batches: u64,
}

/// An order key that is queued or running.
struct ActiveLane {
    /// In which batch, and where in it, the lane is being put together.
    batch: u64,
    index: usize,
    /// Rows claimed later.
    waiting: VecDeque<Delivery>,
}

impl Crew {
    pub(crate) fn new(parts: CrewParts) -> Arc<Self> {
        let mut runners = [const { None }; 4];
        for (category, runner) in parts.runners {
            runners[category as usize] = Some(runner);
        }
        Arc::new(Self {
            instance: parts.instance,
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
            tasks: Mutex::default(),
            counters: Counters::default(),
        })
    }

    pub(crate) fn instance(&self) -> InstanceId {
        self.instance
    }

    pub(crate) fn runner(&self, category: Category) -> Option<&Arc<dyn Runner>> {
        self.runners[category as usize].as_ref()
    }

    pub(crate) fn handlers(&self) -> &Handle {
        &self.handlers
    }

    pub(crate) fn desk(&self) -> &Desk {
        &self.desk
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

    /// Takes rows in hand and starts them.
    pub(crate) fn accept(self: &Arc<Self>, deliveries: Vec<Delivery>) {
        self.in_hand.fetch_add(deliveries.len(), Ordering::AcqRel);
        match self.mode() {
            Mode::Run | Mode::Held => self.enqueue(deliveries),
            Mode::Draining => self.release(deliveries),
            Mode::Dead => self.forget(deliveries),
        }
    }

    /// Takes rows in hand only to hand them back.
    pub(crate) fn hand_back(self: &Arc<Self>, deliveries: Vec<Delivery>) {
        self.in_hand.fetch_add(deliveries.len(), Ordering::AcqRel);
        if self.mode() == Mode::Dead { self.forget(deliveries) } else { self.release(deliveries) }
    }

    fn enqueue(self: &Arc<Self>, deliveries: Vec<Delivery>) {
        let mut fresh: Vec<(Category, Lane)> = Vec::with_capacity(deliveries.len());
        {
            let mut yard = lock(&self.yard);
            yard.batches += 1;
            let batch = yard.batches;
            for delivery in deliveries {
                let category = delivery.work().key.category;
                let Some(key) = delivery.order_key() else {
                    if delivery.came_while_held() && self.in_flight.overlaps(&delivery.work().key) {
                        self.counters.overlapping.add(1);
                        yard.parked.push(delivery);
                    } else {
                        fresh.push((category, Lane::new(None, delivery)));
                    }
                    continue;
                };
                match yard.lanes.entry(key) {
                    Entry::Vacant(entry) => {
                        let key = entry.key().clone();
                        entry.insert(ActiveLane { batch, index: fresh.len(), waiting: VecDeque::new() });
                        fresh.push((category, Lane::new(Some(key), delivery)));
                    }
                    Entry::Occupied(entry) if entry.get().batch == batch => {
                        fresh[entry.get().index].1.rows.push_back(delivery);
                    }
                    Entry::Occupied(mut entry) => {
                        self.counters.overlapping.add(1);
                        entry.get_mut().waiting.push_back(delivery);
                    }
                }
            }
        }
        self.queue(fresh);
    }

    /// Makes units of lanes and puts them into the queue.
    fn queue(self: &Arc<Self>, lanes: Vec<(Category, Lane)>) {
        let mut units = Vec::with_capacity(lanes.len());
        let mut packs: [Vec<Lane>; 4] = Default::default();
        for (category, lane) in lanes {
            match self.batch_limit(category) {
                1 => units.push(Unit::single(self, category, lane)),
                _ => packs[category as usize].push(lane),
            }
        }
        for (category, lanes) in Category::ALL.into_iter().zip(packs) {
            self.pack(category, lanes, &mut units);
        }
        lock(&self.yard).queue.extend(units);
        self.serve_queue();
    }

    /// Does with the queue what the mode asks for. Called after every push, so that nothing is left behind by a mode that changed
    /// meanwhile.
    fn serve_queue(self: &Arc<Self>) {
        match self.mode() {
            Mode::Run => self.hire(),
            Mode::Held => {}
            Mode::Draining => self.release_unstarted(),
            Mode::Dead => self.forget_unstarted(),
        }
    }

    /// Packs whole lanes together until a batch is full. A lane longer than a batch goes alone, batch after batch.
    fn pack(self: &Arc<Self>, category: Category, lanes: Vec<Lane>, units: &mut Vec<Unit>) {
        let limit = self.batch_limit(category);
        let mut pack: Vec<Lane> = Vec::new();
        let mut rows = 0;
        for lane in lanes {
            if rows > 0 && rows + lane.rows.len() > limit {
                units.push(Unit::packed(self, category, std::mem::take(&mut pack), limit));
                rows = 0;
            }
            rows += lane.rows.len();
            pack.push(lane);
        }
        if !pack.is_empty() {
            units.push(Unit::packed(self, category, pack, limit));
        }
    }

    fn batch_limit(&self, category: Category) -> usize {
        self.runner(category).map_or(1, |runner| runner.max_batch().max(1))
    }

    /// Sends for as many workers as there is work and threads for.
    pub(crate) fn hire(self: &Arc<Self>) {
        let hired = {
            let mut yard = lock(&self.yard);
            if self.mode() != Mode::Run {
                return;
            }
            let hired = yard.queue.len().min(self.threads.saturating_sub(yard.workers));
            yard.workers += hired;
            hired
        };
        for _ in 0..hired {
            self.handlers.spawn(worker::work(worker::Hired::new(self)));
        }
    }

    /// The next unit, or `None`: then the worker has left.
    pub(crate) fn next_unit(&self) -> Option<Unit> {
        let mut yard = lock(&self.yard);
        let unit = if self.mode() == Mode::Run { yard.queue.pop_front() } else { None };
        if unit.is_none() {
            yard.workers -= 1;
        }
        unit
    }

    /// A worker was dropped before it could leave.
    pub(crate) fn worker_lost(&self) {
        lock(&self.yard).workers -= 1;
    }

    /// How many workers are at work.
    pub(crate) fn workers(&self) -> usize {
        lock(&self.yard).workers
    }

    /// Puts a unit back to the front, because nothing may start now.
    pub(crate) fn put_back(self: &Arc<Self>, unit: Unit) {
        lock(&self.yard).queue.push_front(unit);
        self.serve_queue();
    }

    /// The lane of this key is over: rows that waited behind it are next.
    pub(crate) fn lane_done(self: &Arc<Self>, key: OrderKey) {
        let waiting = {
            let mut yard = lock(&self.yard);
            let waiting = yard.lanes.get_mut(&key).map(|lane| std::mem::take(&mut lane.waiting));
            if waiting.as_ref().is_none_or(VecDeque::is_empty) {
                yard.lanes.remove(&key);
            }
            waiting.unwrap_or_default()
        };
        if waiting.is_empty() {
            return;
        }
        let category = key.category;
        match self.mode() {
            Mode::Run | Mode::Held => self.queue(vec![(category, Lane { key: Some(key), rows: waiting })]),
            Mode::Draining => {
                lock(&self.yard).lanes.remove(&key);
                self.release(waiting);
            }
            Mode::Dead => {
                lock(&self.yard).lanes.remove(&key);
                self.forget(waiting);
            }
        }
    }

    /// Starts unordered rows whose older claim has ended meanwhile. Returns whether some still wait.
    pub(crate) fn retry_parked(self: &Arc<Self>) -> bool {
        let (free, waits) = {
            let mut yard = lock(&self.yard);
            let (waits, free): (Vec<_>, Vec<_>) = std::mem::take(&mut yard.parked)
                .into_iter()
                .partition(|row| self.in_flight.overlaps(&row.work().key));
            yard.parked = waits;
            (free, !yard.parked.is_empty())
        };
        if !free.is_empty() {
            let lane = |row: Delivery| (row.work().key.category, Lane::new(None, row));
            self.queue(free.into_iter().map(lane).collect());
        }
        waits
    }

    /// Hands back everything that was not started.
    pub(crate) fn release_unstarted(self: &Arc<Self>) {
        let (units, rows) = self.take_unstarted();
        for mut unit in units {
            unit.release_rest();
        }
        self.release(rows);
    }

    /// Gives up everything that was not started.
    pub(crate) fn forget_unstarted(self: &Arc<Self>) {
        let (units, rows) = self.take_unstarted();
        drop(units);
        self.forget(rows);
    }

    fn take_unstarted(&self) -> (VecDeque<Unit>, Vec<Delivery>) {
        let mut yard = lock(&self.yard);
        let mut rows = std::mem::take(&mut yard.parked);
        for lane in yard.lanes.values_mut() {
            rows.extend(lane.waiting.drain(..));
        }
        (std::mem::take(&mut yard.queue), rows)
    }

    /// Gives up rows that were not started before their deadline, so that they do not hold permits until a thread or a stuck stream is
    /// free.
    pub(crate) fn sweep_expired(self: &Arc<Self>) {
        let (mut units, parked, waiting) = {
            let mut yard = lock(&self.yard);
            let expired =
                |lane: &&mut ActiveLane| lane.waiting.front().is_some_and(|row| !Self::may_start(row));
            let waiting: Vec<_> = yard
                .lanes
                .values_mut()
                .filter(expired)
                .map(|lane| std::mem::take(&mut lane.waiting))
                .collect();
            (std::mem::take(&mut yard.queue), std::mem::take(&mut yard.parked), waiting)
        };
        for mut rows in waiting {
            self.stop_lane(&mut rows);
        }
        for unit in &mut units {
            unit.drop_expired();
        }
        let (alive, expired): (Vec<_>, Vec<_>) = parked.into_iter().partition(Self::may_start);
        self.expire(expired);
        {
            let mut yard = lock(&self.yard);
            yard.parked.extend(alive);
            units.append(&mut yard.queue);
            yard.queue = units;
        }
        self.serve_queue();
    }

    pub(crate) fn may_start(delivery: &Delivery) -> bool {
        delivery.lease().window().may_start(Instant::now().into_std())
    }

    /// Whether this row may start now.
    pub(crate) fn admit(&self, delivery: Delivery) -> Admission {
        if !Self::may_start(&delivery) {
            self.expire([delivery]);
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

    /// Drops what cannot run any more, and hands back what still could: nothing may overtake the first row of its lane.
    pub(crate) fn stop_lane(&self, rows: &mut VecDeque<Delivery>) {
        let (alive, expired): (Vec<_>, Vec<_>) = rows.drain(..).partition(Self::may_start);
        self.expire(expired);
        self.release(alive);
    }

    fn expire(&self, rows: impl IntoIterator<Item = Delivery>) {
        let count = rows.into_iter().count();
        self.counters.expired.add(count as u64);
        self.done(count);
    }

    fn forget(&self, rows: impl IntoIterator<Item = Delivery>) {
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
