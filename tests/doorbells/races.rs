//! No wake is lost: producers whose transactions overlap everything, while nobody polls.

use std::collections::HashMap;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::common::{self, scale};
use crate::rig::{Asleep, LATE, Run, Started, asleep, pump, quantile, signals_only, started, store};
use crate::sql::{run, stream};

const LEVELS: [&str; 3] = ["read committed", "repeatable read", "serializable"];
const PRODUCERS: usize = 12;

/// One row of any category, by the store function or by a plain insert.
fn insert(rng: &mut StdRng, id: Uuid) -> String {
    let of = stream(rng.random_range(1..=6));
    match rng.random_range(0..7) {
        0 => format!(
            r#"select store_outbox_messages('[{{"message_id": "{id}", "message_type": "t", "payload": 1, "stream_id": "{of}"}}]')"#
        ),
        1 => format!(
            r#"select store_outbox_messages('[{{"message_id": "{id}", "message_type": "t", "payload": 1}}]')"#
        ),
        2 => format!(
            r#"select store_inbox_messages('[{{"message_id": "{id}", "message_type": "t", "payload": 1, "stream_id": "{of}"}}]')"#
        ),
        3 => format!(
            "insert into wh_outbox (message_id, stream_id, message_type, payload) values ('{id}', '{of}', 't', '1')"
        ),
        4 => format!("insert into wh_inbox (message_id, message_type, payload) values ('{id}', 't', '1')"),
        5 => format!(
            "insert into wh_perspective_events (event_work_id, stream_id, perspective_name, event_id) values ('{id}', '{of}', 'p', gen_random_uuid())"
        ),
        _ => format!(
            "insert into wh_receptor_processing (id, stream_id, receptor_name, event_id) values ('{id}', '{of}', 'r', gen_random_uuid())"
        ),
    }
}

/// One transaction of random shape. The rows that are there after it, if any.
async fn produce(client: &Client, mut rng: StdRng) -> Vec<Uuid> {
    let mut kept = Vec::new();
    run(client, &format!("begin isolation level {}", LEVELS[rng.random_range(0..3)])).await;
    for _ in 0..rng.random_range(1..=3) {
        let id = Uuid::now_v7();
        let savepoint = rng.random_bool(0.3);
        if savepoint {
            run(client, "savepoint s").await;
        }
        run(client, &insert(&mut rng, id)).await;
        if savepoint && rng.random_bool(0.5) {
            run(client, "rollback to s").await;
        } else {
            kept.push(id);
        }
        // Open for a while: nothing, less than a linger, or many of them.
        let open = [0, 500, 3_000, 30_000][rng.random_range(0..4)];
        if open > 0 {
            sleep(Duration::from_micros(rng.random_range(0..open))).await;
        }
    }
    if rng.random_bool(0.2) {
        run(client, "rollback").await;
        kept.clear();
    } else if client.batch_execute("commit").await.is_err() {
        // Serialization failures are the producer's affair; nothing was stored.
        run(client, "rollback").await;
        kept.clear();
    }
    kept
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wake_is_lost_whatever_overlaps() {
    let seed: u64 = std::env::var("WORKPUMP_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed} (WORKPUMP_TEST_SEED)");
    let mut rng = StdRng::seed_from_u64(seed);
    let db = common::database().await;
    let (tell, mut telling) = unbounded_channel();
    let run = Run::telling(tell);
    let pumps = [pump(db.url(), signals_only(), &run).await, pump(db.url(), signals_only(), &run).await];
    let mut producers = Vec::new();
    for _ in 0..PRODUCERS {
        producers.push(std::sync::Arc::new(db.connect().await));
    }
    let mut begun: HashMap<Uuid, Started> = HashMap::new();
    let mut waits = Vec::new();
    for round in 0..100 * scale() {
        let busy = rng.random_range(1..=PRODUCERS);
        let mut tasks = Vec::new();
        for producer in &producers[..busy] {
            let (producer, rng) = (std::sync::Arc::clone(producer), StdRng::seed_from_u64(rng.random()));
            tasks.push(tokio::spawn(async move { (produce(&producer, rng).await, Instant::now()) }));
        }
        for task in tasks {
            let (rows, committed) = task.await.expect("a producer");
            for id in rows {
                let first = async {
                    while !begun.contains_key(&id) {
                        let started = telling.recv().await.expect("the pumps live");
                        begun.entry(started.id).or_insert(started);
                    }
                };
                assert!(
                    timeout(LATE, first).await.is_ok(),
                    "seed {seed}, round {round}: {id} was not started"
                );
                waits.push(begun[&id].at.saturating_duration_since(committed));
            }
        }
        // Into any phase of falling asleep.
        sleep(Duration::from_micros(rng.random_range(0..12_000))).await;
    }
    for pump in &pumps {
        asleep(pump).await;
    }
    let client = db.connect().await;
    for table in ["wh_outbox", "wh_inbox", "wh_perspective_events", "wh_receptor_processing"] {
        crate::sql::until(&client, &format!("select count(*) = 0 from {table}")).await;
    }
    let (p50, p99, worst) =
        (quantile(&mut waits, 0.5), quantile(&mut waits, 0.99), quantile(&mut waits, 1.0));
    println!(
        "{} rows, started after their commit: p50 {p50:.1?}, p99 {p99:.1?}, worst {worst:.1?}",
        waits.len()
    );
    for pump in pumps {
        pump.drain().await;
    }
}

/// The last row of a stream is finished while a transaction with the next one is open.
#[tokio::test]
async fn a_producer_that_stays_open_while_the_last_row_of_its_stream_is_finished_loses_nothing() {
    let (tell, telling) = unbounded_channel();
    let (go, gate) = watch::channel(0_u32);
    let run_gated = Run::new(move |job| {
        let (tell, mut gate) = (tell.clone(), gate.clone());
        async move {
            started(&tell, &job);
            let first = job.work.message_type.as_deref() == Some("first");
            if first {
                let before = *gate.borrow_and_update();
                let _ = gate.wait_for(|now| *now > before).await;
            }
            Ok(())
        }
    });
    let mut it = Asleep::running(signals_only(), &run_gated, telling).await;
    let producer = it.db.connect().await;
    let mut waits = Vec::new();
    for (round, level) in (0_u32..).zip(LEVELS.iter().cycle()).take(3 * 4) {
        let of = stream(u128::from(round) + 1);
        run(
            &it.client,
            &format!(
                "insert into wh_outbox (stream_id, message_type, payload) values ('{of}', 'first', '1')"
            ),
        )
        .await;
        it.next().await;
        // Awake, falling asleep, or asleep when the producer begins.
        match round % 4 {
            0 => asleep(&it.pump).await,
            1 => sleep(Duration::from_millis(2)).await,
            _ => {}
        }
        run(&producer, &format!("begin isolation level {level}")).await;
        run(
            &producer,
            &format!(
                "insert into wh_outbox (stream_id, message_type, payload) values ('{of}', 'second', '1')"
            ),
        )
        .await;
        go.send_modify(|round| *round += 1);
        crate::sql::until(&it.client, "select count(*) = 0 from wh_outbox").await;
        // Long enough for several waits for the arm lock.
        sleep(Duration::from_millis(if round % 2 == 0 { 0 } else { 150 })).await;
        run(&producer, "commit").await;
        let committed = Instant::now();
        waits.push(it.next().await.at.saturating_duration_since(committed));
        crate::sql::until(&it.client, "select count(*) = 0 from wh_outbox").await;
    }
    println!("a stream that seemed finished, after the commit: {waits:.1?}");
    it.pump.drain().await;
}

#[tokio::test]
async fn what_was_stored_behind_a_running_row_starts_when_that_is_written() {
    let (tell, telling) = unbounded_channel();
    let (go, gate) = watch::channel(false);
    let run_gated = Run::new(move |job| {
        let (tell, mut gate) = (tell.clone(), gate.clone());
        async move {
            started(&tell, &job);
            let _ = gate.wait_for(|open| *open).await;
            Ok(())
        }
    });
    let mut it = Asleep::running(signals_only(), &run_gated, telling).await;
    for of in [stream(1), stream(2)] {
        let first = store(&it.client, Some(of), "").await;
        assert_eq!(it.next().await.id, first);
        asleep(&it.pump).await;
        let second = store(&it.client, Some(of), "").await;
        // It rings, is found blocked, and the pump sleeps again.
        sleep(Duration::from_millis(100)).await;
        asleep(&it.pump).await;
        go.send(true).expect("a handler waits");
        assert_eq!(it.next().await.id, second);
        crate::sql::until(&it.client, "select count(*) = 0 from wh_outbox").await;
        go.send_replace(false);
    }
    it.pump.drain().await;
}
