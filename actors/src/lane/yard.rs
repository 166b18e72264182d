//! Where lanes wait for a worker.
//!
//! The rule: an order key is in one place only. While a lane of it runs, rows claimed later wait behind it, even when they come from a
//! newer claim of the very same row. The failure this prevents: a retry that overlaps the first attempt because only the lease, and not
//! the code, had ended.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::delivery::Delivery;
use crate::lock;
use crate::work::OrderKey;

use super::crew::{Crew, Mode};
use super::fresh::Fresh;
use super::lane_rows::{Lane, SharedRows};
use super::unit::Unit;
use super::worker;

/// Everything that was not started, and who is looking for it.
#[derive(Default)]
pub(super) struct Yard {
    pub(super) queue: VecDeque<Unit>,
    lanes: HashMap<OrderKey, ActiveLane>,
    /// Unordered rows whose older claim is still running here.
    parked: Vec<Delivery>,
    workers: usize,
    batches: u64,
}

/// An order key that is queued or running.
struct ActiveLane {
    /// In which batch the lane was put together.
    batch: u64,
    /// The rows of the lane that were not started.
    rows: SharedRows,
    /// Rows claimed later.
    waiting: VecDeque<Delivery>,
}

impl Crew {
    /// Takes rows in hand and starts them. They share one lease, which is watched before any of them can start.
    pub(crate) fn accept(self: &Arc<Self>, deliveries: Vec<Delivery>) {
        let Some(first) = deliveries.first() else { return };
        self.leases().enter(Arc::clone(first.lease().claim()));
        self.counters.accepted.add(deliveries.len() as u64);
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
        let mut fresh = Fresh::new(self, deliveries.len());
        {
            let mut yard = lock(&self.yard);
            yard.batches += 1;
            let batch = yard.batches;
            for delivery in deliveries {
                self.place(delivery, batch, &mut yard, &mut fresh);
                fresh.unplaced -= 1;
            }
        }
        fresh.queue();
    }

    /// Gives a row its place: in a lane of this batch, behind an older one, or aside.
    pub(super) fn place(&self, delivery: Delivery, batch: u64, yard: &mut Yard, fresh: &mut Fresh<'_>) {
        let category = delivery.work().key.category;
        let Some(key) = delivery.order_key() else {
            if delivery.came_while_held() && self.in_flight.overlaps(&delivery.work().key) {
                self.counters.overlapping.add(1);
                yard.parked.push(delivery);
            } else {
                fresh.push(category, Lane::unordered(delivery));
            }
            return;
        };
        match yard.lanes.entry(key) {
            Entry::Vacant(entry) => {
                let rows = SharedRows::default();
                rows.push(delivery);
                fresh.push(category, Lane::ordered(entry.key().clone(), &rows));
                entry.insert(ActiveLane { batch, rows, waiting: VecDeque::new() });
            }
            Entry::Occupied(entry) if entry.get().batch == batch => {
                entry.get().rows.push(delivery);
            }
            Entry::Occupied(mut entry) => {
                self.counters.overlapping.add(1);
                entry.get_mut().waiting.push_back(delivery);
            }
        }
    }

    /// Does with the queue what the mode asks for. Called after every push, so that nothing is left behind by a mode that changed
    /// meanwhile.
    pub(super) fn serve_queue(self: &Arc<Self>) {
        match self.mode() {
            Mode::Run => self.hire(),
            Mode::Held => {}
            Mode::Draining => self.release_unstarted(),
            Mode::Dead => self.forget_unstarted(),
        }
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
            self.handlers().spawn(worker::work(worker::Hired::new(self)));
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
        let rows = {
            let mut yard = lock(&self.yard);
            let Some(lane) = yard.lanes.get_mut(&key) else { return };
            if lane.waiting.is_empty() {
                yard.lanes.remove(&key);
                return;
            }
            lane.rows.append(&mut lane.waiting);
            lane.rows.clone()
        };
        let category = key.category;
        match self.mode() {
            Mode::Run | Mode::Held => Fresh::of(self, category, Lane::ordered(key, &rows)).queue(),
            Mode::Draining => {
                lock(&self.yard).lanes.remove(&key);
                self.release(rows.take());
            }
            Mode::Dead => {
                lock(&self.yard).lanes.remove(&key);
                self.forget(rows.take());
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
            let mut fresh = Fresh::new(self, free.len());
            for row in free {
                fresh.push(row.work().key.category, Lane::unordered(row));
                fresh.unplaced -= 1;
            }
            fresh.queue();
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

    /// Hands back rows that were not started before their deadline, so that they do not hold permits until a thread or a stuck stream
    /// is free, nor pay for a lease they could not use.
    pub(crate) fn sweep_expired(self: &Arc<Self>) {
        let (mut units, parked, late) = {
            let mut yard = lock(&self.yard);
            let mut late = Vec::new();
            for lane in yard.lanes.values_mut() {
                late.extend(lane.rows.take_expired());
                if lane.waiting.front().is_some_and(|row| !Self::may_start(row)) {
                    late.extend(lane.waiting.drain(..));
                }
            }
            (std::mem::take(&mut yard.queue), std::mem::take(&mut yard.parked), late)
        };
        self.give_back(late);
        for unit in &mut units {
            unit.give_back_expired();
        }
        let (alive, late): (Vec<_>, Vec<_>) = parked.into_iter().partition(Self::may_start);
        self.give_back(late);
        {
            let mut yard = lock(&self.yard);
            yard.parked.extend(alive);
            units.append(&mut yard.queue);
            yard.queue = units;
        }
        self.serve_queue();
    }
}
