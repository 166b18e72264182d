//! Runners that take many rows a call: how lanes are packed, and what a failure inside a batch means.

mod common;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use common::{assert_all_permits_are_back, inbox, results, rows};
use futures_util::future::BoxFuture;
use uuid::Uuid;
use workpump_actors::options::Options;
use workpump_actors::port::Verdict;
use workpump_actors::runner::{Failure, Job, Runner};
use workpump_actors::testing::{DispatchRig, in_virtual_time, quiesce};

#[test]
fn whole_lanes_are_packed_into_batches() {
    in_virtual_time(async {
        let sizes = Arc::new(Mutex::new(Vec::new()));
        let rig = DispatchRig::start(
            &Options::default(),
            inbox(Arc::new(Batches { sizes: Arc::clone(&sizes), fail: None, short: false })),
        );
        let (long, short) = (Uuid::now_v7(), Uuid::now_v7());
        let mut works = rows(Some(long), 0..25);
        works.extend(rows(Some(short), 100..104));
        works.extend(rows(None, 200..212));
        rig.dispatch(works);
        quiesce().await;
        let sizes = sizes.lock().expect("not poisoned").clone();
        assert!(sizes.iter().all(|rows| rows.len() <= 10), "{sizes:?}");
        assert_eq!(sizes.iter().map(Vec::len).sum::<usize>(), 41);
        assert!(sizes.contains(&(100..104).chain(200..206).collect()), "{sizes:?}");
        let of_long: Vec<i64> = sizes.iter().flatten().copied().filter(|seq| *seq < 100).collect();
        assert_eq!(of_long, (0..25).collect::<Vec<_>>());
    });
}

#[test]
fn a_failure_in_a_batch_stops_only_its_own_lane() {
    in_virtual_time(async {
        let batches = Batches { sizes: Arc::default(), fail: Some(1), short: false };
        let mut rig = DispatchRig::start(&Options::default(), inbox(Arc::new(batches)));
        let mut works = rows(Some(Uuid::now_v7()), 0..4);
        works.extend(rows(Some(Uuid::now_v7()), 100..104));
        let keys: HashMap<_, _> = works.iter().map(|work| (work.key, work.seq)).collect();
        rig.dispatch(works);
        quiesce().await;
        let verdicts: Vec<_> =
            results(&mut rig).into_iter().map(|(key, verdict)| (keys[&key], verdict)).collect();
        assert_eq!(verdicts[0], (0, Verdict::Complete));
        assert!(matches!(verdicts[1], (1, Verdict::Retry { .. })));
        assert_eq!(verdicts[2..4], [(2, Verdict::Release), (3, Verdict::Release)]);
        assert!(verdicts[4..].iter().all(|(_, verdict)| *verdict == Verdict::Complete));
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn a_failure_in_a_long_lane_hands_back_the_batches_behind_it() {
    in_virtual_time(async {
        let batches = Batches { sizes: Arc::default(), fail: Some(12), short: false };
        let mut rig = DispatchRig::start(&Options::default(), inbox(Arc::new(batches)));
        let works = rows(Some(Uuid::now_v7()), 0..30);
        let order: Vec<_> = works.iter().map(|work| work.key).collect();
        rig.dispatch(works);
        quiesce().await;
        let results = results(&mut rig);
        assert_eq!(results.iter().map(|(key, _)| *key).collect::<Vec<_>>(), order);
        assert!(matches!(results[12].1, Verdict::Retry { .. }));
        assert!(results[13..].iter().all(|(_, verdict)| *verdict == Verdict::Release));
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn a_missing_answer_in_a_batch_is_a_failed_attempt() {
    in_virtual_time(async {
        let batches = Batches { sizes: Arc::default(), fail: None, short: true };
        let mut rig = DispatchRig::start(&Options::default(), inbox(Arc::new(batches)));
        rig.dispatch(rows(None, 0..3));
        quiesce().await;
        let results = results(&mut rig);
        assert_eq!(results.iter().filter(|(_, verdict)| *verdict == Verdict::Complete).count(), 2);
        assert!(matches!(&results[2].1, Verdict::Retry { error, .. } if error.contains("no answer")));
    });
}

/// Answers whole batches and notes what was in them.
struct Batches {
    sizes: Arc<Mutex<Vec<Vec<i64>>>>,
    fail: Option<i64>,
    short: bool,
}

impl Runner for Batches {
    fn max_batch(&self) -> usize {
        10
    }

    fn run(&self, _: Job) -> BoxFuture<'static, Result<(), Failure>> {
        unreachable!("batches only")
    }

    fn run_batch(&self, jobs: Vec<Job>) -> BoxFuture<'static, Vec<Result<(), Failure>>> {
        let seqs: Vec<_> = jobs.iter().map(|job| job.work.seq).collect();
        self.sizes.lock().expect("not poisoned").push(seqs.clone());
        let (fail, short) = (self.fail, self.short);
        Box::pin(async move {
            let mut answers: Vec<_> = seqs
                .iter()
                .map(|seq| if Some(*seq) == fail { Err(Failure::retry("no")) } else { Ok(()) })
                .collect();
            if short {
                answers.pop();
            }
            answers
        })
    }
}
