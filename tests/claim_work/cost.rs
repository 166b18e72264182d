//! What a claim costs: bounded by what it takes, never by what lies behind, beside or before it. Buffers are asserted, times printed.

use std::sync::OnceLock;

use tokio::sync::{Mutex, MutexGuard};
use tokio::time::Instant;
use uuid::Uuid;

use crate::common::{self, PrivateServer};
use crate::work::{Claim, KINDS, Kind, Lab, OUTBOX, PERSPECTIVE, RECEPTOR, Session, ids, millis, scattered};

/// A server of their own, one test at a time: open transactions of other tests would keep dead rows alive. Nothing is vacuumed or
/// analysed but by a test: that would change what is counted at a time of its own.
async fn quiet() -> (MutexGuard<'static, ()>, Lab, Session) {
    static TURN: Mutex<()> = Mutex::const_new(());
    static SERVER: OnceLock<PrivateServer> = OnceLock::new();
    let turn = TURN.lock().await;
    let lab =
        Lab { db: SERVER.get_or_init(|| common::server_with(&[("autovacuum", "off")])).database().await };
    let session = lab.session().await;
    (turn, lab, session)
}

/// Claims under EXPLAIN: the buffers it touched and how long it took. The rows are leased and stay so.
async fn buffers(db: &Session, claim: &Claim) -> (i64, f64) {
    let only =
        claim.categories.as_ref().map_or("null".to_owned(), |only| format!("array['{}']", only.join("','")));
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

/// Makes the head of the only stream block it.
async fn block(db: &Session, outsider: &Session, kind: &Kind, how: &str) {
    let free = format!(
        "update {} set instance_id = null, lease_expiry = null, scheduled_for = null
         where instance_id is not null or scheduled_for is not null",
        kind.table
    );
    db.batch_execute(&free).await.expect("a free stream");
    let head = format!("select {} from {} order by seq limit 1", kind.key, kind.table);
    let head: Uuid = db.query_one(&head, &[]).await.expect("the head").get(0);
    match how {
        "parked" => db.park(kind, head, 3600.0).await,
        "leased" => {
            let peer = db.member().await;
            assert_eq!(db.claim(&Claim::of(peer).only(kind).rows(1)).await.len(), 1);
        }
        _ => {
            let sql = format!("select 1 from {} where {} = $1 for update", kind.table, kind.key);
            outsider.batch_execute("begin").await.expect("begin");
            outsider.query(&sql, &[&head]).await.expect("a lock");
        }
    }
}

#[tokio::test]
async fn a_row_behind_nobody_is_claimed_at_once_beside_a_blocked_stream_of_100_000() {
    for kind in [&OUTBOX, &PERSPECTIVE] {
        let (_turn, lab, db) = quiet().await;
        let (me, outsider) = (db.member().await, lab.session().await);
        fill(&db, kind, 1, 100_000).await;
        for how in ["parked", "leased", "locked"] {
            block(&db, &outsider, kind, how).await;
            for stream in [Uuid::from_u128(1), scattered(3), Uuid::from_u128(u128::MAX - 1)] {
                let id = db.store(kind, stream).await;
                let start = Instant::now();
                let got = db.claim(&Claim::of(me)).await;
                let took = millis(start);
                assert_eq!(ids(&got), [id]);
                let (blocks, ms) = buffers(&db, &Claim::of(me)).await;
                println!(
                    "100 000 rows of {} {how}: the other row in {took:.1} ms, then an empty claim: {blocks} buffers, {ms:.2} ms",
                    kind.category
                );
                assert!(blocks < 5_000, "{how}: {blocks} buffers");
                db.complete(me, &got).await;
            }
        }
    }
}

async fn empty_claim(db: &Session, me: Uuid, what: &str, limit: i64) {
    buffers(db, &Claim::of(me)).await;
    let (mut blocks, first) = buffers(db, &Claim::of(me)).await;
    let mut times = Vec::new();
    for _ in 0..20 {
        let (again, ms) = buffers(db, &Claim::of(me)).await;
        times.push(ms);
        // A session that must read its catalogs again meanwhile touches more: not what a claim costs.
        blocks = blocks.min(again);
    }
    times.sort_by(f64::total_cmp);
    println!(
        "empty claim, {what}: {blocks} buffers, median {:.2} ms, max {:.2} ms (first {first:.2})",
        times[10], times[19]
    );
    assert!(blocks <= limit, "{what}: {blocks} buffers, more than {limit}");
}

#[tokio::test]
async fn an_empty_claim_costs_a_few_probes_whatever_is_parked_or_leased() {
    let (_turn, _lab, db) = quiet().await;
    let (me, peer) = (db.member().await, db.member().await);
    empty_claim(&db, me, "no rows", 100).await;
    for kind in KINDS {
        fill(&db, kind, 500, 5).await;
        db.batch_execute(&format!("update {} set scheduled_for = 'infinity'", kind.table)).await.unwrap();
        db.batch_execute(&format!("vacuum analyze {}", kind.table)).await.unwrap();
    }
    empty_claim(&db, me, "10 000 rows scheduled", 300).await;
    for kind in KINDS {
        let lease = "scheduled_for = null, instance_id = $1, lease_expiry = now() + interval '1 hour'";
        db.execute(&format!("update {} set {lease}", kind.table), &[&peer]).await.unwrap();
        db.batch_execute(&format!("vacuum analyze {}", kind.table)).await.unwrap();
    }
    empty_claim(&db, me, "10 000 rows leased by a peer", 300).await;
}

#[tokio::test]
async fn an_empty_claim_over_blocked_streams_is_bounded() {
    for streams in [1_i64, 100, 1000, 5_000] {
        let (_turn, _lab, db) = quiet().await;
        let me = db.member().await;
        fill(&db, &OUTBOX, streams, 5).await;
        let park = "update wh_outbox set scheduled_for = 'infinity' where seq in (select min(seq) from wh_outbox group by stream_id)";
        db.batch_execute(park).await.unwrap();
        db.batch_execute("vacuum analyze wh_outbox").await.unwrap();
        empty_claim(&db, me, &format!("{streams} streams with a parked head and fresh rows behind"), 40_000)
            .await;
    }
}

#[tokio::test]
async fn a_claimable_stream_among_many_blocked_ones_is_reached_within_a_few_claims() {
    for kind in [&OUTBOX, &RECEPTOR] {
        let (_turn, _lab, db) = quiet().await;
        let me = db.member().await;
        fill(&db, kind, 5_000, 2).await;
        let park = format!(
            "update {0} set scheduled_for = 'infinity' where seq in (select min(seq) from {0} group by stream_id)",
            kind.table
        );
        db.batch_execute(&park).await.unwrap();
        let id = db.store(kind, Uuid::from_u128(u128::MAX - 1)).await;
        let mut claims = 1;
        while ids(&db.claim(&Claim::of(me).rows(10)).await) != [id] {
            claims += 1;
            assert!(claims <= 2 + 5_000 / 256, "not reached in one pass of 256 visits a claim");
        }
        println!(
            "{}: one claimable stream behind 5 000 blocked ones: {claims} claims of 10 rows",
            kind.category
        );
    }
}

#[tokio::test]
async fn a_claim_of_a_thousand_rows_costs_about_the_same_in_every_shape_of_backlog() {
    for (kind, streams, per_stream) in [
        (&OUTBOX, 1000, 30),
        (&OUTBOX, 30_000, 1),
        (&OUTBOX, 1, 30_000),
        (&PERSPECTIVE, 1000, 30),
        (&RECEPTOR, 1000, 30),
    ] {
        let (_turn, _lab, db) = quiet().await;
        let me = db.member().await;
        fill(&db, kind, streams, per_stream).await;
        buffers(&db, &Claim::of(me).rows(10)).await;
        let (blocks, ms) = buffers(&db, &Claim::of(me)).await;
        println!("claim of 1 000, {} {streams} × {per_stream}: {blocks} buffers, {ms:.1} ms", kind.category);
        assert!(blocks < 120_000, "{blocks} buffers");
    }
}

/// Dead index entries cannot be removed while somebody's snapshot is older: the claim must not walk them again and again.
#[tokio::test]
async fn a_claim_of_rows_without_a_stream_stays_flat_while_an_idle_transaction_pins_the_horizon() {
    let figures = pinned("null").await;
    println!("horizon pinned, no streams, claims of 200 each 2 000 rows: {figures:.1?}");
    // The first one finds an empty table; the lookup of what came due walks over what is dead.
    let (first, last) = (figures[1].0, figures[figures.len() - 1].0);
    assert!(last <= 3 * first, "{first} buffers at the start, {last} at the end");
}

#[tokio::test]
async fn a_claim_of_streams_does_not_explode_while_an_idle_transaction_pins_the_horizon() {
    let figures = pinned("md5((n % 50)::text)::uuid").await;
    println!("horizon pinned, 50 streams, claims of 200 each 2 000 rows: {figures:.1?}");
    // Each stream's dead rows are walked: linear in what was finished in it since the horizon was pinned, and no worse.
    let (first, last) = (figures[1].0, figures[figures.len() - 1].0);
    let rounds = figures.len() as i64;
    assert!(last <= 2 * rounds * first, "{first} buffers at the start, {last} at the end");
}

async fn pinned(stream: &str) -> Vec<(i64, f64)> {
    let (_turn, lab, db) = quiet().await;
    let (me, pin) = (db.member().await, lab.session().await);
    pin.batch_execute("begin isolation level repeatable read; select 1").await.expect("a pinned horizon");
    let store = format!(
        "insert into wh_outbox (stream_id, message_type, payload) select {stream}, 'm', '{{}}' from generate_series(1, 500) n"
    );
    let claim = Claim::of(me).only(&OUTBOX);
    let mut figures = Vec::new();
    for round in 0..=20 * common::scale() {
        db.batch_execute(&store).await.expect("rows");
        if round % 4 == 0 {
            figures.push(buffers(&db, &claim.clone().rows(200)).await);
            db.batch_execute("delete from wh_outbox where instance_id is not null")
                .await
                .expect("finished rows");
        }
        loop {
            let got = db.claim(&claim).await;
            if got.is_empty() {
                break;
            }
            db.complete(me, &got).await;
        }
    }
    figures
}
