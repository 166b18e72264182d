//! Running rows against their leases: what is told to stop, handed back, aborted or dropped, and when.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{History, account, assert_all_permits_are_back, done, inbox, results, rows};
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use workpump_actors::message::Dispatch;
use workpump_actors::options::Options;
use workpump_actors::port::Verdict;
use workpump_actors::runner::{Failure, Job};
use workpump_actors::testing::{DispatchRig, deliver, in_virtual_time, quiesce, runner};
use workpump_actors::work::FailureReason;

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
fn a_row_whose_deadline_has_passed_is_handed_back_unstarted() {
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
        sleep(Duration::from_secs(271)).await;
        let verdicts: Vec<_> = results(&mut rig).into_iter().map(|(_, verdict)| verdict).collect();
        assert_eq!(verdicts, [Verdict::Complete, Verdict::Release, Verdict::Release]);
        sleep(Duration::from_secs(229)).await;
        assert_eq!(history.started(), [0, 1]);
        let account = account(&rig).await;
        assert_eq!((account.counter("late_unstarted"), account.counter("expired_unstarted")), (2, 0));
        results(&mut rig);
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn rows_behind_a_handler_that_ignores_its_cancellation_are_handed_back_at_their_deadline() {
    in_virtual_time(async {
        for max_batch in [1, 2] {
            let stuck = runner(max_batch, |_| std::future::pending());
            let mut rig = DispatchRig::start(&Options::default(), inbox(stuck));
            rig.dispatch(rows(Some(Uuid::now_v7()), 0..max_batch as i64 + 3));
            sleep(Duration::from_secs(269)).await;
            assert!(results(&mut rig).is_empty());
            sleep(Duration::from_secs(2)).await;
            let verdicts: Vec<_> = results(&mut rig).into_iter().map(|(_, verdict)| verdict).collect();
            assert_eq!(verdicts, [Verdict::Release, Verdict::Release, Verdict::Release]);
        }
    });
}

#[test]
fn a_handler_that_still_waits_when_its_lease_has_ended_is_aborted() {
    in_virtual_time(async {
        for max_batch in [1, 2] {
            let stuck = runner(max_batch, |job: Job| async move {
                if job.work.seq < 2 {
                    std::future::pending::<()>().await;
                }
                Ok(())
            });
            let mut rig = DispatchRig::start(&Options::default(), inbox(stuck));
            let stream = Some(Uuid::now_v7());
            rig.dispatch(rows(stream, 0..1));
            rig.dispatch(rows(None, 1..2));
            sleep(Duration::from_secs(299)).await;
            rig.dispatch(rows(stream, 2..3));
            assert_eq!(rig.permits.available_permits(), 2_000 - 3);
            sleep(Duration::from_secs(2)).await;
            let verdicts: Vec<_> = results(&mut rig).into_iter().map(|(_, verdict)| verdict).collect();
            assert_eq!(verdicts, [Verdict::Complete], "the lane is free again");
            let account = account(&rig).await;
            assert_eq!((account.counter("aborted_at_lease_end"), account.counter("in_hand")), (2, 0));
            assert_all_permits_are_back(&rig);
        }
    });
}

#[test]
fn a_row_whose_lease_has_ended_unstarted_is_dropped() {
    in_virtual_time(async {
        let mut rig = DispatchRig::start(&Options::default(), inbox(done()));
        let lease = Duration::from_secs(10);
        let deliveries = deliver(rows(None, 0..2), &rig.permits, &rig.in_flight, lease, lease / 10);
        sleep(lease).await;
        rig.addr.do_send(Dispatch { deliveries });
        quiesce().await;
        assert!(results(&mut rig).is_empty(), "the database has taken it back by itself");
        assert_eq!(account(&rig).await.counter("expired_unstarted"), 2);
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn rows_behind_a_stream_that_is_stuck_give_their_permits_back_at_their_deadline() {
    in_virtual_time(async {
        let stuck = runner(1, |_| std::future::pending());
        let mut rig = DispatchRig::start(&Options::default(), inbox(stuck));
        let stream = Some(Uuid::now_v7());
        rig.dispatch_for(rows(stream, 0..1), Duration::from_hours(3));
        for _ in 0..20 {
            sleep(Duration::from_mins(5)).await;
            results(&mut rig);
            rig.dispatch(rows(stream, 1..101));
        }
        sleep(Duration::from_mins(5)).await;
        results(&mut rig);
        assert_eq!(rig.permits.available_permits(), 2_000 - 1, "only the stuck row holds one");
        assert_eq!(account(&rig).await.counter("late_unstarted"), 2_000);
    });
}
