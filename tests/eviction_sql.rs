//! Eviction and release: everything the dead held comes back once, in small steps, and only what was being worked on counts a crash.

mod common;
mod sql;

use sql::{Listener, beat, column, instance, member, refused, rings, run, stream, value};
use tokio_postgres::Client;
use uuid::Uuid;

const TABLES: [&str; 4] = ["wh_outbox", "wh_inbox", "wh_perspective_events", "wh_receptor_processing"];

/// Leases every unleased row of all tables to `id`.
async fn lease_all(client: &Client, id: Uuid) {
    for table in TABLES {
        run(client, &format!(
            "update {table} set instance_id = '{id}', lease_expiry = clock_timestamp() + interval '5 min', claim_epoch = claim_epoch + 1, \
             attempts = attempts + 1 where instance_id is null"
        )).await;
    }
}

/// One row in each table, all in one stream.
async fn one_of_each(client: &Client, n: u128) {
    let s = stream(n);
    run(client, &format!(
        "insert into wh_outbox (message_type, payload, stream_id) values ('t', '1', '{s}'); \
         insert into wh_inbox (message_type, payload, stream_id) values ('t', '1', '{s}'); \
         insert into wh_perspective_events (stream_id, perspective_name, event_id) values ('{s}', 'p', gen_random_uuid()); \
         insert into wh_receptor_processing (stream_id, receptor_name, event_id) values ('{s}', 'r', gen_random_uuid())"
    )).await;
}

async fn leased(client: &Client, id: Uuid) -> i64 {
    let mut sum = 0;
    for table in TABLES {
        sum +=
            value::<i64>(client, &format!("select count(*) from {table} where instance_id = '{id}'")).await;
    }
    sum
}

/// `released_at is null` of a tombstone.
async fn unfinished(client: &Client, id: Uuid) -> bool {
    value(
        client,
        &format!("select released_at is null from wh_instance_evictions where instance_id = '{id}'"),
    )
    .await
}

#[tokio::test]
async fn cleanup_hands_back_all_four_tables_and_the_streams_before_it_returns() {
    let db = common::database().await;
    let client = db.connect().await;
    let dead = instance(2);
    member(&client, dead, 40).await;
    for n in 0..5 {
        one_of_each(&client, n).await;
    }
    lease_all(&client, dead).await;
    run(
        &client,
        &format!(
            "update wh_active_streams set assigned_instance_id = '{dead}', lease_expiry = clock_timestamp()"
        ),
    )
    .await;
    let evicted: Vec<Uuid> =
        column(&client, "select cleanup_stale_instances(clock_timestamp() - interval '30 s')").await;
    assert_eq!(evicted, [dead]);
    assert_eq!(leased(&client, dead).await, 0);
    for table in TABLES {
        let back = format!(
            "select bool_and(lease_expiry is null and claimable_at is null and claim_epoch = 1 and attempts = 1) from {table}"
        );
        assert!(value::<bool>(&client, &back).await, "{table}");
    }
    let streams =
        "select count(*) from wh_active_streams where assigned_instance_id is null and lease_expiry is null";
    assert_eq!(value::<i64>(&client, streams).await, 5);
    assert!(!unfinished(&client, dead).await);
}

#[tokio::test]
async fn a_crash_is_charged_to_heads_and_unordered_rows_only() {
    let db = common::database().await;
    let client = db.connect().await;
    let dead = instance(2);
    member(&client, dead, 1).await;
    let (a, b) = (stream(1), stream(2));
    run(&client, &format!(
        "insert into wh_outbox (message_type, payload, stream_id) values ('a1', '1', '{a}'), ('a2', '1', '{a}'), ('b1', '1', '{b}'), ('b2', '1', '{b}'), \
             ('free', '1', null), ('failed', '1', null); \
         update wh_outbox set error = 'its own error', failure_reason = 4 where message_type in ('failed', 'b2'); \
         insert into wh_perspective_events (stream_id, perspective_name, event_id) values \
             ('{a}', 'p', gen_random_uuid()), ('{a}', 'q', gen_random_uuid()), ('{a}', 'p', gen_random_uuid()); \
         update wh_outbox set processed_at = clock_timestamp() where message_type = 'b1'"
    )).await;
    lease_all(&client, dead).await;
    run(&client, &format!("select evict_instance('{dead}', null, 'died')")).await;
    let outbox = "select concat_ws(' ', message_type, crash_count, attempts, coalesce(failure_reason, 0), left(coalesce(error, '-'), 9)) from wh_outbox order by seq";
    assert_eq!(
        column::<String>(&client, outbox).await,
        [
            "a1 1 1 6 abandoned",
            "a2 0 1 0 -",
            "b1 0 1 0 -",
            "b2 1 1 4 its own e",
            "free 1 1 6 abandoned",
            "failed 1 1 4 its own e"
        ]
    );
    let perspective = "select perspective_name || crash_count from wh_perspective_events order by seq";
    assert_eq!(column::<String>(&client, perspective).await, ["p1", "q1", "p0"]);
}

#[tokio::test]
async fn a_release_goes_in_steps_of_a_thousand_that_anybody_continues() {
    let db = common::database().await;
    let client = db.connect().await;
    let (dead, me) = (instance(2), instance(1));
    member(&client, dead, 40).await;
    run(
        &client,
        "insert into wh_outbox (message_type, payload) select 't', '1' from generate_series(1, 1500); \
                  insert into wh_inbox (message_type, payload) select 't', '1' from generate_series(1, 1500)",
    )
    .await;
    lease_all(&client, dead).await;
    assert!(beat(&client, me).await);
    assert_eq!((leased(&client, dead).await, unfinished(&client, dead).await), (2000, true));
    assert_eq!(value::<i32>(&client, "select wh_release_evicted(700)").await, 700);
    assert!(beat(&client, me).await, "any beat goes on");
    assert_eq!((leased(&client, dead).await, unfinished(&client, dead).await), (300, true));
    assert_eq!(value::<i32>(&client, &format!("select wh_release_instance('{dead}')")).await, 300);
    assert!(!unfinished(&client, dead).await);
    assert_eq!(value::<i32>(&client, "select wh_release_evicted()").await, 0);
}

#[tokio::test]
async fn a_locked_row_is_left_for_the_next_pass_and_nobody_waits() {
    let db = common::database().await;
    let (client, settling) = (db.connect().await, db.connect().await);
    let dead = instance(2);
    member(&client, dead, 1).await;
    for n in 0..3 {
        one_of_each(&client, n).await;
    }
    lease_all(&client, dead).await;
    run(&settling, "begin; select 1 from wh_outbox where seq = 2 for update").await;
    run(&client, "set lock_timeout = '5s'").await;
    run(&client, &format!("select evict_instance('{dead}', null, 'died')")).await;
    assert_eq!((leased(&client, dead).await, unfinished(&client, dead).await), (1, true));
    run(&settling, "delete from wh_outbox where seq = 2; commit").await;
    run(&client, "select wh_release_evicted()").await;
    assert_eq!((leased(&client, dead).await, unfinished(&client, dead).await), (0, false));
}

#[tokio::test]
async fn nothing_is_released_before_the_eviction_is_on_record() {
    let db = common::database().await;
    let client = db.connect().await;
    beat(&client, instance(1)).await;
    let (code, message, hint) =
        refused(&client, &format!("select wh_release_instance('{}')", instance(1))).await;
    assert_eq!(code, "55000");
    assert!(
        message.contains(&instance(1).to_string()) && hint.contains("evict_instance"),
        "{message}, {hint}"
    );
    let (code, ..) = refused(&client, &format!("select evict_instance('{}', null, null)", instance(1))).await;
    assert_eq!(code, "22023");
}

#[tokio::test]
async fn an_eviction_waits_for_the_claim_in_flight_and_takes_its_rows_back() {
    let db = common::database().await;
    // The backend of the eviction is looked at.
    let (claiming, evicting, watcher) = (db.connect().await, db.connect_direct().await, db.connect().await);
    let dying = instance(2);
    beat(&claiming, dying).await;
    one_of_each(&claiming, 1).await;
    run(&claiming, &format!("begin; select claim_work('{dying}')")).await;
    let evicting_pid = sql::pid(&evicting).await;
    let evict = format!("select evict_instance('{dying}', null, 'died')");
    let evicted = run(&evicting, &evict);
    let commit = async {
        sql::until_waiting(&watcher, evicting_pid).await;
        run(&claiming, "commit").await;
    };
    futures_util::future::join(evicted, commit).await;
    assert_eq!((leased(&watcher, dying).await, unfinished(&watcher, dying).await), (0, false));
    let crashes = "select sum(crash_count)::int8 from wh_outbox";
    assert_eq!(value::<i64>(&watcher, crashes).await, 1);
}

#[tokio::test]
async fn who_leaves_hands_back_without_a_crash_and_rings_the_others() {
    let db = common::database().await;
    let client = db.connect().await;
    let (leaver, idle, stays) = (instance(1), instance(2), instance(3));
    for id in [leaver, idle, stays] {
        beat(&client, id).await;
    }
    one_of_each(&client, 1).await;
    lease_all(&client, leaver).await;
    let mut listener = Listener::for_instances(db.direct_url(), &[leaver, idle, stays]).await;
    let leave = |id: Uuid| format!("select deregister_instance('{id}')");
    assert!(value::<bool>(&client, &leave(leaver)).await);
    assert_eq!(listener.rung().await, rings(&[(2, "orphan"), (3, "orphan")]));
    assert!(value::<bool>(&client, &leave(idle)).await);
    assert_eq!(listener.rung().await, rings(&[(3, "membership")]));
    assert!(!value::<bool>(&client, &leave(idle)).await, "gone already");
    assert_eq!((leased(&client, leaver).await, unfinished(&client, leaver).await), (0, false));
    let row = "select concat_ws(' ', crash_count, attempts, coalesce(error, '-')) from wh_outbox";
    assert_eq!(
        value::<String>(&client, row).await,
        "0 1 -",
        "attempts stay charged: these rows were started"
    );
    assert!(!beat(&client, leaver).await, "an id is used once");
}

#[tokio::test]
async fn a_tombstone_is_not_finished_while_a_producer_counts_on_the_dead() {
    let db = common::database().await;
    // The other one's lock is one of its session.
    let (client, producer, other) = (db.connect().await, db.connect().await, db.connect_direct().await);
    let (dead, me) = (instance(2), instance(1));
    beat(&client, dead).await;
    // The only member is awake, so this producer does not ring anybody.
    run(&producer, "begin; select store_outbox_messages('[{\"message_type\": \"late\", \"payload\": 1}]')")
        .await;
    run(&client, &format!("select evict_instance('{dead}', null, 'died')")).await;
    assert!(unfinished(&client, dead).await);
    let mut listener = Listener::for_instances(db.direct_url(), &[me]).await;
    assert!(beat(&client, me).await);
    run(&other, &format!("select pg_advisory_lock(wh_arm_key('{me}'))")).await;
    assert_eq!(listener.rung().await, []);
    run(&producer, "commit").await;
    run(&client, "select wh_release_evicted()").await;
    assert!(!unfinished(&client, dead).await);
    assert_eq!(listener.rung().await, rings(&[(1, "orphan")]), "the sleeper learns of the late row");
}

#[tokio::test]
async fn leases_that_end_last_come_back_first_and_who_was_locked_meanwhile_is_not_forgotten() {
    let db = common::database().await;
    // What one pass leaves for the next, a hint where to begin, is the session's.
    let (client, settling) = (db.connect_direct().await, db.connect().await);
    let dead = instance(2);
    member(&client, dead, 40).await;
    run(
        &client,
        &format!(
            "insert into wh_outbox (message_type, payload, instance_id, lease_expiry) \
             select 't', '1', '{dead}', clock_timestamp() + n * interval '1 second' from generate_series(1, 10) n; \
             delete from wh_service_instances where instance_id = '{dead}'; \
             insert into wh_instance_evictions (instance_id, reason) values ('{dead}', 'died')"
        ),
    )
    .await;
    run(&settling, "begin; select 1 from wh_outbox where seq = 9 for update").await;
    let free = "select array_agg(seq order by seq) from wh_outbox where instance_id is null";
    assert_eq!(value::<i32>(&client, "select wh_release_evicted(3)").await, 3);
    assert_eq!(value::<Vec<i64>>(&client, free).await, [7, 8, 10]);
    assert_eq!(value::<i32>(&client, "select wh_release_evicted(3)").await, 3);
    assert_eq!(value::<Vec<i64>>(&client, free).await, [4, 5, 6, 7, 8, 10]);
    run(&settling, "rollback").await;
    // The hint is below the one that was locked. Three are left below it, so this pass has enough, and the next one begins anew.
    assert_eq!(value::<i32>(&client, "select wh_release_evicted(3)").await, 3);
    assert_eq!(value::<Vec<i64>>(&client, free).await, [1, 2, 3, 4, 5, 6, 7, 8, 10]);
    assert_eq!(value::<i32>(&client, "select wh_release_evicted(3)").await, 1);
    assert!(!unfinished(&client, dead).await);
}

/// What one claim of ten rows reads, in pages. Not a time: it is the same on any machine.
async fn pages_of_a_claim(client: &Client, me: Uuid) -> i64 {
    let plan: serde_json::Value = value(
        client,
        &format!("explain (analyze, buffers, format json) select * from claim_work('{me}', 10)"),
    )
    .await;
    let pages = |name: &str| plan[0]["Plan"][name].as_i64().expect("a count");
    pages("Shared Hit Blocks") + pages("Shared Read Blocks")
}

#[tokio::test]
async fn a_claim_reads_no_more_while_very_many_rows_of_the_dead_come_back() {
    let db = common::database().await;
    let (client, claiming) = (db.connect().await, db.connect().await);
    let (dead, me) = (instance(2), instance(1));
    for id in [dead, me] {
        member(&client, id, 0).await;
    }
    // The dead entries that a vacuum has not removed yet are what this is about.
    run(
        &client,
        &format!(
            "alter table wh_outbox set (autovacuum_enabled = off); \
             insert into wh_outbox (message_type, payload, instance_id, lease_expiry) \
             select 't', '1', '{dead}', clock_timestamp() + interval '1 hour' from generate_series(1, 90000); \
             insert into wh_outbox (message_type, payload) select 't', '1' from generate_series(1, 1000)"
        ),
    )
    .await;
    run(&client, "vacuum analyze wh_outbox").await;
    let mut before = i64::MAX;
    for _ in 0..3 {
        before = before.min(pages_of_a_claim(&claiming, me).await);
    }
    run(&client, &format!("select evict_instance('{dead}', null, 'died')")).await;
    for _ in 0..80 {
        assert_eq!(value::<i32>(&client, "select released from wh_release_pass(1000)").await, 1_000);
    }
    // One of them may look past the front of the fresh rows, as it does once a second.
    let mut after = i64::MAX;
    for _ in 0..3 {
        after = after.min(pages_of_a_claim(&claiming, me).await);
    }
    assert!(after <= before * 3 / 2, "{after} pages a claim, {before} before anybody died");
}
