//! Several instances: who is woken, who passes on, and what happens when a sleeper dies.

use std::time::Duration;

use tokio::sync::mpsc::unbounded_channel;
use tokio::time::{Instant, sleep, timeout};
use workpump::WorkPump;

use crate::common::{self, Bouncer, server_with};
use crate::fleet::{Relay, To, declared};
use crate::rig::{
    Asleep, Run, asleep, assign, claimer, next, one_at_a_time, pump, signals_only, started, store,
};
use crate::sql::{beat, run, stream, until, value};

/// The claim statements of all of them so far.
async fn claims(pumps: &[WorkPump]) -> u64 {
    let mut claims = 0;
    for pump in pumps {
        claims += claimer(pump).await.counter("claims");
    }
    claims
}

#[tokio::test]
async fn of_twenty_sleepers_one_is_woken_by_a_row() {
    let server = server_with(&[("max_connections", "300")]);
    let db = server.database().await;
    let client = db.connect().await;
    let (tell, mut telling) = unbounded_channel();
    let run_telling = Run::telling(tell);
    let mut options = signals_only();
    options.liveness.death_watch = false;
    let mut pumps = Vec::new();
    for _ in 0..20 {
        pumps.push(pump(db.url(), options.clone(), &run_telling).await);
    }
    for pump in &pumps {
        asleep(pump).await;
    }
    // Joining rang the others; whoever heard it late has looked by now.
    sleep(Duration::from_secs(1)).await;
    for of in [None, Some(stream(1)), None, Some(stream(2)), Some(stream(1))] {
        let before = claims(&pumps).await;
        let id = store(&client, of, "").await;
        assert_eq!(next(&mut telling).await.id, id);
        sleep(Duration::from_secs(5)).await;
        let sent = claims(&pumps).await - before;
        println!("one row, stream {of:?}: {sent} claims of twenty instances in 5 s");
        assert!(sent <= 3, "{sent}");
    }
    for pump in pumps {
        pump.drain().await;
    }
}

#[tokio::test]
async fn a_full_instance_passes_the_ring_to_a_sleeper() {
    let (tell, telling) = unbounded_channel();
    let (go, gate) = tokio::sync::watch::channel(false);
    let run_gated = Run::new(move |job| {
        let (tell, mut gate) = (tell.clone(), gate.clone());
        async move {
            started(&tell, &job);
            if job.work.message_type.as_deref() == Some("stays") {
                let _ = gate.wait_for(|open| *open).await;
            }
            Ok(())
        }
    });
    let mut it = Asleep::running(one_at_a_time(), &run_gated, telling).await;
    let (full, stays) = (it.pump.instance_id(), stream(1));
    assign(&it.client, stays, full).await;
    run(
        &it.client,
        &format!("insert into wh_outbox (stream_id, message_type, payload) values ('{stays}', 'stays', '1')"),
    )
    .await;
    assert_eq!(it.next().await.by, full);
    let other = pump(it.db.url(), signals_only(), &run_gated).await;
    asleep(&other).await;
    let mut waits = Vec::new();
    for n in 2..12 {
        assign(&it.client, stream(n), full).await;
        let id = store(&it.client, Some(stream(n)), "").await;
        let stored = Instant::now();
        let taken = it.next().await;
        assert_eq!((taken.id, taken.by), (id, other.instance_id()), "whose it is has no room");
        waits.push(taken.at.saturating_duration_since(stored));
        asleep(&other).await;
    }
    println!("passed on to a sleeper: {waits:.1?}");
    // In the moment in which it fills up nobody is armed as full yet: what comes then is passed on once it is.
    go.send(true).expect("a handler waits");
    until(&it.client, "select count(*) = 0 from wh_outbox").await;
    other.drain().await;
    it.pump.drain().await;
}

#[tokio::test]
async fn a_paused_instance_passes_the_ring_to_a_sleeper() {
    let mut it = Asleep::new(signals_only()).await;
    let (tell, mut telling) = unbounded_channel();
    let other = pump(it.db.url(), signals_only(), &Run::telling(tell)).await;
    asleep(&other).await;
    let pause = it.pump.registry().recipient::<workpump::engine::message::Pause>().expect("somebody claims");
    pause.send(workpump::engine::message::Pause).await.expect("it lives");
    assign(&it.client, stream(1), it.pump.instance_id()).await;
    let id = store(&it.client, Some(stream(1)), "").await;
    assert_eq!(next(&mut telling).await.id, id);
    assert!(it.telling.try_recv().is_err());
    other.drain().await;
    it.pump.drain().await;
}

#[tokio::test]
async fn two_full_instances_do_not_ring_each_other() {
    let (tell, telling) = unbounded_channel();
    let (go, gate) = tokio::sync::watch::channel(false);
    let run_gated = Run::new(move |job| {
        let (tell, mut gate) = (tell.clone(), gate.clone());
        async move {
            started(&tell, &job);
            let _ = gate.wait_for(|open| *open).await;
            Ok(())
        }
    });
    // With the poll, so that nothing is passed on but rings.
    let mut options = one_at_a_time();
    options.claim.enable_safety_net_poll = true;
    let mut it = Asleep::running(options.clone(), &run_gated, telling).await;
    let other = pump(it.db.url(), options, &run_gated).await;
    for n in 1..=3 {
        store(&it.client, Some(stream(n)), "").await;
    }
    for _ in 0..2 {
        it.next().await;
    }
    sleep(Duration::from_secs(1)).await;
    let passed = async || {
        claimer(&it.pump).await.counter("passed_rings") + claimer(&other).await.counter("passed_rings")
    };
    let before = passed().await;
    for n in 1..=3 {
        store(&it.client, Some(stream(n)), "").await;
    }
    sleep(Duration::from_secs(2)).await;
    let after = passed().await - before;
    assert!((1..=6).contains(&after), "one for each ring at most, {after} came");
    go.send_replace(true);
    until(&it.client, "select count(*) = 0 from wh_outbox").await;
    other.drain().await;
    it.pump.drain().await;
}

#[tokio::test]
async fn what_was_stored_for_a_sleeper_that_was_killed_is_taken_when_it_is_evicted() {
    let mut it = Asleep::new(signals_only()).await;
    let quiet = [("WORKPUMP_CLAIM_ENABLE_SAFETY_NET_POLL", "false")];
    let mut victim = Relay::start(&it.client, it.db.url(), To::Nowhere, &quiet).await;
    let armed = |wanted: bool| {
        let held = format!("select 1 from wh_held_keys() h where h.key = wh_arm_key('{}')", victim.id);
        format!("select {wanted} = exists ({held})")
    };
    until(&it.client, &armed(true)).await;
    declared(&it.client, &[&victim]).await;
    // Each watches the other: without that its death is noticed 30 s later.
    let watching = "select count(*) = 2 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' \
                    and query like 'CALL%wh_watch%'";
    until(&it.client, watching).await;
    asleep(&it.pump).await;
    let (free, dead) = (armed(false), victim.id);
    victim.kill();
    // From now on producers take it for awake.
    until(&it.client, &free).await;
    let mut stored = Vec::new();
    for n in 1..=5 {
        assign(&it.client, stream(n), dead).await;
        stored.push(store(&it.client, Some(stream(n)), "").await);
    }
    let since = Instant::now();
    while !stored.is_empty() {
        // The grace, and what a busy machine adds.
        let started = timeout(Duration::from_mins(1), it.telling.recv()).await;
        let started = started.expect("taken over").expect("the pump lives");
        stored.retain(|id| *id != started.id);
    }
    println!("stored for a dead sleeper: taken after {:.1?}", since.elapsed());
    assert!(!beat(&it.client, dead).await, "it was evicted");
    it.pump.drain().await;
}

/// PgBouncer refuses start-up options, or is told to swallow them.
#[tokio::test]
async fn behind_a_pooler_nobody_arms_and_everybody_polls() {
    for settings in ["", "ignore_startup_parameters = options"] {
        let server = &common::shared().postgres;
        let Some(bouncer) = Bouncer::with_settings(server, 4, settings).await else { return };
        let db = common::database().await;
        let client = db.connect().await;
        let (tell, mut telling) = unbounded_channel();
        let pump = pump(&bouncer.url(db.name()), signals_only(), &Run::telling(tell)).await;
        let armed = format!(
            "select count(*) from wh_held_keys() h where h.key = wh_arm_key('{}')",
            pump.instance_id()
        );
        for _ in 0..5 {
            // Only the database knows of it: whoever believed to be armed would sleep through it.
            let id = store(&client, None, "").await;
            assert_eq!(next(&mut telling).await.id, id);
            assert_eq!(value::<i64>(&client, &armed).await, 0);
        }
        let claimer = claimer(&pump).await;
        assert_eq!((claimer.counter("arms"), claimer.counter("armed")), (0, 0));
        assert_ne!(pump.gate().gate, workpump::engine::instance::Gate::Available);
        pump.drain().await;
    }
}
