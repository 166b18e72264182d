//! Whose a row becomes, for how long, and what is counted on it.

use std::time::SystemTime;

use uuid::Uuid;

use crate::work::{Claim, KINDS, Lab, OUTBOX, PERSPECTIVE, ids, scattered};

fn seconds_between(from: SystemTime, to: SystemTime) -> f64 {
    to.duration_since(from).map_or_else(|e| -e.duration().as_secs_f64(), |d| d.as_secs_f64())
}

#[tokio::test]
async fn an_unowned_row_is_leased_to_the_caller_and_charged_one_attempt() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let (me, stream) = (db.member().await, Uuid::now_v7());
        let id = db.store_in(kind, stream, "lane").await;
        let before = db.now().await;
        let got = db.claim(&Claim::of(me).seconds(40)).await;
        let after = db.now().await;
        assert_eq!(ids(&got), [id], "{kind:?}");
        assert_eq!((got[0].category.as_str(), got[0].stream), (kind.category, Some(stream)));
        assert_eq!((got[0].epoch, got[0].attempts, got[0].crashes), (1, 1, 0));
        assert_eq!(got[0].name.as_deref(), Some("lane"));
        assert!(
            seconds_between(before, got[0].expiry) >= 40.0 && seconds_between(after, got[0].expiry) <= 40.0
        );
        let state = db.state(kind, id).await.unwrap();
        assert_eq!((state.instance, state.expiry), (Some(me), Some(got[0].expiry)));
        assert_eq!((state.epoch, state.attempts), (1, 1));
    }
}

#[tokio::test]
async fn a_row_comes_with_its_body() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    let sql = "insert into wh_outbox (destination, message_type, payload, metadata) values ('d', 'type', '{\"a\": 1}', '{\"m\": 2}')";
    db.batch_execute(sql).await.unwrap();
    let sql = "select destination = name, message_type, payload::text, metadata::text
               from (select c.*, 'd' as destination from claim_work($1) c) c";
    let row = db.query_one(sql, &[&me]).await.unwrap();
    let got: (bool, &str, &str, &str) = (row.get(0), row.get(1), row.get(2), row.get(3));
    assert_eq!(got, (true, "type", "{\"a\": 1}", "{\"m\": 2}"));
}

#[tokio::test]
async fn a_row_leased_by_another_instance_is_left_alone() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let (one, two) = (db.member().await, db.member().await);
        let id = db.store(kind, Uuid::now_v7()).await;
        assert_eq!(db.claim(&Claim::of(one)).await.len(), 1);
        let held = db.state(kind, id).await;
        assert_eq!(db.claim(&Claim::of(two)).await.len(), 0);
        assert_eq!(db.claim(&Claim::of(one)).await.len(), 0);
        assert_eq!(db.state(kind, id).await, held);
    }
}

#[tokio::test]
async fn a_lease_that_ran_out_is_taken_over_with_a_new_epoch_and_attempt() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let (one, two) = (db.member().await, db.member().await);
        let id = db.store(kind, Uuid::now_v7()).await;
        for (claims, me) in [(1_i32, one), (2, two), (3, two), (4, one)] {
            let got = db.claim(&Claim::of(me)).await;
            assert_eq!(ids(&got), [id], "{kind:?}");
            assert_eq!(
                (got[0].epoch, got[0].attempts, got[0].crashes),
                (i64::from(claims), claims, claims - 1)
            );
            db.let_leases_run_out(kind).await;
        }
        let state = db.state(kind, id).await.unwrap();
        assert_eq!(state.reason, Some(6));
        assert!(state.error.unwrap().starts_with(&format!("abandoned: the lease of instance {one}")));
    }
}

#[tokio::test]
async fn a_takeover_keeps_the_error_that_is_recorded() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let id = db.store(kind, Uuid::now_v7()).await;
        db.batch_execute(&format!("update {} set error = 'known', failure_reason = 4", kind.table))
            .await
            .unwrap();
        db.claim(&Claim::of(me)).await;
        db.let_leases_run_out(kind).await;
        assert_eq!(db.claim(&Claim::of(me)).await.len(), 1);
        let state = db.state(kind, id).await.unwrap();
        assert_eq!((state.reason, state.error.as_deref()), (Some(4), Some("known")));
    }
}

#[tokio::test]
async fn only_the_head_of_a_run_is_charged_with_a_crash() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let run = db.store_many(kind, Uuid::now_v7(), 4).await;
        let got = db.claim(&Claim::of(me)).await;
        assert_eq!(ids(&got), run);
        // The first one is done: the second was running when the process died.
        db.complete(me, &got[..1]).await;
        db.let_leases_run_out(kind).await;
        let again = db.claim(&Claim::of(me)).await;
        assert_eq!(ids(&again), run[1..], "{kind:?}");
        assert_eq!(again.iter().map(|row| row.crashes).collect::<Vec<_>>(), [1, 0, 0]);
        assert_eq!(again.iter().map(|row| row.attempts).collect::<Vec<_>>(), [2, 2, 2]);
    }
}

#[tokio::test]
async fn a_processed_row_is_never_claimed() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let (done, next) = (Uuid::now_v7(), Uuid::now_v7());
        let id = db.store(kind, done).await;
        db.batch_execute(&format!("update {} set {} = clock_timestamp()", kind.table, kind.done))
            .await
            .unwrap();
        let fresh = db.store(kind, next).await;
        let behind = db.store(kind, done).await;
        let mut got = ids(&db.claim(&Claim::of(me)).await);
        got.sort_unstable();
        assert_eq!(got, [fresh, behind], "{kind:?}");
        assert_eq!(db.state(kind, id).await.unwrap().attempts, 0);
    }
}

#[tokio::test]
async fn all_rows_of_a_run_get_one_lease_expiry() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        db.store_many(kind, Uuid::now_v7(), 5).await;
        let got = db.claim(&Claim::of(me)).await;
        assert_eq!(got.len(), 5);
        assert!(got.iter().all(|row| row.expiry == got[0].expiry));
    }
}

#[tokio::test]
async fn a_lease_is_as_long_as_asked_for_inside_a_long_transaction() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        db.store(kind, Uuid::now_v7()).await;
        db.batch_execute("begin; select pg_sleep(0.6)").await.unwrap();
        let before = db.now().await;
        let got = db.claim(&Claim::of(me).seconds(10)).await;
        db.batch_execute("commit").await.unwrap();
        assert!(seconds_between(before, got[0].expiry) >= 10.0, "{kind:?}");
    }
}

#[tokio::test]
async fn two_claimers_share_a_backlog_without_a_common_row() {
    for kind in KINDS {
        let (lab, db) = Lab::new().await;
        let streams: Vec<_> = (0..40).map(|_| Uuid::now_v7()).collect();
        for stream in &streams {
            db.store_many(kind, *stream, 3).await;
        }
        let mut claims = Vec::new();
        for _ in 0..6 {
            let (session, me) = (lab.session().await, db.member().await);
            claims.push(async move {
                let mut got = Vec::new();
                let left = format!("select count(*) from {}", kind.table);
                while session.number(&left).await > 0 {
                    let rows = session.claim(&Claim::of(me).rows(7)).await;
                    assert!(session.complete(me, &rows).await.is_empty(), "nothing is fenced");
                    got.extend(ids(&rows));
                }
                got
            });
        }
        let mut all: Vec<_> = futures_util::future::join_all(claims).await.concat();
        let claimed = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!((claimed, all.len()), (120, 120), "{kind:?}");
    }
}

#[tokio::test]
async fn the_affinity_row_of_a_stream_follows_the_claim() {
    let (_lab, db) = Lab::new().await;
    let (one, two, gone) = (db.member().await, db.member().await, Uuid::now_v7());
    let streams: Vec<_> = (0..4).map(|_| Uuid::now_v7()).collect();
    for (stream, owner) in streams.iter().zip([None, Some(gone), Some(two), Some(one)]) {
        db.store(&OUTBOX, *stream).await;
        let sql = "update wh_active_streams set assigned_instance_id = $2 where stream_id = $1";
        assert_eq!(db.execute(sql, &[stream, &owner]).await.unwrap(), 1, "a store leaves an affinity row");
    }
    let got = db.claim(&Claim::of(one)).await;
    assert_eq!(got.len(), 4);
    let sql = "select assigned_instance_id, lease_expiry from wh_active_streams where stream_id = $1";
    for (stream, owner) in streams.iter().zip([one, one, two, one]) {
        let row = db.query_one(sql, &[stream]).await.unwrap();
        assert_eq!(row.get::<_, Uuid>(0), owner);
        let lease: Option<SystemTime> = row.get(1);
        assert_eq!(lease, (owner == one).then_some(got[0].expiry));
    }
}

#[tokio::test]
async fn a_claim_prefers_its_own_streams_but_leaves_none_without_a_taker() {
    let (_lab, db) = Lab::new().await;
    let (one, two) = (db.member().await, db.member().await);
    let mut mine = Vec::new();
    for place in 0..40 {
        let (stream, owner) = (scattered(place), if place % 2 == 0 { one } else { two });
        let id = db.store(&PERSPECTIVE, stream).await;
        if owner == one {
            mine.push(id);
        }
        let sql = "update wh_active_streams set assigned_instance_id = $2, lease_expiry = clock_timestamp() + interval '1 minute'
                   where stream_id = $1";
        db.execute(sql, &[&stream, &owner]).await.unwrap();
    }
    let first = ids(&db.claim(&Claim::of(one).rows(20)).await);
    let own = first.iter().filter(|id| mine.contains(id)).count();
    assert_eq!(first.len(), 20);
    // A share of 5 first and the 15 left over then: half of each, rounded down, so that a cap of one row starves nobody.
    assert!(
        own >= 2 + 7,
        "half of a claim is for one's own streams, the rest for whoever is next: {own} of 20"
    );
    assert_eq!(db.claim(&Claim::of(one)).await.len(), 20, "nobody else came");
}

#[tokio::test]
async fn a_stale_peer_takes_no_share_and_holds_up_nothing() {
    let (_lab, db) = Lab::new().await;
    let (me, stale) = (db.member().await, db.member().await);
    for _ in 0..30 {
        db.store(&OUTBOX, Uuid::now_v7()).await;
    }
    let sql = "update wh_service_instances set last_heartbeat_at = clock_timestamp() - interval '10 minutes' where instance_id = $1";
    db.execute(sql, &[&stale]).await.unwrap();
    let rank = db.query_one("select * from wh_member_rank($1)", &[&me]).await.unwrap();
    assert_eq!((rank.get::<_, i32>(0), rank.get::<_, i32>(1)), (0, 1));
    assert_eq!(db.claim(&Claim::of(me)).await.len(), 30);
}

#[tokio::test]
async fn a_claim_that_is_rolled_back_leaves_the_row_as_it_was() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let id = db.store(kind, Uuid::now_v7()).await;
        db.batch_execute("begin").await.unwrap();
        assert_eq!(db.claim(&Claim::of(me)).await.len(), 1);
        db.batch_execute("rollback").await.unwrap();
        let state = db.state(kind, id).await.unwrap();
        assert_eq!((state.instance, state.epoch, state.attempts), (None, 0, 0));
        assert_eq!(ids(&db.claim(&Claim::of(me)).await), [id]);
    }
}

#[tokio::test]
async fn many_expired_leases_come_back_a_thousand_a_claim() {
    let (_lab, db) = Lab::new().await;
    let (me, dead) = (db.member().await, Uuid::now_v7());
    let sql = "insert into wh_outbox (message_type, payload, instance_id, lease_expiry)
               select 'm', '{}', $1, clock_timestamp() - interval '1 second' from generate_series(1, 2500)";
    db.execute(sql, &[&dead]).await.unwrap();
    for expected in [1000, 1000, 500, 0] {
        let got = db.claim(&Claim::of(me).rows(2000).only(&OUTBOX)).await;
        assert_eq!(got.len(), expected);
        assert!(got.iter().all(|row| row.crashes == 1));
    }
}
