//! Nobody starves: not behind a hot stream, not behind a thousand busy ones, not behind retries.

use std::collections::HashSet;

use uuid::Uuid;

use crate::work::{Claim, KINDS, Kind, Lab, OUTBOX, PERSPECTIVE, Session, ids, scattered, verdict};

async fn refill(db: &Session, kind: &Kind, streams: &[Uuid], count: i32) {
    let columns = match kind.category {
        "outbox" | "inbox" => "stream_id, message_type, payload) select s, 'm', '{}'::jsonb",
        "perspective_event" => "stream_id, perspective_name, event_id) select s, 'a', gen_random_uuid()",
        _ => "stream_id, receptor_name, event_id) select s, 'a', gen_random_uuid()",
    };
    let sql =
        format!("insert into {} ({columns} from unnest($1::uuid[]) s, generate_series(1, $2)", kind.table);
    db.execute(&sql, &[&streams, &count]).await.expect("rows");
}

#[tokio::test]
async fn every_claimable_head_is_reached_within_one_pass_although_all_streams_refill() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let streams: Vec<_> = (0..300).map(scattered).collect();
        refill(&db, kind, &streams, 2).await;
        refill(&db, kind, &streams[..1], 2000).await;
        // 50 rows a claim, runs of 10: 300 streams of 2 rows and one of many make about 13 claims a pass.
        let claim = Claim::of(me).only(kind).rows(50).run(10);
        let (mut reached, mut hot, mut claims) = (HashSet::new(), 0, 0);
        while reached.len() < streams.len() {
            let got = db.claim(&claim).await;
            claims += 1;
            hot += got.iter().filter(|row| row.stream == Some(streams[0])).count();
            let seen: HashSet<_> = got.iter().filter_map(|row| row.stream).collect();
            reached.extend(seen.iter().copied());
            db.complete(me, &got).await;
            refill(&db, kind, &Vec::from_iter(seen), 2).await;
            assert!(
                claims <= 26,
                "{}: {} of 300 streams after {claims} claims",
                kind.category,
                reached.len()
            );
        }
        println!(
            "{}: 300 refilling streams reached in {claims} claims of 50; the hot one got {hot} rows",
            kind.category
        );
        assert!(hot <= 40, "{}: the hot stream got {hot} rows in one pass", kind.category);
    }
}

#[tokio::test]
async fn a_new_stream_is_reached_although_a_hot_one_and_a_thousand_others_keep_refilling() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    let streams: Vec<_> = (0..1000).map(scattered).collect();
    refill(&db, &OUTBOX, &streams, 3).await;
    refill(&db, &OUTBOX, &streams[..1], 1000).await;
    let claim = Claim::of(me).only(&OUTBOX).rows(300);
    for place in [Uuid::from_u128(1), scattered(5000), Uuid::max()] {
        let late = db.store(&OUTBOX, place).await;
        let mut claims = 1;
        loop {
            let got = db.claim(&claim).await;
            let seen: HashSet<_> = got.iter().filter_map(|row| row.stream).collect();
            db.complete(me, &got).await;
            if ids(&got).contains(&late) {
                break;
            }
            refill(&db, &OUTBOX, &Vec::from_iter(seen), 3).await;
            claims += 1;
            assert!(claims <= 14, "not reached in one pass");
        }
        println!("a new stream among 1 000: reached in {claims} claims of 300");
    }
}

#[tokio::test]
async fn the_rotation_goes_on_in_a_session_that_never_claimed_before() {
    let (lab, db) = Lab::new().await;
    let me = db.member().await;
    let streams: Vec<_> = (0..60).map(scattered).collect();
    refill(&db, &PERSPECTIVE, &streams, 1).await;
    // Every claim through another connection, as behind a pooler: always starting at the same stream would starve the others. The
    // place is drawn by lot, so how many claims it takes is no constant: the bound is one that chance does not reach (2e-16 at worst).
    let (mut reached, mut claims) = (HashSet::new(), 0);
    while reached.len() < streams.len() {
        assert!(claims < 1000, "{} of 60 streams in {claims} claims of 10 rows", reached.len());
        claims += 1;
        let session = lab.session().await;
        let got = session.claim(&Claim::of(me).only(&PERSPECTIVE).rows(10)).await;
        let seen: HashSet<_> = got.iter().filter_map(|row| row.stream).collect();
        reached.extend(seen.iter().copied());
        session.complete(me, &got).await;
        refill(&db, &PERSPECTIVE, &Vec::from_iter(seen), 1).await;
    }
    println!("60 streams reached in {claims} claims of 10, each in a new session");
}

#[tokio::test]
async fn retries_and_fresh_rows_share_one_rotation() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        // Half of the streams have failed before and are due again, the other half is fresh.
        let streams: Vec<_> = (0..200).map(scattered).collect();
        refill(&db, kind, &streams[..100], 1).await;
        let got = db.claim(&Claim::of(me)).await;
        let items: Vec<_> = got
            .iter()
            .map(|row| {
                let mut item = verdict(row, "retry");
                item.after = Some(0);
                item
            })
            .collect();
        db.settle(me, &items).await;
        refill(&db, kind, &streams[100..], 1).await;
        let got = db.claim(&Claim::of(me).only(kind).rows(100)).await;
        let retried = got.iter().filter(|row| row.attempts == 2).count();
        assert!((25..=75).contains(&retried), "{}: {retried} of {}", kind.category, got.len());
    }
}

#[tokio::test]
async fn streams_and_rows_without_a_stream_share_a_claim() {
    for kind in KINDS.into_iter().filter(|kind| kind.unordered) {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        db.store_many(kind, None, 60).await;
        refill(&db, kind, &(0..60).map(scattered).collect::<Vec<_>>(), 1).await;
        let got = db.claim(&Claim::of(me).only(kind).rows(40)).await;
        let unordered = got.iter().filter(|row| row.stream.is_none()).count();
        assert_eq!((got.len(), unordered), (40, 20), "{kind:?}");
    }
}
