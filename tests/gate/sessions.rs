//! The listening session ends: killed, closed in good order, again and again.

use std::time::Duration;

use workpump::engine::instance::Gate;

use crate::common::wait::eventually;
use crate::common::{self, scale};
use crate::rig::{Rig, door, store, through, value, woken_only};

#[tokio::test]
async fn work_that_comes_after_the_listener_was_killed_is_claimed_by_the_wake_three_times_in_a_row() {
    let db = common::database().await;
    let control = db.connect().await;
    let mut rig = Rig::start(db.url(), db.url(), woken_only()).await;
    rig.until(Gate::Available).await;
    for _ in 0..3 {
        rig.kill_listener(&control).await;
        rig.lost_and_back().await;
        // The first may be found by the claim that follows every new session; the others by nothing but the wake.
        for _ in 0..3 {
            rig.relay_one(&control).await;
        }
    }
    rig.nothing_more_was_told();
    rig.pump.drain().await;
}

#[tokio::test]
async fn a_session_closed_in_good_order_is_one_loss_and_one_reconnect() {
    let db = common::database().await;
    let control = db.connect().await;
    let door = door().await;
    let mut rig = Rig::start(db.url(), &through(&door, &db), woken_only()).await;
    rig.until(Gate::Available).await;
    assert_eq!(door.listened(), (1, 1));
    assert_eq!(door.listeners(crate::common::proxy::Flow::Close), 1);
    rig.lost_and_back().await;
    for _ in 0..3 {
        rig.relay_one(&control).await;
    }
    rig.nothing_more_was_told();
    assert_eq!(door.listened(), (1, 2), "living and all there were");
    let gate = rig.account("notify_gate").await;
    assert_eq!((gate.counter("losses"), gate.counter("connects")), (1, 2), "{gate:?}");
    rig.pump.drain().await;
}

#[tokio::test]
async fn after_many_forced_reconnects_one_session_listens_and_none_has_leaked() {
    let db = common::database().await;
    let control = db.connect().await;
    let door = door().await;
    let mut rig = Rig::start(db.url(), &through(&door, &db), woken_only()).await;
    rig.until(Gate::Available).await;
    rig.relay_one(&control).await;
    let sessions = "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'workpump'";
    let before: i64 = value(&control, sessions).await;
    let rounds = if scale() < 10 { 10 * scale() } else { 100 };
    for round in 0..rounds {
        if round % 2 == 0 {
            rig.kill_listener(&control).await;
        } else {
            assert_eq!(door.listeners(crate::common::proxy::Flow::Close), 1);
        }
        rig.lost_and_back().await;
        let held = format!("select count(*) = 1 from ({}) l", rig.listener());
        eventually("the lock, on the new session", async || value(&control, &held).await).await;
    }
    assert_eq!(door.listened(), (1, 1 + rounds as usize), "living and all there were");
    // A second statement at a time opens a second session of the pool; a leak would be one for each round.
    eventually("no session more", async || value::<i64>(&control, sessions).await <= before + 2).await;
    println!("{rounds} reconnects: {} sessions, {before} before", value::<i64>(&control, sessions).await);
    rig.relay_one(&control).await;
    rig.nothing_more_was_told();
    rig.pump.drain().await;
}

#[tokio::test]
async fn pings_go_to_the_server_while_work_is_in_hand_and_the_listener_pins_no_snapshot() {
    let db = common::database().await;
    let control = db.connect().await;
    let door = door().await;
    let pause = Duration::from_secs(4);
    let mut rig = Rig::slow(db.url(), &through(&door, &db), woken_only(), pause).await;
    rig.until(Gate::Available).await;
    let pinned = format!(
        "select count(*) from pg_stat_activity where pid in ({}) and (backend_xmin is not null or backend_xid is not null)",
        rig.listener()
    );
    let mut looks = 0;
    let mut look = async || {
        looks += 1;
        assert_eq!(value::<i64>(&control, &pinned).await, 0, "look {looks}");
    };
    for _ in 0..20 {
        look().await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let before = (door.sent_by_listeners(), rig.account("notify_gate").await.counter("pings_answered"));
    store(&db.connect().await, 1).await;
    eventually("a running handler", async || rig.running.load(std::sync::atomic::Ordering::Relaxed) == 1)
        .await;
    let mut samples = 0;
    while rig.running.load(std::sync::atomic::Ordering::Relaxed) == 1 {
        samples += i64::from(value::<i64>(&control, &pinned).await == 0);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let after = (door.sent_by_listeners(), rig.account("notify_gate").await.counter("pings_answered"));
    // A ping reads for an instant; it is no snapshot that lasts.
    println!("{samples} looks while the handler ran; bytes sent {} -> {}", before.0, after.0);
    assert!(samples >= 10);
    let (bytes, pings) = (after.0 - before.0, after.1 - before.1);
    assert!(pings >= 3, "{pings} pings in four seconds of work");
    assert!(bytes >= pings * 20, "{bytes} bytes for {pings} pings");
    rig.published().await;
    rig.pump.drain().await;
}
