//! A dead instance that held very many rows: they come back in small steps, and nobody's claims wait for it.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;
mod fleet;

use std::time::Duration;

use common::scale;
use fleet::{Relay, To, run, value};
use tokio::time::{Instant, sleep};
use tokio_postgres::Client;
use uuid::Uuid;

fn rows() -> u32 {
    if scale() >= 10 { 1_000_000 } else { 50_000 * scale() }
}

/// Notes how many rows each statement wrote.
const AUDIT: &str = "\
    create table audit (rows bigint); \
    create function note() returns trigger language plpgsql as $$ begin \
        insert into audit select count(*) from after having count(*) > 0; \
        return null; end $$; \
    create trigger note after update on wh_outbox referencing new table as after \
        for each statement execute function note()";

/// Claims ten rows at a time and completes them, and says how long the claims took.
async fn claim_until(client: &Client, me: Uuid, done: impl AsyncFn(usize) -> bool) -> Vec<Duration> {
    let mut took = Vec::new();
    while !done(took.len()).await {
        let began = Instant::now();
        let claimed = client
            .query("select work_id, claim_epoch from claim_work($1, 10)", &[&me])
            .await
            .expect("a claim");
        took.push(began.elapsed());
        let ids: Vec<Uuid> = claimed.iter().map(|row| row.get(0)).collect();
        let epochs: Vec<i64> = claimed.iter().map(|row| row.get(1)).collect();
        let categories = vec!["outbox"; ids.len()];
        client
            .query("select settle_work($1, $2, $3, $4)", &[&me, &categories, &ids, &epochs])
            .await
            .expect("a settlement");
        // A service that claims all day, not a drain: what is measured is the wait for others, not for oneself.
        sleep(Duration::from_millis(5)).await;
    }
    took.sort_unstable();
    took
}

fn median(took: &[Duration]) -> Duration {
    took[took.len() / 2]
}

fn p99(took: &[Duration]) -> Duration {
    took[took.len() * 99 / 100]
}

#[tokio::test]
async fn very_many_rows_of_a_dead_instance_come_back_in_small_steps_while_claims_go_on() {
    let db = common::database().await;
    let (control, claiming) = (db.connect().await, db.connect().await);
    let (dead, me, rows) = (Uuid::from_u128(2), Uuid::from_u128(1), rows());
    run(&control, AUDIT).await;
    // It beats once an hour, so to say: it is a member until its beat is made old.
    for (id, interval) in [(dead, 3_600), (me, 3_600)] {
        run(&control, &format!("select record_heartbeat('{id}', 's', 'h', 1, null, {interval})")).await;
    }
    run(&control, &format!(
        "insert into wh_outbox (message_type, payload, instance_id, lease_expiry, claim_epoch, attempts) \
         select 'n', '1', '{dead}', clock_timestamp() + interval '1 hour', 1, 1 from generate_series(1, {rows}); \
         insert into wh_outbox (message_type, payload) select 'n', '1' from generate_series(1, 20000)"
    ))
    .await;
    run(&control, "vacuum analyze").await;
    // Sweeps and releases, and claims nothing itself.
    let sweeper =
        [("WORKPUMP_CLAIM_ENABLED", "false"), ("WORKPUMP_LIVENESS_STALE_SWEEP_INTERVAL_SECONDS", "1")];
    let _relay = Relay::start(&control, db.url(), To::Nowhere, &sweeper).await;
    let before = claim_until(&claiming, me, async |claims| claims >= 500).await;

    run(&control, &format!("update wh_service_instances set last_heartbeat_at = last_heartbeat_at - interval '1 day' where instance_id = '{dead}'"))
        .await;
    let began = Instant::now();
    let released = format!(
        "select exists (select from wh_instance_evictions where instance_id = '{dead}' and released_at is not null)"
    );
    let during = claim_until(&claiming, me, async |_| value(&control, &released).await).await;
    let took = began.elapsed();

    let (largest, passes): (i64, i64) = {
        let sql = "select max(rows), count(*) filter (where rows > 10) from audit";
        let row = control.query_one(sql, &[]).await.expect("the audit");
        (row.get(0), row.get(1))
    };
    println!(
        "{rows} rows of a dead instance came back in {took:.1?}, {passes} steps of at most {largest} rows; \
         claims of ten rows, median and p99: {:.1?} and {:.1?} before ({}), {:.1?} and {:.1?} during ({})",
        median(&before),
        p99(&before),
        before.len(),
        median(&during),
        p99(&during),
        during.len()
    );
    assert!(largest <= 1_000, "{largest}");
    let (claims, limit) = (p99(&during), p99(&before) * 3);
    if scale() >= 10 {
        assert!(
            claims <= Duration::from_millis(100) && claims <= limit.max(Duration::from_millis(10)),
            "{claims:?} {limit:?}"
        );
    } else {
        assert!(claims <= Duration::from_millis(300), "{claims:?}");
    }
}
