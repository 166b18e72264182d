//! `release_unheld` and `next_claimable_at`.

use std::time::{Duration, SystemTime};

use uuid::Uuid;

use crate::work::{Claim, KINDS, Lab, OUTBOX, Session, ids, scattered};

async fn next(db: &Session, me: Uuid) -> Option<SystemTime> {
    db.query_one("select next_claimable_at($1)", &[&me]).await.expect("the next time").get(0)
}

#[tokio::test]
async fn rows_that_nobody_here_holds_go_back_with_their_attempt() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let (me, other) = (db.member().await, db.member().await);
        for stream in 1..4 {
            db.store(kind, scattered(stream)).await;
        }
        let got = db.claim(&Claim::of(me).rows(2)).await;
        let foreign = db.claim(&Claim::of(other)).await;
        let sql = "select release_unheld($1, array[$2::uuid], array[$3::bigint])";
        let release =
            async |epoch: i64| db.query_one(sql, &[&me, &got[0].id, &epoch]).await.unwrap().get::<_, i32>(0);
        assert_eq!(release(got[0].epoch).await, 1, "{kind:?}");
        assert_eq!(release(got[0].epoch).await, 0);
        assert_eq!(db.state(kind, got[0].id).await.unwrap().instance, Some(me));
        let freed = db.state(kind, got[1].id).await.unwrap();
        assert_eq!((freed.instance, freed.attempts, freed.epoch, freed.crashes), (None, 0, 1, 0));
        assert_eq!(db.state(kind, foreign[0].id).await.unwrap().instance, Some(other));
        assert_eq!(release(got[0].epoch - 1).await, 1, "held under another epoch is not held");
    }
}

#[tokio::test]
async fn no_more_than_a_thousand_go_back_in_one_call() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    for table in ["wh_outbox", "wh_inbox"] {
        let sql = format!(
            "insert into {table} (message_type, payload, instance_id, lease_expiry, attempts)
             select 'm', '{{}}', $1, clock_timestamp() + interval '1 minute', 1 from generate_series(1, 700)"
        );
        db.execute(&sql, &[&me]).await.unwrap();
    }
    for expected in [1000, 400, 0] {
        let row = db.query_one("select release_unheld($1, '{}', '{}')", &[&me]).await.unwrap();
        assert_eq!(row.get::<_, i32>(0), expected);
    }
}

#[tokio::test]
async fn a_locked_row_does_not_hold_up_the_release() {
    let (lab, db) = Lab::new().await;
    let (me, outsider) = (db.member().await, lab.session().await);
    db.store_many(&OUTBOX, None, 3).await;
    let got = db.claim(&Claim::of(me)).await;
    outsider.batch_execute("begin").await.unwrap();
    outsider.query("select 1 from wh_outbox where message_id = $1 for update", &[&got[1].id]).await.unwrap();
    db.batch_execute("set lock_timeout = '5s'").await.unwrap();
    let row = db.query_one("select release_unheld($1, '{}', '{}')", &[&me]).await.unwrap();
    assert_eq!(row.get::<_, i32>(0), 2);
}

#[tokio::test]
async fn the_next_time_is_the_earliest_schedule_or_lease_end_of_all() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let (me, other) = (db.member().await, db.member().await);
        assert_eq!(next(&db, me).await, None, "nothing waits for a time");
        let parked = db.store(kind, scattered(1)).await;
        assert_eq!(next(&db, me).await, None, "a fresh row waits for nothing");
        db.park(kind, parked, 500.0).await;
        let due = db.state(kind, parked).await.unwrap().scheduled;
        assert_eq!(next(&db, me).await, due, "{kind:?}");
        db.store(kind, scattered(2)).await;
        let late = db.claim(&Claim::of(other).seconds(700)).await;
        assert_eq!(next(&db, me).await, due);
        db.store(kind, scattered(3)).await;
        let early = db.claim(&Claim::of(me).seconds(60)).await;
        assert_eq!(next(&db, me).await, Some(early[0].expiry));
        db.complete(me, &early).await;
        assert_eq!(next(&db, me).await, due);
        db.execute(&format!("delete from {} where {} = $1", kind.table, kind.key), &[&parked]).await.unwrap();
        assert_eq!(next(&db, me).await, Some(late[0].expiry));
    }
}

/// A row that is due and that it cannot claim would stay due, and hide its own that come later.
#[tokio::test]
async fn the_next_time_is_of_what_the_instance_declared_to_run() {
    let (_lab, db) = Lab::new().await;
    let (me, nobody) = (db.member().await, Uuid::now_v7());
    let mut parked = Vec::new();
    for (kind, after) in KINDS.iter().zip([500.0, 400.0, 300.0, 200.0]) {
        let id = db.store(kind, scattered(1)).await;
        db.park(kind, id, after).await;
        parked.push(db.state(kind, id).await.unwrap().scheduled);
    }
    let declare = "update wh_service_instances set categories = $2 where instance_id = $1";
    for (n, kind) in KINDS.iter().enumerate() {
        db.execute(declare, &[&me, &Some(vec![kind.category])]).await.unwrap();
        assert_eq!(next(&db, me).await, parked[n], "{kind:?}");
    }
    db.execute(declare, &[&me, &Some(vec!["outbox", "inbox"])]).await.unwrap();
    assert_eq!(next(&db, me).await, parked[1]);
    db.execute(declare, &[&me, &Some(Vec::<&str>::new())]).await.unwrap();
    assert_eq!(next(&db, me).await, None, "it runs nothing");
    db.execute(declare, &[&me, &None::<Vec<&str>>]).await.unwrap();
    assert_eq!(
        [next(&db, me).await, next(&db, nobody).await],
        [parked[3]; 2],
        "who did not say, and who is no member"
    );
}

#[tokio::test]
async fn a_row_is_claimable_at_the_time_that_was_foretold() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let id = db.store(kind, scattered(1)).await;
        db.park(kind, id, 0.3).await;
        let due = next(&db, me).await.unwrap();
        let wait = due.duration_since(db.now().await).unwrap_or(Duration::ZERO);
        let seconds = wait.as_secs_f64();
        db.query_one("select pg_sleep($1)::text", &[&seconds]).await.unwrap();
        assert_eq!(ids(&db.claim(&Claim::of(me)).await), [id], "{kind:?}");
    }
}
