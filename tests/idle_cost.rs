//! What an idle pump costs the database, counted by the database itself.
//!
//! The rule: every statement counts, whoever sends it: polls, beats, proofs, watches, sweeps, and what a session is opened with. The
//! failure this prevents: a statement that nobody misses and every instance sends for ever.
//!
//! The budget with a gate that is proven is 75 calls in 300 s for an instance, from 60 s after its start. That is the sum of what comes at
//! its interval, 0.217 a second: poll 10 s, beat 60 s, proof 30 s, watch 20 s, sweep 60 s, so 65 in 300 s, and ten for what one
//! connection that is opened anew may cost. A shorter window gets the same rate, and one call more for each of the five: a window of any
//! length may begin just before one of them comes round.
#![cfg(target_os = "linux")]
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;

use std::time::Duration;

use common::{Bouncer, Database, PrivateServer, scale};
use tokio::time::sleep;
use tokio_postgres::Client;
use workpump::{Options, OutboxMessage, Outcome, Publisher, WorkPump};

/// What comes at its own interval: poll, beat, proof, watch, sweep.
const DUTIES: f64 = 5.0;
const CALLS_IN_300_SECONDS: f64 = 75.0;

struct Nobody;

impl Publisher for Nobody {
    async fn publish_one(&self, _: &OutboxMessage) -> Outcome {
        Ok(())
    }
}

/// How long to wait after the start, how long to count, and what is allowed: at full length what the budget says, else the same rate.
fn window() -> (Duration, Duration, f64) {
    if scale() >= 10 {
        return (Duration::from_mins(1), Duration::from_mins(5), CALLS_IN_300_SECONDS);
    }
    let window = Duration::from_secs(45 * u64::from(scale()));
    (Duration::from_secs(12), window, CALLS_IN_300_SECONDS * window.as_secs_f64() / 300.0 + DUTIES)
}

fn counting_server() -> PrivateServer {
    common::server_with(&[
        ("shared_preload_libraries", "pg_stat_statements"),
        ("pg_stat_statements.track", "top"),
        ("pg_stat_statements.track_utility", "on"),
    ])
}

/// Calls in this database so far, the most frequent statement first. Asked for in another database, so that asking is not counted.
async fn calls(outside: &Client, db: &Database) -> Vec<(i64, String)> {
    let sql = "select s.calls, regexp_replace(left(s.query, 110), '\\s+', ' ', 'g') from pg_stat_statements s, pg_database d \
               where d.oid = s.dbid and d.datname = $1 order by s.calls desc, 2";
    let name = db.name();
    let rows = outside
        .query_typed(sql, &[(&name, tokio_postgres::types::Type::NAME)])
        .await
        .expect("the statements");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Calls of an idle pump within the window.
async fn idle(what: &str, url: &str, db: &Database, outside: &Client) -> i64 {
    let (settle, window, budget) = window();
    let pump = WorkPump::builder(url)
        .options(Options::default())
        .publisher(Nobody)
        .start()
        .await
        .expect("it starts");
    sleep(settle).await;
    let reset =
        "select pg_stat_statements_reset(0, (select oid from pg_database where datname = $1), 0)::text";
    let name = db.name();
    outside
        .query_typed_one(reset, &[(&name, tokio_postgres::types::Type::NAME)])
        .await
        .expect("a fresh count");
    sleep(window).await;
    let statements = calls(outside, db).await;
    pump.drain().await;
    let sum = statements.iter().map(|(calls, _)| calls).sum();
    println!("{what}: {sum} calls in {} s, budget with a gate {budget:.1}", window.as_secs());
    for (calls, statement) in &statements {
        println!("  {calls:4}  {statement}");
    }
    sum
}

#[tokio::test]
async fn an_idle_pump_with_a_proven_gate_keeps_within_its_budget_of_statements() {
    let server = counting_server();
    let outside = common::connect(&server.postgres.url("postgres")).await;
    outside.batch_execute("create extension pg_stat_statements").await.expect("the extension");
    let (direct, pooled) = (server.database().await, server.database().await);
    let bouncer = Bouncer::in_front_of(&server.postgres, 4).await;
    let pooled_url = bouncer.as_ref().map(|bouncer| bouncer.url(pooled.name()));
    let behind_the_pooler = async {
        if let Some(url) = &pooled_url {
            idle("pooled only, measured", url, &pooled, &outside).await;
        }
    };
    let (sum, ()) = tokio::join!(idle("direct", direct.url(), &direct, &outside), behind_the_pooler);
    let (_, _, budget) = window();
    assert!(sum as f64 <= budget, "{sum} calls, budget {budget:.1}");
}

#[tokio::test]
async fn the_memory_of_an_idle_relay_is_printed() {
    let db = common::database().await;
    let mut relay = std::process::Command::new(env!("CARGO_BIN_EXE_workpump"))
        .args(["relay", "--to", "/dev/null"])
        .env("WORKPUMP_DATABASE_URL", db.url())
        .stdin(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("a relay");
    let control = db.connect().await;
    common::wait::eventually("a member", async || {
        let members =
            control.query_typed_one("select count(*) from wh_live_instances where lock_declared", &[]);
        members.await.expect("members").get::<_, i64>(0) == 1
    })
    .await;
    sleep(Duration::from_secs(if scale() >= 10 { 60 } else { 5 })).await;
    let status = std::fs::read_to_string(format!("/proc/{}/status", relay.id())).expect("a living process");
    let resident = status.lines().find(|line| line.starts_with("VmRSS")).unwrap_or("VmRSS unknown");
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    println!("idle relay, {build} build: {resident}");
    relay.kill().expect("kill -9");
    relay.wait().expect("its end");
}
