//! What the alive-lock saves: half of the heartbeats.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;

use std::time::Duration;

use common::wait::eventually;
use common::{PrivateServer, scale};
use tokio_postgres::Client;
use workpump::engine::options::LivenessSourceMode;
use workpump::{Options, OutboxMessage, Outcome, Publisher, WorkPump};

/// A second here is half a minute of the defaults: 30 s and 60 s between beats.
const FAST: u32 = 1;

struct Nothing;

impl Publisher for Nothing {
    async fn publish_one(&self, _: &OutboxMessage) -> Outcome {
        Ok(())
    }
}

/// Updates of the members' table so far, as the server counts them: those inside of functions, in this database.
async fn updates(client: &Client) -> i64 {
    let sql = "select coalesce(sum(calls), 0)::bigint from pg_stat_statements s join pg_database d on d.oid = s.dbid \
               where d.datname = current_database() and s.query ilike 'update %wh_service_instances%last_heartbeat_at%'";
    client.query_one(sql, &[]).await.expect("a count").get(0)
}

/// Beats of an instance in this mode over so many seconds.
async fn beats(server: &PrivateServer, mode: LivenessSourceMode, seconds: u64) -> i64 {
    let db = server.database().await;
    let client = db.connect().await;
    client.batch_execute("create extension pg_stat_statements").await.expect("the extension");
    let mut options = Options::default();
    options.heartbeat.liveness_source_mode = mode;
    options.heartbeat.interval_seconds = FAST;
    options.heartbeat.slow_interval_seconds = 2 * FAST;
    let pump =
        WorkPump::builder(db.url()).options(options).publisher(Nothing).start().await.expect("it starts");
    let locked = mode == LivenessSourceMode::AdvisoryLockWhenAvailable;
    let settled = "select bool_and(lock_declared) from wh_live_instances";
    eventually("the last beat says what it will", async || {
        client.query_one(settled, &[]).await.expect("a member").get::<_, bool>(0) == locked
    })
    .await;
    let before = updates(&client).await;
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let count = updates(&client).await - before;
    assert!(pump.drain().await.deregistered);
    count
}

#[tokio::test]
async fn with_the_lock_held_heartbeats_fall_from_120_to_60_an_hour() {
    let server = common::server_with(&[
        ("shared_preload_libraries", "pg_stat_statements"),
        ("pg_stat_statements.track", "all"),
    ]);
    let seconds = u64::from(20 * scale().min(6));
    let (fast, slow) = tokio::join!(
        beats(&server, LivenessSourceMode::HeartbeatTableOnly, seconds),
        beats(&server, LivenessSourceMode::AdvisoryLockWhenAvailable, seconds)
    );
    // In the defaults' time: each second stands for thirty.
    let hourly = |count: i64| count * 120 / i64::try_from(seconds).expect("a few");
    println!("{} heartbeats an hour without the lock, {} with it", hourly(fast), hourly(slow));
    // A beat more or less at either end, and one that a busy machine was late with.
    assert!((hourly(fast) - 120).abs() <= 18, "{fast} in {seconds} s");
    assert!((hourly(slow) - 60).abs() <= 18, "{slow} in {seconds} s");
}
