//! A claim never waits for a lock: whatever somebody holds, it takes the rest and returns.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Barrier;
use uuid::Uuid;

use crate::work::{Claim, KINDS, Kind, Lab, OUTBOX, Session, ids, scattered};

/// A session in which waiting for a lock is an error. What these tests lock stays locked until the session has answered; the limit is
/// long enough for the instants of a busy server, such as the growth of a table.
async fn impatient(lab: &Lab) -> Session {
    let session = lab.session().await;
    session.batch_execute("set lock_timeout = '5s'; set statement_timeout = '60s'").await.expect("timeouts");
    session
}

async fn lock(outsider: &Session, kind: &Kind, id: Uuid) {
    let sql = format!("select 1 from {} where {} = $1 for update", kind.table, kind.key);
    outsider.query(&sql, &[&id]).await.expect("a lock");
}

#[tokio::test]
async fn a_locked_head_blocks_its_stream_alone() {
    for kind in KINDS {
        let (lab, db) = Lab::new().await;
        let (me, claimer) = (db.member().await, impatient(&lab).await);
        let locked = db.store_many(kind, scattered(1), 3).await;
        let free = db.store_many(kind, scattered(2), 3).await;
        db.batch_execute("begin").await.unwrap();
        lock(&db, kind, locked[0]).await;
        assert_eq!(ids(&claimer.claim(&Claim::of(me)).await), free, "{kind:?}");
        db.batch_execute("commit").await.unwrap();
        assert_eq!(ids(&claimer.claim(&Claim::of(me)).await), locked);
    }
}

#[tokio::test]
async fn a_locked_row_without_a_stream_is_left_out() {
    for kind in KINDS.into_iter().filter(|kind| kind.unordered) {
        let (lab, db) = Lab::new().await;
        let (me, claimer) = (db.member().await, impatient(&lab).await);
        let stored = db.store_many(kind, None, 3).await;
        db.batch_execute("begin").await.unwrap();
        lock(&db, kind, stored[1]).await;
        assert_eq!(ids(&claimer.claim(&Claim::of(me)).await), [stored[0], stored[2]], "{kind:?}");
        db.batch_execute("commit").await.unwrap();
        assert_eq!(
            ids(&claimer.claim(&Claim::of(me)).await),
            [stored[1]],
            "the pass from the front finds it"
        );
    }
}

#[tokio::test]
async fn a_row_that_is_due_or_expired_but_locked_is_left_for_later() {
    for kind in KINDS {
        let (lab, db) = Lab::new().await;
        let (me, claimer) = (db.member().await, impatient(&lab).await);
        let due = db.store(kind, scattered(1)).await;
        let expired = db.store_many(kind, scattered(2), 2).await;
        claimer.claim(&Claim::of(me)).await;
        db.let_leases_run_out(kind).await;
        db.batch_execute("begin").await.unwrap();
        lock(&db, kind, due).await;
        lock(&db, kind, expired[0]).await;
        // The second of the expired run may come free, but its stream stays blocked by the first.
        assert_eq!(ids(&claimer.claim(&Claim::of(me)).await), Vec::<Uuid>::new(), "{kind:?}");
        db.batch_execute("commit").await.unwrap();
        let mut got = ids(&claimer.claim(&Claim::of(me)).await);
        got.sort_unstable();
        assert_eq!(got, [&[due][..], &expired].concat());
    }
}

#[tokio::test]
async fn a_locked_affinity_row_holds_up_no_claim() {
    for kind in KINDS {
        let (lab, db) = Lab::new().await;
        let (me, claimer) = (db.member().await, impatient(&lab).await);
        let stored = db.store_many(kind, scattered(1), 3).await;
        db.batch_execute("begin; select 1 from wh_active_streams for update").await.unwrap();
        assert_eq!(ids(&claimer.claim(&Claim::of(me)).await), stored, "{kind:?}");
        db.batch_execute("commit").await.unwrap();
    }
}

#[tokio::test]
async fn an_affinity_row_that_somebody_is_just_inserting_holds_up_no_claim() {
    let (lab, db) = Lab::new().await;
    let (me, claimer) = (db.member().await, impatient(&lab).await);
    let stored = db.store_many(&OUTBOX, scattered(1), 3).await;
    db.batch_execute("delete from wh_active_streams; begin").await.unwrap();
    db.execute("insert into wh_active_streams (stream_id) values ($1)", &[&scattered(1)]).await.unwrap();
    assert_eq!(ids(&claimer.claim(&Claim::of(me)).await), stored);
    db.batch_execute("commit").await.unwrap();
}

#[tokio::test]
async fn a_claim_held_open_leaves_the_rest_to_others() {
    for kind in KINDS {
        let (lab, db) = Lab::new().await;
        let (one, two, claimer) = (db.member().await, db.member().await, impatient(&lab).await);
        let first = db.store_many(kind, scattered(1), 3).await;
        db.batch_execute("begin").await.unwrap();
        assert_eq!(ids(&db.claim(&Claim::of(one)).await), first);
        let second = claimer.store_many(kind, scattered(2), 3).await;
        claimer.store(kind, scattered(1)).await;
        assert_eq!(ids(&claimer.claim(&Claim::of(two)).await), second, "{kind:?}");
        db.batch_execute("commit").await.unwrap();
    }
}

#[tokio::test]
async fn a_claim_held_open_does_not_hold_up_the_heartbeat_of_its_instance() {
    let (lab, db) = Lab::new().await;
    let (me, beater) = (db.member().await, impatient(&lab).await);
    db.store(&OUTBOX, scattered(1)).await;
    db.batch_execute("begin").await.unwrap();
    assert_eq!(db.claim(&Claim::of(me)).await.len(), 1);
    let sql = "update wh_service_instances set last_heartbeat_at = clock_timestamp() where instance_id = $1";
    assert_eq!(beater.execute(sql, &[&me]).await.unwrap(), 1);
    let beat = "select record_heartbeat($1, 's', 'h', 1)";
    assert!(beater.query_one(beat, &[&me]).await.unwrap().get::<_, bool>(0));
    db.batch_execute("commit").await.unwrap();
}

#[tokio::test]
async fn a_heartbeat_held_open_does_not_hold_up_a_claim() {
    let (lab, db) = Lab::new().await;
    let (me, claimer) = (db.member().await, impatient(&lab).await);
    let id = db.store(&OUTBOX, scattered(1)).await;
    db.batch_execute("begin; update wh_service_instances set last_heartbeat_at = clock_timestamp()")
        .await
        .unwrap();
    assert_eq!(ids(&claimer.claim(&Claim::of(me)).await), [id]);
    db.batch_execute("commit").await.unwrap();
}

#[tokio::test]
async fn a_store_held_open_does_not_hold_up_a_claim_nor_a_claim_a_store() {
    for kind in KINDS {
        let (lab, db) = Lab::new().await;
        let (me, claimer, other) = (db.member().await, impatient(&lab).await, impatient(&lab).await);
        let first = db.store(kind, scattered(1)).await;
        db.batch_execute("begin").await.unwrap();
        db.store(kind, scattered(1)).await;
        db.store(kind, scattered(2)).await;
        claimer.batch_execute("begin").await.unwrap();
        assert_eq!(ids(&claimer.claim(&Claim::of(me)).await), [first], "{kind:?}");
        other.store(kind, scattered(1)).await;
        other.store(kind, scattered(2)).await;
        claimer.batch_execute("commit").await.unwrap();
        db.batch_execute("commit").await.unwrap();
    }
}

/// Two claims in transactions of their own that visit everything cannot deadlock, since neither waits.
#[tokio::test]
async fn parallel_claims_of_everything_never_wait_for_each_other() {
    let (lab, db) = Lab::new().await;
    for kind in KINDS {
        for stream in 0..20 {
            db.store_many(kind, scattered(stream), 5).await;
        }
    }
    let mut sessions = Vec::new();
    for _ in 0..8 {
        sessions.push((impatient(&lab).await, db.member().await));
    }
    let (all, finished) = (Barrier::new(sessions.len()), AtomicUsize::new(0));
    let work = sessions.iter().map(async |(session, me)| {
        let mut rounds = 0;
        while finished.load(Ordering::Relaxed) < 400 {
            rounds += 1;
            assert!(rounds <= 200, "{finished:?} of 400 rows after 200 rounds");
            session.batch_execute("begin").await.expect("begin");
            let got = session.claim(&Claim::of(*me).rows(30).run(3)).await;
            // Nobody commits before all have their answer: whoever waited for another would wait for ever.
            all.wait().await;
            session.batch_execute("commit").await.expect("commit");
            session.complete(*me, &got).await;
            finished.fetch_add(got.len(), Ordering::Relaxed);
            all.wait().await;
        }
    });
    futures_util::future::join_all(work).await;
    assert_eq!(finished.into_inner(), 400);
}
