//! Deaths of real processes: how soon others have their rows, and what is no death.
//!
//! What is measured runs alone; a test that only waits for something not to happen runs beside others.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;
mod fleet;

use std::time::Duration;

use common::scale;
use common::wait::eventually;
use fleet::{
    Relay, To, declared, evictions, figures, held, settled, stuck_with, taken_over, until, value, within,
};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

/// Rows in the hands of whoever is to die.
const ROWS: u32 = 200;

/// One measurement at a time.
static ALONE: Mutex<()> = Mutex::const_new(());

fn runs(at_scale_10: u32) -> u32 {
    (at_scale_10 * scale() / 10).max(1)
}

/// Kills the one of three that holds rows; how soon another one has the first of them.
async fn kill_one(options: &[(&str, &str)]) -> Duration {
    let db = common::database().await;
    let control = db.connect().await;
    let mut victim = stuck_with(&control, db.url(), ROWS, options).await;
    let peers = [
        Relay::start(&control, db.url(), To::Nowhere, options).await,
        Relay::start(&control, db.url(), To::Nowhere, options).await,
    ];
    settled(&control, &[&victim, &peers[0], &peers[1]]).await;
    let killed = victim.kill();
    let took = taken_over(&control, &[victim.id], ROWS.into(), killed).await;
    until(&control, "select count(*) = 0 from wh_outbox").await;
    assert_eq!(evictions(&control).await, [(victim.id, "alive-lock lost".to_owned())]);
    took
}

#[tokio::test]
async fn the_rows_of_a_killed_instance_are_with_others_within_six_seconds() {
    let _alone = ALONE.lock().await;
    let mut took = Vec::new();
    for _ in 0..runs(50).min(5 * scale()) {
        took.push(kill_one(&[]).await);
    }
    assert!(took.iter().all(|took| *took >= Duration::from_secs(5)), "before the end of the grace: {took:?}");
    within("kill -9, defaults", &mut took, Duration::from_secs(6));
}

#[tokio::test]
async fn with_a_grace_of_one_second_they_are_there_within_one_and_a_half() {
    let _alone = ALONE.lock().await;
    let mut took = Vec::new();
    for _ in 0..runs(50) {
        took.push(kill_one(&[("WORKPUMP_LIVENESS_LOCK_LOSS_GRACE_SECONDS", "1")]).await);
    }
    assert!(took.iter().all(|took| *took >= Duration::from_secs(1)), "before the end of the grace: {took:?}");
    within("kill -9, grace 1 s", &mut took, Duration::from_millis(1_500));
}

/// The one that waits for the dead one's lock dies with it, so nobody sees it free; a census of the others does.
#[tokio::test]
async fn a_watcher_killed_together_with_its_peer_is_found_by_the_census() {
    let mut took = Vec::new();
    for _ in 0..runs(10) {
        let db = common::database().await;
        let control = db.connect().await;
        let mut relays = vec![stuck_with(&control, db.url(), ROWS, &[]).await];
        for _ in 0..3 {
            relays.push(Relay::start(&control, db.url(), To::Nowhere, &[]).await);
        }
        let all: Vec<&Relay> = relays.iter().collect();
        settled(&control, &all).await;
        // A census needs 30 s of the judge's own lock.
        sleep(Duration::from_secs(31)).await;
        // In the ring of ids, which are given out in the order of the starts, the last one watches the first.
        let (mut victim, mut watcher) = (relays.remove(0), relays.pop().expect("four relays"));
        let killed = victim.kill();
        watcher.kill();
        took.push(taken_over(&control, &[victim.id, watcher.id], ROWS.into(), killed).await);
        let both = async || evictions(&control).await.len() == 2;
        eventually("both are evicted", both).await;
    }
    within("watcher and peer killed together", &mut took, Duration::from_secs(25));
}

#[tokio::test]
async fn a_single_instance_that_is_killed_and_started_again_takes_its_own_rows_back() {
    let mut took = Vec::new();
    for _ in 0..runs(10) {
        let db = common::database().await;
        let control = db.connect().await;
        let mut first = stuck_with(&control, db.url(), ROWS, &[]).await;
        declared(&control, &[&first]).await;
        first.kill();
        let second = Relay::start(&control, db.url(), To::Nowhere, &[]).await;
        let joined = Instant::now();
        took.push(taken_over(&control, &[first.id], ROWS.into(), joined).await);
        assert_ne!(first.id, second.id, "an id is never used twice");
        assert_eq!(evictions(&control).await.len(), 1);
    }
    within(
        "a single instance, killed and restarted, after its first beat",
        &mut took,
        Duration::from_secs(36),
    );
}

#[tokio::test]
async fn a_direct_connection_that_is_cut_is_no_death() {
    let db = common::database().await;
    let control = db.connect().await;
    let cut_one = stuck_with(&control, db.url(), ROWS, &[]).await;
    let peer = Relay::start(&control, db.url(), To::Nowhere, &[]).await;
    let mut back = Vec::new();
    for _ in 0..runs(100).min(10 * scale()) {
        declared(&control, &[&cut_one, &peer]).await;
        let cut = format!(
            "select count(pg_terminate_backend(h.pid, 5000)) from wh_held_keys() h where h.key = wh_alive_key('{}')",
            cut_one.id
        );
        assert_eq!(value::<i64>(&control, &cut).await, 1);
        let since = Instant::now();
        declared(&control, &[&cut_one]).await;
        back.push(since.elapsed());
    }
    figures("direct connection cut: the lock is held and declared again after", &mut back);
    // Longer than the grace: whoever was suspected would be evicted by now.
    sleep(Duration::from_secs(7)).await;
    assert_eq!(evictions(&control).await, []);
    assert_eq!(held(&control, cut_one.id).await, i64::from(ROWS));
    assert_eq!(value::<i64>(&control, "select max(claim_epoch) from wh_outbox").await, 1, "no re-dispatch");
}

#[tokio::test]
async fn a_restart_of_the_server_is_nobodys_death() {
    let mut server = common::server_with(&[]);
    let db = server.database().await;
    let control = db.connect().await;
    let stuck = stuck_with(&control, db.url(), ROWS, &[]).await;
    let mut relays = vec![stuck];
    for _ in 0..2 {
        relays.push(Relay::start(&control, db.url(), To::Nowhere, &[]).await);
    }
    let all: Vec<&Relay> = relays.iter().collect();
    settled(&control, &all).await;
    // A census that is due must not judge by what it sees right after the restart.
    sleep(Duration::from_secs(31)).await;
    for round in 0..scale() {
        if round.is_multiple_of(2) {
            server.postgres.kill_9().expect("killed");
        } else {
            server.postgres.stop_immediately().expect("stopped");
        }
        server.postgres.restart().expect("restarted");
        let control = db.connect().await;
        declared(&control, &all).await;
        // Past the grace and the first census after the restart.
        sleep(Duration::from_secs(37)).await;
        assert_eq!(evictions(&control).await, [], "round {round}");
        assert_eq!(held(&control, relays[0].id).await, i64::from(ROWS));
    }
}
