//! The dispatching actor dies and the next one goes on: rows, results, leases and order are the crew's.

mod common;

use std::time::Duration;

use common::{History, account, assert_all_permits_are_back, done, inbox, results, rows};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use workpump_actors::message::{Dispatch, Drain};
use workpump_actors::options::Options;
use workpump_actors::port::Verdict;
use workpump_actors::runner::Job;
use workpump_actors::testing::{DispatchRig, in_virtual_time, quiesce, runner};
use workpump_actors::work::FailureReason;

/// A dispatcher whose handlers wait until the gate opens.
fn gated(options: &Options) -> (DispatchRig, History, watch::Sender<bool>) {
    let (open, gate) = watch::channel(false);
    let history = History::default();
    let notes = history.clone();
    let handler = runner(1, move |job: Job| {
        let (notes, mut gate) = (notes.clone(), gate.clone());
        async move {
            notes.note(&job, "start");
            let _ = gate.wait_for(|open| *open).await;
            notes.note(&job, "end");
            Ok(())
        }
    });
    (DispatchRig::start(options, inbox(handler)), history, open)
}

#[test]
fn rows_that_run_across_a_restart_are_settled_once_and_in_order() {
    in_virtual_time(async {
        let (mut rig, history, open) = gated(&Options::default());
        let works = rows(Some(Uuid::now_v7()), 0..3);
        let keys: Vec<_> = works.iter().map(|work| work.key).collect();
        rig.dispatch(works);
        rig.dispatch(rows(None, 10..12));
        quiesce().await;
        rig.restart().await;
        quiesce().await;
        assert_eq!(history.started(), [0, 10, 11], "nothing starts twice, and nothing before its turn");
        open.send_replace(true);
        quiesce().await;
        let results = results(&mut rig);
        assert_eq!(results.len(), 5);
        assert!(results.iter().all(|(_, verdict)| *verdict == Verdict::Complete));
        let ordered: Vec<_> = results.iter().map(|(key, _)| *key).filter(|key| keys.contains(key)).collect();
        assert_eq!(ordered, keys);
        let of_stream: Vec<_> = history.all().into_iter().filter(|(.., seq, _)| *seq < 10).collect();
        let steps: Vec<_> = of_stream.iter().map(|(_, seq, what)| (*seq, *what)).collect();
        assert_eq!(steps, [(0, "start"), (0, "end"), (1, "start"), (1, "end"), (2, "start"), (2, "end")]);
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn a_row_claimed_after_a_restart_waits_behind_the_row_of_its_stream_that_still_runs() {
    in_virtual_time(async {
        let (mut rig, history, open) = gated(&Options::default());
        let stream = Some(Uuid::now_v7());
        rig.dispatch(rows(stream, 0..1));
        quiesce().await;
        rig.restart().await;
        rig.dispatch(rows(stream, 1..2));
        quiesce().await;
        assert_eq!(history.started(), [0]);
        open.send_replace(true);
        quiesce().await;
        let steps: Vec<_> = history.all().into_iter().map(|(_, seq, what)| (seq, what)).collect();
        assert_eq!(steps, [(0, "start"), (0, "end"), (1, "start"), (1, "end")]);
        assert_eq!(results(&mut rig).len(), 2);
    });
}

#[test]
fn results_that_come_while_no_dispatcher_lives_are_passed_on_by_the_next() {
    in_virtual_time(async {
        let (mut rig, _, open) = gated(&Options::default());
        rig.dispatch(rows(None, 0..100));
        quiesce().await;
        rig.end().await;
        open.send_replace(true);
        quiesce().await;
        assert!(results(&mut rig).is_empty());
        rig.restart().await;
        quiesce().await;
        assert_eq!(results(&mut rig).len(), 100);
        assert_all_permits_are_back(&rig);
        rig.dispatch(rows(None, 100..101));
        quiesce().await;
        assert_eq!(results(&mut rig).len(), 1, "the bell rings for the new one");
        assert_eq!(account(&rig).await.counter("results"), 101);
    });
}

#[test]
fn deadlines_of_rows_dispatched_before_a_restart_are_enforced_after_it() {
    in_virtual_time(async {
        let obedient = runner(1, |job: Job| async move {
            job.cancel.cancelled().await;
            Err(workpump_actors::runner::Failure::retry("told to stop"))
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(obedient));
        rig.dispatch_for(rows(None, 0..1), Duration::from_secs(100));
        sleep(Duration::from_secs(10)).await;
        rig.restart().await;
        let before = Instant::now();
        let mut settled = rig.settle.next().await.settlements;
        assert_eq!(before.elapsed(), Duration::from_secs(80));
        let verdict = settled.remove(0).verdict().clone();
        assert!(matches!(verdict, Verdict::Retry { reason: FailureReason::LeaseExpired, .. }), "{verdict:?}");
        assert_eq!(account(&rig).await.counter("cancelled_at_deadline"), 1);
    });
}

#[test]
fn a_handler_that_was_told_to_stop_before_a_restart_is_ended_with_its_lease_after_it() {
    in_virtual_time(async {
        let mut rig = DispatchRig::start(&Options::default(), inbox(runner(1, |_| std::future::pending())));
        rig.dispatch_for(rows(Some(Uuid::now_v7()), 0..2), Duration::from_secs(100));
        sleep(Duration::from_secs(95)).await;
        rig.restart().await;
        sleep(Duration::from_secs(6)).await;
        assert_eq!(account(&rig).await.counter("aborted_at_lease_end"), 1);
        results(&mut rig);
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn what_came_due_while_no_dispatcher_lived_is_enforced_by_the_next_at_once() {
    in_virtual_time(async {
        let mut rig = DispatchRig::start(&Options::default(), inbox(runner(1, |_| std::future::pending())));
        rig.dispatch_for(rows(None, 0..1), Duration::from_secs(100));
        quiesce().await;
        rig.end().await;
        sleep(Duration::from_secs(200)).await;
        assert!(!rig.in_flight.is_empty());
        rig.restart().await;
        sleep(Duration::from_millis(1)).await;
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn a_restarted_dispatcher_starts_nothing_while_the_instance_is_fenced() {
    in_virtual_time(async {
        let (mut rig, history, _open) = gated(&Options::default());
        // The one that was to hear it died of it.
        rig.standing.fence();
        rig.restart().await;
        rig.dispatch(rows(None, 0..2));
        quiesce().await;
        rig.restart().await;
        quiesce().await;
        assert!(history.started().is_empty());
        assert_eq!(account(&rig).await.state, "fenced");
        rig.unfence();
        quiesce().await;
        assert_eq!(history.started(), [0, 1]);
    });
}

#[test]
fn an_unfence_that_is_outdated_when_it_is_heard_starts_nothing() {
    in_virtual_time(async {
        let (rig, history, _open) = gated(&Options::default());
        rig.fence();
        rig.addr.do_send(workpump_actors::message::Unfence);
        rig.dispatch(rows(None, 0..1));
        quiesce().await;
        assert!(history.started().is_empty());
    });
}

#[test]
fn a_dispatcher_made_after_an_eviction_tells_what_runs_to_stop_and_passes_nothing_on() {
    in_virtual_time(async {
        let obedient = runner(1, |job: Job| async move {
            job.cancel.cancelled().await;
            Ok(())
        });
        let mut rig = DispatchRig::start(&Options::default(), inbox(obedient));
        rig.dispatch(rows(None, 0..3));
        quiesce().await;
        rig.standing.evict();
        rig.restart().await;
        quiesce().await;
        assert!(results(&mut rig).is_empty());
        assert_all_permits_are_back(&rig);
        assert_eq!(account(&rig).await.state, "stopped");
    });
}

#[test]
fn a_drain_asked_for_again_goes_on_with_the_same_deadline_and_gives_the_whole_account() {
    in_virtual_time(async {
        let mut options = Options::default();
        options.dispatch.drain_deadline_seconds = 30;
        let (mut rig, _, open) = gated(&options);
        rig.dispatch(rows(Some(Uuid::now_v7()), 0..3));
        rig.dispatch(rows(None, 10..11));
        quiesce().await;
        let first = rig.addr.send(Drain);
        let first = tokio::task::spawn_local(first);
        sleep(Duration::from_secs(10)).await;
        rig.restart().await;
        assert!(first.await.expect("not aborted").is_err(), "whoever asked learns of the death");
        open.send_replace(true);
        quiesce().await;
        let report = rig.addr.send(Drain).await.expect("alive");
        assert_eq!((report.released, report.finished, report.abandoned), (2, 2, 0));
        assert_eq!(results(&mut rig).len(), 4);
        assert_all_permits_are_back(&rig);
    });
}

#[test]
fn a_drain_asked_for_again_does_not_wait_longer_than_the_first() {
    in_virtual_time(async {
        let mut options = Options::default();
        options.dispatch.drain_deadline_seconds = 30;
        let (mut rig, history, _open) = gated(&options);
        rig.dispatch(rows(None, 0..1));
        quiesce().await;
        let before = Instant::now();
        let first = tokio::task::spawn_local(rig.addr.send(Drain));
        sleep(Duration::from_secs(10)).await;
        rig.restart().await;
        rig.dispatch(rows(None, 1..2));
        assert!(first.await.expect("not aborted").is_err());
        let report = rig.addr.send(Drain).await.expect("alive");
        assert_eq!(before.elapsed(), Duration::from_secs(30));
        assert_eq!((report.released, report.abandoned), (1, 1));
        assert_eq!(history.started(), [0], "a drained dispatcher starts nothing, also after a restart");
    });
}

#[test]
fn rows_in_a_message_that_died_with_the_actor_are_held_by_nobody_and_others_go_on() {
    in_virtual_time(async {
        let mut rig = DispatchRig::start(&Options::default(), inbox(done()));
        rig.end().await;
        let works = rows(Some(Uuid::now_v7()), 0..2);
        let deliveries = workpump_actors::testing::deliver(
            works,
            &rig.permits,
            &rig.in_flight,
            Duration::from_mins(5),
            Duration::from_secs(30),
        );
        rig.addr.do_send(Dispatch { deliveries });
        assert_all_permits_are_back(&rig);
        rig.restart().await;
        rig.dispatch(rows(None, 2..3));
        quiesce().await;
        assert_eq!(results(&mut rig).len(), 1);
    });
}
