//! A fleet in which some only publish and others only handle: a row wakes somebody who can take it.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::Instant;
use tokio_postgres::Client;
use uuid::Uuid;
use workpump::{Category, WorkPump};

use crate::common::{self, scale, wait::eventually};
use crate::rig::{
    Run, Started, asleep, assign, claimer, next, one_at_a_time, pump_of, quantile, signals_only, started,
};
use crate::sql::{column, run, stream, until};

fn seeded() -> StdRng {
    let seed: u64 = std::env::var("WORKPUMP_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed} (WORKPUMP_TEST_SEED)");
    StdRng::seed_from_u64(seed)
}

/// One statement with rows of one category, each of one of a few streams or of none. Says which.
async fn put(client: &Client, rng: &mut StdRng, category: Category) -> Vec<Uuid> {
    let ids: Vec<Uuid> = (0..[1, 1, 1, 4][rng.random_range(0..4)]).map(|_| Uuid::now_v7()).collect();
    let rows: Vec<String> = ids
        .iter()
        .map(|id| match rng.random_range(0..6_u128) {
            0 | 1 => format!("('{id}', 't', '1', null)"),
            2 => format!("('{id}', 't', '1', '{}')", Uuid::now_v7()),
            n => format!("('{id}', 't', '1', '{}')", stream(n)),
        })
        .collect();
    let rows = rows.join(", ");
    let sql =
        format!("insert into wh_{category} (message_id, message_type, payload, stream_id) values {rows}");
    run(client, &sql).await;
    ids
}

/// Waits for these, and notes how long each took.
async fn all_started(
    telling: &mut UnboundedReceiver<Started>,
    mut ids: Vec<Uuid>,
    by: &WorkPump,
    waits: &mut Vec<Duration>,
) {
    let stored = Instant::now();
    while !ids.is_empty() {
        let started = next(telling).await;
        assert!(ids.contains(&started.id) && started.by == by.instance_id(), "{started:?}");
        ids.retain(|id| *id != started.id);
        waits.push(started.at.saturating_duration_since(stored));
    }
}

fn told(what: &str, waits: &mut [Duration]) {
    let (p50, worst) = (quantile(waits, 0.5), quantile(waits, 1.0));
    println!("{what}: {} rows, started after p50 {p50:.1?}, worst {worst:.1?}", waits.len());
}

#[tokio::test]
async fn a_publisher_and_a_handler_each_have_their_rows_at_once_whoever_owns_the_stream() {
    let mut rng = seeded();
    let db = common::database().await;
    let client = db.connect().await;
    let (tell, mut telling) = unbounded_channel();
    let run_telling = Run::telling(tell);
    let kinds = [Category::Outbox, Category::Inbox];
    let mut order = [0, 1];
    // The older one is the first in every list: let that be either of them.
    if rng.random_bool(0.5) {
        order.reverse();
    }
    let mut pumps = Vec::new();
    for n in order {
        pumps.push((kinds[n], pump_of(&[kinds[n]], db.url(), signals_only(), &run_telling).await));
    }
    let mut waits = Vec::new();
    for _ in 0..60 * scale() {
        // Asleep, or on the way there.
        if rng.random_bool(0.7) {
            for (_, pump) in &pumps {
                asleep(pump).await;
            }
        }
        let (category, taker) = &pumps[rng.random_range(0..2)];
        if rng.random_bool(0.3) {
            let owner = &pumps[rng.random_range(0..2)].1;
            assign(&client, stream(rng.random_range(2..6)), owner.instance_id()).await;
        }
        let ids = put(&client, &mut rng, *category).await;
        all_started(&mut telling, ids, taker, &mut waits).await;
    }
    told("a publisher and a handler", &mut waits);
    for (_, pump) in pumps {
        pump.drain().await;
    }
}

#[tokio::test]
async fn a_full_instance_passes_the_ring_to_whoever_runs_what_rang_it() {
    let mut rng = seeded();
    let db = common::database().await;
    let client = db.connect().await;
    let (tell, mut telling) = unbounded_channel();
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
    let kinds = [Category::Outbox, Category::Inbox];
    // The oldest, and the owner of every stream: all rings go there.
    let full = pump_of(&kinds, db.url(), one_at_a_time(), &run_gated).await;
    asleep(&full).await;
    run(&client, "insert into wh_inbox (message_type, payload) values ('stays', '1')").await;
    assert_eq!(next(&mut telling).await.by, full.instance_id());
    let mut pumps = Vec::new();
    for kind in kinds {
        pumps.push((kind, pump_of(&[kind], db.url(), signals_only(), &run_gated).await));
    }
    let mut waits = Vec::new();
    for _ in 0..30 * scale() {
        for (_, pump) in &pumps {
            asleep(pump).await;
        }
        for n in 2..6 {
            assign(&client, stream(n), full.instance_id()).await;
        }
        let (category, taker) = &pumps[rng.random_range(0..2)];
        let ids = put(&client, &mut rng, *category).await;
        all_started(&mut telling, ids, taker, &mut waits).await;
    }
    told("passed on by a full instance", &mut waits);
    go.send(true).expect("a handler waits");
    until(&client, "select count(*) = 0 from wh_inbox").await;
    for (_, pump) in pumps {
        pump.drain().await;
    }
    full.drain().await;
}

/// What nobody can take is due for ever, and must not hide what comes due later.
#[tokio::test]
async fn a_row_that_comes_due_is_not_hidden_by_one_of_another_category_that_nobody_runs() {
    let db = common::database().await;
    let client = db.connect().await;
    let (tell, mut telling) = unbounded_channel();
    let handler = pump_of(&[Category::Inbox], db.url(), signals_only(), &Run::telling(tell)).await;
    asleep(&handler).await;
    let later = async |after: &str, category: &str| {
        let sql = format!(
            "insert into wh_{category} (message_type, payload, scheduled_for) \
             values ('t', '1', clock_timestamp() + interval '{after}')"
        );
        run(&client, &sql).await;
    };
    let mut late = Vec::new();
    for _ in 0..5 {
        later("-1 s", "outbox").await;
        // Whoever is told in vain that something is due asks less and less often.
        for _ in 0..10 {
            let before = claimer(&handler).await.counter("claims");
            later("1 h", "inbox").await;
            eventually("it has looked", async || claimer(&handler).await.counter("claims") > before).await;
            asleep(&handler).await;
        }
        later("3 s", "inbox").await;
        let due = Instant::now() + Duration::from_secs(3);
        late.push(next(&mut telling).await.at.saturating_duration_since(due));
        println!("late by {late:.0?}");
        // A busy machine gets another try.
        if late.last().is_some_and(|late| *late < Duration::from_secs(1)) {
            handler.drain().await;
            return;
        }
    }
    panic!("too late: {late:?}");
}

#[tokio::test]
async fn a_pump_declares_what_it_runs() {
    let db = common::database().await;
    let client = db.connect().await;
    let (tell, _telling) = unbounded_channel();
    let kinds = [Category::Receptor, Category::Outbox];
    let pump = pump_of(&kinds, db.url(), signals_only(), &Run::telling(tell)).await;
    let declared: Vec<Vec<String>> = column(&client, "select categories from wh_service_instances").await;
    assert_eq!(declared, [["outbox", "receptor"]]);
    let status = workpump::status(db.url(), "public").await.expect("a status");
    assert_eq!(
        status.instances[0].categories.as_deref(),
        Some(&["outbox".to_owned(), "receptor".to_owned()][..])
    );
    pump.drain().await;
}
