//! Rows that come free without being stored: nobody rings for them, and nobody polls.

use std::time::Duration;

use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::watch;
use uuid::Uuid;
use workpump::{Failure, OnFailure, Options};

use crate::rig::{Asleep, Run, asleep, signals_only, started};
use crate::sql::{run, stream, until, value};

/// Tells of each row, and ends one of type `first` as the test wants it, once it says so.
fn gated(
    tell: tokio::sync::mpsc::UnboundedSender<crate::rig::Started>,
    gate: watch::Receiver<bool>,
    first: fn(u32) -> Result<(), Failure>,
) -> Run {
    Run::new(move |job| {
        let (tell, mut gate) = (tell.clone(), gate.clone());
        async move {
            started(&tell, &job);
            if job.work.message_type.as_deref() != Some("first") {
                return Ok(());
            }
            // The test may be over.
            let _ = gate.wait_for(|open| *open).await;
            first(job.work.attempts)
        }
    })
}

async fn insert(it: &Asleep, of: Uuid, kind: &str) {
    let sql =
        format!("insert into wh_outbox (stream_id, message_type, payload) values ('{of}', '{kind}', '1')");
    run(&it.client, &sql).await;
}

/// The next row of a stream was stored, and has rung in vain, while the first one ran: it starts however that one ends.
async fn starts_behind(options: Options, first: fn(u32) -> Result<(), Failure>, attempts: u32) {
    let (tell, telling) = unbounded_channel();
    let (go, gate) = watch::channel(false);
    let mut it = Asleep::running(options, &gated(tell, gate, first), telling).await;
    insert(&it, stream(1), "first").await;
    it.next().await;
    asleep(&it.pump).await;
    insert(&it, stream(1), "second").await;
    // It is found blocked, and the pump sleeps again.
    tokio::time::sleep(Duration::from_millis(100)).await;
    asleep(&it.pump).await;
    go.send_replace(true);
    for attempt in 2..=attempts {
        assert_eq!(it.next().await.attempts, attempt, "the first one again");
    }
    let second = it.next().await;
    assert_eq!(second.attempts, 1, "the second one");
    until(&it.client, "select count(*) = 0 from wh_outbox").await;
    it.pump.drain().await;
}

#[tokio::test]
async fn what_waits_behind_a_row_that_is_given_up_starts_when_that_is_written() {
    starts_behind(signals_only(), |_| Err(Failure::permanent("no")), 1).await;
}

#[tokio::test]
async fn what_waits_behind_a_row_that_is_skipped_starts_when_that_is_written() {
    let mut options = signals_only();
    options.dispatch.on_failure.outbox = OnFailure::Skip;
    starts_behind(options, |_| Err(Failure::retry("no")), 1).await;
}

#[tokio::test]
async fn what_waits_behind_a_row_that_is_tried_again_starts_after_that() {
    let first = |attempts| match attempts {
        1 | 2 => Err(Failure::retry_after(Duration::from_millis(300), "not yet")),
        _ => Ok(()),
    };
    starts_behind(signals_only(), first, 3).await;
}

/// A handler that began while nobody could be rung, since the session was lost: what it blocks has to be looked for all the same.
#[tokio::test]
async fn what_waits_behind_a_row_that_was_claimed_during_an_outage_of_the_session_starts_when_that_is_written()
 {
    let (tell, telling) = unbounded_channel();
    let (go, gate) = watch::channel(false);
    let mut it = Asleep::running(signals_only(), &gated(tell, gate, |_| Ok(())), telling).await;
    for round in 1..=5_u128 {
        let end = "select count(pg_terminate_backend(pid, 5000)) from pg_stat_activity \
                   where pid <> pg_backend_pid() and datname = current_database()";
        let ended: i64 = value(&it.client, end).await;
        assert!(ended > 0);
        insert(&it, stream(round), "first").await;
        it.next().await;
        asleep(&it.pump).await;
        insert(&it, stream(round), "second").await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        asleep(&it.pump).await;
        go.send_replace(true);
        it.next().await;
        until(&it.client, "select count(*) = 0 from wh_outbox").await;
        go.send_replace(false);
    }
    it.pump.drain().await;
}
