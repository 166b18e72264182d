//! Results that wait to be written, kept where no crash of the writer reaches them.
//!
//! The rule: a result stands here from the moment it arrives until it is written or given up; a batch that is being written stands here
//! too, and every step from one place to the next is one step under one lock. The failure this prevents: results of rows that have run,
//! lost with the actor that was about to write them, so that the rows run again.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::delivery::Settlement;
use crate::instance::Gate;
use crate::lock;
use crate::port::{SettleItem, Settled, Verdict};

/// How often the writer may die during the flush of one batch.
const MAX_DEATHS: u32 = 3;

/// The results of one instance that are not written yet. Shared by all incarnations of its writer, one after the other.
#[derive(Debug, Default)]
pub struct Backlog(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    waiting: VecDeque<Settlement>,
    /// Batches that must be tried again, before anything newer.
    again: VecDeque<Batch>,
    in_flight: Option<(u64, Batch)>,
    flushes: u64,
    drain: Option<DrainBegan>,
    /// Nothing may be written any more.
    closed: bool,
    counters: Counters,
}

/// Results that are written together.
#[derive(Debug)]
struct Batch {
    items: Vec<Settlement>,
    /// An earlier try ended without a known outcome: it may have been written already.
    unclear: bool,
    /// How many writers died while they wrote it.
    deaths: u32,
}

/// What has become of the results so far, whoever wrote them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub(super) received: u64,
    pub(super) flushes: u64,
    pub(super) applied: u64,
    pub(super) fenced: u64,
    pub(super) unclear: u64,
    pub(super) poisoned: u64,
    pub(super) lease_ended: u64,
    pub(super) discarded: u64,
    /// Given up because the writer died of them.
    pub(super) deadly: u64,
}

#[derive(Clone, Copy, Debug)]
struct DrainBegan {
    applied_before: u64,
    end: Instant,
    unsettled: Option<u64>,
}

/// A batch on its way to the store.
#[derive(Debug)]
pub(super) struct Flush {
    /// Names it when its answer comes.
    pub(super) number: u64,
    pub(super) items: Vec<SettleItem>,
}

/// What a new writer finds.
#[derive(Debug)]
pub(super) struct Found {
    /// Results that wait.
    pub(super) waiting: usize,
    /// Results given up because writer after writer died of them.
    pub(super) deadly: Vec<Settlement>,
}

/// What a flush has changed.
#[derive(Debug)]
pub(super) struct Written {
    /// Results, other than releases, that were fenced. A fenced release is expected: the failure written just before it has handed the
    /// row back already.
    pub(super) lost: usize,
    /// Whether it may have been written by an earlier try.
    pub(super) unclear: bool,
    /// Whether a row became claimable.
    pub(super) frees_work: bool,
    /// To be dropped: that returns their permits.
    pub(super) done: Vec<Settlement>,
}

impl Backlog {
    /// A new writer begins. What its predecessor was writing comes first; it may have been written already.
    pub(super) fn take_over(&self) -> Found {
        let inner = &mut *lock(&self.0);
        let mut deadly = Vec::new();
        if let Some((_, mut batch)) = inner.in_flight.take() {
            batch.unclear = true;
            batch.deaths += 1;
            if inner.closed {
                inner.counters.discarded += batch.items.len() as u64;
            } else if batch.deaths >= MAX_DEATHS {
                inner.counters.deadly += batch.items.len() as u64;
                deadly = batch.items;
            } else {
                inner.again.push_front(batch);
            }
        }
        Found { waiting: inner.waiting.len(), deadly }
    }

    /// Results have come.
    pub(super) fn push(&self, settlements: Vec<Settlement>) {
        let inner = &mut *lock(&self.0);
        inner.counters.received += settlements.len() as u64;
        inner.waiting.extend(settlements);
    }

    /// Begins to write the oldest batch that must be tried again.
    pub(super) fn begin_again(&self) -> Option<Flush> {
        let inner = &mut *lock(&self.0);
        let batch = inner.again.pop_front()?;
        Some(inner.begin(batch))
    }

    /// Begins to write the oldest results that wait.
    pub(super) fn begin(&self, items: usize) -> Flush {
        let inner = &mut *lock(&self.0);
        let items = inner.waiting.drain(..items.min(inner.waiting.len())).collect();
        inner.begin(Batch { items, unclear: false, deaths: 0 })
    }

    /// A batch was written, with the gate as it is now. `None`: it is somebody else's by now.
    pub(super) fn written(&self, number: u64, settled: &Settled, gate: Gate) -> Option<Written> {
        let inner = &mut *lock(&self.0);
        let batch = inner.end(number)?;
        let lost = settled.fenced.iter().filter(|key| {
            batch.items.iter().any(|item| item.key() == **key && *item.verdict() != Verdict::Release)
        });
        let lost = lost.count();
        inner.counters.applied += settled.applied as u64;
        if batch.unclear {
            inner.counters.unclear += lost as u64;
        } else {
            inner.counters.fenced += lost as u64;
        }
        let frees_work = batch.items.iter().any(|item| item.frees_work(gate));
        Some(Written { lost, unclear: batch.unclear, frees_work, done: batch.items })
    }

    /// A batch was refused: halves it, to find the one at fault. Returns that one when it stands alone; it is given up.
    pub(super) fn bisect(&self, number: u64) -> Option<Settlement> {
        let inner = &mut *lock(&self.0);
        let mut batch = inner.end(number)?;
        if batch.items.len() > 1 {
            let items = batch.items.split_off(batch.items.len() / 2);
            inner.again.push_front(Batch { items, ..batch });
            inner.again.push_front(batch);
            return None;
        }
        inner.counters.poisoned += batch.items.len() as u64;
        batch.items.pop()
    }

    /// A batch was not written for now. Returns how many there were, and those whose leases have ended: they are given up.
    pub(super) fn keep(&self, number: u64, unclear: bool, now: Instant) -> (usize, Vec<Settlement>) {
        let inner = &mut *lock(&self.0);
        let Some(mut batch) = inner.end(number) else { return (0, Vec::new()) };
        let before = batch.items.len();
        batch.unclear |= unclear;
        let (ended, kept) = batch.items.into_iter().partition(|item| item.window().has_ended(now));
        batch.items = kept;
        if !batch.items.is_empty() {
            inner.again.push_front(batch);
        }
        inner.counters.lease_ended += ended.len() as u64;
        (before, ended)
    }

    /// Nothing may be written any more: gives everything up but a batch under way, whose answer (`failed`) tells what becomes of it.
    /// Returns what was given up.
    pub(super) fn close(&self, failed: Option<u64>) -> Vec<Settlement> {
        let inner = &mut *lock(&self.0);
        inner.closed = true;
        let mut discarded = Vec::new();
        if let Some(batch) = failed.and_then(|number| inner.end(number)) {
            discarded.extend(batch.items);
        }
        discarded.extend(inner.again.drain(..).flat_map(|batch| batch.items));
        discarded.extend(inner.waiting.drain(..));
        inner.counters.discarded += discarded.len() as u64;
        discarded
    }

    /// Whether nothing may be written any more.
    pub(super) fn is_closed(&self) -> bool {
        lock(&self.0).closed
    }

    /// Whether a batch is on its way.
    pub(super) fn is_flushing(&self) -> bool {
        lock(&self.0).in_flight.is_some()
    }

    /// Results that are not written yet.
    pub(super) fn unwritten(&self) -> usize {
        lock(&self.0).unwritten()
    }

    pub(super) fn counters(&self) -> Counters {
        lock(&self.0).counters
    }

    /// A drain begins, or goes on under another writer. Returns when it has to end.
    pub(super) fn begin_drain(&self, now: Instant, patience: Duration) -> Instant {
        let inner = &mut *lock(&self.0);
        let applied_before = inner.counters.applied;
        let fresh = || DrainBegan { applied_before, end: now + patience, unsettled: None };
        inner.drain.get_or_insert_with(fresh).end
    }

    /// Whether a drain has begun.
    pub(super) fn is_draining(&self) -> bool {
        lock(&self.0).drain.is_some()
    }

    /// A drain ends. Returns how many results were written since it began, and how many were not.
    pub(super) fn end_drain(&self) -> (u64, u64) {
        let inner = &mut *lock(&self.0);
        let unwritten = inner.unwritten() as u64;
        let applied = inner.counters.applied;
        inner.drain.as_mut().map_or((0, unwritten), |drain| {
            (applied - drain.applied_before, *drain.unsettled.get_or_insert(unwritten))
        })
    }
}

impl Inner {
    fn begin(&mut self, batch: Batch) -> Flush {
        self.counters.flushes += 1;
        self.flushes += 1;
        let items = batch.items.iter().map(Settlement::item).collect();
        self.in_flight = Some((self.flushes, batch));
        Flush { number: self.flushes, items }
    }

    fn end(&mut self, number: u64) -> Option<Batch> {
        self.in_flight.take_if(|(current, _)| *current == number).map(|(_, batch)| batch)
    }

    fn unwritten(&self) -> usize {
        let flushing = self.in_flight.as_ref().map_or(0, |(_, batch)| batch.items.len());
        flushing + self.waiting.len() + self.again.iter().map(|batch| batch.items.len()).sum::<usize>()
    }
}
