//! Lanes that are in no queue yet.
//!
//! The rule: a lane that has a place in the yard has somebody who will end it: the unit it belongs to, or this. The failure this
//! prevents: a panic between the two that leaves an order key marked as running, with nobody who runs it, until the process ends.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::lock;
use crate::work::Category;

use super::Crew;
use super::lane_rows::Lane;
use super::unit::Unit;

/// New lanes on their way to the queue. Dropped before they are there, it gives up their rows and frees their order keys. Drop it only
/// while the yard is not locked.
pub(super) struct Fresh<'a> {
    crew: &'a Arc<Crew>,
    lanes: VecDeque<(Category, Lane)>,
    /// Rows taken in hand that are in no lane yet.
    pub(super) unplaced: usize,
}

impl<'a> Fresh<'a> {
    pub(super) fn new(crew: &'a Arc<Crew>, rows: usize) -> Self {
        Self { crew, lanes: VecDeque::with_capacity(rows), unplaced: rows }
    }

    pub(super) fn of(crew: &'a Arc<Crew>, category: Category, lane: Lane) -> Self {
        Self { crew, lanes: VecDeque::from([(category, lane)]), unplaced: 0 }
    }

    pub(super) fn push(&mut self, category: Category, lane: Lane) {
        self.lanes.push_back((category, lane));
    }

    /// Makes units of the lanes and puts them into the queue: a unit for each, or for categories that are run in batches, one for as many
    /// whole lanes as fill a batch. A lane longer than a batch goes alone, batch after batch.
    pub(super) fn queue(mut self) {
        let mut units = Vec::with_capacity(self.lanes.len());
        let mut open: [Option<(Unit, usize)>; 4] = [const { None }; 4];
        while let Some((category, lane)) = self.lanes.pop_front() {
            let limit = self.crew.batch_limit(category);
            if limit == 1 {
                units.push(Unit::single(self.crew, category, lane));
                continue;
            }
            let rows = lane.rows.len();
            let pack = &mut open[category as usize];
            if let Some((unit, _)) = pack.take_if(|(_, filled)| *filled > 0 && *filled + rows > limit) {
                units.push(unit);
            }
            let (unit, filled) = pack.get_or_insert_with(|| (Unit::packed(self.crew, category, limit), 0));
            unit.add(lane);
            *filled += rows;
        }
        units.extend(open.into_iter().flatten().map(|(unit, _)| unit));
        lock(&self.crew.yard).queue.extend(units);
        self.crew.serve_queue();
    }
}

impl Drop for Fresh<'_> {
    fn drop(&mut self) {
        while let Some((category, lane)) = self.lanes.pop_front() {
            drop(Unit::single(self.crew, category, lane));
        }
        if self.unplaced > 0 {
            self.crew.give_up(self.unplaced);
        }
    }
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "testing")]
    #[test]
    fn lanes_that_never_reach_the_queue_give_up_their_rows_and_free_their_order_keys() {
        use std::time::Duration;

        use tokio::sync::Semaphore;
        use uuid::Uuid;

        use super::*;
        use crate::instance::InstanceId;
        use crate::lane::CrewParts;
        use crate::options::DispatchOptions;
        use crate::policy::retry::RetryPolicy;
        use crate::testing::{claimed, deliver, in_virtual_time, quiesce, runner};

        in_virtual_time(async {
            let (permits, in_flight) = (Arc::new(Semaphore::new(10)), Arc::default());
            let crew = Crew::new(CrewParts {
                instance: InstanceId::fresh(),
                trust: crate::standing::Trust::new(Arc::default(), None),
                runners: vec![(Category::Inbox, runner(1, |_| async { Ok(()) }))],
                handlers: tokio::runtime::Handle::current(),
                threads: 1,
                retry: RetryPolicy::new(&DispatchOptions::default()),
                in_flight: Arc::clone(&in_flight),
                seed: 7,
            });
            let stream = Some(Uuid::now_v7());
            let rows = |seqs: std::ops::Range<i64>| {
                let works = seqs.map(|seq| claimed(seq, stream)).collect();
                deliver(works, &permits, &in_flight, Duration::from_mins(5), Duration::from_secs(30))
            };
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                crew.in_hand.fetch_add(3, std::sync::atomic::Ordering::AcqRel);
                let mut fresh = Fresh::new(&crew, 3);
                let mut yard = lock(&crew.yard);
                for row in rows(0..3).into_iter().take(2) {
                    crew.place(row, 1, &mut yard, &mut fresh);
                    fresh.unplaced -= 1;
                }
                panic!("before the last row has its place");
            }));
            assert!(panicked.is_err());
            assert_eq!((crew.in_hand(), permits.available_permits()), (0, 10));
            assert!(in_flight.is_empty());
            crew.accept(rows(3..4));
            quiesce().await;
            assert_eq!(crew.desk().fetch().len(), 1, "its key is free");
        });
    }
}
