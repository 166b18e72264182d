//! What each verdict does to its row, and to the rows behind it.

use std::time::{Duration, SystemTime};

use crate::work::{Claim, KINDS, Lab, OUTBOX, PERSPECTIVE, Session, ids, refusal, scattered, verdict};

#[tokio::test]
async fn completion_deletes_the_row() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let stored = db.store_many(kind, scattered(1), 3).await;
        let got = db.claim(&Claim::of(me)).await;
        assert!(db.complete(me, &got).await.is_empty());
        for id in stored {
            assert_eq!(db.state(kind, id).await, None, "{kind:?}");
        }
    }
}

#[tokio::test]
async fn no_verdicts_at_all_means_that_everything_is_complete() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        db.store_many(kind, scattered(1), 3).await;
        let got = db.claim(&Claim::of(me)).await;
        let (ids, epochs): (Vec<_>, Vec<_>) = got.iter().map(|row| (row.id, row.epoch)).unzip();
        let sql = "select work_id from settle_work($1, array_fill($2::text, array[3]), $3, $4)";
        assert_eq!(db.query(sql, &[&me, &kind.category, &ids, &epochs]).await.unwrap().len(), 0);
        assert_eq!(db.number(&format!("select count(*) from {}", kind.table)).await, 0);
    }
}

#[tokio::test]
async fn a_completed_row_that_is_kept_is_done_and_free() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let id = db.store(kind, scattered(1)).await;
        let got = db.claim(&Claim::of(me)).await;
        assert!(db.try_settle(me, &[verdict(&got[0], "complete")], true).await.unwrap().is_empty());
        let state = db.state(kind, id).await.unwrap();
        assert_eq!(
            (state.done, state.instance, state.expiry, state.epoch),
            (true, None, None, 1),
            "{kind:?}"
        );
        assert_eq!(db.settle(me, &[verdict(&got[0], "complete")]).await, [id], "done is done");
        assert_eq!(db.claim(&Claim::of(me)).await.len(), 0);
    }
}

#[tokio::test]
async fn a_retry_parks_the_row_and_keeps_its_attempts() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let id = db.store(kind, scattered(1)).await;
        let got = db.claim(&Claim::of(me)).await;
        let mut item = verdict(&got[0], "retry");
        (item.after, item.reason, item.error) = (Some(60_000), Some(2), Some("refused".to_owned()));
        let before = db.now().await;
        assert!(db.settle(me, &[item]).await.is_empty());
        let after = db.now().await;
        let state = db.state(kind, id).await.unwrap();
        assert_eq!(
            (state.instance, state.expiry, state.epoch, state.attempts),
            (None, None, 1, 1),
            "{kind:?}"
        );
        assert_eq!((state.reason, state.error.as_deref(), state.done), (Some(2), Some("refused"), false));
        let (due, pause) = (state.scheduled.unwrap(), Duration::from_mins(1));
        assert!((before + pause..=after + pause).contains(&due), "{due:?}");
        assert_eq!(db.claim(&Claim::of(me)).await.len(), 0);
    }
}

#[tokio::test]
async fn a_retry_without_a_pause_waits_the_usual_time_and_gets_reason_99() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let id = db.store(kind, scattered(1)).await;
        let got = db.claim(&Claim::of(me)).await;
        let before = db.now().await;
        db.settle(me, &[verdict(&got[0], "retry")]).await;
        let after = db.now().await;
        let state = db.state(kind, id).await.unwrap();
        let due = state.scheduled.unwrap();
        let (shortest, longest) = (Duration::from_secs(27), Duration::from_secs(33));
        assert!((before + shortest..=after + longest).contains(&due), "30 s ± 10 %, not until {due:?}");
        assert_eq!(state.reason, Some(99));
    }
}

#[tokio::test]
async fn a_retry_hands_the_rest_of_its_run_back_with_the_attempt() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let stored = db.store_many(kind, scattered(1), 4).await;
        let other = db.store(kind, scattered(2)).await;
        let got = db.claim(&Claim::of(me)).await;
        let find = |id| got.iter().find(|row| row.id == id).unwrap();
        let mut retry = verdict(find(stored[1]), "retry");
        retry.after = Some(3_600_000);
        assert!(db.settle(me, &[verdict(find(stored[0]), "complete"), retry]).await.is_empty());
        for id in &stored[2..] {
            let state = db.state(kind, *id).await.unwrap();
            assert_eq!((state.instance, state.attempts, state.epoch), (None, 0, 1), "{kind:?}");
            assert_eq!((state.crashes, state.scheduled), (0, None));
        }
        assert_eq!(db.state(kind, other).await.unwrap().instance, Some(me), "another stream keeps its lease");
        assert_eq!(db.claim(&Claim::of(me)).await.len(), 0, "the parked head blocks the rest");
        db.park(kind, stored[1], -1.0).await;
        let again = db.claim(&Claim::of(me)).await;
        assert_eq!(ids(&again), stored[1..]);
        assert_eq!(
            again.iter().map(|row| (row.attempts, row.epoch)).collect::<Vec<_>>(),
            [(2, 2), (1, 2), (1, 2)]
        );
    }
}

#[tokio::test]
async fn a_release_refunds_the_attempt_once_and_never_below_zero() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let id = db.store(kind, scattered(1)).await;
        let got = db.claim(&Claim::of(me)).await;
        assert!(db.settle(me, &[verdict(&got[0], "release")]).await.is_empty());
        assert_eq!(db.settle(me, &[verdict(&got[0], "release")]).await, [id], "the second is fenced");
        let state = db.state(kind, id).await.unwrap();
        assert_eq!((state.instance, state.attempts, state.epoch), (None, 0, 1), "{kind:?}");
        let again = db.claim(&Claim::of(me)).await;
        assert_eq!((again[0].attempts, again[0].epoch), (1, 2));
        db.batch_execute(&format!("update {} set attempts = 0", kind.table)).await.unwrap();
        assert!(db.settle(me, &[verdict(&again[0], "release")]).await.is_empty());
        assert_eq!(db.state(kind, id).await.unwrap().attempts, 0);
    }
}

#[tokio::test]
async fn a_dead_letter_takes_the_whole_row_along() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        let stored = db.store_many(kind, scattered(1), 2).await;
        let got = db.claim(&Claim::of(me)).await;
        let whole = format!("select to_jsonb(t) from {} t where {} = $1", kind.table, kind.key);
        let row: serde_json::Value = db.query_one(&whole, &[&stored[0]]).await.unwrap().get(0);
        let mut item = verdict(&got[0], "dead_letter");
        (item.reason, item.error) = (Some(5), Some("too often".to_owned()));
        assert!(db.settle(me, &[item]).await.is_empty());
        assert_eq!(db.state(kind, stored[0]).await, None, "{kind:?}");
        let sql = "select row_snapshot, category, work_id, stream_id, failure_reason, error, attempts, crash_count, dead_lettered_by
                   from wh_dead_letters";
        let letter = db.query_one(sql, &[]).await.unwrap();
        assert_eq!(letter.get::<_, serde_json::Value>(0), row);
        assert_eq!((letter.get::<_, &str>(1), letter.get::<_, uuid::Uuid>(2)), (kind.category, stored[0]));
        assert_eq!(letter.get::<_, Option<uuid::Uuid>>(3), Some(scattered(1)));
        assert_eq!((letter.get::<_, i32>(4), letter.get::<_, &str>(5)), (5, "too often"));
        assert_eq!((letter.get::<_, i32>(6), letter.get::<_, i32>(7)), (1, 0));
        assert_eq!(letter.get::<_, uuid::Uuid>(8), me);
        assert_eq!(db.state(kind, stored[1]).await.unwrap().instance, Some(me), "the run goes on");
    }
}

#[tokio::test]
async fn a_dead_letter_without_an_error_keeps_the_one_that_is_stored() {
    for kind in KINDS {
        let (_lab, db) = Lab::new().await;
        let me = db.member().await;
        db.store(kind, scattered(1)).await;
        db.batch_execute(&format!("update {} set error = 'stored'", kind.table)).await.unwrap();
        let got = db.claim(&Claim::of(me)).await;
        db.settle(me, &[verdict(&got[0], "dead_letter")]).await;
        let letter = db.query_one("select failure_reason, error from wh_dead_letters", &[]).await.unwrap();
        assert_eq!((letter.get::<_, i32>(0), letter.get::<_, &str>(1)), (99, "stored"));
    }
}

#[tokio::test]
async fn one_call_settles_all_categories_and_verdicts() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    let mut items = Vec::new();
    let mut stored = Vec::new();
    for kind in KINDS {
        for stream in 0..4 {
            stored.push((kind, db.store(kind, scattered(stream)).await));
        }
    }
    let got = db.claim(&Claim::of(me)).await;
    for (place, (_, id)) in stored.iter().enumerate() {
        let row = got.iter().find(|row| row.id == *id).unwrap();
        items.push(verdict(row, ["complete", "retry", "release", "dead_letter"][place % 4]));
    }
    // Foreign and unknown rows in the middle come back, each with its category, and disturb nothing.
    let mut strange = items[0].clone();
    strange.id = scattered(99);
    items.insert(7, strange);
    items.reverse();
    let fenced = db.try_settle(me, &items, false).await.unwrap();
    assert_eq!(fenced, [("outbox".to_owned(), scattered(99))]);
    for (place, (kind, id)) in stored.iter().enumerate() {
        let state = db.state(kind, *id).await;
        match place % 4 {
            0 | 3 => assert_eq!(state, None),
            1 => assert!(state.unwrap().scheduled.is_some()),
            _ => assert_eq!(state.unwrap().attempts, 0),
        }
    }
    assert_eq!(db.number("select count(*) from wh_dead_letters").await, 4);
}

async fn refused(db: &Session, call: &str) -> (String, String) {
    let error = db.query(&format!("select * from settle_work(gen_random_uuid(), {call})"), &[]).await;
    let error = error.err().unwrap_or_else(|| panic!("accepted: {call}"));
    let (code, hint) = refusal(&error);
    (code, hint.expect("a hint"))
}

#[tokio::test]
async fn what_makes_no_sense_is_refused() {
    let (_lab, db) = Lab::new().await;
    let id = "array['11111111-1111-1111-1111-111111111111'::uuid]";
    for (call, code) in [
        (format!("array['outbax'], {id}, array[1]"), "WH002"),
        (format!("array[null], {id}, array[1]"), "WH002"),
        (format!("array['outbox'], {id}, array[1], array['done']"), "22023"),
        (format!("array['outbox'], {id}, array[1], array[null]"), "22023"),
        (format!("array['outbox', 'outbox'], {id}, array[1]"), "22023"),
        (format!("array['outbox'], {id}, array[1, 2]"), "22023"),
        (format!("array['outbox'], {id}, '{{}}'"), "22023"),
        (format!("array['outbox'], {id}, array[1], array['retry', 'retry']"), "22023"),
    ] {
        let (got, hint) = refused(&db, &call).await;
        assert_eq!(got, code, "{call}: {hint}");
    }
}

#[tokio::test]
async fn an_array_that_is_missing_or_of_another_length_is_refused_and_not_padded() {
    let (_lab, db) = Lab::new().await;
    let id = "array['11111111-1111-1111-1111-111111111111'::uuid]";
    for call in [
        format!("array['outbox'], {id}, null"),
        format!("null, {id}, array[1]"),
        "array['outbox'], null, array[1]".to_owned(),
        format!("array['outbox'], {id}, array[1], array['retry'], array[1, 2]"),
        format!("array['outbox'], {id}, array[1], array['retry'], null, array[1, 2]"),
        format!("array['outbox'], {id}, array[1], array['retry'], null, null, '{{}}'"),
    ] {
        assert_eq!(refused(&db, &call).await.0, "22023", "{call}");
    }
}

#[tokio::test]
async fn an_empty_flush_is_no_error() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    assert!(db.settle(me, &[]).await.is_empty());
}

/// The same formula in Rust, without an overflow for any attempt; the pump's policy is compared with its own tests.
#[tokio::test]
async fn the_pause_after_an_attempt_doubles_up_to_its_cap_for_every_attempt() {
    let (_lab, db) = Lab::new().await;
    let mut attempts: Vec<i64> = (0..70).collect();
    attempts.extend([
        1_000,
        i64::from(i32::MAX),
        i64::from(u32::MAX) - 1,
        i64::from(u32::MAX),
        i64::MAX,
        -1,
        i64::MIN,
    ]);
    let sql = "select a, extract(epoch from wh_retry_delay(a, $2, $3))::float8 from unnest($1::bigint[]) a";
    for (base, cap) in [(30_i32, 300_i32), (1, i32::MAX), (i32::MAX, i32::MAX), (5, 1)] {
        for row in db.query(sql, &[&attempts, &base, &cap]).await.unwrap() {
            let (attempt, pause): (i64, f64) = (row.get(0), row.get(1));
            let exponent = i32::try_from((attempt.max(1) - 1).min(10)).unwrap();
            let expected = (f64::from(base) * 2f64.powi(exponent)).min(f64::from(cap));
            assert!(
                (pause - expected).abs() < 1.0,
                "attempt {attempt}, base {base}, cap {cap}: {pause}, not {expected}"
            );
        }
    }
}

#[tokio::test]
async fn a_pause_is_counted_from_the_settlement_inside_a_long_transaction() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    let id = db.store(&PERSPECTIVE, scattered(1)).await;
    let got = db.claim(&Claim::of(me)).await;
    db.batch_execute("begin; select pg_sleep(0.5)").await.unwrap();
    let before: SystemTime = db.now().await;
    let mut retry = verdict(&got[0], "retry");
    retry.after = Some(1000);
    db.settle(me, &[retry]).await;
    db.batch_execute("commit").await.unwrap();
    let due = db.state(&PERSPECTIVE, id).await.unwrap().scheduled.unwrap();
    assert!(due.duration_since(before).unwrap() >= Duration::from_secs(1));
}

#[tokio::test]
async fn the_single_verdict_wrappers_do_the_same() {
    let (_lab, db) = Lab::new().await;
    let me = db.member().await;
    for (place, call) in [
        "complete_work('outbox', $1, $2, $3)",
        "fail_work('outbox', $1, $2, $3, 'no', 4, interval '5 seconds')",
        "release_work('outbox', $1, $2, $3)",
        "dead_letter_work('outbox', $1, $2, $3, 'no')",
    ]
    .into_iter()
    .enumerate()
    {
        let id = db.store(&OUTBOX, scattered(place as u64)).await;
        let got = db.claim(&Claim::of(me)).await;
        let (one, epoch) = (vec![id], vec![got[0].epoch]);
        let sql = format!("select {call}");
        assert_eq!(db.query(&sql, &[&me, &one, &epoch]).await.unwrap().len(), 0, "{call}");
        assert_eq!(db.query(&sql, &[&me, &one, &epoch]).await.unwrap().len(), 1, "{call} again is fenced");
        if let Some(state) = db.state(&OUTBOX, id).await {
            assert_eq!(state.instance, None);
            db.batch_execute("delete from wh_outbox").await.unwrap();
        }
        let none: (Vec<uuid::Uuid>, Vec<i64>) = (vec![], vec![]);
        assert_eq!(db.query(&sql, &[&me, &none.0, &none.1]).await.unwrap().len(), 0, "{call} of nothing");
    }
}
