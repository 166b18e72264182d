//! `renew_leases`: the original form, for operators. Three categories, not fenced.

use std::time::Duration;

use uuid::Uuid;

use crate::work::{Claim, INBOX, KINDS, Kind, Lab, OUTBOX, PERSPECTIVE, Session, refusal, scattered};

static THREE: [&Kind; 3] = [&OUTBOX, &INBOX, &PERSPECTIVE];

async fn renew(
    db: &Session,
    category: &str,
    ids: &[Uuid],
    seconds: i32,
) -> Result<i32, tokio_postgres::Error> {
    Ok(db.query_one("select renew_leases($1, $2, $3)", &[&category, &ids, &seconds]).await?.get(0))
}

#[tokio::test]
async fn leases_are_extended_and_counted() {
    for kind in THREE {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let stored = db.store_many(kind, scattered(1), 3).await;
        db.claim(&Claim::of(me).seconds(60)).await;
        let before = db.now().await;
        let mut asked = stored[..2].to_vec();
        asked.push(scattered(77));
        assert_eq!(renew(&db, kind.category, &asked, 600).await.unwrap(), 2, "{kind:?}");
        for id in &stored[..2] {
            let state = db.state(kind, *id).await.unwrap();
            assert!(state.expiry.unwrap() >= before + Duration::from_mins(10));
            assert_eq!((state.instance, state.epoch, state.attempts), (Some(me), 1, 1));
        }
        let untouched = db.state(kind, stored[2]).await.unwrap().expiry.unwrap();
        assert!(untouched < before + Duration::from_secs(61));
    }
}

#[tokio::test]
async fn the_default_is_300_seconds() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    let id = db.store(&OUTBOX, scattered(1)).await;
    db.claim(&Claim::of(me).seconds(60)).await;
    let before = db.now().await;
    let sql = "select renew_leases('outbox', array[$1::uuid])";
    assert_eq!(db.query_one(sql, &[&id]).await.unwrap().get::<_, i32>(0), 1);
    let after = db.now().await;
    let end = db.state(&OUTBOX, id).await.unwrap().expiry.unwrap();
    let whole = Duration::from_mins(5);
    assert!((before + whole..=after + whole).contains(&end), "{end:?}");
}

#[tokio::test]
async fn processed_expired_and_free_rows_are_skipped() {
    for kind in THREE {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let stored = db.store_many(kind, scattered(1), 3).await;
        db.claim(&Claim::of(me).rows(2)).await;
        let end = format!(
            "update {} set lease_expiry = clock_timestamp() - interval '1 second' where {} = $1",
            kind.table, kind.key
        );
        db.execute(&end, &[&stored[0]]).await.unwrap();
        let done = format!("update {} set {} = now() where {} = $1", kind.table, kind.done, kind.key);
        db.execute(&done, &[&stored[1]]).await.unwrap();
        assert_eq!(renew(&db, kind.category, &stored, 600).await.unwrap(), 0, "{kind:?}");
        assert_eq!(db.state(kind, stored[2]).await.unwrap().expiry, None);
    }
}

#[tokio::test]
async fn an_unknown_category_is_refused_and_so_is_the_receptor_even_for_nothing() {
    let (_lab, db) = Lab::new().await;
    for category in ["receptor", "out", "", "perspective"] {
        for ids in [vec![], vec![scattered(1)]] {
            let (code, hint) = refusal(&renew(&db, category, &ids, 300).await.unwrap_err());
            assert_eq!(code, "WH002");
            assert_eq!(hint.unwrap(), "Leases can be renewed for outbox, inbox and perspective_event.");
        }
    }
    for kind in THREE {
        assert_eq!(renew(&db, kind.category, &[], 300).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn a_time_below_one_second_is_refused() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    let id = db.store(&OUTBOX, scattered(1)).await;
    db.claim(&Claim::of(me)).await;
    let held = db.state(&OUTBOX, id).await;
    for seconds in ["0", "-5", "null"] {
        let sql = format!("select renew_leases('outbox', array['{id}'::uuid], {seconds})");
        let answer = db.query_one(&sql, &[]).await;
        let error = answer.err().unwrap_or_else(|| panic!("{seconds} seconds accepted"));
        assert_eq!(refusal(&error).0, "22023", "{seconds}");
    }
    assert_eq!(db.state(&OUTBOX, id).await, held);
}

#[tokio::test]
async fn a_lease_is_extended_from_now_inside_a_long_transaction() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let id = db.store(kind, scattered(1)).await;
        let got = db.claim(&Claim::of(me)).await;
        db.batch_execute("begin; select pg_sleep(0.5)").await.unwrap();
        let before = db.now().await;
        if kind.category == "receptor" {
            let sql = "select * from renew_claims('receptor', $1, array[$2::uuid], array[$3::bigint], 60)";
            db.query(sql, &[&me, &id, &got[0].epoch]).await.unwrap();
        } else {
            assert_eq!(renew(&db, kind.category, &[id], 60).await.unwrap(), 1);
        }
        db.batch_execute("commit").await.unwrap();
        let end = db.state(kind, id).await.unwrap().expiry.unwrap();
        assert!(end >= before + Duration::from_mins(1), "{kind:?}");
    }
}
