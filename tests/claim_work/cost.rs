//! What a claim costs: bounded by what it takes, never by what lies behind, beside or before it. Buffers are asserted, times printed.

use tokio::time::Instant;
use uuid::Uuid;

use crate::work::{Claim, KINDS, Kind, Lab, OUTBOX, PERSPECTIVE, RECEPTOR, Session, ids, millis, scattered, verdict};

/// Claims under EXPLAIN: the buffers it touched and how long it took. The rows are leased and stay so.
async fn buffers(db: &Session, claim: &Claim) -> (i64, f64) {
    let only = claim.categories.as_ref().map_or("null".to_owned(), |only| format!("array['{}']", only.join("','")));
    let sql = format!(
        "explain (analyze, buffers, format json) select * from claim_work('{}', {}, {}, {}, {only}, {}, {})",
        claim.me, claim.rows, claim.seconds, claim.partitions, claim.run, claim.bytes
    );
    let plan: serde_json::Value = db.query_one(&sql, &[]).await.expect("a plan").get(0);
    let count = |name: &str| plan[0]["Plan"][name].as_i64().expect("a count of buffers");
    let time = plan[0]["Execution Time"].as_f64().expect("a time");
    (count("Shared Hit Blocks") + count("Shared Read Blocks"), time)
}

/// Many rows at once: `per_stream` in each of `streams` streams.
async fn fill(db: &Session, kind: &Kind, streams: i64, per_stream: i64) {
    let columns = match kind.category {
        "outbox" | "inbox" => "stream_id, message_type, payload) select s, 'm', '{}'::jsonb",
        "perspective_event" => "stream_id, perspective_name, event_id) select s, 'a', gen_random_uuid()",
        _ => "stream_id, receptor_name, event_id) select s, 'a', gen_random_uuid()",
    };
    let sql = format!(
        "insert into {} ({columns} from (select md5(n::text)::uuid as s from generate_series(1, {streams}) n) s,
         generate_series(1, {per_stream})",
        kind.table
    );
    db.batch_execute(&sql).await.expect("rows");
}

#[tokio::test]
async fn a_row_behind_nobody_is_claimed_at_once_beside_a_blocked_stream_of_100_000() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let (me, other) = (db.member().await, db.member().await);
        fill(&db, kind, 1, 100_000).await;
        for how in ["parked", "leased", "locked"] {
            let reset = format!("update {} set instance_id = null, lease_expiry = null, scheduled_for = null
                where instance_id is not null or scheduled_for is not null", kind.table);
            db.batch_execute(&reset).await.unwrap();
            let head: Uuid = db.query_one(&format!("select {} from {} order by seq limit 1", kind.key, kind.table), &[]).await.unwrap().get(0);
            match how {
                "parked" => db.park(kind, head, 3600.0).await,
                "leased" => assert_eq!(db.claim(&Claim::of(other).only(kind).rows(1)).await.len(), 1),
                _ => {}
            }
            let lab_locker = _lab.session().await;
            if how == "locked" {
                lab_locker.batch_execute("begin").await.unwrap();
                lab_locker.query(&format!("select 1 from {} where {} = $1 for update", kind.table, kind.key), &[&head]).await.unwrap();
            }
            for stream in [Uuid::from_u128(1), scattered(3), Uuid::from_u128(u128::MAX - 1)] {
                let id = db.store(kind, stream).await;
                let start = Instant::now();
                let got = db.claim(&Claim::of(me)).await;
                let took = millis(start);
                assert_eq!(ids(&got), [id]);
                let (blocks, ms) = buffers(&db, &Claim::of(me)).await;
                println!("{:17} {how}: claimed in {took:.1} ms; the empty claim after it {blocks} buffers, {ms:.2} ms", kind.category);
                assert!(blocks < 1500, "{blocks} buffers");
                db.complete(me, &got).await;
            }
        }
    }
}

async fn empty_claim(db: &Session, me: Uuid, what: &str, limit: i64) {
    buffers(db, &Claim::of(me)).await;
    let (blocks, first) = buffers(db, &Claim::of(me)).await;
    let mut times = Vec::new();
    for _ in 0..20 {
        let (_, ms) = buffers(db, &Claim::of(me)).await;
        times.push(ms);
    }
    times.sort_by(f64::total_cmp);
    println!("empty claim, {what}: {blocks} buffers, median {:.2} ms, max {:.2} ms (first {first:.2})", times[10], times[19]);
    assert!(blocks <= limit, "{what}: {blocks} buffers, more than {limit}");
}

#[tokio::test]
async fn an_empty_claim_costs_a_few_probes_whatever_is_parked_or_leased() {
    let (_lab, db) = Lab::new().await;
    let (me, peer) = (db.member().await, db.member().await);
    empty_claim(&db, me, "no rows", 100).await;
    for kind in KINDS {
        fill(&db, kind, 2000, 5).await;
        db.batch_execute(&format!("update {} set scheduled_for = 'infinity'; analyze {0}", kind.table)).await.unwrap();
    }
    empty_claim(&db, me, "40 000 rows scheduled", 300).await;
    for kind in KINDS {
        let sql = format!("update {} set scheduled_for = null, instance_id = '{peer}', lease_expiry = now() + interval '1 hour'; vacuum analyze {0}", kind.table);
        for part in sql.split(';') {
            db.batch_execute(part).await.unwrap();
        }
    }
    empty_claim(&db, me, "40 000 rows leased by a peer", 300).await;
}

#[tokio::test]
async fn an_empty_claim_over_blocked_streams_is_bounded() {
    for streams in [1_i64, 100, 1000, 10_000] {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        fill(&db, &OUTBOX, streams, 5).await;
        let park = "update wh_outbox o set scheduled_for = 'infinity' where seq = (select min(seq) from wh_outbox i where i.stream_id = o.stream_id)";
        db.batch_execute(park).await.unwrap();
        for part in ["vacuum analyze wh_outbox", "select 1"] {
            db.batch_execute(part).await.unwrap();
        }
        empty_claim(&db, me, &format!("{streams} streams with a parked head and fresh rows behind"), 40_000).await;
    }
}

#[tokio::test]
async fn a_claimable_stream_among_many_blocked_ones_is_reached_within_a_few_claims() {
    for kind in [&OUTBOX, &RECEPTOR] {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        fill(&db, kind, 10_000, 2).await;
        let park = format!("update {0} o set scheduled_for = 'infinity' where seq = (select min(seq) from {0} i where i.stream_id = o.stream_id)", kind.table);
        db.batch_execute(&park).await.unwrap();
        let id = db.store(kind, Uuid::from_u128(u128::MAX - 1)).await;
        let mut claims = 1;
        while ids(&db.claim(&Claim::of(me).rows(10)).await) != [id] {
            claims += 1;
            assert!(claims <= 2 + 10_000 / 256, "not reached in one pass of 256 visits a claim");
        }
        println!("{}: one claimable stream behind 10 000 blocked ones: {claims} claims of 10 rows", kind.category);
    }
}

#[tokio::test]
async fn a_claim_of_a_thousand_rows_costs_about_the_same_in_every_shape_of_backlog() {
    for (kind, streams, per_stream) in
        [(&OUTBOX, 1000, 100), (&OUTBOX, 100_000, 1), (&OUTBOX, 1, 100_000), (&PERSPECTIVE, 1000, 100), (&RECEPTOR, 1000, 100)]
    {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        fill(&db, kind, streams, per_stream).await;
        buffers(&db, &Claim::of(me)).await;
        let (blocks, ms) = buffers(&db, &Claim::of(me)).await;
        println!("claim of 1 000, {} {streams} × {per_stream}: {blocks} buffers, {ms:.1} ms", kind.category);
        assert!(blocks < 120_000, "{blocks} buffers");
    }
}

/// Dead index entries cannot be removed while somebody's snapshot is older: the claim must not walk them again and again.
#[tokio::test]
async fn a_claim_stays_flat_while_an_idle_transaction_pins_the_horizon() {
    for (what, stream) in [("unordered", "null"), ("ordered", "md5((n % 50)::text)::uuid")] {
        let (lab, db) = Lab::new().await;
        let (me, pin) = (db.member().await, lab.session().await);
        pin.batch_execute("begin isolation level repeatable read; select 1").await.unwrap();
        let store = format!("insert into wh_outbox (stream_id, message_type, payload) select {stream}, 'm', '{{}}' from generate_series(1, 500) n");
        let mut figures = Vec::new();
        for round in 0..60 * i64::from(crate::common::scale()) {
            db.batch_execute(&store).await.unwrap();
            if round % 10 == 9 {
                figures.push(buffers(&db, &Claim::of(me).rows(200)).await);
                db.batch_execute("delete from wh_outbox where instance_id is not null").await.unwrap();
            }
            loop {
                let got = db.claim(&Claim::of(me)).await;
                if got.is_empty() {
                    break;
                }
                db.settle(me, &got.iter().map(|row| verdict(row, "complete")).collect::<Vec<_>>()).await;
            }
        }
        println!("{what}, horizon pinned, claims of 200: {figures:.1?}");
        let (first, last) = (figures[0].0, figures[figures.len() - 1].0);
        assert!(last <= 2 * first, "{what}: {first} buffers at the start, {last} at the end");
    }
}
