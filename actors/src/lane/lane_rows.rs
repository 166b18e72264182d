//! The rows of one lane that were not started.
//!
//! The rule: whoever runs a lane and whoever watches deadlines reach the same rows. The failure this prevents: rows that wait behind a
//! handler that never returns, out of everybody's reach, until their lease has run out and was charged to them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::delivery::Delivery;
use crate::lock;
use crate::work::OrderKey;

use super::Crew;

/// Rows that run strictly one after another: all of one order key, or a single unordered row.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) key: Option<OrderKey>,
    pub(crate) rows: LaneRows,
}

impl Lane {
    /// A single unordered row.
    pub(crate) fn unordered(row: Delivery) -> Self {
        Self { key: None, rows: LaneRows { one: Some(row), shared: None } }
    }

    /// Rows of one order key.
    pub(crate) fn ordered(key: OrderKey, rows: &SharedRows) -> Self {
        Self { key: Some(key), rows: LaneRows { one: None, shared: Some(rows.clone()) } }
    }
}

/// Rows of an order key, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedRows(Arc<Mutex<VecDeque<Delivery>>>);

impl SharedRows {
    pub(crate) fn push(&self, row: Delivery) {
        lock(&self.0).push_back(row);
    }

    /// Puts these behind the others.
    pub(crate) fn append(&self, rows: &mut VecDeque<Delivery>) {
        lock(&self.0).append(rows);
    }

    pub(crate) fn take(&self) -> VecDeque<Delivery> {
        std::mem::take(&mut *lock(&self.0))
    }

    /// The first row that may not start any more, and all behind it: nothing may overtake it. Those before it may have been renewed.
    pub(crate) fn take_expired(&self) -> VecDeque<Delivery> {
        let mut rows = lock(&self.0);
        match rows.iter().position(|row| !Crew::may_start(row)) {
            Some(first) => rows.split_off(first),
            None => VecDeque::new(),
        }
    }
}

/// The rows a lane still has to start.
#[derive(Debug)]
pub(crate) struct LaneRows {
    /// Without an order key there is just one, and nobody else needs to reach it: it waits in the queue only.
    one: Option<Delivery>,
    shared: Option<SharedRows>,
}

impl LaneRows {
    pub(crate) fn pop_front(&mut self) -> Option<Delivery> {
        self.one.take().or_else(|| lock(&self.shared.as_ref()?.0).pop_front())
    }

    pub(crate) fn len(&self) -> usize {
        usize::from(self.one.is_some()) + self.shared.as_ref().map_or(0, |rows| lock(&rows.0).len())
    }

    pub(crate) fn take(&mut self) -> VecDeque<Delivery> {
        match &self.shared {
            Some(rows) => rows.take(),
            None => self.one.take().into_iter().collect(),
        }
    }

    pub(crate) fn take_expired(&mut self) -> VecDeque<Delivery> {
        match &self.shared {
            Some(rows) => rows.take_expired(),
            None => self.one.take_if(|row| !Crew::may_start(row)).into_iter().collect(),
        }
    }
}
