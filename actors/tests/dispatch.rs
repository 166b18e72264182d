//! Running rows: order inside a stream, concurrency across streams, and what failures, panics and deadlines do.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use workpump_actors::message::{Account, Evicted, Fence, Observe, Unfence};
use workpump_actors::options::{OnFailure, Options};
use workpump_actors::port::Verdict;
use workpump_actors::runner::{Failure, Job, Runner};
use workpump_actors::testing::{DispatchRig, claimed, in_virtual_time, quiesce, runner};
use workpump_actors::work::{Category, ClaimEpoch, ClaimedWork, FailureReason, WorkKey};

/// The stream, the row, and what happened.
type Step = (Uuid, i64, &'static str);

/// What happened to rows, in order.
#[derive(Clone, Default)]
struct History(Arc<Mutex<Vec<Step>>>);

impl History {
    fn note(&self, job: &Job, what: &'static str) {
        let stream = job.work.stream_id.unwrap_or_default();
        self.0.lock().expect("not poisoned").push((stream, job.work.seq, what));
    }

    fn all(&self) -> Vec<Step> {
        self.0.lock().expect("not poisoned").clone()
    }

    fn started(&self) -> Vec<i64> {
        self.all().iter().filter(|(.., what)| *what == "start").map(|(_, seq, _)| *seq).collect()
    }
}

fn rows(stream: Option<Uuid>, seqs: std::ops::Range<i64>) -> Vec<ClaimedWork> {
    seqs.map(|seq| claimed(seq, stream)).collect()
}

fn inbox(runner: Arc<dyn Runner>) -> Vec<(Category, Arc<dyn Runner>)> {
    vec![(Category::Inbox, runner)]
}

fn done() -> Arc<dyn Runner> {
    runner(1, |_| async { Ok(()) })
}

/// Every result so far, in the order it was passed on.
fn results(rig: &mut DispatchRig) -> Vec<(WorkKey, Verdict)> {
    rig.settle
        .take()
        .into_iter()
        .flat_map(|settle| settle.settlements)
        .map(|settlement| (settlement.key(), settlement.verdict().clone()))
        .collect()
}

async fn account(rig: &DispatchRig) -> Account {
    rig.addr.send(Observe).await.expect("alive")
}

fn assert_all_permits_are_back(rig: &DispatchRig) {
    assert_eq!(rig.permits.available_permits(), 1_000);
    assert!(rig.in_flight.is_empty());
}

#[test]
fn trivial_rows_are_settled_in_few_messages() {
    in_virtual_time(async {
        let mut rig = DispatchRig::start(&Options::default(), inbox(done()));
        rig.dispatch(rows(None, 0..1_000));
        quiesce().await;
        let messages = rig.settle.take();
        assert!(messages.len() <= 20, "{}", messages.len());
        assert_eq!(messages.iter().map(|settle| settle.settlements.len()).sum::<usize>(), 1_000);
        drop(messages);
        assert_all_permits_are_back(&rig);
        assert_eq!(account(&rig).await.counter("completed"), 1_000);
    });
}

#[test]
fn rows_of_one_stream_run_one_after_another() {
    in_virtual_time(async {
        let history = History::default();
        let log = history.clone();
        let slow = runner(1, move |job| {
            let log = log.clone();
            async move {
                log.note(&job, "start");
                sleep(Duration::from_secs(1)).await;
                log.note(&job, "end");
                Ok(())
            }
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(slow));
        rig.dispatch(rows(Some(Uuid::now_v7()), 0..4));
        sleep(Duration::from_secs(5)).await;
        let steps: Vec<_> = history.all().iter().map(|(_, seq, what)| (*seq, *what)).collect();
        let expected: Vec<_> = (0..4).flat_map(|seq| [(seq, "start"), (seq, "end")]).collect();
        assert_eq!(steps, expected);
        assert_eq!(results(&mut rig).len(), 4);
    });
}

#[test]
fn streams_and_unordered_rows_run_side_by_side() {
    in_virtual_time(async {
        let slow = runner(1, |_| async {
            sleep(Duration::from_secs(1)).await;
            Ok(())
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(slow));
        let mut works = rows(None, 0..500);
        works.extend((0..500).map(|seq| claimed(seq, Some(Uuid::now_v7()))));
        rig.dispatch(works);
        sleep(Duration::from_millis(1_001)).await;
        quiesce().await;
        assert_eq!(results(&mut rig).len(), 1_000, "all in the time of one");
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn a_failed_row_stops_its_stream_and_hands_the_rest_back_behind_it() {
    in_virtual_time(async {
        let picky =
            runner(
                1,
                |job| async move { if job.work.seq == 1 { Err(Failure::retry("no")) } else { Ok(()) } },
            );
        let mut rig = DispatchRig::start(&Options::default(), inbox(picky));
        let stream = Uuid::now_v7();
        let works = rows(Some(stream), 0..5);
        let keys: Vec<_> = works.iter().map(|work| work.key).collect();
        rig.dispatch(works);
        quiesce().await;
        let messages = rig.settle.take();
        let last: Vec<_> = messages
            .iter()
            .find(|settle| settle.settlements.iter().any(|item| item.key() == keys[1]))
            .expect("the failure")
            .settlements
            .iter()
            .map(|item| (item.key(), item.verdict().clone()))
            .skip_while(|(key, _)| *key != keys[1])
            .collect();
        assert!(matches!(last[0].1, Verdict::Retry { .. }));
        assert_eq!(last[1..], [2, 3, 4].map(|at| (keys[at], Verdict::Release)));
        drop(messages);
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn a_dead_letter_lets_its_stream_go_on() {
    in_virtual_time(async {
        let picky = runner(1, |job| async move {
            if job.work.seq == 0 { Err(Failure::permanent("never")) } else { Ok(()) }
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(picky));
        rig.dispatch(rows(Some(Uuid::now_v7()), 0..3));
        quiesce().await;
        let verdicts: Vec<_> = results(&mut rig).into_iter().map(|(_, verdict)| verdict).collect();
        assert!(
            matches!(verdicts[..], [Verdict::DeadLetter { .. }, Verdict::Complete, Verdict::Complete]),
            "{verdicts:?}"
        );
    });
}

#[test]
fn skip_gives_a_row_up_and_goes_on() {
    in_virtual_time(async {
        let mut options = Options::default();
        options.dispatch.on_failure.inbox = OnFailure::Skip;
        let picky =
            runner(
                1,
                |job| async move { if job.work.seq == 0 { Err(Failure::retry("no")) } else { Ok(()) } },
            );
        let mut rig = DispatchRig::start(&options, inbox(picky));
        rig.dispatch(rows(Some(Uuid::now_v7()), 0..2));
        quiesce().await;
        let verdicts: Vec<_> = results(&mut rig).into_iter().map(|(_, verdict)| verdict).collect();
        assert!(matches!(verdicts[..], [Verdict::DeadLetter { .. }, Verdict::Complete]), "{verdicts:?}");
    });
}

#[test]
fn a_panic_is_a_failed_attempt_wherever_it_happens() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }
    in_virtual_time(async {
        let bombs = runner(1, |job: Job| {
            assert!(job.work.seq != 0, "made");
            async move {
                let _bomb = (job.work.seq == 3).then(|| Bomb);
                assert!(job.work.seq != 1, "polled");
                sleep(Duration::from_secs(1)).await;
                assert!(job.work.seq != 2, "woken");
                Ok(())
            }
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(bombs));
        rig.dispatch(rows(None, 0..5));
        sleep(Duration::from_secs(2)).await;
        let mut texts: Vec<_> = results(&mut rig)
            .into_iter()
            .filter_map(|(_, verdict)| match verdict {
                Verdict::Retry { reason: FailureReason::Panic, error, .. } => Some(error),
                _ => None,
            })
            .collect();
        texts.sort();
        let expected = ["dropped", "made", "polled", "woken"].map(|text| format!("handler panicked: {text}"));
        assert_eq!(texts, expected);
        assert_eq!(account(&rig).await.counter("panicked"), 4);
        assert_eq!(account(&rig).await.counter("completed"), 1);
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn used_up_attempts_and_crash_loops_are_dead_lettered_without_being_run() {
    in_virtual_time(async {
        let history = History::default();
        let log = history.clone();
        let noting = runner(1, move |job| {
            log.note(&job, "start");
            async { Err(Failure::retry("no route")) }
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(noting));
        let mut works = rows(None, 0..4);
        works[0].attempts = 10;
        works[1].attempts = 11;
        works[2].crash_count = 4;
        works[3].crash_count = 3;
        let keys: Vec<_> = works.iter().map(|work| work.key).collect();
        rig.dispatch(works);
        quiesce().await;
        let verdicts: HashMap<_, _> = results(&mut rig).into_iter().collect();
        let dead = |at: usize| match &verdicts[&keys[at]] {
            Verdict::DeadLetter { reason, error } => (*reason, error.clone()),
            other => panic!("{other:?}"),
        };
        assert_eq!(dead(0), (FailureReason::MaxAttempts, "no route".to_owned()));
        assert_eq!(dead(1).0, FailureReason::MaxAttempts);
        assert_eq!(dead(2).0, FailureReason::CrashLoop);
        assert!(matches!(verdicts[&keys[3]], Verdict::Retry { .. }));
        assert_eq!(history.started(), [0, 3]);
    });
}

#[test]
fn a_handler_is_told_to_stop_at_its_deadline_and_its_late_result_is_still_offered() {
    in_virtual_time(async {
        let stopped = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&stopped);
        let patient = runner(1, move |job: Job| {
            let log = Arc::clone(&log);
            async move {
                let began = Instant::now();
                job.cancel.cancelled().await;
                log.lock().expect("not poisoned").push(began.elapsed());
                if job.work.seq == 0 { Ok(()) } else { Err(Failure::retry("stopped")) }
            }
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(patient));
        rig.dispatch(rows(None, 0..2));
        sleep(Duration::from_secs(269)).await;
        assert!(stopped.lock().expect("not poisoned").is_empty());
        sleep(Duration::from_secs(2)).await;
        assert_eq!(*stopped.lock().expect("not poisoned"), [Duration::from_secs(270); 2]);
        let verdicts: Vec<_> = results(&mut rig).into_iter().map(|(_, verdict)| verdict).collect();
        assert!(verdicts.contains(&Verdict::Complete));
        let expired = |verdict: &&Verdict| {
            matches!(verdict, Verdict::Retry { reason: FailureReason::LeaseExpired, .. })
        };
        assert_eq!(verdicts.iter().filter(expired).count(), 1);
        let account = account(&rig).await;
        assert_eq!((account.counter("cancelled_at_deadline"), account.counter("late_results")), (2, 2));
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn a_row_whose_deadline_has_passed_is_not_started() {
    in_virtual_time(async {
        let history = History::default();
        let log = history.clone();
        let slow = runner(1, move |job| {
            let log = log.clone();
            async move {
                log.note(&job, "start");
                sleep(Duration::from_secs(200)).await;
                Ok(())
            }
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(slow));
        rig.dispatch(rows(Some(Uuid::now_v7()), 0..4));
        sleep(Duration::from_secs(500)).await;
        assert_eq!(history.started(), [0, 1]);
        assert_eq!(results(&mut rig).len(), 2);
        assert_eq!(account(&rig).await.counter("expired_unstarted"), 2);
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn a_stream_still_running_here_makes_rows_of_a_newer_claim_wait() {
    in_virtual_time(async {
        let history = History::default();
        let log = history.clone();
        let stubborn = runner(1, move |job| {
            let log = log.clone();
            async move {
                log.note(&job, "start");
                sleep(Duration::from_mins(1)).await;
                log.note(&job, "end");
                Ok(())
            }
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(stubborn));
        for stream in [Some(Uuid::now_v7()), None] {
            let first = claimed(1, stream);
            let mut again = first.clone();
            again.epoch = ClaimEpoch(2);
            again.seq = 2;
            rig.dispatch_for(vec![first], Duration::from_secs(10));
            sleep(Duration::from_secs(11)).await;
            rig.dispatch(vec![again]);
            sleep(Duration::from_secs(50)).await;
            results(&mut rig);
            sleep(Duration::from_secs(100)).await;
            let steps: Vec<_> = history.all().iter().map(|(_, seq, what)| (*seq, *what)).collect();
            assert_eq!(steps, [(1, "start"), (1, "end"), (2, "start"), (2, "end")], "{stream:?}");
            history.0.lock().expect("not poisoned").clear();
            results(&mut rig);
        }
        assert_eq!(account(&rig).await.counter("overlapping"), 2);
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn rows_behind_a_stream_that_is_stuck_give_their_permits_back_at_their_deadline() {
    in_virtual_time(async {
        let stuck = runner(1, |_| std::future::pending());
        let mut rig = DispatchRig::start(&Options::default(), inbox(stuck));
        let stream = Some(Uuid::now_v7());
        rig.dispatch(rows(stream, 0..1));
        for _ in 0..20 {
            sleep(Duration::from_mins(5)).await;
            rig.dispatch(rows(stream, 1..101));
        }
        sleep(Duration::from_mins(5)).await;
        results(&mut rig);
        assert_eq!(rig.permits.available_permits(), 999, "only the stuck row holds one");
        assert_eq!(account(&rig).await.counter("expired_unstarted"), 2_000);
    });
}

#[test]
fn a_fence_starts_nothing_new_and_its_end_goes_on_in_order() {
    in_virtual_time(async {
        let history = History::default();
        let log = history.clone();
        let slow = runner(1, move |job| {
            let log = log.clone();
            async move {
                log.note(&job, "start");
                sleep(Duration::from_secs(1)).await;
                Ok(())
            }
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(slow));
        rig.dispatch(rows(Some(Uuid::now_v7()), 0..3));
        quiesce().await;
        rig.addr.send(Fence).await.expect("alive");
        rig.dispatch(rows(None, 10..11));
        sleep(Duration::from_secs(30)).await;
        assert_eq!(history.started(), [0]);
        rig.addr.send(Unfence).await.expect("alive");
        sleep(Duration::from_secs(3)).await;
        let mut ordered = history.started();
        ordered.retain(|seq| *seq < 10);
        assert_eq!(ordered, [0, 1, 2]);
        assert_eq!(results(&mut rig).len(), 4);
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn an_eviction_cancels_every_handler_and_writes_nothing() {
    in_virtual_time(async {
        let waiting = runner(1, |job: Job| async move {
            job.cancel.cancelled().await;
            Ok(())
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(waiting));
        rig.dispatch(rows(Some(Uuid::now_v7()), 0..3));
        rig.dispatch(rows(None, 0..3));
        quiesce().await;
        rig.addr.do_send(Evicted(workpump_actors::instance::InstanceId::fresh()));
        quiesce().await;
        assert!(results(&mut rig).is_empty());
        let account = account(&rig).await;
        assert_eq!((account.counter("discarded_results"), account.counter("abandoned")), (4, 2));
        assert_all_permits_are_back(&rig);
    });
}

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

    fn run(&self, _: Job) -> futures_util::future::BoxFuture<'static, Result<(), Failure>> {
        unreachable!("batches only")
    }

    fn run_batch(
        &self,
        jobs: Vec<Job>,
    ) -> futures_util::future::BoxFuture<'static, Vec<Result<(), Failure>>> {
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
    fn random_handlers_never_break_the_order_of_a_stream(seed in any::<u64>(), batch in 1_usize..2) {
        random_lanes(seed, batch);
    }

    #[test]
    fn random_handlers_never_break_the_order_of_a_stream_in_batches(seed in any::<u64>()) {
        random_lanes(seed, 8);
    }
}
