//! Overlapping settlements, renewals and claims never deadlock, in whatever order their rows are named.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;
use tokio::time::Instant;
use uuid::Uuid;

use crate::work::{Claim, Claimed, Item, KINDS, Lab, Session, scattered, verdict};

/// All 16 sessions speak for one instance: others would be fenced before they lock anything.
struct Shared {
    me: Uuid,
    ends: Instant,
}

async fn leased(db: &Session, me: Uuid) -> Vec<Claimed> {
    let parts: Vec<_> = KINDS
        .iter()
        .map(|kind| {
            format!(
                "select '{}'::text as category, {} as work_id, stream_id, partition_number, claim_epoch, attempts, crash_count,
                        lease_expiry, seq, null::text as name from {} where instance_id = '{me}'",
                kind.category, kind.key, kind.table
            )
        })
        .collect();
    let rows = db.query(&parts.join(" union all "), &[]).await.expect("the leased rows");
    rows.iter().map(Claimed::from_row).collect()
}

/// Settles, renews and claims overlapping sets in random order; returns the errors.
async fn quarrel(
    db: Session,
    shared: Arc<Shared>,
    seed: u64,
    verdicts: &'static [&'static str],
) -> (usize, Vec<String>) {
    let mut choices = StdRng::seed_from_u64(seed);
    let (mut calls, mut errors) = (0, Vec::new());
    let mut note = |answer: Result<(), tokio_postgres::Error>| {
        if let Err(error) = answer {
            errors.push(format!(
                "{:?}",
                error.as_db_error().map(|e| (e.code().code().to_owned(), e.detail().map(str::to_owned)))
            ));
        }
    };
    while Instant::now() < shared.ends {
        let mut rows = leased(&db, shared.me).await;
        rows.shuffle(&mut choices);
        rows.truncate(choices.random_range(5..60));
        let (ids, epochs): (Vec<_>, Vec<_>) = rows.iter().map(|row| (row.id, row.epoch)).unzip();
        match choices.random_range(0..6) {
            0 => {
                let kind = KINDS[choices.random_range(0..4)];
                let sql = "select * from renew_claims($1, $2, $3, $4)";
                note(db.query(sql, &[&kind.category, &shared.me, &ids, &epochs]).await.map(drop));
            }
            1 => {
                let kind = KINDS[choices.random_range(0..3)];
                note(db.query("select renew_leases($1, $2)", &[&kind.category, &ids]).await.map(drop));
            }
            2 => note(db.try_claim(&Claim::of(shared.me).rows(100)).await.map(drop)),
            _ => {
                let name = |choices: &mut StdRng| verdicts[choices.random_range(0..verdicts.len())];
                let items: Vec<Item> = rows
                    .iter()
                    .map(|row| Item { after: Some(0), ..verdict(row, name(&mut choices)) })
                    .collect();
                note(db.try_settle(shared.me, &items, false).await.map(drop));
            }
        }
        calls += 1;
    }
    (calls, errors)
}

async fn nobody_deadlocks(verdicts: &'static [&'static str]) {
    let (lab, db) = Lab::new().await;
    let me = db.member().await;
    let ends = Instant::now() + Duration::from_secs(3) * crate::common::scale();
    let shared = Arc::new(Shared { me, ends });
    let mut sessions = JoinSet::new();
    for number in 0..16 {
        let session = lab.session().await;
        session.batch_execute("set deadlock_timeout = '20ms'").await.expect("a superuser");
        sessions.spawn(quarrel(session, Arc::clone(&shared), number, verdicts));
    }
    let mut round = 0;
    while Instant::now() < ends {
        for kind in KINDS {
            if db.number(&format!("select count(*) from {}", kind.table)).await < 80 {
                for _ in 0..10 {
                    db.store(kind, scattered(round % 12)).await;
                    round += 1;
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let all = sessions.join_all().await;
    let calls: usize = all.iter().map(|(calls, _)| calls).sum();
    let errors: Vec<_> = all.into_iter().flat_map(|(_, errors)| errors).collect();
    println!("{verdicts:?}: {calls} calls, {} errors", errors.len());
    assert!(
        errors.is_empty(),
        "{} of {calls} calls failed: {:?}",
        errors.len(),
        &errors[..errors.len().min(3)]
    );
}

#[tokio::test]
async fn completions_in_any_order_never_deadlock() {
    nobody_deadlocks(&["complete", "complete", "release"]).await;
}

#[tokio::test]
async fn mixed_verdicts_in_any_order_never_deadlock() {
    nobody_deadlocks(&["complete", "retry", "release", "dead_letter"]).await;
}
