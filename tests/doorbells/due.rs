//! What comes due while nobody polls: schedules, leases of peers, retries.

use std::time::Duration;

use tokio::sync::mpsc::unbounded_channel;
use tokio::time::Instant;
use uuid::Uuid;
use workpump::{Failure, Options};

use crate::rig::{Asleep, Run, asleep, assign, next, one_at_a_time, pump, signals_only, started, store};
use crate::sql::{beat, instance, run, stream, value};

/// How late the issue allows; a busy machine gets another try, not another bound.
const BOUND: Duration = Duration::from_secs(1);
const TRIES: usize = 5;

/// Says how late each try was, and asks that one of them was in time. Whatever is not known to the sleeper at all is 150 s late.
fn in_time(what: &str, late: &[Duration]) -> bool {
    println!("{what}: late by {late:.0?}");
    late.last().is_some_and(|late| *late <= BOUND)
}

/// Short leases, so that a foreign one ends while the test runs.
fn short_leases() -> Options {
    let mut options = signals_only();
    options.claim.lease_seconds = 4;
    options.lease_renewal.lease_grace_seconds = 1;
    options
}

#[tokio::test]
async fn a_row_that_is_stored_for_later_wakes_a_sleeper_when_it_is_due() {
    let mut it = Asleep::new(signals_only()).await;
    let mut late = Vec::new();
    for try_ in 0..TRIES as u128 {
        let of = [None, Some(stream(try_))][try_ as usize % 2];
        let due = Instant::now() + Duration::from_secs(2);
        let when: String = value(&it.client, "select (clock_timestamp() + interval '2 s')::text").await;
        let id = store(&it.client, of, &format!(r#", "scheduled_for": "{when}""#)).await;
        let started = it.next().await;
        assert_eq!((started.id, started.attempts), (id, 1));
        late.push(started.at.saturating_duration_since(due));
        if in_time("scheduled", &late) && try_ > 0 {
            it.pump.drain().await;
            return;
        }
    }
    panic!("too late: {late:?}");
}

#[tokio::test]
async fn a_row_for_the_end_of_time_keeps_nobody_from_sleeping() {
    let mut it = Asleep::new(signals_only()).await;
    store(&it.client, None, r#", "scheduled_for": "infinity""#).await;
    asleep(&it.pump).await;
    let id = store(&it.client, None, "").await;
    assert_eq!(it.next().await.id, id);
    asleep(&it.pump).await;
    let claimer = crate::rig::claimer(&it.pump).await;
    assert_eq!(claimer.last_error, None);
    it.pump.drain().await;
}

#[tokio::test]
async fn a_lease_that_a_peer_takes_while_it_sleeps_and_lets_end_wakes_it() {
    let mut late = Vec::new();
    for _ in 0..TRIES {
        let mut it = Asleep::new(short_leases()).await;
        // A member that takes the row before the pump can: it is stored for later and made due by its claim.
        let peer = it.db.connect().await;
        assert!(beat(&peer, instance(1)).await);
        let id = Uuid::now_v7();
        run(&peer, &format!(
            "set workpump.skip_doorbells = on; begin; \
             insert into wh_outbox (message_id, message_type, payload) values ('{id}', 't', '1'); \
             update wh_outbox set instance_id = '{}', lease_expiry = clock_timestamp() + interval '4 s', claim_epoch = 1, attempts = 1; commit",
            instance(1)
        ))
        .await;
        let ends = Instant::now() + Duration::from_secs(4);
        let started = it.next().await;
        assert_eq!((started.id, started.attempts), (id, 2));
        late.push(started.at.saturating_duration_since(ends));
        it.pump.drain().await;
        if in_time("a peer's lease", &late) {
            return;
        }
    }
    panic!("too late: {late:?}");
}

#[tokio::test]
async fn a_row_that_fails_is_tried_again_when_its_time_has_come() {
    let (tell, telling) = unbounded_channel();
    let run_failing = Run::new(move |job| {
        started(&tell, &job);
        let first = job.work.attempts == 1;
        std::future::ready(if first {
            Err(Failure::retry_after(Duration::from_secs(2), "not yet"))
        } else {
            Ok(())
        })
    });
    let mut it = Asleep::running(signals_only(), &run_failing, telling).await;
    let mut late = Vec::new();
    for try_ in 0..TRIES as u128 {
        let id = store(&it.client, Some(stream(try_)), "").await;
        let due = it.next().await.at + Duration::from_secs(2);
        let again = it.next().await;
        assert_eq!((again.id, again.attempts), (id, 2));
        // Counted from the failure; it is written a few milliseconds later.
        late.push(again.at.saturating_duration_since(due));
        if in_time("a retry of its own", &late) {
            it.pump.drain().await;
            return;
        }
    }
    panic!("too late: {late:?}");
}

/// The peer has written the retry after the other fell asleep, and is busy when it is due.
#[tokio::test]
async fn a_retry_of_a_busy_peer_wakes_a_sleeper_when_it_is_due() {
    let (tell, telling) = unbounded_channel();
    let (go, gate) = tokio::sync::watch::channel(0_usize);
    let run_mixed = Run::new(move |job| {
        let (tell, mut gate) = (tell.clone(), gate.clone());
        async move {
            started(&tell, &job);
            match (job.work.message_type.as_deref(), job.work.attempts) {
                (Some("fails"), 1) => Err(Failure::retry_after(Duration::from_secs(2), "not yet")),
                (Some("stays"), _) => {
                    let before = *gate.borrow_and_update();
                    let _ = gate.wait_for(|now| *now > before).await;
                    Ok(())
                }
                _ => Ok(()),
            }
        }
    });
    let mut it = Asleep::running(one_at_a_time(), &run_mixed, telling).await;
    let other = pump(it.db.url(), signals_only(), &run_mixed).await;
    asleep(&other).await;
    let busy = it.pump.instance_id();
    let mut late = Vec::new();
    for try_ in 0..TRIES as u128 {
        for (kind, of) in [("fails", stream(2 * try_)), ("stays", stream(2 * try_ + 1))] {
            assign(&it.client, of, busy).await;
            run(
                &it.client,
                &format!(
                    "insert into wh_outbox (stream_id, message_type, payload) values ('{of}', '{kind}', '1')"
                ),
            )
            .await;
            let taken = next(&mut it.telling).await;
            if kind == "fails" {
                crate::sql::until(&it.client, "select bool_or(failure_reason is not null) from wh_outbox")
                    .await;
            }
            assert!(taken.by == busy || kind == "stays", "{taken:?}");
        }
        let due = Instant::now() + Duration::from_secs(2);
        let again = next(&mut it.telling).await;
        assert_eq!(again.attempts, 2);
        late.push(again.at.saturating_duration_since(due));
        go.send_modify(|round| *round += 1);
        crate::sql::until(&it.client, "select count(*) = 0 from wh_outbox").await;
        if in_time("a peer's retry", &late) {
            other.drain().await;
            it.pump.drain().await;
            return;
        }
        asleep(&other).await;
        asleep(&it.pump).await;
    }
    panic!("too late: {late:?}");
}
