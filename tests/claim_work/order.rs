//! Streams: what is a head, what blocks, where a run ends.

use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use crate::common::wait::{PATIENCE, eventually};
use crate::work::{Claim, Claimed, KINDS, Lab, OUTBOX, PERSPECTIVE, RECEPTOR, ids, verdict};

#[tokio::test]
async fn a_run_comes_in_the_order_of_its_stream() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let (one, two) = (Uuid::now_v7(), Uuid::now_v7());
        let (mut first, mut second) = (Vec::new(), Vec::new());
        for _ in 0..20 {
            first.push(db.store(kind, one).await);
            second.push(db.store(kind, two).await);
        }
        let got = db.claim(&Claim::of(me)).await;
        let of =
            |stream| ids(&got.iter().filter(|row| row.stream == Some(stream)).cloned().collect::<Vec<_>>());
        assert_eq!((of(one), of(two)), (first, second), "{kind:?}");
    }
}

#[tokio::test]
async fn a_stream_of_sixty_comes_in_three_runs_of_twenty() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let stored = db.store_many(kind, Uuid::now_v7(), 60).await;
        for cycle in 0..3 {
            let got = db.claim(&Claim::of(me).run(20)).await;
            assert_eq!(ids(&got), stored[cycle * 20..][..20]);
            assert_eq!(db.claim(&Claim::of(me).run(20)).await.len(), 0, "the stream is in flight");
            assert!(db.complete(me, &got).await.is_empty());
        }
        assert_eq!(db.claim(&Claim::of(me)).await.len(), 0);
    }
}

#[tokio::test]
async fn a_parked_head_blocks_its_stream_and_no_other() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let (parked, other) = (Uuid::now_v7(), Uuid::now_v7());
        let blocked = db.store_many(kind, parked, 3).await;
        let free = db.store(kind, other).await;
        db.park(kind, blocked[0], 3600.0).await;
        assert_eq!(ids(&db.claim(&Claim::of(me)).await), [free], "{kind:?}");
        assert_eq!(db.claim(&Claim::of(me)).await.len(), 0);
        db.park(kind, blocked[0], -1.0).await;
        assert_eq!(ids(&db.claim(&Claim::of(me)).await), blocked);
    }
}

#[tokio::test]
async fn a_parked_row_is_claimed_as_soon_as_it_is_due() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let id = db.store(kind, Uuid::now_v7()).await;
        db.park(kind, id, 0.4).await;
        let due = db.state(kind, id).await.unwrap().scheduled.unwrap();
        let mut got: Vec<Claimed> = Vec::new();
        eventually("a due row", async || {
            got = db.claim(&Claim::of(me)).await;
            !got.is_empty()
        })
        .await;
        assert_eq!(ids(&got), [id]);
        assert!(got[0].expiry >= due + Duration::from_mins(5), "not before its time");
        let state = db.state(kind, id).await.unwrap();
        assert_eq!((state.scheduled, state.attempts, state.crashes), (None, 1, 0));
    }
}

#[tokio::test]
async fn a_row_parked_for_ever_never_comes() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        db.store_many(kind, Uuid::now_v7(), 2).await;
        db.batch_execute(&format!("update {} set scheduled_for = 'infinity'", kind.table)).await.unwrap();
        assert_eq!(db.claim(&Claim::of(me)).await.len(), 0);
    }
}

#[tokio::test]
async fn a_run_ends_before_a_row_that_is_not_yet_due() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let stored = db.store_many(kind, Uuid::now_v7(), 5).await;
        db.park(kind, stored[2], 3600.0).await;
        let got = db.claim(&Claim::of(me)).await;
        assert_eq!(ids(&got), stored[..2], "{kind:?}");
        db.complete(me, &got).await;
        assert_eq!(db.claim(&Claim::of(me)).await.len(), 0, "now the parked row is the head");
    }
}

#[tokio::test]
async fn a_stream_with_a_live_lease_gets_no_more_rows() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let (one, two) = (db.member().await, db.member().await);
        let stream = Uuid::now_v7();
        let stored = db.store_many(kind, stream, 4).await;
        let got = db.claim(&Claim::of(one).run(2)).await;
        assert_eq!(ids(&got), stored[..2]);
        // The first is done, the second still runs: the third must wait, for the owner too.
        db.complete(one, &got[..1]).await;
        for me in [one, two] {
            assert_eq!(db.claim(&Claim::of(me)).await.len(), 0, "{kind:?}");
        }
        db.complete(one, &got[1..]).await;
        assert_eq!(ids(&db.claim(&Claim::of(two)).await), stored[2..]);
    }
}

#[tokio::test]
async fn a_late_lower_row_waits_while_its_stream_is_leased() {
    for kind in KINDS {
        let (lab, db) = Lab::new().await;
        let (one, two, producer) = (db.member().await, db.member().await, lab.session().await);
        let stream = Uuid::now_v7();
        producer.batch_execute("begin").await.unwrap();
        let late = producer.store(kind, stream).await;
        let early = db.store(kind, stream).await;
        let got = db.claim(&Claim::of(one)).await;
        assert_eq!(ids(&got), [early], "an uncommitted row is not seen");
        producer.batch_execute("commit").await.unwrap();
        for me in [one, two] {
            assert_eq!(db.claim(&Claim::of(me)).await.len(), 0, "{kind:?}");
        }
        db.complete(one, &got).await;
        assert_eq!(ids(&db.claim(&Claim::of(two)).await), [late]);
    }
}

/// What the bucket lock is for: the other claim's lease is not committed, so no snapshot shows it.
#[tokio::test]
async fn a_late_lower_row_waits_also_while_the_lease_of_its_stream_is_uncommitted() {
    for kind in KINDS {
        let (lab, db) = Lab::new().await;
        let (one, two) = (db.member().await, db.member().await);
        let (producer, other) = (lab.session().await, lab.session().await);
        let stream = Uuid::now_v7();
        producer.batch_execute("begin").await.unwrap();
        producer.store(kind, stream).await;
        db.store(kind, stream).await;
        db.batch_execute("begin").await.unwrap();
        assert_eq!(db.claim(&Claim::of(one)).await.len(), 1);
        producer.batch_execute("commit").await.unwrap();
        assert_eq!(other.claim(&Claim::of(two)).await.len(), 0, "{kind:?}");
        db.batch_execute("commit").await.unwrap();
        assert_eq!(other.claim(&Claim::of(two)).await.len(), 0, "{kind:?}");
    }
}

#[tokio::test]
async fn categories_and_lanes_of_one_stream_do_not_block_each_other() {
    let (_lab, db) = Lab::new().await;
    let (one, two) = (db.member().await, db.member().await);
    let stream = Uuid::now_v7();
    db.store_many(&OUTBOX, stream, 2).await;
    let inbox = db.store_many(KINDS[1], stream, 2).await;
    assert_eq!(db.claim(&Claim::of(one).only(&OUTBOX)).await.len(), 2);
    assert_eq!(ids(&db.claim(&Claim::of(two)).await), inbox);
    for kind in [&PERSPECTIVE, &RECEPTOR] {
        let (first, second) =
            (db.store_in(kind, stream, "first").await, db.store_in(kind, stream, "second").await);
        let behind = db.store_in(kind, stream, "first").await;
        let got = db.claim(&Claim::of(one).rows(1)).await;
        assert_eq!(ids(&got), [first]);
        assert_eq!(ids(&db.claim(&Claim::of(two)).await), [second], "{kind:?}");
        db.settle(one, &[verdict(&got[0], "retry")]).await;
        assert_eq!(db.claim(&Claim::of(two)).await.len(), 0, "parked blocks {behind}");
    }
}

#[tokio::test]
async fn a_row_that_crashed_three_times_runs_alone() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let stored = db.store_many(kind, Uuid::now_v7(), 6).await;
        let sql = format!("update {} set crash_count = 3 where {} = $1", kind.table, kind.key);
        db.execute(&sql, &[&stored[2]]).await.unwrap();
        for expected in [&stored[..2], &stored[2..3], &stored[3..]] {
            let got = db.claim(&Claim::of(me)).await;
            assert_eq!(ids(&got), expected, "{kind:?}");
            db.complete(me, &got).await;
        }
    }
}

#[tokio::test]
async fn a_run_ends_before_a_row_that_somebody_else_has_locked() {
    for kind in KINDS {
        let (lab, db) = Lab::new().await;
        let (me, outsider) = (db.member().await, lab.session().await);
        let stored = db.store_many(kind, Uuid::now_v7(), 5).await;
        let lock = format!("select 1 from {} where {} = $1 for update", kind.table, kind.key);
        outsider.batch_execute("begin").await.unwrap();
        outsider.query(&lock, &[&stored[2]]).await.unwrap();
        db.batch_execute("set lock_timeout = '5s'").await.unwrap();
        assert_eq!(ids(&db.claim(&Claim::of(me)).await), stored[..2], "{kind:?}");
        outsider.batch_execute("commit").await.unwrap();
    }
}

#[tokio::test]
async fn rows_without_a_stream_come_oldest_first_and_block_nothing() {
    for kind in KINDS.into_iter().filter(|kind| kind.unordered) {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let stored = db.store_many(kind, None, 12).await;
        db.park(kind, stored[0], 3600.0).await;
        let first = db.claim(&Claim::of(me).rows(5)).await;
        assert_eq!(ids(&first), stored[1..6], "{kind:?}");
        assert_eq!(ids(&db.claim(&Claim::of(me).rows(100)).await), stored[6..]);
        // Handed back, it is found by the next pass from the front, while fresh rows keep coming.
        db.settle(me, &[verdict(&first[0], "release")]).await;
        eventually("the pass from the front", async || {
            db.store(kind, None).await;
            ids(&db.claim(&Claim::of(me)).await).contains(&stored[1])
        })
        .await;
    }
}

#[tokio::test]
async fn a_retried_row_without_a_stream_is_not_overtaken_for_long_by_a_backlog() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    let backlog = |rows: usize| {
        format!(
            "insert into wh_outbox (message_type, payload) select 'm', '{{}}' from generate_series(1, {rows})"
        )
    };
    db.batch_execute(&backlog(10_000)).await.unwrap();
    let claim = Claim::of(me).only(&OUTBOX);
    let got = db.claim(&claim).await;
    let mut retry = verdict(&got[0], "retry");
    retry.after = Some(0);
    let mut items = vec![retry];
    items.extend(got[1..].iter().map(|row| verdict(row, "complete")));
    db.settle(me, &items).await;
    let start = Instant::now();
    for claims in 1.. {
        let next = db.claim(&claim).await;
        if next.iter().any(|row| row.id == got[0].id) {
            println!("a retry came back after {claims} claims, {} ms", start.elapsed().as_millis());
            break;
        }
        db.complete(me, &next).await;
        // The backlog never ends, so only the pass from the front can find the retry.
        assert!(!next.is_empty() && start.elapsed() < PATIENCE, "{claims} claims went by");
        db.batch_execute(&backlog(next.len())).await.unwrap();
    }
}
