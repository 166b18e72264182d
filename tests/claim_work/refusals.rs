//! Who may not claim, and what may not be asked for.

use uuid::Uuid;

use crate::work::{Claim, INBOX, KINDS, Lab, OUTBOX, Session, ids, refusal, scattered};

async fn refused(db: &Session, claim: &Claim) -> (String, String) {
    let error = db.try_claim(claim).await.expect_err("a refusal");
    let (code, hint) = refusal(&error);
    (code, hint.expect("a hint"))
}

#[tokio::test]
async fn empty_queues_answer_anybody_with_nothing() {
    let (_lab, db) = Lab::new().await;
    assert_eq!(db.claim(&Claim::of(Uuid::now_v7())).await.len(), 0);
    assert_eq!(db.notices(), Vec::<String>::new());
    assert_eq!(db.number("select count(*) from wh_service_instances").await, 0);
}

#[tokio::test]
async fn an_instance_that_is_not_registered_is_refused_as_soon_as_there_is_work() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let id = db.store(kind, Uuid::now_v7()).await;
        let (code, hint) = refused(&db, &Claim::of(Uuid::now_v7())).await;
        assert_eq!((code.as_str(), hint.as_str()), ("WH003", "Call record_heartbeat first."));
        assert_eq!(db.state(kind, id).await.unwrap().epoch, 0);
    }
}

#[tokio::test]
async fn an_evicted_instance_is_refused_also_when_there_is_nothing_to_claim() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    db.evict(me).await;
    for _ in 0..2 {
        let (code, hint) = refused(&db, &Claim::of(me)).await;
        assert_eq!(
            (code.as_str(), hint.as_str()),
            ("WH001", "Stop, and come back under a fresh instance id.")
        );
        db.store(&OUTBOX, Uuid::now_v7()).await;
    }
}

#[tokio::test]
async fn an_eviction_that_comes_during_the_claim_waits_for_it_and_finds_its_rows() {
    let (lab, db) = Lab::new().await;
    let (me, other) = (db.member().await, lab.direct_session().await);
    let id = db.store(&OUTBOX, Uuid::now_v7()).await;
    db.batch_execute("begin").await.unwrap();
    assert_eq!(db.claim(&Claim::of(me)).await.len(), 1);
    other.batch_execute("set lock_timeout = '50ms'").await.unwrap();
    let gone = other.execute("delete from wh_service_instances where instance_id = $1", &[&me]).await;
    assert_eq!(refusal(&gone.unwrap_err()).0, "55P03", "the claim holds its member");
    db.batch_execute("commit").await.unwrap();
    other.evict(me).await;
    assert_eq!(other.state(&OUTBOX, id).await.unwrap().instance, Some(me), "for the evictor to release");
}

#[tokio::test]
async fn a_member_that_is_just_being_evicted_claims_nothing_and_does_not_wait() {
    let (lab, db) = Lab::new().await;
    let (me, evictor) = (db.member().await, lab.session().await);
    let id = db.store(&OUTBOX, Uuid::now_v7()).await;
    evictor.batch_execute("begin").await.unwrap();
    evictor.execute("delete from wh_service_instances where instance_id = $1", &[&me]).await.unwrap();
    db.batch_execute("set lock_timeout = '5s'").await.unwrap();
    assert_eq!(db.claim(&Claim::of(me)).await.len(), 0);
    assert_eq!(db.state(&OUTBOX, id).await.unwrap().instance, None);
}

#[tokio::test]
async fn an_unknown_category_is_refused_also_when_there_is_nothing_to_claim() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    let mut claim = Claim::of(me);
    for categories in [vec!["outbox", "out box"], vec![""], vec!["OUTBOX"], vec!["perspective"]] {
        claim.categories = Some(categories.into_iter().map(str::to_owned).collect());
        let (code, hint) = refused(&db, &claim).await;
        assert_eq!(code, "WH002");
        assert_eq!(hint, "Known categories: outbox, inbox, perspective_event, receptor.");
    }
    let null = db.query("select * from claim_work($1, p_categories => array[null])", &[&me]).await;
    assert_eq!(refusal(&null.unwrap_err()).0, "WH002");
}

#[tokio::test]
async fn a_limit_below_one_is_refused_and_named() {
    let (_lab, db) = Lab::new().await;
    let claim = Claim::of(db.member().await);
    let mut wrong =
        vec![claim.clone().rows(0), claim.clone().rows(-1), claim.clone().run(0), claim.clone().bytes(0)];
    wrong.push(claim.clone().seconds(0));
    wrong.push(Claim { partitions: 0, ..claim });
    for claim in wrong {
        let (code, hint) = refused(&db, &claim).await;
        assert_eq!(
            (code.as_str(), hint.as_str()),
            ("22023", "Leave a limit out to get its default."),
            "{claim:?}"
        );
    }
}

#[tokio::test]
async fn a_snapshot_that_lasts_is_refused() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    db.store(&INBOX, Uuid::now_v7()).await;
    for level in ["repeatable read", "serializable"] {
        db.batch_execute(&format!("begin isolation level {level}")).await.unwrap();
        let (code, hint) = refused(&db, &Claim::of(me)).await;
        assert_eq!(
            (code.as_str(), hint.as_str()),
            ("25001", "Its proofs need a new snapshot for every statement.")
        );
        db.batch_execute("rollback").await.unwrap();
    }
}

#[tokio::test]
async fn the_parts_of_a_claim_refuse_a_snapshot_that_lasts_too() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        db.store(kind, Uuid::now_v7()).await;
        db.batch_execute("begin isolation level repeatable read").await.unwrap();
        let got = db.query(&format!("select * from claim_orphaned_{}($1)", kind.suffix), &[&me]).await;
        let error = got.err().unwrap_or_else(|| panic!("{} claimed under repeatable read", kind.category));
        assert_eq!(refusal(&error).0, "25001");
        db.batch_execute("rollback").await.unwrap();
    }
}

#[tokio::test]
async fn the_all_zero_uuid_is_not_a_stream() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        db.store(kind, Uuid::now_v7()).await;
        let error = db.execute(&format!("update {} set stream_id = $1", kind.table), &[&Uuid::nil()]).await;
        assert_eq!(refusal(&error.unwrap_err()).0, "23514");
    }
}

#[tokio::test]
async fn a_row_is_never_half_leased() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        db.store(kind, Uuid::now_v7()).await;
        for half in ["instance_id = gen_random_uuid()", "lease_expiry = now()"] {
            let error = db.batch_execute(&format!("update {} set {half}", kind.table)).await.unwrap_err();
            assert_eq!(refusal(&error).0, "23514");
        }
    }
}

/// A million uuids by the database, and the edges.
#[tokio::test]
async fn the_partition_of_a_stream_is_total() {
    let (_lab, db) = Lab::new().await;
    let sql = "select count(*) from (
                   select compute_partition(gen_random_uuid(), 1 + n % 20000) as p, 1 + n % 20000 as count
                   from generate_series(1, 1000000) n) s
               where p < 0 or p >= count or p is null";
    assert_eq!(db.number(sql).await, 0);
    let mut edges = vec![
        Uuid::nil(),
        Uuid::max(),
        Uuid::from_u128(1),
        Uuid::from_u128(1 << 127),
        Uuid::from_u128(u128::MAX >> 1),
    ];
    edges.extend((0..128).map(|bit| Uuid::from_u128(1 << bit)));
    edges.extend((0..1000).map(scattered));
    for count in [i32::MIN, -1, 0, 1, 2, 7, 10_000, i32::MAX] {
        let sql = "select coalesce(bool_and(p >= 0 and p < greatest($2, 1)), false) from unnest($1::uuid[]) u, compute_partition(u, $2) p";
        let total: bool = db.query_one(sql, &[&edges, &count]).await.unwrap().get(0);
        assert!(total, "count {count}");
    }
    let null: Option<i32> = db.query_one("select compute_partition(null)", &[]).await.unwrap().get(0);
    assert_eq!(null, None);
}

#[tokio::test]
async fn partitions_spread_evenly() {
    let (_lab, db) = Lab::new().await;
    let sql = "select max(c) - min(c) from (select count(*) as c from generate_series(1, 100000) n
               group by compute_partition(gen_random_uuid(), 10)) s";
    let spread = db.number(sql).await;
    assert!(spread < 1000, "10 shares of 10 000 differ by {spread}");
}

#[tokio::test]
async fn every_edge_uuid_is_a_stream_that_gets_claimed() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let mut stored = Vec::new();
        for stream in
            [Uuid::from_u128(1), Uuid::max(), Uuid::from_u128(1 << 127), Uuid::from_u128(u128::MAX - 1)]
        {
            stored.push(db.store(kind, stream).await);
        }
        let mut got = ids(&db.claim(&Claim::of(me)).await);
        got.sort_unstable();
        assert_eq!(got, stored, "{}", kind.category);
    }
}
