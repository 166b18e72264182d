//! `renew_claims`: what the pump uses. Fenced; a row that does not come back is lost, one without an expiry is only locked.

use std::time::{Duration, SystemTime};

use uuid::Uuid;

use crate::work::{Claim, Claimed, KINDS, Kind, Lab, OUTBOX, Session, refusal, scattered};

async fn renew(db: &Session, kind: &Kind, me: Uuid, rows: &[Claimed]) -> Vec<(Uuid, Option<SystemTime>)> {
    let (ids, epochs): (Vec<_>, Vec<_>) = rows.iter().map(|row| (row.id, row.epoch)).unzip();
    let sql = "select work_id, lease_expiry from renew_claims($1, $2, $3, $4, 600)";
    let rows = db.query(sql, &[&kind.category, &me, &ids, &epochs]).await.expect("a renewal");
    let mut renewed: Vec<_> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    renewed.sort_unstable();
    renewed
}

#[tokio::test]
async fn all_rows_of_a_call_get_one_expiry() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let stored = db.store_many(kind, scattered(1), 4).await;
        db.store(kind, scattered(2)).await;
        let got = db.claim(&Claim::of(me).seconds(60)).await;
        let before = db.now().await;
        let renewed = renew(&db, kind, me, &got).await;
        assert_eq!(renewed.len(), 5, "{kind:?}");
        let end = renewed[0].1.unwrap();
        assert!(renewed.iter().all(|(_, expiry)| *expiry == Some(end)));
        assert!(end >= before + Duration::from_mins(10));
        for id in stored {
            let state = db.state(kind, id).await.unwrap();
            assert_eq!((state.expiry, state.epoch, state.attempts), (Some(end), 1, 1));
        }
    }
}

#[tokio::test]
async fn a_row_of_another_instance_epoch_or_of_nobody_is_lost() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let (me, other) = (db.member().await, db.member().await);
        let id = db.store(kind, scattered(1)).await;
        let old = db.claim(&Claim::of(me)).await;
        assert!(renew(&db, kind, other, &old).await.is_empty(), "{kind:?}");
        db.let_leases_run_out(kind).await;
        let new = db.claim(&Claim::of(me)).await;
        let held = db.state(kind, id).await;
        assert!(renew(&db, kind, me, &old).await.is_empty(), "an old epoch");
        assert_eq!(db.state(kind, id).await, held);
        db.complete(me, &new).await;
        assert!(renew(&db, kind, me, &new).await.is_empty(), "done");
    }
}

#[tokio::test]
async fn an_expired_lease_is_not_revived() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let id = db.store(kind, scattered(1)).await;
        let got = db.claim(&Claim::of(me)).await;
        db.let_leases_run_out(kind).await;
        let before = db.state(kind, id).await;
        assert!(renew(&db, kind, me, &got).await.is_empty(), "{kind:?}");
        assert_eq!(db.state(kind, id).await, before);
    }
}

#[tokio::test]
async fn a_locked_row_comes_back_without_an_expiry_and_holds_up_nobody() {
    for kind in KINDS {
        let (lab, db) = Lab::new().await;
        let (me, outsider) = (db.member().await, lab.session().await);
        let (locked, free) = (db.store(kind, scattered(1)).await, db.store(kind, scattered(2)).await);
        let got = db.claim(&Claim::of(me)).await;
        outsider.batch_execute("begin").await.unwrap();
        let sql = format!("select 1 from {} where {} = $1 for update", kind.table, kind.key);
        outsider.query(&sql, &[&locked]).await.unwrap();
        db.batch_execute("set lock_timeout = '5s'").await.unwrap();
        let renewed = renew(&db, kind, me, &got).await;
        assert_eq!((renewed[0].0, renewed[0].1), (locked, None), "{kind:?}");
        assert!(renewed[1].0 == free && renewed[1].1.is_some());
        outsider.batch_execute("commit").await.unwrap();
        assert!(renew(&db, kind, me, &got).await.iter().all(|(_, end)| end.is_some()));
    }
}

/// One expiry per run: if a row of it cannot be renewed now, the rows behind it must not outlive it.
#[tokio::test]
async fn a_run_with_a_locked_row_does_not_get_two_lease_ends_in_the_wrong_order() {
    for kind in KINDS {
        let (lab, db) = Lab::new().await;
        let (me, other, outsider) = (db.member().await, db.member().await, lab.session().await);
        let stored = db.store_many(kind, scattered(1), 3).await;
        let got = db.claim(&Claim::of(me).seconds(60)).await;
        outsider.batch_execute("begin").await.unwrap();
        let sql = format!("select 1 from {} where {} = $1 for update", kind.table, kind.key);
        outsider.query(&sql, &[&stored[0]]).await.unwrap();
        let renewed = renew(&db, kind, me, &got).await;
        assert_eq!(renewed.len(), 3, "nothing is lost yet");
        outsider.batch_execute("commit").await.unwrap();
        // Time passes without another renewal; the first row comes free.
        let expire = format!(
            "update {} set lease_expiry = clock_timestamp() where lease_expiry < clock_timestamp() + interval '5 minutes'",
            kind.table
        );
        db.batch_execute(&expire).await.unwrap();
        db.claim(&Claim::of(other)).await;
        let mut states = Vec::new();
        for id in &stored {
            states.push(db.state(kind, *id).await.unwrap().instance);
        }
        assert!(
            states[0] == Some(me) || states[1..].iter().all(|owner| *owner != Some(me)),
            "{}: the head is lost while later rows are still leased to its old owner: {states:?}",
            kind.category
        );
    }
}

#[tokio::test]
async fn an_evicted_caller_is_told_so() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        db.store(kind, scattered(1)).await;
        db.claim(&Claim::of(me)).await;
        db.evict(me).await;
        let error = db
            .query("select * from renew_claims($1, $2, '{}', '{}')", &[&kind.category, &me])
            .await
            .unwrap_err();
        let (code, hint) = refusal(&error);
        assert_eq!(
            (code.as_str(), hint.unwrap().as_str()),
            ("WH001", "Cancel what is running: others have these rows now.")
        );
    }
}

#[tokio::test]
async fn what_makes_no_sense_is_refused() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    for (call, code) in [
        ("'receptors', $1, '{}', '{}'", "WH002"),
        ("null, $1, '{}', '{}'", "WH002"),
        ("'outbox', $1, '{}', '{}', 0", "22023"),
        ("'outbox', $1, '{}', '{}', null", "22023"),
        ("'outbox', $1, array[gen_random_uuid()], '{1,2}'", "22023"),
        ("'outbox', $1, array[gen_random_uuid()], null", "22023"),
    ] {
        let answer = db.query(&format!("select * from renew_claims({call})"), &[&me]).await;
        let error = answer.err().unwrap_or_else(|| panic!("accepted: {call}"));
        assert_eq!(refusal(&error).0, code, "{call}");
    }
}

#[tokio::test]
async fn renewing_nothing_is_no_error() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    assert!(renew(&db, &OUTBOX, me, &[]).await.is_empty());
}
