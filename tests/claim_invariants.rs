//! The invariants of claiming under random concurrency, by a recorded history; and the proof that the checker finds faults.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;
mod history;
#[path = "common/work.rs"]
mod work;

use std::time::Duration;

use futures_util::StreamExt;
use history::mutation::Mutation;
use history::run::{Settings, run};
use history::{audit, mutation};

/// Replays the choices of a run that failed: `WORKPUMP_TEST_SEED`.
fn seed(of: u64) -> u64 {
    std::env::var("WORKPUMP_TEST_SEED")
        .map_or(of, |text| text.parse().expect("WORKPUMP_TEST_SEED is a number"))
}

async fn holds(serialised: bool, slowly: bool, of: u64) {
    let db = common::database().await;
    let client = db.connect().await;
    audit::install(&client).await;
    if slowly {
        mutation::walk_slowly(&client).await;
    }
    let lasts = Duration::from_secs(4) * common::scale();
    let settings = Settings { seed: seed(of), serialised, claimers: 8, lasts, hunting: false };
    let report = run(&db, settings).await;
    println!("{}", report.account);
    let some: Vec<_> = report.violations.iter().take(5).collect();
    assert!(some.is_empty(), "{} ({} violations): {some:#?}", report.account, report.violations.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_stay_whole_and_in_order_while_producers_are_serialised() {
    holds(true, false, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_have_one_owner_and_lose_nothing_while_producers_overlap() {
    holds(false, false, 2).await;
}

/// Other claims commit between the snapshot in which a stream looked free and the lock on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_stay_whole_although_claims_take_their_time() {
    holds(true, true, 4).await;
}

/// What was found, or that nothing was.
async fn hunt(mutation: &Mutation) -> Result<String, String> {
    let db = common::database().await;
    let client = db.connect().await;
    audit::install(&client).await;
    mutation::plant(&client, mutation).await;
    // A hunt ends with its find. How long that takes is chance and the machine's speed, so the limit is one that neither reaches.
    let lasts = Duration::from_mins(10);
    let (claimers, serialised) = (mutation.claimers, !mutation.overlapping);
    let report = run(&db, Settings { seed: seed(3), serialised, claimers, lasts, hunting: true }).await;
    let first: Option<String> = report.violations.first().map(|what| what.chars().take(90).collect());
    first.map(|what| format!("{}: {what}; {}", mutation.name, report.account)).ok_or(mutation.name.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_checker_finds_every_planted_fault() {
    let hunts = futures_util::stream::iter(mutation::ALL).map(hunt).buffer_unordered(3);
    let (found, missed): (Vec<_>, Vec<_>) =
        hunts.collect::<Vec<_>>().await.into_iter().partition(Result::is_ok);
    for what in found.into_iter().flatten() {
        println!("{what}");
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
