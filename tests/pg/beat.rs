//! Beats where the direct URL leads nowhere: they go through the pooled one, and come back to the direct one.

use std::time::Duration;

use tokio::time::Instant;
use workpump_actors::instance::{Gate, InstanceId, InstanceIdentity};
use workpump_actors::port::{Beat, BeatAnswer, InstanceStore, StoreError};
use workpump_actors::work::Category;

use super::{config, instance, schema, value};
use crate::common::{self, Bouncer};
use crate::pg::instance_store::PgInstanceStore;

fn beat(id: InstanceId) -> Beat {
    let identity =
        InstanceIdentity { id, service_name: "s".to_owned(), host_name: "h".to_owned(), process_id: 1 };
    let (gate, gate_reason) = (Gate::Unavailable, Some("why".to_owned()));
    let interval = Duration::from_secs(30);
    let categories = [Category::Inbox, Category::Receptor].into();
    Beat { identity, interval, lock_declared: false, accepts_work: true, categories, gate, gate_reason }
}

#[tokio::test]
async fn beats_go_through_the_pool_when_the_direct_url_leads_nowhere_or_to_the_pooler() {
    let db = common::database().await;
    let control = db.connect().await;
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 5).await else { return };
    let pooled = config(&bouncer.url(db.name()));
    let closed = config("postgresql://postgres@127.0.0.1:1/x");
    for (n, direct) in [(1, closed), (2, pooled.clone())] {
        let store = PgInstanceStore::new(&schema(), direct, pooled.clone());
        assert!(store.schema_ready().await.unwrap());
        assert_eq!(store.beat(beat(instance(n))).await.unwrap(), BeatAnswer::Accepted);
        store.deregister(instance(n)).await.unwrap();
        assert_eq!(store.beat(beat(instance(n))).await.unwrap(), BeatAnswer::Evicted);
    }
    assert_eq!(value::<i64>(&control, "select count(*) from wh_instance_evictions").await, 2);
}

#[tokio::test]
async fn a_direct_url_that_accepts_and_stays_silent_costs_half_of_the_time_and_not_the_beat() {
    let db = common::database().await;
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let direct = config(&format!("postgresql://postgres@{}/x", silent.local_addr().expect("an address")));
    let store = PgInstanceStore::new(&schema(), direct, config(db.url()));
    let start = Instant::now();
    assert_eq!(store.beat(beat(instance(1))).await.unwrap(), BeatAnswer::Accepted);
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    let start = Instant::now();
    assert_eq!(store.beat(beat(instance(1))).await.unwrap(), BeatAnswer::Accepted);
    assert!(start.elapsed() < Duration::from_secs(3), "kept for a while: {:?}", start.elapsed());
}

#[tokio::test]
async fn a_beat_says_how_the_gate_stands_and_why() {
    let db = common::database().await;
    let control = db.connect().await;
    let store = PgInstanceStore::new(&schema(), config(db.url()), config(db.url()));
    let metadata = "select coalesce(metadata ->> 'gate', '-') || ' ' || coalesce(metadata ->> 'gate_reason', '-') \
                    from wh_service_instances";
    store.beat(beat(instance(1))).await.unwrap();
    assert_eq!(value::<String>(&control, metadata).await, "unavailable why");
    store.beat(Beat { gate: Gate::Available, gate_reason: None, ..beat(instance(1)) }).await.unwrap();
    assert_eq!(value::<String>(&control, metadata).await, "available -");
}

#[tokio::test]
async fn a_beat_says_what_its_instance_runs() {
    let db = common::database().await;
    let control = db.connect().await;
    let store = PgInstanceStore::new(&schema(), config(db.url()), config(db.url()));
    let declared = "select categories from wh_live_instances";
    store.beat(beat(instance(1))).await.unwrap();
    assert_eq!(value::<Vec<String>>(&control, declared).await, ["inbox", "receptor"]);
    store.beat(Beat { categories: [].into(), ..beat(instance(1)) }).await.unwrap();
    assert_eq!(value::<Vec<String>>(&control, declared).await, [""; 0], "nothing is not everything");
}

#[tokio::test]
async fn without_any_way_a_beat_is_unavailable() {
    let closed = config("postgresql://postgres@127.0.0.1:1/x");
    let store = PgInstanceStore::new(&schema(), closed.clone(), closed);
    let error = store.beat(beat(instance(1))).await.expect_err("nobody there");
    assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
}
