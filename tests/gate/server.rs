//! The server restarts, stops, dies after a commit.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use workpump::engine::instance::Gate;

use crate::common::{self, scale, wait::eventually};
use crate::rig::{Rig, store, value, woken_only};

/// Rows published in a window.
async fn rate(rig: &mut Rig, window: Duration) -> usize {
    while rig.published.try_recv().is_ok() {}
    sleep(window).await;
    let mut count = 0;
    while rig.published.try_recv().is_ok() {
        count += 1;
    }
    count
}

#[tokio::test]
async fn a_restart_under_load_is_followed_by_full_throughput_and_full_slots_within_thirty_seconds() {
    const SLOTS: usize = 16;
    let mut server = common::server_with(&[]);
    let db = server.database().await;
    let control = db.connect().await;
    let mut options = woken_only();
    options.dispatch.max_in_flight = SLOTS as u32;
    // 16 slots of 100 ms: 160 rows a second, bounded by the slots and not by the machine.
    let mut rig = Rig::slow(db.url(), db.url(), options, Duration::from_millis(100)).await;
    rig.until(Gate::Available).await;
    // More than this test can relay.
    for _ in 0..30 {
        store(&control, 1_000).await;
    }
    let window = Duration::from_secs(2);
    rate(&mut rig, Duration::from_secs(1)).await;
    let before = rate(&mut rig, window).await.max(rate(&mut rig, window).await);
    server.postgres.kill_9().expect("killed");
    server.postgres.restart().expect("restarted");
    let back = Instant::now();
    let (mut best, mut full) = (0, false);
    while back.elapsed() < Duration::from_secs(30) && (!full || best * 100 < before * 95) {
        best = best.max(rate(&mut rig, window).await);
        full |= rig.running.load(Ordering::Relaxed) == SLOTS;
    }
    println!(
        "{before} rows in 2 s before the restart, {best} after it, reached {:.1?} later",
        back.elapsed()
    );
    assert!(best * 100 >= before * 95, "{best} of {before} rows");
    assert!(full, "all slots are busy again");
    let control = db.connect().await;
    assert!(value::<i64>(&control, "select count(*) from wh_outbox").await > 0, "there was work to the end");
    rig.until(Gate::Available).await;
    control.batch_execute("delete from wh_outbox where instance_id is null").await.unwrap();
    rig.pump.drain().await;
}

#[tokio::test]
async fn after_an_outage_of_the_database_every_actor_goes_on_and_nobody_was_started_anew() {
    let mut server = common::server_with(&[]);
    let db = server.database().await;
    let control = db.connect().await;
    let mut rig = Rig::start(db.url(), db.url(), woken_only()).await;
    rig.until(Gate::Available).await;
    rig.relay_one(&control).await;
    server.postgres.stop().expect("stopped");
    assert_eq!(rig.change().await, Gate::Unavailable);
    // The outage itself: a minute at full length.
    sleep(Duration::from_secs(u64::from(6 * scale().min(10)))).await;
    rig.nothing_more_was_told();
    server.postgres.restart().expect("restarted");
    assert_eq!(rig.change().await, Gate::Available);
    let control = db.connect().await;
    for _ in 0..3 {
        rig.relay_one(&control).await;
    }
    eventually("readiness", async || rig.pump.is_ready() && rig.pump.is_alive_lock_held()).await;
    let totals = rig.pump.registry().totals();
    assert_eq!(totals.restarts, 0, "{totals:?}");
    rig.nothing_more_was_told();
    rig.pump.drain().await;
}

#[tokio::test]
async fn a_row_whose_ring_died_with_the_server_is_relayed_after_the_restart() {
    let mut server = common::server_with(&[]);
    let db = server.database().await;
    let mut rig = Rig::start(db.url(), db.url(), woken_only()).await;
    rig.until(Gate::Available).await;
    for round in 0..2 + scale().min(8) {
        let control = db.connect().await;
        store(&control, 1).await;
        server.postgres.stop_immediately().expect("stopped");
        server.postgres.restart().expect("restarted");
        rig.published().await;
        // Twice, if its result had not been written.
        rig.until(Gate::Unavailable).await;
        rig.until(Gate::Available).await;
        let control = db.connect().await;
        let left = "select count(*) from wh_outbox";
        eventually(&format!("an empty table in round {round}"), async || {
            value::<i64>(&control, left).await == 0
        })
        .await;
    }
    rig.nothing_more_was_told();
    rig.pump.drain().await;
}

#[tokio::test]
async fn twenty_instances_come_back_from_a_restart_spread_out() {
    let mut server = common::server_with(&[]);
    let db = server.database().await;
    let mut rigs = Vec::new();
    for _ in 0..20 {
        rigs.push(Rig::start(db.url(), db.url(), woken_only()).await);
    }
    for rig in &mut rigs {
        rig.until(Gate::Available).await;
    }
    server.postgres.stop().expect("stopped");
    for rig in &mut rigs {
        assert_eq!(rig.change().await, Gate::Unavailable);
    }
    // Long enough for pauses to have grown.
    sleep(Duration::from_secs(2)).await;
    server.postgres.restart().expect("restarted");
    for rig in &mut rigs {
        assert_eq!(rig.change().await, Gate::Available);
    }
    let control = db.connect().await;
    let starts = "select extract(epoch from a.backend_start)::float8 from pg_stat_activity a where datname = current_database() and pid in \
                  (select pid from pg_locks l, wh_service_instances m where l.locktype = 'advisory' and l.granted \
                   and l.mode = 'ExclusiveLock' and l.objsubid = 1 and (l.classid::bigint << 32) | l.objid::bigint = wh_alive_key(m.instance_id))";
    let mut came: Vec<f64> = Vec::new();
    eventually("twenty locks", async || {
        came = control.query_typed(starts, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
        came.len() == 20
    })
    .await;
    came.sort_by(f64::total_cmp);
    let offsets: Vec<u32> = came.iter().map(|at| ((at - came[0]) * 1000.0) as u32).collect();
    println!("twenty listeners came back after {offsets:?} ms");
    let busiest =
        offsets.iter().map(|from| offsets.iter().filter(|at| (*from..from + 50).contains(at)).count()).max();
    assert!(busiest <= Some(12), "{busiest:?} of 20 within 50 ms");
    assert!(offsets[19] >= 200, "spread by 20 % of pauses of a second");
    futures_util::future::join_all(rigs.iter().map(|rig| rig.pump.drain())).await;
}
