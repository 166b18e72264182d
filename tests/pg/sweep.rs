//! The backstop: one sweeper at a time, and a release in bounded steps that anybody continues.

use tokio::runtime::Handle;
use tokio_postgres::Client;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::{StoreError, SweepStore, Swept};

use super::{beat, config, connect, instance, run, schema, value};
use crate::common::{self, Bouncer, Database};
use crate::pg::sweep_store::PgSweepStore;
use crate::pg::work_store::PgWorkStore;

fn store(url: &str) -> PgSweepStore {
    let work = PgWorkStore::new(&schema(), &config(url), config(url), Handle::current(), false);
    PgSweepStore::new(&schema(), work.pool())
}

fn store_of(db: &Database) -> PgSweepStore {
    store(db.url())
}

/// A member that has not beaten for three minutes. Not by a beat: a beat sweeps.
async fn stale(client: &Client, id: InstanceId) {
    run(client, &format!(
        "insert into wh_service_instances (instance_id, service_name, host_name, process_id, heartbeat_interval_seconds, lock_declared, \
         last_heartbeat_at) values ('{id}', 's', 'h', 1, 60, true, clock_timestamp() - interval '3 min')"
    )).await;
}

async fn age(client: &Client, id: InstanceId, by: &str) {
    run(client, &format!(
        "update wh_service_instances set last_heartbeat_at = last_heartbeat_at - interval '{by}' where instance_id = '{id}'"
    )).await;
}

async fn lease(client: &Client, id: InstanceId, rows: u32) {
    run(
        client,
        &format!(
            "insert into wh_outbox (message_type, payload, destination, instance_id, lease_expiry) \
         select 't', '1', 'd', '{id}', clock_timestamp() + interval '5 min' from generate_series(1, {rows})"
        ),
    )
    .await;
}

async fn leased(client: &Client, id: InstanceId) -> i64 {
    value(client, &format!("select count(*) from wh_outbox where instance_id = '{id}'")).await
}

#[tokio::test]
async fn a_sweep_evicts_the_stale_and_hands_their_rows_back_but_never_its_own() {
    let db = common::database().await;
    let control = db.connect().await;
    let sweeper = store_of(&db);
    let me = instance(1);
    assert_eq!(sweeper.sweep(me).await.unwrap(), Some(Swept::default()));
    beat(&control, instance(3), false).await;
    stale(&control, me).await;
    stale(&control, instance(2)).await;
    stale(&control, instance(4)).await;
    let (holder, _notifications) = connect(db.url()).await.unwrap();
    assert!(holder.claim_alive_lock(instance(4)).await.unwrap());
    lease(&control, instance(2), 7).await;
    let swept = sweeper.sweep(me).await.unwrap();
    assert_eq!(swept, Some(Swept { evicted: vec![instance(2)], released: 7, unfinished: false }));
    assert_eq!(leased(&control, instance(2)).await, 0);
    age(&control, instance(4), "3 min").await;
    let swept = sweeper.sweep(me).await.unwrap().expect("nobody else is at it");
    assert_eq!(
        swept.evicted,
        [instance(4)],
        "five minutes without a beat: the lock is a half-open session's"
    );
    let members = "select string_agg(instance_id::text, ' ' order by instance_id) from wh_service_instances";
    assert_eq!(value::<String>(&control, members).await, format!("{me} {}", instance(3)));
}

#[tokio::test]
async fn while_one_sweeps_the_others_are_told_so() {
    let db = common::database().await;
    let (control, other) = (db.connect().await, db.connect().await);
    stale(&control, instance(2)).await;
    let sweeper = store_of(&db);
    run(&other, &format!("begin; select wh_sweep_stale('{}')", instance(9))).await;
    assert_eq!(sweeper.sweep(instance(1)).await.unwrap(), None);
    run(&other, "commit").await;
    let swept = sweeper.sweep(instance(1)).await.unwrap().expect("free again");
    assert!(swept.evicted.is_empty(), "the other one did it");
}

#[tokio::test]
async fn however_many_sweep_at_once_each_death_is_found_by_one() {
    let db = common::database().await;
    let control = db.connect().await;
    for n in 10..30 {
        stale(&control, instance(n)).await;
    }
    let sweepers: Vec<_> = (0..4).map(|_| store_of(&db)).collect();
    let sweeps = sweepers.iter().map(|sweeper| sweeper.sweep(instance(1)));
    let swept = futures_util::future::join_all(sweeps).await;
    let mut evicted: Vec<_> =
        swept.into_iter().filter_map(|swept| swept.unwrap()).flat_map(|swept| swept.evicted).collect();
    evicted.sort_unstable();
    assert_eq!(evicted, (10..30).map(instance).collect::<Vec<_>>());
}

#[tokio::test]
async fn the_evicted_sweep_nobody() {
    let db = common::database().await;
    let control = db.connect().await;
    run(&control, &format!("select evict_instance('{}', null, 'test')", instance(1))).await;
    stale(&control, instance(2)).await;
    let error = store_of(&db).sweep(instance(1)).await.expect_err("evicted");
    assert!(matches!(error, StoreError::Evicted(id) if id == instance(1)), "{error}");
}

#[tokio::test]
async fn five_thousand_rows_come_back_in_passes_that_anybody_continues() {
    let db = common::database().await;
    let control = db.connect().await;
    let (first, second) = (store_of(&db), store_of(&db));
    let dead = instance(2);
    stale(&control, dead).await;
    lease(&control, dead, 5_000).await;
    let swept = first.sweep(instance(1)).await.unwrap().expect("nobody else is at it");
    assert_eq!(swept, Swept { evicted: vec![dead], released: 250, unfinished: true });
    let start = tokio::time::Instant::now();
    assert_eq!(first.release_pass(1_000_000).await.unwrap(), (1_000, true), "never more than a thousand");
    println!("a pass of a thousand rows: {:?}", start.elapsed());
    assert_eq!(second.release_pass(10).await.unwrap(), (10, true), "by another one, with fewer");
    assert_eq!(leased(&control, dead).await, 3_740);
    // Somebody holds one row: it is left for a later pass, and the tombstone with it.
    let holding = db.connect().await;
    run(
        &holding,
        &format!(
            "begin; select from wh_outbox where instance_id = '{dead}' order by seq desc limit 1 for update"
        ),
    )
    .await;
    let mut released = 0;
    while leased(&control, dead).await > 1 {
        let (rows, left) = second.release_pass(1_000).await.unwrap();
        assert!(rows <= 1_000 && left, "{rows} {left}");
        released += rows;
    }
    assert_eq!(released, 3_739);
    assert_eq!(second.release_pass(1_000).await.unwrap(), (0, true), "locked: not now");
    run(&holding, "rollback").await;
    assert_eq!(second.release_pass(1_000).await.unwrap(), (1, false));
    assert_eq!(second.release_pass(1_000).await.unwrap(), (0, false));
    assert!(
        !value::<bool>(
            &control,
            "select exists (select from wh_instance_evictions where released_at is null)"
        )
        .await
    );
}

#[tokio::test]
async fn assignments_of_streams_count_towards_the_bound_of_a_pass() {
    let db = common::database().await;
    let control = db.connect().await;
    let sweeper = store_of(&db);
    for n in [2, 3] {
        stale(&control, instance(n)).await;
        run(&control, &format!(
            "insert into wh_active_streams (stream_id, assigned_instance_id) select gen_random_uuid(), '{}' from generate_series(1, 800)",
            instance(n)
        )).await;
    }
    let left = "select count(*) from wh_active_streams where assigned_instance_id is not null";
    let swept = sweeper.sweep(instance(1)).await.unwrap().expect("nobody else is at it");
    assert_eq!((swept.evicted.len(), swept.released, swept.unfinished), (2, 250, true));
    assert_eq!(value::<i64>(&control, left).await, 1_350);
    assert_eq!(sweeper.release_pass(1_000).await.unwrap(), (1_000, true));
    assert_eq!(sweeper.release_pass(1_000).await.unwrap(), (350, false));
    assert_eq!(value::<i64>(&control, left).await, 0);
}

#[tokio::test]
async fn a_sweep_works_through_a_pooler() {
    let db = common::database().await;
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 5).await else { return };
    let control = db.connect().await;
    stale(&control, instance(2)).await;
    lease(&control, instance(2), 3).await;
    let swept = store(&bouncer.url(db.name())).sweep(instance(1)).await.unwrap();
    assert_eq!(swept, Some(Swept { evicted: vec![instance(2)], released: 3, unfinished: false }));
}
