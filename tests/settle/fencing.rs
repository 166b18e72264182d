//! Whoever does not hold the claim changes nothing, and is told so.

use uuid::Uuid;

use crate::work::{Claim, Claimed, KINDS, Kind, Lab, Session, ids, refusal, scattered, verdict};

const VERDICTS: [&str; 4] = ["complete", "retry", "release", "dead_letter"];

async fn changes_nothing(db: &Session, kind: &Kind, me: Uuid, row: &Claimed, what: &str) {
    let before = db.state(kind, row.id).await;
    for name in VERDICTS {
        assert_eq!(db.settle(me, &[verdict(row, name)]).await, [row.id], "{what}: {name} of {kind:?}");
        assert_eq!(db.state(kind, row.id).await, before, "{what}: {name} of {kind:?}");
    }
    assert_eq!(db.number("select count(*) from wh_dead_letters").await, 0);
}

#[tokio::test]
async fn another_instance_is_fenced() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let (me, other) = (db.member().await, db.member().await);
        db.store(kind, scattered(1)).await;
        let got = db.claim(&Claim::of(me)).await;
        changes_nothing(&db, kind, other, &got[0], "not the holder").await;
        changes_nothing(&db, kind, Uuid::now_v7(), &got[0], "nobody").await;
    }
}

/// Refused by the epoch alone: instance and state are the same.
#[tokio::test]
async fn an_old_epoch_of_the_same_instance_is_fenced() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        db.store(kind, scattered(1)).await;
        let old = db.claim(&Claim::of(me)).await;
        db.let_leases_run_out(kind).await;
        let new = db.claim(&Claim::of(me)).await;
        assert_eq!(ids(&new), ids(&old));
        changes_nothing(&db, kind, me, &old[0], "an old epoch").await;
        assert!(db.complete(me, &new).await.is_empty());
    }
}

#[tokio::test]
async fn a_row_that_was_handed_back_is_nobody_s() {
    for kind in KINDS {
        for how in ["release", "retry"] {
            let (_lab, db) = Lab::new().await;
            let me = db.member().await;
            db.store(kind, scattered(1)).await;
            let got = db.claim(&Claim::of(me)).await;
            db.settle(me, &[verdict(&got[0], how)]).await;
            changes_nothing(&db, kind, me, &got[0], how).await;
        }
    }
}

#[tokio::test]
async fn the_epoch_only_grows_whatever_clears_the_lease() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let id = db.store(kind, scattered(1)).await;
        for (round, how) in ["release", "retry", "expiry", "eviction", "unheld"].into_iter().enumerate() {
            let got = db.claim(&Claim::of(me)).await;
            assert_eq!(got[0].epoch, round as i64 + 1, "before {how} of {kind:?}");
            match how {
                "expiry" => db.let_leases_run_out(kind).await,
                "unheld" => {
                    let sql = "select release_unheld($1, '{}', '{}')";
                    assert_eq!(db.query_one(sql, &[&me]).await.unwrap().get::<_, i32>(0), 1);
                }
                "eviction" => {
                    let sql = format!("update {} set instance_id = null, lease_expiry = null", kind.table);
                    db.batch_execute(&sql).await.unwrap();
                }
                how => assert!(db.settle(me, &[verdict(&got[0], how)]).await.is_empty()),
            }
            db.park(kind, id, -1.0).await;
        }
        assert_eq!(db.state(kind, id).await.unwrap().epoch, 5);
    }
}

#[tokio::test]
async fn a_lease_that_ran_out_still_settles_until_somebody_takes_the_row() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let (me, other) = (db.member().await, db.member().await);
        db.store_many(kind, scattered(1), 2).await;
        let got = db.claim(&Claim::of(me)).await;
        db.let_leases_run_out(kind).await;
        assert!(db.complete(me, &got[..1]).await.is_empty(), "nobody was faster");
        let taken = db.claim(&Claim::of(other)).await;
        assert_eq!(ids(&taken), [got[1].id], "{kind:?}");
        changes_nothing(&db, kind, me, &got[1], "taken over").await;
    }
}

#[tokio::test]
async fn an_evicted_caller_is_told_so_and_changes_nothing() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let id = db.store(kind, scattered(1)).await;
        let got = db.claim(&Claim::of(me)).await;
        db.evict(me).await;
        let before = db.state(kind, id).await;
        for name in VERDICTS {
            let error = db.try_settle(me, &[verdict(&got[0], name)], false).await.unwrap_err();
            let (code, hint) = refusal(&error);
            assert_eq!(
                (code.as_str(), hint.unwrap().as_str()),
                ("WH001", "Discard the results: others have these rows now.")
            );
        }
        assert_eq!(db.state(kind, id).await, before);
    }
}

#[tokio::test]
async fn unknown_ids_come_back_and_are_no_error() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        db.store(kind, scattered(1)).await;
        let got = db.claim(&Claim::of(me)).await;
        let mut unknown = verdict(&got[0], "complete");
        unknown.id = scattered(9);
        assert_eq!(db.settle(me, &[unknown, verdict(&got[0], "complete")]).await, [scattered(9)]);
    }
}

#[tokio::test]
async fn one_row_under_its_old_and_its_new_epoch_is_settled_once() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        db.store(kind, scattered(1)).await;
        let old = db.claim(&Claim::of(me)).await;
        db.let_leases_run_out(kind).await;
        let new = db.claim(&Claim::of(me)).await;
        let both = [verdict(&old[0], "dead_letter"), verdict(&new[0], "complete")];
        db.settle(me, &both).await;
        assert_eq!(db.state(kind, new[0].id).await, None);
        assert_eq!(db.number("select count(*) from wh_dead_letters").await, 0, "the old one was fenced");
    }
}
