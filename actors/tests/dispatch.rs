//! Running rows: order inside a stream, concurrency across streams, and what failures, panics and deadlines do.

mod common;

use std::collections::HashMap;
use std::time::Duration;

use common::{History, account, assert_all_permits_are_back, done, inbox, results, rows};
use tokio::time::sleep;
use uuid::Uuid;
use workpump_actors::message::Evicted;
use workpump_actors::options::{OnFailure, Options};
use workpump_actors::port::Verdict;
use workpump_actors::runner::{Failure, Job};
use workpump_actors::testing::{DispatchRig, claimed, in_virtual_time, quiesce, runner};
use workpump_actors::work::{ClaimEpoch, FailureReason};

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
fn a_panic_whose_payload_panics_when_it_is_dropped_is_a_failed_attempt_too() {
    struct Payload;
    impl Drop for Payload {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }
    in_virtual_time(async {
        let bombs = runner(1, |job: Job| {
            if job.work.seq == 0 {
                std::panic::panic_any(Payload);
            }
            async { std::panic::panic_any(Payload) }
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(bombs));
        rig.dispatch(rows(None, 0..2));
        quiesce().await;
        assert_eq!(results(&mut rig).len(), 2);
        assert_all_permits_are_back(&rig);
        assert_eq!(account(&rig).await.counter("in_hand"), 0);
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
            rig.dispatch_for(vec![first], Duration::from_mins(5));
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
        rig.fence();
        rig.dispatch(rows(None, 10..11));
        sleep(Duration::from_secs(30)).await;
        assert_eq!(history.started(), [0]);
        rig.unfence();
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
        rig.addr.do_send(Evicted(rig.instance));
        quiesce().await;
        assert!(results(&mut rig).is_empty());
        let account = account(&rig).await;
        assert_eq!((account.counter("discarded_results"), account.counter("abandoned")), (4, 2));
        assert_all_permits_are_back(&rig);
    });
}
