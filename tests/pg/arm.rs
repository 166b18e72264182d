//! The arm lock of the session that claims: whose it is, what ends it, and what a pooler does to it.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;
use uuid::Uuid;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::{ArmMode, Armed, ClaimRequest, Doorbell, StoreError, WorkStore};
use workpump_actors::work::Category;

use super::config;
use crate::common::{self, Bouncer, Database, wait::eventually};
use crate::pg::schema_name::SchemaName;
use crate::pg::work_store::PgWorkStore;

const SOON: Duration = Duration::from_secs(20);
const SLICE: Duration = Duration::from_millis(20);

fn store(url: &str) -> Arc<PgWorkStore> {
    let schema = SchemaName::new("public").expect("a name");
    Arc::new(PgWorkStore::new(&schema, &config(url), config(url), Handle::current(), false))
}

fn instance(n: u128) -> InstanceId {
    InstanceId(Uuid::from_u128(n))
}

fn request(instance: InstanceId) -> ClaimRequest {
    ClaimRequest {
        instance,
        max_rows: 1,
        max_bytes: 1 << 20,
        lease: Duration::from_mins(1),
        partition_count: 10,
        stream_run: 1,
        categories: Category::ALL.into(),
    }
}

/// The sessions that hold this instance's arm lock, and whether as a full one.
async fn holders(db: &Database, instance: InstanceId) -> Vec<(i32, bool)> {
    let sql = format!(
        "select h.pid, exists (select 1 from wh_held_keys() f where f.key = wh_full_key('{0}') and f.pid = h.pid) \
         from wh_held_keys() h where h.key = wh_arm_key('{0}')",
        instance.0
    );
    let rows = db.connect().await.query(&sql, &[]).await.expect("locks");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

async fn arm(store: &PgWorkStore, instance: InstanceId, mode: ArmMode) -> Armed {
    store.arm(instance, SLICE, mode).await.expect("an answer").expect("nobody is at work")
}

#[tokio::test]
async fn one_session_claims_and_holds_the_lock_once_however_often_it_is_asked_for() {
    let db = common::database().await;
    let (store, me) = (store(db.url()), instance(1));
    store.disarm(me).await.expect("nothing to give back, and nothing asked");
    let mut sessions = Vec::new();
    for (mode, full) in [
        (ArmMode::Idle, false),
        (ArmMode::Idle, false),
        (ArmMode::Full, true),
        (ArmMode::Full, true),
        (ArmMode::Idle, false),
    ] {
        arm(&store, me, mode).await;
        store.claim(request(me)).await.expect("a claim, armed");
        let held = holders(&db, me).await;
        assert!(held.len() == 1 && held[0].1 == full, "{mode:?}: {held:?}");
        sessions.push(held[0].0);
    }
    sessions.dedup();
    assert_eq!(sessions.len(), 1);
    for mode in [ArmMode::Idle, ArmMode::Full] {
        arm(&store, me, mode).await;
        store.disarm(me).await.expect("given back");
        assert_eq!(holders(&db, me).await, []);
        let left = "select count(*) from pg_locks where locktype = 'advisory' and granted and database = (select oid from pg_database where datname = current_database())";
        assert_eq!(db.connect().await.query_one(left, &[]).await.expect("locks").get::<_, i64>(0), 0);
    }
}

#[tokio::test]
async fn the_end_of_its_session_is_told_and_the_next_call_opens_another() {
    let db = common::database().await;
    let (store, me) = (store(db.url()), instance(1));
    for _ in 0..3 {
        let armed = arm(&store, me, ArmMode::Idle).await;
        let session = holders(&db, me).await[0].0;
        let kill = format!("select pg_terminate_backend({session})");
        db.connect().await.batch_execute(&kill).await.expect("killed");
        timeout(SOON, armed.ended()).await.expect("told");
        store.claim(request(me)).await.expect("on another session");
        assert_eq!(holders(&db, me).await, []);
    }
}

#[tokio::test]
async fn a_caller_that_leaves_while_it_waits_for_the_lock_leaves_no_lock_behind() {
    let db = common::database().await;
    let (store, me) = (store(db.url()), instance(1));
    let producer = db.connect().await;
    let hold = format!("begin; select pg_advisory_xact_lock_shared(wh_arm_key('{}'))", me.0);
    producer.batch_execute(&hold).await.expect("a producer at work");
    assert!(store.arm(me, SLICE, ArmMode::Idle).await.expect("an answer").is_none());
    let waiting = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.arm(me, Duration::from_secs(5), ArmMode::Idle).await.map(drop) }
    });
    let watcher = db.connect().await;
    let queued = "select exists (select 1 from pg_locks where locktype = 'advisory' and not granted and database = (select oid from pg_database where datname = current_database()))";
    eventually("it waits", async || watcher.query_one(queued, &[]).await.expect("locks").get(0)).await;
    waiting.abort();
    producer.batch_execute("commit").await.expect("it ends");
    eventually("nobody holds it", async || holders(&db, me).await.is_empty()).await;
    arm(&store, me, ArmMode::Idle).await;
}

#[tokio::test]
async fn what_an_earlier_life_has_armed_ends_when_the_next_one_claims() {
    let db = common::database().await;
    let store = store(db.url());
    let first = arm(&store, instance(1), ArmMode::Full).await;
    store.claim(request(instance(2))).await.expect("a claim under the next id");
    timeout(SOON, first.ended()).await.expect("its session has ended");
    eventually("its lock is free", async || holders(&db, instance(1)).await.is_empty()).await;
}

/// PgBouncer refuses start-up options, or is told to swallow them; claims go on either way.
#[tokio::test]
async fn a_session_that_leads_through_a_pooler_is_not_armed() {
    let db = common::database().await;
    for settings in ["", "ignore_startup_parameters = options"] {
        let server = &common::shared().postgres;
        let Some(bouncer) = Bouncer::with_settings(server, 2, settings).await else { return };
        let (store, me) = (store(&bouncer.url(db.name())), instance(1));
        for _ in 0..2 {
            let refused = store.arm(me, SLICE, ArmMode::Idle).await.expect_err("no session of its own");
            assert!(matches!(refused, StoreError::NotDirect(_)), "{refused}");
            assert_eq!(holders(&db, me).await, []);
            store.claim(request(me)).await.expect("a claim needs no direct session");
        }
    }
}

#[tokio::test]
async fn a_ring_is_passed_to_a_peer_that_sleeps_and_may_take_it() {
    let db = common::database().await;
    let (mine, theirs) = (store(db.url()), store(db.url()));
    let client = db.connect().await;
    for n in 1..=2 {
        let beat = format!("select record_heartbeat('{}', 's', 'h', 1)", instance(n).0);
        client.batch_execute(&beat).await.expect("a member");
    }
    assert!(!mine.pass_ring(instance(1)).await.expect("an answer"), "nobody sleeps");
    arm(&theirs, instance(2), ArmMode::Full).await;
    assert!(!mine.pass_ring(instance(1)).await.expect("an answer"), "whoever sleeps is full");
    arm(&theirs, instance(2), ArmMode::Idle).await;
    assert!(mine.pass_ring(instance(1)).await.expect("an answer"));
}
