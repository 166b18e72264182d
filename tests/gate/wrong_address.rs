//! Direct addresses that are none: a pooler's, another database's.

use std::time::Duration;

use workpump::engine::instance::Gate;

use crate::common::{self, Bouncer};
use crate::rig::{Rig, store, tight_without_gate};

/// The gate says no, and why; work is found at the tight interval all the same.
async fn unavailable_because(url: &str, direct_url: &str, reason: &str) {
    let mut rig = Rig::start(url, direct_url, tight_without_gate()).await;
    rig.until(Gate::Unavailable).await;
    let report = rig.pump.gate();
    assert!(report.reason.as_deref().is_some_and(|told| told.contains(reason)), "{report:?}");
    let client = common::connect(url).await;
    let mut quickest = Duration::MAX;
    for _ in 0..5 {
        quickest = quickest.min(rig.relay_one(&client).await);
    }
    println!("without a gate ({reason}): a row is relayed after {quickest:.1?}");
    assert!(quickest <= Duration::from_millis(500), "{quickest:?}: it polls every 100 ms");
    // Many polls later it is still as quick: nothing has relaxed.
    tokio::time::sleep(Duration::from_secs(2)).await;
    store(&client, 1).await;
    rig.published().await;
    rig.nothing_more_was_told();
    rig.pump.drain().await;
}

#[tokio::test]
async fn a_direct_address_that_leads_to_a_pooler_is_no_gate_and_says_so() {
    let db = common::database().await;
    let Some(bouncer) = Bouncer::in_front_of(&common::shared().postgres, 8).await else { return };
    unavailable_because(db.url(), &bouncer.url(db.name()), "pooler").await;
}

#[tokio::test]
async fn a_direct_address_of_another_database_is_no_gate_and_says_so() {
    let (db, other) = (common::database().await, common::database().await);
    unavailable_because(db.url(), other.url(), "to the very database").await;
}
