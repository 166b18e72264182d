//! Processes that were stopped, declared dead, and wake up: whatever they still do, no row changes.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;
mod fleet;

use std::time::Duration;

use common::scale;
use common::wait::eventually;
use fleet::{Relay, To, evictions, held, run, stuck_with, taken_over, until, value};
use tokio::time::{Instant, sleep};
use tokio_postgres::Client;
use uuid::Uuid;

const ROWS: u32 = 200;

/// Beats often and sweeps often: what takes minutes at the defaults takes seconds here.
const QUICK: &[(&str, &str)] = &[
    ("WORKPUMP_HEARTBEAT_INTERVAL_SECONDS", "1"),
    ("WORKPUMP_HEARTBEAT_SLOW_INTERVAL_SECONDS", "1"),
    ("WORKPUMP_LIVENESS_STALE_SWEEP_INTERVAL_SECONDS", "1"),
];

/// Every version of every row: a write of any kind, even of the same values, changes it.
async fn versions(control: &Client) -> String {
    let sql = "select md5(string_agg(w.xmin::text || w.ctid::text || w::text, ' ' order by message_id)) || count(*) from wh_outbox w";
    value(control, sql).await
}

/// As if it had not beaten for six minutes: dead by any measure, although its session is open and its lock held.
async fn age(control: &Client, id: Uuid) {
    run(
        control,
        &format!("update wh_service_instances set last_heartbeat_at = last_heartbeat_at - interval '6 min' where instance_id = '{id}'"),
    )
    .await;
}

/// Whether it is a member again, under another id.
fn back(zombie: &Relay) -> String {
    let (process, id) = (zombie.pid(), zombie.id);
    format!(
        "select count(*) = 1 from wh_service_instances where process_id = {process} and instance_id <> '{id}'"
    )
}

/// Stops a process that holds rows, lets another one take them over, wakes it, and lets it finish what it had in hand.
async fn wake_a_zombie() {
    let db = common::database().await;
    let control = db.connect().await;
    let mut zombie = stuck_with(&control, db.url(), ROWS, QUICK).await;
    zombie.signal("STOP");
    age(&control, zombie.id).await;
    let heir = Relay::start(&control, db.url(), To::Stuck, QUICK).await;
    let all = format!("select count(*) = {ROWS} from wh_outbox where instance_id = '{}'", heir.id);
    until(&control, &all).await;
    assert_eq!(evictions(&control).await, [(zombie.id, "definitive-dead".to_owned())]);
    let before = versions(&control).await;

    zombie.unstick();
    zombie.signal("CONT");
    eventually("the zombie learns of its end", async || zombie.log().contains("was evicted")).await;
    // It comes back as somebody else, and that one must not touch the rows either.
    until(&control, &format!("{} and last_heartbeat_at > started_at", back(&zombie))).await;
    assert_eq!(versions(&control).await, before);
    assert_eq!(held(&control, heir.id).await, i64::from(ROWS));
    assert_eq!(value::<i64>(&control, "select count(*) from wh_dead_letters").await, 0);
    assert!(zombie.drain().await.success());
    assert_eq!(versions(&control).await, before, "nor when it leaves");
}

#[tokio::test]
async fn a_process_that_was_stopped_past_its_eviction_changes_no_row_when_it_goes_on() {
    for _ in 0..scale() {
        wake_a_zombie().await;
    }
}

#[tokio::test]
async fn a_process_that_was_stopped_for_less_than_its_peers_wait_goes_on_as_if_nothing_had_been() {
    let db = common::database().await;
    let control = db.connect().await;
    let mut sleeper = stuck_with(&control, db.url(), ROWS, &[]).await;
    let peer = Relay::start(&control, db.url(), To::Nowhere, &[]).await;
    fleet::settled(&control, &[&sleeper, &peer]).await;
    sleeper.signal("STOP");
    // Its kernel answers for it, so its lock stays; and its beat is not stale yet.
    sleep(Duration::from_secs(8)).await;
    sleeper.signal("CONT");
    sleeper.unstick();
    until(&control, "select count(*) = 0 from wh_outbox").await;
    assert_eq!(evictions(&control).await, []);
    assert!(sleeper.drain().await.success() && peer.drain().await.success());
}

/// Nothing is made old by hand here, and the heartbeat is that of the defaults. Only the lease is longer than usual: else its end would
/// bring the rows back in the same minute.
#[tokio::test]
async fn a_process_that_stays_stopped_is_dead_after_five_minutes_although_its_lock_is_held() {
    if scale() < 10 {
        return println!("skipped: it takes five minutes (WORKPUMP_TEST_SCALE=10)");
    }
    let lease = [("WORKPUMP_CLAIM_LEASE_SECONDS", "1800")];
    let db = common::database().await;
    let control = db.connect().await;
    let mut zombie = stuck_with(&control, db.url(), ROWS, &lease).await;
    let heirs = [
        Relay::start(&control, db.url(), To::Nowhere, &lease).await,
        Relay::start(&control, db.url(), To::Nowhere, &lease).await,
    ];
    fleet::settled(&control, &[&zombie, &heirs[0], &heirs[1]]).await;
    zombie.signal("STOP");
    let stopped = Instant::now();
    let silent = format!(
        "select extract(epoch from clock_timestamp() - last_heartbeat_at)::float8 from wh_service_instances where instance_id = '{}'",
        zombie.id
    );
    let silent: f64 = value(&control, &silent).await;
    // Its last beat was at most a minute ago, so nobody may take it for dead before four minutes have passed.
    sleep(Duration::from_secs(235)).await;
    assert_eq!((evictions(&control).await, held(&control, zombie.id).await), (vec![], i64::from(ROWS)));
    let took = taken_over(&control, &[zombie.id], ROWS.into(), stopped).await;
    println!(
        "a process that was stopped {silent:.1} s after its last beat: its rows were with others {took:.1?} after the stop"
    );
    until(&control, "select count(*) = 0 from wh_outbox").await;
    assert_eq!(evictions(&control).await, [(zombie.id, "definitive-dead".to_owned())]);
    assert!(took >= Duration::from_mins(5).saturating_sub(Duration::from_secs_f64(silent)));
    // The five minutes, and a sweep by anybody.
    assert!(took <= Duration::from_secs(300 + 72 + 10), "{took:?}");
    zombie.unstick();
    zombie.signal("CONT");
    eventually("the zombie learns of its end", async || zombie.log().contains("was evicted")).await;
    until(&control, &back(&zombie)).await;
    assert!(zombie.drain().await.success());
}
