//! Renewals: one answer for every row, in the order they were asked for.

use std::time::Duration;

use uuid::Uuid;
use workpump_actors::instance::InstanceId;
use workpump_actors::port::Renewal::{Locked, Lost, Renewed};
use workpump_actors::port::{RenewalStore, StoreError};
use workpump_actors::work::{Category, ClaimEpoch, WorkId, WorkKey};

use super::work::{Claim, Claimed, KINDS, Kind, Lab, OUTBOX, Session, scattered};
use super::{config, schema};
use crate::common::{self, Bouncer};
use crate::pg::renewal_store::PgRenewalStore;

const LEASE: Duration = Duration::from_mins(10);

fn store(lab: &Lab) -> PgRenewalStore {
    PgRenewalStore::new(&schema(), config(lab.db.url()), config(lab.db.url()))
}

fn item(row: &Claimed) -> (WorkKey, ClaimEpoch) {
    let category = Category::parse(&row.category).expect("a category");
    (WorkKey { category, id: WorkId(row.id) }, ClaimEpoch(row.epoch))
}

/// Five rows in each category: a run of four, and one of another stream.
async fn claim_some(db: &Session, me: Uuid) -> Vec<Claimed> {
    for kind in KINDS {
        db.store_many(kind, scattered(1), 4).await;
        db.store(kind, scattered(2)).await;
    }
    db.claim(&Claim::of(me).seconds(60)).await
}

/// Holds a row locked until the session is told otherwise.
async fn lock(db: &Session, kind: &Kind, id: Uuid) {
    let sql = format!("begin; select from {} where {} = '{id}' for update", kind.table, kind.key);
    db.batch_execute(&sql).await.expect("a lock");
}

#[tokio::test]
async fn a_batch_over_all_categories_is_renewed_in_one_call_and_to_one_expiry() {
    let (lab, db) = Lab::new().await;
    let me = db.member().await;
    let rows = claim_some(&db, me).await;
    let items: Vec<_> = rows.iter().map(item).collect();
    assert_eq!(items.len(), 20);
    let answer = store(&lab).renew(InstanceId(me), items, LEASE).await.unwrap();
    assert_eq!(answer, [Renewed; 20]);
    let now = db.now().await;
    for kind in KINDS {
        let rows = rows.iter().filter(|row| row.category == kind.category);
        let mut ends = Vec::new();
        for row in rows {
            ends.push(db.state(kind, row.id).await.unwrap().expiry.unwrap());
        }
        assert!(ends.iter().all(|end| *end == ends[0]), "{kind:?}: {ends:?}");
        assert!(ends[0] > now + LEASE - Duration::from_mins(1), "{kind:?}");
    }
}

#[tokio::test]
async fn every_answer_stands_where_its_question_stood() {
    let (lab, db) = Lab::new().await;
    let me = db.member().await;
    for _ in 0..3 {
        db.store(&OUTBOX, None).await;
    }
    let renewed = db.claim(&Claim::of(me)).await;
    db.store(&OUTBOX, None).await;
    let done = db.claim(&Claim::of(me)).await;
    db.complete(me, &done).await;
    let outsider = lab.session().await;
    lock(&outsider, &OUTBOX, renewed[1].id).await;
    let mut stale = item(&renewed[2]);
    stale.1 = ClaimEpoch(stale.1.0 - 1);
    let nobody = (WorkKey { category: Category::Inbox, id: WorkId(Uuid::now_v7()) }, ClaimEpoch(1));
    let (store, me) = (store(&lab), InstanceId(me));
    let items =
        vec![item(&done[0]), item(&renewed[1]), stale, item(&renewed[0]), nobody, item(&renewed[2]), stale];
    let answer = store.renew(me, items.clone(), LEASE).await.unwrap();
    assert_eq!(answer, [Lost, Locked, Lost, Renewed, Lost, Renewed, Lost]);
    outsider.batch_execute("rollback").await.unwrap();
    let answer = store.renew(me, items, LEASE).await.unwrap();
    assert_eq!(answer, [Lost, Renewed, Lost, Renewed, Lost, Renewed, Lost]);
    assert_eq!(store.renew(me, Vec::new(), LEASE).await.unwrap(), []);
}

#[tokio::test]
async fn what_waits_behind_a_locked_row_of_its_run_is_locked_too() {
    for kind in KINDS {
        let (lab, db) = Lab::new().await;
        let me = db.member().await;
        db.store_many(kind, scattered(1), 4).await;
        let mut run = db.claim(&Claim::of(me).seconds(60)).await;
        run.sort_by_key(|row| row.seq);
        let outsider = lab.session().await;
        lock(&outsider, kind, run[1].id).await;
        let items: Vec<_> = run.iter().map(item).collect();
        let answer = store(&lab).renew(InstanceId(me), items, LEASE).await.unwrap();
        assert_eq!(answer, [Renewed, Locked, Locked, Locked], "{kind:?}");
        outsider.batch_execute("rollback").await.expect("the lock is given up");
        let alone = vec![item(&run[3])];
        let answer = store(&lab).renew(InstanceId(me), alone, LEASE).await.unwrap();
        assert_eq!(answer, [Locked], "it must not outlive what runs before it");
    }
}

#[tokio::test]
async fn another_owners_and_expired_leases_are_lost_and_the_evicted_are_told() {
    let (lab, db) = Lab::new().await;
    let (me, other) = (db.member().await, db.member().await);
    db.store(&OUTBOX, None).await;
    let rows = db.claim(&Claim::of(me)).await;
    let items: Vec<_> = rows.iter().map(item).collect();
    let store = store(&lab);
    assert_eq!(store.renew(InstanceId(other), items.clone(), LEASE).await.unwrap(), [Lost]);
    db.let_leases_run_out(&OUTBOX).await;
    assert_eq!(store.renew(InstanceId(me), items.clone(), LEASE).await.unwrap(), [Lost]);
    db.evict(me).await;
    let error = store.renew(InstanceId(me), items, LEASE).await.expect_err("evicted");
    assert!(matches!(error, StoreError::Evicted(id) if id == InstanceId(me)), "{error}");
}

#[tokio::test]
async fn a_renewal_that_fails_says_nothing_about_any_lease_and_the_next_one_works() {
    let (lab, db) = Lab::new().await;
    let me = db.member().await;
    db.store(&OUTBOX, None).await;
    let items: Vec<_> = db.claim(&Claim::of(me)).await.iter().map(item).collect();
    let store = store(&lab);
    assert_eq!(store.renew(InstanceId(me), items.clone(), LEASE).await.unwrap(), [Renewed]);
    assert_eq!(super::kill_sessions(&db).await, 1);
    let mut failures = 0;
    let answer = loop {
        match store.renew(InstanceId(me), items.clone(), LEASE).await {
            Ok(answer) => break answer,
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
        failures += 1;
        assert!(failures < 10);
    };
    assert_eq!(answer, [Renewed]);
}

#[tokio::test]
async fn renewals_go_through_a_pooler_where_nothing_else_is_open() {
    let (lab, db) = Lab::new().await;
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 5).await else { return };
    let me = db.member().await;
    db.store(&OUTBOX, None).await;
    let items: Vec<_> = db.claim(&Claim::of(me)).await.iter().map(item).collect();
    let closed = config("postgresql://postgres@127.0.0.1:1/x");
    let pooled = config(&bouncer.url(lab.db.name()));
    for direct in [closed, pooled.clone()] {
        let store = PgRenewalStore::new(&schema(), direct, pooled.clone());
        assert_eq!(store.renew(InstanceId(me), items.clone(), LEASE).await.unwrap(), [Renewed]);
    }
}
