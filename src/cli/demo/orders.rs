//! The generated input: orders that go through their lives, many at a time.
//!
//! The rule: repeatable and mixed. Every run stores the same messages, and neighbours in the input belong to different streams, because
//! a stream that came in one piece would be in order by luck.

use std::io;

use serde_json::value::{RawValue, to_raw_value};

use super::source::Draft;
use crate::cli::lines::{Entry, Source};

/// An order's life; longer streams begin a new round of it.
const LIFE: [&str; 5] = ["order.placed", "order.paid", "order.packed", "order.shipped", "order.delivered"];

/// Names that only survive when text is treated as Unicode all the way.
const CITIES: [&str; 4] = ["Köln", "Łódź", "東京", "Montréal"];

/// `messages` messages in `streams` streams.
pub(super) struct Orders {
    messages: u64,
    streams: u64,
    made: u64,
}

impl Orders {
    pub(super) fn new(messages: u64, streams: u64) -> Self {
        Self { messages, streams: streams.max(1), made: 0 }
    }

    /// Once around all streams before any has its next turn, each time from another start.
    fn order_and_step(&self) -> (u64, u64) {
        let (round, place) = (self.made / self.streams, self.made % self.streams);
        ((place + round.wrapping_mul(7)) % self.streams, round)
    }
}

impl Source<Draft> for Orders {
    fn next_entry(&mut self) -> Option<io::Result<Entry<Draft>>> {
        if self.made == self.messages {
            return None;
        }
        let (order, step) = self.order_and_step();
        self.made += 1;
        let kind = LIFE[(step % LIFE.len() as u64) as usize];
        let key = format!("order-{order:06}");
        let payload = payload(&key, order, step, kind);
        let bytes = payload.as_ref().map_or(0, |payload| payload.get().len());
        let value = payload.map(|payload| Draft { message_type: kind, stream_key: Some(key), payload });
        Some(Ok(Entry { line: self.made, bytes, value: value.map_err(|e| e.to_string()) }))
    }

    fn at_hand(&self) -> bool {
        self.made < self.messages
    }
}

fn payload(key: &str, order: u64, step: u64, kind: &str) -> serde_json::Result<Box<RawValue>> {
    let amount = 990 + order % 90 * 125 + step * 10;
    to_raw_value(&serde_json::json!({
        "order": key,
        "event": kind,
        "step": step,
        "customer": { "id": order % 97, "city": CITIES[(order % 4) as usize] },
        "lines": [{ "sku": format!("sku-{:04}", order % 1_000), "quantity": step % 3 + 1, "amount_cents": amount }],
    }))
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    #[test]
    fn every_stream_gets_its_share_and_neighbours_differ() {
        let mut orders = Orders::new(1_003, 50);
        let made: Vec<Entry<Draft>> =
            std::iter::from_fn(|| orders.next_entry()).map(Result::unwrap).collect();
        let keys: Vec<String> =
            made.into_iter().map(|entry| entry.value.unwrap().stream_key.unwrap()).collect();
        assert_eq!(keys.len(), 1_003);
        let mut share: HashMap<&str, u32> = HashMap::new();
        for key in &keys {
            *share.entry(key).or_default() += 1;
        }
        assert_eq!(share.len(), 50);
        assert!(share.values().all(|n| (20..=21).contains(n)), "{share:?}");
        let first_round: HashSet<_> = keys[..50].iter().collect();
        assert_eq!(first_round.len(), 50);
    }

    #[test]
    fn one_stream_and_no_message_are_possible() {
        assert!(Orders::new(0, 5).next_entry().is_none());
        let mut one = Orders::new(3, 1);
        assert_eq!(std::iter::from_fn(|| one.next_entry()).count(), 3);
    }
}
