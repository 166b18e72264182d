//! What was stored, what was relayed, and whether the two agree.
//!
//! The rule: the ledger judges by what stands in the output, never by what an instance says about itself. All instances append to one
//! file, under a lock, before they settle; so the order of its lines is the order in which messages were relayed, across instances, and
//! a message that stands twice was relayed twice. Files side by side could not show that two instances had swapped a stream's messages.

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use uuid::Uuid;

/// What the ledger reads of a relayed line.
#[derive(Debug, Deserialize)]
pub(super) struct Delivery {
    pub(super) message_id: Uuid,
    pub(super) stream_id: Option<Uuid>,
    pub(super) instance_id: Uuid,
    pub(super) claim_epoch: i64,
    /// Claims of the row so far; those that were handed back unstarted do not count.
    #[serde(default)]
    pub(super) attempts: u32,
}

/// One stored message.
#[derive(Debug)]
struct Stored {
    stream: Option<Uuid>,
    position: u64,
    first: Option<First>,
}

/// Its first delivery, and the highest claim seen so far.
#[derive(Debug)]
struct First {
    epoch: i64,
    instance: Uuid,
}

/// One stream.
#[derive(Debug, Default)]
struct Stream {
    /// Messages handed out positions so far.
    length: u64,
    /// The position after the highest that was delivered for the first time.
    reached: u64,
}

/// The account of a run.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    messages: HashMap<Uuid, Stored>,
    streams: HashMap<Uuid, Stream>,
    /// Instances that ended before they were told to.
    died: HashSet<Uuid>,
    /// The one of them that this program killed.
    killed: Option<Uuid>,
    /// Whether a row of it was relayed by another one since.
    taken_over: bool,
    processed: u64,
    duplicates: u64,
    redelivered: u64,
    order_violations: u64,
    by_instance: HashMap<Uuid, u64>,
    /// Lines that are no message of this run.
    foreign: u64,
}

/// The verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) enqueued: u64,
    pub(super) processed: u64,
    pub(super) lost: u64,
    pub(super) duplicates: u64,
    pub(super) redelivered: u64,
    pub(super) order_violations: u64,
    pub(super) streams: u64,
    pub(super) foreign: u64,
    pub(super) died: u64,
}

impl Ledger {
    /// The next position in a stream; positions of refused messages stay empty.
    pub(super) fn next_position(&mut self, stream: Uuid) -> u64 {
        let stream = self.streams.entry(stream).or_default();
        stream.length += 1;
        stream.length - 1
    }

    /// Enters a message that is about to be stored: it may be relayed before the store has answered.
    pub(super) fn expect(&mut self, message_id: Uuid, stream: Option<Uuid>, position: u64) {
        self.messages.insert(message_id, Stored { stream, position, first: None });
    }

    /// Strikes out a message that the database refused.
    pub(super) fn refused(&mut self, message_id: Uuid) {
        self.messages.remove(&message_id);
    }

    /// Notes an instance that ended before it was told to.
    pub(super) fn died(&mut self, instance: Uuid) {
        self.died.insert(instance);
    }

    /// Notes an instance that is about to be killed.
    pub(super) fn kill(&mut self, instance: Uuid) {
        self.killed = Some(instance);
        self.died(instance);
    }

    /// Whether a row that the killed one held was relayed by another instance. A row whose claim came to nothing has a higher epoch, and
    /// an attempt more unless it was handed back: only a death leaves such rows in a demo, where nothing fails.
    pub(super) fn taken_over(&self) -> bool {
        self.taken_over
    }

    /// Enters one line of the output.
    pub(super) fn deliver(&mut self, delivery: &Delivery) {
        let Some(stored) = self.messages.get_mut(&delivery.message_id) else {
            self.foreign += 1;
            return;
        };
        *self.by_instance.entry(delivery.instance_id).or_default() += 1;
        if self.killed.is_some_and(|killed| killed != delivery.instance_id) {
            self.taken_over |= delivery.claim_epoch > 1 && delivery.attempts > 1;
        }
        if let Some(first) = &mut stored.first {
            // Allowed in one case only: the claim was taken over from an instance that died.
            if delivery.claim_epoch > first.epoch && self.died.contains(&first.instance) {
                self.redelivered += 1;
                *first = First { epoch: delivery.claim_epoch, instance: delivery.instance_id };
            } else {
                self.duplicates += 1;
            }
            return;
        }
        stored.first = Some(First { epoch: delivery.claim_epoch, instance: delivery.instance_id });
        self.processed += 1;
        if stored.stream != delivery.stream_id {
            // Relayed in a stream that is not its own: whatever order that had, it was not the right one.
            self.order_violations += 1;
        } else if let Some(stream) = stored.stream.and_then(|id| self.streams.get_mut(&id)) {
            if stored.position < stream.reached {
                self.order_violations += 1;
            }
            stream.reached = stream.reached.max(stored.position + 1);
        }
    }

    /// How many messages were relayed at least once.
    pub(super) fn processed(&self) -> u64 {
        self.processed
    }

    /// How many of those that are or will be stored were not yet relayed.
    pub(super) fn outstanding(&self) -> u64 {
        self.messages.len() as u64 - self.processed
    }

    /// How many lines each instance relayed, the busiest first.
    pub(super) fn by_instance(&self) -> Vec<(Uuid, u64)> {
        let mut shares: Vec<_> = self.by_instance.iter().map(|(id, lines)| (*id, *lines)).collect();
        shares.sort_by_key(|(id, lines)| (std::cmp::Reverse(*lines), *id));
        shares
    }

    /// The verdict so far.
    pub(super) fn tally(&self) -> Tally {
        let used: HashSet<Uuid> = self.messages.values().filter_map(|stored| stored.stream).collect();
        Tally {
            enqueued: self.messages.len() as u64,
            processed: self.processed,
            lost: self.outstanding(),
            duplicates: self.duplicates,
            redelivered: self.redelivered,
            order_violations: self.order_violations,
            streams: used.len() as u64,
            foreign: self.foreign,
            died: self.died.len() as u64,
        }
    }
}

impl Tally {
    /// Nothing lost, doubled or out of order.
    pub(super) fn is_clean(&self) -> bool {
        self.lost == 0 && self.duplicates == 0 && self.order_violations == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: Uuid = Uuid::from_u128(7);
    const ONE: Uuid = Uuid::from_u128(1);
    const TWO: Uuid = Uuid::from_u128(2);

    fn ledger(messages: u64) -> Ledger {
        let mut ledger = Ledger::default();
        for n in 0..messages {
            let position = ledger.next_position(STREAM);
            ledger.expect(Uuid::from_u128(100 + u128::from(n)), Some(STREAM), position);
        }
        ledger
    }

    fn deliver(ledger: &mut Ledger, n: u128, instance_id: Uuid, claim_epoch: i64) {
        let message_id = Uuid::from_u128(100 + n);
        let attempts = claim_epoch.try_into().unwrap();
        ledger.deliver(&Delivery { message_id, stream_id: Some(STREAM), instance_id, claim_epoch, attempts });
    }

    #[test]
    fn a_clean_run_is_clean() {
        let mut ledger = ledger(3);
        (0..3).for_each(|n| deliver(&mut ledger, n, ONE, 1));
        let tally = ledger.tally();
        assert_eq!(tally, Tally { enqueued: 3, processed: 3, streams: 1, ..Tally::default() });
        assert!(tally.is_clean());
    }

    #[test]
    fn what_is_missing_is_lost_and_a_gap_is_no_disorder() {
        let mut ledger = ledger(3);
        deliver(&mut ledger, 0, ONE, 1);
        deliver(&mut ledger, 2, ONE, 1);
        let tally = ledger.tally();
        assert_eq!((tally.lost, tally.order_violations), (1, 0));
        assert!(!tally.is_clean());
    }

    #[test]
    fn a_first_delivery_after_that_of_a_later_message_is_out_of_order() {
        let mut ledger = ledger(4);
        for n in [1, 0, 3, 2] {
            deliver(&mut ledger, n, ONE, 1);
        }
        assert_eq!(ledger.tally().order_violations, 2);
    }

    #[test]
    fn a_second_delivery_is_a_duplicate_unless_its_instance_died() {
        let mut ledger = ledger(2);
        deliver(&mut ledger, 0, ONE, 1);
        deliver(&mut ledger, 0, TWO, 2);
        assert_eq!((ledger.tally().duplicates, ledger.tally().redelivered), (1, 0));
        ledger.died(ONE);
        deliver(&mut ledger, 0, TWO, 1);
        assert_eq!(ledger.tally().duplicates, 2, "the same claim twice has no cause");
        deliver(&mut ledger, 0, TWO, 2);
        assert_eq!((ledger.tally().duplicates, ledger.tally().redelivered), (2, 1));
        deliver(&mut ledger, 0, TWO, 2);
        assert_eq!(ledger.tally().duplicates, 3, "two lives");
    }

    #[test]
    fn a_redelivery_is_no_disorder() {
        let mut ledger = ledger(2);
        deliver(&mut ledger, 0, ONE, 1);
        deliver(&mut ledger, 1, ONE, 1);
        ledger.died(ONE);
        deliver(&mut ledger, 0, TWO, 2);
        assert_eq!(ledger.tally().order_violations, 0);
        assert!(ledger.tally().is_clean());
    }

    #[test]
    fn a_row_counts_as_taken_over_when_another_one_relays_it_after_the_kill() {
        let mut ledger = ledger(3);
        deliver(&mut ledger, 0, ONE, 1);
        ledger.kill(ONE);
        deliver(&mut ledger, 1, TWO, 1);
        assert!(!ledger.taken_over(), "its own row");
        deliver(&mut ledger, 2, ONE, 2);
        assert!(!ledger.taken_over(), "written by the killed one in its last moment");
        deliver(&mut ledger, 0, TWO, 2);
        assert!(ledger.taken_over() && ledger.tally().is_clean());
    }

    #[test]
    fn refused_messages_are_not_missed_and_foreign_ones_not_counted() {
        let mut ledger = ledger(2);
        ledger.refused(Uuid::from_u128(100));
        deliver(&mut ledger, 1, ONE, 1);
        deliver(&mut ledger, 50, ONE, 1);
        let tally = ledger.tally();
        assert_eq!((tally.enqueued, tally.lost, tally.foreign), (1, 0, 1));
    }
}
