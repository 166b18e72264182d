//! The network between the listener and its server refuses, swallows, comes back.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use workpump::engine::instance::Gate;

use crate::common::proxy::{Door, Flow};
use crate::common::{self, scale};
use crate::rig::{Rig, door, store, through, tight_without_gate, woken_only};

#[tokio::test]
async fn a_listener_that_is_refused_and_told_to_wait_comes_back_when_it_is_let_in() {
    let db = common::database().await;
    let control = db.connect().await;
    let door = door().await;
    let mut rig = Rig::start(db.url(), &through(&door, &db), woken_only()).await;
    rig.until(Gate::Available).await;
    // By now claims have a session of their own, which the outage leaves alone.
    rig.relay_one(&control).await;
    for outage in [Door::Shut, Door::Starting] {
        door.set(outage).await;
        assert_eq!(door.listeners(Flow::Close), 1);
        assert_eq!(rig.change().await, Gate::Unavailable);
        // The outage itself: 30 s and 10 s at full length.
        let lasts = if outage == Door::Shut { 3 } else { 1 } * scale().min(10);
        sleep(Duration::from_secs(lasts.into())).await;
        rig.nothing_more_was_told();
        if outage == Door::Shut {
            door.set(Door::Starting).await;
            sleep(Duration::from_secs(scale().min(10).into())).await;
        }
        door.set(Door::Open).await;
        let open = Instant::now();
        assert_eq!(rig.change().await, Gate::Available);
        println!("{outage:?}: back {:.1?} after the door opened", open.elapsed());
        for _ in 0..3 {
            rig.relay_one(&control).await;
        }
    }
    rig.nothing_more_was_told();
    rig.pump.drain().await;
}

/// A hole for the listener alone. The probe's interval and timeout are a second and two.
async fn swallowed(flow: Flow) {
    let db = common::database().await;
    let control = db.connect().await;
    let door = door().await;
    let mut rig = Rig::start(db.url(), &through(&door, &db), tight_without_gate()).await;
    rig.until(Gate::Available).await;
    // By now claims have a session of their own, which the cut leaves alone.
    rig.relay_one(&control).await;
    let (mut off, mut claimed) = (Duration::MAX, Duration::MAX);
    // A busy machine may be late by more than a little; not every time.
    for _ in 0..3 {
        // Nobody else comes in, so the gate stays off.
        door.set(Door::Shut).await;
        let cut = Instant::now();
        assert_eq!(door.listeners(flow), 1);
        assert_eq!(rig.change().await, Gate::Unavailable);
        off = off.min(cut.elapsed());
        // Without a gate the tight interval finds it.
        claimed = claimed.min(rig.relay_one(&control).await);
        door.set(Door::Open).await;
        assert_eq!(rig.change().await, Gate::Available, "by itself");
        rig.relay_one(&control).await;
        if off <= Duration::from_millis(3_300) && claimed <= Duration::from_millis(500) {
            break;
        }
    }
    println!("{flow:?}: off {off:.1?} after the cut, then a row is claimed after {claimed:.1?}");
    assert!(off <= Duration::from_millis(3_300), "{off:?}: interval and timeout of the probe are 3 s");
    assert!(claimed <= Duration::from_millis(500), "{claimed:?}: without a gate it polls every 100 ms");
    rig.nothing_more_was_told();
    rig.pump.drain().await;
}

#[tokio::test]
async fn a_listener_whose_network_swallows_everything_is_found_out_and_work_is_found_by_polling() {
    swallowed(Flow::Hold).await;
}

#[tokio::test]
async fn a_listener_that_can_speak_and_hears_nothing_is_found_out_too() {
    swallowed(Flow::HoldToClient).await;
}

#[tokio::test]
async fn a_pump_whose_every_session_is_swallowed_ends_its_drain_within_its_limit() {
    let db = common::database().await;
    let control = db.connect().await;
    let door = door().await;
    let mut options = woken_only();
    options.dispatch.drain_deadline_seconds = 2;
    let url = through(&door, &db);
    let mut rig = Rig::slow(&url, &url, options, Duration::from_millis(500)).await;
    rig.until(Gate::Available).await;
    store(&control, 5).await;
    rig.published().await;
    door.set(Door::Silent).await;
    door.all(Flow::Hold);
    let start = Instant::now();
    let report = tokio::time::timeout(Duration::from_mins(2), rig.pump.drain()).await.expect("it ends");
    println!("drained into a hole in {:.1?}: {report:?}", start.elapsed());
    assert!(!report.deregistered, "nobody could be told");
    // Two seconds for the handlers, five for results, and the limits of the calls that were under way.
    assert!(start.elapsed() < Duration::from_mins(1), "{:?}", start.elapsed());
}
