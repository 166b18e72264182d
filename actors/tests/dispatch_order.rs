//! Random handlers on random streams, many rounds, with the recorded history checked.

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{History, assert_all_permits_are_back, inbox, results};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::time::sleep;
use uuid::Uuid;
use workpump_actors::options::Options;
use workpump_actors::runner::{Failure, Job};
use workpump_actors::testing::{DispatchRig, claimed, in_virtual_time, runner};

/// Random handlers on random streams: inside a stream, rows start in order and never side by side.
fn random_lanes(seed: u64, max_batch: usize) {
    in_virtual_time(async move {
        let mut rng = SmallRng::seed_from_u64(seed);
        let streams: Vec<_> = (0..rng.random_range(1..6)).map(|_| Uuid::now_v7()).collect();
        let history = History::default();
        let log = history.clone();
        let running = Arc::new(Mutex::new(HashMap::<Uuid, i64>::new()));
        let at_once = Arc::clone(&running);
        let overlaps = Arc::new(AtomicUsize::new(0));
        let collisions = Arc::clone(&overlaps);
        let fickle = runner(max_batch, move |job: Job| {
            let (log, at_once, collisions) = (log.clone(), Arc::clone(&at_once), Arc::clone(&collisions));
            async move {
                let mut dice = SmallRng::seed_from_u64(seed ^ job.work.seq as u64);
                let stream = job.work.stream_id.expect("ordered");
                if at_once.lock().expect("not poisoned").insert(stream, job.work.seq).is_some() {
                    collisions.fetch_add(1, Ordering::Relaxed);
                }
                log.note(&job, "start");
                if dice.random_bool(0.5) {
                    sleep(Duration::from_millis(dice.random_range(1..50))).await;
                }
                at_once.lock().expect("not poisoned").remove(&stream);
                if dice.random_bool(0.05) {
                    return Err(Failure::retry("dice"));
                }
                assert!(!dice.random_bool(0.02), "dice");
                Ok(())
            }
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(fickle));
        let mut seq = 0;
        let mut total = 0;
        for _ in 0..rng.random_range(1..5) {
            let mut works = Vec::new();
            for stream in &streams {
                let rows = rng.random_range(0..20);
                works.extend((seq..seq + rows).map(|seq| claimed(seq, Some(*stream))));
                seq += rows;
            }
            total += works.len();
            rig.dispatch(works);
            sleep(Duration::from_millis(rng.random_range(0..100))).await;
        }
        sleep(Duration::from_mins(1)).await;
        let results = results(&mut rig);
        assert_eq!(results.len(), total, "every row is settled once");
        assert_eq!(overlaps.load(Ordering::Relaxed), 0, "two rows of a stream ran side by side");
        let mut last = HashMap::new();
        for (stream, seq, _) in history.all() {
            assert!(last.insert(stream, seq).is_none_or(|before| before < seq), "out of order");
        }
        assert_all_permits_are_back(&rig);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_handlers_never_break_the_order_of_a_stream(seed in any::<u64>()) {
        random_lanes(seed, 1);
    }

    #[test]
    fn random_handlers_never_break_the_order_of_a_stream_in_batches(seed in any::<u64>()) {
        random_lanes(seed, 8);
    }
}
