//! The death watch: a death is seen at once, and nothing else is taken for one.

mod common;
mod sql;

use std::time::Duration;

use sql::{Listener, beat, instance, is_member, member, refused, rings, run, until, until_waiting, value};
use tokio_postgres::Client;
use uuid::Uuid;

// Locks and watches are of sessions, and go past any pooler; beats, verdicts and looks need none.

/// A member whose last beat declared the lock it holds on the session that is returned.
async fn holder(db: &common::Database, id: Uuid) -> Client {
    let client = db.connect_direct().await;
    assert!(value::<bool>(&client, &format!("select claim_instance_alive_lock('{id}')")).await);
    assert!(
        value::<bool>(&client, &format!("select record_heartbeat('{id}', 's', 'h', 1, null, 60, true)"))
            .await
    );
    client
}

/// Calls `wh_watch`; whom it saw dead.
async fn watch(client: &Client, me: Uuid, wait: &str, census: bool) -> Option<Uuid> {
    let row = client
        .query_one(&format!("call wh_watch('{me}', '{wait}', null, null, {census})"), &[])
        .await
        .expect("wh_watch");
    let (peer, since): (Option<Uuid>, Option<std::time::SystemTime>) = (row.get(0), row.get(1));
    assert_eq!(peer.is_some(), since.is_some());
    peer
}

async fn verdict(client: &Client, me: Uuid, peer: Uuid, since: &str, grace: f64) -> String {
    value(client, &format!("select wh_evict_suspect('{me}', '{peer}', {since}, {grace})")).await
}

/// Ends the session of another client, as a kill of its process would.
async fn kill(client: &Client, victim: &Client) {
    let pid = sql::pid(victim).await;
    assert!(value::<bool>(client, &format!("select pg_terminate_backend({pid}, 60000)")).await);
}

#[tokio::test]
async fn the_death_of_the_ring_successor_ends_the_wait_at_once() {
    let db = common::database().await;
    let control = db.connect().await;
    let (_first, _third) = (holder(&db, instance(1)).await, holder(&db, instance(3)).await);
    let watching = db.connect_direct().await;
    let watching_pid = sql::pid(&watching).await;
    let mut quickest = Duration::MAX;
    for _ in 0..5 {
        let second = holder(&db, instance(2)).await;
        let killing = async {
            until_waiting(&control, watching_pid).await;
            kill(&control, &second).await;
            tokio::time::Instant::now()
        };
        let seen =
            async { (watch(&watching, instance(1), "10 min", true).await, tokio::time::Instant::now()) };
        let (killed, (peer, granted)) = futures_util::future::join(killing, seen).await;
        assert_eq!(peer, Some(instance(2)));
        quickest = quickest.min(granted.saturating_duration_since(killed));
    }
    // The quickest of several: how long one takes is the machine's affair.
    assert!(quickest < Duration::from_secs(1), "{quickest:?}");
    assert_eq!(watch(&watching, instance(3), "0 s", false).await, None, "the last one watches the first");
}

#[tokio::test]
async fn a_death_between_two_slices_of_the_wait_is_seen_too() {
    let db = common::database().await;
    let control = db.connect().await;
    let (second, _third) = (holder(&db, instance(2)).await, holder(&db, instance(3)).await);
    // Slices that see nothing: every death falls between two of them.
    run(
        &control,
        "create or replace function wh_watch_slice(p_key bigint) returns boolean language plpgsql as \
         $$ begin perform pg_sleep(0.01); return false; end $$",
    )
    .await;
    let watching = db.connect_direct().await;
    let watching_pid = sql::pid(&watching).await;
    let asleep = format!(
        "select coalesce((select wait_event = 'PgSleep' from pg_stat_activity where pid = {watching_pid}), false)"
    );
    let killing = async {
        until(&control, &asleep).await;
        kill(&control, &second).await;
    };
    let (peer, ()) =
        futures_util::future::join(watch(&watching, instance(1), "10 min", false), killing).await;
    assert_eq!(peer, Some(instance(2)));
}

/// Who joins is the watcher of the first one from then on, and its own watch begins some moments later: here, never.
#[tokio::test]
async fn a_death_in_the_first_moments_of_its_new_watcher_is_seen_by_the_one_before() {
    let db = common::database().await;
    let control = db.connect().await;
    let first = holder(&db, instance(1)).await;
    let (_third, watching) = (holder(&db, instance(3)).await, db.connect().await);
    let watching_pid = sql::pid(&watching).await;
    let waits_for = |id: Uuid| {
        format!(
            "select count(*) = 1 from pg_locks where pid = {watching_pid} and not granted and locktype = 'advisory' \
             and (classid::bigint << 32) | objid::bigint = wh_alive_key('{id}')"
        )
    };
    let meanwhile = async {
        until(&control, &waits_for(instance(1))).await;
        let fourth = holder(&db, instance(4)).await;
        until(&control, &waits_for(instance(4))).await;
        kill(&control, &first).await;
        fourth
    };
    let (peer, _fourth) =
        futures_util::future::join(watch(&watching, instance(3), "3 min", false), meanwhile).await;
    assert_eq!(peer, Some(instance(1)));
}

#[tokio::test]
async fn several_watchers_of_one_peer_are_all_told() {
    let db = common::database().await;
    let control = db.connect().await;
    let peer = holder(&db, instance(9)).await;
    let watchers = futures_util::future::join_all((0..3).map(|_| db.connect_direct())).await;
    let killing = async {
        until(&control, "select count(*) = 3 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'").await;
        kill(&control, &peer).await;
    };
    let seen = futures_util::future::join_all(
        watchers.iter().map(|watcher| watch(watcher, instance(1), "10 min", false)),
    );
    let ((), seen) = futures_util::future::join(killing, seen).await;
    assert_eq!(seen, [Some(instance(9)); 3]);
}

#[tokio::test]
async fn a_watch_without_event_returns_nothing_and_pins_no_snapshot_and_no_lock() {
    let db = common::database().await;
    let control = db.connect().await;
    let peer = holder(&db, instance(2)).await;
    let watching = db.connect_direct().await;
    let watching_pid = sql::pid(&watching).await;
    assert_eq!(watch(&watching, instance(1), "0.3 s", true).await, None);
    run(&control, &format!("create table seen as select backend_xmin, xact_start from pg_stat_activity where pid = {watching_pid}; truncate seen")).await;
    let look = async {
        // Three slices, each a transaction of its own.
        for n in 1..4 {
            until_waiting(&control, watching_pid).await;
            until(&control, &format!(
                "with s as (insert into seen select backend_xmin, xact_start from pg_stat_activity where pid = {watching_pid} and wait_event_type = 'Lock' \
                    and xact_start not in (select xact_start from seen where xact_start is not null) returning 1) \
                 select (select count(*) from seen) + (select count(*) from s) >= {n}"
            )).await;
        }
        // Enough was seen: an event ends the wait.
        kill(&control, &peer).await;
    };
    let (seen, ()) = futures_util::future::join(watch(&watching, instance(1), "10 min", true), look).await;
    assert_eq!(seen, Some(instance(2)));
    let held: i64 = value(
        &control,
        &format!("select count(*) from pg_locks where pid = {watching_pid} and locktype = 'advisory'"),
    )
    .await;
    assert_eq!(held, 0);
}

#[tokio::test]
async fn the_census_finds_whom_nobody_waited_for_unless_it_is_switched_off() {
    let db = common::database().await;
    let control = db.connect_direct().await;
    let (gone, _stays) = (holder(&db, instance(2)).await, holder(&db, instance(3)).await);
    member(&control, instance(4), 1).await; // never declared a lock: none of the watch's business
    kill(&control, &gone).await;
    assert_eq!(watch(&control, instance(1), "0 s", true).await, Some(instance(2)));
    assert_eq!(watch(&control, instance(1), "0 s", false).await, None);
    assert_eq!(watch(&control, instance(2), "0 s", true).await, None, "nobody suspects itself");
}

#[tokio::test]
async fn a_verdict_needs_the_grace_a_free_lock_and_silence() {
    let db = common::database().await;
    let control = db.connect().await;
    let (me, peer) = (instance(1), instance(2));
    beat(&control, me).await;
    let session = holder(&db, peer).await;
    let now = "clock_timestamp()";
    assert_eq!(verdict(&control, me, peer, now, 5.0).await, "early");
    assert_eq!(verdict(&control, me, peer, now, 0.0).await, "alive");
    kill(&control, &session).await;
    assert_eq!(
        verdict(&control, me, peer, "clock_timestamp() - interval '1 min'", 5.0).await,
        "beaten",
        "a beat came after the lock went"
    );
    assert!(is_member(&control, peer).await);
    run(&control, "update wh_service_instances set lock_declared = false").await;
    assert_eq!(
        verdict(&control, me, peer, now, 0.0).await,
        "beaten",
        "its last beat said that it has no lock"
    );
    run(&control, "update wh_service_instances set lock_declared = true").await;
    let mut listener = Listener::for_instances(db.direct_url(), &[me, peer]).await;
    assert_eq!(verdict(&control, me, peer, now, 0.0).await, "evicted");
    assert_eq!(listener.rung().await, rings(&[(1, "orphan")]));
    assert!(!is_member(&control, peer).await);
    assert!(!beat(&control, peer).await);
    assert_eq!(verdict(&control, me, peer, now, 0.0).await, "beaten", "one eviction, one winner");
    assert_eq!(
        value::<String>(&control, "select reason || ' ' || evicted_by from wh_instance_evictions").await,
        format!("alive-lock lost {me}")
    );
}

#[tokio::test]
async fn the_evicted_cannot_retake_the_lock_before_the_verdict_is_committed() {
    let db = common::database().await;
    let (judge, back) = (db.connect().await, db.connect_direct().await);
    let (me, peer) = (instance(1), instance(2));
    beat(&judge, me).await;
    let session = holder(&db, peer).await;
    kill(&judge, &session).await;
    run(&judge, "begin").await;
    assert_eq!(verdict(&judge, me, peer, "clock_timestamp()", 0.0).await, "evicted");
    assert!(!value::<bool>(&back, &format!("select claim_instance_alive_lock('{peer}')")).await);
    run(&judge, "commit").await;
    assert!(value::<bool>(&back, &format!("select claim_instance_alive_lock('{peer}')")).await);
    assert!(!beat(&back, peer).await, "too late: the id is burnt");
}

#[tokio::test]
async fn of_many_judges_one_evicts() {
    let db = common::database().await;
    let judges = futures_util::future::join_all((0..4).map(|_| db.connect())).await;
    for round in 0..25_u128 {
        let peer = instance(100 + round);
        let session = holder(&db, peer).await;
        kill(&judges[0], &session).await;
        let verdicts = judges.iter().map(|judge| verdict(judge, instance(1), peer, "clock_timestamp()", 0.0));
        let verdicts = futures_util::future::join_all(verdicts).await;
        assert_eq!(verdicts.iter().filter(|verdict| *verdict == "evicted").count(), 1, "{verdicts:?}");
    }
}

#[tokio::test]
async fn an_evicted_judge_is_refused_and_a_beat_in_flight_is_not_waited_for_long() {
    let db = common::database().await;
    let (control, beating) = (db.connect().await, db.connect().await);
    let (me, peer) = (instance(1), instance(2));
    beat(&control, me).await;
    let session = holder(&db, peer).await;
    kill(&control, &session).await;
    run(&beating, &format!("begin; select record_heartbeat('{peer}', 's', 'h', 1, null, 60, true)")).await;
    assert_eq!(
        verdict(&control, me, peer, "clock_timestamp()", 0.0).await,
        "early",
        "its row is busy: ask again"
    );
    run(&beating, "commit").await;
    run(&control, &format!("select evict_instance('{me}', null, 'test')")).await;
    let (code, ..) =
        refused(&control, &format!("select wh_evict_suspect('{me}', '{peer}', clock_timestamp(), 0)")).await;
    assert_eq!(code, "WH001");
    let (code, ..) =
        refused(&control, &format!("select wh_evict_suspect('{me}', '{me}', clock_timestamp(), 0)")).await;
    assert_eq!(code, "22023");
}
