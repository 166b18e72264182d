//! Evictions that race with what the evicted still does: beats, claims, and the sweeps of others.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;
mod sql;

use common::scale;
use sql::{beat, column, instance, is_member, member, run, value};
use tokio_postgres::Client;
use uuid::Uuid;

/// An eviction that begins a little later than it is sent, by a time that differs from round to round, so that the two meet in ever other
/// ways. The server waits: a timer of this process is too coarse.
fn evict(round: u128, me: Uuid) -> String {
    let seconds = (round * 37 % 1_200) as f64 / 1e6;
    format!("do $$ begin perform pg_sleep({seconds}); perform evict_instance('{me}', null, 'race'); end $$")
}

async fn leased(client: &Client, id: Uuid) -> i64 {
    value(client, &format!("select count(*) from wh_outbox where instance_id = '{id}'")).await
}

/// Nothing holds either of the two back: they meet wherever they meet.
#[tokio::test]
async fn a_beat_that_races_with_an_eviction_never_brings_the_member_back() {
    let db = common::database().await;
    let (beating, evicting) = (db.connect().await, db.connect().await);
    let mut refused = 0;
    for round in 0..150 * u128::from(scale()) {
        let me = instance(round);
        beat(&evicting, me).await;
        let evict = evict(round, me);
        let (accepted, ()) = futures_util::future::join(beat(&beating, me), run(&evicting, &evict)).await;
        refused += u32::from(!accepted);
        assert!(!is_member(&evicting, me).await, "round {round}: a tombstoned member");
        assert!(!beat(&beating, me).await, "round {round}");
    }
    println!("a beat against an eviction: {refused} beats came too late, no member came back");
}

#[tokio::test]
async fn a_claim_that_races_with_an_eviction_leaves_no_lease_on_the_evicted_id() {
    let db = common::database().await;
    let (claiming, evicting) = (db.connect().await, db.connect().await);
    let mut too_late = 0;
    for round in 0..150 * u128::from(scale()) {
        let me = instance(round);
        beat(&evicting, me).await;
        run(&evicting, "delete from wh_outbox; insert into wh_outbox (message_type, payload) select 't', '1' from generate_series(1, 20)")
            .await;
        let (claim, evict) = (format!("select claim_work('{me}', 20)"), evict(round, me));
        let (claimed, ()) =
            futures_util::future::join(claiming.batch_execute(&claim), run(&evicting, &evict)).await;
        let claimed = claimed.is_ok();
        too_late += u32::from(!claimed);
        // The eviction waits for a claim that came first, and then hands its rows back.
        assert_eq!(leased(&evicting, me).await, 0, "round {round}, claimed: {claimed}");
        let unfinished = "select count(*) from wh_instance_evictions where released_at is null";
        assert_eq!(value::<i64>(&evicting, unfinished).await, 0, "round {round}");
    }
    println!("a claim against an eviction: {too_late} claims came too late, no lease was left");
}

/// The backstop against the sweep of a beat, both about the same dead and about each other.
#[tokio::test]
async fn a_beat_and_a_backstop_sweep_that_find_each_other_never_deadlock() {
    let db = common::database().await;
    let (one, two) = (db.connect().await, db.connect().await);
    run(&one, "alter function wh_sweep(uuid) set lock_timeout = 0").await;
    run(&one, "alter function wh_sweep_stale(uuid) set lock_timeout = 0").await;
    for client in [&one, &two] {
        run(client, "set deadlock_timeout = '10ms'").await;
    }
    for round in 0..100 * u128::from(scale()) {
        let (beats, sweeps, dead) = (instance(3 * round), instance(3 * round + 1), instance(3 * round + 2));
        for id in [beats, sweeps, dead] {
            member(&one, id, 40).await;
        }
        let sweep = format!("select unnest(evicted) from wh_sweep_stale('{sweeps}')");
        let sweeping = async {
            let rows = two.query(&sweep, &[]).await;
            let rows = rows.or_else(|error| {
                // The beat was faster, and evicted the one that sweeps.
                let code = error.code().map(|code| code.code().to_owned());
                (code.as_deref() == Some("WH001")).then(Vec::new).ok_or(error)
            });
            rows.expect("a sweep").iter().map(|row| row.get::<_, Uuid>(0)).collect::<Vec<_>>()
        };
        let (_, evicted) = futures_util::future::join(beat(&one, beats), sweeping).await;
        assert!(!evicted.contains(&sweeps), "round {round}: never itself");
    }
    for client in [&one, &two] {
        run(client, "select pg_stat_force_next_flush()").await;
    }
    let deadlocks: Vec<i64> =
        column(&one, "select deadlocks from pg_stat_database where datname = current_database()").await;
    assert_eq!(deadlocks, [0]);
}
